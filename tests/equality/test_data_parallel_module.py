"""torchstrategy.DataParallel: the module in its place, in a script that computes the loss outside of it."""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import gc
import io
import re
import threading
import warnings
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune, rnn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import torchstrategy
from problems import assert_close, close, data, deal, gradients, mlp, parameters, replica_id, sgd
from topologies import SIMULATED, central, compute_devices
from torchstrategy import DataParallel
from torchstrategy._replication.replicated_modules import ReplicatedModules

FIRST = compute_devices(1)[0]
ROWS = torch.arange(8.0).view(4, 2)
F64: dict[str, Any] = {"dtype": torch.float64}


def parallel(module: nn.Module, replicas: int = 2, **options: Any) -> DataParallel:
    """The module on the first device, in a DataParallel on several."""
    return DataParallel(module.to(FIRST), compute_devices(replicas), **options)


def alike(build: Callable[[], nn.Module] = mlp, replicas: int = 3, **options: Any) -> tuple[DataParallel, nn.Module]:
    """A module in a DataParallel, and an equal one that is in none."""
    torch.manual_seed(0)
    model = parallel(build(), replicas, **options)
    torch.manual_seed(0)
    return model, build().to(FIRST)


def here(*tensors: torch.Tensor) -> Any:
    """Tensors where plain PyTorch wants them."""
    moved = [tensor.to(FIRST) for tensor in tensors]
    return moved[0] if len(moved) == 1 else moved


def same_gradients(model: DataParallel, plain: nn.Module, case: str = "") -> None:
    assert_close(gradients(model.module), gradients(plain), f"gradient {case}", 1e-12, 1e-14)


class Calls(nn.Module):
    """A module with one parameter, whose forward is a function of the module and of its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.function = function

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.function(self, *inputs, **options)


def returning(function: Callable[..., Any], replicas: int = 2, **options: Any) -> Callable[..., Any]:
    """A DataParallel of a function of inputs."""
    return parallel(Calls(lambda module, *inputs, **kwargs: function(*inputs, **kwargs)), replicas, **options)


class Opaque:
    """Something of the user's own."""


@dataclasses.dataclass(frozen=True)
class Output:
    logits: Any
    hidden: Any = None


