"""Gradients that a pipeline's stage receives for another micro-batch's output."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, address_of
from torchstrategy.testing._lints.evidence.known import is_plain
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._ranks.witnesses import UnderWay

_MOST_KEPT = 64  # outputs of a stage under way
_MOST_GRADIENTS = 4096
_ENOUGH = 2  # steps of backward


class _Message(NamedTuple):
    """Numbers that a rank has sent or received.

    Attributes:
        number: The same for both ranks.
        tensor: What was sent, or what it is written on.
        storage: The memory of it.
        address: Where in memory.
        place: Where it was sent or received.
    """

    number: int
    tensor: weakref.ref[torch.Tensor]
    storage: weakref.ref[Any]
    address: int
    place: Place


class _Found(NamedTuple):
    backward_at: Place
    sent_at: Place
    received_at: Place


@final
class Messages(Lint):
    """Follows an output that a rank sends, and the gradient of it that comes back.

    A rank that receives an output computes with the tensor in which it came, and sends
    the `grad` of that tensor.
    """

    def __init__(self) -> None:
        self._numbers: Objects[Any, int] = Objects()
        self._count = itertools.count(1)
        self._sent: dict[int, deque[_Message]] = defaultdict(_kept)
        self._received: dict[int, deque[_Message]] = defaultdict(_kept)
        # By the number of a gradient: what it is the gradient of.
        self._outputs: dict[int, _Message] = {}
        self._times: Counter[_Found] = Counter()

    @override
    def begins(self, facts: Facts, under_way: UnderWay) -> None:
        exchange = under_way.part.message
        if exchange is None:
            return
        number = self._numbers.setdefault(exchange, next(self._count))
        for tensor in under_way.reads:
            output = self._output_of(facts, tensor)
            if output is not None:
                self._outputs[number] = output
                # Of which the receiver has made no use.
                if len(self._outputs) > _MOST_GRADIENTS:
                    del self._outputs[next(iter(self._outputs))]
            else:
                _keep(self._sent[facts.rank], number, tensor)
        for tensor in under_way.writes:
            _keep(self._received[facts.rank], number, tensor)

    @override
    def continues(
        self, facts: Facts, outputs: Sequence[torch.Tensor], gradients: Sequence[Any]
    ) -> None:
        for output, gradient in zip(outputs, gradients, strict=False):
            sent = _find(self._sent[facts.rank], output)
            got = _find(self._received[facts.rank], gradient)
            right = self._outputs.pop(got[0].number, None) if got else None
            # One output may go to several ranks.
            if (
                sent
                and right is not None
                and all(one.number != right.number for one in sent)
            ):
                self._times[_Found(here(), sent[0].place, right.place)] += 1

    @override
    def findings(self) -> list[Finding | None]:
        return [
            _finding(found, times)
            for found, times in self._times.items()
            if times >= _ENOUGH
        ]

    def _output_of(self, facts: Facts, gradient: torch.Tensor) -> _Message | None:
        """What was received in a tensor with this gradient."""
        address = address_of(gradient)
        for message in self._received[facts.rank] if address else ():
            tensor = message.tensor()
            if (
                tensor is not None
                and tensor.is_leaf
                and tensor.grad is not None
                and address_of(tensor.grad) == address
            ):
                return message
        return None


def _kept() -> deque[_Message]:
    """The messages of a rank, the last one first."""
    return deque(maxlen=_MOST_KEPT)


def _keep(messages: deque[_Message], number: int, tensor: torch.Tensor) -> None:
    if is_plain(tensor):
        storage: Any = tensor.untyped_storage()
        made = _Message(
            number,
            weakref.ref(tensor),
            weakref.ref(storage),
            address_of(tensor),
            here(),
        )
        messages.appendleft(made)


def _find(messages: deque[_Message], tensor: Any) -> list[_Message]:
    """The messages in whose memory the numbers of a tensor are, the last one first."""
    address = address_of(tensor)
    there = messages if address else ()
    return [
        message
        for message in there
        if message.address == address and message.storage() is not None
    ]


def _finding(found: _Found, times: int) -> Finding | None:
    return finding(
        "gradient-of-another-output",
        f"`backward` at {found.backward_at} begins at an output that was sent at "
        f"{found.sent_at}, and is given the gradient of another one: {times} times, a "
        "rank has sent gradients back in another order than it has received the "
        f"outputs ({found.received_at}).",
        "Send gradients back in the order in which they are received, or give all "
        "messages of a micro-batch a number: `dist.send(t, dst, tag=m)` and "
        "`dist.recv(t, src, tag=m)`.",
        list(dict.fromkeys(found)),
    )
