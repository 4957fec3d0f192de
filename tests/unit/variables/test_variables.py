"""Variables: one value for all replicas, or one in each; assigned, read, trained, copied and let go of."""

from __future__ import annotations

import copy
import gc
import io
import operator
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

import torchstrategy
from problems import close, context, data, deal, parameters, replica_id, share_a_place
from topologies import SIMULATED, central, central_with_copies, compute_devices
from torchstrategy import Variable, VariableAggregation, VariableSynchronization
from torchstrategy._core.devices import memory_device

NONE, SUM, MEAN, FIRST = VariableAggregation
AUTO, NO_SYNC, ON_WRITE, ON_READ = VariableSynchronization


def mirrored(replicas: int) -> torchstrategy.Strategy:
    return torchstrategy.MirroredStrategy(compute_devices(replicas))


def one_device(replicas: int = 1) -> torchstrategy.Strategy:
    return torchstrategy.OneDeviceStrategy(compute_devices(1)[0])


MAKERS: dict[str, tuple[Callable[[int], torchstrategy.Strategy], int]] = {
    "default": (lambda replicas: torchstrategy.get_strategy(), 1),
    "one_device": (one_device, 1),
    "central_1": (central, 1),
    "copies_1": (central_with_copies, 1),
    "mirrored_1": (mirrored, 1),
    "central_2": (central, 2),
    "copies_3": (central_with_copies, 3),
    "mirrored_2": (mirrored, 2),
    "mirrored_4": (mirrored, 4),
}
SEVERAL = [name for name, (_, replicas) in MAKERS.items() if replicas > 1]


def make(name: str) -> torchstrategy.Strategy:
    maker, replicas = MAKERS[name]
    return maker(replicas)


