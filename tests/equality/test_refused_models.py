"""Models that cannot run in replicas are refused, and are afterwards what they were."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import torchstrategy
from conditions import only_in_turns, only_with_copies
from nets import F64
from problems import (
    ELSEWHERE,
    assert_close,
    data,
    deal,
    gradients,
    mlp,
    mse,
    where_it_is,
)
from torchstrategy._turns.switch import IN_TURNS


def refused(make: Any, build: Callable[[], nn.Module], match: str) -> None:
    """The model is refused at its first run, and is afterwards what it was."""
    strategy = make(3)
    with strategy.scope():
        model = build()
    with pytest.raises(TypeError, match=match):
        strategy.run(lambda: model(torch.ones(1, 3)))


@only_with_copies
def test_a_script_module_is_refused(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(3, 2))

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = scripted

    refused(make, Holder, r"Holder\.inner is a ScriptModule, which cannot be copied")


@only_with_copies
def test_a_module_made_in_inference_mode_is_refused_and_one_that_runs_in_it_is_not(
    make,
):
    strategy = make(3)
    with torch.inference_mode(), strategy.scope():
        model = mlp()
    with pytest.raises(
        TypeError, match=r"^Sequential\.0\.weight was made in torch\.inference_mode\(\)"
    ):
        strategy.run(lambda b: model(b[0]), args=(deal(strategy, data(7)),))
    with strategy.scope():
        model = mlp()
    with torch.inference_mode():
        result = strategy.run(lambda b: model(b[0]), args=(deal(strategy, data(7)),))
    assert sum(len(rows) for rows in strategy.experimental_local_results(result)) == 7


def test_a_lazy_module_is_refused_until_it_has_seen_a_batch(make):
    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return nn.Sequential(nn.LazyLinear(2))

    refused(
        make,
        build,
        r"Sequential\.0\.weight has no shape yet: LazyLinear is lazy\. Run one batch "
        r"through the module, outside",
    )
    strategy = make(3)
    with strategy.scope():
        model = build()
    with pytest.raises(TypeError, match="has no shape yet"):
        strategy.run(lambda: model(torch.ones(1, 3)))
    model(torch.ones(1, 3, device=model[0].weight.device))
    batch = data(7, torch.float32)
    strategy.run(lambda b: mse(model, b).backward(), args=(deal(strategy, batch),))
    twin = copy.deepcopy(model)
    mse(twin, where_it_is(twin, batch)).backward()
    assert_close(gradients(model), gradients(twin), "after the first batch")


class Attribute(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@only_with_copies
def test_a_tensor_that_requires_grad_in_a_plain_attribute_is_refused(make):
    refused(
        make,
        lambda: Attribute(log_t=torch.zeros(1, requires_grad=True)),
        r"Attribute\.log_t is a tensor that requires grad in a plain attribute, so a "
        r"replica's copy would not learn\.",
    )


@only_with_copies
def test_a_tensor_that_requires_grad_is_refused_also_when_it_was_put_there_between_runs(
    make,
):
    strategy = make(3)
    with strategy.scope():
        model = Attribute()
    strategy.run(lambda: model(torch.ones(1, 3)).detach())
    model.kept = torch.zeros(1, requires_grad=True)
    with pytest.raises(
        TypeError, match=r"Attribute\.kept is a tensor that requires grad"
    ):
        strategy.run(lambda: model(torch.ones(1, 3)).detach())


@pytest.mark.parametrize("container", ["list", "dict"])
def test_parameters_in_a_plain_container_learn_or_are_refused(make, container):
    def build() -> nn.Module:
        model = Attribute()
        parameter = nn.Parameter(torch.ones(2))
        model.extra = [parameter] if container == "list" else {"x": parameter}
        model.forward = None
        return model

    strategy = make(3)
    torch.manual_seed(0)
    with strategy.scope():
        model = build()
        extra = model.extra[0] if container == "list" else model.extra["x"]
        optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    start = extra.detach().clone()

    def step(b: Any) -> None:
        mine = model.extra[0] if container == "list" else model.extra["x"]
        optimizer.zero_grad()
        F.mse_loss(model.layer(b[0]) * mine, b[1]).backward()
        optimizer.step()

    try:
        strategy.run(step, args=(deal(strategy, data(7, torch.float32)),))
    except (TypeError, RuntimeError) as error:
        assert "extra" in str(error) or "param_groups" in str(error)
    else:
        assert not torch.equal(extra, start), (
            "the tensor was given to the optimizer, was used, and has not learnt"
        )


@only_with_copies
def test_a_subclass_of_parameter_is_refused(make):
    class Special(nn.Parameter):
        pass

    def build() -> nn.Module:
        model = nn.Linear(3, 2)
        model.weight = Special(model.weight.data)
        return model

    refused(
        make,
        build,
        r"Linear\.weight is a Special\. Replicas can have copies of "
        r"torch\.nn\.Parameter, not of its subclasses",
    )


class Meter:
    """What people keep in a model: it counts, with a lock, and writes a log."""

    def __init__(self, stream):
        self.count, self.lock, self.stream, self.nested = (
            0,
            threading.Lock(),
            stream,
            [(i for i in range(3)), math],
        )


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.meter = nn.Linear(3, 2), None

    def forward(self, x):
        with self.meter.lock:
            self.meter.count += 1
            self.meter.stream.write("x")
        return self.inner(x)


@pytest.mark.parametrize("when", ["from the start", "between runs"])
def test_what_cannot_be_copied_is_one_for_all_replicas(make, when):
    """A lock, generator, Python module or open file in an attribute was refused.

    It was refused in an object there, too.
    """
    strategy = make(3)
    with strategy.scope():
        model = Counts()
    stream = OneStream()
    if when == "between runs":
        model.meter = Meter(OneStream())
        strategy.run(lambda: model(torch.ones(1, 3)).detach())
    model.meter = Meter(stream)
    for count in (1, 2):
        strategy.run(lambda: model(torch.ones(1, 3)).detach())
        # In turns, each replica begins with what the stream has counted before.
        written = count if IN_TURNS else 3 * count
        assert (model.meter.count, stream.written) == (count, written)
    assert (
        type(model.meter.lock) is type(threading.Lock())
        and model.meter.nested[1] is math
    )


class OneStream:
    def __init__(self):
        self.written = 0

    def write(self, text):
        self.written += 1

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot pickle a stream")


@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_tensor_without_memory_is_refused(make, is_parameter):
    """To copy it ended the process."""

    def build() -> nn.Module:
        model = nn.Linear(3, 2)
        held = torch.ones(2000)[1000:]
        if is_parameter:
            model.held = nn.Parameter(held, requires_grad=False)
        else:
            model.register_buffer("held", held)
        model.held.untyped_storage().resize_(0)
        return model

    refused(
        make,
        build,
        r"^Linear\.held has no memory: .* Give it memory and values before "
        r"strategy\.run",
    )


@pytest.mark.parametrize("size", [100, 1 << 18])
def test_a_buffer_may_lose_its_memory_between_runs_but_not_in_a_step(make, size):
    """The next look at the buffer, or the copying of its values, ended the process."""
    strategy = make(3)
    with strategy.scope():
        model = nn.Linear(3, 2)
        model.register_buffer("held", torch.ones(size)[10:])
    strategy.run(lambda: model(torch.ones(1, 3)))
    model.held.untyped_storage().resize_(0)
    strategy.run(lambda: model(torch.ones(1, 3)))
    strategy.run(lambda: model(torch.ones(1, 3)))
    model.held.untyped_storage().resize_(4 * size)
    model.held.fill_(2)
    totals = strategy.experimental_local_results(strategy.run(lambda: model.held.sum()))
    assert [float(total) for total in totals] == [2.0 * (size - 10)] * len(totals)

    def step() -> None:
        model.held += 1
        model.held.untyped_storage().resize_(0)

    with pytest.raises(
        RuntimeError, match=r"held, and has taken its memory away in a replica"
    ):
        strategy.run(step)


@only_with_copies
def test_a_buffer_that_wraps_other_tensors_is_refused(make):
    """To look for writes on it ended the process."""

    def build() -> nn.Module:
        model = nn.Linear(3, 2)
        model.register_buffer("held", TwoTensor(torch.ones(3), torch.ones(3)))
        return model

    refused(make, build, r"^Linear\.held is a TwoTensor, which wraps other tensors")


@only_with_copies
def test_a_module_that_cannot_be_copied_is_refused(make):
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("there is one")

    refused(
        make,
        lambda: nn.Sequential(Stubborn(3, 2)),
        r"Sequential cannot be copied for the replicas: .*there is one",
    )


def test_one_model_in_two_strategies_is_refused(make):
    first, second = make(2), make(2)
    with first.scope():
        model = mlp()
    match = r"already belongs to another strategy"
    with pytest.raises(RuntimeError, match=match):
        second.distribute_module(model)
    with pytest.raises(RuntimeError, match=match):
        second.distribute_module(nn.Sequential(model[0]))
    own = second.distribute_module(copy.deepcopy(model))
    assert first.extended.variable_created_in_scope(
        model
    ) and second.extended.variable_created_in_scope(own)
    assert not second.extended.variable_created_in_scope(model)
    first.run(lambda b: mse(model, b).backward(), args=(deal(first, data(4)),))
    second.run(lambda b: mse(own, b).backward(), args=(deal(second, data(4)),))
    assert_close(gradients(own), gradients(model), "each in its own strategy")


@only_with_copies
def test_a_part_of_another_strategys_model_is_refused_when_made_or_at_the_first_run(
    make,
):
    first, second = make(2), make(2)
    with first.scope():
        model = mlp()
    with pytest.raises(RuntimeError, match=r"already belongs to another strategy"):
        with second.scope():
            other = nn.Sequential(model[2], nn.Tanh())
        second.run(lambda: other(torch.ones(1, 4, **F64)).detach())


def test_a_model_that_is_refused_leaves_none_of_its_parts_claimed(make):
    """Parts of a model belonged to the strategy that had refused them, for ever.

    They were those before the one of another strategy.
    """
    first, second, third = make(2), make(2), make(2)
    with first.scope():
        theirs = mlp()
    new = nn.Linear(3, 3, **F64)
    with pytest.raises(RuntimeError, match=r"already belongs to another strategy"):
        second.distribute_module(nn.Sequential(new, theirs))
    assert third.extended.variable_created_in_scope(third.distribute_module(new))


@only_with_copies
def test_a_model_of_another_strategy_in_a_step_is_refused(make):
    first, second = make(2), make(2)
    with first.scope():
        model = mlp()
    with pytest.raises(RuntimeError, match=f"scope|strategy|{ELSEWHERE}"):
        second.run(lambda b: mse(model, b).backward(), args=(deal(second, data(4)),))
    assert all(p.grad is None for p in model.parameters())


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("queue", torch.zeros(2))

    def forward(self, count: int) -> torch.Tensor:
        self.queue = torch.cat(
            [self.queue, torch.ones(count, device=self.queue.device)]
        )
        return self.queue.sum()


def test_a_buffer_of_another_shape_in_each_replica_is_refused_by_name(make):
    strategy = make(2)
    with strategy.scope():
        model = Growing()
    told = (
        r"replaced the buffer Growing\.queue by tensors of different shapes: "
        r"\(3,\) in replica 0, \(4,\) in replica 1"
        if IN_TURNS
        else r"replaced the buffer Growing\.queue by a tensor of shape \(3,\) and "
        r"torch\.float32, and"
    )
    with pytest.raises(RuntimeError, match=told):
        strategy.run(
            lambda: model(
                1 + torchstrategy.get_replica_context().replica_id_in_sync_group
            )
        )
    assert model.queue.tolist() == [0.0, 0.0]


def test_a_buffer_may_get_another_shape_that_is_the_same_in_all_replicas(make):
    """An observer of quantization makes a scale for each channel in its first forward.

    It was refused.
    """
    strategy = make(2)
    with strategy.scope():
        model = Growing()
    for count in (1, 2, 3):
        results = strategy.run(lambda: model(1))
        assert list(map(float, results.values)) == [
            count,
            count,
        ] and model.queue.tolist() == [0.0, 0.0, *[1.0] * count]
    assert float(model(1)) == 4


# Replicas that take turns have no copies: what cannot be copied trains


class Special(nn.Parameter):
    pass


class Stubborn(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("there is one")


def of_a_special_parameter() -> nn.Module:
    model = nn.Linear(3, 2, **F64)
    model.weight = Special(model.weight.data)
    return model


def of_a_script_module() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(torch.jit.script(nn.Linear(3, 2, **F64)))


def with_a_buffer_of_two_tensors() -> nn.Module:
    model = nn.Linear(3, 2, **F64)
    model.register_buffer("held", TwoTensor(torch.ones(3), torch.ones(3)))
    return model


class Scaled(nn.Module):
    """It learns a plain attribute, which an optimizer is given apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, **F64)
        self.scale = torch.ones(1, requires_grad=True, **F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale.to(x.device)


UNCOPIED: dict[str, Callable[[], nn.Module]] = {
    "script module": of_a_script_module,
    "subclass of Parameter": of_a_special_parameter,
    "tensor in an attribute": Scaled,
    "deepcopy raises": lambda: nn.Sequential(Stubborn(3, 2, **F64)),
    "wrapper of tensors": with_a_buffer_of_two_tensors,
}


@only_in_turns
@pytest.mark.parametrize("kind", UNCOPIED)
def test_a_model_that_cannot_be_copied_trains(make, kind):
    strategy = make(3)
    torch.manual_seed(0)
    with strategy.scope():
        model = UNCOPIED[kind]()
    torch.manual_seed(0)
    twin = UNCOPIED[kind]()

    def trained(model: Any) -> list[torch.Tensor]:
        return [
            *model.parameters(),
            *([model.scale] if hasattr(model, "scale") else []),
        ]

    ours, plain = (
        torch.optim.SGD(trained(one), lr=0.1, momentum=0.9) for one in (model, twin)
    )

    def step(model: nn.Module, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    for k in range(3):
        batch = data(7, seed=k)
        strategy.run(lambda b: step(model, ours, b), args=(deal(strategy, batch),))
        step(twin, plain, batch)
        for mine, theirs in zip(trained(model), trained(twin), strict=True):
            torch.testing.assert_close(mine, theirs, check_device=False)


@only_in_turns
def test_a_model_made_in_inference_mode_runs_in_it(make):
    strategy = make(3)
    torch.manual_seed(0)
    with torch.inference_mode(), strategy.scope():
        model = mlp()
    torch.manual_seed(0)
    twin = mlp()
    with torch.inference_mode():
        result = strategy.run(lambda b: model(b[0]), args=(deal(strategy, data(7)),))
        rows = strategy.gather(result, axis=0).cpu()
    torch.testing.assert_close(rows, twin(data(7)[0]).detach())


@only_in_turns
def test_a_model_of_another_strategy_in_a_step_gets_gradients(make):
    """Also if a part of it is in a model of this strategy."""
    first, second = make(2), make(2)
    torch.manual_seed(0)
    with first.scope():
        model = mlp()
    with second.scope():
        other = nn.Sequential(model[0], model[1], model[2])
    torch.manual_seed(0)
    twin = mlp()
    for one in (model, other):
        second.run(lambda b: mse(one, b).backward(), args=(deal(second, data(5)),))  # noqa: B023
        mse(twin, data(5)).backward()
        assert_close(gradients(model), gradients(twin), "of the whole batch")