Pair = namedtuple("Pair", "first second")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What a test finds gone has not waited for the collector of cycles."""
    gc.disable()
    yield
    gc.enable()


# A script that computes the loss outside


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer_is_made", ["before", "after"])
def test_a_script_trains_as_it_does_on_one_device(replicas: int, optimizer_is_made: str) -> None:
    torch.manual_seed(0)
    module = mlp().to(FIRST)
    plain = copy.deepcopy(module)
    optimizer = sgd(module)
    model = parallel(module, replicas)
    if optimizer_is_made == "after":
        optimizer = sgd(model)
    plain_optimizer = sgd(plain)
    for step, rows in enumerate([7, 4, 1, 5]):
        x, y = here(*data(rows, seed=step))
        for forward, stepper in ((model, optimizer), (plain, plain_optimizer)):
            stepper.zero_grad()
            F.mse_loss(forward(x), y).backward()
            stepper.step()
        same_gradients(model, plain, f"step {step}")
        assert_close(parameters(module), parameters(plain), f"parameter, step {step}", 1e-12)


@settings(max_examples=30)
@given(rows=st.integers(0, 9), replicas=st.integers(1, 4), dim=st.sampled_from([0, 1, -1, -2]))
def test_any_rows_in_any_dimension_are_as_in_plain_pytorch(rows: int, replicas: int, dim: int) -> None:
    model, plain = alike(lambda: Calls(lambda module, x, bias: (x * module.weight + bias).sin()), replicas, dim=dim)
    shape = [2, 3, 4]
    shape[dim] = rows
    x = torch.randn(shape, device=FIRST, requires_grad=True)
    bias = torch.tensor(0.5, device=FIRST, requires_grad=True)
    ours, expected = model(x, bias=bias), plain(x, bias=bias)
    close(ours, expected, rtol=0, atol=0)
    inputs = (x, bias)
    close(torch.autograd.grad(ours.square().sum(), inputs), torch.autograd.grad(expected.square().sum(), inputs))


@settings(max_examples=30)
@given(rows=st.integers(1, 20), replicas=st.integers(2, 5))
def test_rows_are_cut_as_torch_chunk_cuts_them(rows: int, replicas: int) -> None:
    sizes = returning(lambda x: torch.full((1,), len(x), device=x.device), replicas)(torch.ones(rows, 1))
    assert sizes.tolist() == [len(chunk) for chunk in torch.ones(rows, 1).chunk(replicas)]


def test_a_batch_without_rows_is_one_call_as_in_plain_pytorch() -> None:
    model, plain = alike(lambda: nn.Linear(3, 2, **F64))
    x = torch.empty(0, 3, device=FIRST, **F64)
    output = model(x)
    assert output.shape == plain(x).shape == (0, 2)
    output.sum().backward()
    plain(x).sum().backward()
    same_gradients(model, plain)


def test_what_has_no_rows_is_one_call_on_the_first_device() -> None:
    seen: list[int] = []
    model = returning(lambda *inputs, **options: seen.append(replica_id()), 3)
    for call in (lambda: model(), lambda: model(1, "x"), lambda: model(torch.tensor(2.0)), lambda: model(flag=True)):
        assert call() is None
    assert seen == [0] * 4


def test_several_forwards_may_go_before_one_backward() -> None:
    model, plain = alike(lambda: nn.Sequential(mlp(), nn.BatchNorm1d(2, **F64), nn.Linear(2, 1, **F64)), replicas=1)
    several = parallel(copy.deepcopy(plain), 2)
    for forward in (model, several, plain):
        real, fake = (forward(here(data(6, seed=seed)[0])) for seed in (1, 2))
        (real.sin() - fake.cos()).sum().backward()
    same_gradients(model, plain)
    # Batch statistics are those of a replica's rows: what they are with two is not what they are with one.
    for index in (0, 1):
        halves = [data(6, seed=seed)[0].chunk(2)[index] for seed in (1, 2)]
        (plain(here(halves[0])).sin() - plain(here(halves[1])).cos()).sum().backward()
    assert_close(gradients(several.module), _minus(gradients(plain), gradients(model.module)), "halves", 1e-10, 1e-12)


def _minus(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor - second[name] for name, tensor in first.items()}


def test_a_backward_after_the_optimizer_has_stepped_is_the_error_of_plain_pytorch() -> None:
    for forward in alike():
        optimizer, (x, y) = sgd(forward), here(*data(5))
        output = forward(x)
        F.mse_loss(output, y).backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            F.mse_loss(output, y).backward()


def test_a_second_backward_needs_a_retained_graph_as_in_plain_pytorch() -> None:
    model, plain = alike()
    x, y = here(*data(5))
    for forward in (model, plain):
        loss = F.mse_loss(forward(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    same_gradients(model, plain)


def test_a_gradient_penalty_is_that_of_plain_pytorch() -> None:
    model, plain = alike()
    for forward in (model, plain):
        x = here(data(5)[0]).requires_grad_()
        (gradient,) = torch.autograd.grad(forward(x).square().sum(), x, create_graph=True)
        (gradient.norm(dim=1) - 1).square().mean().backward()
    same_gradients(model, plain)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_of_gradients_can_be_had_by_backward() -> None:
    model, plain = alike()
    for forward in (model, plain):
        forward(here(data(5)[0])).square().sum().backward(create_graph=True)
        grads = [p.grad for p in forward.parameters()]
        forward.zero_grad()
        sum(grad.square().sum() for grad in grads).backward()
    same_gradients(model, plain)
    for module in (model, plain):
        module.zero_grad()  # each gradient holds the graph that it is part of


def test_gradients_of_parameters_can_be_asked_for_in_every_way() -> None:
    model, plain = alike()
    found: dict[nn.Module, list[Any]] = {}
    for forward in (model, plain):
        x, (weight, *others) = here(data(5)[0]), list(forward.parameters())
        grads = torch.autograd.grad(forward(x).square().sum(), [weight, *others], create_graph=True)
        squares = sum(grad.square().sum() for grad in grads)
        second = torch.autograd.grad(squares, [weight, *others], retain_graph=True)
        product = torch.autograd.grad(grads, weight, [torch.ones_like(grad) for grad in grads])
        assert all(parameter.grad is None for parameter in forward.parameters())
        forward(x).square().sum().backward(inputs=[weight])
        assert all(parameter.grad is None for parameter in others)
        found[forward] = [*grads, *second, *product, weight.grad]
    close(found[model], found[plain], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_see_the_gradient_of_the_whole_batch_once(register: str) -> None:
    model, plain = alike()
    seen: dict[nn.Module, list[torch.Tensor]] = {model: [], plain: []}
    for forward in (model, plain):
        forward(here(data(5)[0])).sum().backward()  # hooks may come after the first backward
        forward.zero_grad()
        weight = next(forward.parameters())

        def hook(tensor: torch.Tensor, noted: Any = seen[forward], weight: Any = weight) -> None:
            noted.append((weight.grad if tensor is weight else tensor).clone())

        getattr(weight, register)(hook)
        for _ in range(2):
            forward(here(data(5)[0])).sum().backward()
    assert len(seen[model]) == len(seen[plain]) == 2
    close(seen[model], seen[plain])
    same_gradients(model, plain)


def test_a_hook_that_clips_clips_the_gradient_of_the_whole_batch() -> None:
    model, plain = alike()
    for forward in (model, plain):
        for parameter in forward.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
        forward(here(data(7)[0])).sum().backward()
    same_gradients(model, plain)


def test_an_optimizer_that_steps_in_backward_steps_once() -> None:
    model, plain = alike()
    for forward in (model, plain):
        for parameter in forward.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(
                lambda p, optimizer=optimizer: (optimizer.step(), optimizer.zero_grad(), None)[-1]
            )
        for step in range(3):
            forward(here(data(7, seed=step)[0])).square().sum().backward()
    assert_close(parameters(model.module), parameters(plain), "parameters", 1e-12)


def test_frozen_parameters_get_no_gradient_and_are_trained_when_they_are_thawed() -> None:
    model, plain = alike()
    for forward in (model, plain):
        layer = next(forward.parameters())
        for is_trained in (False, True, False, True, False):
            layer.requires_grad_(is_trained)
            forward(here(data(5)[0])).sum().backward()
            assert (layer.grad is None) is (not is_trained)
            layer.grad = None
    same_gradients(model, plain)


def test_gradients_accumulate_and_unused_parameters_have_none() -> None:
    model, plain = alike(lambda: _Uses(nn.Linear(3, 2, **F64), nn.Linear(3, 2, **F64)))
    for forward in (model, plain):
        for seed in range(3):
            forward(here(data(5, seed=seed)[0])).square().sum().backward()
    same_gradients(model, plain)
    assert model.module.unused.weight.grad is None


class _Uses(nn.Module):
    def __init__(self, used: nn.Module, unused: nn.Module) -> None:
        super().__init__()
        self.used, self.unused = used, unused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_the_gradient_arrives_also_when_the_data_parallel_is_gone() -> None:
    module = mlp().to(FIRST)
    loss = parallel(module)(here(data(5)[0])).sum()
    gc.collect()
    loss.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_gradients_of_inputs_flow_back_to_where_they_came_from() -> None:
    model, plain = alike()
    x = data(5)[0].requires_grad_()  # on the CPU
    model(x).square().sum().backward()
    ours, x.grad = x.grad, None
    plain(x.to(FIRST)).square().sum().backward()
    assert ours is not None and ours.device == x.device
    close(ours, x.grad)


def test_activation_checkpoints_work_in_both_variants() -> None:
    for use_reentrant in (False, True):
        model, plain = alike(lambda: _Checkpointed(use_reentrant))  # noqa: B023
        for forward in (model, plain):
            forward(here(data(5)[0]).requires_grad_()).sum().backward()
        same_gradients(model, plain, f"reentrant: {use_reentrant}")


class _Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = mlp(), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


def test_a_forward_that_takes_gradients_itself_is_as_in_plain_pytorch() -> None:
    def attacked(module: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (module.weight * x).sin().sum().backward()  # which adds to the gradient of the weight, too
        return module.weight * (x + 0.1 * x.grad.sign()).detach()

    model, plain = alike(lambda: Calls(attacked))
    for forward in (model, plain):
        forward(here(data(5, torch.float32)[0])).sum().backward()
    assert_close(gradients(model.module), gradients(plain), "gradient", 1e-6)


# What may be given


def nested(x: torch.Tensor) -> dict[str, Any]:
    """A tensor in everything that can hold one."""
    return {
        "dict": {"x": x},
        "list": [x, 1],
        "tuple": (x, None),
        "named tuple": Pair(x, "text"),
        "ordered": OrderedDict(x=x),
        "dataclass": Output(x, [x]),
        "mapping": UserDict(x=x),
        "deque": collections.deque([x]),
        "deep": [{"x": (Pair([x], Output({"x": x})),)}],
        "scalar": torch.tensor(3.0, device=x.device),
    }


def test_tensors_are_found_wherever_they_are() -> None:
    seen: list[tuple[int, dict[str, Any]]] = []
    returning(lambda *args, **kwargs: seen.append((replica_id(), kwargs)))(ROWS, **nested(ROWS))
    assert sorted(r for r, _ in seen) == [0, 1]
    for r, kwargs in seen:
        expected = nested(ROWS.chunk(2)[r].to(compute_devices(2)[r]))
        assert shapes(kwargs) == shapes(expected)
        assert kwargs["deep"][0]["x"][0].second.logits["x"].tolist() == expected["list"][0].tolist()
        assert kwargs["deep"][0]["x"][0].second.logits["x"].device == expected["list"][0].device
        assert type(kwargs["mapping"]) is UserDict and type(kwargs["named tuple"]) is Pair
        assert kwargs["scalar"].item() == 3.0


def shapes(tree: Any) -> Any:
    """What a tree is made of."""
    return re.sub(r"tensor\(.*?\)(?=[,})\]])", "tensor", repr(tree).replace("\n", ""))


def test_what_is_no_tensor_is_the_very_object_in_each_replica() -> None:
    things = [Opaque(), "text", 3, None, torch.Size([4, 2]), {1, 2}, Output("a", "b"), torch.float32]
    seen: list[list[Any]] = []
    returning(lambda x, *given: seen.append(list(given)))(ROWS, *things)
    assert len(seen) == 2
    assert all(got is thing for given in seen for got, thing in zip(given, things, strict=True))


def test_the_users_own_containers_are_not_written() -> None:
    mapping, output = UserDict(x=ROWS), Output(ROWS)
    returning(lambda *_: None)(mapping, output, [ROWS])
    assert mapping["x"] is ROWS and output.logits is ROWS


@pytest.mark.parametrize(
    ("args", "kwargs", "dim", "error", "match"),
    [
        ((ROWS,), {"mask": torch.ones(1, 2)}, 0, ValueError, r"inputs\[0\] has 4 rows and mask has 1"),
        (([ROWS, torch.ones(3)],), {}, 0, ValueError, r"inputs\[0\]\[0\] has 4 rows and inputs\[0\]\[1\] has 3"),
        ((ROWS, Output(ROWS, ROWS.T)), {}, 0, ValueError, r"inputs\[0\] has 4 rows and inputs\[1\]\.hidden has 2"),
        ((UserDict(a=ROWS, b=ROWS.T),), {}, 0, ValueError, r"inputs\[0\]\['a'\] has 4 rows and inputs\[0\]\['b'\]"),
        ((ROWS, torch.ones(4)), {}, 1, ValueError, r"dim=1, and inputs\[1\], of shape \(4,\), has no such dimension"),
        ((ROWS,), {}, -3, ValueError, r"dim=-3, and inputs\[0\], of shape \(4, 2\), has no such dimension"),
        ((rnn.pack_sequence([ROWS, ROWS]),), {}, 0, TypeError, r"inputs\[0\] is a PackedSequence"),
    ],
)
def test_inputs_that_cannot_be_cut_are_refused_by_name(
    args: Any, kwargs: Any, dim: int, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        returning(lambda *args, **kwargs: None, dim=dim)(*args, **kwargs)


def test_a_batch_that_is_dealt_already_is_refused() -> None:
    with pytest.raises(TypeError, match=r"batch is a PerReplica|batch is a distributed value"):
        returning(lambda **_: None)(batch=deal(central(2), ROWS))


def test_packed_sequences_go_to_a_single_device_and_come_back_in_a_list() -> None:
    packed = rnn.pack_sequence([ROWS, ROWS[:2]])
    moved, *_ = parallel(Calls(lambda module, x: (x,)), 1)(packed)
    assert moved.data.device == FIRST
    outputs = returning(lambda x: rnn.pack_sequence([x, x]), output_device="cpu")(ROWS)
    assert [rnn.unpack_sequence(output)[1].tolist() for output in outputs] == [x.tolist() for x in ROWS.chunk(2)]
    assert {output.data.device.type for output in outputs} == {"cpu"}


# What may be returned


def test_outputs_of_any_nesting_come_back_as_from_one_device() -> None:
    model = returning(lambda x: nested(x * 2), 3)
    output = model(ROWS)
    expected = nested(here(ROWS * 2))
    close(output["dict"], expected["dict"])
    close(output["list"][0], expected["list"][0])
    close(output["deque"][0], expected["deque"][0])
    close(output["dataclass"].hidden[0], expected["dataclass"].hidden[0])
    close(output["mapping"]["x"], expected["mapping"]["x"])
    close(output["deep"][0]["x"][0].second.logits["x"], expected["deep"][0]["x"][0].second.logits["x"])
    assert [type(value) for value in output.values()] == [type(value) for value in expected.values()]
    assert output["list"][1] == [1, 1] and output["named tuple"].second == ["text", "text"]
    assert output["tuple"][1] is None
    assert output["scalar"].tolist() == [3.0, 3.0]


def test_a_tensor_without_dimensions_comes_back_as_a_vector() -> None:
    model, plain = alike(lambda: Calls(lambda module, x: (module.weight * x).mean()), 2)
    losses = model(here(ROWS))
    assert losses.tolist() == [1.5, 5.5]
    losses.mean().backward()
    plain(here(ROWS)).backward()
    same_gradients(model, plain)


def test_a_mean_over_rows_that_the_module_takes_itself_is_a_mean_for_each_replica() -> None:
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0], [100.0]])
    means = returning(lambda x: x.mean(), 4)(x)
    assert means.tolist() == [0.5, 2.5, 100.0]
    assert means.mean().item() != pytest.approx(x.mean().item())
    rows = returning(lambda x: x.mean(1), 4)(x)
    assert rows.mean().item() == pytest.approx(x.mean().item())


RESULTS: dict[str, Callable[[int], Any]] = {
    "a string": lambda r: "done",
    "a number": lambda r: 7 + r,
    "the same number": lambda r: 7,
    "an object": lambda r: FIXED[r],
    "None and a string": lambda r: None if r == 0 else "x",
    "a string and None": lambda r: "x" if r == 0 else None,
    "a size": lambda r: torch.Size([r]),
    "a truth": lambda r: r == 0,
    "numbers and None": lambda r: [None, 3.5][r],
    "objects of different classes": lambda r: [FIXED[0], Output(1)][r],
}
FIXED = [Opaque(), Opaque()]


@pytest.mark.parametrize("name", RESULTS)
def test_what_is_no_tensor_comes_back_as_a_list_over_the_replicas(name: str) -> None:
    result = returning(lambda x: RESULTS[name](replica_id()))(ROWS)
    assert result == [RESULTS[name](0), RESULTS[name](1)]


def test_none_stays_none_and_next_to_a_tensor_it_is_in_a_list() -> None:
    assert returning(lambda x: None)(ROWS) is None
    first, second = returning(lambda x: x if replica_id() else None)(ROWS)
    assert first is None and second.device == FIRST and second.tolist() == ROWS[2:].tolist()


def test_a_dataclass_comes_back_field_by_field() -> None:
    model = parallel(Calls(lambda module, x: Output(module.weight * x, (x.sum(), None))))
    output = model(here(ROWS))
    assert isinstance(output, Output)
    close(output.logits, here(ROWS))
    assert output.hidden[0].tolist() == [6.0, 22.0] and output.hidden[1] is None
    output.logits.sum().backward()
    assert model.module.weight.grad.item() == ROWS.sum().item()


class ModelOutput(OrderedDict[str, Any]):
    """What transformers' models return: an ordered dict whose items are attributes, and which is a dataclass."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def test_an_object_that_is_a_mapping_keeps_its_items_and_its_attributes() -> None:
    def forward(x: torch.Tensor) -> ModelOutput:
        output = ModelOutput()
        output["logits"] = x
        output["loss"] = x.sum()
        return output

    output = returning(forward)(here(ROWS))
    assert type(output) is ModelOutput and list(output) == ["logits", "loss"]
    assert output.logits is output["logits"] and output.loss.tolist() == [6.0, 22.0]  # type: ignore[attr-defined]


