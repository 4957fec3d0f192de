"""Code that says "cuda" where a mode of torch is not.

In what backward calls, in threads, in what is compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from conditions import for_releases
from torchstrategy.testing import cuda_alias, run_ranks


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    with cuda_alias():
        yield


def ones(*sizes: int) -> torch.Tensor:
    return torch.ones(*sizes, device="cuda", requires_grad=True)


# In what backward calls


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_runs_again(use_reentrant: bool) -> None:
    x = ones(2, 3)
    y = checkpoint(
        lambda x: x * torch.arange(3, device="cuda").float(),
        x,
        use_reentrant=use_reentrant,
    )
    y.sum().backward()
    assert x.grad is not None and x.grad.cpu().tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    "backward",
    [
        lambda y, x: y.backward(),
        lambda y, x: torch.autograd.backward([y]),
        lambda y, x: x.__setattr__("grad", torch.autograd.grad(y, x)[0]),
    ],
)
def test_a_hook_of_a_tensor_is_called_in_the_block(
    backward: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    x = ones(2)
    y = x * 2
    y.register_hook(lambda gradient: gradient * torch.full((1,), 3.0, device="cuda"))
    backward(y.sum(), x)
    assert x.grad is not None and x.grad.cpu().tolist() == [6, 6]


def test_hooks_of_modules_and_of_parameters_are_called_in_the_block() -> None:
    layer, called = nn.Linear(3, 1).cuda(), []
    layer.register_full_backward_hook(
        lambda m, given, got: (given[0] + torch.ones(1, device="cuda"),)
    )
    layer.weight.register_post_accumulate_grad_hook(
        lambda p: called.append(p.grad.add_(torch.ones(1).cuda()))
    )
    x = ones(2, 3)
    layer(x).sum().backward()
    expected = (layer.weight + 1).expand(2, 3)
    assert torch.equal(x.grad.cpu(), expected.cpu()) and len(called) == 1  # type: ignore[union-attr]


def test_an_own_function_is_called_in_the_block_also_for_second_derivatives() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return gradient * x**2 * torch.full((1,), 3.0, device="cuda")

    x = ones(2)
    (first,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.detach().cpu().tolist() == [3, 3] and second.cpu().tolist() == [6, 6]


def test_a_backward_in_a_hook_is_in_the_block() -> None:
    x, z = ones(1), ones(1)

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            w = z * 1
            w.register_hook(lambda inner: inner * torch.full((1,), 5.0, device="cuda"))
            w.sum().backward()
        return gradient * torch.ones(1, device="cuda")

    y = x * 1
    y.register_hook(hook)
    y.sum().backward()
    assert z.grad is not None and z.grad.item() == 5


def test_an_error_of_a_hook_comes_out_and_leaves_the_block_as_it_was() -> None:
    y = ones(1) * 1
    y.register_hook(lambda gradient: torch.ones(1, device="cuda:9"))
    with pytest.raises(RuntimeError, match="cuda:9: this process simulates"):
        y.sum().backward()
    assert torch.ones(1, device="cuda").get_device() == 0


# In threads


def test_threads_that_the_block_starts_are_in_it() -> None:
    made: list[int] = []

    class Maker(threading.Thread):
        def run(self) -> None:
            made.append(torch.zeros(2, device="cuda:1").get_device())

    threads = [
        Maker(),
        threading.Thread(
            target=lambda: made.append(torch.zeros(1).cuda(2).get_device())
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with ThreadPoolExecutor(2) as pool:
        made += pool.map(
            lambda i: torch.ones(1, device=f"cuda:{i}").get_device(), [3, 4]
        )
    assert sorted(made) == [1, 2, 3, 4]


def test_torchs_data_parallel_computes_in_the_block() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x) + torch.ones(2).cuda(x.get_device())
            return y + torch.zeros(2, device="cuda") + torch.zeros(2).cuda()

    net, x = Net().cuda(), torch.ones(4, 2).cuda()
    y = nn.DataParallel(net, [0, 1])(x)
    y.sum().backward()
    torch.testing.assert_close(y, net(x))


def test_an_operator_of_distributed_tensors_makes_tensors_on_its_mesh() -> None:
    def main(rank: int) -> tuple[bool, bool]:
        dist.init_process_group("nccl")
        x = distribute_tensor(
            torch.arange(4.0).cuda(), init_device_mesh("cuda", (2,)), [Shard(0)]
        )
        return torch.equal(x, x.clone()), torch.equal(x, x + 1)

    assert run_ranks(main, 2)[0] == [(True, False)] * 2


# What is compiled


@pytest.mark.filterwarnings("ignore")  # of torch's internals, about themselves
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_trains(backend: str) -> None:
    layer = nn.Linear(2, 2).cuda()
    y = torch.compile(layer, backend=backend)(torch.ones(1, 2).cuda())
    y.sum().backward()
    torch.testing.assert_close(y, layer(torch.ones(1, 2).cuda()))
    assert layer.weight.grad is not None and layer.weight.grad.cpu().tolist() == [
        [1, 1],
        [1, 1],
    ]


@for_releases
@pytest.mark.filterwarnings("ignore")  # of torch's internals, about themselves
@pytest.mark.parametrize("is_module", [False, True])
def test_what_is_compiled_as_one_graph_runs_watched_or_not(is_module: bool) -> None:
    # It keeps for good that it has left `forward` alone, for one mode or another.
    torch._dynamo.reset()
    layer = nn.Linear(2, 2).cuda()
    graphs: list[fx.GraphModule] = []

    def count(graph: fx.GraphModule, inputs: object) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        layer if is_module else layer.forward, backend=count, fullgraph=True
    )
    x = torch.ones(1, 2).cuda()
    torch.testing.assert_close(compiled(x), layer(x))
    assert len(graphs) == 1
    # torch compiles nothing in such a mode.
    with FlopCounterMode(display=False) as counter:
        torch.testing.assert_close(compiled(x), layer(x))
    assert counter.get_total_flops() == 2 * 8


def test_a_compiled_function_that_is_one_graph_may_break_nowhere() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + torch.ones(2, device="cuda")

    with pytest.raises(torch._dynamo.exc.Unsupported):
        breaks(torch.ones(2).cuda())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: torch.compile(nn.Linear(2, 2)),
            "writes kernels for a GPU.*backend='eager' or 'aot_eager'",
        ),
        (
            lambda: torch.compile(nn.Linear(2, 2), backend="inductor"),
            "writes kernels for a GPU",
        ),
        (lambda: torch.cuda.temperature(), "torch.cuda.temperature is not there"),
        (
            lambda: torch.eye(2, device="cuda").to_sparse_csr(),
            "to_sparse_csr makes a compressed sparse tensor",
        ),
        (
            lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], device="cuda"),
            "sparse_csr_tensor makes a compressed sparse tensor .* Write to_sparse",
        ),
    ],
)
def test_what_only_a_gpu_can_do_is_refused(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        call()


# Names


def test_memory_queries_say_what_a_device_holds() -> None:
    before = torch.cuda.memory_allocated("cuda:3")
    x = torch.ones(1000, device="cuda:3")
    held = torch.cuda.memory_allocated(3)
    assert x.nbytes == 4000 and held == before + 4096  # in blocks of 512 bytes
    free, total = torch.cuda.mem_get_info(3)
    assert total - free == torch.cuda.memory_reserved(3) >= held
    assert torch.cuda.memory.mem_get_info("cuda:3") == (free, total)
    assert torch.cuda.memory_stats(3)["allocated_bytes.all.current"] == held
    assert "PyTorch CUDA memory summary, device ID 3 " in torch.cuda.memory_summary(
        "cuda:3"
    )
    torch.cuda.reset_max_memory_allocated(3)
    assert torch.cuda.max_memory_allocated(3) == held


def test_the_old_constructors_are_types_too() -> None:
    x = torch.cuda.FloatTensor([1, 2])
    assert x.dtype == torch.float32 and x.get_device() == 0
    assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(
        x.cpu(), torch.cuda.FloatTensor
    )
    for kind in ("torch.cuda.HalfTensor", torch.cuda.HalfTensor):
        half = torch.ones(2).type(kind)
        assert half.get_device() == 0 and half.dtype == torch.float16
    assert torch.ones(2).type("torch.DoubleTensor").device.type == "cpu"
    assert (
        torch.cuda.LongTensor(2, 3).shape == (2, 3)
        and torch.cuda.HalfTensor().numel() == 0
    )


def test_what_programs_ask_of_devices_is_answered() -> None:
    assert torch.cuda.can_device_access_peer(
        0, 1
    ) and not torch.cuda.can_device_access_peer(0, 0)
    assert torch.cuda.nvtx.range_push("x") == torch.cuda.nvtx.range_pop() == 0
    torch.cuda.ipc_collect()
    torch.cuda.set_per_process_memory_fraction(0.5)
    # A later test fails if half of the device is left to it.
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.comm.broadcast(torch.ones(2).cuda(), [0, 1])[1].get_device() == 1


def test_everything_is_put_back() -> None:
    alias = cuda_alias()
    names = (
        "mem_get_info",
        "FloatTensor",
        "CUDAGraph",
        "memory_allocated",
        "default_generators",
    )
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    inside = [getattr(torch.cuda, name) for name in names]
    with alias:
        pass  # the outer block is still open
    assert [getattr(torch.cuda, name) for name in names] == inside
    assert torch.autograd.Variable._execution_engine is engine  # type: ignore[attr-defined]
