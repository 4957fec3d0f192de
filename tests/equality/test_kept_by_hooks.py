"""What hooks keep outside of the model, and steps read: each replica has its own.

Feature extractors, penalties on activations and counters are written so: a hook notes
what it saw, on an object, in a dict, a list or a variable, and the step adds it to the
loss. A hook was one for all replicas. Replicas on several devices run at once, and read
what another one had just noted; those on one device did so after every update.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import torchstrategy
from conditions import only_in_turns, only_with_copies
from problems import context, data, deal, mlp, mse, replica_id, sgd
from topologies import central_in_one_place
from torchstrategy._turns.switch import IN_TURNS

Read = Callable[[], Any]

# What a hook keeps in each of these ways, a step adds to its loss: the mean over rows
# of the squares of an output.


def penalty(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class OnItself:
    """Keeps what it saw in an attribute."""

    def __init__(self) -> None:
        self.kept: Any = None

    def hook(self, module: Any, inputs: Any, output: Any) -> None:
        self.kept = penalty(output)

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        self.hook(module, inputs, output)


def _a_method(model: Any) -> Read:
    keeper = OnItself()
    model[0].register_forward_hook(keeper.hook)
    return lambda: keeper.kept


def _an_object_that_is_called(model: Any) -> Read:
    keeper = OnItself()
    model[0].register_forward_hook(keeper)
    return lambda: keeper.kept


def _a_lambda_over_an_object(model: Any) -> Read:
    keeper = OnItself()
    model[0].register_forward_hook(lambda *seen: keeper.hook(*seen))
    return lambda: keeper.kept


def _an_object_in_an_object(model: Any) -> Read:
    outer = types.SimpleNamespace(keeper=OnItself())
    model[0].register_forward_hook(lambda *seen: outer.keeper.hook(*seen))
    return lambda: outer.keeper.kept


def _note_on(keeper: Any, module: Any, inputs: Any, output: Any) -> None:
    keeper.kept = penalty(output)


def _a_partial(model: Any) -> Read:
    keeper = OnItself()
    model[0].register_forward_hook(functools.partial(_note_on, keeper))
    return lambda: keeper.kept


def _note_by_name(
    module: Any, inputs: Any, output: Any, *, into: Any, name: str
) -> None:
    into[name] = penalty(output)


def _a_partial_of_a_partial(model: Any) -> Read:
    kept: dict[str, Any] = {}
    inner = functools.partial(_note_by_name, into=kept)
    model[0].register_forward_hook(functools.partial(inner, name="first"))
    return lambda: kept["first"]


def _a_dict(model: Any) -> Read:
    kept = {}

    def keep_as(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            kept[name] = penalty(output)

        return hook

    model[0].register_forward_hook(keep_as("first"))
    model[2].register_forward_hook(keep_as("last"))
    return lambda: kept["first"] + kept["last"]


def _a_dict_by_module(model: Any) -> Read:
    kept = {}

    def hook(module: Any, inputs: Any, output: Any) -> None:
        kept[module] = penalty(output)

    for layer in model:
        layer.register_forward_hook(hook)
    return lambda: kept[model[0]] + kept[model[2]]


def _a_list(model: Any) -> Read:
    kept: list[Any] = []
    model[0].register_forward_hook(
        lambda module, inputs, output: kept.append(penalty(output))
    )
    return lambda: kept[-1]


def _a_list_that_is_cleared(model: Any) -> Read:
    kept: list[Any] = []
    model[0].register_forward_pre_hook(lambda module, inputs: kept.clear())
    for layer in model:
        layer.register_forward_hook(
            lambda module, inputs, output: kept.append(penalty(output))
        )
    return lambda: sum(kept) if len(kept) == 3 else None


def _a_list_in_a_default(model: Any) -> Read:
    kept: list[list[Any]] = [[] for _ in model]
    for i, layer in enumerate(model):
        layer.register_forward_hook(
            lambda module, inputs, output, own=kept[i]: own.append(penalty(output))
        )
    return lambda: kept[0][-1] + kept[2][-1]


def _a_list_in_a_dict_in_a_tuple(model: Any) -> Read:
    kept: Any = ({"seen": []},)
    model[0].register_forward_hook(
        lambda module, inputs, output, seen=kept[0]["seen"]: seen.append(
            penalty(output)
        )
    )
    return lambda: kept[0]["seen"][-1]


def _a_deque(model: Any) -> Read:
    kept: Any = collections.deque(maxlen=1)
    model[0].register_forward_hook(
        lambda module, inputs, output: kept.append(penalty(output))
    )
    return lambda: kept[0]


def _a_defaultdict(model: Any) -> Read:
    kept: Any = collections.defaultdict(list)
    model[0].register_forward_hook(
        lambda module, inputs, output: kept["first"].append(penalty(output))
    )
    return lambda: kept["first"][-1]


def _a_namespace(model: Any) -> Read:
    kept = types.SimpleNamespace()
    model[0].register_forward_hook(
        lambda module, inputs, output: setattr(kept, "seen", penalty(output))
    )
    return lambda: kept.seen


@dataclasses.dataclass
class Record:
    kept: Any = None
    seen: list[Any] = dataclasses.field(default_factory=list)


def _a_dataclass(model: Any) -> Read:
    record = Record()

    def hook(module: Any, inputs: Any, output: Any) -> None:
        record.kept = penalty(output)
        record.seen.append(record.kept)

    model[0].register_forward_hook(hook)
    return lambda: (record.kept + record.seen[-1]) / 2


class WithSlots:
    __slots__ = ("kept",)


def _slots(model: Any) -> Read:
    kept: Any = WithSlots()
    model[0].register_forward_hook(
        lambda module, inputs, output: setattr(kept, "kept", penalty(output))
    )
    return lambda: kept.kept


def _a_variable(model: Any) -> Read:
    kept = None

    def hook(module: Any, inputs: Any, output: Any) -> None:
        nonlocal kept
        kept = penalty(output)

    model[0].register_forward_hook(hook)
    return lambda: kept


def _a_variable_that_is_not_assigned(model: Any) -> Read:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        nonlocal kept
        kept = penalty(output)

    def read() -> Any:
        return kept

    model[0].register_forward_hook(hook)
    if model is None:
        kept = None
    return read


def _an_attribute_of_the_hook(model: Any) -> Read:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        hook.kept = penalty(output)  # type: ignore[attr-defined]

    model[0].register_forward_hook(hook)
    return lambda: hook.kept  # type: ignore[attr-defined]


def _without_gradients(model: Any) -> Read:
    kept: dict[str, Any] = {}

    @torch.no_grad()
    def hook(module: Any, inputs: Any, output: Any) -> None:
        kept["rows"] = penalty(output)

    @torch.no_grad()
    def read() -> Any:
        return kept["rows"]

    model[0].register_forward_hook(hook)
    return read


def _python_numbers(model: Any) -> Read:
    """No device tells these apart, so that they were wrong at random."""
    keeper: Any = OnItself()
    keeper.rows = 0

    def hook(module: Any, inputs: Any, output: Any) -> None:
        keeper.rows = len(output)
        keeper.kept = output.square().sum() / 4

    model[0].register_forward_hook(hook)
    return lambda: keeper.kept / keeper.rows


def _with_keywords(model: Any) -> Read:
    kept: dict[str, Any] = {}

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        kept["first"] = penalty(output) + len(kwargs)

    model[0].register_forward_hook(hook, with_kwargs=True, always_call=True)
    return lambda: kept["first"]


def _before_forward(model: Any) -> Read:
    kept: dict[str, Any] = {}
    model[2].register_forward_pre_hook(
        lambda module, inputs: kept.update(inner=penalty(inputs[0]))
    )
    return lambda: kept["inner"]


def _several_hooks_and_one_object(model: Any) -> Read:
    class Sums:
        total: Any = 0

        def begin(self, module: Any, inputs: Any) -> None:
            self.total = 0

        def add(self, module: Any, inputs: Any, output: Any) -> None:
            self.total = self.total + penalty(output)

    sums = Sums()
    model.register_forward_pre_hook(sums.begin)
    for layer in model:
        layer.register_forward_hook(sums.add)
    return lambda: sums.total


def _an_object_that_holds_the_model(model: Any) -> Read:
    """The layer that a hook is called with is the layer that its object holds."""

    class Extractor:
        def __init__(self, model: Any) -> None:
            self.model = model
            self.layer = model[0]
            self.features: dict[str, Any] = {}
            self.handles = [layer.register_forward_hook(self.hook) for layer in model]

        def hook(self, module: Any, inputs: Any, output: Any) -> None:
            if module is self.layer:
                self.features["first"] = (
                    penalty(output) + module.weight.square().sum() * 0.1
                )

    extractor = Extractor(model)
    return lambda: extractor.features["first"]


def _an_object_that_the_model_holds(model: Any) -> Read:
    keeper = OnItself()
    model.keepers = [keeper]
    model[0].register_forward_hook(keeper.hook)
    return lambda: keeper.kept + model.keepers[0].kept - keeper.kept.detach()


def _a_list_that_the_model_holds(model: Any) -> Read:
    kept: list[Any] = []
    model.seen = kept
    model[0].register_forward_hook(
        lambda module, inputs, output: kept.append(penalty(output))
    )
    return lambda: kept[-1] + model.seen[-1] - kept[-1].detach()


def _an_object_that_the_step_reads_from(model: Any) -> Read:
    """The step comes to the list by an object that no hook knows, without a model."""
    kept: list[Any] = []
    meter = Record(seen=kept)
    model[0].register_forward_hook(
        lambda module, inputs, output: kept.append(penalty(output))
    )
    return lambda: meter.seen[-1]


def _constants(model: Any) -> Read:
    """Tensors and arrays that a hook reads, on the device of the user."""

    class Weighted:
        def __init__(self) -> None:
            self.weight = torch.full(
                (4,), 0.5, dtype=torch.float64, device=model[0].weight.device
            )
            self.table = np.array([1.0, 2.0])
            self.kept: Any = None

        def hook(self, module: Any, inputs: Any, output: Any) -> None:
            self.kept = penalty(output * self.weight) * float(self.table[1])

    weighted = Weighted()
    model[0].register_forward_hook(weighted.hook)
    return lambda: weighted.kept


def _for_all_modules(model: Any) -> Read:
    keeper = OnItself()

    def hook(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.Tanh):
            keeper.kept = penalty(output)

    model.handle = register_module_forward_hook(hook)
    return lambda: keeper.kept


def _a_sum_that_the_step_begins(model: Any) -> Read:
    kept = {"sum": 0.0}

    def read() -> Any:
        total, kept["sum"] = kept["sum"], 0.0
        kept["last"] = total if isinstance(total, torch.Tensor) else kept["last"]
        return kept["last"]

    def hook(module: Any, inputs: Any, output: Any) -> None:
        kept["sum"] = kept["sum"] + penalty(output)

    model[0].register_forward_hook(hook)
    return read


WAYS = {
    fn.__name__.strip("_").replace("_", " "): fn
    for fn in (
        _a_method,
        _an_object_that_is_called,
        _a_lambda_over_an_object,
        _an_object_in_an_object,
        _a_partial,
        _a_partial_of_a_partial,
        _a_dict,
        _a_dict_by_module,
        _a_list,
        _a_list_that_is_cleared,
        _a_list_in_a_default,
        _a_list_in_a_dict_in_a_tuple,
        _a_deque,
        _a_defaultdict,
        _a_namespace,
        _a_dataclass,
        _slots,
        _a_variable,
        _a_variable_that_is_not_assigned,
        _an_attribute_of_the_hook,
        _without_gradients,
        _python_numbers,
        _with_keywords,
        _before_forward,
        _several_hooks_and_one_object,
        _an_object_that_holds_the_model,
        _an_object_that_the_model_holds,
        _a_list_that_the_model_holds,
        _an_object_that_the_step_reads_from,
        _constants,
        _for_all_modules,
        _a_sum_that_the_step_begins,
    )
}


class Training:
    """A model with a hook, its optimizer, and a step that reads what the hook keeps.

    It reads that before and after its update.
    """

    def __init__(self, build: Callable[[], Any], way: Callable[[Any], Read]) -> None:
        self.model, self.optimizer = build()
        self.read = way(self.model)

    def end(self) -> None:
        if hasattr(self.model, "handle"):
            self.model.handle.remove()


def step_of(model: Any, optimizer: Any, read: Read) -> Callable[[Any], Any]:
    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = mse(model, batch)
        kept = read()
        (loss + kept).backward()
        optimizer.step()
        assert torch.equal(kept, read()), (
            "what the hook had kept was another replica's after the update"
        )
        return kept.detach()

    return step


def plainly() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = mlp()
    return model, sgd(model)


def in_scope(strategy: torchstrategy.Strategy) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = strategy.distribute_module(mlp())
    with strategy.scope():
        return model, sgd(model)


def assert_same(ours: nn.Module, plain: nn.Module) -> None:
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_each_replica_reads_what_its_own_hooks_kept(
    strategy: torchstrategy.Strategy, way: str
) -> None:
    plain = Training(plainly, WAYS[way])
    ours = Training(lambda: in_scope(strategy), WAYS[way])
    their_step = step_of(plain.model, plain.optimizer, plain.read)
    our_step = step_of(ours.model, ours.optimizer, ours.read)
    try:
        # Of the second batch, the last replicas may get no rows.
        for k, rows in enumerate((7, 2, 9, 8)):
            batch = data(rows, seed=k)
            their_step(batch)
            strategy.run(our_step, args=(deal(strategy, batch),))
            assert_same(ours.model, plain.model)
    finally:
        ours.end()
        plain.end()


def test_a_backward_hook_keeps_gradients(strategy: torchstrategy.Strategy) -> None:
    """The step scales a second loss by what a hook saw in the backward of the first."""

    def train(model: Any, optimizer: Any) -> Callable[[Any], Any]:
        kept: dict[str, Any] = {}
        model[0].register_full_backward_hook(
            lambda module, into, out: kept.update(seen=out[0].abs().mean(1))
        )
        model[2].register_full_backward_pre_hook(
            lambda module, out: kept.update(rows=len(out[0]))
        )

        def note(gradient: torch.Tensor) -> None:
            kept["inner"] = gradient.abs().mean(1)

        model[1].register_forward_hook(
            lambda module, inputs, output: output.register_hook(note) and None
        )

        def step(batch: Any) -> Any:
            optimizer.zero_grad()
            x = batch[0].detach().requires_grad_()
            (model(x) - batch[1]).square().sum().backward()
            optimizer.zero_grad()
            scale = kept["seen"] + kept["inner"]
            ((model(x) - batch[1]).square().mean(1) * scale).sum().div(
                kept["rows"]
            ).backward()
            optimizer.step()

        return step

    (plain, optimizer), (ours, our_optimizer) = plainly(), in_scope(strategy)
    their_step, our_step = train(plain, optimizer), train(ours, our_optimizer)
    for k in range(3):
        batch = data(9, seed=k)
        their_step(batch)
        strategy.run(our_step, args=(deal(strategy, batch),))
        assert_same(ours, plain)


# ---- what the user has after a run


def components(strategy: torchstrategy.Strategy, value: Any) -> tuple[Any, ...]:
    return strategy.experimental_local_results(value)


def items_of_a_run(strategy: torchstrategy.Strategy) -> int:
    """How many items a list has after a run of 9 rows in which each replica adds one.

    Copies make one item of these.
    """
    parts = components(strategy, deal(strategy, data(9))[0])
    return sum(len(part) > 0 for part in parts) if IN_TURNS else 1


def kept_by(
    strategy: torchstrategy.Strategy, register: Callable[[Any], Any], rows: int = 9
) -> Any:
    """What is left after one run of a forward."""
    model, _ = in_scope(strategy)
    kept = register(model)
    strategy.run(
        lambda batch: model(batch[0]).sum().detach(), args=(deal(strategy, data(rows)),)
    )
    return kept


def test_the_users_object_has_what_a_trainer_has_after_a_run(
    several: torchstrategy.Strategy,
) -> None:
    class Keeper:
        def __init__(self) -> None:
            self.calls = 0
            self.names = ("none",)
            self.before = self

        def hook(self, module: Any, inputs: Any, output: Any) -> None:
            self.calls += 1
            self.names = (type(module).__name__,)
            self.output = output
            self.layer = module

    def register(model: Any) -> Any:
        keeper = Keeper()
        model[0].register_forward_hook(keeper.hook)
        return keeper, model

    keeper, model = kept_by(several, register)
    assert type(keeper) is Keeper and keeper.before is keeper
    assert keeper.calls == 1 and keeper.names == ("Linear",)
    assert keeper.layer is model[0]
    output = several.gather(keeper.output, axis=0)
    torch.testing.assert_close(output, model[0](data(9)[0].to(output.device)))


@only_with_copies
def test_a_list_stays_the_users_list(several: torchstrategy.Strategy) -> None:
    """It gets an item where plain PyTorch appends one, with each replica's part."""

    def register(model: Any) -> Any:
        seen: list[Any] = ["begin"]
        for layer in model:
            layer.register_forward_hook(
                lambda module, inputs, output: seen.append(output.shape[1])
            )
        model[2].register_forward_hook(
            lambda module, inputs, output: seen.append(output)
        )
        return seen

    begin, first, second, third, output = kept_by(several, register)
    assert (begin, first, second, third) == ("begin", 4, 4, 2)
    assert several.gather(output, axis=0).shape == (9, 2)


