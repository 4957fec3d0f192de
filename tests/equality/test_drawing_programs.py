"""How random programs are drawn, compared, shortened and printed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from conditions import for_changes, for_releases
from random_programs import actions, events, layers
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


@for_releases
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


@dataclasses.dataclass(frozen=True)
class _Wrong(layers.Layer):
    """A layer that is no function of its rows: output depends on their number."""

    def build(self, width: int, so_far: list[nn.Module]) -> nn.Module:
        class Wrong(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * len(x)

        return Wrong()


@for_changes
def test_a_difference_is_found_and_shrunk() -> None:
    """A long program with one wrong part becomes a short one.

    It has that part and little else.
    """
    program = Generator(strategies=["central"], most_steps=2).program(6)
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
