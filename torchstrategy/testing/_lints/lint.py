"""What every lint is told.

A lint is a class of its own file, such as `FewStatistics` in `layers/batch_norm`.
`make_lints` of its room makes one for each run, and `Session` tells it what happens.
The name of a finding is what a comment silences; docs/testing.md has the table of
names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchstrategy.testing._lints.evidence.facts import Facts, Model
from torchstrategy.testing._lints.evidence.fingerprints import Fingerprint
from torchstrategy.testing._lints.evidence.places import Place
from torchstrategy.testing._lints.findings import Finding
from torchstrategy.testing._ranks.happened import Happened
from torchstrategy.testing._ranks.witnesses import Told, UnderWay

Seen = Callable[[Facts, Sequence[Any], dict[str, Any], Any], None]
"""Sees an operator: of whom, its arguments and its result."""


class Lint:
    """Looks for a kind of mistake in a program that runs.

    A lint overrides what it wants to be told.
    """

    def operators(self) -> dict[Any, Seen]:
        """The operators that it sees."""
        return {}

    def made(self, facts: Facts, model: Model) -> None:
        """A model of `DistributedDataParallel` was made."""

    def calls(self, facts: Facts, model: Model, args: Sequence[Any]) -> None:
        """It is called, to be trained."""

    def told(self, facts: Facts, told: Told, is_of_torch: bool) -> None:
        """A rank comes to a collective."""

    def begins(self, facts: Facts, under_way: UnderWay) -> None:
        """The program of a rank has called what it has to wait for.

        That is a collective, or to send or receive a message.
        """

    def awaited(self, facts: Facts, part: Any) -> None:
        """The program has waited for its part of a collective or message."""

    def synchronized(self, facts: Facts) -> None:
        """The program has waited for its device, and so for all that was under way."""

    def uses_file(self, facts: Facts, happened: Happened, what: str, file: Any) -> None:
        """The program `"reads"`, `"writes"`, `"looks"` for or `"locks"` a file."""

    def groups(self, facts: Facts, ranks: Sequence[int] | None) -> None:
        """`dist.new_group` is called, as all these ranks must; None: with all ranks."""

    def has_optimizer(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was made."""

    def goes_back(self, facts: Facts, losses: Sequence[torch.Tensor]) -> None:
        """`backward` is called."""

    def continues(
        self, facts: Facts, outputs: Sequence[torch.Tensor], gradients: Sequence[Any]
    ) -> None:
        """`backward` gets gradients from its caller, one for each output.

        It gets None for one that needs none.
        """

    def went_back(self, facts: Facts) -> None:
        """`backward` is over."""

    def differentiated(
        self, facts: Facts, outputs: Sequence[Any], gradients: Sequence[Any]
    ) -> None:
        """`torch.autograd.grad` returned gradients for a loss, with their own graph."""

    def zeroed(self, facts: Facts) -> None:
        """`zero_grad` is called, of an optimizer or of a module."""

    def changes_mode(
        self, facts: Facts, module: torch.nn.Module, is_training: bool
    ) -> None:
        """`train()` or `eval()` will be called, of a module and not of a larger one."""

    def scheduled(self, facts: Facts, scheduler: Any) -> None:
        """A scheduler of learning rates was made, which is a first step, or stepped."""

    def measured(self, facts: Facts, scheduler: Any, metric: Any) -> None:
        """A scheduler that lowers learning rates by a metric has got one."""

    def sharded(
        self,
        facts: Facts,
        whole: torch.Tensor,
        parameter: torch.Tensor,
        before: Fingerprint | None,
    ) -> None:
        """`fully_shard` has divided a whole parameter.

        Something is known of it from before.
        """

    def shown(self, facts: Facts, tensor: torch.Tensor) -> None:
        """The text of a tensor is asked for, as by `print`."""

    def replayed(self, facts: Facts, graph: Any) -> None:
        """A CUDA graph was run again."""

    def captures(self, facts: Facts, graph: Any, is_over: bool) -> None:
        """The capture of a CUDA graph has begun, or is over."""

    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is going to make a step."""

    def steps_within(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is going to make a step within the step of another one."""

    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        """It has made it."""

    def opened(self, facts: Facts, loader: Any) -> None:
        """The rows of a loader are asked for from the beginning."""

    def drew(self, facts: Facts, loader: Any, rows: Any) -> None:
        """The rows of a batch are drawn; None: there are no more."""

    def got(self, facts: Facts, loader: Any, batch: Any) -> None:
        """A batch of a data set that has no numbers of rows is there."""

    def unpickled(self, facts: Facts, value: Any) -> None:
        """`torch.load` has returned something."""

    def restored(
        self, facts: Facts, module: torch.nn.Module, state: dict[str, Any], misfits: Any
    ) -> None:
        """A module loaded its `state_dict`, and returned which names did not fit."""

    def gave_state(
        self, facts: Facts, module: torch.nn.Module, state: dict[str, Any]
    ) -> None:
        """A module has given its `state_dict`."""

    def moved(
        self, facts: Facts, module: torch.nn.Module, ties: list[tuple[str, str]]
    ) -> None:
        """A module was moved, as by `.to()`.

        Some of its parameters, two each, have had the same memory before.
        """

    def restored_optimizer(
        self, facts: Facts, optimizer: torch.optim.Optimizer, state: Any
    ) -> None:
        """An optimizer has loaded its `state_dict`."""

    def gave_optimizer_state(
        self, facts: Facts, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """An optimizer has given its `state_dict`."""

    def sets_epoch(self, facts: Facts, sampler: Any) -> None:
        """`set_epoch` of a sampler was called.

        It is a `DistributedSampler`, or one of the program's own.
        """

    def ran_replicas(
        self,
        facts: Facts,
        replicas: Sequence[torch.nn.Module],
        before: dict[tuple[str, str], Any],
    ) -> None:
        """`nn.DataParallel` has run replicas; what the first of them held before."""

    def hooked(
        self, facts: Facts, model: Any, place: Place, given: torch.Tensor, future: Any
    ) -> None:
        """A hook of gradients, registered at a place, got some numbers.

        It has returned a future of what to write.
        """

    def findings(self) -> list[Finding | None]:
        """What it has found, at the end; None of what is silenced."""
        return []


class Follower(Lint):
    """A lint that keeps pieces of memory.

    It has to see all operators of a rank while it keeps some of it.
    """

    _pieces: dict[int, Any]  # by rank

    def follows(self, facts: Facts) -> bool:
        """Whether it has to see all operators of a rank now."""
        return bool(self._pieces.get(facts.rank))

    @property
    def is_following(self) -> bool:
        """Whether it has to see all operators of some rank now."""
        return bool(self._pieces)

    def operator(
        self,
        facts: Facts,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Sees any operator of a rank."""
        raise NotImplementedError
