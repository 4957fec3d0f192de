"""How deep a run of the tests goes.

    pytest         QUICK: what somebody runs who has just cloned the repository
    pytest --ci    CHANGE: what must hold for a change; `.ci/run` runs it
    pytest --all   ALL: everything; a schedule runs it, and a release needs it

Each depth has the tests of the one before. `for_changes` and `for_releases` in
`conditions.py` mark what is not for the first depths at all. Of a test with parameters,
a quick run has one variant. A change has each case once, under one kind of strategy, up
to a number of cases; everything is each case under all strategies.

On simulated devices, the first depths have the tests whose subject is devices, those
of `tests/simulated`. They have one test of each other file, too: `SELDOM_ON_DEVICES`.

If you name a test with `::`, or ask for tests by a word, it runs with all parameters.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Mapping, Sequence

import pytest

from topologies import MAKERS, TOPOLOGIES


class Depth(enum.IntEnum):
    """How deep a run goes."""

    QUICK = 0
    CHANGE = 1
    ALL = 2


# How many variants of a test with parameters run; most slow tests start processes.
VARIANTS = {Depth.QUICK: 1, Depth.CHANGE: 12}
VARIANTS_OF_SLOW_TESTS = {Depth.QUICK: 1, Depth.CHANGE: 2}
# Where replicas run on the CPU or on devices alike, and most tests have run on the CPU
# before. For a change, devices see all tests of these folders, each with one parameter.
SELDOM_ON_DEVICES = ("tests/contract", "tests/unit", "tests/gpu", "tests/equality")
FOR_A_CHANGE = ("tests/equality",)
# Of the strategies that the fixtures give, one of each kind: with one replica, with
# replicas that share the memory of parameters, and with replicas that have their own.
KINDS = {"one_device", "central_3", "mirrored_4", "aliased", "mirrored"}
STRATEGIES = {*TOPOLOGIES, *MAKERS}

_DEPTH: pytest.StashKey[Depth] = pytest.StashKey()
_of_this_run = Depth.QUICK


def add_options(parser: pytest.Parser) -> None:
    """Adds the options that say how deep a run goes."""
    group = parser.getgroup("torchstrategy's own tests")
    group.addoption("--ci", action="store_true", help="run what a change must pass")
    group.addoption("--all", action="store_true", help="run everything, in an hour")


def begin(config: pytest.Config) -> None:
    """Notes how deep this run goes."""
    global _of_this_run
    _of_this_run = depth_of_run(config)


def depth_of_run(config: pytest.Config) -> Depth:
    """How deep a run goes: as deep as it says, and all the way for what is named."""
    names_tests = any("::" in argument for argument in config.args)
    if config.getoption("--all") or config.option.keyword or names_tests:
        return Depth.ALL
    return Depth.CHANGE if config.getoption("--ci") else Depth.QUICK


def current_depth() -> Depth:
    """How deep this run goes."""
    return _of_this_run


def depth_of(item: pytest.Item) -> Depth:
    """The first depth at which a test runs."""
    return item.stash[_DEPTH]


def assign_depths(items: Sequence[pytest.Item], on_devices: bool) -> None:
    """Says of each test at which depth it runs first."""
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        item.stash[_DEPTH] = Depth.ALL
        variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    first_depths = _first_depths_on_devices(variants) if on_devices else {}
    for name, of_one in variants.items():
        is_slow = of_one[0].get_closest_marker("slow") is not None
        counts = VARIANTS_OF_SLOW_TESTS if is_slow else VARIANTS
        for depth in (Depth.CHANGE, Depth.QUICK):
            if depth < first_depths.get(name, depth):
                continue
            candidates = [item for item in of_one if _marked_depth(item) <= depth]
            cases = _one_of_each_case(_of_each_kind(candidates))
            count = 1 if name in first_depths else counts[depth]
            for item in _spread(cases, count, name):
                item.stash[_DEPTH] = depth


def _first_depths_on_devices(
    variants: Mapping[str, Sequence[pytest.Item]],
) -> dict[str, Depth]:
    """The first depth of each test that devices seldom see: one of a file is quick."""
    of_file: dict[str, list[str]] = {}
    depths: dict[str, Depth] = {}
    for name, of_one in variants.items():
        if not name.startswith(SELDOM_ON_DEVICES):
            continue
        is_for_a_change = name.startswith(FOR_A_CHANGE)
        depths[name] = Depth.CHANGE if is_for_a_change else Depth.ALL
        if of_one[0].get_closest_marker("skipif") is None:
            of_file.setdefault(name.partition("::")[0], []).append(name)
    for file, names in of_file.items():
        depths[names[zlib.crc32(file.encode()) % len(names)]] = Depth.QUICK
    return depths


def _marked_depth(item: pytest.Item) -> Depth:
    """The deepest of what marks of a test, its file and its parameters say."""
    depths = [Depth[mark.args[0]] for mark in item.iter_markers("depth")]
    return max(depths, default=Depth.QUICK)


def _of_each_kind(variants: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """The variants of one strategy of each kind, or all if no fixture gives any."""
    some = [item for item in variants if _strategies_of(item) <= KINDS]
    return some or variants


def _one_of_each_case(variants: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """One variant of those that differ in their strategy only.

    Which one it is differs from case to case, so that all strategies are seen.
    """
    of_case: dict[str, list[pytest.Item]] = {}
    for item in variants:
        of_case.setdefault(_case_of(item), []).append(item)
    chosen = []
    for case, alike in of_case.items():
        chosen.append(alike[zlib.crc32(case.encode()) % len(alike)])
    return chosen


def _strategies_of(item: pytest.Item) -> set[str]:
    """The names of strategies that are parameters of a variant."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    names = [value for value in parameters.values() if isinstance(value, str)]
    return {name for name in names if name in STRATEGIES}


def _case_of(item: pytest.Item) -> str:
    """What the name of a variant says beside its strategy."""
    case = item.nodeid
    for name in _strategies_of(item):
        case = case.replace(name, "")
    return case


def _spread(
    variants: Sequence[pytest.Item], count: int, name: str
) -> Sequence[pytest.Item]:
    """At most so many variants of a test, spread evenly over all of them.

    They begin at a place that depends on the name of the test, so that not all tests
    run under the same strategies.
    """
    if len(variants) <= count:
        return variants
    first = zlib.crc32(name.encode()) % len(variants)
    turned = [*variants[first:], *variants[:first]]
    return [turned[i * len(turned) // count] for i in range(count)]
