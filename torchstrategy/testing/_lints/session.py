"""One run of a program: what each rank has done, and the lints that are told."""

from __future__ import annotations

import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from torchstrategy.testing._lints import (
    checkpoints,
    collectives,
    gathered,
    gradients,
    layers,
    means,
    optimizers,
    precision,
    rows,
    sharding,
    weights,
)
from torchstrategy.testing._lints.evidence.asking import attribute
from torchstrategy.testing._lints.evidence.copies import gradient_used
from torchstrategy.testing._lints.evidence.facts import (
    Backward,
    Facts,
    Model,
    address_of,
)
from torchstrategy.testing._lints.evidence.fingerprints import number_of
from torchstrategy.testing._lints.evidence.known import version_of
from torchstrategy.testing._lints.evidence.losses import is_scaled, leaves_of, terms_of
from torchstrategy.testing._lints.evidence.own_steps import WRITES, OwnStep
from torchstrategy.testing._lints.evidence.places import here, standing_at, way_here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Follower, Lint, Seen
from torchstrategy.testing._ranks.lines import is_called_by_a_library
from torchstrategy.testing._ranks.witnesses import Told

_MOST_BACKWARDS = 1000  # without a step
_PUTTING = (torch.ops.aten.cat.default, torch.ops.aten.copy_.default)


# The rooms of lints, in the order in which findings are shown.
ROOMS = (
    weights,
    rows,
    means,
    gradients,
    gathered,
    sharding,
    layers,
    precision,
    optimizers,
    checkpoints,
    collectives,
)