@only_in_turns
def test_a_list_gets_the_items_of_all_replicas(several: torchstrategy.Strategy) -> None:
    """In their order, as if the replicas were calls one after the other."""
    model, _ = in_scope(several)
    seen: list[Any] = ["begin"]
    for layer in model:
        layer.register_forward_hook(
            lambda module, inputs, output: seen.append(output.shape[1])
        )
    model[2].register_forward_hook(lambda module, inputs, output: seen.append(output))
    batch = deal(several, data(9))
    several.run(lambda b: model(b[0]).sum().detach(), args=(batch,))
    parts = [part for part in components(several, batch[0]) if len(part)]
    assert seen[0] == "begin" and len(seen) == 1 + 4 * len(parts)
    for r, rows in enumerate(parts):
        *widths, output = seen[1 + 4 * r : 5 + 4 * r]
        assert widths == [4, 4, 2]
        torch.testing.assert_close(output.cpu(), model(rows.to(output.device)).cpu())


def test_replicas_begin_with_what_the_user_has(several: torchstrategy.Strategy) -> None:
    model, _ = in_scope(several)
    keeper: Any = types.SimpleNamespace(limits=[1], scale=1.0)
    factor = 1.0
    seen = []

    def hook(module: Any, inputs: Any, output: Any) -> None:
        seen.append((tuple(keeper.limits), keeper.scale, factor))

    model[0].register_forward_hook(hook)
    batch = deal(several, data(9))
    for k in range(3):
        keeper.limits.append(k)
        keeper.scale = factor = k + 2.0
        if k == 2:
            keeper.limits = [7]
        several.run(lambda b: model(b[0]).sum().detach(), args=(batch,))
        assert seen[-1] == (tuple(keeper.limits), keeper.scale, factor)
        assert len(set(seen)) == k + 1
    assert len(seen) == 3 * items_of_a_run(several)


