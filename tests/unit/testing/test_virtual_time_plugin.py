"""Tests that run in virtual time, as a user meets them.

Pytest is run on small projects, in processes of their own.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conditions import for_changes
from processes import NO_ACCELERATOR, python

PROJECT = """
    import pytest
    import torch

    H100 = "H100-SXM"


    def loads(batches, device):
        "The batches of an epoch: each is copied while the one before is computed with."
        main, side = torch.accelerator.current_stream(device), torch.Stream(device=device)
        weight = torch.ones(1024, 1024, device=device)
        with side:
            coming = batches[0].to(device, non_blocking=True)
        for following in [*batches[1:], None]:
            main.wait_stream(side)
            batch = coming
            batch.record_stream(main)
            if following is not None:
                with side:
                    coming = following.to(device, non_blocking=True)
            for _ in range(20):
                batch = batch @ weight
        return batch


    def batches(is_pinned):
        made = [torch.ones(1024, 1024) for _ in range(4)]
        return [batch.pin_memory() for batch in made] if is_pinned else made


    @pytest.mark.virtual_time(H100, shapes_only=True, max_syncs=0, min_overlap=0.7, max_seconds=0.05, max_bytes=2**27)
    def test_pinned(simulated_devices):
        loads(batches(True), simulated_devices[0])


    @pytest.mark.virtual_time(H100, shapes_only=True, max_syncs=0)
    def test_made_to_block(simulated_devices):
        loads(batches(False), simulated_devices[0])


    @pytest.mark.virtual_time(H100, max_seconds=1e-9)
    def test_from_the_mark_on(virtual_time):
        torch.ones(3, device="sim:0").sum().item()
        virtual_time.mark()


    def test_the_fixture_alone(virtual_time):
        torch.ones(3, device="sim:0").sum().item()
        assert len(virtual_time.synchronizations) == 1
        assert virtual_time.profile.name == H100


    @pytest.mark.virtual_time("L4")
    def test_an_error_of_its_own(virtual_time):
        torch.ones(3, device="sim:0")
        raise KeyError("mine")


    @pytest.mark.virtual_time("L4", max_waits=3)
    def test_a_wrong_mark():
        pass


    @pytest.fixture
    def prepared(simulated_devices):
        return torch.ones(3, device="sim:0").sum().item()


    @pytest.mark.virtual_time("L4", max_syncs=0)
    def test_what_fixtures_prepare_takes_no_time(prepared):
        assert prepared == 3
"""  # noqa: E501


def pytest_on(folder: Path, *arguments: str) -> str:
    (folder / "test_times.py").write_text(
        "\n".join(line[4:] for line in PROJECT.splitlines())
    )
    strictly = (
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--strict-markers",
        "-W",
        "error",
        "-v",
    )
    done = python(*strictly, *arguments, folder=folder, **NO_ACCELERATOR)
    return f"{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("project")
    return pytest_on(folder, "--simulate-devices=2", "--timeline=pictures"), folder


@for_changes
def test_a_test_passes_within_its_limits_and_fails_beyond_them(
    run: tuple[str, Path],
) -> None:
    output, _ = run
    outcomes = dict(re.findall(r"::(\S+) (PASSED|FAILED|ERROR)", output))
    assert outcomes == {
        "test_pinned": "PASSED",
        "test_made_to_block": "FAILED",
        "test_from_the_mark_on": "PASSED",
        "test_the_fixture_alone": "PASSED",
        "test_an_error_of_its_own": "FAILED",
        "test_a_wrong_mark": "ERROR",
        "test_what_fixtures_prepare_takes_no_time": "PASSED",
    }


def test_a_failure_says_what_waits_and_on_which_line(run: tuple[str, Path]) -> None:
    output, _ = run
    assert (
        "The program waits for a device 4 times, and may wait 0 times (max_syncs):"
        in output
    )
    assert re.search(
        r"  3 times at test_times\.py:\d+: a copy to sim:0 from memory that is not "
        r"pinned",
        output,
    )
    assert "During handling of the above exception" not in output
    assert "KeyError: 'mine'" in output
    assert (
        "The mark `virtual_time` takes a profile, shapes_only and the limits" in output
    )
    assert "got 'L4', max_waits=3." in output


def test_failing_tests_are_drawn(run: tuple[str, Path]) -> None:
    output, folder = run
    drawn = sorted(path.name for path in (folder / "pictures").iterdir())
    assert drawn == [
        "test_times.py-test_an_error_of_its_own.svg",
        "test_times.py-test_made_to_block.svg",
    ]
    assert "<svg" in (folder / "pictures" / drawn[1]).read_text()
    assert (
        output.count(
            "What happened is drawn in pictures/test_times.py-test_made_to_block.svg."
        )
        == 1
    )


@for_changes
def test_without_devices_the_tests_are_skipped(tmp_path: Path) -> None:
    output = pytest_on(tmp_path)
    assert ("6 skipped" in output and "1 error" in output) or "7 skipped" in output
