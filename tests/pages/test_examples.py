"""The examples run and learn, and their checks can fail.

The digits programs differ by no more than the README says.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import torchstrategy
from conditions import for_changes, for_releases
from processes import python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def torchrun(count: int) -> tuple[str, ...]:
    return "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)


def output_of(program: str, *arguments: str) -> str:
    """What the program prints.

    It imports the package as installed, as a user's program does.
    """
    return output_of_python(str(EXAMPLES / program), *arguments)


def output_of_python(*arguments: str, folder: Path | None = None) -> str:
    done = python(*arguments, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def digits_problem(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("digits_problem")


@pytest.fixture
def language_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("language_model")


@pytest.fixture
def gan(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("gan")


def parsed(digits_problem: ModuleType, arguments: str) -> argparse.Namespace:
    parser = digits_problem.argument_parser()
    digits_problem.add_strategy_arguments(parser)
    return parser.parse_args(arguments.split())


def statements_of(name: str) -> list[str]:
    """The lines of an example, one for each statement however long it is."""
    return ast.unparse(ast.parse((EXAMPLES / name).read_text())).splitlines()


def test_the_digits_programs_differ_in_fewer_than_12_lines() -> None:
    plain, under_strategy = map(statements_of, ("digits_plain.py", "digits.py"))
    # The first two name the files.
    diff = list(difflib.unified_diff(plain, under_strategy, lineterm="", n=0))[2:]
    changed = [line for line in diff if line[0] in "+-"]
    assert 0 < len(changed) < 12, "\n".join(changed)


@for_changes
@pytest.mark.slow
def test_the_plain_digits_program_runs() -> None:
    assert "test accuracy" in output_of("digits_plain.py", "--epochs", "1")


@for_changes
@pytest.mark.slow
def test_the_digits_program_runs_and_checks_itself() -> None:
    output = output_of(
        "digits.py",
        "--strategy",
        "central",
        "--replicas",
        "3",
        "--epochs",
        "1",
        "--dtype",
        "float64",
        "--check",
    )
    assert "largest difference from plain PyTorch" in output


def output_of_workers(*arguments: str) -> str:
    """What a program prints that torchrun starts in two processes."""
    return output_of_python(*torchrun(2), str(EXAMPLES / arguments[0]), *arguments[1:])


@pytest.mark.slow
@for_releases
@pytest.mark.parametrize(
    "arguments", [(), ("--replicas", "2", "--optimizer", "adam", "--dtype", "float64")]
)
def test_the_digits_program_checks_itself_in_two_processes(
    arguments: tuple[str, ...],
) -> None:
    output = output_of_workers(
        "digits.py", "--strategy", "workers", "--epochs", "1", "--check", *arguments
    )
    assert [line.partition(" ")[0] for line in output.splitlines()] == [
        "15",
        "test",
        "largest",
    ]  # one of them prints


@for_changes
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "--strategy default",
        "--strategy workers --replicas 2",
        "--strategy one --device cpu:1",
        "--strategy central --device cpu:1,cpu:0",
        "--strategy central --replicas 4 --optimizer adam",
    ],
)
def test_an_epoch_of_digits_is_an_epoch_of_plain_pytorch(
    digits_problem: ModuleType, arguments: str
) -> None:
    options = parsed(digits_problem, f"--epochs 1 --lr 0.01 {arguments}")
    model, losses = importlib.import_module("digits").train(options)
    digits_problem.check(options, model, losses)


@for_changes
@pytest.mark.slow
def test_digits_learns_with_four_replicas(digits_problem: ModuleType) -> None:
    options = parsed(
        digits_problem, f"--replicas 4 --lr {digits_problem.LEARNING_RATES['sgd']}"
    )
    model, _ = importlib.import_module("digits").train(options)
    assert digits_problem.accuracy(model) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("damage", [1e-3, float("nan")])
def test_the_check_of_digits_fails_when_a_weight_differs(
    digits_problem: ModuleType, damage: float
) -> None:
    options = parsed(digits_problem, "--epochs 1 --lr 0.1")
    model, losses = importlib.import_module("digits_plain").train(options)
    digits_problem.check(options, model, losses)
    with torch.no_grad():
        model.linear2.bias[0] += damage
    with pytest.raises(
        SystemExit, match="the run under the strategy is not the plain one"
    ):
        digits_problem.check(options, model, losses)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--strategy one --replicas 2",
            "--strategy one has one replica, and --replicas asks for 2",
        ),
        (
            "--strategy default --device cpu",
            "--strategy default runs where the tensors are and takes no --device",
        ),
        (
            "--strategy central --device cpu,cpu --replicas 3",
            "--replicas asks for 3, and --device lists 2",
        ),
        (
            "--strategy workers --device cpu,cpu --replicas 3",
            "--replicas asks for 3, and --device lists 2",
        ),
    ],
)
def test_digits_refuses_arguments_that_it_would_have_to_ignore(
    digits_problem: ModuleType, arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        digits_problem.new_strategy(parsed(digits_problem, arguments))


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("restart")


@pytest.mark.slow
@for_releases
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_killed_training_that_torchrun_restarts_ends_as_an_unbroken_one(
    count: int, tmp_path: Path
) -> None:
    """With three processes it did not.

    The first step after the start added gradients up in another order.
    """
    command = (
        *torchrun(count),
        "--max-restarts",
        "1",
        str(EXAMPLES / "restart.py"),
        "--kill",
        "20",
        "--check",
    )
    done = python(*command, folder=tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exitcode: -9" in done.stderr  # of SIGKILL
    begun, learned, same = done.stdout.splitlines()
    assert begun == "the training goes on after step 14"
    assert learned.startswith("test accuracy 9")
    assert same == "all weights are those of an unbroken run, to the bit"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@for_releases
def test_a_sharded_training_stops_and_goes_on_with_other_processes(
    tmp_path: Path,
) -> None:
    program = str(EXAMPLES / "sharded.py")
    stopped = output_of_python(*torchrun(2), program, "--stop", "20", folder=tmp_path)
    assert stopped.splitlines() == ["the training stops after step 20"]
    for count in (4, 2):  # the second time there is no checkpoint any more
        output = output_of_python(
            *torchrun(count), program, "--check", folder=tmp_path
        ).splitlines()
        assert (output[0] == "the training goes on after step 14") == (count == 4)
        assert output[-2].startswith("test accuracy 8")
        assert re.fullmatch(
            r"largest difference from plain PyTorch: \d\.\de-1\d", output[-1]
        )
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("sharded")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [1e-3, float("nan")])
def test_the_check_of_a_sharded_training_fails_when_a_weight_differs(
    sharded: ModuleType, damage: float
) -> None:
    torch.manual_seed(0)
    plain = sharded.Transformer().double()
    model = sharded.Transformer().double()
    model.load_state_dict(plain.state_dict())
    sharded.check(model, plain)
    with torch.no_grad():
        model.head.bias[0] += damage
    with pytest.raises(SystemExit, match="the weights are not those of plain PyTorch"):
        sharded.check(model, plain)


PARTS = ("model", "optimizer", "scheduler", "dataset", "random")


@for_releases
@pytest.mark.slow
@pytest.mark.parametrize("lacking", [None, *PARTS])
def test_a_checkpoint_needs_all_its_parts(
    restart: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    lacking: str | None,
) -> None:
    class Killed(Exception):
        pass

    def be_killed() -> None:
        raise Killed

    options = restart.argument_parser().parse_args(["--epochs", "2", "--kill", "9"])
    strategy, path = (
        torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"]),
        tmp_path / "checkpoint.pt",
    )
    unbroken = restart.train(strategy, options, None)
    monkeypatch.setattr(restart, "kill_this_process", be_killed)
    with pytest.raises(Killed):
        restart.train(strategy, options, path)
    if lacking:
        state = torch.load(path)
        state[lacking] = state_at_the_beginning(restart, strategy, tmp_path)[lacking]
        torch.save(state, path)
    options.kill = None
    resumed = restart.train(strategy, options, path)
    if lacking:
        with pytest.raises(SystemExit, match="not the weights of an unbroken run"):
            restart.check(resumed, unbroken)
    else:
        restart.check(resumed, unbroken)


def state_at_the_beginning(
    restart: ModuleType, strategy: torchstrategy.Strategy, folder: Path
) -> dict[str, Any]:
    restart.Training(strategy).save(folder / "first.pt")
    state: dict[str, Any] = torch.load(folder / "first.pt")
    return state


@for_changes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "outcome"),
    [(["--simulate-devices=4"], "28 passed in"), ([], "14 passed, 1 skipped")],
)
def test_the_example_of_tests_passes_where_a_user_copies_it(
    options: list[str], outcome: str, tmp_path: Path
) -> None:
    shutil.copy(EXAMPLES / "test_my_training.py", tmp_path)
    output = output_of_python(
        "-m", "pytest", "-rs", "-W", "error", *options, folder=tmp_path
    )
    assert outcome in output
    assert ("run pytest with --simulate-devices=4" in output) == ("skipped" in outcome)


@for_changes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "accumulate", "precision"), [(3, 3, "float32"), (2, 2, "bfloat16")]
)
def test_the_language_model_learns_what_it_learns_in_plain_pytorch(
    language_model: ModuleType, replicas: int, accumulate: int, precision: str
) -> None:
    arguments = [
        "--replicas",
        str(replicas),
        "--accumulate",
        str(accumulate),
        "--batch-size",
        "7",
    ]
    language_model.check(
        language_model.argument_parser().parse_args(arguments), precision, updates=4
    )


@pytest.mark.slow
def test_the_check_of_the_language_model_fails_for_means_over_each_replicas_words(
    language_model: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = torchstrategy.CentralStorageStrategy

    def by_rows(*devices: Any, gradient_reduction: str) -> torchstrategy.Strategy:
        return made(*devices, gradient_reduction="mean")

    monkeypatch.setattr("torchstrategy.CentralStorageStrategy", by_rows)
    options = language_model.argument_parser().parse_args([])
    with pytest.raises(
        SystemExit, match="the run under the strategy is not the plain one"
    ):
        language_model.check(options, "float32", updates=2)


@for_releases
@pytest.mark.slow
def test_a_few_updates_make_the_language_model_better_than_guessing(
    language_model: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    language_model.main(
        language_model.argument_parser().parse_args(["--updates", "15"])
    )
    found, unigram = map(float, re.findall(r": ([\d.]+)", capsys.readouterr().out))
    guessing = language_model.corpus()[2]
    assert unigram < guessing / 4 and found < guessing / 4


@for_releases
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_gan_learns_what_it_learns_in_plain_pytorch(
    gan: ModuleType, replicas: int
) -> None:
    # Over the end of an epoch.
    gan.check(gan.argument_parser().parse_args(["--replicas", str(replicas)]), steps=19)


@pytest.mark.slow
def test_the_check_of_the_gan_fails_when_each_replica_normalises_its_own_rows(
    gan: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "torchstrategy.nn.SyncBatchNorm.convert_sync_batchnorm",
        lambda generator: generator,
    )
    with pytest.raises(
        SystemExit, match="the run under the strategy is not the plain one"
    ):
        gan.check(gan.argument_parser().parse_args([]), steps=2)


@for_releases
@pytest.mark.slow
def test_what_the_gan_draws_comes_nearer_to_digits(
    gan: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    gan.main(gan.argument_parser().parse_args(["--steps", "150", "--replicas", "1"]))
    before, after = map(
        float, re.findall(r"([\d.]+) (?:after one step|now)", capsys.readouterr().out)
    )
    assert after < before / 2


@for_releases
@pytest.mark.slow
def test_the_digits_program_draws_both_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    arguments = (
        "--strategy",
        "mirrored",
        "--replicas",
        "2",
        "--epochs",
        "1",
        "--check",
        "--plot",
        "losses.svg",
    )
    output_of_python(str(EXAMPLES / "digits.py"), *arguments, folder=tmp_path)
    assert "<svg" in (tmp_path / "losses.svg").read_text()


def test_the_trainers_differ_in_fewer_than_20_lines() -> None:
    plain, under_strategy = map(statements_of, ("trainer_plain.py", "trainer.py"))
    diff = list(difflib.unified_diff(plain, under_strategy, lineterm="", n=0))[2:]
    new = [line for line in diff if line[0] == "+"]
    assert 0 < len(new) < 20, "\n".join(new)


@for_changes
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_the_trainer_checks_itself(precision: str) -> None:
    arguments = (
        "--precision",
        precision,
        "--epochs",
        "2",
        "--replicas",
        "3",
        "--accumulate",
        "4",
    )
    output = output_of("trainer.py", "--check", *arguments)
    assert output.startswith("largest difference from plain PyTorch")


@for_changes
@pytest.mark.slow
def test_the_check_of_the_trainer_fails_when_a_checkpoint_lacks_the_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    trainer, problem = (
        importlib.import_module("trainer"),
        importlib.import_module("trainer_problem"),
    )

    class Forgetful(trainer.Trainer):  # type: ignore[misc, name-defined]
        def state_dict(self) -> dict[str, Any]:
            return {
                **super().state_dict(),
                "average": Forgetful(self.options).average.state_dict(),
            }

    options = problem.argument_parser().parse_args(["--epochs", "2"])
    options.device, options.replicas = "cpu", 2
    with pytest.raises(SystemExit, match="not the plain one"):
        problem.check(Forgetful, options)


@for_releases
@pytest.mark.slow
def test_the_trainer_resumes_and_writes_for_tensorboard(tmp_path: Path) -> None:
    command = (
        str(EXAMPLES / "trainer.py"),
        "--checkpoint",
        "last.pt",
        "--log-dir",
        "log",
    )
    first = output_of_python(*command, "--epochs", "1", folder=tmp_path)
    second = output_of_python(*command, "--epochs", "2", "--resume", folder=tmp_path)
    assert [
        line.partition(":")[0]
        for line in (first + second).splitlines()
        if line.startswith("epoch")
    ] == [
        "epoch 1",
        "epoch 2",
    ]
    assert ("TensorBoard is not installed" in first) != (tmp_path / "log").exists()