def test_what_differs_goes_on_in_each_replica(several: torchstrategy.Strategy) -> None:
    """A replica that gets no rows for once keeps the number from before."""
    model, _ = in_scope(several)
    counts: Any = collections.Counter()
    total = 0

    def hook(module: Any, inputs: Any, output: Any) -> None:
        nonlocal total
        counts["rows"] += len(output)
        total += len(output)

    counts["rows"] = 0
    model[0].register_forward_hook(hook)
    expected = [0] * several.num_replicas_in_sync
    for rows in (
        2 * several.num_replicas_in_sync - 1,
        1,
        2 * several.num_replicas_in_sync - 1,
    ):
        batch = deal(several, data(rows))
        several.run(lambda b: model(b[0]).sum().detach(), args=(batch,))
        if rows > 1:
            for r, part in enumerate(components(several, batch[0])):
                expected[r] += len(part)
    assert components(several, counts["rows"])[-1] <= expected[-1] + 1
    assert counts["rows"] == total or components(several, counts["rows"]) == components(
        several, total
    )


def test_what_a_replica_without_rows_kept_before_is_no_part_of_the_batch(
    several: torchstrategy.Strategy,
) -> None:
    """It goes on with that, but who gathers the outputs gets the last batch's."""
    model, _ = in_scope(several)
    keeper = Record()
    sizes: list[int] = []

    def hook(module: Any, inputs: Any, output: Any) -> None:
        sizes.append(0 if keeper.kept is None else len(keeper.kept))
        keeper.kept = output

    model[0].register_forward_hook(hook)
    count = several.num_replicas_in_sync
    for rows in (2 * count, 1, 2 * count):
        several.run(
            lambda b: model(b[0]).sum().detach(), args=(deal(several, data(rows)),)
        )
        kept = keeper.kept
        assert (
            several.gather(kept, axis=0)
            if isinstance(kept, torchstrategy.PerReplica)
            else kept
        ).shape == (rows, 4)
    assert components(several, sizes[-1]) == (1, *[2] * (count - 1))


