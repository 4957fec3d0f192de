"""The pytest plugin of torchstrategy: tests run under every strategy.

The strategies run on one device, on simulated devices and on real ones.

It stands outside of the package, and imports it only where a test or an option asks for
it: pytest loads plugins before anything else, and torch takes seconds to import and
reads its environment when it is.

    --simulate-devices=N         gives the process the devices sim:0 to sim:<N-1>
    --cuda-alias                 makes "cuda" mean the simulated devices, from before
                                 test modules are imported
    --as-cuda                    besides, devices and tensors say that they are CUDA's
    --ranks=N                    runs each test in N ranks, as torchrun would
    --real-devices               runs on the machine's accelerators, too
    strategy,                    a test that takes the fixture runs once under each of
    @pytest.mark.strategies      the strategies
    @pytest.mark.ranks(N,
                     order=...)  a test runs in N ranks of a distributed program; it may
                                 take the fixture `rank`
    simulated_devices            the simulated devices; the test is skipped where there
                                 are none
    virtual_time,                the test runs in virtual time, and may not go beyond
    @pytest.mark.virtual_time    limits
    (...)
    --timeline=DIR               draws what happened in each failing test that runs in
                                 virtual time
    no_leaks and its parts       fail the test that leaves threads, scopes or settings
                                 of torch behind
"""

from __future__ import annotations

import argparse
import functools
import re
import unittest
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    import torchstrategy
    from torchstrategy.testing import VirtualTrace
    from torchstrategy.testing._topologies import Topology

_REAL: pytest.StashKey[list[torch.device]] = pytest.StashKey()
_TRACE: pytest.StashKey[VirtualTrace] = pytest.StashKey()
_MARK = "strategies"
_TIME_MARK = "virtual_time"
_RANKS_MARK = "ranks"
_OPTIONS_OF_MARK = ("replicas", "places")
_WHERE_FROM = {
    "sim": "there are no simulated devices: run pytest with --simulate-devices=4",
    "real": (
        "it is to run on real devices: run pytest with --real-devices, on a machine "
        "that has some"
    ),
}


# Options


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torchstrategy", "tests of code for several devices")
    group.addoption(
        "--simulate-devices",
        type=_count,
        metavar="N",
        help=(
            "simulate N devices, sim:0 to sim:<N-1>, and run tests that take the "
            "fixture `strategy` on them, too"
        ),
    )
    group.addoption(
        "--cuda-alias",
        action="store_true",
        help=(
            'let "cuda" mean the simulated devices, in all tests and while test '
            "modules are imported"
        ),
    )
    group.addoption(
        "--as-cuda",
        action="store_true",
        help=(
            "as --cuda-alias, and devices and tensors also say that they are CUDA's: "
            "device.type == 'cuda', tensor.is_cuda; without --simulate-devices there "
            "are 2, or one for each of --ranks"
        ),
    )
    group.addoption(
        "--ranks",
        type=_count,
        metavar="N",
        help=(
            "run each test in N ranks of a distributed program, as torchrun would, if "
            "it has no mark `ranks` itself"
        ),
    )
    group.addoption(
        "--real-devices",
        action="store_true",
        help=(
            "run tests that take the fixture `strategy` on the accelerators of this "
            "machine, too"
        ),
    )
    group.addoption(
        "--timeline",
        metavar="DIR",
        help=(
            "write a picture of what happened, an SVG file, for each failing test that "
            "runs in virtual time"
        ),
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of devices: 1 or more"
        )
    return int(text)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    # Conftest files may list them when imported.
    _find_devices(early_config, early_config.known_args_namespace)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_MARK}(*names, replicas=[1, 2, 3], places=['cpu', 'sim', 'real']): run the "
        "test, which takes the fixture `strategy`, once under each of these "
        "strategies, with each number of replicas, in each place",
    )
    config.addinivalue_line(
        "markers",
        f"{_TIME_MARK}(profile, *, max_seconds=None, max_syncs=None, min_overlap=None, "
        "max_bytes=None, shapes_only=False): run the test in virtual time, and fail it "
        "if it goes beyond a limit",
    )
    config.addinivalue_line(
        "markers",
        f"{_RANKS_MARK}(n, order=None): run the test in n ranks of a distributed "
        "program, which are threads of this process; the fixture `rank` is the rank, "
        "an int from 0; the order in which they go on may be 'reversed' or 'random:7'",
    )
    if _REAL not in config.stash:  # a conftest file has loaded this plugin
        _find_devices(config, config.option)


def _find_devices(config: pytest.Config, options: argparse.Namespace) -> None:
    # The real devices are looked for before simulated ones take their place.
    config.stash[_REAL] = _real_devices() if options.real_devices else []
    if options.as_cuda and options.simulate_devices is None:
        options.simulate_devices = max(options.ranks or 0, 2)
    if options.simulate_devices is not None:
        _simulate(options.simulate_devices, config.stash[_REAL])
    if options.as_cuda:
        _say_cuda(config)
    elif options.cuda_alias:
        _alias(config, options.simulate_devices)


