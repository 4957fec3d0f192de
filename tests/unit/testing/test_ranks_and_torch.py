"""The private names of torch that ranks need.

Each does what `_ranks/torch_internals.py` says of it.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.modules import module as modules
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchstrategy
from conditions import for_changes, for_releases
from torchstrategy._base.objects.torch_hooks import on_step_begin, on_step_end
from torchstrategy._base.torch_internals import global_step_hooks
from torchstrategy.testing import run_ranks
from torchstrategy.testing._ranks import torch_internals as internals
from workers import exact_steps


def test_the_log_of_a_wrapped_model_names_the_backend_of_the_program() -> None:
    """It named the one of torchstrategy."""

    def main(rank: int) -> str:
        dist.init_process_group("gloo")
        model: Any = DistributedDataParallel(nn.Linear(2, 1))
        return str(model._get_ddp_logging_data()["backend_name"])

    assert run_ranks(main, 2)[0] == ["gloo", "gloo"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch deprecates the functions
def test_a_module_that_a_rank_imports_keeps_no_group_of_this_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Functions of `torch.distributed.nn` have the default group as a default.

    All ranks got that of the first.
    """
    name = "torch.distributed.nn.functional"
    monkeypatch.delitem(sys.modules, name, raising=False)

    def main(rank: int) -> float:
        dist.init_process_group("gloo")
        assert dist.group.WORLD is c10d._get_default_group()
        total: torch.Tensor = importlib.import_module(name).all_reduce(
            torch.ones(1) + rank
        )
        return total.item()

    assert run_ranks(main, 2)[0] == [3.0, 3.0]
    assert dist.group.WORLD is None


@for_releases
def test_there_are_no_other_variables_of_a_process() -> None:
    """If torch gets a new one, ranks may have to have one each."""
    constants = {
        "_GLOO_AVAILABLE",
        "_MPI_AVAILABLE",
        "_NCCL_AVAILABLE",
        "_UCC_AVAILABLE",
        "_XCCL_AVAILABLE",
    }
    constants |= {
        "_TORCHCOMM_AVAILABLE",
        "_DistributedBackendOptions",
        "_CollOp",
        "_P2POpMeta",
    }
    constants |= {"_FR_SELF_RECORDING_BACKENDS"}
    kinds = (dict, list, set, int, type(None))
    found = {
        name
        for name, value in vars(c10d).items()
        if name.startswith("_")
        and not name.startswith("__")
        and isinstance(value, kinds)
        and not callable(value)
    }
    assert found - constants - internals.variables_of_a_new_process().keys() == set()


_FOLDER = Path(dist.__file__).parent
# Not for ranks: what starts processes and watches them, and what run_ranks does not
# have.
_ELSEWHERE = {"elastic", "rpc", "debug", "flight_recorder", "_tools", "_local_tensor"}


def _files() -> Iterator[tuple[str, str]]:
    for file in sorted(_FOLDER.rglob("*.py")):
        path = file.relative_to(_FOLDER)
        if path.parts[0] not in _ELSEWHERE:
            yield path.as_posix(), file.read_text()


@for_releases
def test_there_are_no_other_variables_of_a_process_in_any_module() -> None:
    """What `torch.distributed` sets is in the table, or the same in all ranks.

    Its functions set it.
    """
    same_in_all_ranks = {
        "_c10d_logger",
        "_dcp_logger",
        "_rendezvous_handlers",
        "_distributed_opaque_types_registered",
        "_compiled_autograd_enabled",  # of torch 2.10
        "_extensions",  # of FSDP, which a library registers
        "_module_state_mapping",  # by module, and each rank has modules of its own
        "_sharded_tensor_current_id",  # numbers of tensors, each of which is given once
        "_sharded_tensor_map",
        "_spmd_types_available",  # whether a package is installed
    }
    not_there = {
        "_is_test_mode",  # symmetric memory of GPUs
        "_mocked_group_names",
        "_use_implicit_mempool",
        "_CHECKPOINT_PROCESS",  # asynchronous checkpoints
        "_cp_strategy_contexts",  # `context_parallel`, which knows no CPU
        "_original_strategies",
        "_replaced_functions",
        "_compiled_create_block_mask",
        "_dispatch_mode",
        "_cp_options",
        *("_libcuda", "_loop"),  # of transports between GPUs
        "_watchdog",  # of the same, since torch 2.15
    }
    found: set[str] = set()
    for _, text in _files():
        for names in re.findall(r"^ +global ((?:\w+, )*\w+)$", text, re.MULTILINE):
            found |= set(names.split(", "))
    separated = {variable.name for variable in internals._OF_A_PROCESS}
    assert len(found & separated) >= 10
    assert found - separated - same_in_all_ranks - not_there == set()