@pytest.mark.filterwarnings("ignore::torchstrategy.ReplicaBufferWarning")
def test_a_tensor_that_a_hook_writes_in_place(several: torchstrategy.Strategy) -> None:
    """Where all replicas come to the same numbers, the user's tensor has them.

    Else each replica has its own. In turns it has those of the first one, with a
    warning.
    """
    model, _ = in_scope(several)
    device = model[0].weight.device

    class Statistics:
        def __init__(self) -> None:
            self.calls = torch.zeros((), device=device)
            self.mean = torch.zeros(4, dtype=torch.float64, device=device)
            self.seen = np.zeros(2)

        def hook(self, module: Any, inputs: Any, output: Any) -> None:
            self.calls.add_(1)
            self.mean.mul_(0.5).add_(output.detach().mean(0))
            self.seen += 1

    statistics = Statistics()
    calls, seen = statistics.calls, statistics.seen
    model[0].register_forward_hook(statistics.hook)
    batch = deal(several, data(12))
    for k in range(3):
        with pytest.warns() if IN_TURNS and k == 0 else nullcontext():
            several.run(lambda b: model(b[0]).sum().detach(), args=(batch,))
    assert statistics.calls is calls and calls.item() == 3
    assert statistics.seen is seen and seen.tolist() == [3, 3]
    weight, bias = model[0].weight.detach(), model[0].bias.detach()
    means = [
        1.75 * F.linear(rows.to(device), weight, bias).mean(0)
        for rows in components(several, batch[0])
    ]
    if IN_TURNS:
        means = means[:1]
    for got, wanted in zip(components(several, statistics.mean), means, strict=True):
        torch.testing.assert_close(got.to(device), wanted)


