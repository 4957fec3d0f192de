"""The pytest plugin, as a user meets it.

Pytest is run on small projects, each in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchstrategy
from conditions import for_changes, for_releases
from processes import LEAN, NO_ACCELERATOR, python
from torchstrategy.testing._topologies import devices_here, topologies

STRICTLY = ("-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", "-W", "error")


def project(folder: Path, **files: str) -> Path:
    """A folder with these modules; `a__b` is b in the folder a."""
    for name, text in files.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return folder


def pytest_on(folder: Path, *arguments: str) -> str:
    """What pytest prints, run as strictly as it can be on a project.

    What it exits with is the last line.
    """
    done = python(*STRICTLY, *arguments, folder=folder, **NO_ACCELERATOR)
    return f"{done.stdout}{done.stderr}\nexit {done.returncode}"


def outcomes(output: str) -> dict[str, str]:
    """The id of each test and how it ended, as `pytest -v` prints them."""
    lines = re.finditer(
        r"^\S+?::(\S+) (PASSED|FAILED|ERROR|SKIPPED)", output, re.MULTILINE
    )
    return {line[1]: line[2].lower() for line in lines}


def header(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("torchstrategy:")]


# Inert unless used


@for_changes
def test_a_project_that_does_not_use_the_plugin_does_not_notice_it(
    tmp_path: Path,
) -> None:
    project(
        tmp_path,
        conftest="""
            import sys

            def pytest_unconfigure():
                print("imported:", sorted({"numpy", "torch", "torchstrategy"} & set(sys.modules)))
        """,  # noqa: E501
        test_plain="""
            def test_plain(request):
                assert request.fixturenames == ["request"]
        """,
    )
    new = [sys.executable, *STRICTLY, "-s"]  # an interpreter that has imported nothing
    done = subprocess.run(
        new,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **LEAN},
        timeout=300,
    )
    output = done.stdout + done.stderr
    assert "1 passed" in output and done.returncode == 0
    assert "imported: []" in output
    without_the_list_of_plugins = re.sub(
        r"^plugins: .*$", "", output, flags=re.MULTILINE
    )
    assert "torchstrategy" not in without_the_list_of_plugins.replace(
        "imported: []", ""
    )
    assert "warning" not in output


# The strategies that a test runs under

STRATEGIES = {
    "conftest": """
        import pytest

        import torchstrategy.testing

        DEVICES = torchstrategy.testing.simulated_devices()

        @pytest.fixture
        def devices_of_conftest():
            return DEVICES
    """,
    "test_strategies": """
        import pytest
        import torch

        import torchstrategy

        def test_all(strategy):
            assert isinstance(strategy, torchstrategy.Strategy)

        def test_new(strategy, strategy_topology):
            one_more = strategy_topology.make()
            assert (one_more is strategy) is (str(strategy_topology) == "default")
            assert one_more.num_replicas_in_sync == strategy.num_replicas_in_sync

        @pytest.mark.strategies("central", replicas=[1, 4])
        def test_counts(strategy, request):
            assert f"-{strategy.num_replicas_in_sync}-" in request.node.name

        @pytest.mark.strategies("central", replicas=[2])
        @pytest.mark.strategies("one_device", "default")
        def test_stacked(strategy):
            pass

        @pytest.mark.strategies("one_device", "central", replicas=(3,), places=["sim", "real"])
        def test_devices(strategy):
            seen = strategy.run(lambda: str(torch.empty(1).device))
            seen = strategy.experimental_local_results(seen)
            assert seen == ("sim:0", "sim:1", "sim:0")[: len(seen)]

        @pytest.mark.strategies("default")
        class TestMarkedClass:
            def test_class(self, strategy):
                pass

            @pytest.mark.strategies("one_device", places=["cpu"])
            def test_nearest(self, strategy):
                pass

            def test_other(self):
                pass

        @pytest.mark.parametrize("number", [1, 2])
        @pytest.mark.strategies("default")
        def test_product(number, strategy):
            pass

        def test_simulated(simulated_devices, devices_of_conftest):
            assert simulated_devices == devices_of_conftest
            assert [str(device) for device in simulated_devices] == ["sim:0", "sim:1"]
    """,  # noqa: E501
    "own__conftest": """
        import pytest

        @pytest.fixture
        def strategy():
            return "mine"
    """,
    "own__test_own": """
        import pytest

        def test_own(strategy):
            assert strategy == "mine"

        @pytest.mark.parametrize("strategy", ["given"])
        def test_given(strategy):
            assert strategy == "given"
    """,
    "own__test_extended": """
        import pytest

        @pytest.fixture
        def strategy(strategy_topology):
            return strategy_topology.make()

        @pytest.mark.strategies("one_device", places=["cpu"])
        def test_extended(strategy):
            assert strategy.num_replicas_in_sync == 1
    """,
}
EVERYWHERE = {
    "test_all[default]": "passed",
    "test_all[one_device-cpu]": "passed",
    "test_all[central-1-cpu]": "passed",
    "test_all[central-2-cpu]": "passed",
    "test_all[central-3-cpu]": "passed",
    "test_all[mirrored-1-cpu]": "passed",
    "test_all[mirrored-2-cpu]": "passed",
    "test_all[mirrored-3-cpu]": "passed",
    "test_new[default]": "passed",
    "test_new[one_device-cpu]": "passed",
    "test_new[central-1-cpu]": "passed",
    "test_new[central-2-cpu]": "passed",
    "test_new[central-3-cpu]": "passed",
    "test_new[mirrored-1-cpu]": "passed",
    "test_new[mirrored-2-cpu]": "passed",
    "test_new[mirrored-3-cpu]": "passed",
    "test_counts[central-1-cpu]": "passed",
    "test_counts[central-4-cpu]": "passed",
    "test_stacked[central-2-cpu]": "passed",
    "test_stacked[one_device-cpu]": "passed",
    "test_stacked[default]": "passed",
    "test_devices[one_device-real]": "skipped",
    "test_devices[central-real]": "skipped",
    "TestMarkedClass::test_class[default]": "passed",
    "TestMarkedClass::test_nearest[one_device-cpu]": "passed",
    "TestMarkedClass::test_other": "passed",
    "test_product[default-1]": "passed",
    "test_product[default-2]": "passed",
    "test_own": "passed",
    "test_given[given]": "passed",
    "test_extended[one_device-cpu]": "passed",
}
WITHOUT_SIMULATION = {
    "test_devices[one_device-sim]": "skipped",
    "test_devices[central-sim]": "skipped",
    "test_simulated": "skipped",
}
WITH_SIMULATION = {
    "test_all[one_device-sim]": "passed",
    "test_all[central-1-sim]": "passed",
    "test_all[central-2-sim]": "passed",
    "test_all[central-3-sim]": "passed",
    "test_all[mirrored-1-sim]": "passed",
    "test_all[mirrored-2-sim]": "passed",
    "test_all[mirrored-3-sim]": "passed",
    "test_new[one_device-sim]": "passed",
    "test_new[central-1-sim]": "passed",
    "test_new[central-2-sim]": "passed",
    "test_new[central-3-sim]": "passed",
    "test_new[mirrored-1-sim]": "passed",
    "test_new[mirrored-2-sim]": "passed",
    "test_new[mirrored-3-sim]": "passed",
    "test_counts[central-1-sim]": "passed",
    "test_counts[central-4-sim]": "passed",
    "test_stacked[central-2-sim]": "passed",
    "test_stacked[one_device-sim]": "passed",
    "test_devices[one_device-sim]": "passed",
    "test_devices[central-3-sim]": "passed",
    "test_simulated": "passed",
}


@for_changes
@pytest.mark.slow
def test_a_test_runs_under_every_strategy_on_the_cpu(tmp_path: Path) -> None:
    output = pytest_on(project(tmp_path, **STRATEGIES), "-v", "-rs")
    assert outcomes(output) == EVERYWHERE | WITHOUT_SIMULATION, output
    assert header(output) == []
    assert (
        "there are no simulated devices: run pytest with --simulate-devices=4" in output
    )
    assert "run pytest with --real-devices, on a machine that has some" in output


@for_changes
@pytest.mark.slow
def test_a_test_runs_under_every_strategy_on_simulated_devices_too(
    tmp_path: Path,
) -> None:
    output = pytest_on(
        project(tmp_path, **STRATEGIES), "-v", "--simulate-devices=2", "--real-devices"
    )
    assert outcomes(output) == EVERYWHERE | WITH_SIMULATION
    assert header(output) == [
        "torchstrategy: 2 simulated devices (sim:0 to sim:1); real devices: none"
    ]


@for_changes
@pytest.mark.slow
def test_where_devices_cannot_be_simulated_the_tests_that_need_them_are_skipped(
    tmp_path: Path,
) -> None:
    project(
        tmp_path,
        old_torch="""
            from torchstrategy.testing import _simulation

            _simulation.register_python_backend = None
        """,
        **STRATEGIES,
    )
    output = pytest_on(tmp_path, "-v", "-rs", "-p", "old_torch", "--simulate-devices=2")
    reason = (
        "devices are simulated with torch 2.10 or newer, and this is "
        f"{torch.__version__}."
    )
    assert outcomes(output) == EVERYWHERE | WITHOUT_SIMULATION
    assert header(output) == [f"torchstrategy: no simulated devices: {reason}"]
    assert (
        len(re.findall(rf"^SKIPPED .* {re.escape(reason)}$", output, re.MULTILINE)) == 2
    )


TWO_GPUS = """
    import torch

    from torchstrategy.testing import _topologies

    _topologies.local_accelerators = lambda: [torch.device("cuda", 0), torch.device("cuda", 1)]