def _say_cuda(config: pytest.Config) -> None:
    """Enters the block of the runner's `--as-cuda` until pytest ends."""
    from torchstrategy.testing import simulated_devices
    from torchstrategy.testing._runner.deep_alias import deep_alias
    from torchstrategy.testing._simulation.cuda_alias import Compiling

    if simulated_devices():
        alias = deep_alias()
        alias.__enter__()
        Compiling.backend = "aot_eager"  # as the runner's
        config.add_cleanup(functools.partial(_leave, alias))


def _leave(block: Any) -> None:
    block.__exit__(None, None, None)


def _alias(config: pytest.Config, count: int | None) -> None:
    """Enters the block of `cuda_alias` until pytest ends."""
    if count is None:
        raise pytest.UsageError(
            '--cuda-alias gives "cuda" the meaning of simulated devices, and there are '
            "none: add --simulate-devices=4."
        )
    from torchstrategy.testing import cuda_alias, simulated_devices

    # Where this torch cannot simulate any, the tests that need them are skipped.
    if simulated_devices():
        alias = cuda_alias()
        alias.__enter__()
        config.add_cleanup(lambda: alias.__exit__(None, None, None))


def _real_devices() -> list[torch.device]:
    from torchstrategy.testing._topologies import accelerators

    return accelerators()


def _simulate(count: int, real: list[torch.device]) -> None:
    """Simulates devices.

    Where this torch cannot, the tests that need them are skipped.
    """
    from torchstrategy.testing import _simulation

    if real:
        raise pytest.UsageError(
            f"--simulate-devices={count} and --real-devices exclude each other on a "
            f"machine with {_named(real)}: simulated devices take the place of torch's "
            "accelerator. Run pytest twice, once with each."
        )
    if _simulation.why_not_simulated() is None:
        try:
            _simulation.simulate_devices(count)
        except (RuntimeError, ValueError) as error:
            raise pytest.UsageError(str(error)) from error


def pytest_report_header(config: pytest.Config) -> str | None:
    parts = []
    if config.getoption("simulate_devices") is not None or config.getoption("as_cuda"):
        is_cuda = config.getoption("cuda_alias") or config.getoption("as_cuda")
        parts.append(
            _simulated_in_words() + (', which "cuda" means' if is_cuda else "")
        )
    if config.getoption("ranks") is not None:
        parts.append(f"each test in {config.getoption('ranks')} ranks")
    if config.getoption("real_devices"):
        parts.append(f"real devices: {_named(config.stash[_REAL])}")
    return f"torchstrategy: {'; '.join(parts)}" if parts else None


def _simulated_in_words() -> str:
    from torchstrategy import testing
    from torchstrategy._base.errors import plural

    devices = testing.simulated_devices()
    if not devices:
        return f"no simulated devices: {_why_not_simulated()}"
    return f"{plural(len(devices), 'simulated device')} ({devices[0]} to {devices[-1]})"


def _why_not_simulated() -> str:
    from torchstrategy.testing._simulation import why_not_simulated

    return why_not_simulated() or _WHERE_FROM["sim"]


def _named(devices: list[torch.device]) -> str:
    return ", ".join(map(str, devices)) or "none"


# Strategies


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "strategy_topology" in metafunc.fixturenames:
        parameters = [_parameter(topology) for topology in _topologies(metafunc)]
        metafunc.parametrize("strategy_topology", parameters, indirect=True)
    elif any(mark.name == _MARK for mark in metafunc.definition.own_markers):
        raise pytest.Collector.CollectError(
            f"{metafunc.definition.nodeid} is marked with `{_MARK}`, and does not take "
            "the fixture `strategy` of torchstrategy: give the test an argument "
            "`strategy`, or take the mark away. (A fixture or a parameter of that name "
            "that is the test's own takes its place.)"
        )


def _topologies(metafunc: pytest.Metafunc) -> list[Topology]:
    """What the nearest marks say; several decorators on one item add up.

    An item is a function, a class or a module.
    """
    from torchstrategy.testing._topologies import devices_here, topologies

    here = devices_here(metafunc.config.stash.get(_REAL, []))
    found = list(metafunc.definition.iter_markers_with_node(_MARK))
    marks = [mark for node, mark in found if node is found[0][0]] or [
        pytest.mark.strategies.mark
    ]
    try:
        asked = [
            topologies(*mark.args, **_checked(mark.kwargs), here=here)
            for mark in reversed(marks)
        ]
    except (TypeError, ValueError) as error:
        raise pytest.Collector.CollectError(
            f"{metafunc.definition.nodeid}, mark `{_MARK}`: {error}"
        ) from error
    return list(dict.fromkeys(topology for some in asked for topology in some))