def test_a_run_that_fails_has_written_nothing(several: torchstrategy.Strategy) -> None:
    model, _ = in_scope(several)
    keeper, kept, count = Record(), {"a": 1}, 0

    def hook(module: Any, inputs: Any, output: Any) -> None:
        nonlocal count
        count += 1
        kept["b"] = keeper.kept = output
        keeper.seen.append(output)

    def step(batch: Any) -> None:
        model(batch[0])
        raise KeyError("no")

    model[0].register_forward_hook(hook)
    with pytest.raises(KeyError):
        several.run(step, args=(deal(several, data(9)),))
    # As in plain PyTorch, what was appended in turns stays: the first replica's here.
    stays = 1 if IN_TURNS else 0
    assert (keeper.kept, kept, count) == (None, {"a": 1}, 0)
    assert len(keeper.seen) == stays
    several.run(lambda b: model(b[0]).sum().detach(), args=(deal(several, data(9)),))
    assert count == 1 and len(keeper.seen) == stays + 1


def test_what_a_merge_function_writes_all_replicas_read(
    several: torchstrategy.Strategy,
) -> None:
    model, _ = in_scope(several)
    keeper = Record()

    def hook(module: Any, inputs: Any, output: Any) -> None:
        keeper.kept = output

    def step(batch: Any) -> tuple[bool, str, str]:
        own = model(batch[0])
        context().merge_call(lambda strategy: setattr(keeper, "seen", "by all"))
        context().merge_call(lambda strategy: kept.update(said="to all"))
        return (
            keeper.kept.shape == kept["own"].shape == (len(own), 4),
            keeper.seen,
            kept["said"],
        )

    kept: dict[str, Any] = {}
    model[0].register_forward_hook(hook)
    model[0].register_forward_hook(
        lambda module, inputs, output: kept.update(own=output)
    )
    are_own, seen, said = several.run(step, args=(deal(several, data(9)),))
    assert all(components(several, are_own)) and set(components(several, seen)) == {
        "by all"
    }
    assert set(components(several, said)) == {"to all"}
    assert keeper.seen == "by all" and kept["said"] == "to all"


def test_a_hook_that_is_taken_away_keeps_nothing_more(
    several: torchstrategy.Strategy,
) -> None:
    model, _ = in_scope(several)
    seen: list[int] = []
    handle = model[0].register_forward_hook(
        lambda module, inputs, output: seen.append(1)
    )
    batch = deal(several, data(9))
    several.run(lambda b: model(b[0]).sum().detach(), args=(batch,))
    assert seen == [1] * items_of_a_run(several)
    handle.remove()
    several.run(lambda b: model(b[0]).sum().detach(), args=(batch,))
    assert seen == [1] * items_of_a_run(several)


def test_the_list_may_be_an_argument_of_the_step(
    several: torchstrategy.Strategy,
) -> None:
    model, _ = in_scope(several)
    seen: list[Any] = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output))

    def step(batch: Any, kept: list[Any], more: Any) -> bool:
        rows = len(model(batch[0]))
        return len(kept[-1]) == rows and more["it"] is kept

    assert all(
        components(
            several,
            several.run(step, args=(deal(several, data(9)), seen, {"it": seen})),
        )
    )


def test_what_is_kept_is_free_when_the_user_drops_it(
    several: torchstrategy.Strategy, no_collector: None
) -> None:
    model, _ = in_scope(several)
    seen: list[Any] = []
    model[0].register_forward_hook(
        lambda module, inputs, output: seen.append(output.detach())
    )
    several.run(lambda b: model(b[0]).sum().detach(), args=(deal(several, data(9)),))
    import weakref

    alive = [weakref.ref(part) for part in components(several, seen[0])]
    seen.clear()
    assert [reference() for reference in alive] == [None] * len(alive)


# ---- what is refused

REGISTRY: dict[str, Any] = {"inner": []}
LATEST: Any = None
STATE = Record()
TOTAL = torch.zeros(2)
PASSED: list[Any] = []


def _into_a_dict(module: Any, inputs: Any, output: Any) -> None:
    REGISTRY["last"] = output


def _into_a_list_in_a_dict(module: Any, inputs: Any, output: Any) -> None:
    REGISTRY["inner"].append(output)


def _into_a_variable(module: Any, inputs: Any, output: Any) -> None:
    global LATEST
    LATEST = output


def _onto_an_object(module: Any, inputs: Any, output: Any) -> None:
    STATE.kept = output


def _into_a_tensor(module: Any, inputs: Any, output: Any) -> None:
    TOTAL.add_(1)


def _through_a_function(module: Any, inputs: Any, output: Any) -> None:
    _into_a_dict(module, inputs, output)


