"""Autograd on simulated devices: devices, threads, hooks, checkpoints, transforms."""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn as nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import torchstrategy
from conditions import for_changes, for_releases

ONE, TWO = torch.device("sim:1"), torch.device("sim:2")


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * gradient


def leaf(device: Any, *size: int) -> torch.Tensor:
    return torch.ones(*size or (2,), device=device, requires_grad=True)


def test_a_graph_over_several_devices_has_the_gradients_of_one_device() -> None:
    def gradients(*devices: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [torch.randn(3, 3).to(device).requires_grad_() for device in devices]
        x = torch.randn(2, 3)
        for weight in weights:
            x = (x.to(weight.device) @ weight).tanh()
        x.to("sim:4" if devices[0] != "cpu" else "cpu").pow(2).sum().backward()
        for weight in weights:
            assert weight.grad is not None and weight.grad.device == weight.device
        return [weight.grad.cpu() for weight in weights if weight.grad is not None]

    assert_close(gradients("sim:3", "cpu", "sim:1"), gradients("cpu", "cpu", "cpu"))


def test_a_gradient_of_a_gradient_crosses_devices() -> None:
    one, two = leaf(ONE), leaf(TWO)
    first, second = torch.autograd.grad(
        (one.to(TWO) * two).pow(3).sum(), [one, two], create_graph=True
    )
    assert (first.device, second.device) == (ONE, TWO)
    (first.sum() + second.to(ONE).sum()).backward()
    assert (
        one.grad is not None
        and one.grad.tolist() == [15, 15]
        and one.grad.device == ONE
    )


def test_gradcheck_passes() -> None:
    x = torch.randn(3, device=ONE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Square.apply, (x,))
    assert torch.autograd.gradgradcheck(lambda x: x.sin().prod(), (x,))


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "assigned": lambda w: setattr(w, "grad", torch.ones(2, device=TWO)),
    "assigned_from_the_cpu": lambda w: setattr(w, "grad", torch.ones(2)),
    "given_to_backward": lambda w: (w * 2).backward(torch.ones(2, device=TWO)),
    "given_to_grad": lambda w: torch.autograd.grad(w * 2, w, torch.ones(2)),
}


@pytest.mark.parametrize("give", WRONG.values(), ids=WRONG)
def test_a_gradient_of_another_device_is_refused(
    give: Callable[[torch.Tensor], Any],
) -> None:
    w = leaf(ONE)
    with pytest.raises(RuntimeError, match="device"):
        give(w)
    assert w.grad is None


def test_a_function_that_returns_a_gradient_of_another_device_is_refused() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient.to(TWO)

    with pytest.raises(RuntimeError, match="device"):
        Wrong.apply(leaf(ONE)).sum().backward()


def test_each_thread_trains_on_a_device_of_its_own() -> None:
    losses: dict[int, list[float]] = {}

    def train(index: int) -> None:
        torch.accelerator.set_device_index(index)
        generator = torch.Generator("sim").manual_seed(0)
        w = torch.zeros(8, device="sim", requires_grad=True)
        optimizer = torch.optim.Adam([w], lr=0.1)
        seen = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = (
                (torch.randn(16, 8, device="sim", generator=generator) @ w - 1)
                .square()
                .mean()
            )
            loss.backward()
            assert w.grad is not None and w.grad.device.index == index
            optimizer.step()
            seen.append(loss.item())
        losses[index] = seen

    threads = [threading.Thread(target=train, args=(index,)) for index in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [losses[index] for index in range(5)] == [losses[0]] * 5


def test_backward_runs_on_the_thread_that_asks_for_it() -> None:
    seen = []
    w = leaf(ONE)
    w.register_hook(lambda gradient: seen.append(threading.current_thread()))
    (w.to(TWO) * 2).sum().backward()
    assert seen == [threading.current_thread()]


def test_hooks_see_gradients_where_the_tensor_is() -> None:
    seen: list[Any] = []
    w = leaf(ONE)
    w.register_hook(lambda gradient: seen.append(gradient.device))
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.device))  # type: ignore[union-attr]
    w.to(TWO).sum().backward()
    assert seen == [ONE, ONE]


