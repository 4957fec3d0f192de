"""A program that calls `init_process_group` without ranks: it is the only rank."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch.distributed as dist

from torchstrategy.testing._ranks.groups import RankGroup
from torchstrategy.testing._ranks.orders import order_of_ranks
from torchstrategy.testing._ranks.record import RankRecord
from torchstrategy.testing._ranks.store import STORES, RankStore
from torchstrategy.testing._ranks.torch_internals import groups_made_by
from torchstrategy.testing._ranks.turns import Turns
from torchstrategy.testing._ranks.world import World, current_world, settle_here

_MODULES = (
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.distributed.device_mesh",
)


@contextmanager
def world_of_one(record: RankRecord, began: Callable[[], None]) -> Iterator[None]:
    """A block in which `init_process_group` without ranks makes a group of one rank.

    The program calls it where there are no ranks.

    Args:
        record: Gets the collectives.
        began: Called when that happens.
    """
    with ExitStack() as block:
        alone = _Alone(record, began, block)
        modules = [sys.modules[name] for name in _MODULES if name in sys.modules]
        real: Any = dist.init_process_group

        def init(*args: Any, **options: Any) -> None:
            alone.begin(args, options)
            real(*args, **options)

        for module in modules:
            _put(module, init)
            block.callback(_put, module, real)
        yield


def _put(module: Any, function: Any) -> None:
    module.init_process_group = function


@final
class _Alone:
    def __init__(
        self, record: RankRecord, began: Callable[[], None], block: ExitStack
    ) -> None:
        self._record, self._began, self._block = record, began, block
        self._world: World | None = None

    def begin(self, args: Any, options: dict[str, Any]) -> None:
        """Makes this thread the only rank, where it is none."""
        if self._world is None and current_world() is None:
            _refuse_several(args, options)
            self._settle()

    def _settle(self) -> None:
        turns = Turns(1, order_of_ranks(None, 1), _nothing, _nothing)
        turns.begin_here(0)
        world = World(1, turns, lambda rank, kind: None, self._record)
        store = RankStore(world, 0)

        def make(name: str, ranks: list[int]) -> dist.ProcessGroup:
            group: dist.ProcessGroup = RankGroup(
                world, 0, [0], name, is_whole=not ranks
            )
            return group

        self._block.enter_context(
            groups_made_by(make, lambda: store, STORES, lambda rank, size: (0, 1))
        )
        self._block.callback(_leave)
        settle_here(world, 0)
        self._world = world
        self._began()


def _nothing(rank: int) -> None:
    """One rank needs nothing to begin its turn."""


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    settle_here(None)


def _refuse_several(args: Any, options: dict[str, Any]) -> None:
    size = options.get("world_size", args[3] if len(args) > 3 else -1)
    if size not in (-1, 1, None):
        raise RuntimeError(
            f"init_process_group(world_size={size}) was called on thread "
            f"{threading.current_thread().name!r}, and this program has no ranks. Run "
            f"it with --ranks {size}, which starts it {size} times, as torchrun does."
        )