class Through:
    def hook(self, module: Any, inputs: Any, output: Any) -> None:
        self.note(output)

    def note(self, output: Any) -> None:
        REGISTRY["last"] = output


GLOBALLY: dict[str, tuple[Any, str]] = {
    "a dict": (_into_a_dict, r"REGISTRY\['last'\]"),
    "a list in a dict": (_into_a_list_in_a_dict, r"REGISTRY\['inner'\]\[0\]"),
    "a variable": (_into_a_variable, "LATEST"),
    "an object": (_onto_an_object, r"STATE\.kept"),
    "a tensor": (_into_a_tensor, "TOTAL"),
    "through a function": (_through_a_function, r"REGISTRY\['last'\]"),
    "through a method": (Through().hook, r"REGISTRY\['last'\]"),
}


@pytest.fixture
def as_at_first() -> Iterator[None]:
    yield
    if IN_TURNS:  # where replicas may write on globals
        globals()["LATEST"] = STATE.kept = None
        REGISTRY.pop("last", None)
        REGISTRY["inner"].clear()
    assert REGISTRY == {"inner": []} and LATEST is None and Record() == STATE
    TOTAL.zero_()
    PASSED.clear()


@only_with_copies
@pytest.mark.parametrize("name", GLOBALLY)
def test_what_a_hook_keeps_in_a_global_is_refused_by_name(
    several: torchstrategy.Strategy, name: str, as_at_first: None
) -> None:
    hook, shown = GLOBALLY[name]
    model, _ = in_scope(several)
    model[0].register_forward_hook(hook)
    with pytest.raises(
        RuntimeError,
        match=f"^{shown} was written in a replica.*each replica has its own",
    ):
        several.run(
            lambda b: model(b[0]).sum().detach(), args=(deal(several, data(9)),)
        )


@only_in_turns
@pytest.mark.parametrize("name", GLOBALLY)
def test_what_a_hook_keeps_in_a_global_is_of_all_replicas(
    several: torchstrategy.Strategy, name: str, as_at_first: None
) -> None:
    hook, _ = GLOBALLY[name]
    model, _ = in_scope(several)
    model[0].register_forward_hook(hook)
    batch = deal(several, data(9))
    several.run(lambda b: model(b[0]).sum().detach(), args=(batch,))
    if name == "a tensor":
        assert TOTAL.tolist() == [1, 1]
        return
    of_each = REGISTRY.get("last", LATEST if LATEST is not None else STATE.kept)
    if name == "a list in a dict":
        found = torch.cat(REGISTRY["inner"])
    else:
        found = several.gather(of_each, axis=0)
    wanted = F.linear(data(9)[0].to(found.device), model[0].weight, model[0].bias)
    torch.testing.assert_close(found, wanted)


def _note_in(kept: list[Any], module: Any, inputs: Any, output: Any) -> None:
    kept.append(output)


def _rows_of_the_last() -> int:
    return len(PASSED[-1])


MODEL: Any = None


def _step(batch: Any) -> bool:
    """As in a script, where all names are global."""
    rows = len(MODEL(batch[0]))
    return (
        rows
        == len(PASSED[-1])
        == _rows_of_the_last()
        == len([kept for kept in PASSED for _ in (0,)][-1])
    )


def test_a_step_may_know_by_a_global_name_what_a_hook_keeps(
    several: torchstrategy.Strategy, monkeypatch: pytest.MonkeyPatch, as_at_first: None
) -> None:
    model, _ = in_scope(several)
    monkeypatch.setitem(globals(), "MODEL", model)
    model[0].register_forward_hook(functools.partial(_note_in, PASSED))
    for k in range(2):
        assert all(
            components(several, several.run(_step, args=(deal(several, data(9)),)))
        )
        count = items_of_a_run(several)
        items = PASSED[k * count : (k + 1) * count]
        whole = torch.cat(items) if IN_TURNS else several.gather(items[0], axis=0)
        assert whole.shape == (9, 4)


def _step_that_counts(batch: Any) -> int:
    global LATEST
    LATEST = None
    return len(MODEL(batch[0])) + len(PASSED)


def _in_a_method(kept: list[Any]) -> Any:
    class Reader:
        def read(self) -> int:
            return len(kept)

    reader = Reader()
    return lambda batch: len(MODEL(batch[0])) + reader.read()


@only_with_copies
@pytest.mark.parametrize(
    "how", ["a step that assigns to a global", "a method of a class"]
)
def test_what_replicas_cannot_have_for_themselves_is_refused(
    several: torchstrategy.Strategy,
    monkeypatch: pytest.MonkeyPatch,
    as_at_first: None,
    how: str,
) -> None:
    """The hook has its own, and the step could not get it: its list would be empty."""
    model, _ = in_scope(several)
    monkeypatch.setitem(globals(), "MODEL", model)
    model[0].register_forward_hook(functools.partial(_note_in, PASSED))
    step = _in_a_method(PASSED) if how == "a method of a class" else _step_that_counts
    with pytest.raises(
        RuntimeError, match=r"was written in a replica.*each replica has its own"
    ):
        several.run(step, args=(deal(several, data(9)),))
    assert PASSED == []


@only_in_turns
@pytest.mark.parametrize(
    "how", ["a step that assigns to a global", "a method of a class"]
)
def test_replicas_have_globals_and_objects_of_methods_for_themselves(
    several: torchstrategy.Strategy,
    monkeypatch: pytest.MonkeyPatch,
    as_at_first: None,
    how: str,
) -> None:
    model, _ = in_scope(several)
    monkeypatch.setitem(globals(), "MODEL", model)
    model[0].register_forward_hook(functools.partial(_note_in, PASSED))
    step = _in_a_method(PASSED) if how == "a method of a class" else _step_that_counts
    batch = deal(several, data(9))
    seen = components(several, several.run(step, args=(batch,)))
    parts = [part for part in components(several, batch[0]) if len(part)]
    assert seen == tuple(len(part) + 1 for part in parts)
    assert torch.cat(PASSED).shape == (9, 4)


