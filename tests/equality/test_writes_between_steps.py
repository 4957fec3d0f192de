"""What is written on a model between two steps reaches every replica."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode

import torchstrategy
from conditions import only_with_copies
from nets import F64, Net, outputs, train, trained
from problems import (
    assert_close,
    close,
    compare,
    data,
    deal,
    gradients,
    mse,
    replica_id,
)
from topologies import SIMULATED, central_in_one_place, central_with_copies
from torchstrategy._base.context import using_device
from torchstrategy._turns.switch import IN_TURNS


def _eval(model: Any) -> None:
    model.eval()


def _dropout(model: Any) -> None:
    model.encoder[2].p = 1.0


def _freeze(model: Any) -> None:
    model.encoder.requires_grad_(False)


def _thaw(model: Any) -> None:
    model.encoder.requires_grad_(True)


def _swap(model: Any) -> None:
    torch.manual_seed(5)
    model.heads["a"] = nn.Linear(4, 2, **F64)


def _swap_by_attribute(model: Any) -> None:
    torch.manual_seed(5)
    model.encoder = nn.Sequential(nn.Linear(3, 4, **F64), nn.ReLU())


def _insert(model: Any) -> None:
    torch.manual_seed(5)
    model.encoder.append(nn.Linear(4, 4, **F64))


def _new_parameter(model: Any) -> None:
    model.scale = nn.Parameter(torch.full((2,), 3.0, **F64))


def _drop_bias(model: Any) -> None:
    model.heads["a"].bias = None


def _load(model: Any) -> None:
    torch.manual_seed(6)
    model.load_state_dict(Net().state_dict())


def _assign(model: Any) -> None:
    torch.manual_seed(6)
    model.load_state_dict(Net().state_dict(), assign=True)


def _initialise(model: Any) -> None:
    torch.manual_seed(7)
    for p in model.parameters():
        nn.init.normal_(p)


def _write_in_place(model: Any) -> None:
    with torch.no_grad():
        model.scale.mul_(3)
        model.heads["a"].weight[0] = 1.0


def _put_data(model: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 2


def _put_data_twice(model: Any) -> None:
    # The second tensor may well get the memory that the first assignment has set free.
    for _ in range(2):
        for p in model.parameters():
            p.data = p.data * 2


def _transpose_data(model: Any) -> None:
    for block in model.blocks:
        block.weight.data = block.weight.data.t()


def _prune_data(model: Any) -> None:
    head = model.heads["a"]
    head.weight.data, head.bias.data = head.weight.data[:1], head.bias.data[:1]


def _halve(model: Any) -> None:
    model.float()


def _there_and_back(model: Any) -> None:
    model.to(torch.bfloat16)
    model.double()


def _write_buffer(model: Any) -> None:
    model.offset.fill_(2.0)


def _put_buffer(model: Any) -> None:
    model.offset = torch.full((2,), 4.0, **F64)


def _put_buffer_data(model: Any) -> None:
    model.offset.data = torch.full((2,), 4.0, **F64)


def _attribute(model: Any) -> None:
    model.head = "b"


def _setting(model: Any) -> None:
    model.settings["gain"] = 5.0


def _new_settings(model: Any) -> None:
    model.settings = {"gain": 5.0}


def _method(model: Any) -> None:
    model.forward_fn = lambda h: model.decode(h) * 2


def _list_of_modules(model: Any) -> None:
    model.all_blocks.reverse()
    model.all_blocks.append(model.blocks[0])


def _hook(model: Any) -> None:
    model.encoder.register_forward_hook(lambda module, args, out: out * 2)


def _pre_hook(model: Any) -> None:
    model.encoder[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _backward_hook(model: Any) -> None:
    model.heads["a"].register_full_backward_hook(
        lambda module, grad_in, grad_out: (2 * grad_in[0],)
    )


def _hook_that_was_removed(model: Any) -> None:
    handle = model.encoder.register_forward_hook(lambda module, args, out: out * 2)
    handle.remove()


def _weight_norm(model: Any) -> None:
    parametrizations.weight_norm(model.heads["a"])


WRITES = [
    _eval, _dropout, _freeze, _thaw, _swap, _swap_by_attribute, _insert, _new_parameter,
    _drop_bias, _load, _assign, _initialise, _write_in_place, _put_data,
    _put_data_twice, _transpose_data, _prune_data, _halve, _there_and_back,
    _write_buffer, _put_buffer, _put_buffer_data, _attribute, _setting, _new_settings,
    _method, _list_of_modules, _hook, _pre_hook, _backward_hook, _hook_that_was_removed,
    _weight_norm,
]  # fmt: skip


def _output(model: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = model(x.to(dtype))
    out.square().mean().backward()
    return out.detach()


@pytest.mark.parametrize(
    "write", WRITES, ids=[write.__name__.strip("_") for write in WRITES]
)
def test_what_is_written_between_steps_reaches_every_replica(make, write):
    for n in (1, 3):
        strategy = make(n)
        model, _, twin, _ = trained(strategy)
        x = data(6)[0]
        for again in range(2):
            for m in (model, twin):
                m.zero_grad()
                if not again:
                    with using_device(m.scale.device):
                        write(m)
            dtype = next(model.parameters()).dtype

            got = strategy.gather(
                strategy.run(_output, args=(model, deal(strategy, x), dtype)), axis=0
            )
            wanted = _output(twin, x, dtype)
            case = f"{write.__name__}, {n} replicas, run {again}"
            tolerance = 1e-10 if dtype == torch.float64 else 2e-6
            assert_close(
                {"output": got}, {"output": wanted}, case, tolerance, tolerance
            )
            assert_close(gradients(model), gradients(twin), case, tolerance, tolerance)


def test_parameters_that_are_replaced_twice_reach_every_replica_wherever_they_lie(
    make,
):
    strategy = make(2)
    with strategy.scope():
        # Large, so that memory that is set free is soon given out again.
        model = nn.Linear(3, 100_000, **F64)
    x = data(2)[0]

    def output() -> torch.Tensor:
        return model(x.to(model.weight.device)).detach()

    for _ in range(5):
        for p in model.parameters():
            place = p.data_ptr()
            p.data = -p.data
            more = [p.data * 2]
            while more[-1].data_ptr() != place and len(more) < 20:
                # Until one gets the memory that was set free, if it was.
                more.append(p.data * 2)
            p.data = more[-1]
        wanted = output()
        for got in outputs(strategy, output):
            close(got, wanted)


def test_a_hook_that_is_removed_between_steps_is_gone_from_every_replica(make):
    strategy = make(3)
    model, _, _, _ = trained(strategy)
    calls: list[int] = []
    handle = model.encoder.register_forward_hook(
        lambda module, args, out: calls.append(replica_id())
    )
    batch = deal(strategy, data(3))
    strategy.run(lambda b: model(b[0]).detach(), args=(batch,))
    if IN_TURNS:  # the list has the items of all replicas
        assert calls == [0, 1, 2]
    else:
        (who,) = calls
        assert who.values == (0, 1, 2)
    before = list(calls)
    handle.remove()
    strategy.run(lambda b: model(b[0]).detach(), args=(batch,))
    assert calls == before


def test_a_hook_records_every_replica_in_the_users_own_recorder(make):
    """Its list gets one item, as in plain PyTorch, with what all hooks saw.

    It is what the hook of each replica saw.
    """

    class Recorder:
        def __init__(self) -> None:
            self.shapes: list[Any] = []

        def __call__(self, module: Any, args: Any, out: Any) -> None:
            self.shapes.append(tuple(out.shape))

        def method(self, module: Any, args: Any, out: Any) -> None:
            self.shapes.append(tuple(out.shape))

    for way in ("callable", "method"):
        strategy = make(3)
        model, _, _, _ = trained(strategy)
        recorder = Recorder()
        model.encoder.register_forward_hook(
            recorder if way == "callable" else recorder.method
        )
        strategy.run(
            lambda b, model=model: model(b[0]).detach(), args=(deal(strategy, data(7)),)
        )
        (shape,) = recorder.shapes
        assert shape.values == ((3, 4), (3, 4), (1, 4)), way


class Configured(nn.Module):
    """Does what a configuration says that several of its modules hold."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(gain=1.0)
        self.layer = nn.Linear(3, 2, **F64)
        self.layer.config = self.config

    def forward(self, x: Any) -> Any:
        return self.layer(x) * self.layer.config.gain


