"""What `Strategy.extended` has besides, for TensorFlow's libraries of version 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchstrategy
from topologies import SIMULATED, TOPOLOGIES
from torchstrategy import (
    DistributedValues,
    OutOfRangeError,
    Strategy,
    get_replica_context,
)

DEFAULT = torchstrategy.get_strategy()


@pytest.fixture(params=["one_device", "central_2", "central_offset"])
def chosen(request: pytest.FixtureRequest) -> Strategy:
    """Every strategy that has devices."""
    return TOPOLOGIES[request.param]()


def replica_id() -> int:
    context = get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


# Flags


def test_a_process_that_is_alone_does_all_there_is_to_do(strategy: Strategy) -> None:
    extended = strategy.extended
    assert extended.should_checkpoint
    assert extended.should_save_summary
    assert extended.experimental_should_init


def test_only_central_storage_is_between_graphs_as_in_tensorflow(
    chosen: Strategy,
) -> None:
    central = isinstance(chosen, torchstrategy.CentralStorageStrategy)
    assert chosen.extended.experimental_between_graph is central
    with pytest.raises(
        NotImplementedError, match=r"^The default strategy does not say: "
    ):
        _ = DEFAULT.extended.experimental_between_graph


def test_a_strategy_of_a_single_device_in_central_storage_is_still_central() -> None:
    assert torchstrategy.CentralStorageStrategy(
        ["cpu"]
    ).extended.experimental_between_graph


# broadcast_to


def test_a_tensor_is_sent_to_a_device(chosen: Strategy) -> None:
    device = SIMULATED[-1] if SIMULATED else torch.device("cpu")
    tensor = torch.ones(2, requires_grad=True)
    for destination in (device, str(device), torch.empty(1, device=device)):
        sent = chosen.extended.broadcast_to(tensor, destination)
        assert sent.device == device
        assert sent.requires_grad
        assert sent.tolist() == [1, 1]


def test_a_tensor_is_sent_to_each_component_of_a_distributed_value(
    several: Strategy,
) -> None:
    value = several.run(lambda: torch.zeros(3))
    sent = several.extended.broadcast_to(torch.ones(2), value)
    assert isinstance(sent, DistributedValues)
    assert [c.device for c in sent.values] == [c.device for c in value.values]
    assert [c.tolist() for c in sent.values] == [[1, 1]] * several.num_replicas_in_sync
    assert several.reduce("mean", sent, axis=None).tolist() == [1, 1]


@pytest.mark.parametrize("number", [3, 2.5, True])
def test_a_number_is_everywhere_already(chosen: Strategy, number: float) -> None:
    assert chosen.extended.broadcast_to(number, "cpu") is number


NOT_SENT: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "nowhere": (
        torch.ones(1),
        None,
        ValueError,
        r"destinations says where the result goes: ",
    ),
    "several devices": (
        torch.ones(1),
        ["cpu"],
        TypeError,
        r"destinations is one device, tensor or distributed value; ",
    ),
    "an absent device": (
        torch.ones(1),
        "xpu:7",
        ValueError,
        r"The device 'xpu:7' is not on this machine",
    ),
    "a list": (
        [1.0],
        "cpu",
        TypeError,
        r"broadcast_to sends a tensor; got \[1\.0\], a list\.",
    ),
}


@pytest.mark.parametrize("case", NOT_SENT)
def test_what_cannot_be_sent_is_refused(chosen: Strategy, case: str) -> None:
    tensor, destinations, error, sentence = NOT_SENT[case]
    with pytest.raises(error, match="^" + sentence):
        chosen.extended.broadcast_to(tensor, destinations)


def test_the_default_strategy_has_nowhere_to_send_to() -> None:
    with pytest.raises(
        NotImplementedError,
        match=r"^The default strategy has no devices of its own to broadcast to\.",
    ):
        DEFAULT.extended.broadcast_to(torch.ones(1), "cpu")


# update_non_slot


def test_what_there_is_once_is_where_the_parameters_are(chosen: Strategy) -> None:
    assert chosen.extended.non_slot_devices([]) == chosen.extended.parameter_devices


def test_an_update_is_made_on_the_devices_that_are_named(strategy: Strategy) -> None:
    devices = strategy.extended.non_slot_devices([torch.nn.Parameter(torch.ones(1))])
    seen = []

    def update(x: float, *, y: float) -> torch.Tensor:
        seen.append(torchstrategy.in_cross_replica_context() or strategy is DEFAULT)
        assert torchstrategy.get_strategy() is strategy
        return torch.tensor(x + y)

    total = strategy.extended.update_non_slot(devices, update, (1.0,), {"y": 2.0})
    totals = strategy.experimental_local_results(total)
    assert [(each.device.type, float(each)) for each in totals] == [
        (device.type, 3.0) for device in devices
    ]
    assert seen == [True] * len(devices)


def test_each_device_is_given_its_component(several: Strategy) -> None:
    n = several.num_replicas_in_sync
    value = several.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group * 500
    )

    def update(x: int) -> dict[str, int]:
        return {"x": x + 1}

    devices = several.extended.worker_devices
    grouped = several.extended.update_non_slot(devices, update, (value,))
    assert grouped["x"].values == tuple(500 * r + 1 for r in range(n))
    apart = several.extended.update_non_slot(devices, update, (value,), group=False)
    assert apart == {"x": grouped["x"].values}


def test_there_is_an_item_for_each_device_also_where_they_are_the_same(
    several: Strategy,
) -> None:
    devices = several.extended.worker_devices
    assert several.extended.update_non_slot(devices, lambda: None, group=False) == (
        None,
    ) * len(devices)
    assert several.extended.update_non_slot(devices, lambda: None) is None


def test_a_tensor_says_where_it_is(chosen: Strategy) -> None:
    assert chosen.extended.update_non_slot(torch.ones(1), lambda: 1, group=False) == (
        1,
    )
    assert chosen.extended.update_non_slot("cpu:0", lambda: 1) == 1


def test_an_update_on_no_device_is_refused(chosen: Strategy) -> None:
    with pytest.raises(
        ValueError, match=r"^update_non_slot\(colocate_with=\(\)\) names no device"
    ):
        chosen.extended.update_non_slot((), lambda: None)


# experimental_run_steps_on_iterator


def test_several_steps_in_a_row_leave_what_the_last_one_set(chosen: Strategy) -> None:
    batches = [torch.full((4,), float(i)) for i in range(3)]
    iterator = chosen.make_dataset_iterator(batches)

    def fn(context: Any, batch: Any) -> None:
        assert torchstrategy.get_strategy() is chosen
        losses = chosen.run(lambda rows: rows.mean(), args=(batch,))
        context.set_last_step_output("loss", losses, "mean")
        context.set_last_step_output("losses", losses)
        context.set_non_tensor_output("word", "said")

    context = chosen.extended.experimental_run_steps_on_iterator(
        fn, iterator, iterations=3
    )
    assert context.last_step_outputs["loss"] == 2
    kept = chosen.experimental_local_results(context.last_step_outputs["losses"])
    assert [float(loss) for loss in kept] == [2] * len(kept)
    assert context.non_tensor_outputs == {"word": "said"}
    assert not torchstrategy.has_strategy()


def test_what_replicas_set_is_reduced_or_kept_apart(several: Strategy) -> None:
    n = several.num_replicas_in_sync
    iterator = several.make_dataset_iterator([torch.ones(n)])

    def fn(context: Any, batch: Any) -> None:
        def step(rows: torch.Tensor) -> None:
            name = "".join(["to", "tal"])  # an object of its own in each replica
            context.set_last_step_output(name, rows.sum() + replica_id(), "sum")
            context.set_non_tensor_output(
                "".join(["n", "ame"]), f"replica {replica_id()}"
            )

        several.run(step, args=(batch,))

    context = several.extended.experimental_run_steps_on_iterator(fn, iterator)
    assert context.last_step_outputs == {"total": n + n * (n - 1) / 2}
    assert context.non_tensor_outputs == {
        "name": tuple(f"replica {r}" for r in range(n))
    }


def test_replicas_have_to_say_how_their_outputs_become_one(strategy: Strategy) -> None:
    def fn(context: Any, batch: Any) -> None:
        strategy.run(
            lambda rows: context.set_last_step_output("loss", rows), args=(batch,)
        )

    iterator = strategy.make_dataset_iterator([torch.ones(4)])
    with pytest.raises(
        ValueError,
        match=(
            r"^set_last_step_output\('loss', \.\.\.\) was "
            r"called in a replica, where "
        ),
    ):
        strategy.extended.experimental_run_steps_on_iterator(fn, iterator)
    assert not torchstrategy.has_strategy()


def test_initial_values_are_what_no_step_has_set(chosen: Strategy) -> None:
    iterator = chosen.make_dataset_iterator([torch.ones(2)])
    initial = {"loss": 0.0, "rows": 0}

    def fn(context: Any, batch: Any) -> None:
        context.set_last_step_output("rows", 2)

    run = chosen.extended.experimental_run_steps_on_iterator
    assert run(fn, iterator, 0, initial).last_step_outputs == initial
    assert run(fn, iterator, 1, initial).last_step_outputs == {"loss": 0.0, "rows": 2}
    assert initial == {"loss": 0.0, "rows": 0}


def test_steps_end_with_the_data(chosen: Strategy) -> None:
    taken = []
    iterator = iter(chosen.experimental_distribute_dataset([torch.ones(2)]))
    with pytest.raises(OutOfRangeError):
        chosen.extended.experimental_run_steps_on_iterator(
            lambda context, batch: taken.append(batch), iterator, 2
        )
    assert len(taken) == 1


def test_wrong_steps_are_refused(chosen: Strategy) -> None:
    run = chosen.extended.experimental_run_steps_on_iterator
    with pytest.raises(
        ValueError, match=r"^experimental_run_steps_on_iterator\(iterations=-1\): "
    ):
        run(
            lambda context, batch: None,
            chosen.make_dataset_iterator([torch.ones(1)]),
            -1,
        )
    with pytest.raises(
        TypeError,
        match=r"^An input iterator is what make_dataset_iterator, .* got a list\.",
    ):
        run(lambda context, batch: None, [torch.ones(1)])


# Where they may be called

SPEAKING_FOR_ALL = {
    "broadcast_to": lambda s: s.extended.broadcast_to(torch.ones(1), "cpu"),
    "update_non_slot": lambda s: s.extended.update_non_slot("cpu", lambda: None),
    "experimental_run_steps_on_iterator": lambda s: (
        s.extended.experimental_run_steps_on_iterator(
            lambda context, batch: None, s.make_dataset_iterator([torch.ones(1)])
        )
    ),
    r"Strategy\.experimental_make_numpy_dataset": lambda s: (
        s.extended.experimental_make_numpy_dataset(torch.ones(1))
    ),
}


@pytest.mark.parametrize("method", SPEAKING_FOR_ALL)
def test_what_speaks_for_all_replicas_is_refused_elsewhere(
    chosen: Strategy, method: str
) -> None:
    call, other = SPEAKING_FOR_ALL[method], torchstrategy.OneDeviceStrategy("cpu")
    call(chosen)
    with chosen.scope():
        call(chosen)
    with pytest.raises(
        RuntimeError,
        match=rf"^Method requires being in cross-replica context: {method} speaks",
    ):
        chosen.run(lambda: call(chosen))
    with (
        other.scope(),
        pytest.raises(
            RuntimeError,
            match=rf"^Mixing different torchstrategy\.Strategy objects: {method}",
        ),
    ):
        call(chosen)