@final
class Session:
    """One run.

    Args:
        size: How many ranks it has; 1 if it has none.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._facts: dict[int, Facts] = {}
        self._lints: list[Lint] = [lint for room in ROOMS for lint in room.make_lints()]
        self._followers = [lint for lint in self._lints if isinstance(lint, Follower)]
        self._seen: dict[Any, list[tuple[Lint | None, Seen]]] = {
            func: [(None, _puts_together)] for func in _PUTTING
        }
        for lint in self._lints:
            for func, seen in lint.operators().items():
                self._seen.setdefault(func, []).append((lint, seen))
        self._own: dict[int, OwnStep] = {}  # of ranks that have no optimizer of torch
        self._failures: list[Finding | None] = []
        # The optimizers of a rank that are making a step.
        self._open: dict[int, list[int]] = defaultdict(list)
        self._gradients_before: dict[int, dict[int, tuple[int, int]]] = {}

    def facts(self, rank: int) -> Facts:
        """What a rank has done."""
        if rank not in self._facts:
            self._facts[rank] = Facts(rank, self._size)
        return self._facts[rank]

    def findings(self) -> list[Finding]:
        """What was found in it."""
        found: list[Finding | None] = []
        self._each(lambda lint: found.extend(lint.findings()))
        return [one for one in [*found, *self._failures] if one is not None]

    def loses(self, lint: Lint | None, error: Exception) -> None:
        """A lint has failed: the program goes on without it.

        None: what lints share has failed, and none goes on.
        """
        lost = {lint} if lint is not None else {None, *self._lints}
        if lint in self._lints or (lint is None and self._lints):
            self._failures.append(
                _of_failed(None if lint is None else type(lint), error)
            )
        # New lists: other ranks may be going through the old ones.
        self._lints = [one for one in self._lints if one not in lost]
        self._followers = [one for one in self._followers if one not in lost]
        self._seen = {
            func: [one for one in seen if one[0] not in lost]
            for func, seen in self._seen.items()
        }

    @property
    def follows(self) -> bool:
        """Whether it has to be told of all operators now, not only of `operators`."""
        return any(lint.is_following for lint in self._followers)

    def operators(self) -> frozenset[Any]:
        """The operators of which it has to be told."""
        return WRITES.union(self._seen)

    def writes(self, rank: int, target: Any) -> None:
        """An operator of `WRITES` is going to run, on a tensor or on several."""
        facts, own = self.facts(rank), self._own.get(rank)
        if own is None or facts.has_had_optimizers or self._open[rank]:
            return
        parameters = own.written(target)
        if not parameters:
            return
        if own.place is None:
            facts.stepping = own.optimizer
            facts.takes_flats()
            self._each(lambda lint: lint.steps(facts, own.optimizer))
        own.place = here()
        facts.used |= {id(one): gradient_used(facts, one) for one in parameters}

    def operator(
        self,
        rank: int,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """An operator has run."""
        facts = self.facts(rank)
        for lint, seen in self._seen.get(func, ()):
            try:
                seen(facts, args, kwargs, result)
            except Exception as error:
                self.loses(lint, error)
        for follower in self._followers:
            try:
                if follower.follows(facts):
                    follower.operator(facts, func, args, kwargs, result)
            except Exception as error:
                self.loses(follower, error)
        if rank in self._own and self._own[rank].is_complete:
            self._ends_own_step(facts)

    def made(self, rank: int, wrapped: Any) -> None:
        """A model of `DistributedDataParallel` was made."""
        facts = self.facts(rank)
        ranks = tuple(dist.get_process_group_ranks(wrapped.process_group))
        number = sum(model.ranks == ranks for model in facts.models)
        model = Model(weakref.ref(wrapped), ("model", ranks, number), ranks)
        facts.models.append(model)
        self._each(lambda lint: lint.made(facts, model))

    def calls(self, rank: int, wrapped: Any, args: Sequence[Any]) -> None:
        """Such a model is called."""
        facts, is_training = (
            self.facts(rank),
            torch.is_grad_enabled() and wrapped.training,
        )
        is_synchronized = wrapped.require_backward_grad_sync
        model = next((one for one in facts.models if one.model() is wrapped), None)
        if model is None or not is_training:
            return
        self._ends_own_step(facts)
        facts.called.add(model.key)
        if is_synchronized:
            facts.synchronized.add(model.key)
            facts.left_open.discard(model.key)
        else:
            facts.left_open.add(model.key)
        self._each(lambda lint: lint.calls(facts, model, args))

    def told(self, told: Told) -> None:
        """A rank comes to a collective."""
        facts, is_of_torch = self.facts(told.rank), is_called_by_a_library()
        if told.kind in ("all_reduce", "reduce_scatter") and not is_of_torch:
            for tensor in told.gives:
                facts.reduces(tensor, told.detail, told.ranks)
        self._each(lambda lint: lint.told(facts, told, is_of_torch))

    def saw(self, rank: int, what: str, *args: Any) -> None:
        """Something has happened that no other lint asks for.

        `what` is the method of a lint that is told.
        """
        self._each(lambda lint: getattr(lint, what)(self.facts(rank), *args))

    def has_optimizer(self, rank: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was made."""
        self.facts(rank).optimizers[optimizer] = None
        self.facts(rank).has_had_optimizers = True
        self._each(lambda lint: lint.has_optimizer(self.facts(rank), optimizer))

    def has_had_optimizers(self, rank: int) -> bool:
        """Whether a rank has had an optimizer of torch, which may be gone."""
        return self.facts(rank).has_had_optimizers

    def goes_back(
        self, rank: int, losses: Sequence[torch.Tensor], is_plain: bool
    ) -> Backward:
        """`backward` is called; returns what `went_back` is given."""
        facts = self.facts(rank)
        self._ends_own_step(facts)
        facts.clipped = {}  # what hooks reduce while `backward` runs was not clipped
        self._each(lambda lint: lint.goes_back(facts, losses))
        if not facts.optimizers:
            facts.add_leaves([leaf for loss in losses for leaf in leaves_of(loss)])
        terms = terms_of(losses[0], facts.scale) if len(losses) == 1 else []
        self._gradients_before[rank] = _gradients(facts)
        way = way_here()
        scale = (
            facts.scale
            if any(is_scaled(loss, facts.scale) for loss in losses)
            else None
        )
        return Backward(way[0], way, terms, is_plain and len(losses) == 1, set(), scale)

    def went_back(self, rank: int, call: Backward) -> None:
        """It is over."""
        facts, before = self.facts(rank), self._gradients_before.pop(rank, {})
        after = _gradients(facts)
        call.changed |= {
            own for own, there in after.items() if before.get(own) != there
        }
        if len(facts.backwards) < _MOST_BACKWARDS:
            facts.backwards.append(call)
        facts.gradients = {own: address for own, (address, _) in after.items()}
        facts.addresses = set(facts.gradients.values())
        facts.factors = {}
        self._each(lambda lint: lint.went_back(facts))
        if not facts.has_had_optimizers:
            own = self._own.setdefault(rank, OwnStep(facts))
            own.waits_for(
                [one for one in facts.parameters() if id(one) in call.changed]
            )

    def gave_gradients(
        self,
        rank: int,
        call: Backward,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[Any],
    ) -> None:
        """`torch.autograd.grad` has returned gradients."""
        call.is_given = True
        both = zip(parameters, gradients, strict=True)
        self.facts(rank).given |= {
            id(one): weakref.ref(its) for one, its in both if its is not None
        }

    def zeroed(self, rank: int) -> None:
        """Gradients are set to zero."""
        self._ends_own_step(self.facts(rank))
        self._each(lambda lint: lint.zeroed(self.facts(rank)))
        self.facts(rank).backwards.clear()

    def steps(self, rank: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is going to make a step.

        Those within a step of another one are parts of it.
        """
        running = self._open[rank]
        self.facts(rank).has_had_optimizers = True
        if id(optimizer) in running:  # its last step has ended with an error
            running.clear()
        running.append(id(optimizer))
        if self.facts(rank).optimizers:  # it may have been made before lints watched
            self.facts(rank).optimizers[optimizer] = None
        if len(running) == 1:
            # A fused optimizer, which skips the step itself.
            if number_of(attribute(optimizer, "found_inf")):
                self.facts(rank).skips += 1
            self.facts(rank).stepping = optimizer
            self._each(lambda lint: lint.steps(self.facts(rank), optimizer))
        else:
            self._each(lambda lint: lint.steps_within(self.facts(rank), optimizer))

    def stepped(self, rank: int, optimizer: torch.optim.Optimizer) -> None:
        """It has made it."""
        running, facts = self._open[rank], self.facts(rank)
        if id(optimizer) not in running:
            return
        del running[running.index(id(optimizer)) :]
        if not running:
            self._has_stepped(facts, optimizer)

    @contextmanager
    def scaled_step(self, rank: int) -> Iterator[None]:
        """A block in which `GradScaler` makes a step, or skips it."""
        facts = self.facts(rank)
        before = facts.steps
        yield
        if facts.steps == before and not self._open[rank]:
            facts.skips += 1

    def _ends_own_step(self, facts: Facts) -> None:
        """What comes now is after a step of the program's own, if it has begun one."""
        own = self._own.get(facts.rank)
        if own is None or own.place is None:
            return
        with standing_at(own.place):
            self._has_stepped(facts, own.optimizer)
        own.ends()

    def _has_stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        facts.stepping = None
        self._each(lambda lint: lint.stepped(facts, optimizer))
        facts.steps += 1
        facts.forget()

    def _each(self, tell: Callable[[Lint], Any]) -> None:
        """Tells each lint something."""
        for lint in self._lints:
            try:
                tell(lint)
            except Exception as error:
                self.loses(lint, error)


def _puts_together(
    facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> None:
    """Tensors are joined in a new one, or one is written into a larger one."""
    if facts.addresses:
        facts.puts_together(
            result, args[0] if isinstance(args[0], (list, tuple)) else args[1:2]
        )


def _gradients(facts: Facts) -> dict[int, tuple[int, int]]:
    """The address and the version of each gradient, by the id of its parameter."""
    found = {}
    for parameter in facts.parameters():
        gradient = facts.gradient_of(parameter)
        if (
            gradient is not None
            and gradient.layout is torch.strided
            and not gradient.is_inference()
        ):
            found[id(parameter)] = address_of(gradient), version_of(gradient)
    return found


def _of_failed(lint: type[Lint] | None, error: Exception) -> Finding | None:
    """Says which lint has failed, with what; None: what all lints share."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(frame.filename).name}:{frame.lineno}"
    which = "what all lints share" if lint is None else f"the lint `{lint.__name__}`"
    place = here()
    return finding(
        "lint-failed",
        f"At {place}, {which} has ended with {type(error).__name__}: {error} ({at}). "
        "Your program went on without it, so the report lacks what it would have "
        "found.",
        "This is a mistake of torchstrategy, and not of your program: please report it "
        "with these lines.",
        [place],
    )