class Store:
    """Keeps on its class what it sees, in one of several ways."""

    rows: Any = None
    by_name: ClassVar[dict[str, Any]] = {}

    def __init__(self, way: str) -> None:
        self.way, self.append = way, [].append

    def hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if self.way == "the class by its name":
            Store.rows = len(output)
        elif self.way == "type(self)":
            type(self).rows = len(output)
        elif self.way == "self.__class__":
            self.__class__.rows = len(output)
        elif self.way == "a dict of the class":
            self.by_name["rows"] = len(output)
        elif self.way == "a Python module":
            hook_state.rows = len(output)
        else:
            self.append(len(output))


hook_state = types.ModuleType("hook_state")
ON_A_CLASS = [
    "the class by its name",
    "type(self)",
    "self.__class__",
    "a dict of the class",
]


@pytest.mark.parametrize("is_method", [True, False])
@pytest.mark.parametrize(
    "way",
    [
        *(pytest.param(way, marks=only_with_copies) for way in ON_A_CLASS),
        "a Python module",
        pytest.param("a bound method of a list", marks=only_with_copies),
    ],
)
def test_what_is_one_for_all_replicas_is_refused_by_name(
    several: torchstrategy.Strategy, way: str, is_method: bool
) -> None:
    """Replicas read what another's hook had kept, or it was gone after the run."""
    model = several.distribute_module(nn.Linear(2, 1))
    store = Store(way)
    hook = store.hook if is_method else lambda *args: store.hook(*args)
    model.register_forward_hook(hook)
    kept = store.append.__self__  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="was written in a replica"):
        several.run(lambda: model(torch.ones(3, 2)))
    assert (
        Store.rows is None
        and not Store.by_name
        and not hasattr(hook_state, "rows")
        and not kept
    )
    assert "rows" not in vars(type(store)) or type(store).rows is None


@only_in_turns
@pytest.mark.parametrize("way", ON_A_CLASS)
def test_what_a_hook_keeps_on_a_class_is_of_all_replicas(
    several: torchstrategy.Strategy, way: str
) -> None:
    model = several.distribute_module(nn.Linear(2, 1))
    store = Store(way)
    model.register_forward_hook(store.hook)
    try:
        seen = several.run(
            lambda: (model(torch.ones(3 + replica_id(), 2)), Store.rows)[1]
        )
        found = Store.by_name["rows"] if "dict" in way else Store.rows
        wanted = tuple(3 + r for r in range(several.num_replicas_in_sync))
        assert components(several, found) == wanted
        assert "dict" in way or components(several, seen) == wanted
    finally:
        Store.rows = None
        Store.by_name.clear()


@only_in_turns
def test_a_bound_method_of_a_list_appends_for_each_replica(
    several: torchstrategy.Strategy,
) -> None:
    model = several.distribute_module(nn.Linear(2, 1))
    store = Store("a bound method of a list")
    model.register_forward_hook(store.hook)
    several.run(lambda: model(torch.ones(3 + replica_id(), 2)))
    kept = store.append.__self__  # type: ignore[attr-defined]
    assert kept == [3 + r for r in range(several.num_replicas_in_sync)]


@only_in_turns
def test_a_list_may_be_long(several: torchstrategy.Strategy) -> None:
    model, history = several.distribute_module(nn.Linear(2, 1)), [0.0] * 5000
    model.register_forward_hook(lambda module, args, output: history.append(1.0))
    several.run(lambda: model(torch.ones(3, 2)))
    assert history == [0.0] * 5000 + [1.0] * several.num_replicas_in_sync


@only_with_copies
def test_a_list_that_has_grown_too_long_is_refused_with_the_reason(
    several: torchstrategy.Strategy,
) -> None:
    """The message spoke of global variables, and the program had none."""
    model, history = several.distribute_module(nn.Linear(2, 1)), [0.0] * 5000
    model.register_forward_hook(lambda module, args, output: history.append(1.0))
    with pytest.raises(
        RuntimeError, match=r"history\[5000\] was written .* more than 4096 items"
    ):
        several.run(lambda: model(torch.ones(3, 2)))
    assert len(history) == 5000


def test_a_global_that_a_hook_only_reads_is_no_fault(
    several: torchstrategy.Strategy,
) -> None:
    model, _ = in_scope(several)
    model[0].register_forward_hook(
        lambda module, inputs, output: output * len(REGISTRY) + float(TOTAL.sum())
    )
    several.run(lambda b: model(b[0]).sum().detach(), args=(deal(several, data(9)),))


with torch.inference_mode():
    COUNTED = torch.zeros(())  # which does not count its writes


@pytest.mark.parametrize("writes", [False, True])
def test_a_global_may_be_an_inference_tensor_and_a_write_on_it_is_refused(
    several: torchstrategy.Strategy, writes: bool
) -> None:
    """Torch has no version of it, and said so in the place of what was wrong."""

    def hook(module: Any, inputs: Any, output: Any) -> None:
        with torch.inference_mode():
            COUNTED.add_(1 if writes else 0)

    model, _ = in_scope(several)
    model[0].register_forward_hook(hook)
    with (
        pytest.raises(RuntimeError, match="COUNTED was written in a replica")
        if writes
        else nullcontext()
    ):
        several.run(
            lambda b: model(b[0]).sum().detach(), args=(deal(several, data(9)),)
        )