@pytest.fixture(params=MAKERS)
def strategy(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    return make(request.param)


@pytest.fixture(params=SEVERAL)
def several(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    return make(request.param)


@pytest.fixture(params=["central_2", "mirrored_2"])
def two(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    return make(request.param)


@pytest.fixture
def two_mirrored() -> torchstrategy.Strategy:
    return mirrored(2)


def has_components(strategy: torchstrategy.Strategy) -> bool:
    return len(strategy.extended.parameter_devices) > 1 if torchstrategy.get_strategy() is not strategy else False


def made(strategy: torchstrategy.Strategy, *args: Any, **kwargs: Any) -> Variable:
    with strategy.scope():
        return Variable(*args, **kwargs)


def components(strategy: torchstrategy.Strategy, v: Variable) -> list[Any]:
    return [component.read_value().tolist() for component in strategy.experimental_local_results(v)]


def numbers(strategy: torchstrategy.Strategy, fn: Callable[[], Any]) -> list[Any]:
    """What each replica computes, as numbers."""
    return list(strategy.experimental_local_results(strategy.run(lambda: fn().tolist())))


def silently(fn: Callable[[], Any]) -> Callable[[], None]:
    def step() -> None:
        fn()

    return step


# What an assignment does, by the tables of tf.distribute


OPERATIONS = {"assign": lambda old, new: new, "assign_add": operator.add, "assign_sub": operator.sub}


class Model:
    """What becomes of a variable that holds a number: a value for each component, and what is read of them."""

    def __init__(
        self, replicas: int, is_mirrored: bool, synchronization: Any, aggregation: Any, initial: float
    ) -> None:
        self.replicas = replicas
        self.aggregation = aggregation
        self.is_on_read = replicas > 1 and is_mirrored and synchronization is ON_READ
        self.values = [initial] * (replicas if is_mirrored else 1)

    def read(self) -> float:
        """Raises ValueError where reading does."""
        if not self.is_on_read or self.aggregation is FIRST:
            return self.values[0]
        if self.aggregation is NONE:
            raise ValueError
        return sum(self.values) / (self.replicas if self.aggregation is MEAN else 1)

    def assign_outside(self, name: str, value: float) -> None:
        if self.is_on_read and self.aggregation is SUM:
            if name != "assign":
                raise ValueError
            value /= self.replicas
        self.values = [OPERATIONS[name](old, value) for old in self.values]

    def assign_in_replicas(self, name: str, given: list[float], is_one_object: bool) -> None:
        if self.is_on_read:
            self.values = [OPERATIONS[name](old, new) for old, new in zip(self.values, given, strict=True)]
            return
        self.values = [OPERATIONS[name](old, self.combined(given, is_one_object)) for old in self.values]

    def combined(self, given: list[float], is_one_object: bool) -> float:
        if self.replicas == 1 or self.aggregation is FIRST:
            return given[0]
        if self.aggregation is NONE or (self.aggregation is SUM and is_one_object and given[0] != 0):
            raise ValueError
        if is_one_object:
            return given[0]
        return sum(given) / (self.replicas if self.aggregation is MEAN else 1)


NUMBERS = st.integers(-8, 8).map(lambda n: n * 12.0)  # whose parts of 2, 3 and 4 replicas are exact
ASSIGNMENTS = st.tuples(st.sampled_from([*OPERATIONS]), st.sampled_from(["outside", "replicas", "same"]), NUMBERS)


@given(
    st.sampled_from([*MAKERS]),
    st.sampled_from([AUTO, ON_WRITE, ON_READ]),
    st.sampled_from([*VariableAggregation]),
    NUMBERS,
    st.lists(ASSIGNMENTS, min_size=1, max_size=4),
)
@example("mirrored_2", ON_READ, SUM, 12.0, [("assign_add", "replicas", 12.0), ("assign", "outside", 24.0)])
@example("central_2", ON_READ, SUM, 12.0, [("assign_add", "same", 12.0)])
@example("mirrored_4", AUTO, NONE, 12.0, [("assign", "replicas", 12.0), ("assign_sub", "outside", 12.0)])
@settings(max_examples=60, deadline=None)
def test_assignments_do_what_the_tables_say(
    name: str, synchronization: Any, aggregation: Any, initial: float, assignments: list[tuple[str, str, float]]
) -> None:
    strategy = make(name)
    replicas = strategy.num_replicas_in_sync
    model = Model(replicas, has_components(strategy), synchronization, aggregation, initial)
    v = made(strategy, initial, synchronization=synchronization, aggregation=aggregation)
    for operation, where, value in assignments:
        given = [value] * replicas if where == "same" else [value * (r + 1) for r in range(replicas)]

        def assign(operation: str = operation, where: str = where, value: float = value) -> None:
            own = value if where == "same" else torch.tensor(value * (replica_id() + 1))
            getattr(v, operation)(own)

        def expected(operation: str = operation, where: str = where, value: float = value, given: Any = given) -> None:
            if where == "outside":
                model.assign_outside(operation, value)
            else:
                model.assign_in_replicas(operation, given, where == "same")

        real = assign if where != "outside" else None
        outcome = "done"
        try:
            expected()
        except ValueError:
            outcome = "refused"
        if outcome == "refused":
            with pytest.raises(ValueError):
                strategy.run(real) if real else getattr(v, operation)(value)
        elif real:
            strategy.run(real)
        else:
            getattr(v, operation)(value)
        assert components(strategy, v) == model.values
        try:
            read = model.read()
        except ValueError:
            with pytest.raises(ValueError, match="no aggregation"):
                v.read_value()
        else:
            assert v.read_value().tolist() == read


def test_a_replica_reads_what_all_have_assigned(several: torchstrategy.Strategy) -> None:
    v = made(several, [1.0, 2.0], aggregation=MEAN)

    def step() -> torch.Tensor:
        v.assign(torch.full((2,), 6.0 * replica_id()))
        return v * 1

    assert numbers(several, step) == [[3.0 * (several.num_replicas_in_sync - 1)] * 2] * several.num_replicas_in_sync


def test_replicas_that_sit_out_have_no_say(several: torchstrategy.Strategy) -> None:
    mean, total = made(several, 0.0, aggregation=MEAN), made(several, 0.0, synchronization=ON_READ, aggregation=SUM)

    def step(rows: torch.Tensor) -> None:
        mean.assign(rows.sum())
        total.assign_add(rows.sum())

    several.run(step, args=(deal(several, torch.tensor([5.0])),))
    assert (mean.item(), total.item()) == (5.0, 5.0)


def test_integers_are_shared_out_so_that_their_sum_is_what_was_assigned(two_mirrored: torchstrategy.Strategy) -> None:
    v = made(two_mirrored, 0, synchronization=ON_READ, aggregation=SUM)
    assert v.assign(7).item() == 7
    assert components(two_mirrored, v) == [4, 3]


# In which contexts


def test_assigning_is_for_all_contexts_of_its_strategy(strategy: torchstrategy.Strategy) -> None:
    v = made(strategy, 1.0, aggregation=MEAN)
    v.assign_add(1.0)
    with strategy.scope():
        v.assign_add(1.0)
    thread = threading.Thread(target=lambda: v.assign_add(1.0))
    thread.start()
    thread.join()

    def merged(_: torchstrategy.Strategy) -> None:
        v.assign_add(1.0)

    def step() -> torch.Tensor:
        context().merge_call(merged)
        return v * 1

    assert numbers(strategy, step) == [5.0] * strategy.num_replicas_in_sync
    assert v.item() == 5.0


def test_assigning_in_the_context_of_another_strategy_is_refused(several: torchstrategy.Strategy) -> None:
    v = made(several, 1.0, aggregation=MEAN)
    other = one_device()
    with other.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        v.assign(2.0)
    with pytest.raises(RuntimeError, match="Mixing different"):
        other.run(silently(lambda: v.assign(2.0)))
    assert v.item() == 1.0


def test_a_variable_of_no_strategy_is_written_by_each_replica(two: torchstrategy.Strategy) -> None:
    v = Variable(10.0)
    if share_a_place(two):
        two.run(silently(lambda: v.assign_add(torch.tensor(replica_id() + 1.0))))
        assert v.item() == 13.0


def test_one_of_another_strategy_can_be_read_in_a_replica(two: torchstrategy.Strategy) -> None:
    v = made(torchstrategy.OneDeviceStrategy("cpu"), 10.0, trainable=False)
    assert two.experimental_local_results(two.run(lambda: v.item())) == (10.0, 10.0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes_change_nothing_about_assigning(two: torchstrategy.Strategy, mode: Any) -> None:
    with mode():
        v = made(two, 0.0, aggregation=SUM)
        w = made(two, 0.0, synchronization=ON_READ, aggregation=SUM)
        two.run(silently(lambda: (v.assign_add(torch.tensor(1.0)), w.assign_add(torch.tensor(1.0)))))
        v.assign_add(1.0)
        assert w.item() == 2.0
        w.assign(6.0)
        for variable in (v, w):
            assert repr(variable)
    v.assign_add(1.0)
    w.assign(w + 1)
    assert numbers(two, lambda: v * 1) == [4.0, 4.0]
    assert w.item() == 7.0 and not v.is_inference()
    assert sum(components(two, w)) == 7.0


# Created in a run


def test_a_variable_created_in_a_run_is_one_for_all_replicas(several: torchstrategy.Strategy) -> None:
    kept: list[Variable] = []

    def step() -> torch.Tensor:
        if len(kept) < several.num_replicas_in_sync:
            kept.append(Variable(replica_id() + 1.0, aggregation=SUM, name="counter"))
        kept[0].assign_add(torch.tensor(1.0))
        return kept[0] * 1

    n = several.num_replicas_in_sync
    assert numbers(several, step) == [1.0 + n] * n
    assert numbers(several, step) == [1.0 + 2 * n] * n
    assert all(variable is kept[0] for variable in kept)
    assert several.extended.variable_created_in_scope(kept[0])


def test_an_initial_value_is_computed_once(several: torchstrategy.Strategy) -> None:
    v = made(several, lambda: torch.rand(3))
    assert components(several, v) == [v.tolist()] * len(several.experimental_local_results(v))
    drawn = several.run(lambda: Variable(lambda: torch.rand(3)))
    assert isinstance(drawn, Variable)


def test_replicas_that_create_different_variables_are_told(two: torchstrategy.Strategy) -> None:
    with pytest.raises(RuntimeError, match="mismatching name"):
        two.run(lambda: Variable(1.0, name=f"v{replica_id()}"))


def test_a_variable_created_in_a_run_is_trained_from_the_next_run_on(two: torchstrategy.Strategy) -> None:
    kept: list[Variable] = []

    def step() -> None:
        if len(kept) < 2:
            kept.append(Variable(1.0, name="late"))
        (kept[0] * 2).backward()

    with pytest.raises(RuntimeError, match="Backward in a replica reached late itself"):
        two.run(step)
    assert kept[0].grad is None
    two.run(step)
    close(kept[0].grad, torch.tensor(2.0))


# Training


class Scaled(nn.Module):
    """A module that holds variables in all the ways that modules hold parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2, dtype=torch.float64)
        self.scale = Variable(torch.tensor(2.0, dtype=torch.float64), name="scale")
        self.biases = [Variable(torch.zeros(2, dtype=torch.float64)) for _ in range(2)]
        self.frozen = Variable(torch.ones(2, dtype=torch.float64), trainable=False)
        self.steps = Variable(0, aggregation=FIRST)
        self.rows = Variable(0.0, synchronization=ON_READ, aggregation=SUM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * self.scale + self.biases[0]) * self.frozen + self.biases[1]

    def trained(self) -> list[torch.Tensor]:
        return [*self.linear.parameters(), self.scale, *self.biases]


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda trained: torch.optim.SGD(trained, lr=0.1, momentum=0.9),
    "adam": lambda trained: torch.optim.Adam([{"params": trained[:3], "lr": 0.05}, {"params": trained[3:]}]),
    "rmsprop": lambda trained: torch.optim.RMSprop(trained, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_that_of_plain_torch(strategy: torchstrategy.Strategy, optimizer: str) -> None:
    torch.manual_seed(0)
    with strategy.scope():
        model = Scaled()
        ours = OPTIMIZERS[optimizer](model.trained())
    torch.manual_seed(0)
    twin = Scaled()
    plain = OPTIMIZERS[optimizer](twin.trained())

    def step(model: Scaled, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(model.trained(), 0.5)
        optimizer.step()
        model.steps.assign_add(torch.tensor(1))
        model.rows.assign_add(torch.tensor(float(len(batch[0]))))

    for k in range(3):
        batch = data(7, seed=k)
        strategy.run(lambda b: step(model, ours, b), args=(deal(strategy, batch),))
        step(twin, plain, batch)
    for got, wanted in zip(model.trained(), twin.trained(), strict=True):
        close(got.detach(), wanted.detach(), rtol=1e-10, atol=1e-12)
    assert (model.steps.item(), model.rows.item()) == (3, 21.0)


def test_gradients_of_a_variable_in_no_module_are_those_of_the_whole_batch(strategy: torchstrategy.Strategy) -> None:
    v, twin = made(strategy, torch.ones(3, dtype=torch.float64)), torch.ones(3, dtype=torch.float64, requires_grad=True)
    x, _ = data(7)
    strategy.run(silently_with(lambda b: (b * v).square().sum(1).mean().backward()), args=(deal(strategy, x),))
    (x * twin).square().sum(1).mean().backward()
    close(v.grad, twin.grad)
    strategy.run(silently_with(lambda b: (b * v).square().sum(1).mean().backward()), args=(deal(strategy, x),))
    close(v.grad, 2 * twin.grad)  # type: ignore[operator]


def silently_with(fn: Callable[[Any], Any]) -> Callable[[Any], None]:
    def step(batch: Any) -> None:
        fn(batch)

    return step


def test_gradients_of_results_reach_a_variable(strategy: torchstrategy.Strategy) -> None:
    v = made(strategy, 3.0)
    total = strategy.reduce("mean", strategy.run(lambda: v * v), axis=None)
    total.backward()
    close(v.grad, torch.tensor(6.0))
    v.grad = None
    (v * v).backward()
    close(v.grad, torch.tensor(6.0))
    (gradient,) = torch.autograd.grad(v * v * v, [v])
    close(gradient, torch.tensor(27.0))


def test_a_step_sees_and_clears_the_gradient_of_a_variable(two: torchstrategy.Strategy) -> None:
    v = made(two, 3.0)

    def step() -> float:
        (v * (replica_id() + 1)).backward()
        assert v.grad is not None
        seen = v.grad.item()
        v.grad = None
        return seen

    assert two.experimental_local_results(two.run(step)) == (1.5, 1.5)
    assert v.grad is None


def test_an_optimizer_in_the_replica_has_the_replicas_own_variable(two: torchstrategy.Strategy) -> None:
    with two.scope():
        v = Variable(3.0)
        optimizer = torch.optim.SGD([v], lr=1.0)

    def step() -> None:
        (own,) = optimizer.param_groups[0]["params"]
        (v * own).backward()
        optimizer.step()

    two.run(step)
    assert v.item() == -3.0


# In a module


def test_a_module_has_a_variable_in_its_state(strategy: torchstrategy.Strategy) -> None:
    with strategy.scope():
        model = Scaled()
    names = {"scale", "frozen", "steps", "rows", "linear.weight", "linear.bias"}
    assert set(model.state_dict()) == names == {name for name, _ in model.named_parameters()}
    state = {name: value + 1 for name, value in model.state_dict().items()}
    assert not any(type(value) is not torch.Tensor for value in state.values())
    model.load_state_dict(state)
    assert numbers(strategy, lambda: model.scale * 1) == [3.0] * strategy.num_replicas_in_sync
    assert (model.rows.item(), model.steps.item()) == (1.0, 1)


def test_in_a_replica_the_variable_of_a_module_is_a_variable(several: torchstrategy.Strategy) -> None:
    with several.scope():
        model = Scaled()

    def step() -> tuple[Any, ...]:
        own: Any = model.steps
        own.assign(torch.tensor(5 + replica_id()))
        assert own.name == "Variable" and model.scale.name == "scale" and not own.trainable
        assert own.synchronization is AUTO and own.aggregation is FIRST
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = own.no_such_name
        assert own is model.steps
        return own.read_value() * 1, torch.tensor(own.numpy())

    for seen in several.experimental_local_results(several.run(step)):
        assert [value.item() for value in seen] == [5, 5]


def test_a_module_converts_its_variables(strategy: torchstrategy.Strategy) -> None:
    with strategy.scope():
        model = Scaled()
    model.rows.assign(12.0)
    assert repr(model.scale)
    model.half().double()
    assert {parameter.dtype for parameter in model.trained()} == {model.rows.dtype} == {torch.float64}
    model.scale.assign(torch.tensor(5.0))
    assert model.rows.item() == 12.0 and set(components(strategy, model.scale)) == {5.0}
    assert numbers(strategy, lambda: model.scale * 1) == [5.0] * strategy.num_replicas_in_sync
    averaged = torch.optim.swa_utils.AveragedModel(nn.ParameterList([model.scale]))
    model.scale.assign(7.0)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    assert averaged.module[0].item() == 7.0
    with torch.no_grad():
        nn.utils.vector_to_parameters(torch.zeros(8, dtype=torch.float64, device=model.scale.device), [model.scale])
    assert numbers(strategy, lambda: model.scale * 1) == [0.0] * strategy.num_replicas_in_sync


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_a_copy_belongs_to_where_it_is_made(strategy: torchstrategy.Strategy, how: str) -> None:
    with strategy.scope():
        model = Scaled()
    model.scale.assign(7.0)
    model.rows.assign(8.0)

    def copied() -> Scaled:
        if how == "deepcopy":
            return copy.deepcopy(model)
        if how == "pickle":
            return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]
        buffer = io.BytesIO()
        torch.save(model, buffer)
        return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)  # type: ignore[no-any-return]

    twin = copied()
    assert (twin.scale.item(), twin.rows.item(), twin.scale.name) == (7.0, 8.0, "scale")
    assert twin.steps.aggregation is FIRST and twin.scale.trainable and not twin.frozen.trainable
    with strategy.scope():
        inside = copied()
    assert strategy.extended.variable_created_in_scope(inside.scale)
    assert inside.scale is not model.scale and inside.scale.assign(1.0).item() == 1.0 != model.scale.item()


# What torch does with it


class Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class Tagged(torch.Tensor):
    """A class of tensors that has a say in what torch does."""


USES: dict[str, Callable[[Any], torch.Tensor]] = {
    "arithmetic": lambda v: 1 - v * 2 + v / v - v**2,
    "comparison": lambda v: (v > 1) | (v == 1),
    "stack": lambda v: torch.stack([v, v + 1]),
    "keyword": lambda v: torch.add(input=v, other=v, alpha=2),
    "einsum": lambda v: torch.einsum("i,i->", v, v),
    "linear": lambda v: F.linear(torch.eye(2, device=v.device), torch.stack([v, v]), v),
    "index": lambda v: v[1] + v[-1:],
    "unpacked": lambda v: sum(v),
    "where": lambda v: torch.where(v > 1, v, torch.zeros_like(v)),
    "out": lambda v: torch.mul(v, v, out=torch.empty_like(v.detach())) if not v.requires_grad else v * v,
    "loss": lambda v: F.mse_loss(v, v.detach() * 0),
    "to": lambda v: v.to(torch.float64),
    "data": lambda v: v.data + 1,
}


@pytest.mark.parametrize("use", USES)
def test_torch_takes_a_variable_as_the_tensor_that_it_is(use: str) -> None:
    for strategy in (make("one_device"), make("central_2"), make("mirrored_2")):
        for kwargs in ({}, {"synchronization": ON_READ, "aggregation": FIRST}):
            v = made(strategy, [1.0, 2.0], **kwargs)  # type: ignore[arg-type]
            expected = USES[use](torch.tensor([1.0, 2.0]))
            close(USES[use](v).detach(), expected)
            assert type(USES[use](v)) is torch.Tensor
            for result in strategy.experimental_local_results(strategy.run(lambda v=v: USES[use](v))):
                close(result.detach(), expected)


def test_a_number_is_printed_as_one(strategy: torchstrategy.Strategy) -> None:
    v = made(strategy, 3.0)
    w = made(strategy, v, trainable=False)
    assert w is not v and (f"{w:.1f}", float(w), int(w), bool(w)) == ("3.0", 3.0, 3, True)
    printed = strategy.run(lambda: f"{w:.2f}")
    assert set(strategy.experimental_local_results(printed)) == {"3.00"}
    assert made(strategy, 0, dtype=torch.float64).trainable and not made(strategy, 0).trainable


def test_runs_at_the_same_time_lose_no_assignment(several: torchstrategy.Strategy) -> None:
    shared = made(several, 0.0, aggregation=SUM)

    def work() -> None:
        for _ in range(5):
            several.run(silently(lambda: shared.assign_add(torch.tensor(1.0))))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.item() == 15.0 * several.num_replicas_in_sync


def test_writing_in_place_outside_is_assigning(strategy: torchstrategy.Strategy) -> None:
    v = made(strategy, [1.0, 1.0], trainable=False)
    w = made(strategy, [1.0, 1.0], synchronization=ON_READ, aggregation=MEAN)
    for variable in (v, w):
        before = variable
        variable.add_(1)
        variable += 1
        variable[0] = 9
        variable.clamp_(max=5)
        assert variable is before
        assert numbers(strategy, lambda u=variable: u * 1) == [[5.0, 3.0]] * strategy.num_replicas_in_sync
        nn.init.ones_(variable)
        assert variable.tolist() == [1.0, 1.0]


def test_writing_in_place_in_a_replica_is_refused(several: torchstrategy.Strategy) -> None:
    v = made(several, 1.0, trainable=False, name="counter")
    with pytest.raises(RuntimeError, match="counter was written in place in a replica"):
        several.run(silently(lambda: v.add_(1)))


def test_a_replica_may_write_in_place_on_a_value_of_its_own(two_mirrored: torchstrategy.Strategy) -> None:
    v = made(two_mirrored, 1.0, synchronization=ON_READ, aggregation=SUM)
    two_mirrored.run(silently(lambda: v.add_(replica_id())))
    assert components(two_mirrored, v) == [1.0, 2.0]


def test_what_is_known_of_a_value_that_cannot_be_read(two_mirrored: torchstrategy.Strategy) -> None:
    v = made(two_mirrored, [1.0, 2.0], synchronization=ON_READ)
    assert (v.shape, v.dtype, v.trainable) == (torch.Size([2]), torch.float32, False)
    assert "SyncOnReadVariable:{" in repr(v)
    with pytest.raises(ValueError, match="has a value in each replica and no aggregation"):
        _ = v + 1
    v.assign([3.0, 4.0])
    assert numbers(two_mirrored, lambda: v * 1) == [[3.0, 4.0]] * 2


def test_modes_and_other_classes_of_tensors_have_their_say(two: torchstrategy.Strategy) -> None:
    v = made(two, [1.0, 2.0])
    tagged = torch.ones(2, device=v.device).as_subclass(Tagged)
    assert type(v * tagged) is type(tagged * v) is Tagged
    own = made(two, [1.0, 2.0], synchronization=ON_READ, aggregation=MEAN)
    own.add_(tagged)
    assert own.tolist() == [2.0, 3.0]
    with Recorder() as recorder:
        _ = v * 2
    assert "mul" in recorder.seen


def test_a_compiler_takes_no_replica_for_another(two_mirrored: torchstrategy.Strategy) -> None:
    v, own = made(two_mirrored, 3.0), made(two_mirrored, 0.0, synchronization=ON_READ, aggregation=SUM)
    compiled = torch.compile(lambda x: x * v + own, backend="eager")

    def step() -> torch.Tensor:
        own.assign(torch.tensor(float(replica_id())))
        return compiled(torch.ones(()))

    assert numbers(two_mirrored, step) == [3.0, 4.0]
    v.assign(5.0)
    assert numbers(two_mirrored, step) == [5.0, 6.0]


# What a strategy does with it


def test_a_mirrored_variable_is_a_value_of_several_replicas(two_mirrored: torchstrategy.Strategy) -> None:
    v = made(two_mirrored, [1.0, 3.0])
    w = made(two_mirrored, [1.0], synchronization=ON_READ, aggregation=MEAN)
    assert isinstance(v, torchstrategy.DistributedValues) and isinstance(w, torchstrategy.DistributedValues)
    assert repr(v) == "MirroredVariable:{\n  0: tensor([1., 3.]),\n  1: tensor([1., 3.])\n}".replace(
        ".])", f".]{_device(0)})", 1
    ).replace(".])\n}", f".]{_device(1)})\n}}")
    close(two_mirrored.reduce("mean", v, axis=None).detach(), torch.tensor([1.0, 3.0]))
    close(two_mirrored.reduce("sum", w, axis=None), torch.tensor([2.0]))
    close(two_mirrored.gather(w, axis=0), torch.tensor([1.0, 1.0]))
    for r, own in enumerate(two_mirrored.experimental_local_results({"v": v, "other": 1})):
        assert own["v"] is v.values[r] and own["other"] == 1
    reduced = two_mirrored.extended.reduce_to("sum", two_mirrored.run(lambda: torch.ones(2) * 1), v)
    assert [part.device for part in reduced.values] == [part.device for part in v.values]


def _device(replica: int) -> str:
    return f", device='{SIMULATED[replica]}'" if SIMULATED else ""


def test_a_collective_is_given_the_replicas_own_value(two_mirrored: torchstrategy.Strategy) -> None:
    own = made(two_mirrored, [1.0], synchronization=ON_READ)
    shared = made(two_mirrored, [2.0], aggregation=MEAN)

    def step() -> Any:
        own.assign(torch.tensor([replica_id() + 1.0]))
        shared.assign(own)
        gathered = context().all_gather(own, axis=0)
        return gathered, context().all_reduce("sum", {"own": own, "shared": shared})

    for gathered, reduced in two_mirrored.experimental_local_results(two_mirrored.run(step)):
        assert gathered.tolist() == [1.0, 2.0]
        assert (reduced["own"].item(), reduced["shared"].item()) == (3.0, 3.0)


def test_a_variable_in_the_place_of_a_buffer_is_a_variable(several: torchstrategy.Strategy) -> None:
    with several.scope():
        model = nn.Linear(1, 1)
        model.register_buffer("steps", Variable(0.0, trainable=False, aggregation=FIRST))
        model.register_buffer("rows", Variable(0.0, synchronization=ON_READ, aggregation=SUM))

    def step() -> None:
        model.steps.assign_add(torch.tensor(1.0))
        model.rows.assign_add(torch.tensor(2.0))

    several.run(step)
    several.run(step)
    assert (model.steps.item(), model.rows.item()) == (2.0, 4.0 * several.num_replicas_in_sync)
    assert model.state_dict()["steps"].item() == 2.0


def test_a_variable_with_one_copy_is_one_value(strategy: torchstrategy.Strategy) -> None:
    if has_components(strategy):
        return
    v = made(strategy, [1.0, 3.0])
    assert not isinstance(v, torchstrategy.DistributedValues)
    assert strategy.experimental_local_results(v) == (v,)
    assert strategy.reduce("mean", v, axis=None) is v
    assert repr(made(strategy, [1.0], name="w").cpu()) and repr(v).startswith("Variable(tensor([1., 3.]")


def test_a_step_that_is_given_a_variable_has_the_variable(strategy: torchstrategy.Strategy) -> None:
    v = made(strategy, 2.0, aggregation=MEAN)

    def step(v: Variable, nested: dict[str, list[Variable]]) -> Variable:
        assert nested["v"][0] is v
        return v.assign_add(torch.tensor(1.0))

    assert strategy.run(step, args=(v, {"v": [v]})) is v
    assert v.item() == 3.0
    assert strategy.run(lambda: v) is v


def test_update_writes_every_component(strategy: torchstrategy.Strategy) -> None:
    v = made(strategy, 10.0)
    count = len(strategy.experimental_local_results(v))
    seen = []

    def write(component: Variable, x: float, scale: float = 1.0) -> dict[str, float]:
        seen.append((component.item(), torchstrategy.in_cross_replica_context(), torchstrategy.get_strategy()))
        return {"now": component.assign_add(x * scale).item()}

    assert strategy.extended.update(v, write, (2.0,), {"scale": 2.0}, group=False) == {"now": (14.0,) * count}
    assert seen == [(10.0, True, strategy)] * count
    strategy.extended.update(v, lambda component: component.assign(1.0).item())
    assert components(strategy, v) == [1.0] * count
    assert numbers(strategy, lambda: v * 1) == [1.0] * strategy.num_replicas_in_sync


def test_update_is_given_what_was_reduced_to_the_variable(two: torchstrategy.Strategy) -> None:
    v = made(two, 10.0)
    each = two.run(lambda: torch.tensor(replica_id() + 1.0))
    reduced = two.extended.reduce_to("sum", each, destinations=v)
    two.extended.update(v, lambda component, x: component.assign_sub(x) and None, args=(reduced,))
    assert components(two, v) == [7.0] * len(two.experimental_local_results(v))
    with pytest.raises(ValueError, match="a value for each replica"):
        two.extended.update(v, lambda component, x: component.assign(x) and None, args=(each,))
    for other in (3, torch.ones(2), two.run(lambda: torch.ones(2)), None):  # what was written had no strategy
        with pytest.raises(TypeError, match=r"update writes a variable.*torchstrategy\.Variable\(value"):
            two.extended.update(other, lambda component: component.add_(1))
    with pytest.raises(RuntimeError, match="cross-replica context"):
        two.run(lambda: two.extended.update(v, lambda component: None))


def test_a_component_is_written_only_together_with_the_others(two_mirrored: torchstrategy.Strategy) -> None:
    v = made(two_mirrored, 1.0, trainable=False)
    first, second = two_mirrored.experimental_local_results(v)
    for write in (lambda: second.assign(2.0), lambda: second.add_(1)):
        with pytest.raises(RuntimeError, match="by itself"):
            write()
    v.assign(4.0)
    assert (first.item(), second.item(), (second + 1).item()) == (4.0, 4.0, 5.0)
    w = made(two_mirrored, 1.0, synchronization=ON_READ, aggregation=SUM)
    two_mirrored.experimental_local_results(w)[1].assign(5.0)
    assert w.item() == 6.0


def test_a_strategy_knows_its_variables(strategy: torchstrategy.Strategy) -> None:
    extended, v = strategy.extended, made(strategy, 1.0)
    elsewhere = made(central(2), 1.0)
    assert extended.variable_created_in_scope(v) and not extended.variable_created_in_scope(elsewhere)
    for component in strategy.experimental_local_results(v):
        assert extended.value_container(component) is v
        assert extended.variable_created_in_scope(component)
    assert extended.value_container(3) == 3
    close(extended.read_var(v).detach(), torch.tensor(1.0))
    with strategy.scope(), extended.colocate_vars_with(v):
        assert Variable(2.0).device == v.device
    with strategy.scope(), pytest.raises(ValueError, match="created in this strategy's scope"):
        extended.colocate_vars_with(elsewhere)
    if strategy is not torchstrategy.get_strategy():
        with pytest.raises(RuntimeError, match="Need to be inside"):
            extended.colocate_vars_with(v)


def test_variables_are_where_the_strategy_keeps_parameters(strategy: torchstrategy.Strategy) -> None:
    v = made(strategy, torch.ones(1, device="cpu"))
    if strategy is torchstrategy.get_strategy():
        assert v.device.type == "cpu"
        return
    homes = [memory_device(device) for device in strategy.extended.parameter_devices]
    assert [component.device for component in strategy.experimental_local_results(v)] == homes
    seen = strategy.experimental_local_results(strategy.run(lambda: (v * 1).device))
    assert list(seen) == [memory_device(device) for device in strategy.extended.worker_devices]


# What is refused


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"aggregation": "sum"}, ValueError, "VariableAggregation: NONE, SUM"),
        ({"synchronization": 3}, ValueError, "VariableSynchronization"),
        ({"trainable": 1}, TypeError, "trainable=1"),
        ({"name": 3}, TypeError, "name=3"),
        ({"initial_value": "text"}, TypeError, "initial value"),
        ({"initial_value": None}, TypeError, "initial value"),
        ({"initial_value": 3, "trainable": True}, ValueError, "only floating-point numbers have gradients"),
    ],
)
def test_a_variable_of_the_wrong_kind_is_refused(
    strategy: torchstrategy.Strategy, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        made(strategy, **{"initial_value": 1.0, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {"synchronization": NO_SYNC},
        {"initial_value": 1, "aggregation": MEAN},
    ],
)
def test_what_cannot_be_mirrored_is_refused(several: torchstrategy.Strategy, arguments: dict[str, Any]) -> None:
    arguments = {"initial_value": 1.0, **arguments}
    if has_components(several):
        with pytest.raises(ValueError):
            made(several, **arguments)
    else:
        made(several, **arguments)


def test_a_value_of_each_replicas_own_may_be_trainable(several: torchstrategy.Strategy) -> None:
    """TensorFlow allows it; its gradient is each replica's own, and training it would leave n different values."""
    v = made(several, 2.0, synchronization=ON_READ, aggregation=MEAN, trainable=True)
    assert v.trainable and v.requires_grad
    (gradient, *_) = several.experimental_local_results(
        several.run(lambda: torch.autograd.grad((v * (replica_id() + 3)).sum(), v)[0])
    )
    assert gradient.item() == 3.0
    several.run(silently(lambda: v.assign(torch.tensor(replica_id() + 1.0))) if has_components(several) else list)
    if not has_components(several):
        return
    assert v.item() == (several.num_replicas_in_sync + 1) / 2
    for train in (lambda: (v * 2).sum().backward(), lambda: setattr(v, "grad", torch.ones(()))):
        with pytest.raises(RuntimeError, match="trainable=True and synchronization=ON_READ"):
            several.run(silently(train))
    assert v.grad is None


@pytest.mark.parametrize(
    ("value", "error"), [([1.0], ValueError), (1j, ValueError), ("text", TypeError), (None, ValueError)]
)
@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_a_value_that_does_not_fit_is_refused(
    strategy: torchstrategy.Strategy, value: Any, error: type[Exception], synchronization: Any
) -> None:
    v = made(strategy, 1.0, aggregation=FIRST, synchronization=synchronization)
    with pytest.raises(error):
        v.assign(value)
    with pytest.raises(error):
        strategy.run(silently(lambda: v.assign(value)))
    assert v.item() == 1.0


def test_the_mean_of_integers_is_not_written_over_an_integer() -> None:
    strategy = central(2)
    v = made(strategy, 1, aggregation=MEAN)
    with pytest.raises(ValueError, match="cannot be converted"):
        strategy.run(silently(lambda: v.assign(torch.tensor(replica_id()))))
    assert v.item() == 1


def test_a_value_for_each_replica_is_assigned_by_each_replica(several: torchstrategy.Strategy) -> None:
    v = made(several, 1.0, aggregation=SUM)
    each = several.run(lambda: torch.tensor(replica_id() + 1.0))
    with pytest.raises(TypeError, match="a value for each replica, outside of them"):
        v.assign(each)
    with pytest.raises(TypeError, match="a value for each replica"):
        made(several, each)
    several.run(silently_with(v.assign), args=(each,))
    n = several.num_replicas_in_sync
    assert v.item() == n * (n + 1) / 2


def test_replicas_that_assign_different_variables_are_told(several: torchstrategy.Strategy) -> None:
    v, w = (made(several, 1.0, aggregation=MEAN, name=name) for name in "vw")
    with pytest.raises(RuntimeError, match="assigned different variables"):
        several.run(silently(lambda: (w if replica_id() else v).assign(torch.tensor(1.0))))
    with pytest.raises(RuntimeError, match="in different ways"):
        several.run(silently(lambda: (v.assign_add if replica_id() else v.assign)(torch.tensor(1.0))))
    with pytest.raises(RuntimeError, match="different number of times"):
        several.run(silently(lambda: replica_id() or v.assign(torch.tensor(1.0))))
    assert (v.item(), w.item()) == (1.0, 1.0)


# What is left behind


@pytest.fixture
def without_the_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_variable_lives_as_long_as_the_user_has_it(
    strategy: torchstrategy.Strategy, without_the_collector: None
) -> None:
    variables = [made(strategy, [1.0]), made(strategy, [1.0], synchronization=ON_READ, aggregation=SUM)]
    other = made(strategy, [2.0])
    for v in variables:
        strategy.run(silently(lambda v=v: (v * other).sum().item()))
        assert repr(v)
    alive = [weakref.ref(v) for v in variables]
    del v, variables
    assert [reference() for reference in alive] == [None, None]
    assert numbers(strategy, lambda: other * 1) == [[2.0]] * strategy.num_replicas_in_sync


def test_a_module_of_the_strategy_lets_go_of_its_variables(two: torchstrategy.Strategy) -> None:
    with two.scope():
        model = Scaled()
        optimizer = torch.optim.SGD(model.trained())

    def step(model: Scaled, batch: Any) -> None:
        model(batch[0]).sum().backward()

    two.run(step, args=(model, deal(two, data(4))))
    reference = weakref.ref(model.scale)
    del model, optimizer
    gc.collect()
    assert reference() is None


def test_the_copies_of_replicas_agree(several: torchstrategy.Strategy) -> None:
    with several.scope():
        model = Scaled()
        optimizer = OPTIMIZERS["adam"](model.trained())

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    for k in range(3):
        several.run(step, args=(deal(several, data(5, seed=k)),))
        model.biases[0].assign(torch.ones(2, dtype=torch.float64) * k)
    torchstrategy.testing.assert_replicas_agree(several, model)
    assert parameters(model)["scale"] != 2.0


def test_enums_are_those_of_tensorflow() -> None:
    assert {member.name: member.value for member in VariableSynchronization} == {
        "AUTO": 0,
        "NONE": 1,
        "ON_WRITE": 2,
        "ON_READ": 3,
    }
    assert [member.name for member in VariableAggregation] == ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]
    convert = torchstrategy.ReduceOp.from_variable_aggregation
    assert (convert(SUM), convert(MEAN)) == (torchstrategy.ReduceOp.SUM, torchstrategy.ReduceOp.MEAN)
    for other in (NONE, FIRST, "SUM", None):
        with pytest.raises(ValueError, match="is no reduction"):
            convert(other)  # type: ignore[arg-type]