def test_what_is_written_on_a_configuration_reaches_every_replica(make):
    strategy = make(2)
    with strategy.scope():
        model = Configured()
    x = data(4)[0]
    for gain in (1.0, 3.0, 3.0, 5.0):
        model.config.gain = gain
        got = strategy.gather(
            strategy.run(lambda rows: model(rows).detach(), args=(deal(strategy, x),)),
            axis=0,
        )
        close(got, gain * model.layer(x.to(model.layer.weight.device)))


class HookedByItself(nn.Module):
    """Puts a hook on its layer in the first forward, and notes that it has."""

    def __init__(self, **notes: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, **F64)
        vars(self).update(notes)

    def forward(self, x: Any) -> Any:
        if not getattr(self, "is_hooked", False):
            self.layer.register_forward_hook(lambda module, args, out: out + 1)
            self.is_hooked = True
        return self.layer(x)


@pytest.mark.parametrize(
    "notes",
    [{}, {"is_hooked": False}],
    ids=["first_noted_in_forward", "noted_from_the_start"],
)
def test_hooks_that_a_forward_puts_are_there_in_every_replica_and_outside(make, notes):
    strategy = make(2)
    with strategy.scope():
        model = HookedByItself(**notes)
    weight, bias = model.layer.weight, model.layer.bias + 1
    for rows in (1, 4, 1, 4):  # of the first batch, replica 1 gets no row
        x = data(rows)[0]
        got = strategy.gather(
            strategy.run(lambda rows: model(rows).detach(), args=(deal(strategy, x),)),
            axis=0,
        )
        close(got, F.linear(x.to(weight.device), weight, bias))
    close(model(x.to(weight.device)), F.linear(x.to(weight.device), weight, bias))