def test_a_saved_tensor_that_was_written_since_is_noticed() -> None:
    w = leaf(ONE)
    y = w * 2
    z = y * y
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize(
    "write", [torch._foreach_add_, torch._foreach_mul_], ids=["add", "mul"]
)
def test_a_saved_tensor_that_a_loop_over_lists_has_written_since_is_noticed(
    write: Any,
) -> None:
    w = leaf(ONE)
    y = w * 2
    z = y * y
    with torch.no_grad():
        write([y, torch.ones(2, device=TWO)], 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize(
    "write",
    [
        torch._foreach_zero_,
        lambda tensors: torch._foreach_lerp_(
            tensors, [torch.ones_like(t) for t in tensors], 0.5
        ),
    ],
    ids=["zero", "lerp"],
)
def test_a_write_that_the_kernels_of_gpus_do_not_count_is_counted(write: Any) -> None:
    """On an H100, a moving average that a step wrote was seen by nobody.

    `AveragedModel` writes by `_foreach_lerp_`.
    """
    operator = torch.ops.aten._foreach_zero_.default
    uncounted, counted = (
        [torch.ones(3, device=ONE) for _ in range(2)] for _ in range(2)
    )
    operator(uncounted)
    assert [tensor._version for tensor in uncounted] == [0, 0]  # as on a GPU
    write(counted)
    assert [tensor._version for tensor in counted] == [1, 1]
    with torch.inference_mode():
        write([torch.ones(3, device=ONE)])  # which has no version


# What is raised on the way


class Refused(Exception):
    """Raised by what a backward calls."""


class Raising:
    """Once it is armed, raises the same exception whenever it is called."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.is_armed = error, True

    def __call__(self, *args: Any) -> Any:
        if self.is_armed:
            raise self.error
        return args[0]


class Refusing(torch.autograd.Function):
    raising: Raising

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return Refusing.raising(gradient)


class Wrapped(torch.Tensor):
    """A tensor whose operators raise once `raising` is armed."""

    raising: Raising
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.raising(None)
        return cls(
            func(
                *(arg.inner if isinstance(arg, Wrapped) else arg for arg in args),
                **(kwargs or {}),
            )
        )


def in_a_hook_of_a_tensor(raises: Raising) -> None:
    (x := leaf(ONE) * 2).register_hook(raises)
    x.sum().backward()


def in_a_hook_of_a_leaf(raises: Raising) -> None:
    (w := leaf(ONE)).register_hook(raises)
    (w * 2).sum().backward()


def after_accumulation(raises: Raising) -> None:
    (w := leaf(ONE)).register_post_accumulate_grad_hook(raises)
    (w * 2).sum().backward()


def after_a_node(raises: Raising) -> None:
    torch.autograd.graph.get_gradient_edge(x := leaf(ONE) * 2).node.register_hook(
        raises
    )
    x.sum().backward()


def before_a_node(raises: Raising) -> None:
    torch.autograd.graph.get_gradient_edge(x := leaf(ONE) * 2).node.register_prehook(
        raises
    )
    x.sum().backward()


def after_all_of_several(raises: Raising) -> None:
    torch.autograd.graph.register_multi_grad_hook(
        [one := leaf(ONE), two := leaf(TWO)], raises
    )
    (one * two.to(ONE)).sum().backward()


def after_any_of_several(raises: Raising) -> None:
    torch.autograd.graph.register_multi_grad_hook(
        [one := leaf(ONE), two := leaf(TWO)], raises, mode="any"
    )
    (one * two.to(ONE)).sum().backward()


def after_a_module(raises: Raising) -> None:
    (layer := nn.Linear(2, 2, device=ONE)).register_full_backward_hook(raises)
    layer(leaf(ONE)).sum().backward()


def before_a_module(raises: Raising) -> None:
    (layer := nn.Linear(2, 2, device=ONE)).register_full_backward_pre_hook(raises)
    layer(leaf(ONE)).sum().backward()


def at_the_end_of_a_backward(raises: Raising) -> None:
    engine: Any = torch.autograd.Variable
    (x := leaf(ONE) * 2).register_hook(
        lambda gradient: engine._execution_engine.queue_callback(raises)
    )
    x.sum().backward()


def unpacking(raises: Raising) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, raises):
        loss = leaf(ONE).exp().sin().sum()
    loss.backward()


def packing_in_a_backward(raises: Raising) -> None:
    loss = (w := leaf(ONE)).exp().sin().sum()
    with torch.autograd.graph.saved_tensors_hooks(raises, lambda tensor: tensor):
        torch.autograd.grad(loss, w, create_graph=True)


def in_a_checkpoint(raises: Raising) -> None:
    raises.is_armed = False
    loss = checkpoint(
        lambda x: raises(x.exp()).sin(), leaf(ONE), use_reentrant=False
    ).sum()
    raises.is_armed = True
    loss.backward()


def in_a_reentrant_checkpoint(raises: Raising) -> None:
    raises.is_armed = False
    loss = checkpoint(
        lambda x: raises(x.exp()).sin(), leaf(ONE), use_reentrant=True
    ).sum()
    raises.is_armed = True
    loss.backward()


def in_a_function(raises: Raising) -> None:
    Refusing.raising = raises
    Refusing.apply(leaf(ONE)).sum().backward()


def in_an_operator(raises: Raising) -> None:
    raises.is_armed, Wrapped.raising = False, raises
    result = Wrapped(leaf(ONE).detach()).requires_grad_().exp().sin()
    raises.is_armed = True
    result.backward(torch.ones(2, device=ONE))


def in_a_backward_in_a_hook(raises: Raising) -> None:
    @torch.enable_grad()
    def hook(gradient: torch.Tensor) -> None:
        in_a_hook_of_a_tensor(raises)

    (x := leaf(TWO) * 2).register_hook(hook)
    x.sum().backward()


def with_anomaly_detection(raises: Raising) -> None:
    with torch.autograd.detect_anomaly(check_nan=False):
        in_a_hook_of_a_tensor(raises)


CALLS = [
    in_a_hook_of_a_tensor,
    in_a_hook_of_a_leaf,
    after_accumulation,
    after_a_node,
    before_a_node,
    after_all_of_several,
    after_any_of_several,
    after_a_module,
    before_a_module,
    at_the_end_of_a_backward,
    unpacking,
    packing_in_a_backward,
    in_a_checkpoint,
    in_a_reentrant_checkpoint,
    in_a_function,
    in_an_operator,
    in_a_backward_in_a_hook,
    with_anomaly_detection,
]


@pytest.mark.filterwarnings(
    "ignore:Anomaly:UserWarning", "ignore:Error detected:UserWarning"
)
@pytest.mark.parametrize("backward", CALLS)
@pytest.mark.parametrize("kind", [Refused, SystemError, KeyboardInterrupt])
def test_what_a_backward_calls_may_raise(
    backward: Callable[[Raising], None], kind: type[BaseException]
) -> None:
    raises = Raising(kind("a reason"))
    with pytest.raises(kind, match=r"^a reason$") as caught:
        backward(raises)
    assert caught.value is raises.error and caught.value.__context__ is None
    assert caught.traceback[-1].name == "__call__"


def test_an_exception_that_c_raised_in_a_hook_comes_out_as_an_exception() -> None:
    (x := leaf(ONE) * 2).register_hook({}.pop)
    # Before Python 3.12, a type and a tensor are all that is pending.
    with pytest.raises(KeyError, match="tensor"):
        x.sum().backward()


def test_a_hook_that_returns_no_gradient_is_refused() -> None:
    (x := leaf(ONE) * 2).register_hook(lambda gradient: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="hook returned 'int'"):
        x.sum().backward()


def test_a_backward_goes_on_after_an_exception_that_a_hook_has_caught() -> None:
    @torch.enable_grad()
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        with pytest.raises(Refused):
            in_a_hook_of_a_tensor(Raising(Refused()))
        return gradient * 3

    (x := (w := leaf(ONE)) * 2).register_hook(hook)
    x.sum().backward()
    assert w.grad is not None and w.grad.tolist() == [6, 6]


def test_nothing_keeps_an_exception_that_came_out() -> None:
    def refuse() -> weakref.ref[Refused]:
        error = Refused()
        handle = (x := leaf(ONE) * 2).register_hook(Raising(error))
        with pytest.raises(Refused):
            x.sum().backward()
        handle.remove()  # through it a tensor would keep itself, in plain PyTorch too
        return weakref.ref(error)

    refused = refuse()
    gc.collect()
    assert refused() is None


def test_each_thread_gets_what_was_raised_on_it() -> None:
    errors = [Refused(index) for index in range(5)]
    raised: dict[int, BaseException] = {}
    together = threading.Barrier(len(errors), timeout=60)

    def train(index: int) -> None:
        def hook(gradient: torch.Tensor) -> None:
            together.wait()
            raise errors[index]

        (x := leaf(torch.device("sim", index)) * 2).register_hook(hook)
        try:
            x.sum().backward()
        except Refused as error:
            raised[index] = error

    threads = [
        threading.Thread(target=train, args=(index,)) for index in range(len(errors))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [raised[index] for index in range(len(errors))] == errors


@pytest.mark.parametrize("parameters", ["cpu", "sim:1"])
def test_what_a_hook_raises_in_a_replica_comes_out_of_the_run(parameters: str) -> None:
    strategy = torchstrategy.CentralStorageStrategy(
        ["sim:0", "sim:1", "sim:2"], parameters
    )
    with strategy.scope():
        layer = nn.Linear(2, 2)
    error = Refused("a reason")

    def step() -> None:
        context = torchstrategy.get_replica_context()
        outputs = layer(torch.ones(1, 2))
        if context.replica_id_in_sync_group == 2:
            outputs.register_hook(Raising(error))
        outputs.sum().backward()

    with pytest.raises(Refused) as caught:
        strategy.run(step)
    assert caught.value is error


@pytest.mark.parametrize(
    "hook",
    [torch.neg, Raising(Refused())],
    ids=["and a hook returns", "and a hook raises"],
)
def test_an_interruption_comes_out_wherever_it_arrives(hook: Any) -> None:
    # As Ctrl-C does, which Python raises in any of its functions; where C++ cannot let
    # it pass, the process would end.
    model, x = torch.nn.Linear(2, 2, device=ONE), torch.ones(2, 2, device=ONE)

    def interrupted_at(number: int) -> bool:
        seen = 0

        def profile(frame: types.FrameType, event: str, argument: object) -> None:
            nonlocal seen
            seen += event == "call"
            if event == "call" and seen == number and not is_collecting(frame):
                raise KeyboardInterrupt

        sys.setprofile(profile)
        try:
            outputs = model(x)
            outputs.register_hook(hook)
            outputs.sum().backward()
        except KeyboardInterrupt:
            return True
        except Refused:
            pass
        finally:
            sys.setprofile(None)
            # What a block sets, an interruption may leave set.
            torch.autograd.set_multithreading_enabled(True)
        return seen >= number

    # What is raised there is lost, in any program.
    def is_collecting(frame: types.FrameType | None) -> bool:
        return frame is not None and (
            frame.f_code.co_filename == weakref.__file__ or is_collecting(frame.f_back)
        )

    number = 1
    while interrupted_at(number):
        number += 1
    assert number > 20


# Writing


def test_a_leaf_is_not_written() -> None:
    w = leaf(ONE)
    for write in (
        lambda: w.add_(1),
        lambda: w.view(2, 1).add_(1),
        lambda: w[0].fill_(1),
        lambda: w.resize_(3),
    ):
        with pytest.raises(RuntimeError):
            write()
    assert w.tolist() == [1, 1]


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "row": lambda x, y: y[0].mul_(2),
    "column": lambda x, y: y[:, 1].add_(y[:, 2]),
    "transposed": lambda x, y: y.t()[3].mul_(3),
    "strided": lambda x, y: y.view(-1)[::5].sin_(),
    "diagonal": lambda x, y: y.diagonal().exp_(),
    "as_strided": lambda x, y: y.as_strided((2,), (5,), 1).mul_(4),
    "mask": lambda x, y: y.__setitem__(x > 5, 0),
    "index": lambda x, y: y.__setitem__(
        (torch.tensor([0, 1]), torch.tensor([1, 1])), x[2, :2] * 2
    ),
    "scatter": lambda x, y: y.scatter_(1, (x[:, :1] * 0).long(), x[:, :1] * 3),
    "index_add": lambda x, y: y.index_add_(0, (x[:2, 0] * 0).long(), x[:2]),
    "masked_fill": lambda x, y: y.masked_fill_(y > 8, 1.0),
    "copy": lambda x, y: y[1].copy_(x[0] * x[0]),
    "copy_from_the_cpu": lambda x, y: y[1].copy_(torch.ones(4)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_through_views_are_differentiated_as_on_the_cpu(write: Any) -> None:
    def gradient(device: Any) -> torch.Tensor:
        x = torch.arange(12.0, device=device).view(3, 4).requires_grad_()
        y = x * 1
        write(x, y)
        (found,) = torch.autograd.grad((y * y).sum(), x)
        assert found.device == torch.device(device)
        return found.cpu()

    assert_close(gradient(ONE), gradient("cpu"))


def test_complex_views_are_differentiated_as_on_the_cpu() -> None:
    def gradient(device: Any) -> torch.Tensor:
        x = torch.arange(1.0, 5.0, device=device).to(torch.complex64).requires_grad_()
        y = x * 1
        y.real.mul_(2)
        y.conj().mul_(1j)
        torch.view_as_real(y)[0, 0] = 3
        return torch.autograd.grad(y.abs().pow(2).sum(), x)[0].cpu()

    assert_close(gradient(ONE), gradient("cpu"))


def test_what_is_made_in_inference_mode_stays_out_of_graphs() -> None:
    with torch.inference_mode():
        y = torch.ones(2, device=ONE) * 2
        y[0] = 3
        assert y.is_inference() and y.view(1, 2).is_inference()
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        (leaf(ONE) * y).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_dropout_again(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(ONE)
    gradients = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        x = torch.ones(4, 8, device=ONE, requires_grad=True)
        torch.manual_seed(1)
        run(x).square().sum().backward()
        gradients.append(x.grad)
    assert_close(gradients[0], gradients[1])


def test_saved_tensors_can_be_kept_on_the_cpu() -> None:
    w = leaf(ONE)
    with torch.autograd.graph.save_on_cpu():
        loss = w.exp().sin().sum()
    loss.backward()
    expected = torch.ones(2, requires_grad=True)
    expected.exp().sin().sum().backward()
    assert w.grad is not None and w.grad.device == ONE
    assert_close(w.grad.cpu(), expected.grad)


@pytest.mark.filterwarnings(
    "ignore:Anomaly:UserWarning", "ignore:Error detected:UserWarning"
)
def test_anomaly_detection_names_the_function() -> None:
    with (
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="SqrtBackward0"),
    ):
        (torch.zeros(2, device=ONE, requires_grad=True).sqrt() * 0).sum().backward()


TRANSFORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "vmap_grad": lambda x: torch.func.vmap(
        torch.func.grad(lambda t: (t.sin() * t).sum())
    )(x),
    "hessian": lambda x: torch.func.hessian(lambda t: (t.sin() * t).sum())(x[0]),
    "jacrev": lambda x: torch.func.jacrev(torch.sin)(x),
    "jacfwd": lambda x: torch.func.jacfwd(torch.sin)(x),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
    "vjp": lambda x: torch.func.vjp(torch.sin, x)[1](x)[0],
    "vmap_index": lambda x: torch.func.vmap(lambda i: x[i])(
        torch.arange(4, device=x.device)
    ),
    "vmap_inverse": lambda x: torch.func.vmap(torch.linalg.inv)(
        torch.eye(3, device=x.device).expand(2, 3, 3)
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_function_transforms_compute_what_the_cpu_computes(
    transform: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    if transform is TRANSFORMS["vmap_index"] and torch.__version__ < "2.11":
        pytest.skip(
            "torch 2.10 cannot index in vmap on a simulated device: install torch 2.11 "
            "or newer"
        )
    x = torch.randn(4, 3)
    ours = transform(x.to(ONE))
    assert ours.device == ONE
    assert_close(ours.cpu(), transform(x))


def test_vmap_refuses_two_devices_and_moves_between_them() -> None:
    x = torch.randn(4, 3, device=ONE)
    with pytest.raises(RuntimeError, match="device"):
        torch.func.vmap(torch.add)(x, x.to(TWO))
    moved = torch.func.vmap(lambda t: t.to(TWO))(x)
    assert moved.device == TWO and torch.equal(moved.cpu(), x.cpu())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_forward_mode_carries_tangents_over_devices() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(
            torch.ones(2, device=ONE), torch.full((2,), 3.0, device=ONE)
        )
        tangent = forward_ad.unpack_dual((dual * dual).to(TWO)).tangent
    assert tangent is not None and tangent.device == TWO and tangent.tolist() == [6, 6]


@for_releases
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_traces_devices(backend: str) -> None:
    torch._dynamo.reset()
    layer = nn.Linear(3, 3).to(ONE)

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        return layer(x).relu().to("sim:2") + torch.tensor([1.0], device="sim:2")

    x = torch.ones(2, 3, device=ONE)
    y = step(x)
    y.sum().backward()
    assert (
        y.device == TWO
        and layer.weight.grad is not None
        and layer.weight.grad.device == ONE
    )
    assert_close(y, layer(x).relu().to(TWO) + 1)


@for_changes
@pytest.mark.filterwarnings("ignore")
def test_torch_compile_for_real_kernels_is_refused_and_names_the_device() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="sim"):
        torch.compile(lambda x: x + 1)(torch.ones(2, device=ONE))
