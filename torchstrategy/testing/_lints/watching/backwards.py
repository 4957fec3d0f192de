"""Calls of `backward` and of `torch.autograd.grad`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from torchstrategy.testing._lints.evidence.facts import Backward
from torchstrategy.testing._lints.torch_internals import known_to_script
from torchstrategy.testing._lints.watching.replaced import Method, Replaced, listed
from torchstrategy.testing._lints.watching.telling import Telling
from torchstrategy.testing._ranks.world import current_rank


@final
class _Here(threading.local):
    depth = 0  # of calls within each other


@final
class Backwards:
    """Replaces what begins a backward pass.

    Those within another one, as of a checkpoint, are parts of it.
    """

    def __init__(self, telling: Telling) -> None:
        self._telling = telling
        self._here = _Here()

    def replaced(self) -> Replaced:
        """What is replaced."""
        autograd: Any = torch.autograd
        return [
            (
                autograd,
                "backward",
                known_to_script(self._backward(autograd.backward), autograd.backward),
            ),
            (
                autograd,
                "grad",
                known_to_script(self._grad(autograd.grad), autograd.grad),
            ),
        ]

    def _backward(self, backward: Method) -> Method:
        @functools.wraps(backward)
        def told(
            tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            if self._here.depth or self._telling.session() is None:
                return backward(tensors, grad_tensors, *args, **kwargs)
            if isinstance(tensors, Iterator):  # which can be gone through only once
                tensors = tuple(tensors)
            losses = [one for one in listed(tensors) if _is_tensor(one)]
            keeps = kwargs.get("retain_graph", args[0] if args else None)
            gradients = listed(grad_tensors)
            has_gradient = any(one is not None for one in gradients)
            if has_gradient:
                self._telling.saw("continues", listed(tensors), gradients)
            with self._going_back(losses, not keeps and not has_gradient) as call:
                result = backward(tensors, grad_tensors, *args, **kwargs)
            if call is not None:
                self._telling.tell("went_back", call)
            return result

        return told

    def _grad(self, grad: Method) -> Method:
        @functools.wraps(grad)
        def told(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(inputs, Iterator):  # which can be gone through only once
                inputs = tuple(inputs)
            losses, parameters = listed(outputs), listed(inputs)
            # Gradients of a graph of gradients, or of rows, are for a loss and not for
            # a step.
            is_plain = not args and not kwargs.get("create_graph") and len(losses) == 1
            are_of_parameters = len(parameters) > 1 and all(
                _is_tensor(one) and one.is_leaf for one in parameters
            )
            if (
                self._here.depth
                or self._has_optimizers()
                or not is_plain
                or not are_of_parameters
            ):
                gradients = grad(outputs, inputs, *args, **kwargs)
                if kwargs.get("create_graph") and not self._here.depth:
                    self._telling.saw("differentiated", losses, listed(gradients))
                return gradients
            with self._going_back(losses, not kwargs.get("retain_graph")) as call:
                gradients = grad(outputs, inputs, *args, **kwargs)
            if call is not None:
                self._telling.tell("gave_gradients", call, parameters, gradients)
                self._telling.tell("went_back", call)
            return gradients

        return told

    def _has_optimizers(self) -> bool:
        """Whether nobody has to be told what `torch.autograd.grad` returns.

        An optimizer of torch makes the steps.
        """
        session = self._telling.session()
        return session is None or session.has_had_optimizers(current_rank())

    @contextmanager
    def _going_back(
        self, losses: list[Any], is_plain: bool
    ) -> Iterator[Backward | None]:
        """A block in which a backward pass runs.

        It gets what the session has made of the call.
        """
        call = self._telling.tell("goes_back", losses, is_plain)
        self._here.depth += 1
        try:
            yield call
        finally:
            self._here.depth -= 1


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
