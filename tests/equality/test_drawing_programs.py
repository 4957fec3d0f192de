"""How random programs are drawn, compared, shortened and printed."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from random_programs import __main__ as command
from random_programs import actions, events, layers, trials
from random_programs.comparison import differences
from random_programs.generation import Generator
from random_programs.programs import Program, parsed
from random_programs.refusals import DOCUMENTED, documented
from random_programs.shrinking import shrunk
from random_programs.topologies import Topology
from random_programs.trials import Verdict, judged

ROOT = Path(__file__).resolve().parents[2]


def _small(**parts: Any) -> Program:
    step = (actions.Clear(), actions.Backward(), actions.Update())
    given: dict[str, Any] = {
        "layers": (layers.Linear(),),
        "step": step,
        "batches": (3, 2),
        **parts,
    }
    return Program(
        Topology(), optimizers=(Generator().program(1).optimizers[0],), **given
    )


def test_a_seed_is_one_program_and_a_printed_program_is_that_program() -> None:
    for seed in range(40):
        program = Generator(5).program(seed)
        assert program == Generator(5).program(seed) == parsed(str(program))
    assert len({Generator().program(seed) for seed in range(40)}) == 40


def test_programs_have_parts_of_every_kind() -> None:
    """What nobody draws is not tried."""
    text = "".join(str(Generator(5).program(seed)) for seed in range(3000))
    for module, base in (
        (layers, layers.Layer),
        (actions, actions.Action),
        (events, events.Event),
    ):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, base) and kind is not base:
                assert f"{kind.__name__}(" in text, kind.__name__


def test_parts_that_are_left_out_are_not_drawn() -> None:
    generator = Generator(without="Write|Clip")
    assert not [
        seed
        for seed in range(100)
        if re.search("Write|Clip", str(generator.program(seed)))
    ]


@dataclasses.dataclass(frozen=True)
class _Wrong(layers.Layer):
    """A layer that is no function of its rows: output depends on their number."""

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        class Wrong(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * len(x)

        return Wrong()


def test_a_difference_is_found_and_shrunk() -> None:
    """A long program with one wrong part becomes a short one.

    It has that part and little else.
    """
    program = Generator(strategies=["central"], most_steps=2).program(5)
    long = dataclasses.replace(
        program,
        layers=(*program.layers, _Wrong()),
        topology=Topology("central", ("cpu",) * 3),
    )
    outcome = judged(long)
    assert outcome.verdict is Verdict.DIFFERENT
    short, again = shrunk(long, outcome)
    assert (again.verdict, again.kind) == (outcome.verdict, outcome.kind)
    assert any(isinstance(layer, _Wrong) for layer in short.layers)
    assert short.size < long.size and short.size <= 8, short


def test_what_plain_torch_refuses_is_no_program() -> None:
    broken = _small(events=((1, events.Load()), (0, _Raises())))
    assert judged(broken).verdict is Verdict.NO_PROGRAM


@dataclasses.dataclass(frozen=True)
class _Raises(events.Event):
    def do(self, training: Any) -> None:
        raise KeyError("no such thing")


def test_numbers_that_a_hair_changes_are_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The numbers of a program that is chaotic differ for a reason of their own."""
    monkeypatch.setattr(
        trials, "differences", lambda ours, plain: {"model.0.weight": "is another"}
    )
    for of_noise, verdict in ((1e-15, Verdict.DIFFERENT), (1e-5, Verdict.NO_PROGRAM)):
        sizes = iter([1e-4, of_noise])
        monkeypatch.setattr(
            trials, "size_of", lambda ours, plain, sizes=sizes: next(sizes)
        )
        assert judged(_small()).verdict is verdict


def test_differences_are_found_in_values_of_every_kind() -> None:
    plain = {"t": torch.ones(2), "f": 1.0, "n": 1, "s": "a", "gone": 1}
    ours = {"t": torch.ones(2) * 1.1, "f": 1.1, "n": True, "s": "b", "new": 1}
    assert sorted(differences(ours, plain)) == ["f", "gone", "n", "new", "s", "t"]
    assert not differences(
        {"f": float("nan"), "t": torch.tensor(1.0)},
        {"f": float("nan"), "t": torch.tensor(1.0)},
    )


def test_every_refusal_that_programs_may_meet_is_documented() -> None:
    for words, (page, sentence) in DOCUMENTED.items():
        assert sentence in " ".join((ROOT / page).read_text().split())
        assert documented(f"Something {words} Something") == words


def test_the_command_runs_programs_and_prints_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["random_programs", "--count", "3", "--seed", "7"])
    assert command.main() == 0
    said = capsys.readouterr().out
    assert (
        "3 programs from seed 7" in said
        and re.search(r"\d equal", said)
        and re.search(r"0 different", said)
    )

    monkeypatch.setattr(
        trials, "differences", lambda ours, plain: {"model.0.weight": "is another"}
    )
    sizes = itertools.cycle([1.0, 0.0])
    monkeypatch.setattr(trials, "size_of", lambda ours, plain: next(sizes))
    monkeypatch.setattr(sys, "argv", ["random_programs", "--count", "1", "--seed", "7"])
    assert command.main() == 1
    said = capsys.readouterr().out
    assert "1 different" in said

    (tmp_path / "program").write_text(
        said[said.index("Program(") : said.index("model.0.weight is another")]
    )
    monkeypatch.setattr(
        sys, "argv", ["random_programs", "--replay", str(tmp_path / "program")]
    )
    assert command.main() == 1
    assert "model.0.weight is another" in capsys.readouterr().out
