"""Models that are trained in evaluation mode.

Nobody has put them back after an evaluation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import nn
from typing_extensions import override

from torchstrategy.testing._lints.evidence.facts import Facts, address_of, parameters_of
from torchstrategy.testing._lints.evidence.modules import (
    modules_in,
    parameters_in,
    rate_of_dropout,
)
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import (
    Place,
    here,
    in_words,
    is_in_a_function,
    way_here,
)
from torchstrategy.testing._lints.findings import Finding, finding, some
from torchstrategy.testing._lints.lint import Follower
from torchstrategy.testing._lints.torch_internals import BatchNorm

_ENOUGH_STEPS = 2  # the forward pass of the first one may have been before `eval()`
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
# The first operators of layers: what else uses a parameter, as an average of weights
# does, is no evaluation.
_LAYERS = {
    "addmm", "mm", "bmm", "matmul", "linear", "convolution", "_convolution", "conv1d",
    "conv2d", "conv3d", "embedding", "native_batch_norm", "cudnn_batch_norm",
    "_native_batch_norm_legit", "batch_norm", "native_layer_norm", "layer_norm",
    "native_group_norm", "group_norm",
}  # fmt: skip


@final
@dataclass
class _Evaluation:
    """A call of `eval()` on a model that was trained in training mode until then.

    Attributes:
        way: Through which lines it was called.
        layers: The layers that are other ones in training.
        names: Their names and kinds.
        parameters: The parameters of the model, by id.
        optimizers: Those that have trained it.
        evaluated_at: Where it was called without gradients since then; None if it was
            not, so far.
        is_backward: Whether `backward` has changed its gradients since the last step,
            all of it in evaluation mode.
        steps: How many steps were made so.
        steps_at: Where the last one was made.
    """

    way: tuple[Place, ...]
    layers: Objects[nn.Module, None]
    names: list[str]
    parameters: set[int]
    optimizers: Objects[torch.optim.Optimizer, None]
    evaluated_at: Place | None = None
    is_backward: bool = False
    steps: int = 0
    steps_at: Place | None = None


class _Found(NamedTuple):
    evaluation: _Evaluation
    evaluated_at: Place


@final
class Modes(Follower):
    """Looks for `eval()`, a call without gradients, and then training.

    No call of `train()` or `eval()` is in between.

    Who trains in evaluation mode on purpose does so from the beginning, or calls
    `eval()` before the training and not before an evaluation. After an evaluation that
    was ever followed by `train()`, training mode is known of.
    """

    def __init__(self) -> None:
        # By rank, the addresses of parameters of a model that nobody has called since
        # `eval()`.
        self._pieces = {}
        self._evaluations: dict[int, list[_Evaluation]] = defaultdict(list)
        self._steps: dict[int, Objects[torch.optim.Optimizer, int]] = defaultdict(
            Objects
        )
        self._changed: dict[int, Objects[nn.Module, int]] = defaultdict(Objects)
        # By rank and way, what was followed by `train()`.
        self._right: set[tuple[int, tuple[Place, ...]]] = set()
        self._found: dict[tuple[Place, ...], _Found] = {}

    @override
    def changes_mode(self, facts: Facts, module: nn.Module, is_training: bool) -> None:
        layers: Objects[nn.Module, str] = Objects()
        layers.update(
            (layer, name) for name, layer in modules_in(module) if _has_modes(layer)
        )
        if not layers:
            return
        known = [
            one
            for one in self._evaluations[facts.rank]
            if any(layer in layers for layer in one.layers)
        ]
        trained = [(layer, name) for layer, name in layers.items() if layer.training]
        self._pieces.pop(facts.rank, None)
        if not is_training and not trained and known:
            # The next evaluation, or training in evaluation mode that is meant: the
            # next call says which.
            known[-1].evaluated_at, known[-1].steps = None, 0
            self._pieces[facts.rank] = _addresses_of(module), known[-1]
            return
        for one in known:
            if is_training and one.evaluated_at is not None and not one.steps:
                self._right.add((facts.rank, one.way))
            self._evaluations[facts.rank].remove(one)
        if not is_training:
            self._begins(facts, module, trained)
        for layer in layers:
            self._changed[facts.rank][layer] = facts.steps

    @override
    def operator(
        self,
        facts: Facts,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        if func.overloadpacket.__name__ not in _LAYERS:
            return
        addresses, evaluation = self._pieces[facts.rank]
        is_called = any(
            isinstance(one, torch.Tensor) and address_of(one) in addresses
            for one in args
        )
        if not is_called or (not torch.is_grad_enabled() and is_in_a_function()):
            return  # the functions of checkpoints run without gradients, in training
        del self._pieces[facts.rank]
        if torch.is_grad_enabled():
            self._evaluations[facts.rank].remove(evaluation)
        else:
            evaluation.evaluated_at = here()

    @override
    def went_back(self, facts: Facts) -> None:
        for one in self._evaluations[facts.rank]:
            if (
                one.evaluated_at is not None
                and facts.backwards
                and not one.parameters.isdisjoint(facts.backwards[-1].changed)
            ):
                one.is_backward = not any(layer.training for layer in one.layers)

    @override
    def steps(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        for one in self._evaluations[facts.rank]:
            if (
                not one.is_backward
                or one.evaluated_at is None
                or optimizer not in one.optimizers
            ):
                continue
            one.is_backward, one.steps, one.steps_at = False, one.steps + 1, here()
            if one.steps == _ENOUGH_STEPS:
                self._found.setdefault(one.way, _Found(one, one.evaluated_at))

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        self._steps[facts.rank][optimizer] = facts.steps + 1

    @override
    def findings(self) -> list[Finding | None]:
        return [_finding(found) for found in self._found.values()]

    def _begins(
        self, facts: Facts, module: nn.Module, layers: Sequence[tuple[nn.Module, str]]
    ) -> None:
        """`eval()` is called on a model.

        The model is followed if it was trained before, in training mode.
        """
        since = max(
            (self._changed[facts.rank].get(layer, 0) for layer, _ in layers), default=0
        )
        parameters = set(map(id, parameters_in(module)))
        optimizers: Objects[torch.optim.Optimizer, None] = Objects()
        for optimizer, step in list(self._steps[facts.rank].items()):
            if step > since and any(
                id(parameter) in parameters for parameter in parameters_of(optimizer)
            ):
                optimizers[optimizer] = None
        way, addresses = way_here(), _addresses_of(module)  # none of sharded parameters
        if (
            not layers
            or not optimizers
            or not addresses
            or (facts.rank, way) in self._right
        ):
            return
        names = [
            f"{name or 'the model'} ({type(layer).__name__})" for layer, name in layers
        ]
        there: Objects[nn.Module, None] = Objects()
        there.update((layer, None) for layer, _ in layers)
        evaluation = _Evaluation(way, there, names, parameters, optimizers)
        self._evaluations[facts.rank].append(evaluation)
        self._pieces[facts.rank] = addresses, evaluation


def _addresses_of(module: nn.Module) -> set[int]:
    return {address_of(parameter) for parameter in parameters_in(module)} - {0}


def _has_modes(layer: nn.Module) -> bool:
    """Whether a layer computes something else in training."""
    if isinstance(layer, BatchNorm):
        return layer.running_mean is not None
    if isinstance(layer, _DROPOUTS):
        return rate_of_dropout(layer) > 0
    return (
        isinstance(layer, (nn.RNNBase, nn.MultiheadAttention))
        and rate_of_dropout(layer) > 0
    )


def _finding(found: _Found) -> Finding | None:
    one = found.evaluation
    assert one.steps_at is not None  # it has made steps
    places = [one.way[0], found.evaluated_at, one.steps_at]
    return finding(
        "trained-in-eval-mode",
        f"`eval()` is called ({one.way[0]}), the model is evaluated "
        f"({found.evaluated_at}), and training goes on without `train()` "
        f"({in_words([one.steps_at])}). These layers no longer drop values, or no "
        "longer use the statistics of the batch, as in the steps before: "
        f"{some(one.names)}.",
        "Call `model.train()` after each evaluation. If it is meant, call "
        "`model.eval()` where training goes on.",
        places,
    )