class ReplicaSet(TorchDispatchMode):
    """Counts the tensors that are copied on one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.tensors = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if threading.get_ident() == self.thread:
            if name in ("copy_", "_to_copy", "clone"):
                self.tensors += 1
            elif name == "_foreach_copy_":
                self.tensors += len(args[0])
        return func(*args, **(kwargs or {}))


def copied_by(fn: Callable[[], Any]) -> int:
    with ReplicaSet() as copies:
        fn()
    return copies.tensors


@only_with_copies
def test_evaluation_copies_nothing_and_a_written_parameter_is_copied_alone():
    strategy = central_with_copies(3)
    model, optimizer, _, _ = trained(strategy)
    batch = deal(strategy, data(7))
    total = len(list(model.parameters()))
    # Between devices, the parameters of a replica go together, and so do its gradients.
    moved = 3 if SIMULATED else 0
    brought = 3 * total + moved

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            strategy.run(lambda b: model(b[0]), args=(batch,))

    def accumulate() -> None:
        strategy.run(lambda b: mse(model, b).backward(), args=(batch,))

    def write_one() -> None:
        with torch.no_grad():
            model.scale.add_(1.0)
        strategy.run(lambda b: model(b[0]).detach(), args=(batch,))

    evaluate()  # brings what the last update has written
    assert [copied_by(evaluate) for _ in range(3)] == [0, 0, 0]
    accumulate()
    assert [copied_by(accumulate) for _ in range(3)] == [moved] * 3
    assert copied_by(write_one) == 3
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0)
    assert copied_by(evaluate) == brought
    model.train()
    assert (
        copied_by(
            lambda: strategy.run(lambda b: train(model, optimizer, b), args=(batch,))
        )
        == brought - 3 * 2 + moved
    ), "all that the optimizer wrote, which is not the head that was not used"


@only_with_copies
def test_parameters_on_the_parameter_device_are_never_copied():
    strategy = central_in_one_place(3)
    model, optimizer, _, _ = trained(strategy)
    batch = deal(strategy, data(7))
    assert (
        copied_by(
            lambda: strategy.run(lambda b: train(model, optimizer, b), args=(batch,))
        )
        == 0
    )


COMPUTED: dict[str, Callable[[nn.Linear], Any]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=3),
    "pruned twice": lambda layer: [
        prune.random_unstructured(layer, n, amount=1)
        for n in ("weight", "bias", "weight")
    ],
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.filterwarnings("ignore:.*is deprecated in favor of:FutureWarning")
def test_a_layer_whose_weight_is_computed_by_a_hook_trains_as_in_plain_torch(
    make, how, where
):
    # They keep a tensor with a history where the weight was, and compute it anew before
    # each forward.
    def build() -> nn.Module:
        layer = nn.Linear(3, 4, **F64)
        COMPUTED[how](layer)
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 2, **F64))

    def backward(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()

    def update(model: Any, optimizer: Any) -> None:
        optimizer.step()

    for n in (1, 3):
        if where == "inside":
            compare(make, n, train, build=build, case=how)
        else:
            compare(make, n, backward, build=build, after=update, case=how)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_weights_that_come_to_be_pruned_between_steps_are_pruned_in_every_replica(
    make, where
):
    steps = iter([])

    def before(model: Any, optimizer: Any) -> None:
        k = next(steps)
        if k == 1:
            prune.l1_unstructured(model[0], "weight", amount=3)
        elif k == 2:
            prune.l1_unstructured(model[0], "weight", amount=2)
        elif k == 3:
            prune.remove(model[0], "weight")

    def backward(model: Any, optimizer: Any, batch: Any) -> None:
        model.zero_grad()
        mse(model, batch).backward()

    def update(model: Any, optimizer: Any) -> None:
        optimizer.step()

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        backward(model, optimizer, batch)
        optimizer.step()

    for n in (1, 3):
        steps = iter([k for k in range(4) for _ in ("ours", "plain")])
        if where == "inside":
            compare(make, n, step, before=before, steps=4)
        else:
            compare(make, n, backward, before=before, after=update, steps=4)


def test_hooks_that_are_copied_from_table_to_table_reach_the_replicas(make):
    strategy = make(2)
    with strategy.scope():
        model = nn.Linear(1, 1)
    strategy.run(lambda: None)
    other = nn.Linear(1, 1)
    other.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    strategy.run(lambda: None)
    model._forward_hooks.update(other._forward_hooks)
    results = strategy.run(lambda: model(torch.ones(1)).item())
    assert strategy.experimental_local_results(results) in ((0.0, 0.0), (0.0,))


def test_what_has_another_name_has_it_in_replicas_too(make):
    strategy = make(2)
    with strategy.scope():
        model = nn.Linear(1, 1)
        model.former = True
        model.config = types.SimpleNamespace(former=True)
    strategy.run(lambda: None)
    del model.former, model.config.former
    model.latter = model.config.latter = True
    found = []
    strategy.run(
        lambda: found.append(
            (hasattr(model, "former"), vars(model.config), model.latter)
        )
    )
    assert found == [(False, {"latter": True}, True)] * strategy.num_replicas_in_sync


def test_a_merge_function_may_replace_the_data_of_a_parameter(make):
    strategy = make(2)
    with strategy.scope():
        model = nn.Linear(2, 2, bias=False)
    expected = model.weight.detach().t().tolist()

    def transpose(strategy: torchstrategy.Strategy) -> None:
        model.weight.data = model.weight.data.t()

    def step() -> Any:
        torchstrategy.get_replica_context().merge_call(transpose)
        return model.weight.tolist()

    found = strategy.experimental_local_results(strategy.run(step))
    assert list(found) == [expected] * len(found)
