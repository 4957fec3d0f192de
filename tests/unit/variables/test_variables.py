"""Variables: made, assigned, read, copied and let go of, and what is refused."""

from __future__ import annotations

import gc
import operator
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

import torchstrategy
from conditions import for_changes
from problems import close, context, data, deal, parameters, replica_id, share_a_place
from topologies import central
from torchstrategy import Variable, VariableAggregation, VariableSynchronization
from variables import (
    AUTO,
    FIRST,
    MAKERS,
    MEAN,
    NO_SYNC,
    NONE,
    ON_READ,
    ON_WRITE,
    OPTIMIZERS,
    SUM,
    Scaled,
    components,
    has_components,
    made,
    make,
    numbers,
    one_device,
    silently,
    silently_with,
)

# What an assignment does, by the tables of tf.distribute


OPERATIONS = {
    "assign": lambda old, new: new,
    "assign_add": operator.add,
    "assign_sub": operator.sub,
}


class Model:
    """What becomes of a variable that holds a number.

    A value for each component, and what is read of them.
    """

    def __init__(
        self,
        replicas: int,
        is_mirrored: bool,
        synchronization: Any,
        aggregation: Any,
        initial: float,
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

    def assign_in_replicas(
        self, name: str, given: list[float], is_one_object: bool
    ) -> None:
        if self.is_on_read:
            self.values = [
                OPERATIONS[name](old, new)
                for old, new in zip(self.values, given, strict=True)
            ]
            return
        self.values = [
            OPERATIONS[name](old, self.combined(given, is_one_object))
            for old in self.values
        ]

    def combined(self, given: list[float], is_one_object: bool) -> float:
        if self.replicas == 1 or self.aggregation is FIRST:
            return given[0]
        if self.aggregation is NONE or (
            self.aggregation is SUM and is_one_object and given[0] != 0
        ):
            raise ValueError
        if is_one_object:
            return given[0]
        return sum(given) / (self.replicas if self.aggregation is MEAN else 1)


# Whose parts of 2, 3 and 4 replicas are exact.
NUMBERS = st.integers(-8, 8).map(lambda n: n * 12.0)
ASSIGNMENTS = st.tuples(
    st.sampled_from([*OPERATIONS]),
    st.sampled_from(["outside", "replicas", "same"]),
    NUMBERS,
)


@for_changes
@given(
    st.sampled_from([*MAKERS]),
    st.sampled_from([AUTO, ON_WRITE, ON_READ]),
    st.sampled_from([*VariableAggregation]),
    NUMBERS,
    st.lists(ASSIGNMENTS, min_size=1, max_size=4),
)
@example(
    "mirrored_2",
    ON_READ,
    SUM,
    12.0,
    [("assign_add", "replicas", 12.0), ("assign", "outside", 24.0)],
)
@example("central_2", ON_READ, SUM, 12.0, [("assign_add", "same", 12.0)])
@example(
    "mirrored_4",
    AUTO,
    NONE,
    12.0,
    [("assign", "replicas", 12.0), ("assign_sub", "outside", 12.0)],
)
@settings(max_examples=60, deadline=None)
def test_assignments_do_what_the_tables_say(
    name: str,
    synchronization: Any,
    aggregation: Any,
    initial: float,
    assignments: list[tuple[str, str, float]],
) -> None:
    strategy = make(name)
    replicas = strategy.num_replicas_in_sync
    model = Model(
        replicas, has_components(strategy), synchronization, aggregation, initial
    )
    v = made(
        strategy, initial, synchronization=synchronization, aggregation=aggregation
    )
    for operation, where, value in assignments:
        given = (
            [value] * replicas
            if where == "same"
            else [value * (r + 1) for r in range(replicas)]
        )

        def assign(
            operation: str = operation, where: str = where, value: float = value
        ) -> None:
            own = value if where == "same" else torch.tensor(value * (replica_id() + 1))
            getattr(v, operation)(own)

        def expected(
            operation: str = operation,
            where: str = where,
            value: float = value,
            given: Any = given,
        ) -> None:
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


def test_a_replica_reads_what_all_have_assigned(
    several: torchstrategy.Strategy,
) -> None:
    v = made(several, [1.0, 2.0], aggregation=MEAN)

    def step() -> torch.Tensor:
        v.assign(torch.full((2,), 6.0 * replica_id()))
        return v * 1

    assert (
        numbers(several, step)
        == [[3.0 * (several.num_replicas_in_sync - 1)] * 2]
        * several.num_replicas_in_sync
    )


def test_replicas_that_sit_out_have_no_say(several: torchstrategy.Strategy) -> None:
    mean, total = (
        made(several, 0.0, aggregation=MEAN),
        made(several, 0.0, synchronization=ON_READ, aggregation=SUM),
    )

    def step(rows: torch.Tensor) -> None:
        mean.assign(rows.sum())
        total.assign_add(rows.sum())

    several.run(step, args=(deal(several, torch.tensor([5.0])),))
    assert (mean.item(), total.item()) == (5.0, 5.0)


def test_integers_are_shared_out_so_that_their_sum_is_what_was_assigned(
    two_mirrored: torchstrategy.Strategy,
) -> None:
    v = made(two_mirrored, 0, synchronization=ON_READ, aggregation=SUM)
    assert v.assign(7).item() == 7
    assert components(two_mirrored, v) == [4, 3]


# In which contexts


def test_assigning_is_for_all_contexts_of_its_strategy(
    strategy: torchstrategy.Strategy,
) -> None:
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


def test_assigning_in_the_context_of_another_strategy_is_refused(
    several: torchstrategy.Strategy,
) -> None:
    v = made(several, 1.0, aggregation=MEAN)
    other = one_device()
    with other.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        v.assign(2.0)
    with pytest.raises(RuntimeError, match="Mixing different"):
        other.run(silently(lambda: v.assign(2.0)))
    assert v.item() == 1.0


def test_a_variable_of_no_strategy_is_written_by_each_replica(
    two: torchstrategy.Strategy,
) -> None:
    v = Variable(10.0)
    if share_a_place(two):
        two.run(silently(lambda: v.assign_add(torch.tensor(replica_id() + 1.0))))
        assert v.item() == 13.0


def test_one_of_another_strategy_can_be_read_in_a_replica(
    two: torchstrategy.Strategy,
) -> None:
    v = made(torchstrategy.OneDeviceStrategy("cpu"), 10.0, trainable=False)
    assert two.experimental_local_results(two.run(lambda: v.item())) == (10.0, 10.0)


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad]
)
def test_grad_modes_change_nothing_about_assigning(
    two: torchstrategy.Strategy, mode: Any
) -> None:
    with mode():
        v = made(two, 0.0, aggregation=SUM)
        w = made(two, 0.0, synchronization=ON_READ, aggregation=SUM)
        two.run(
            silently(
                lambda: (
                    v.assign_add(torch.tensor(1.0)),
                    w.assign_add(torch.tensor(1.0)),
                )
            )
        )
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


