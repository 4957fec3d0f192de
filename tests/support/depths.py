"""How deep a run of the tests goes.

    pytest         QUICK: what somebody runs who has just cloned the repository
    pytest --ci    CHANGE: what must hold for a change; `.ci/run` runs it
    pytest --all   ALL: everything; a schedule runs it, and a release needs it

Each depth has the tests of the one before. `for_changes` and `for_releases` in
`conditions.py` mark what is not for the first depths at all. Of a test with parameters,
a quick run has one variant. A change has each case under one strategy, up to a number
of cases. Everything is each case under all strategies.

On simulated devices, the first depths have the tests whose subject is devices. Beside
them they have one test of each other file: see `SELDOM_ON_DEVICES`.

If you name a file or a test, or ask for tests by a word or by a mark, they run with all
parameters.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Mapping, Sequence

import pytest

from topologies import ALONE, MAKERS, TOPOLOGIES


class Depth(enum.IntEnum):
    """How deep a run goes."""

    QUICK = 0
    CHANGE = 1
    ALL = 2


# How many variants of a test with parameters run. Most slow tests start processes.
MOST_VARIANTS = {Depth.QUICK: 1, Depth.CHANGE: 12}
MOST_VARIANTS_OF_SLOW_TESTS = {Depth.QUICK: 1, Depth.CHANGE: 2}
# Tests whose subject is not devices. Most of them have run on the CPU before. For a
# change, devices see all tests of `FOR_A_CHANGE`, each with one variant.
SELDOM_ON_DEVICES = ("tests/contract", "tests/unit", "tests/gpu", "tests/equality")
FOR_A_CHANGE = ("tests/equality",)
# The parameters that are names of strategies, and those names.
PARAMETERS = {"strategy", "several", "make", "anyone", "chosen", "topology", "name"}
STRATEGIES = {*TOPOLOGIES, *MAKERS}

_DEPTH: pytest.StashKey[Depth] = pytest.StashKey()
_of_this_run = Depth.QUICK


def add_options(parser: pytest.Parser) -> None:
    """Adds the options that say how deep a run goes."""
    group = parser.getgroup("torchstrategy's own tests")
    group.addoption("--ci", action="store_true", help="run what a change must pass")
    group.addoption("--all", action="store_true", help="run everything")


def begin(config: pytest.Config) -> None:
    """Notes how deep this run goes."""
    global _of_this_run
    _of_this_run = _depth_of_run(config)


def current_depth() -> Depth:
    """How deep this run goes."""
    return _of_this_run


def depth_of(item: pytest.Item) -> Depth:
    """The first depth at which a test runs."""
    return item.stash[_DEPTH]


def assign_depths(items: Sequence[pytest.Item], on_devices: bool) -> None:
    """Says of each test at which depth it runs first."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        item.stash[_DEPTH] = Depth.ALL
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    seldom = _first_depths_on_devices(tests) if on_devices else {}
    for name, variants in tests.items():
        most = MOST_VARIANTS
        if variants[0].get_closest_marker("slow") is not None:
            most = MOST_VARIANTS_OF_SLOW_TESTS
        for depth in (Depth.CHANGE, Depth.QUICK):
            if depth < seldom.get(name, Depth.QUICK):
                continue
            count = 1 if name in seldom else most[depth]
            marked = [item for item in variants if _marked_depth(item) <= depth]
            for item in _spread(_one_of_each_case(marked), count, name):
                item.stash[_DEPTH] = depth


def _depth_of_run(config: pytest.Config) -> Depth:
    """How deep a run goes: as deep as it says, and all the way for what is named."""
    if config.getoption("--all"):
        return Depth.ALL
    if config.getoption("--ci"):
        return Depth.CHANGE
    names_tests = any(".py" in argument for argument in config.args)
    asks_again = config.getoption("lf", False) or config.getoption("failedfirst", False)
    asks = config.option.keyword or config.option.markexpr or asks_again
    return Depth.ALL if names_tests or asks else Depth.QUICK


def _marked_depth(item: pytest.Item) -> Depth:
    """The deepest of what marks of a test, its file and its parameters say."""
    depths = [Depth[mark.args[0]] for mark in item.iter_markers("depth")]
    return max(depths, default=Depth.QUICK)


# On simulated devices


def _first_depths_on_devices(
    tests: Mapping[str, Sequence[pytest.Item]],
) -> dict[str, Depth]:
    """The first depth of each test that devices seldom see: one of a file is quick."""
    depths: dict[str, Depth] = {}
    of_file: dict[str, list[str]] = {}
    for name, (item, *_) in tests.items():
        if not name.startswith(SELDOM_ON_DEVICES) or _needs_devices(item):
            continue
        is_for_a_change = name.startswith(FOR_A_CHANGE)
        depths[name] = Depth.CHANGE if is_for_a_change else Depth.ALL
        if _marked_depth(item) is Depth.QUICK and not _is_skipped(item):
            of_file.setdefault(name.partition("::")[0], []).append(name)
    for file, names in of_file.items():
        depths[names[_number_of(file) % len(names)]] = Depth.QUICK
    return depths


def _needs_devices(item: pytest.Item) -> bool:
    """Whether a test is skipped where there are no devices, and is not skipped here."""
    reasons = [
        str(mark.kwargs.get("reason"))
        for mark in item.iter_markers("skipif")
        if not mark.args[0]
    ]
    return any("--simulate-devices" in reason for reason in reasons)


def _is_skipped(item: pytest.Item) -> bool:
    return any(mark.args[0] for mark in item.iter_markers("skipif"))


# Of several variants


def _one_of_each_case(variants: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """One variant of those that differ in their strategy only.

    It is one with several replicas if there is any. Which one it is differs from case
    to case, so that all strategies are seen. One more variant has one replica.
    """
    of_case: dict[str, list[pytest.Item]] = {}
    for item in variants:
        of_case.setdefault(_case_of(item), []).append(item)
    chosen: list[pytest.Item] = []
    for case, alike in of_case.items():
        several = [item for item in alike if not _has_one_replica(item)] or alike
        chosen.append(several[_number_of(case) % len(several)])
    alone = [item for item in variants if _has_one_replica(item)]
    if alone and not any(_has_one_replica(item) for item in chosen):
        chosen.append(alone[_number_of(alone[0].nodeid) % len(alone)])
    return chosen


def _spread(
    variants: Sequence[pytest.Item], count: int, name: str
) -> Sequence[pytest.Item]:
    """At most so many variants of a test, spread evenly over all of them.

    They begin at a place that depends on the name of the test, so that not all tests
    run under the same strategies.
    """
    if len(variants) <= count:
        return variants
    first = _number_of(name) % len(variants)
    turned = [*variants[first:], *variants[:first]]
    return [turned[i * len(turned) // count] for i in range(count)]


def _strategies_of(item: pytest.Item) -> set[str]:
    """The names of strategies that are parameters of a variant."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    values = [value for name, value in parameters.items() if name in PARAMETERS]
    names = [value for value in values if isinstance(value, str)]
    return {name for name in names if name in STRATEGIES}


def _has_one_replica(item: pytest.Item) -> bool:
    return bool(_strategies_of(item) & {*ALONE})


def _case_of(item: pytest.Item) -> str:
    """What the name of a variant says beside its strategy."""
    case = item.nodeid
    for name in sorted(_strategies_of(item), key=len, reverse=True):
        case = case.replace(name, "")
    return case


def _number_of(text: str) -> int:
    """A number that is the same in each process, unlike a hash."""
    return zlib.crc32(text.encode())
