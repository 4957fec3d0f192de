"""The traceback of an error in a step has the user's lines, and none of ours."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchstrategy
from conditions import for_changes
from topologies import TOPOLOGIES, central

PACKAGE = str(Path(torchstrategy.__file__).parent)
# Python 3.10 adds the frame of a function that raises an error again: that of `run`,
# and of what looks at keywords.
OF_KEYWORDS = ["checked"] if sys.version_info < (3, 11) else []
OF_RUN = [*OF_KEYWORDS, "run"] if sys.version_info < (3, 11) else []


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHSTRATEGY_FULL_TRACEBACK", raising=False)


def failing(x: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("of the user")


def names(error: BaseException) -> list[str]:
    """The functions of the traceback, from the test downwards."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def of_package(error: BaseException) -> list[str]:
    return [
        frame.name
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(PACKAGE)
    ]


def raised(
    strategy: torchstrategy.Strategy, step: Callable[..., object]
) -> BaseException:
    def users_call() -> None:
        strategy.run(step, args=(torch.ones(2),))

    with pytest.raises(ZeroDivisionError, match="of the user") as found:
        users_call()
    return found.value


@pytest.mark.parametrize("kind", TOPOLOGIES)
def test_an_error_in_a_step_shows_the_users_lines(kind: str) -> None:
    """The call of run, and the lines of the step."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return failing(x)

    error = raised(TOPOLOGIES[kind](), step)
    assert names(error) == ["raised", "users_call", *OF_RUN, "step", "failing"]
    assert of_package(error) == OF_RUN


def test_frames_of_torch_between_the_users_stay() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return failing(x)

    strategy = central(2)
    with strategy.scope():
        model = Net()
    error = raised(strategy, lambda x: model(x))
    assert names(error)[-2:] == ["forward", "failing"] and "_call_impl" in names(error)
    assert of_package(error) == OF_RUN


def test_an_error_in_a_merge_function_shows_it() -> None:
    def step(x: torch.Tensor) -> None:
        context = torchstrategy.get_replica_context()
        assert context is not None
        context.merge_call(merge, args=(x,))

    def merge(strategy: torchstrategy.Strategy, x: object) -> None:
        failing(torch.ones(1))

    error = raised(central(2), step)
    assert names(error)[-2:] == ["merge", "failing"]
    assert of_package(error) == OF_RUN


def test_a_doubled_error_has_no_frame_of_ours_in_either_traceback() -> None:
    def step(x: torch.Tensor) -> None:
        try:
            failing(x)
        except ZeroDivisionError as error:
            raise ZeroDivisionError("of the user, again") from error

    error = raised(central(3), step)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert names(error.__cause__) == ["step", "failing"]
    assert names(error)[-1] == "step"
    printed = "".join(traceback.format_exception(error))
    assert printed.count(PACKAGE) == len(OF_RUN)
    assert "raised by replica 0 of 3" in printed or sys.version_info < (3, 11)


def test_an_error_below_the_users_last_line_says_where() -> None:
    def step(x: torch.Tensor) -> None:
        context = torchstrategy.get_replica_context()
        assert context is not None
        context.all_reduce("median", x)

    with pytest.raises(ValueError) as found:
        central(2).run(step, args=(torch.ones(2),))
    shown = names(found.value)
    assert shown.index("step") == 1 + len(OF_RUN)
    assert of_package(found.value)[len(OF_RUN) + len(OF_KEYWORDS)] == "all_reduce"


def test_an_error_of_the_library_itself_keeps_all_frames() -> None:
    with pytest.raises(TypeError, match="cannot be called") as found:
        central(2).run(3)  # type: ignore[call-overload]
    shown = [*OF_KEYWORDS, "run", "_run"]
    assert of_package(found.value)[: len(shown)] == shown


def test_a_variable_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSTRATEGY_FULL_TRACEBACK", "1")
    error = raised(central(2), failing)
    assert len(of_package(error)) > 3
    monkeypatch.setenv("TORCHSTRATEGY_FULL_TRACEBACK", "0")
    assert of_package(raised(central(2), failing)) == OF_RUN


def test_the_same_object_raised_in_many_runs_collects_no_frames() -> None:
    prepared = ZeroDivisionError("of the user")

    def step(x: torch.Tensor) -> None:
        raise prepared.with_traceback(None)

    strategy = central(2)
    for _ in range(3):
        assert names(raised(strategy, step)) == [
            "raised",
            "users_call",
            *OF_RUN,
            "step",
        ]


@for_changes
def test_a_script_prints_the_users_lines_only(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, torchstrategy
            strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
            def step():
                return torch.ones(2) @ torch.ones(3)
            strategy.run(step)
            """
        )
    )
    found = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    ).stderr
    files = [line for line in found.splitlines() if line.lstrip().startswith("File ")]
    assert len(files) == 2 + len(OF_RUN) and found.count(str(script)) == 2, found


def test_an_error_in_a_data_parallel_module_shows_the_lines_of_the_module() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return failing(x)

    model = torchstrategy.DataParallel(Net(), ["cpu"] * 2)
    with pytest.raises(ZeroDivisionError, match="of the user") as found:
        model(torch.ones(3))
    assert names(found.value)[-2:] == ["forward", "failing"]
    assert of_package(found.value) == (["forward"] if OF_RUN else [])