def test_torchs_own_results_keep_their_names() -> None:
    assert returning(lambda x: x.max(dim=1))(ROWS).values.tolist() == [1.0, 3.0, 5.0, 7.0]


@pytest.mark.parametrize(
    ("results", "match"),
    [
        (lambda r: [1] * (r + 1), r"different structure"),
        (lambda r: {"a": 1, "bc"[r]: 2}, r"different structure"),
        (lambda r: UserDict({"bc"[r]: 2}), r"different structure.*differ in what they hold: \['b'\] and \['c'\]"),
        (lambda r: Output([1] * (r + 1)), r"output\.logits of different structure"),
        (lambda r: torch.ones(2, 3 + r), r"output cannot be put together along dim=0: \(2, 3\).* and \(2, 4\)"),
        (lambda r: {"x": torch.ones([2] * (r + 1))}, r"output\['x'\] cannot be put together"),
        (lambda r: Output([torch.ones(2, dtype=[torch.int64, torch.float32][r])]), r"output\.logits\[0\] cannot"),
        (lambda r: torch.ones([2] * r), r"as output cannot be put together.*squeeze\(1\)"),
    ],
)
def test_outputs_that_do_not_fit_together_are_refused_by_name(results: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        returning(lambda x: results(replica_id()))(ROWS)


def test_an_output_without_the_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot be put together along dim=1: \(4,\)"):
        returning(lambda x: x.sum(1), dim=1)(ROWS)


@pytest.mark.parametrize("output_device", [None, "cpu", compute_devices(2)[1]])
@pytest.mark.parametrize("replicas", [1, 2])
def test_outputs_are_where_they_are_asked_for(output_device: Any, replicas: int) -> None:
    model = parallel(nn.Linear(2, 2), replicas, output_device=output_device)
    wanted = FIRST if output_device is None else torch.device(output_device)
    output = model(ROWS)
    assert output.device == torch.device(wanted.type, wanted.index if wanted.type != "cpu" else None)
    output.sum().backward()
    assert model.module.weight.grad.device == FIRST


# What the module is


def test_its_parameters_are_the_users_own_and_its_module_is_the_users_own() -> None:
    module = mlp().to(FIRST)
    model = parallel(module)
    model(here(data(5)[0]))
    assert model.module is module and type(module) is nn.Sequential
    assert [id(p) for p in model.parameters()] == [id(p) for p in module.parameters()]
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert [name for name, _ in model.named_parameters()] == [f"module.{name}" for name, _ in module.named_parameters()]


def test_its_replicas_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    make = ReplicatedModules.__init__
    monkeypatch.setattr(ReplicatedModules, "__init__", lambda self, *args: (built.append(1), make(self, *args))[1])
    model = parallel(mlp(), 3)
    optimizer = sgd(model)
    for step in range(3):
        for mode in (model.train, model.eval):
            mode()
            model(here(data(5, seed=step)[0])).sum().backward()
            optimizer.step()
    assert built == [1]


def test_it_may_be_made_anew_for_the_same_module_at_any_time(no_collector: None) -> None:
    module, x = mlp().to(FIRST), here(data(5)[0])
    models = [parallel(module) for _ in range(2)]
    outputs = [model(x) for model in models]
    for _ in range(2):
        model = parallel(module)
        outputs.append(model(x))
    del model, models
    outputs += [parallel(module, 3)(x), parallel(module, 2)(x), parallel(module, 1)(x)]
    for output in outputs:
        close(output, module(x))


def test_parts_of_a_model_may_be_in_data_parallels_of_their_own_and_share_parameters() -> None:
    encoder, decoder = nn.Linear(3, 3, **F64).to(FIRST), nn.Linear(3, 3, **F64).to(FIRST)
    decoder.weight = encoder.weight
    plain = copy.deepcopy(nn.Sequential(encoder, nn.Tanh(), decoder))
    model = nn.Sequential(parallel(encoder), nn.Tanh(), parallel(decoder))
    assert list(model.state_dict()) == list(plain.state_dict())
    x = here(data(5)[0])
    for forward in (model, plain):
        forward(x).square().sum().backward()
    ours = [p.grad for p in model.parameters()]
    close(ours, [p.grad for p in plain.parameters()])


def test_train_and_eval_reach_the_replicas() -> None:
    model = parallel(nn.Dropout(0.5))
    x = torch.ones(4, 64, device=FIRST)
    assert torch.equal(model.eval()(x), x)
    assert not torch.equal(model.train()(x), x)


def test_what_is_written_on_the_module_reaches_the_replicas() -> None:
    model, plain = alike()
    x = here(data(5)[0])
    model(x)
    changes: list[Callable[[nn.Module], object]] = [
        lambda m: m.load_state_dict({name: value * 2 for name, value in m.state_dict().items()}),
        lambda m: m.float().double(),
        lambda m: setattr(m[0], "bias", None),
        lambda m: m.__setitem__(2, nn.Linear(4, 5, **F64).requires_grad_(False).to(FIRST)),
        lambda m: m.half(),
    ]
    for change in changes:
        torch.manual_seed(1)
        change(model.module)
        torch.manual_seed(1)
        change(plain)
        x = x.to(plain[0].weight.dtype)
        close(model(x), plain(x))
    model.module = other = mlp().to(FIRST)
    x = x.double()
    close(model(x), other(x))


def test_hooks_of_the_module_run_in_each_replica_and_those_of_the_wrapper_once() -> None:
    rows: list[int] = []
    model = parallel(nn.Linear(2, 2), 4)
    model.module.register_forward_hook(lambda module, args, output: rows.append(len(output)))
    model.module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.register_forward_hook(lambda module, args, output: output + 1)
    output = model(here(ROWS))
    assert rows == [1] * 4
    close(output, F.linear(here(ROWS) * 2, model.module.weight, model.module.bias) + 1)
    backward: list[int] = []
    model.module.register_full_backward_hook(lambda module, before, after: backward.append(len(after[0])))
    model(here(ROWS).requires_grad_()).sum().backward()
    assert backward == [1] * 4


def test_batch_statistics_are_those_of_all_replicas_in_one_momentum_step() -> None:
    rows = torch.arange(32.0, device=FIRST).view(16, 2)
    model = parallel(nn.BatchNorm1d(2), 4)
    model(rows)
    close(model.module.running_mean, 0.1 * rows.mean(0))
    assert model.module.num_batches_tracked.item() == 1
    model.eval()(rows)
    assert model.module.num_batches_tracked.item() == 1
    one_row = model(rows[:1])
    close(one_row, model.module(rows[:1]))


def test_what_a_forward_writes_on_the_module_is_kept() -> None:
    misses: list[int] = []

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.calls += 1
        if module.cache is None:
            misses.append(replica_id())
            module.cache = {"scale": 2}
        return x * module.cache["scale"]

    module: Any = Calls(forward)
    module.calls, module.cache = 0, None
    model = parallel(module)
    for _ in range(3):
        model(ROWS)
    assert module.calls == 3
    assert sorted(misses) == [0, 1]


def test_a_replica_has_parameters_and_a_state_of_its_own() -> None:
    seen: list[list[str]] = []
    parallel(Calls(lambda module, x: seen.append([*dict(module.named_parameters()), *module.state_dict()])))(ROWS)
    assert seen == [["weight", "weight"]] * 2


@pytest.mark.parametrize("way", ["bound method", "list", "forward"])
def test_a_replica_reaches_its_own_layer_by_a(way: str) -> None:
    model, plain = alike(lambda: Indirect(way))
    for forward in (model, plain):
        forward(here(data(5)[0])).sum().backward()
    same_gradients(model, plain)


class Indirect(nn.Module):
    """Calls its layer by one of the ways that people have to get at it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, **F64)
        self.layers = [self.layer]
        self.method = self.decode
        self.way = way
        if way == "forward":
            self.layer.forward = self.layer.forward  # type: ignore[method-assign]

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return {"bound method": self.method, "list": self.layers[0], "forward": self.layer}[self.way](x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which the compiler hides
def test_a_compiled_module_trains_and_is_compiled_once() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = mlp().to(FIRST)
    plain = copy.deepcopy(module)
    model = parallel(torch.compile(module, backend=backend, dynamic=False))
    counts = []
    for step in range(4):
        for forward, stepper in ((model, sgd(module)), (plain, sgd(plain))):
            stepper.zero_grad()
            forward(here(data(4, seed=step)[0])).square().sum().backward()
            stepper.step()
        counts.append(len(graphs))
    assert counts[0] >= 1 and counts[1:] == [counts[1]] * 3
    assert_close(parameters(module), parameters(plain), "compiled", 1e-12)


def test_a_compiler_runs_a_data_parallel_as_it_is() -> None:
    graphs: list[Any] = []
    model, plain = alike()
    compiled = torch.compile(model, backend=lambda graph, inputs: (graphs.append(graph), graph.forward)[-1])
    for forward in (compiled, plain):
        forward(here(data(5)[0])).square().sum().backward()
    same_gradients(model, plain)
    assert graphs == []


class Tied(nn.Module):
    """Tokens in and out through one table."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4, **F64)
        self.mix = nn.GRU(4, 4, batch_first=True, **F64)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True, **F64)
        self.scales = nn.ParameterList([torch.ones(4, **F64)])
        self.out = nn.Linear(4, 7, **F64)
        self.out.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.mix(self.tokens((x * 100).long() % 7))
        attended, _ = self.attend(hidden, hidden, hidden)
        return self.out(attended * self.scales[0])


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4, **F64)), nn.Tanh())