@for_releases
def test_there_are_no_other_caches_of_a_process() -> None:
    """Each cache has the mesh in its key, which tells the ranks apart.

    Or it belongs to a thread, or knows no rank.
    """
    known = {
        "fsdp/_flat_param.py",  # sizes of dtypes, and warnings that are given once
        "pipelining/schedules.py",  # names
        "tensor/_collective_utils.py",  # by mesh: `MeshTopoInfo.build_from_mesh`
        # By the specifications of operands, which have a mesh.
        "tensor/_ops/single_dim_strategy.py",
        "tensor/_redistribute.py",  # by specifications: `_gen_transform_infos`
        "tensor/_sharding_prop.py",  # of a thread: `LocalLRUCache`
    }
    found = {
        path
        for path, text in _files()
        if re.search(r"(@|= |\()(functools\.)?(lru_)?cache\b(?!_)", text)
    }
    assert found - known == set()


@for_releases
@pytest.mark.parametrize(
    "variable", internals._OF_A_PROCESS, ids=lambda variable: variable.path
)
def test_torch_has_each_variable_and_it_is_that_of_a_rank(
    variable: internals._Variable,
) -> None:
    """What one rank puts there, the next one does not see.

    The caller has what was there before.
    """
    importlib.import_module(variable.module)
    owner = variable.find_owner()
    assert owner is not None
    before = internals.take_variables()
    value = getattr(owner, variable.name)
    new = internals.variables_of_a_new_process()
    assert (
        type(new[variable.path]) is type(value)
        or value is None
        or new[variable.path] is None
    )
    try:
        internals.put_variables(
            {name: content for name, content in before.items() if name != variable.path}
        )
        assert getattr(owner, variable.name) is not value or isinstance(
            value, (bool, int, type(None))
        )
    finally:
        internals.put_variables(before)
    assert getattr(owner, variable.name) is value


def test_the_operators_that_a_library_has_taken_over_are_there_in_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers = DTensor._op_dispatcher._custom_op_handlers
    operator: Any = torch.ops.aten.frac.default
    monkeypatch.setitem(handlers, operator, lambda *args: None)

    def main(rank: int) -> None:
        mine = DTensor._op_dispatcher._custom_op_handlers
        assert mine == handlers and mine is not handlers

    run_ranks(main, 2)
    assert DTensor._op_dispatcher._custom_op_handlers is handlers


def test_the_forward_that_runs_is_that_of_the_rank() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            active = DistributedDataParallel._active_ddp_module
            dist.barrier()
            assert DistributedDataParallel._active_ddp_module is active is not None
            return x * self.weight

    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        DistributedDataParallel(Layer())(torch.ones(1))

    run_ranks(main, 2)


def test_hooks_for_every_module_are_those_of_the_rank_that_registers_them() -> None:
    called: list[tuple[str, int]] = []

    def of_all(name: str, rank: int) -> Any:
        return lambda *_: called.append((name, rank))

    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        hooks = [register_module_forward_pre_hook(of_all("before", rank))]
        if rank:
            hooks += [
                register_module_forward_hook(of_all("after", rank), always_call=True)
            ]
            hooks += [register_module_full_backward_hook(of_all("backward", rank))]
        for _ in range(2):  # the other rank's turn comes between these
            dist.barrier()
            nn.Linear(2, 1)(torch.ones(1, 2, requires_grad=True)).sum().backward()
        if rank == 0:
            hooks[0].remove()
            nn.Linear(2, 1)(torch.ones(1, 2))

    callers = register_module_forward_pre_hook(of_all("caller's", 9))
    try:
        run_ranks(main, 2)
        assert Counter(called) == {
            ("caller's", 9): 5,
            ("before", 0): 2,
            **{(name, 1): 2 for name in ("before", "after", "backward")},
        }
        called.clear()
        nn.Linear(2, 1)(torch.ones(1, 2, requires_grad=True)).sum().backward()
        assert called == [("caller's", 9)]
    finally:
        callers.remove()


def test_a_hook_may_let_other_ranks_run() -> None:
    """torch's loop over the hooks ended with an error.

    Those of another rank had been put there in the middle of it.
    """

    def main(rank: int) -> list[str]:
        dist.init_process_group("gloo")
        called: list[str] = []

        def hook(name: str) -> Any:
            def call(*_: Any) -> None:
                dist.barrier()
                called.append(name)

            return call

        for _ in range(rank + 1):
            register_optimizer_step_pre_hook(hook("before a step"))
            modules.register_module_module_registration_hook(hook("child"))
        last = register_optimizer_step_post_hook(hook("after a step"))
        if rank == 0:  # as many collectives as the other rank has
            register_optimizer_step_pre_hook(hook("before a step"))
            modules.register_module_module_registration_hook(hook("child"))
        model = nn.Sequential(nn.Linear(1, 1))
        torch.optim.SGD(model.parameters()).step()
        last.remove()
        torch.optim.SGD(model.parameters()).step()
        return called

    expected = (
        ["child"] * 2 + ["before a step"] * 2 + ["after a step"] + ["before a step"] * 2
    )
    assert run_ranks(main, 2)[0] == [expected] * 2