"""  # noqa: E501


@for_changes
@pytest.mark.slow
def test_real_devices_are_named_by_their_type(tmp_path: Path) -> None:
    project(tmp_path, two_gpus=TWO_GPUS, **STRATEGIES)
    output = pytest_on(
        tmp_path,
        "-p",
        "two_gpus",
        "--real-devices",
        "--collect-only",
        "-k",
        "test_devices or test_all",
    )
    assert header(output) == ["torchstrategy: real devices: cuda:0, cuda:1"]
    assert re.findall(r"<Function (.*)>", output) == [
        "test_all[default]",
        "test_all[one_device-cpu]",
        "test_all[one_device-cuda]",
        *(
            f"test_all[{kind}-{count}-{place}]"
            for kind in ("central", "mirrored")
            for place in ("cpu", "cuda")
            for count in (1, 2, 3)
        ),
        "test_devices[one_device-sim]",
        "test_devices[one_device-cuda]",
        "test_devices[central-sim]",
        "test_devices[central-3-cuda]",
    ]


@for_changes
@pytest.mark.slow
def test_a_conftest_file_may_load_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    files = {**STRATEGIES, "conftest": 'pytest_plugins = ["pytest_torchstrategy"]'}
    output = pytest_on(
        project(tmp_path, **files), "-v", "--simulate-devices=2", "-k", "test_all"
    )
    assert header(output) == ["torchstrategy: 2 simulated devices (sim:0 to sim:1)"]
    both = EVERYWHERE | WITH_SIMULATION
    assert outcomes(output) == {
        name: outcome for name, outcome in both.items() if name.startswith("test_all")
    }


# What is refused


@pytest.mark.parametrize("count", ["0", "-1", "two", "2.5", ""])
def test_a_number_of_devices_that_is_none_is_a_usage_error(
    tmp_path: Path, count: str
) -> None:
    output = pytest_on(tmp_path, f"--simulate-devices={count}")
    assert (
        f"argument --simulate-devices: '{count}' is not a number of devices: 1 or more"
        in output
    )
    assert output.endswith(f"exit {pytest.ExitCode.USAGE_ERROR:d}")


@for_changes
@pytest.mark.slow
def test_what_simulate_devices_refuses_is_a_usage_error(tmp_path: Path) -> None:
    output = pytest_on(tmp_path, "--simulate-devices=1000")
    assert "ERROR: simulate_devices(1000): simulate 1 to 64 devices." in output
    assert output.endswith(f"exit {pytest.ExitCode.USAGE_ERROR:d}")


@for_changes
@pytest.mark.slow
def test_real_devices_cannot_be_used_beside_simulated_ones(tmp_path: Path) -> None:
    project(tmp_path, two_gpus=TWO_GPUS)
    output = pytest_on(
        tmp_path, "-p", "two_gpus", "--simulate-devices=4", "--real-devices"
    )
    assert (
        "ERROR: --simulate-devices=4 and --real-devices exclude each other on a "
        "machine with cuda:0, cuda:1: simulated devices take the place of torch's "
        "accelerator. Run pytest twice, once with each."
    ) in output
    assert output.endswith(f"exit {pytest.ExitCode.USAGE_ERROR:d}")


@for_changes
@pytest.mark.slow
def test_a_mark_that_cannot_be_used_is_an_error_that_names_the_test(
    tmp_path: Path,
) -> None:
    project(
        tmp_path,
        test_name="""
            import pytest

            @pytest.mark.strategies("centrul")
            def test_x(strategy):
                pass
        """,
        test_option="""
            import pytest

            @pytest.mark.strategies("central", replica=[2])
            def test_x(strategy):
                pass
        """,
        test_fixture="""
            import pytest

            @pytest.mark.strategies("central")
            def test_x():
                pass
        """,
    )
    output = pytest_on(tmp_path)
    choices = "choose from 'default', 'one_device', 'central', 'mirrored'."
    assert (
        "test_name.py::test_x, mark `strategies`: 'centrul' is not a strategy: "
        f"{choices}" in output
    )
    assert (
        "test_option.py::test_x, mark `strategies`: it does not take replica=[2]: "
        "choose from replicas, places."
    ) in output
    assert (
        "test_fixture.py::test_x is marked with `strategies`, and does not take the "
        "fixture `strategy`" in output
    )
    assert "3 errors" in output and "Traceback" not in output


CPU = devices_here([])


@pytest.mark.parametrize(
    ("names", "options", "error", "message"),
    [
        (
            ["centrul"],
            {},
            ValueError,
            (
                "'centrul' is not a strategy: choose from 'default', 'one_device', "
                "'central', 'mirrored'"
            ),
        ),
        ([2], {}, ValueError, "2 is not a strategy"),
        (
            [],
            {"replicas": [0]},
            ValueError,
            "0 is not a number of replicas: it is 1 or more",
        ),
        ([], {"replicas": [-2]}, ValueError, "-2 is not a number of replicas"),
        (
            [],
            {"replicas": []},
            ValueError,
            r"replicas=\[\] runs the test with no replica",
        ),
        (
            [],
            {"replicas": [True]},
            TypeError,
            "True is not a number of replicas: it is a bool, not an int",
        ),
        (
            [],
            {"replicas": [2.0]},
            TypeError,
            "2.0 is not a number of replicas: it is a float, not an int",
        ),
        (
            [],
            {"replicas": 2},
            TypeError,
            r"replicas=2 is not a list of counts: write replicas=\[1, 2, 4\]",
        ),
        ([], {"replicas": "2"}, TypeError, "replicas='2' is not a list of counts"),
        (
            ["default"],
            {"replicas": [2]},
            ValueError,
            r"replicas=\[2\] says nothing to default, which has one replica",
        ),
        (
            [],
            {"places": ["gpu"]},
            ValueError,
            "'gpu' is not a place: choose from 'cpu', 'sim', 'real'",
        ),
        (
            [],
            {"places": "cpu"},
            TypeError,
            r"'cpu' is a str, and not a list of names: write \['cpu'\]",
        ),
        ([], {"places": []}, ValueError, r"places=\[\] leaves nowhere to run"),
        (
            ["default"],
            {"places": ["cpu"]},
            ValueError,
            r"places=\['cpu'\] says nothing to default",
        ),
    ],
)
def test_what_a_mark_may_not_say_is_refused(
    names: list[Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        topologies(*names, **options, here=CPU)


def test_the_default_strategy_is_not_had_in_the_scope_of_another() -> None:
    (default,) = topologies("default", here=CPU)
    with (
        torchstrategy.OneDeviceStrategy("cpu").scope(),
        pytest.raises(
            RuntimeError, match=r"this thread is in that of .*OneDeviceStrategy"
        ),
    ):
        default.make()
    assert default.make() is torchstrategy.get_strategy()


@given(
    st.lists(st.sampled_from(["default", "one_device", "central"]), min_size=1),
    st.lists(st.integers(1, 5), min_size=1),
    st.integers(1, 4),
)
def test_each_strategy_has_one_name_and_its_replicas_go_round_the_devices(
    names: Iterable[str], counts: list[int], device_count: int
) -> None:
    devices = [torch.device("cpu", index) for index in range(device_count)]
    replicas = {"replicas": counts} if "central" in names else {}
    found = topologies(*names, **replicas, here={"cpu": devices})
    assert len({str(topology) for topology in found}) == len(found)
    assert {topology.kind for topology in found} == set(names)
    central = [topology.devices for topology in found if topology.kind == "central"]
    assert {len(each) for each in central} == (
        set(counts) if "central" in names else set()
    )
    assert all(
        each == tuple(devices[r % device_count] for r in range(len(each)))
        for each in central
    )


# Leaks


@for_releases
@pytest.mark.slow
def test_cuda_means_simulated_devices_before_a_test_module_is_imported(
    tmp_path: Path,
) -> None:
    project(
        tmp_path,
        conftest="""
            import torch
            EARLY = torch.ones(1, device="cuda:1")
        """,
        test_it="""
            import pytest, torch
            from conftest import EARLY

            GPUS = torch.cuda.device_count()
            WEIGHT = torch.ones(2).cuda()

            @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
            @pytest.mark.parametrize("index", range(GPUS))
            def test_on_each(index):
                assert torch.ones(2, device=f"cuda:{index}").get_device() == index
                assert (WEIGHT.to("cuda:1") + EARLY).get_device() == 1
        """,
    )
    output = pytest_on(tmp_path, "-v", "--simulate-devices=2", "--cuda-alias")
    assert outcomes(output) == {
        "test_on_each[0]": "passed",
        "test_on_each[1]": "passed",
    }
    assert header(output) == [
        'torchstrategy: 2 simulated devices (sim:0 to sim:1), which "cuda" means'
    ]
    output = pytest_on(tmp_path, "--cuda-alias")
    assert (
        '--cuda-alias gives "cuda" the meaning of simulated devices, and there are '
        "none: add" in output
    )


@for_changes
def test_a_marked_test_runs_in_ranks(tmp_path: Path) -> None:
    project(
        tmp_path,
        test_it="""
            import pytest, torch
            import torch.distributed as dist

            met = []

            @pytest.mark.ranks(3)
            @pytest.mark.parametrize("start", [1, 10])
            def test_a_sum(rank, start, tmp_path):
                dist.init_process_group("nccl")
                total = torch.tensor([start + rank])
                dist.all_reduce(total)
                met.append(rank)
                assert total.item() == 3 * start + 3 and tmp_path.exists()

            def test_all_of_them_ran():
                assert sorted(met) == [0, 0, 1, 1, 2, 2]

            @pytest.mark.ranks(2)
            def test_without_the_rank():
                assert dist.is_available()

            @pytest.mark.ranks(2)
            def test_that_fails_in_one(rank):
                assert rank == 0

            def test_without_the_mark(rank): ...

            @pytest.mark.ranks("many")
            def test_with_a_word(rank): ...

            order = []

            @pytest.mark.ranks(3, order="reversed")
            def test_in_another_order(rank):
                order.append(rank)
                assert rank > 0 or order == [2, 1, 0]
        """,
    )
    output = pytest_on(tmp_path, "-v")
    assert outcomes(output) == {
        "test_a_sum[1]": "passed",
        "test_a_sum[10]": "passed",
        "test_all_of_them_ran": "passed",
        "test_without_the_rank": "passed",
        "test_that_fails_in_one": "failed",
        "test_without_the_mark": "error",
        "test_with_a_word": "failed",
        "test_in_another_order": "passed",
    }
    assert "raised in rank 1 of 2" in output
    assert (
        "takes the fixture `rank`, and is not marked: put @pytest.mark.ranks(4) above "
        "it." in output
    )
    assert "is marked with `ranks('many')`: give the number of ranks" in output


@for_changes
def test_all_tests_run_in_ranks_and_see_cuda_if_they_are_told_to(
    tmp_path: Path,
) -> None:
    project(
        tmp_path,
        test_it="""
            import unittest
            import pytest, torch
            import torch.distributed as dist

            devices = pytest.mark.parametrize("device", [f"cuda:{i}" for i in range(torch.cuda.device_count())])

            @devices
            def test_on_each(device):
                x = torch.ones(2, device=device)
                assert x.is_cuda and str(x.device) == device and x.device.type == "cuda"

            def test_in_ranks(rank):
                dist.init_process_group("nccl")
                x = torch.ones(1).cuda()
                dist.all_reduce(x)
                assert x.item() == dist.get_world_size() == 3 and x.get_device() == rank

            @pytest.mark.ranks(2)
            def test_in_its_own_number():
                dist.init_process_group("nccl")
                assert dist.get_world_size() == 2

            class TestCase(unittest.TestCase):
                def test_in_ranks(self):
                    dist.init_process_group("nccl")
                    self.assertEqual(dist.get_world_size(), 3)
        """,  # noqa: E501
    )
    output = pytest_on(tmp_path, "-v", "--as-cuda", "--ranks=3", "-W", "ignore")
    assert outcomes(output) == {
        "test_on_each[cuda:0]": "passed",
        "test_on_each[cuda:1]": "passed",
        "test_on_each[cuda:2]": "passed",
        "test_in_ranks": "passed",
        "test_in_its_own_number": "passed",
        "TestCase::test_in_ranks": "passed",
    }
    (told,) = header(output)
    assert told.startswith("torchstrategy: 3 simulated devices (") and told.endswith(
        "means; each test in 3 ranks"
    )


@for_changes
def test_a_mark_runs_every_kind_of_test_in_ranks(tmp_path: Path) -> None:
    project(
        tmp_path,
        test_it="""
            import asyncio, unittest
            import pytest, torch
            import torch.distributed as dist
            from hypothesis import given, settings, strategies as st

            met = []

            def total():
                dist.init_process_group("nccl")
                total = torch.ones(1)
                dist.all_reduce(total)
                return total.item()

            class WithoutATest(unittest.TestCase):
                def setUp(self):
                    self.total = total()

                def tearDown(self):
                    met.append(dist.get_rank())

            @pytest.mark.ranks(2)
            class TestCase(WithoutATest):
                def test_in_two(self):
                    with self.subTest("of one"):
                        self.assertEqual(self.total, 2)

                def test_that_fails_in_one(self):
                    with self.subTest(rank=dist.get_rank()):
                        self.assertEqual(dist.get_rank(), 0)

                def test_skipped_by_itself(self):
                    self.skipTest("in each")

                @unittest.skip("always")
                def test_skipped(self): ...

                @unittest.expectedFailure
                def test_expected_to_fail(self):
                    raise ValueError

                @given(st.integers())
                def test_with_examples(self, n): ...

            def test_each_had_a_case_of_its_own():
                assert sorted(met) == [0, 0, 0, 1, 1, 1]

            @pytest.mark.ranks(2)
            async def test_async(rank):
                await asyncio.sleep(0)
                assert total() == 2 and met.append(rank) is None

            @pytest.mark.ranks(2)
            async def test_async_that_fails(rank):
                assert rank == 0

            @pytest.mark.ranks(2)
            @settings(max_examples=3)
            @given(n=st.integers(1, 5))
            def test_examples(rank, n):
                assert total() == 2
                x = torch.ones(n) * rank
                dist.all_reduce(x)
                assert x.sum() == n

            @pytest.mark.ranks(2)
            @settings(max_examples=5)
            @given(n=st.integers(1, 5))
            def test_examples_that_fail(rank, n):
                assert rank == 0

            @pytest.mark.ranks(2)
            def test_capsys(rank, capsys, monkeypatch):
                monkeypatch.setenv("MINE", str(rank))
                total()
                print("rank", rank)
                dist.barrier()
                assert capsys.readouterr() == (f"rank {rank}\\n", "")
                with capsys.disabled():
                    print("seen by all")
                print("nobody reads this")

            @pytest.mark.ranks(2)
            def test_capfd(capfd): ...
        """,
    )
    output = pytest_on(tmp_path, "-v", "-rA")
    assert outcomes(output) == {
        "TestCase::test_in_two": "passed",
        "TestCase::test_that_fails_in_one": "failed",
        "TestCase::test_skipped_by_itself": "skipped",
        "TestCase::test_skipped": "skipped",
        "TestCase::test_expected_to_fail": "failed",
        "TestCase::test_with_examples": "failed",
        "test_each_had_a_case_of_its_own": "passed",
        "test_async": "passed",
        "test_async_that_fails": "failed",
        "test_examples": "passed",
        "test_examples_that_fail": "failed",
        "test_capsys": "passed",
        "test_capfd": "failed",
    }
    assert "mark it with @pytest.mark.xfail" in output
    assert "write it as a function, of which each example runs in ranks" in output
    assert (
        "takes the fixture `capfd`, which has what all ranks print, mixed: take "
        "`capsys`" in output
    )
    assert output.count("nobody reads this") >= 2


@for_releases
@pytest.mark.parametrize(
    ("mark", "plugin"), [("anyio", "anyio"), ("asyncio", "pytest_asyncio")]
)
def test_tests_of_a_plugin_for_async_run_in_ranks(
    mark: str, plugin: str, tmp_path: Path
) -> None:
    pytest.importorskip(plugin)
    project(
        tmp_path,
        test_it=f"""
            import asyncio
            import pytest, torch
            import torch.distributed as dist

            @pytest.fixture
            def anyio_backend():
                return "asyncio"

            @pytest.mark.ranks(2)
            @pytest.mark.{mark}
            async def test_async(rank):
                await asyncio.sleep(0)
                dist.init_process_group("nccl")
                total = torch.ones(1)
                dist.all_reduce(total)
                assert total == 2
        """,
    )
    assert outcomes(pytest_on(tmp_path, "-v", "-W", "ignore")) == {
        "test_async": "passed"
    }


@for_changes
def test_the_fixtures_fail_a_test_that_leaves_something_behind(tmp_path: Path) -> None:
    project(
        tmp_path,
        test_leaks="""
            import functools
            import threading

            import pytest
            import torch

            import torchstrategy
            from torchstrategy.testing import _leaks

            ALL = ["no_leaks", "no_thread_leaks", "no_scope_leaks", "no_torch_state_leaks"]

            @pytest.fixture(scope="session")
            def trained():
                return torchstrategy.CentralStorageStrategy(["cpu"] * 2)

            @pytest.mark.parametrize("check", ALL)
            def test_clean(check, request, strategy, trained):
                request.getfixturevalue(check)
                for each in (strategy, trained):
                    with each.scope():
                        model = torch.nn.Linear(2, 1)
                    each.run(lambda: model(torch.ones(1, 2)).sum().backward())

            def test_clean_threads_first(no_thread_leaks, strategy):
                strategy.run(lambda: None)

            @pytest.fixture
            def thread(monkeypatch):
                for check in (_leaks.no_leaks, _leaks.no_thread_leaks):  # it does not end: do not wait
                    monkeypatch.setattr(_leaks, check.__name__, functools.partial(check, timeout=0))
                end = threading.Event()
                yield threading.Thread(target=end.wait, name="prefetch", daemon=True)
                end.set()

            @pytest.mark.parametrize("check", ["no_leaks", "no_thread_leaks"])
            def test_thread(thread, check, request):
                request.getfixturevalue(check)
                thread.start()

            @pytest.fixture
            def set_strategy():
                yield lambda: torchstrategy.experimental_set_strategy(torchstrategy.OneDeviceStrategy("cpu"))
                torchstrategy.experimental_set_strategy(None)

            @pytest.mark.parametrize("check", ["no_leaks", "no_scope_leaks"])
            def test_scope(set_strategy, check, request):
                request.getfixturevalue(check)
                set_strategy()

            @pytest.fixture
            def grad():
                yield
                torch.set_grad_enabled(True)

            @pytest.mark.parametrize("check", ["no_leaks", "no_torch_state_leaks"])
            def test_state(grad, check, request):
                request.getfixturevalue(check)
                torch.set_grad_enabled(False)

            def test_failing(grad, no_leaks):
                torch.set_grad_enabled(False)
                raise ValueError("of the test")
        """,  # noqa: E501
    )
    output = pytest_on(tmp_path, "-v", "-k", "clean")
    assert output.endswith("exit 0"), output
    assert len(outcomes(output)) == 40
    output = pytest_on(tmp_path, "-v", "-k", "not clean")
    assert "1 failed, 6 passed, 40 deselected, 7 errors" in output
    # Once in each report, and, where the line is long enough for it, again in the
    # summary.
    assert output.count("AssertionError: The thread 'prefetch' is still running") >= 2
    assert (
        output.count(
            "AssertionError: This thread was outside of every scope, and is in the "
            "scope of"
        )
        >= 2
    )
    assert output.count("AssertionError: grad was True, and is False.") >= 3
    assert "ValueError: of the test" in output