def pruned() -> nn.Module:
    layer = nn.Linear(3, 4, **F64)
    prune.random_unstructured(layer, "weight", amount=4)
    return nn.Sequential(layer, nn.Tanh())


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "sparse": lambda: nn.Sequential(_Discrete(), nn.Embedding(7, 4, sparse=True, **F64)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2, **F64), nn.GroupNorm(2, 4, **F64)),
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)),
        nn.Linear(1, 4, **F64),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, **F64), 2),
    ),
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4, **F64)), nn.Tanh()),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3, **F64)), nn.Tanh()),
    "old weight_norm": old_weight_norm,
    "pruned": pruned,
    "complex": lambda: nn.Sequential(_Complex(), nn.Linear(3, 4, dtype=torch.complex128), _Modulus()),
}


class _Complex(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(x, x + 1)


class _Modulus(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs()


class _Discrete(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 100).long() % 7


@pytest.mark.parametrize("name", FAMILIES)
def test_modules_of_every_kind_have_the_gradients_of_plain_pytorch(name: str) -> None:
    model, plain = alike(FAMILIES[name])
    for step in range(2):
        for forward in (model, plain):
            forward.zero_grad()
            forward(here(data(5, seed=step)[0])).square().sum().backward()
            torch.optim.SGD(forward.parameters(), lr=0.1).step()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            close(ours.grad.to_dense(), theirs.grad.to_dense(), rtol=1e-10, atol=1e-12)


def test_a_recurrent_network_trains() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(2, 4, num_layers=2, batch_first=True, **F64)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            output, _ = rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
            return output

    model, plain = alike(Recurrent)
    x, lengths = here(torch.randn(5, 6, 2, **F64), torch.tensor([1, 2, 4, 6, 3]))
    for forward in (model, plain):
        forward(x, lengths).square().sum().backward()
    same_gradients(model, plain)


# What of the caller's state a replica has

tenant = contextvars.ContextVar("tenant", default="nobody")


def test_no_grad_and_inference_mode_hold_in_the_replicas() -> None:
    modes = returning(lambda x: [torch.is_grad_enabled(), torch.is_inference_mode_enabled()])
    model, x = parallel(mlp()), here(data(5)[0])
    with torch.no_grad():
        assert modes(ROWS) == [[False, False], [False, False]]
        assert not model(x).requires_grad
    with torch.inference_mode():
        assert modes(ROWS) == [[False, False], [True, True]]
        assert model(x).is_inference()
    assert model(x).requires_grad


def test_autocast_reaches_the_replicas_with_its_dtype() -> None:
    model = parallel(nn.Linear(2, 2))
    with torch.autocast(FIRST.type, torch.bfloat16):
        assert model(here(ROWS)).dtype == torch.bfloat16
    assert model(here(ROWS)).dtype == torch.float32


def test_context_variables_modes_and_saved_tensor_hooks_reach_the_replicas() -> None:
    threads: dict[str, set[int]] = {"mode": set(), "packed": set()}

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            threads["mode"].add(threading.get_ident())
            return func(*args, **(kwargs or {}))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        threads["packed"].add(threading.get_ident())
        return tensor

    def forward(module: Any, x: torch.Tensor) -> Any:
        return (module.weight * x).exp(), tenant.get(), threading.get_ident()

    model = parallel(Calls(forward))
    token = tenant.set("somebody")
    with Mode(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, tenants, here_ = model(ROWS)
    tenant.reset(token)
    assert tenants == ["somebody"] * 2
    assert set(here_) <= threads["mode"] and set(here_) <= threads["packed"]


def test_tensors_that_name_no_device_are_where_they_are_in_the_callers_script() -> None:
    where = returning(lambda x: str(torch.zeros(1).device))
    assert where(ROWS) == ["cpu", "cpu"]
    with torch.device("meta"):
        assert where(ROWS) == ["meta", "meta"]
    with torch.device(FIRST):
        assert where(ROWS) == [str(device) for device in compute_devices(2)]


def test_each_replica_draws_other_numbers_and_a_seed_gives_the_same_again() -> None:
    model, x = parallel(nn.Dropout(0.5), 4), torch.ones(4, 64, device=FIRST)
    outputs = []
    for _ in range(2):
        torch.manual_seed(1)
        outputs.append(model(x))
    assert torch.equal(*outputs)
    assert len({tuple(row.tolist()) for row in outputs[0]}) == 4


# What becomes of an exception


class RefusedError(Exception):
    """An exception with two arguments, as those of many libraries."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)


@pytest.mark.parametrize(
    "error", [KeyError("label"), RefusedError("batch", "labels"), SystemExit(3), KeyboardInterrupt()]
)
def test_the_very_exception_of_a_replica_is_raised_and_says_where(error: BaseException) -> None:
    model, plain = alike(lambda: Calls(lambda module, x, fails: _fail(error, fails) or module.weight * x), 2)
    x = here(ROWS)
    with pytest.raises(type(error)) as raised:
        model(x, True)
    assert raised.value is error
    assert any("raised by replica 1 of 2" in note for note in error.__notes__)
    for forward in (model, plain):  # and nothing has come of it
        forward(x, False).sum().backward()
    assert_close(gradients(model.module), gradients(plain), "after a failure")


def _fail(error: BaseException, fails: bool) -> None:
    if fails and replica_id() == 1:
        raise error


# State dicts, copies and pickles


class StepReferences(nn.Module):
    """Its state has a version, buffers, and something else."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.modules_ = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.versions: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.modules_(x))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.versions.append(metadata.get("version"))
        super()._load_from_state_dict(state, prefix, metadata, *rest)

    def get_extra_state(self) -> int:
        return 5

    def set_extra_state(self, state: int) -> None:
        assert state == 5


class Inner(nn.Module):
    """Has nothing but a part that is called as the prefix is."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


BUILDS: dict[str, Callable[[], nn.Module]] = {"named": StepReferences, "inner": Inner, "mlp": mlp}


@pytest.mark.parametrize("name", BUILDS)
def test_its_state_dict_is_that_of_the_module(name: str) -> None:
    module = BUILDS[name]()
    model = DataParallel(module, ["cpu", "cpu"])
    assert list(model.state_dict()) == list(module.state_dict())
    assert list(model.state_dict(prefix="net.")) == list(module.state_dict(prefix="net."))
    assert {f"0.{key}" for key in module.state_dict()} == set(nn.Sequential(model).state_dict())
    assert model.state_dict()._metadata.items() >= module.state_dict()._metadata.items()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    BUILDS[name]().load_state_dict(torch.load(buffer))


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("saved_by", ["the module", "torchstrategy", "torch"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_it_loads_what_was_saved_with_a_data_parallel_or_without(name: str, saved_by: str, is_nested: bool) -> None:
    source, target = BUILDS[name](), BUILDS[name]()
    savers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "the module": lambda module: module,
        "torchstrategy": lambda module: DataParallel(module, ["cpu", "cpu"]),
        "torch": nn.DataParallel,
    }
    saver = savers[saved_by](source)
    model: nn.Module = DataParallel(target, ["cpu", "cpu"])
    state = nn.Sequential(saver).state_dict() if is_nested else saver.state_dict()
    before = dict(state)
    if is_nested:
        model = nn.Sequential(model)
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert dict(state).keys() == before.keys()
    for key, value in source.state_dict().items():
        assert torch.equal(torch.as_tensor(target.state_dict()[key]), torch.as_tensor(value)), key
    if isinstance(target, StepReferences) and not (is_nested and saved_by == "the module"):
        assert target.versions == [3]


def test_loading_is_as_strict_as_in_torch() -> None:
    model, state = DataParallel(mlp(), ["cpu", "cpu"]), mlp().state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*module\.0\.weight"):
        model.load_state_dict({key: value for key, value in state.items() if key != "0.weight"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*module\.extra"):
        model.load_state_dict({**state, "extra": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"size mismatch for module\.0\.weight"):
        model.load_state_dict({**state, "0.weight": torch.ones(1)})
    result = model.load_state_dict({"module.0.weight": state["0.weight"], "other": torch.ones(1)}, strict=False)
    assert len(result.missing_keys) == len(state) - 1 and result.unexpected_keys == ["other"]
    assert torch.equal(model.module[0].weight, state["0.weight"])


def test_state_can_be_assigned_in_place_of_the_parameters() -> None:
    model, x = parallel(mlp()), here(data(5)[0])
    model(x)
    state = {name: value.clone() for name, value in mlp().to(FIRST).state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert model.module[0].weight.data_ptr() == state["0.weight"].data_ptr()
    close(model(x), model.module(x))


def test_a_copy_is_a_data_parallel_of_a_copy() -> None:
    model, x = parallel(mlp()), here(data(5)[0])
    model(x).sum().backward()
    copied = copy.deepcopy(model)
    assert copied.module is not model.module and copied.device_ids == model.device_ids
    copied.zero_grad()
    copied(x).sum().backward()
    close([p.grad for p in copied.parameters()], [p.grad for p in model.parameters()])
    with torch.no_grad():
        copied.module[0].weight.zero_()
    assert not torch.equal(model(x), copied(x))
    assert list(copied.state_dict()) == list(model.state_dict())


def test_it_can_be_saved_whole() -> None:
    model, x = parallel(mlp(), output_device="cpu"), here(data(5)[0])
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert type(loaded) is DataParallel
    close(loaded(x), expected)
    loaded.load_state_dict(model.state_dict())


def test_an_average_of_its_parameters_can_be_kept() -> None:
    model, x = parallel(mlp()), here(data(5)[0])
    average = AveragedModel(model)
    for _ in range(2):
        average.update_parameters(model)
    close(average(x), model(x))


# How it is made


@pytest.mark.parametrize(
    ("device_ids", "error", "match"),
    [
        ([], ValueError, r"device_ids=\[\] names no device"),
        ("cpu", TypeError, r"write \['cpu'\]"),
        (0, TypeError, r"write \[0\]"),
        (torch.device("cpu"), TypeError, r"write \[device\(type='cpu'\)\]"),
        (3.5, TypeError, r"device_ids is a list of devices"),
        ([True], TypeError, r"got True, a bool"),
        (["cpu", "gpux"], ValueError, r"'gpux' is not a device"),
        (["meta"], ValueError, r"meta tensors hold no numbers"),
        ([77, 78], ValueError, r"77' is not on this machine"),
        ([-1], ValueError, r"an index is 0 or more"),
    ],
)
def test_device_ids_that_are_none_are_refused(device_ids: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        DataParallel(mlp(), device_ids)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"output_device": 77}, ValueError, "is not on this machine"),
        ({"output_device": 1.5}, TypeError, "A device is a string"),
        ({"dim": None}, TypeError, "dim is the index of a dimension; got None"),
        ({"dim": "0"}, TypeError, "got '0', a str"),
    ],
)
def test_options_that_are_none_are_refused(options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        DataParallel(mlp(), ["cpu", "cpu"], **options)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"runs a torch\.nn\.Module; got a function"):
        DataParallel(data, ["cpu"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is a DataParallel already"):
        DataParallel(DataParallel(mlp(), ["cpu"]), ["cpu", "cpu"])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_module_is_refused_where_there_would_be_copies_of_it() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"Sequential\.0 is a ScriptModule"):
        DataParallel(nn.Sequential(scripted), ["cpu", "cpu"])
    assert DataParallel(scripted, ["cpu"])(ROWS).shape == (4, 2)


def test_it_has_the_attributes_that_scripts_ask_for() -> None:
    devices = compute_devices(2)
    model = parallel(mlp(), output_device=devices[1], dim=1)
    names = [device.index for device in devices] if SIMULATED else [torch.device("cpu", 0)] * 2
    assert model.device_ids == names and model.output_device == names[1] and model.dim == 1


def test_a_device_may_be_listed_twice_and_named_in_any_way() -> None:
    x = here(data(5)[0])
    for device_ids in (["cpu", torch.device("cpu"), "/cpu:0"], ("cpu:0", "cpu:1"), (device for device in ["cpu"] * 2)):
        model = DataParallel(mlp().cpu(), device_ids)  # type: ignore[arg-type]
        close(model(x), model.module(x.cpu()))


def test_a_buffer_that_counts_counts_each_batch_once_on_a_device_that_is_listed_twice() -> None:
    def count(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.batches += 1
        return x + 0

    module = Calls(count)
    module.register_buffer("batches", torch.zeros(1))
    DataParallel(module, ["cpu", "cpu"])(ROWS)
    assert module.batches.item() == 1


@pytest.mark.skipif(bool(SIMULATED), reason="there are accelerators here")
def test_without_accelerators_the_module_is_called_as_it_is() -> None:
    module = Calls(lambda module, *args, **kwargs: (module, args, kwargs, threading.get_ident()))
    model = DataParallel(module)
    assert model.device_ids == [] and model.output_device is None
    assert model(ROWS, 3, mask="x") == (module, (ROWS, 3), {"mask": "x"}, threading.get_ident())
    assert list(model.state_dict()) == ["weight"]
    assert DataParallel(mlp(), output_device="cpu").output_device == torch.device("cpu", 0)


def test_with_one_device_the_module_is_called_on_the_callers_thread() -> None:
    module = Calls(lambda module, x: (x, module, threading.get_ident()))
    model = parallel(module, 1)
    x, called, thread = model(ROWS)
    assert called is module and x.device == FIRST and thread == threading.get_ident()


def test_what_a_module_holds_that_cannot_be_copied_is_one_for_all_replicas() -> None:
    """A lock, an open file, a generator or a Python module in an attribute was refused."""
    held = [threading.Lock(), (i for i in range(9)), gc, {"deep": [threading.RLock()]}]
    model, plain = alike(lambda: Calls(lambda module, x: x * module.weight * next(module.held[1]).bit_length()))
    for one in (model.module, plain):
        one.held = list(held)
    next(held[1])  # type: ignore[call-overload]
    assert sorted(model(torch.ones(3, 1)).flatten().tolist()) == [1, 2, 2]  # replicas on several devices run at once
    assert model.module.held[0] is held[0]


# Where it is called


def test_it_cannot_be_called_in_a_replica() -> None:
    model, strategy = parallel(nn.Linear(2, 2)), central(2)
    with pytest.raises(RuntimeError, match="A DataParallel was called in a replica"):
        strategy.run(lambda: model(ROWS))
    with pytest.raises(RuntimeError, match="A DataParallel was called in a replica"):
        parallel(nn.Sequential(DataParallel(nn.Linear(2, 2).to(FIRST), [FIRST])))(ROWS)
    assert torchstrategy.get_strategy().run(lambda: model(ROWS)).shape == (4, 2)


def test_a_module_of_a_strategy_is_refused() -> None:
    with central(2).scope() as strategy:
        module = nn.Linear(2, 2).to(FIRST)
    with pytest.raises(RuntimeError, match="already belongs to another strategy"):
        parallel(module)(ROWS)
    assert strategy.extended.variable_created_in_scope(module)


def test_its_module_can_be_given_to_a_strategy_when_it_is_gone(no_collector: None) -> None:
    module = nn.Linear(2, 2).to(FIRST)
    model = parallel(module)
    expected = model(ROWS)
    del model
    strategy = central(2)
    strategy.distribute_module(module)
    close(torch.cat([output.to(FIRST) for output in outputs_of(strategy, module, ROWS)]), expected)


def test_a_lazy_module_is_refused_until_it_has_seen_a_batch() -> None:
    model = parallel(nn.Sequential(nn.LazyLinear(2), nn.ReLU()))
    with pytest.raises(TypeError, match="has no shape yet"):
        model(ROWS)
    model.module(here(ROWS))
    close(model(ROWS), model.module(here(ROWS)))


def test_a_layer_that_is_made_in_forward_is_refused_until_it_is_there() -> None:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(module, "late"):
            module.late = nn.Linear(2, 2, device=x.device)
        return module.late(x)

    model = parallel(Calls(forward))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"Calls\.late was made in a replica.*DataParallel is model\.module"):
            model(ROWS)
    model.module(here(ROWS))
    close(model(ROWS), model.module(here(ROWS)))


def test_a_parameter_that_forward_writes_in_place_is_refused() -> None:
    def clamp(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.weight.data.clamp_(-0.5, 0.5)
        return module.weight * x

    model = parallel(Calls(clamp))
    with pytest.raises(RuntimeError, match=r"Calls\.weight was written in place in a replica"):
        model(ROWS)


def test_forwards_of_several_threads_do_not_disturb_each_other() -> None:
    model, x = parallel(mlp()), here(data(5)[0])
    expected = model(x).tolist()
    outputs: list[Any] = []
    threads = [threading.Thread(target=lambda: outputs.append(model(x).tolist())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == [expected] * 4


def test_nothing_of_it_is_left_when_it_is_gone(no_thread_left: None) -> None:
    model = parallel(mlp())
    model(here(data(5)[0])).sum().backward()
    del model


# Results of a step that its caller differentiates: what a strategy has of all this


def outputs_of(strategy: torchstrategy.Strategy, module: nn.Module, x: torch.Tensor) -> list[Any]:
    """What each replica returns for its rows."""
    results = strategy.run(module, args=(deal(strategy, x),))
    return list(strategy.experimental_local_results(results))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_see_the_gradient_of_all_replicas_once_in_a_backward_outside(register: str) -> None:
    strategy, module, seen = central(3), mlp(), []
    strategy.distribute_module(module)
    getattr(module[0].weight, register)(lambda tensor: seen.append(tensor.shape))
    for times in (1, 2):
        loss = sum(output.square().sum().to(FIRST) for output in outputs_of(strategy, module, data(7)[0]))
        loss.backward()
        assert len(seen) == times
    plain = copy.deepcopy(module)
    plain.zero_grad()
    (2 * plain(here(data(7)[0])).square().sum()).backward()
    assert_close(gradients(module), gradients(plain), "gradient", 1e-12)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_outside_may_create_a_graph() -> None:
    strategy, module = central(3), mlp()
    plain = copy.deepcopy(module).to(FIRST)
    strategy.distribute_module(module)
    x = data(7)[0]
    sum(output.square().sum().to(FIRST) for output in outputs_of(strategy, module, x)).backward(create_graph=True)
    plain(here(x)).square().sum().backward(create_graph=True)
    for forward in (module, plain):
        grads = [p.grad for p in forward.parameters()]
        forward.zero_grad()
        sum(grad.square().sum() for grad in grads).backward()
    assert_close(gradients(module), gradients(plain), "second derivative", 1e-10)
    for forward in (module, plain):
        forward.zero_grad()


def test_what_a_step_returns_in_an_object_can_be_differentiated_outside() -> None:
    strategy, module = central(2), Calls(lambda module, x: Output(module.weight * x))
    strategy.distribute_module(module)
    sum(output.logits.sum().to(FIRST) for output in outputs_of(strategy, module, ROWS)).backward()
    assert module.weight.grad.item() == ROWS.sum().item()


def test_running_statistics_that_come_back_do_not_spoil_a_graph() -> None:
    strategy, module = central(2), nn.BatchNorm1d(3, **F64)
    strategy.distribute_module(module)
    x = here(data(6)[0])
    losses = [module(x).sin().sum()]  # outside, too
    losses += [output.sin().sum().to(FIRST) for _ in range(2) for output in outputs_of(strategy, module, x)]
    sum(losses).backward()
    assert module.weight.grad is not None


def test_a_module_is_free_for_another_strategy_as_soon_as_its_own_is_gone(no_collector: None) -> None:
    module = mlp()
    for _ in range(2):
        strategy = central(2)
        strategy.distribute_module(module)
        outputs_of(strategy, module, data(4)[0])
        del strategy


def test_a_module_can_be_distributed_in_a_run_of_the_default_strategy() -> None:
    strategy, module = central(2), mlp()
    torchstrategy.get_strategy().run(lambda: strategy.distribute_module(module))
    strategy.run(lambda x: module(x).square().sum().backward(), args=(deal(strategy, data(4)[0]),))
    assert all(parameter.grad is not None for parameter in module.parameters())
