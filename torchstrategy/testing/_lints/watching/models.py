"""Models, their modes and replicas, and what `fully_shard` divides."""

from __future__ import annotations

import functools
import threading
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchstrategy.testing._lints.checkpoints.checkpoints import (
    replaced as replaced_for_checkpoints,
)
from torchstrategy.testing._lints.evidence.asking import asked
from torchstrategy.testing._lints.evidence.fingerprints import fingerprint
from torchstrategy.testing._lints.gradients.gradient_hooks import (
    replaced as replaced_for_hooks,
)
from torchstrategy.testing._lints.torch_internals import sharded_parameter_class
from torchstrategy.testing._lints.watching.replaced import (
    Late,
    Method,
    Replaced,
    after,
    before,
)
from torchstrategy.testing._lints.watching.telling import Telling
from torchstrategy.testing._lints.weights.lost_ties import replaced as replaced_for_ties
from torchstrategy.testing._lints.weights.thrown_replicas import state_of

_SHOWING = ("__repr__", "__format__")


@final
class _Here(threading.local):
    # Whether the mode of a module is changed, and with it that of the modules in it.
    is_changing = False


@final
class Models:
    """Replaces what makes, calls and changes models."""

    def __init__(self, telling: Telling, late: Late) -> None:
        self._telling = telling
        self._late = late
        self._here = _Here()
        self._lock = threading.Lock()
        self._watches_sharding = False

    def replaced(self) -> Replaced:
        """What is replaced."""
        wrapped = DistributedDataParallel
        return [
            (wrapped, "__init__", after(wrapped.__init__, self._made)),
            (wrapped, "forward", before(wrapped.forward, self._calls)),
            (
                nn.DataParallel,
                "parallel_apply",
                self._replicating(nn.DataParallel.parallel_apply),
            ),
            (nn.Module, "train", self._changing(nn.Module.train)),
            *[
                (torch.Tensor, name, before(getattr(torch.Tensor, name), self._shown))
                for name in _SHOWING
            ],
            *replaced_for_checkpoints(self._telling.saw),
            *replaced_for_hooks(self._telling.saw),
            *replaced_for_ties(self._telling.saw),
        ]

    def watch_sharding(self) -> None:
        """Watches `fully_shard` once the program has imported it, as imports are slow.

        It does from the first event on after that.
        """
        kind = None if self._watches_sharding else sharded_parameter_class()
        if kind is None or not self._late.is_open:
            return
        with self._lock:  # threads that are no ranks may come here at once
            if not self._watches_sharding:
                self._watches_sharding = True
                self._late.replace(kind, "__init__", self._sharding(kind.__init__))

    def _made(self, wrapped: Any, *_: Any, **__: Any) -> None:
        self._telling.tell("made", wrapped)

    def _calls(self, wrapped: Any, *args: Any, **kwargs: Any) -> None:
        self._telling.tell("calls", wrapped, (*args, *kwargs.values()))

    def _shown(self, tensor: Any, *_: Any, **__: Any) -> None:
        if type(tensor) is torch.Tensor:
            self._telling.saw("shown", tensor)

    def _sharding(self, make: Method) -> Method:
        @functools.wraps(make)
        def told(own: Any, param: Any, *args: Any, **kwargs: Any) -> None:
            whole = fingerprint(param.detach())
            make(own, param, *args, **kwargs)
            self._telling.saw("sharded", param, own.sharded_param, whole)

        return told

    def _replicating(self, run: Method) -> Method:
        @functools.wraps(run)
        def told(parallel: Any, replicas: Any, *args: Any, **kwargs: Any) -> Any:
            if len(replicas) < 2:  # the model itself
                return run(parallel, replicas, *args, **kwargs)
            nothing: dict[tuple[str, str], Any] = {}
            state = asked(functools.partial(state_of, replicas[0]), nothing)
            results = run(parallel, replicas, *args, **kwargs)
            self._telling.saw("ran_replicas", replicas, state)
            return results

        return told

    def _changing(self, train: Method) -> Method:
        @functools.wraps(train)
        def told(module: Any, mode: bool = True) -> Any:
            if self._here.is_changing or torch.compiler.is_compiling():
                return train(module, mode)
            self._telling.saw("changes_mode", module, mode)
            self._here.is_changing = True
            try:
                return train(module, mode)
            finally:
                self._here.is_changing = False

        return told