@for_changes
def test_strategies_in_ranks_and_after_them_are_told_of_steps() -> None:
    """The library registered its hook once for a process.

    So those of all ranks but one, and later ones, were not.
    """
    plain = exact_steps.come_to(torchstrategy.get_strategy(), exact_steps.assigned)

    def main(rank: int) -> list[torch.Tensor]:
        dist.init_process_group("gloo")
        strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
        return exact_steps.come_to(strategy, exact_steps.assigned)

    for _ in range(2):
        for found in run_ranks(main, 2)[0]:
            assert exact_steps.differ(found, plain) < 1e-12
    for table in global_step_hooks():
        assert all(hook in {on_step_begin, on_step_end} for hook in table.values())
        table.clear()  # as the end of ranks did, of which the first to be told was one
    central = torchstrategy.MirroredStrategy(devices=["cpu"] * 2)
    assert (
        exact_steps.differ(exact_steps.come_to(central, exact_steps.assigned), plain)
        < 1e-12
    )
    assert [list(table.values()) for table in global_step_hooks()] == [
        [on_step_begin],
        [on_step_end],
    ]


@pytest.mark.filterwarnings("ignore:`torch.distributed.all_reduce_coalesced`")
def test_collectives_are_counted_by_torch() -> None:
    """`CommDebugMode` counted none.

    Torch calls a group that is written in Python without an operator.
    """

    def main(rank: int) -> list[dict[str, int]]:
        dist.init_process_group("gloo")
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        x = torch.ones(2, 4, requires_grad=True)
        for layer in model:
            fully_shard(layer)
        counts = []
        for call in (
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.all_reduce_coalesced([torch.ones(1)]),  # type: ignore[no-untyped-call]
            lambda: dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1)),
            lambda: funcol.all_reduce(x, "sum", dist.group.WORLD).sum(),
            lambda: model(x).sum().backward(),
        ):
            with CommDebugMode() as mode:
                call()
            counts.append(
                {str(op): number for op, number in mode.get_comm_counts().items()}
            )
        return counts

    expected = [
        {"c10d.allreduce_": 1},
        {"c10d.allreduce_coalesced_": 1},
        {"c10d.allgather_": 1},
        {"c10d_functional.all_reduce": 1},
        {"c10d._allgather_base_": 2, "c10d._reduce_scatter_base_": 2},
    ]
    assert run_ranks(main, 2)[0] == [expected, expected]


def test_ranks_hand_over_in_a_transform() -> None:
    """What a rank has of its own was compared inside `torch.func.grad`.

    A tensor has no memory to look at there.
    """

    def main(rank: int) -> list[float]:
        dist.init_process_group("gloo")

        def loss(x: torch.Tensor) -> torch.Tensor:
            dist.barrier()
            return (x * x * (rank + 1)).sum()

        x = torch.ones(2)
        values: list[float] = (
            (
                torch.func.grad(loss)
                if rank
                else torch.func.jacrev(torch.func.grad(loss))
            )(x)
            .flatten()
            .tolist()
        )
        return values

    results, _ = run_ranks(main, 2)
    assert results == [[2, 0, 0, 2], [4, 4]]


@for_releases
def test_with_isolation_each_thread_has_a_table_of_groups() -> None:
    found: list[str] = []

    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        name = c10d._get_default_group().group_name
        found.append(c10d._resolve_process_group(name).group_name)

        def look() -> None:
            try:
                c10d._resolve_process_group(name)
            except RuntimeError as error:
                found.append(str(error).splitlines()[0])

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    run_ranks(main, 1)
    assert len(found) == 2 and found[1].startswith(
        "Could not resolve the process group"
    )


@pytest.mark.filterwarnings("ignore")  # of torch's own about the fake backend
def test_a_fake_group_in_a_rank_is_that_of_torch() -> None:
    def main(rank: int) -> tuple[int, int, int, str]:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        gathered = torch.zeros(16)
        dist.all_gather_into_tensor(gathered, torch.ones(2))  # it waits for nobody
        return (
            dist.get_rank(),
            dist.get_world_size(),
            gathered.numel(),
            dist.get_backend(),
        )

    assert run_ranks(main, 2)[0] == [(0, 8, 16, "fake")] * 2


def test_a_sum_with_a_factor_is_that_of_nccl() -> None:
    operation = dist._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
    assert internals.factor_of(operation) == 0.5

    def main(rank: int) -> float:
        dist.init_process_group("nccl")
        x = torch.full((1,), 1.0 + rank)
        dist.all_reduce(x, op=operation)
        return x.item()

    assert run_ranks(main, 2)[0] == [1.5, 1.5]
