"""Names of CUDA that programs say.

Those that torch has are served, work as they are, or are refused by name.

The lists come from torch's own files, so that a name of another version is not
forgotten.
"""

from __future__ import annotations

import ast
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conditions import for_releases
from torchstrategy.testing import cuda_alias
from torchstrategy.testing._simulation.cuda_names import AS_THEY_ARE, names_of_cuda

TORCH = Path(torch.__file__).parent
# What no simulated device has, and so is refused.
REFUSED = {
    *(
        f"{kind}Storage"
        for kind in (
            "BFloat16",
            "Bool",
            "Byte",
            "Char",
            "ComplexDouble",
            "ComplexFloat",
            "Double",
        )
    ),
    *(f"{kind}Storage" for kind in ("Float", "Half", "Int", "Long", "Short")),
    *("CUDAPluggableAllocator", "GreenContext", "change_current_allocator"),
    *("caching_allocator_alloc", "caching_allocator_delete"),
    *("clock_rate", "power_draw", "temperature"),
    *("host_memory_stats", "host_memory_stats_as_nested_dict"),
    # Of captured graphs, since torch 2.14.
    *("export_dot", "export_graph_data", "graph_annotations"),
}


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    with cuda_alias():
        yield


def public_names() -> set[str]:
    """What `torch/cuda/__init__.py` defines or exports."""
    tree = ast.parse((TORCH / "cuda" / "__init__.py").read_text())
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    return {
        name for name in defined | set(torch.cuda.__all__) if not name.startswith("_")
    }


@for_releases
def test_each_public_name_is_served_or_refused_by_name() -> None:
    replaced = {
        name: value
        for owner, name, value in names_of_cuda(lambda value: value)
        if owner is torch.cuda
    }
    refused = {
        name for name, value in replaced.items() if hasattr(value, "NO_SUCH_THING")
    }
    unknown = public_names() - replaced.keys() - AS_THEY_ARE
    assert not unknown, f"nobody has thought of {sorted(unknown)}"
    assert refused <= REFUSED, f"nobody has thought of {sorted(refused - REFUSED)}"
    for name in refused:
        with pytest.raises(
            NotImplementedError,
            match=rf"^torch.cuda.{name} is not there: .* simulated devices",
        ):
            getattr(torch.cuda, name)()


def test_streams_are_chosen_by_their_numbers() -> None:
    stream, cpp = torch.cuda.Stream(priority=-9), torch._C
    assert (
        stream.priority == -3 and stream.priority_range() == (0, -3) and stream.query()
    )
    before: Any = cpp._cuda_getCurrentStream(0)
    cpp._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)
    assert (
        torch.cuda.current_stream() == stream
        and cpp._cuda_getCurrentRawStream(0) == stream.cuda_stream
    )
    cpp._cuda_setStream(*before)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


WAITING = [
    lambda x: x.sum().item(),
    lambda x: x.nonzero(),
    lambda x: x.cpu(),
    lambda x: torch.ones(2).cuda(),
    lambda x: bool(x[0] > 0),
]
NOT_WAITING = [
    lambda x: x + 1,
    lambda x: torch.cuda.synchronize(),
    lambda x: torch.ones(2).pin_memory().cuda(non_blocking=True),
    lambda x: x.to("cuda:1"),
]