def _checked(options: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in options.items():
        if name not in _OPTIONS_OF_MARK:
            raise TypeError(
                f"it does not take {name}={value!r}: choose from "
                f"{', '.join(_OPTIONS_OF_MARK)}."
            )
    return options


def _parameter(topology: Topology) -> Any:
    reason = "" if topology.is_here else _why_not_in(topology.place)
    marks = [pytest.mark.skip(reason=reason)] if reason else []
    return pytest.param(topology, id=str(topology), marks=marks)


def _why_not_in(place: str | None) -> str:
    return _why_not_simulated() if place == "sim" else _WHERE_FROM["real"]


@pytest.fixture
def strategy_topology(request: pytest.FixtureRequest) -> Topology:
    """Which strategy this test runs under.

    `str()` of it is its id, and `make()` makes another such strategy.
    """
    topology: Topology = request.param
    return topology


@pytest.fixture
def strategy(strategy_topology: Topology) -> torchstrategy.Strategy:
    """A new strategy.

    The test runs once under each of those that `@pytest.mark.strategies` names, or
    under all.
    """
    return strategy_topology.make()


@pytest.fixture
def simulated_devices() -> list[torch.device]:
    """The simulated devices, in order.

    The test is skipped where there are none; see --simulate-devices.
    """
    from torchstrategy import testing

    return testing.simulated_devices() or pytest.skip(_why_not_simulated())


# Virtual time


def pytest_itemcollected(item: pytest.Item) -> None:
    ranks = item.config.getoption("ranks")
    if (
        ranks is not None
        and isinstance(item, pytest.Function)
        and item.get_closest_marker(_RANKS_MARK) is None
    ):
        item.add_marker(pytest.mark.ranks(ranks))
    if item.get_closest_marker(_TIME_MARK) is not None and isinstance(
        item, pytest.Function
    ):
        # This fixture comes last: what other fixtures prepare takes no time.
        item.fixturenames.append("virtual_time")
    if item.get_closest_marker(_RANKS_MARK) is not None:
        _take_over(item)


@pytest.fixture
def virtual_time(request: pytest.FixtureRequest) -> Iterator[VirtualTrace]:
    """The trace of this test, which runs in virtual time.

    The test is skipped where there are no simulated devices.

    Its profile and its limits are those of `@pytest.mark.virtual_time`; without it,
    they are an H100 and none.
    """
    from torchstrategy import testing

    if not testing.simulated_devices():
        pytest.skip(_why_not_simulated())
    profile, shapes_only, _ = _of_time_mark(request.node)
    with testing.virtual_time(profile, shapes_only) as trace:
        request.node.stash[_TRACE] = trace
        yield trace


def _of_time_mark(item: pytest.Item) -> tuple[Any, bool, dict[str, Any]]:
    """The profile, whether shapes are all that is computed, and the limits."""
    mark = item.get_closest_marker(_TIME_MARK)
    if mark is None:
        return "H100-SXM", False, {}
    limits = dict(mark.kwargs)
    shapes_only = limits.pop("shapes_only", False)
    profile = limits.pop("profile", None) if not mark.args else mark.args[0]
    unknown = [
        f"{name}={value!r}" for name, value in limits.items() if name not in _LIMITS
    ]
    if unknown or len(mark.args) > 1 or profile is None:
        pytest.fail(
            f"The mark `{_TIME_MARK}` takes a profile, shapes_only and the limits "
            f"{', '.join(_LIMITS)}; got "
            f"{', '.join([*map(repr, mark.args), *unknown]) or 'nothing'}.",
            pytrace=False,
        )
    return profile, shapes_only, limits


_LIMITS = ("max_seconds", "max_syncs", "min_overlap", "max_bytes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if _TRACE not in item.stash:
        return (yield)
    from torchstrategy.testing._virtual_time.limits import Limits

    trace = item.stash[_TRACE]
    try:
        result = yield
        if broken := Limits(**_of_time_mark(item)[2]).broken(trace):
            pytest.fail(broken, pytrace=False)
        return result
    except BaseException:
        _draw(item, trace)
        raise
    finally:
        del item.stash[_TRACE]


def _draw(item: pytest.Item, trace: VirtualTrace) -> None:
    folder = item.config.getoption("timeline")
    if folder is None:
        return
    path = (
        Path(folder) / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', item.nodeid).strip('-')}.svg"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.save(path)
    item.add_report_section("call", "timeline", f"What happened is drawn in {path}.")


# Ranks


@pytest.fixture(scope="session")  # hypothesis refuses what is made anew for each test
def rank() -> int:
    """The rank of a test that is marked with `ranks(n)`.

    The test is called once in each, at the same time.
    """
    return 0  # `pytest_pyfunc_call` replaces it


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (
        not isinstance(item, pytest.Function)
        or item.get_closest_marker(_RANKS_MARK) is not None
    ):
        return
    found = item._fixtureinfo.name2fixturedefs.get("rank", ())
    if found and found[-1].func.__module__ == __name__:
        pytest.fail(
            f"{item.nodeid} takes the fixture `rank`, and is not marked: put "
            "@pytest.mark.ranks(4) above it.",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True)  # before all plugins that call tests
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    mark = pyfuncitem.get_closest_marker(_RANKS_MARK)
    if mark is None:
        return (yield)
    from torchstrategy.testing._ranks.marked_tests import in_ranks

    n, order = _ranks_of(pyfuncitem, mark)
    _refuse_output_of_the_process(pyfuncitem)
    # Of a test of hypothesis, each example runs in ranks: they have to draw the same.
    owner, name = pyfuncitem, "obj"
    if hasattr(getattr(pyfuncitem.obj, "hypothesis", None), "inner_test"):
        owner, name = pyfuncitem.obj.hypothesis, "inner_test"
    test = getattr(owner, name)
    setattr(owner, name, in_ranks(test, n, order))
    try:
        return (yield)
    finally:
        setattr(owner, name, test)


def _refuse_output_of_the_process(test: pytest.Function) -> None:
    for name in ("capfd", "capfdbinary", "capsysbinary"):
        if name in test.fixturenames:
            pytest.fail(
                f"{test.nodeid} is marked with `{_RANKS_MARK}`, and takes the fixture "
                f"`{name}`, which has what all ranks print, mixed: take `capsys`, "
                "which each rank has for itself.",
                pytrace=False,
            )


def _take_over(item: pytest.Item) -> None:
    """Replaces how pytest runs a marked test that is no function.

    Pytest itself would run such a test without ranks.
    """
    runs: Any = item
    if not isinstance(item, pytest.Function):
        runs.runtest = functools.partial(
            pytest.fail,
            f"{item.nodeid} is marked with `{_RANKS_MARK}`, and is no function of "
            "Python.",
            pytrace=False,
        )
    elif item.cls is not None and issubclass(item.cls, unittest.TestCase):
        runs.runtest = functools.partial(_run_test_case, item)


def _run_test_case(item: pytest.Function) -> None:
    from torchstrategy.testing._ranks.marked_tests import run_test_case

    method = getattr(item.cls, item.name)
    for name, instead in (
        (
            "is_hypothesis_test",
            "write it as a function, of which each example runs in ranks",
        ),
        ("__unittest_expecting_failure__", "mark it with @pytest.mark.xfail"),
    ):
        if getattr(method, name, False):
            pytest.fail(
                f"{item.nodeid} is marked with `{_RANKS_MARK}`, and is a method of a "
                f"unittest.TestCase with `{name}`: {instead}.",
                pytrace=False,
            )
    mark = item.get_closest_marker(_RANKS_MARK)
    assert mark is not None
    run_test_case(item.instance, item.name, *_ranks_of(item, mark))


def _ranks_of(test: pytest.Function, mark: pytest.Mark) -> tuple[int, Any]:
    """How many ranks a mark says, and the order in which they go on."""
    if (
        len(mark.args) != 1
        or not isinstance(mark.args[0], int)
        or mark.kwargs.keys() - {"order"}
    ):
        given = ", ".join(
            [
                *map(repr, mark.args),
                *(f"{name}={value!r}" for name, value in mark.kwargs.items()),
            ]
        )
        pytest.fail(
            f"{test.nodeid} is marked with `{_RANKS_MARK}({given})`: give the number "
            "of ranks, as in @pytest.mark.ranks(4), and, if they are to go on in "
            "another order, order='reversed' or order='random:7'.",
            pytrace=False,
        )
    return int(mark.args[0]), mark.kwargs.get("order")


# Leaks


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails the test that leaves threads, an open scope or another state of torch."""
    from torchstrategy.testing import _leaks

    with _leaks.no_leaks():
        yield


@pytest.fixture
def no_thread_leaks() -> Iterator[None]:
    """Fails the test that leaves threads behind.

    Threads of strategies that are still in use may stay.
    """
    from torchstrategy.testing import _leaks

    with _leaks.no_thread_leaks():
        yield


@pytest.fixture
def no_scope_leaks() -> Iterator[None]:
    """Fails the test that ends in the scope of another strategy than it began in."""
    from torchstrategy.testing import _leaks

    with _leaks.no_scope_leaks():
        yield


@pytest.fixture
def no_torch_state_leaks() -> Iterator[None]:
    """Fails the test that leaves a setting of torch changed.

    It looks at grad mode, autocast, default dtype, modes, hooks and more.
    """
    from torchstrategy.testing import _leaks

    with _leaks.no_torch_state_leaks():
        yield