def test_numbers_that_differ_in_a_tensor_that_nothing_holds_are_refused(
    several: torchstrategy.Strategy,
) -> None:
    """In turns those of the first replica are kept, with a warning."""
    model, _ = in_scope(several)
    total = torch.zeros((), dtype=torch.float64, device=model[0].weight.device)

    def add(
        total: torch.Tensor, module: Any, inputs: Any, output: torch.Tensor
    ) -> None:
        total.add_(output.sum().detach())

    model[0].register_forward_hook(functools.partial(add, total))
    batch = deal(several, data(9))
    told = "has other numbers in each replica"
    with (
        pytest.warns(torchstrategy.ReplicaBufferWarning, match=told)
        if IN_TURNS
        else pytest.raises(
            RuntimeError, match=rf"a Tensor that a hook was given, {told}"
        )
    ):
        several.run(lambda b: model(b[0]).sum().detach(), args=(batch,))
    kept = torch.zeros((), dtype=torch.float64)
    if IN_TURNS:
        rows = components(several, batch[0])[0].to(total.device)
        kept = F.linear(rows, model[0].weight, model[0].bias).sum().detach()
    torch.testing.assert_close(total, kept.to(total.device))


# ---- other objects


def test_locks_and_loggers_are_those_of_the_user(
    several: torchstrategy.Strategy,
) -> None:
    import logging

    model, _ = in_scope(several)
    lock, logger, found = threading.Lock(), logging.getLogger("hooks"), []

    class Careful:
        def __init__(self) -> None:
            self.lock, self.logger = lock, logger

        def hook(self, module: Any, inputs: Any, output: Any) -> None:
            with self.lock:
                found.append(self.lock is lock and self.logger is logger)

    model[0].register_forward_hook(Careful().hook)
    several.run(lambda b: model(b[0]).sum().detach(), args=(deal(several, data(9)),))
    assert found == [True] * items_of_a_run(several)


def test_the_hook_of_a_model_outside_of_the_scope(
    several: torchstrategy.Strategy,
) -> None:
    """A teacher, say: all replicas share it, and its hooks."""
    model, optimizer = in_scope(several)
    plain, plain_optimizer = plainly()
    teacher = mlp().requires_grad_(False)

    def train(model: Any, optimizer: Any, teacher: Any) -> Any:
        keeper = OnItself()
        teacher[0].register_forward_hook(keeper.hook)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            teacher(model(batch[0]).sum(1, keepdim=True).expand(-1, 3).to("cpu"))
            loss = keeper.kept
            loss.backward()
            optimizer.step()
            assert keeper.kept is loss

        return step

    their_step, our_step = (
        train(plain, plain_optimizer, teacher),
        train(model, optimizer, teacher),
    )
    for k in range(2):
        their_step(data(9, seed=k))
        several.run(our_step, args=(deal(several, data(9, seed=k)),))
        assert_same(model, plain)


def test_one_object_that_is_a_trainer_too(several: torchstrategy.Strategy) -> None:
    class Trainer:
        def __init__(self, made: tuple[Any, Any]) -> None:
            self.model, self.optimizer = made
            self.steps = 0
            self.features: list[Any] = []
            self.model[0].register_forward_hook(self.keep)

        def keep(self, module: Any, inputs: Any, output: Any) -> None:
            self.features.append(output)

        def step(self, batch: Any) -> None:
            self.features.clear()
            self.optimizer.zero_grad()
            loss = mse(self.model, batch)
            (loss + penalty(self.features[0])).backward()
            self.optimizer.step()
            self.steps += 1
            assert len(self.features) == 1 and len(self.features[0]) == len(batch[0])

    ours, plain = Trainer(in_scope(several)), Trainer(plainly())
    for k in range(3):
        plain.step(data(9, seed=k))
        several.run(ours.step, args=(deal(several, data(9, seed=k)),))
        assert_same(ours.model, plain.model)
    assert ours.steps == 3
    assert several.gather(ours.features[0], axis=0).shape == (9, 4)


def test_a_model_is_copied_and_pickled_with_what_its_hook_keeps(
    several: torchstrategy.Strategy,
) -> None:
    import copy

    model, _ = in_scope(several)
    model.keeper = OnItself()
    model[0].register_forward_hook(model.keeper.hook)
    several.run(lambda b: model(b[0]).sum().detach(), args=(deal(several, data(9)),))
    with torch.no_grad():
        several.run(lambda b: model(b[0]).sum(), args=(deal(several, data(9)),))
    assert components(several, copy.deepcopy(model).keeper.kept)


def test_a_data_parallel_has_what_all_replicas_kept() -> None:
    """The user reads it outside.

    `torch.nn.DataParallel` leaves there what the last replica wrote.
    """
    strategy = central_in_one_place(1)
    device = strategy.extended.worker_devices[0]
    module = mlp().to(device)
    model = torchstrategy.DataParallel(module, [device, device])
    features: dict[str, Any] = {}
    module[0].register_forward_hook(
        lambda module, inputs, output: features.update(first=output)
    )
    x = data(9)[0].to(device)
    for _ in range(2):
        model.zero_grad()
        loss = (
            model(x).sum()
            + torch.cat([part.to(device) for part in features["first"].values])
            .square()
            .mean()
        )
        loss.backward()
    plain = mlp().to(device)
    plain.load_state_dict(module.state_dict())
    (
        plain(x).sum() + F.linear(x, plain[0].weight, plain[0].bias).square().mean()
    ).backward()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