@pytest.mark.parametrize("call", [*WAITING, *NOT_WAITING])
def test_a_program_is_told_where_it_waits_if_it_asks(call: Any) -> None:
    x = torch.ones(3, device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        if call in WAITING:
            with pytest.raises(
                RuntimeError, match="called a synchronizing CUDA operation"
            ):
                call(x)
        else:
            call(x)
        torch.cuda.set_sync_debug_mode(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(x)
        assert bool(caught) == (call in WAITING)
        assert all(warning.filename == __file__ for warning in caught)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.get_sync_debug_mode() == 0
    with pytest.raises(RuntimeError, match="invalid value of debug_mode 7"):
        torch.cuda.set_sync_debug_mode(7)


# CUDA graphs


def test_a_graph_runs_its_operators_again() -> None:
    graph, x, total = (
        torch.cuda.CUDAGraph(),
        torch.ones(3, device="cuda"),
        torch.ones(3, device="cuda"),
    )
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        y = x * 2
        total += y
        z = y.sum()
    assert not torch.cuda.is_current_stream_capturing()
    # Nothing has run yet.
    assert total.tolist() == [1, 1, 1] and y.isnan().all() and z.isnan()
    for value in (3.0, 1.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value] * 3 and z.item() == 6 * value
    assert total.tolist() == [9, 9, 9]


def test_a_training_in_a_graph_is_that_without() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).cuda()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    given, graph = torch.randn(4, 3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = model(given).square().mean()
        loss.backward()
        optimizers[0].step()
    for _ in range(3):
        rows = torch.randn(4, 3, device="cuda")
        given.copy_(rows)
        graph.replay()
        optimizers[1].zero_grad()
        expected = plain(rows).square().mean()
        expected.backward()
        optimizers[1].step()
        assert loss.item() == pytest.approx(expected.item())
        torch.testing.assert_close(model.weight, plain.weight)


def test_graphed_callables_compute_what_the_module_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).cuda()
    plain = copy.deepcopy(model)
    graphed = torch.cuda.make_graphed_callables(
        model, (torch.randn(4, 3, device="cuda"),)
    )
    for _ in range(2):
        rows = torch.randn(4, 3, device="cuda")
        outputs = [each(rows) for each in (graphed, plain)]
        for each, output in zip((model, plain), outputs, strict=True):
            each.zero_grad()
            output.sum().backward()
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


PREVIOUS = "operation failed due to a previous error during capture"
NOT_PERMITTED = "operation not permitted when stream is capturing"


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (
            lambda x: x.sum().item(),
            f"{PREVIOUS}: {NOT_PERMITTED}: .*reads what the device has computed",
        ),
        (
            lambda x: torch.cuda.synchronize(),
            f"{NOT_PERMITTED}: synchronize.. waits for the device",
        ),
        (
            lambda x: torch.cuda.current_stream().synchronize(),
            f"{NOT_PERMITTED}: stream.synchronize.. waits",
        ),
        (
            lambda x: torch.cuda.current_stream().query(),
            f"{NOT_PERMITTED}: stream.query.. asks the device",
        ),
        (
            lambda x: torch.cuda.Event().query(),
            f"{NOT_PERMITTED}: event.query.. asks the device",
        ),
        (
            lambda x: torch.cuda.Event().synchronize(),
            f"{NOT_PERMITTED}: event.synchronize.. waits for the device",
        ),
        (
            lambda x: x.cpu(),
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture",
        ),
        (
            lambda x: torch.ones(2).cuda(),
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture",
        ),
        (
            lambda x: torch.tensor([1.0], device="cuda"),
            "Cannot copy between CPU and CUDA tensors",
        ),
    ],
)
def test_a_graph_cannot_wait_for_the_program(call: Any, what: str) -> None:
    x, y = torch.ones(3, device="cuda"), torch.ones(3, device="cuda")
    with (
        pytest.raises(
            RuntimeError if "Cannot" in what else torch.AcceleratorError, match=what
        ),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        y += 1
        call(x)
    assert y.tolist() == [1, 1, 1] and not torch.cuda.is_current_stream_capturing()


def test_a_graph_that_waits_is_lost_though_the_program_catches_it() -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.ones(3, device="cuda")
    with pytest.raises(torch.AcceleratorError, match=PREVIOUS), torch.cuda.graph(graph):
        x += 1
        with pytest.raises(torch.AcceleratorError, match=NOT_PERMITTED):
            torch.cuda.synchronize()
    with pytest.raises(
        RuntimeError,
        match="Called CUDAGraph::replay without a preceding successful capture",
    ):
        graph.replay()


def test_a_graph_is_captured_once_and_on_a_stream_of_its_own() -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="must be captured on a non-default stream"):
        graph.capture_begin()
    assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(
        torch.AcceleratorError, match="cannot be performed in the present state"
    ):
        graph.capture_end()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with torch.cuda.graph(graph):
        x += 1
    with (
        pytest.raises(RuntimeError, match="already owns a captured graph"),
        torch.cuda.graph(graph),
    ):
        x += 1
    graph.replay()
    assert x.tolist() == [2, 2, 2]
    graph.reset()
    with (
        pytest.warns(UserWarning, match="The CUDA Graph is empty"),
        torch.cuda.graph(graph),
    ):
        pass