def test_a_variable_created_in_a_run_is_one_for_all_replicas(
    several: torchstrategy.Strategy,
) -> None:
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
    assert components(several, v) == [v.tolist()] * len(
        several.experimental_local_results(v)
    )
    drawn = several.run(lambda: Variable(lambda: torch.rand(3)))
    assert isinstance(drawn, Variable)


def test_replicas_that_create_different_variables_are_told(
    two: torchstrategy.Strategy,
) -> None:
    with pytest.raises(RuntimeError, match="mismatching name"):
        two.run(lambda: Variable(1.0, name=f"v{replica_id()}"))


def test_a_variable_created_in_a_run_is_trained_from_the_next_run_on(
    two: torchstrategy.Strategy,
) -> None:
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


# What is refused


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"aggregation": "sum"}, ValueError, "VariableAggregation: NONE, SUM"),
        ({"synchronization": 3}, ValueError, "VariableSynchronization"),
        ({"trainable": 1}, TypeError, r"trainable=.*got 1"),
        ({"name": 3}, TypeError, r"name=.*got 3"),
        ({"initial_value": "text"}, TypeError, "initial value"),
        ({"initial_value": None}, TypeError, "initial value"),
        (
            {"initial_value": 3, "trainable": True},
            ValueError,
            "only floating-point numbers have gradients",
        ),
    ],
)
def test_a_variable_of_the_wrong_kind_is_refused(
    strategy: torchstrategy.Strategy,
    arguments: dict[str, Any],
    error: type[Exception],
    message: str,
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
def test_what_cannot_be_mirrored_is_refused(
    several: torchstrategy.Strategy, arguments: dict[str, Any]
) -> None:
    arguments = {"initial_value": 1.0, **arguments}
    if has_components(several):
        with pytest.raises(ValueError):
            made(several, **arguments)
    else:
        made(several, **arguments)


def test_a_value_of_each_replicas_own_may_be_trainable(
    several: torchstrategy.Strategy,
) -> None:
    """TensorFlow allows it.

    Its gradient is each replica's own, and training it would leave n different values.
    """
    v = made(several, 2.0, synchronization=ON_READ, aggregation=MEAN, trainable=True)
    assert v.trainable and v.requires_grad
    (gradient, *_) = several.experimental_local_results(
        several.run(lambda: torch.autograd.grad((v * (replica_id() + 3)).sum(), v)[0])
    )
    assert gradient.item() == 3.0
    several.run(
        silently(lambda: v.assign(torch.tensor(replica_id() + 1.0)))
        if has_components(several)
        else list
    )
    if not has_components(several):
        return
    assert v.item() == (several.num_replicas_in_sync + 1) / 2
    for train in (
        lambda: (v * 2).sum().backward(),
        lambda: setattr(v, "grad", torch.ones(())),
    ):
        with pytest.raises(
            RuntimeError, match="trainable=True and synchronization=ON_READ"
        ):
            several.run(silently(train))
    assert v.grad is None


@pytest.mark.parametrize(
    ("value", "error"),
    [([1.0], ValueError), (1j, ValueError), ("text", TypeError), (None, ValueError)],
)
@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_a_value_that_does_not_fit_is_refused(
    strategy: torchstrategy.Strategy,
    value: Any,
    error: type[Exception],
    synchronization: Any,
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


def test_a_value_for_each_replica_is_assigned_by_each_replica(
    several: torchstrategy.Strategy,
) -> None:
    v = made(several, 1.0, aggregation=SUM)
    each = several.run(lambda: torch.tensor(replica_id() + 1.0))
    with pytest.raises(TypeError, match="a value for each replica, outside of them"):
        v.assign(each)
    with pytest.raises(TypeError, match="a value for each replica"):
        made(several, each)
    several.run(silently_with(v.assign), args=(each,))
    n = several.num_replicas_in_sync
    assert v.item() == n * (n + 1) / 2


def test_replicas_that_assign_different_variables_are_told(
    several: torchstrategy.Strategy,
) -> None:
    v, w = (made(several, 1.0, aggregation=MEAN, name=name) for name in "vw")
    with pytest.raises(RuntimeError, match="assigned different variables"):
        several.run(
            silently(lambda: (w if replica_id() else v).assign(torch.tensor(1.0)))
        )
    with pytest.raises(RuntimeError, match="in different ways"):
        several.run(
            silently(
                lambda: (v.assign_add if replica_id() else v.assign)(torch.tensor(1.0))
            )
        )
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


@for_changes
def test_a_variable_lives_as_long_as_the_user_has_it(
    strategy: torchstrategy.Strategy, without_the_collector: None
) -> None:
    variables = [
        made(strategy, [1.0]),
        made(strategy, [1.0], synchronization=ON_READ, aggregation=SUM),
    ]
    other = made(strategy, [2.0])
    for v in variables:
        strategy.run(silently(lambda v=v: (v * other).sum().item()))
        assert repr(v)
    alive = [weakref.ref(v) for v in variables]
    del v, variables
    assert [reference() for reference in alive] == [None, None]
    assert (
        numbers(strategy, lambda: other * 1) == [[2.0]] * strategy.num_replicas_in_sync
    )


@for_changes
def test_a_module_of_the_strategy_lets_go_of_its_variables(
    two: torchstrategy.Strategy,
) -> None:
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
    assert [member.name for member in VariableAggregation] == [
        "NONE",
        "SUM",
        "MEAN",
        "ONLY_FIRST_REPLICA",
    ]
    convert = torchstrategy.ReduceOp.from_variable_aggregation
    assert (convert(SUM), convert(MEAN)) == (
        torchstrategy.ReduceOp.SUM,
        torchstrategy.ReduceOp.MEAN,
    )
    for other in (NONE, FIRST, "SUM", None):
        with pytest.raises(ValueError, match="is no reduction"):
            convert(other)  # type: ignore[arg-type]
