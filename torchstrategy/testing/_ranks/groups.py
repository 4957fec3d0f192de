"""The process group that ranks on threads have.

PyTorch's own C++ and Python work on it: the reducer, FSDP and DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch.futures import Future

from torchstrategy.testing._ranks.exchanges import Call, Part, Settle, Values
from torchstrategy.testing._ranks.refusals import (
    check_backend,
    check_gathered,
    check_own_message,
    check_scattered,
    check_split,
)
from torchstrategy.testing._ranks.store import RankStore
from torchstrategy.testing._ranks.tensors import name_of, reduced
from torchstrategy.testing._ranks.torch_internals import (
    after_backward,
    counted_as,
    is_read_by_torch,
)
from torchstrategy.testing._ranks.witnesses import Told, UnderWay, tell, work_witnesses
from torchstrategy.testing._ranks.world import World

_Work: Any = dist.Work
_ProcessGroup: Any = dist.ProcessGroup


@final
class RankWork(_Work):  # type: ignore[misc]
    """What an asynchronous collective returns.

    Until it is waited for, the tensors that it writes are spoiled.
    """

    def __init__(self, world: World, rank: int, part: Part) -> None:
        super().__init__()
        self._world, self._rank, self._part = world, rank, part
        # Whether its result is one tensor, in which those that the rank gets are the
        # rows.
        self.is_stacked = False

    def wait(self, timeout: Any = None) -> bool:
        self._world.finish(self._rank, self._part)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._world.is_there(self._rank, self._part)

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._values()

    def get_future(self) -> Any:
        # C++ that waits for a future cannot hand over to another rank: so this waits,
        # and the future is complete. The C++ that asks in a backward pass, for
        # gradients, waits at its end.
        self._world.finish(
            self._rank, self._part, is_early=after_backward(self._part.receive)
        )
        future: Any = Future()
        future.set_result(self._values())
        return future

    def _values(self) -> list[torch.Tensor]:
        values = self._part.deliver()
        return [torch.stack(values)] if self.is_stacked else values

    def _source_rank(self) -> int:
        return self._part.sender()


@final
class RankGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group, as one of its ranks has it.

    Its methods are those that torch calls, by torch's names, with torch's arguments;
    ranks in them count in the group.

    Args:
        world: The run.
        rank: The rank whose group it is, in the whole run.
        ranks: Who is in it, in order.
        name: The name that torch gave it.
        is_whole: Whether it is the group of all ranks, which programs need not name.
    """

    def __init__(
        self, world: World, rank: int, ranks: Sequence[int], name: str, is_whole: bool
    ) -> None:
        super().__init__(ranks.index(rank), len(ranks))
        self._world, self._me, self._ranks, self._name = world, rank, list(ranks), name
        self._key = name, tuple(ranks)
        self._calls = 0
        self._in_words = (
            "" if is_whole else f" in group {name} (ranks {', '.join(map(str, ranks))})"
        )
        self._store = RankStore(world, rank)
        self._named = "undefined"
        self._backends: dict[str, str] = {}
        self._bound: torch.device | None = None

    def serve(
        self, backend: str, backends: dict[str, str], bound: torch.device | None
    ) -> None:
        """Makes it a group of some backend.

        Args:
            backend: What the program named.
            backends: The backend for each type of device. Empty: there is no
                accelerator, and it takes any tensors.
            bound: The device that the program gave as `device_id`.
        """
        self._named, self._backends, self._bound = backend, backends, bound

    def name(self) -> str:
        names = [part.rpartition(":")[2] for part in self._named.split(",")]
        return "nccl" if "nccl" in names else names[0]

    _get_backend_name = name

    def getBackendName(self) -> str:
        # C++ asks this, and would look for gloo's own object where it hears "gloo".
        return "nccl" if self.name() == "nccl" else "torchstrategy_ranks"

    @property
    def group_name(self) -> str:
        return self._name

    def get_group_store(self) -> RankStore:
        return self._store

    def shutdown(self) -> None:
        """Nothing is held open."""

    abort = shutdown

    supports_coalescing = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self._backends or ("cpu",)]

    @property
    def bound_device_id(self) -> torch.device | None:
        # torch would split this group, and look for the communicator of the device.
        return None if is_read_by_torch() else self._bound

    def _get_backend(self, device: Any) -> RankGroup:
        """The object that has the group's collectives on a device.

        Since torch 2.14, `batch_isend_irecv` asks any group for it.
        """
        kind = torch.device(device).type
        if self._backends and kind not in self._backends:
            raise RuntimeError(f"No backend type associated with device type {kind}")
        return self

    def _start_coalescing(self, device: Any) -> None:
        """Holds the collectives in a coalescing block one by one.

        Each collective is checked, and each is in the record.
        """

    def _end_coalescing(self, device: Any) -> None:
        """They have been held; what they return is waited for one by one."""

    # Collectives

    @counted_as("allreduce_")
    def allreduce(self, tensors: Values, opts: Any = None) -> RankWork:
        operation = _operation(opts)

        def settle(given: list[Values]) -> list[Values]:
            return [
                [reduced(those, operation) for those in zip(*given, strict=True)]
            ] * len(given)

        self._check(
            "all_reduce", tensors, operation=operation, is_coalesced=len(tensors) > 1
        )
        return self._meet(
            "all_reduce", tensors, tensors, tensors, settle, detail=name_of(operation)
        )

    allreduce_coalesced = counted_as("allreduce_coalesced_")(allreduce.__wrapped__)  # type: ignore[attr-defined]

    @counted_as("broadcast_")
    def broadcast(self, tensors: Values, opts: Any = None) -> RankWork:
        root = _root(opts)
        is_root = root == self.rank()
        self._check("broadcast", tensors)
        return self._meet(
            "broadcast",
            tensors,
            tensors if is_root else [],
            [] if is_root else tensors,
            lambda given: [given[root]] * len(given),
            detail=f"from rank {self._ranks[root]}",
        )

    @counted_as("allgather_")
    def allgather(
        self, outputs: list[Values], inputs: Values, opts: Any = None
    ) -> RankWork:
        pieces = [piece for pieces in outputs for piece in pieces]
        self._check("all_gather", inputs, pieces)
        work = self._all_gather(inputs, pieces, same_sizes=False)
        work.is_stacked = (
            self.name() == "nccl" and len({piece.shape for piece in pieces}) == 1
        )
        return work

    @counted_as("_allgather_base_")
    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> RankWork:
        self._check("all_gather", [given, output])
        check_gathered(output, given, self.size())
        return self._all_gather([given], self._pieces(output))

    @counted_as("allgather_into_tensor_coalesced_")
    def all_gather_single_coalesced(
        self, outputs: Values, inputs: Values, opts: Any = None
    ) -> RankWork:
        self._check("all_gather", [*inputs, *outputs], is_coalesced=True)
        for output, given in zip(outputs, inputs, strict=True):
            check_gathered(output, given, self.size())
        return self._all_gather(
            inputs, [piece for output in outputs for piece in self._pieces(output)]
        )

    # Before torch 2.13 the same methods have these names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(
        self, inputs: Values, pieces: Values, same_sizes: bool = True
    ) -> RankWork:
        def settle(given: list[Values]) -> list[Values]:
            return [
                [theirs[index] for index in range(len(inputs)) for theirs in given]
            ] * len(given)

        size = sum(piece.nbytes for piece in pieces)
        return self._meet(
            "all_gather",
            inputs,
            inputs,
            pieces,
            settle,
            size=size,
            same_sizes=same_sizes,
        )

    @counted_as("allgather_coalesced_")
    def allgather_coalesced(
        self, outputs: list[Values], inputs: Values, opts: Any = None
    ) -> RankWork:
        self._check("all_gather", inputs, is_coalesced=True)
        by_tensor = [
            pieces[index] for index in range(len(inputs)) for pieces in outputs
        ]
        return self._all_gather(inputs, by_tensor, same_sizes=False)

    @counted_as("reduce_scatter_")
    def reduce_scatter(
        self, outputs: Values, inputs: list[Values], opts: Any = None
    ) -> RankWork:
        pieces = [piece for pieces in inputs for piece in pieces]
        self._check("reduce_scatter", outputs, pieces, _operation(opts))
        # NCCL takes lists whose pieces differ in size: then the ranks' outputs do, and
        # the lists have to be alike.
        is_even = len({piece.shape for piece in pieces}) == 1
        return self._reduce_scatter(
            outputs, pieces, opts, shown=outputs if is_even else pieces
        )

    @counted_as("_reduce_scatter_base_")
    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> RankWork:
        check_scattered(output, given, self.size())
        self._check("reduce_scatter", [output, given], operation=_operation(opts))
        return self._reduce_scatter([output], self._pieces(given), opts, shown=[output])

    @counted_as("reduce_scatter_tensor_coalesced_")
    def reduce_scatter_single_coalesced(
        self, outputs: Values, inputs: Values, opts: Any = None
    ) -> RankWork:
        self._check(
            "reduce_scatter",
            [*outputs, *inputs],
            operation=_operation(opts),
            is_coalesced=True,
        )
        for output, given in zip(outputs, inputs, strict=True):
            check_scattered(output, given, self.size())
        return self._reduce_scatter(
            outputs,
            [piece for given in inputs for piece in self._pieces(given)],
            opts,
            outputs,
        )

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, outputs: Values, pieces: Values, opts: Any, shown: Values
    ) -> RankWork:
        operation, n = _operation(opts), len(self._ranks)

        def settle(given: list[Values]) -> list[Values]:
            return [
                [
                    reduced([theirs[i * n + rank] for theirs in given], operation)
                    for i in range(len(outputs))
                ]
                for rank in range(n)
            ]

        size = sum(piece.nbytes for piece in pieces)
        return self._meet(
            "reduce_scatter",
            shown,
            pieces,
            outputs,
            settle,
            detail=name_of(operation),
            size=size,
        )

    @counted_as("reduce_")
    def reduce(self, tensors: Values, opts: Any = None) -> RankWork:
        root, operation = _root(opts), _operation(opts)

        def settle(given: list[Values]) -> list[Values]:
            return [
                [reduced(those, operation) for those in zip(*given, strict=True)]
            ] * len(given)

        self._check("reduce", tensors, operation=operation)
        gets = tensors if root == self.rank() else []
        detail = f"{name_of(operation)} to rank {self._ranks[root]}"
        return self._meet("reduce", tensors, tensors, gets, settle, detail=detail)

    @counted_as("gather_")
    def gather(
        self, outputs: list[Values], inputs: Values, opts: Any = None
    ) -> RankWork:
        root = _root(opts)
        gets = outputs[0] if root == self.rank() else []
        self._check("gather", inputs, gets)
        return self._meet(
            "gather",
            inputs,
            inputs,
            gets,
            lambda given: [[theirs[0] for theirs in given]] * len(given),
            detail=f"to rank {self._ranks[root]}",
            size=inputs[0].nbytes * len(self._ranks),
        )

    @counted_as("scatter_")
    def scatter(
        self, outputs: Values, inputs: list[Values], opts: Any = None
    ) -> RankWork:
        root = _root(opts)
        gives = inputs[0] if root == self.rank() else []
        self._check("scatter", outputs, gives)
        return self._meet(
            "scatter",
            outputs,
            gives,
            outputs,
            lambda given: [[piece] for piece in given[root]],
            detail=f"from rank {self._ranks[root]}",
            size=outputs[0].nbytes * len(self._ranks),
        )

    @counted_as("alltoall_")
    def alltoall(self, outputs: Values, inputs: Values, opts: Any = None) -> RankWork:
        self._check("all_to_all", [*inputs, *outputs])
        return self._all_to_all(inputs, inputs, outputs)

    @counted_as("alltoall_base_")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        to_get: Sequence[int],
        to_give: Sequence[int],
        opts: Any = None,
    ) -> RankWork:
        self._check("all_to_all", [given, output])
        for tensor, rows in ((given, to_give), (output, to_get)):
            check_split(tensor, rows, self.size())
        return self._all_to_all(
            [given], self._pieces(given, to_give), self._pieces(output, to_get)
        )

    alltoall_base = all_to_all_single

    def _all_to_all(self, shown: Values, gives: Values, gets: Values) -> RankWork:
        def settle(given: list[Values]) -> list[Values]:
            return [list(values) for values in zip(*given, strict=True)]

        return self._meet("all_to_all", shown, gives, gets, settle, same_sizes=False)

    def barrier(self, opts: Any = None) -> RankWork:
        return self._meet("barrier", [], [], [], lambda given: [[]] * len(given))

    def monitored_barrier(
        self, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        # A kind of its own: gloo's waits for no rank that is in a `barrier`.
        self._meet(
            "monitored_barrier", [], [], [], lambda given: [[]] * len(given)
        ).wait()

    # Messages

    def send(self, tensors: Values, target: int, tag: int = 0) -> RankWork:
        self._check("send", tensors)
        self._check_own("sends a message to itself", tensors, target)
        self._come_to("send")
        self._world.finish_before(self._me, self._key, tensors)
        detail = f"to rank {self._ranks[target]}{_tagged(tag)}"
        call = Call(
            "send", tensors, tensors, [], _message, detail=detail, group=self._key
        )
        return self._work(
            self._world.send(self._me, self._ranks[target], (self._key, tag), call),
            tensors,
            [],
        )

    def recv(self, tensors: Values, source: int, tag: int = 0) -> RankWork:
        self._check_own("receives a message from itself", tensors, source)
        return self._receive(
            tensors, self._ranks[source], tag, f"from rank {self._ranks[source]}"
        )

    def recv_anysource(self, tensors: Values, tag: int = 0) -> RankWork:
        return self._receive(tensors, None, tag, "from any rank")

    def _receive(
        self, tensors: Values, source: int | None, tag: int, detail: str
    ) -> RankWork:
        self._check("recv", tensors)
        self._come_to("recv")
        self._world.finish_before(self._me, self._key, tensors)
        call = Call(
            "recv",
            tensors,
            [],
            tensors,
            _message,
            detail=detail + _tagged(tag),
            group=self._key,
        )
        return self._work(
            self._world.receive(self._me, source, (self._key, tag), call), [], tensors
        )

    # Of all of them

    def _meet(
        self,
        kind: str,
        shown: Values,
        gives: Values,
        gets: Values,
        settle: Settle,
        **options: Any,
    ) -> RankWork:
        self._come_to(kind)
        self._world.finish_before(self._me, self._key, [*shown, *gives, *gets])
        self._calls += 1
        name = f"#{self._calls}{self._in_words}"
        key = (self._key, self._calls)
        tell(
            Told(
                self._me, self._ranks, key, kind, options.get("detail", ""), gives, gets
            )
        )
        call = Call(kind, shown, gives, gets, settle, group=self._key, **options)
        return self._work(
            self._world.meet(self._me, key, self._ranks, name, call), gives, gets
        )

    def _check(
        self,
        kind: str,
        tensors: Values,
        others: Sequence[torch.Tensor] = (),
        operation: Any = None,
        is_coalesced: bool = False,
    ) -> None:
        """Refuses what this rank alone can see to be wrong.

        Nothing is exchanged yet, so the group goes on to work.
        """
        check_backend(self._backends, kind, tensors, others, operation, is_coalesced)

    def _check_own(self, what: str, tensors: Values, other: int) -> None:
        """Refuses a message of this rank to itself, if the backend does not take it."""
        if other == self.rank():
            backend = self._backends.get(tensors[0].device.type, self.name())
            check_own_message(f"rank {self._me} {what}", backend)

    def _come_to(self, kind: str) -> None:
        self._world.turns.pause(self._me)
        self._world.came_to(self._me, kind)

    def _work(self, part: Part, gives: Values, gets: Values) -> RankWork:
        if part.is_the_programs:
            for witness in work_witnesses:
                witness.begins(UnderWay(self._me, part, gives, gets))
        return RankWork(self._world, self._me, part)

    def _pieces(self, tensor: torch.Tensor, rows: Sequence[int] = ()) -> Values:
        """The piece of a tensor for each rank: equal ones, or `rows` of each."""
        tensor = tensor.detach()
        if len(rows):
            # The counts may be a tensor.
            return list(tensor.split([int(count) for count in rows]))
        return list(tensor.reshape(len(self._ranks), -1).unbind())


def _message(given: list[Values]) -> list[Values]:
    return [[], given[0]]


def _tagged(tag: int) -> str:
    return f", tag {tag}" if tag else ""


def _operation(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _root(opts: Any) -> int:
    return 0 if opts is None else int(opts.rootRank)
