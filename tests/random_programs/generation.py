"""Seeded programs."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, final

from . import actions, events, layers, marked, modules, optimizers, writing
from .actions import Action
from .events import Event
from .keeping import KEEPERS
from .layers import Layer
from .optimizers import Optimizer
from .programs import Program
from .topologies import DATA_PARALLEL, STRATEGIES, WORKERS, Topology

T = TypeVar("T")

# What `Module.to` does not move, or makes two of one.
_LOST_WHEN_MOVED = (
    "shared buffer",
    "Pruned(",
    "old weight norm",
    "old spectral norm",
    "place='shift'",
)


@final
class Generator:
    """Makes programs.

    Args:
        simulated: How many devices are simulated.
        without: A regular expression; parts whose text it finds are left out.
        strategies: The topologies to choose from; None: all.
        most_steps: Of a program.
    """

    def __init__(
        self,
        simulated: int = 0,
        without: str = "",
        strategies: Sequence[str] | None = None,
        most_steps: int = 5,
    ) -> None:
        self._simulated, self._most_steps = simulated, most_steps
        self._without = re.compile(without) if without else None
        self._kinds = list(strategies or [*STRATEGIES, DATA_PARALLEL])

    def program(self, seed: int) -> Program:
        """The program of a seed."""
        draw = _Draw(
            random.Random(f"program {seed}"),
            self._simulated,
            self._without,
            self._kinds,
        )
        return draw.program(self._most_steps)


class _Draw:
    """One program."""

    def __init__(
        self, draw: random.Random, simulated: int, without: Any, kinds: list[str]
    ) -> None:
        self._draw, self._simulated, self._without, self._kinds = (
            draw,
            simulated,
            without,
            kinds,
        )
        self._steps = draw.choice([1, 2, 2, 3, 3, 4, 5])  # how many there are
        self._is_data_parallel = self._sees_the_batch = self._sees_calls = (
            self._repeats
        ) = False
        self._may_fail_late = self._some_rows = self._keeps = False
        self._text = ""  # of the layers

    def program(self, most_steps: int) -> Program:
        """The program, of at most so many steps."""
        draw = self._draw
        self._steps = min(self._steps, most_steps)
        topology = self._topology()
        self._is_data_parallel = topology.is_data_parallel
        chosen = self._parts(self._layer, draw.randint(2, 5))
        if not any(isinstance(layer, layers.Linear) for layer in chosen):
            chosen.insert(draw.randint(0, len(chosen)), layers.Linear())
        if draw.random() < 0.15:
            index = draw.randrange(len(chosen))
            chosen[index] = layers.Keeping(chosen[index], draw.choice(list(KEEPERS)))
        sparse = any("sparse" in repr(layer) for layer in chosen)
        text = self._text = repr(chosen)
        self._sees_the_batch = "Norm(kind='batch" in text or "running mean" in text
        counts = (
            "Count(",
            "Buffer(",
            "Marked(",
            "spectral",
            "shared buffer",
            "'property'",
        )
        self._sees_calls = self._sees_the_batch or any(word in text for word in counts)
        self._some_rows = "of some rows" in text
        self._keeps = "Keeping(" in text
        self._sees_calls = (
            self._sees_calls or "parameters'" in text or "after accumulation" in text
        )
        made = self._optimizers(sparse)
        scaler = draw.random() < 0.08 and not sparse
        before, step, after = self._loop(len(made), scaler)
        cut = draw.randint(1, len(step)) if step and draw.random() < 0.12 else len(step)
        step, then = step[:cut], step[cut:]
        ends_with_update = (
            bool(step) and isinstance(step[-1], actions.Update) and step[-1].every == 1
        )
        # A run that fails takes back what the step did to the model, but for its
        # updates.
        has_deeds = any(isinstance(action, actions.Deed) for action in step)
        self._may_fail_late = ends_with_update and not (self._sees_calls or has_deeds)
        line = [*step, *then]
        backwards = sum(
            repr(line).count(name)
            for name in ("Backward(", "Penalty(", "Kept(", "Closure(")
        )
        self._repeats = backwards > 1 or any(
            word in repr(line) for word in ("twice", "micro=2", "assign", "add")
        )
        found = self._parts(self._event, draw.choice([0, 1, 1, 2, 3, 4]))
        when = sorted(draw.randint(0, self._steps) for _ in found)
        program = Program(
            topology,
            tuple(chosen),
            tuple(made),
            tuple(before),
            tuple(step),
            tuple(then),
            tuple(after),
            tuple(self._rows() for _ in range(self._steps)),
            tuple(zip(when, found, strict=True)),
            draw.choice([2, 2, 3, 4]),
            draw.choice(
                ["closure", "closure", "trainer", "trainer with parts", "arguments"]
            ),
            draw.random() < 0.7
            or any(word in text for word in (*_LOST_WHEN_MOVED, "Varied(")),
            draw.random() < 0.2,
            scaler,
        )
        return self._with_side_stream(program) if draw.random() < 0.15 else program

    def _rows(self) -> int:
        """How many rows a batch has."""
        if "each_replica=True" in self._text:
            # A replica without rows does not change its value of a variable. In three
            # workers there may be six.
            return self._draw.choice([24, 48])
        return self._draw.randint(2 if self._sees_the_batch else 1, 7)

    def _with_side_stream(self, program: Program) -> Program:
        """The same program, with a part of its step on a stream of its own."""
        draw, step = self._draw, program.step
        if not step or not self._simulated:
            return program
        first = draw.choice([0, 0, draw.randint(0, len(step) - 1)])
        last = draw.choice([len(step), draw.randint(first + 1, len(step))])
        aside = actions.OnSideStream(step[first:last], draw.random() < 0.5)
        if self._without is not None and self._without.search(repr(aside)):
            return program
        return replace(program, step=(*step[:first], aside, *step[last:]))

    def _parts(self, one: Callable[[], T], count: int) -> list[T]:
        """So many parts, of those that are wanted."""
        found: list[T] = []
        for _ in range(count):
            for _ in range(20):
                part = one()
                if self._without is None or not self._without.search(repr(part)):
                    found.append(part)
                    break
        return found

    def _topology(self) -> Topology:
        draw, kind = self._draw, self._draw.choice(self._kinds)
        count = draw.choice([1, 2, 2, 2, 3, 3, 4])
        if kind == WORKERS:
            return Topology(kind, ("cpu",) * min(count, 2))
        if not self._simulated or draw.random() < 0.1:
            return Topology(kind, ("cpu",) * count)
        last = draw.choice([1, self._simulated - 1, self._simulated - 1])
        numbers = [
            draw.randint(0, last) if draw.random() < 0.3 else i % self._simulated
            for i in range(count)
        ]
        devices = [f"sim:{number}" for number in numbers]
        owner = draw.choice([None, None, f"sim:{self._simulated - 1}", "cpu"])
        return Topology(kind, tuple(devices), owner if kind == "central" else None)

    # The model

    def _layer(self) -> Layer:
        draw = self._draw
        kind = draw.randint(0, 30)
        if kind < 9:
            return layers.Linear(draw.random() < 0.8)
        if kind < 13:
            return layers.Activation(
                draw.choice(["Tanh", "Sigmoid", "GELU", "SiLU", "Identity"])
            )
        if kind < 15:
            whole_batch = (
                [] if self._is_data_parallel else ["batch", "batch", "batch, mean"]
            )
            return layers.Norm(
                draw.choice(["layer", "group", "batch, evaluating", *whole_batch])
            )
        if kind < 20:
            small = [
                self._again,
                self._setting,
                self._count,
                self._buffer,
                self._buffer,
                self._marked,
                self._marked,
            ]
            return draw.choice([*small, self._varied])()
        if kind < 22:
            return layers.Held(draw.choice(modules.HELD))
        if kind < 25:
            return layers.Simple(
                draw.choice(
                    layers.SIMPLE[:-1] if draw.random() < 0.9 else layers.SIMPLE
                )
            )
        if kind < 27:
            return draw.choice([self._parametrized, self._pruned])()
        inner = layers.Linear() if draw.random() < 0.6 else self._layer()
        if kind == 27:
            ways = (
                modules.WAYS_OF_CALLING
                if isinstance(inner, layers.Linear)
                else modules.WAYS_OF_CALLING[:5]
            )
            # A checkpoint calls its layer again, in a backward that is after the run.
            if self._is_data_parallel:
                ways = [way for way in ways if "checkpoint" not in way]
            if isinstance(inner, layers.Norm) and "batch" in inner.kind:
                # A checkpoint calls a layer again for the tensors that it has saved,
                # and then it counts a batch twice. One of torch saves some in any case,
                # `SyncBatchNorm` if something but its bias is trained.
                ways = [way for way in ways if way != "checkpoint"]
            return layers.Wrapped(inner, draw.choice(ways))
        if kind == 28 and draw.random() < 0.3:
            inside = tuple(self._parts(self._layer, draw.randint(1, 3)))
            return layers.Nested(
                inside or (inner,),
                draw.choice(["sequential", "list", "dict", "list and names"]),
            )
        if kind == 28:
            return layers.Hooked(inner, draw.choice(layers.HOOKS))
        if kind == 29:
            return (
                layers.Frozen(inner)
                if draw.random() < 0.5
                else layers.Keep(draw.random() < 0.7)
            )
        return layers.Odd(draw.choice(list(modules.ODD)))

    def _again(self) -> Layer:
        index = self._draw.randint(0, 3)
        return self._draw.choice([layers.Again(index), layers.Tied(index)])

    def _setting(self) -> Layer:
        return layers.Setting(self._draw.choice(modules.SETTINGS))

    def _count(self) -> Layer:
        return layers.Count(
            self._draw.choice(modules.COUNTS), self._draw.random() < 0.5
        )

    def _buffer(self) -> Layer:
        return layers.Buffer(
            self._draw.choice(modules.BUFFERS), self._draw.random() < 0.8
        )

    def _marked(self) -> Layer:
        draw = self._draw
        counts = None if draw.random() < 0.4 else draw.choice(modules.COUNTS)
        return layers.Marked(
            draw.choice(marked.PLACES), draw.choice(modules.SETTINGS), counts
        )

    def _varied(self) -> Layer:
        return layers.Varied(self._draw.random() < 0.5)

    def _parametrized(self) -> Layer:
        return layers.Parametrized(self._draw.choice(layers.PARAMETRIZED))

    def _pruned(self) -> Layer:
        return layers.Pruned(self._draw.choice(["l1", "structured", "mask"]))

    # What trains it

    def _optimizers(self, sparse: bool) -> list[Optimizer]:
        draw = self._draw
        count = draw.choice([1, 1, 1, 2, 2, 3])
        found = self._parts(lambda: self._optimizer(sparse), count) or [Optimizer()]
        return [
            Optimizer(
                one.kind, one.foreach, start, len(found), one.groups, one.scheduler
            )
            for start, one in enumerate(found)
        ]

    def _optimizer(self, sparse: bool) -> Optimizer:
        draw = self._draw
        if sparse:
            return Optimizer("SGD")
        kind = draw.choice(
            optimizers.OF_TORCH if draw.random() < 0.5 else optimizers.KINDS
        )
        kind = "SGD with momentum" if draw.random() < 0.25 else kind
        scheduler = draw.choice(optimizers.SCHEDULERS) if draw.random() < 0.3 else None
        if kind.startswith("around"):
            scheduler = None
        return Optimizer(
            kind,
            draw.choice([None, None, True, False]),
            0,
            1,
            draw.choice([1, 1, 2]),
            scheduler,
        )

    # The step

    def _loop(
        self, count: int, scaler: bool
    ) -> tuple[list[Action], list[Action], list[Action]]:
        draw, every = self._draw, self._draw.choice([1, 1, 1, 1, 2, 3])
        clear: list[Action] = [actions.Clear(draw.choice(actions.CLEARINGS), every)]
        back: list[Action] = [self._backward()]
        if draw.random() < 0.15 and not self._sees_calls:
            back.append(self._backward())
        edits: list[Action] = self._parts(self._edit, draw.choice([0, 0, 0, 1, 1, 2]))
        if scaler and draw.random() < 0.5:
            edits[:0] = [actions.Unscale(index) for index in range(count)]
        updates: list[Action] = [actions.Update(index, every) for index in range(count)]
        if draw.random() < 0.5:
            updates.append(actions.Schedule(draw.randint(0, 1)))
        rest = self._parts(self._rest, draw.choice([0, 0, 0, 1, 1, 2]))
        if draw.random() < 0.1 and not self._sees_calls:  # a second update in the step
            back = [*back, *updates, *clear, self._backward()]
        if draw.random() < 0.2:
            draw.shuffle(edits)
        line = [*clear, *back, *edits, *updates]
        for part in rest:
            line.insert(draw.randint(0, len(line)), part)
        if self._keeps and "micro=2" not in repr(line):
            line.append(actions.LookAtKept())
        line = [
            part
            for part in line
            if self._without is None or not self._without.search(repr(part))
        ]
        looks = (actions.Look, actions.Peek, actions.LookAtKept)
        of_rows = (
            actions.Backward,
            actions.Kept,
            actions.UpdateWithClosure,
            actions.Penalty,
            *looks,
        )
        needs = [i for i, part in enumerate(line) if isinstance(part, of_rows)]
        if not needs:
            return [], line, []
        first = draw.choice([0, 0, 0, needs[0]])
        last = draw.choice(
            [
                len(line),
                len(line),
                len(line),
                needs[-1] + 1,
                draw.randint(needs[-1] + 1, len(line)),
            ]
        )
        return line[:first], line[first:last], line[last:]

    def _backward(self) -> Action:
        draw = self._draw
        if self._keeps and draw.random() < 0.6:
            return actions.Kept(draw.random() < 0.5)
        way = "backward" if draw.random() < 0.7 else draw.choice(actions.WAYS_BACK)
        if way in ("backward twice", "assign", "add") and (
            self._sees_calls or self._some_rows
        ):
            way = "backward"
        # Then the backward of a batch normalisation may be needed in some replicas
        # only: see docs/features.md.
        if way == "of some" and self._some_rows and self._sees_the_batch:
            way = "backward"
        loss = draw.choice(actions.LOSSES[:3] if self._sees_calls else actions.LOSSES)
        return actions.Backward(
            loss,
            way,
            1
            if self._sees_calls or way in ("assign", "add")
            else draw.choice([1, 1, 1, 2]),
        )

    def _edit(self) -> Action:
        return actions.Clip(self._draw.choice(actions.CLIPS))

    def _rest(self) -> Action:
        draw = self._draw
        if draw.random() < 0.4:
            return actions.Peek(draw.choice(actions.PEEKS))
        if draw.random() < 0.1 and not self._sees_calls:
            return actions.UpdateWithClosure(draw.randint(0, 1))
        if draw.random() < 0.1 and not self._sees_calls:
            return actions.Penalty()
        if draw.random() < 0.4:
            return actions.Look(draw.choice(["no_grad", "inference_mode", "grad"]))
        return actions.Deed(draw.choice(actions.DEEDS))

    # Between steps

    def _event(self) -> Event:
        draw = self._draw
        way = draw.choice(list(writing.WAYS))
        index = draw.choice([None, 0, 1, 2])
        make: list[Callable[[], Event]] = [
            *[lambda: events.Write(way, index)] * 4,
            *[lambda: events.WriteBuffers(way, index)] * 2,
            *[lambda: events.WriteState(way, draw.randint(0, 1))] * 2,
            *[lambda: events.WriteGradients(way, index)] * 2,
            lambda: events.GradientReducer(draw.choice(actions.CLIPS)),
            events.AssignGradients,
            lambda: events.ReplaceState(
                draw.choice(["clone", "clear", "new entry"]), draw.randint(0, 1)
            ),
            events.SaveViews,
            events.WriteViews,
            lambda: events.ReplaceBuffer(
                draw.choice(
                    ["assign", "inference_mode", "registered", "deleted and registered"]
                ),
                draw.randint(0, 1),
            ),
            *[lambda: events.Change(draw.choice([0.5, 1.0, 1.5]))] * 2,
            events.Reset,
            lambda: events.Mark(
                draw.choice(["parameters", "buffers", "unmark", "forget"]),
                draw.choice([0.5, 2.0]),
            ),
            *[lambda: events.CopyVariables(draw.random() < 0.3)]
            * ("Varied(" in self._text),
            lambda: events.NewAttribute(
                draw.choice(["number", "list", "tensor", "dict", "none"])
            ),
            lambda: events.Freeze(index, draw.random() < 0.5),
            lambda: events.Mode(draw.random() < 0.5, draw.choice([None, 0, 1])),
            lambda: events.SwapLayer(draw.randint(0, 1)),
            lambda: events.AddLayer(draw.random() < 0.5),
            lambda: events.NewParameter(draw.randint(0, 1)),
            events.NewOptimizers,
            *[
                lambda: events.Save(
                    draw.choice(["deepcopy", "torch.save", "pickle", "alive"])
                )
            ]
            * 2,
            *[
                lambda: events.Load(
                    draw.choice(["both", "model", "optimizers"]), draw.random() < 0.3
                )
            ]
            * 2,
            lambda: events.Copy(
                draw.choice(["deepcopy", "pickle"]), draw.random() < 0.5
            ),
            lambda: events.CopyBoth(draw.choice(["deepcopy", "pickle"])),
            lambda: events.Rate(
                *draw.choice([("lr", 0.02), ("weight_decay", 0.1), ("momentum", 0.5)])
            ),
            events.ScheduleOutside,
            lambda: events.Regroup(
                draw.choice(
                    ["remove", "reverse", "reverse groups", "new list", "split"]
                ),
                draw.randint(0, 1),
            ),
            lambda: events.ClearOutside(draw.random() < 0.5),
            *[lambda: events.UpdateOutside(draw.randint(0, 1))] * 2,
            events.TrainOutside,
            *[self._evaluation] * 3,
            *[lambda: events.Teach(draw.choice(["data", "copy", "no_grad", "foreach"]))]
            * 2,
            events.Average,
            lambda: events.Hook(
                draw.choice(events.HOOKS[:4] if self._repeats else events.HOOKS),
                draw.randint(0, 1),
            ),
            *[
                lambda: events.UpdateHook(
                    draw.choice(events.UPDATE_HOOKS), draw.randint(0, 1)
                )
            ]
            * 2,
            lambda: events.Parametrize(draw.random() < 0.5, draw.randint(0, 1)),
            lambda: events.Prune(draw.random() < 0.4),
            events.RemoveWeightNorm,
            lambda: events.Move(
                draw.choice(["to", "double", "there and back", "apply"])
            ),
            lambda: events.Failing(
                self._may_fail_late and draw.random() < 0.5, draw.random() < 0.5
            ),
        ]
        return draw.choice(make)()

    def _evaluation(self) -> Event:
        draw = self._draw
        mode = draw.choice(["no_grad", "inference_mode", "grad"])
        return events.Evaluate(
            draw.randint(2 if self._sees_the_batch else 1, 6),
            mode,
            draw.random() < 0.4,
            draw.random() < 0.6,
        )
