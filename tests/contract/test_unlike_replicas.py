"""What replicas that differ in weight or in results get is what one device gives."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest
import torch

import torchstrategy


def test_half_gradients_of_a_collective_keep_their_bits_if_weights_differ() -> None:
    # They were multiplied by a small weight in half precision, and divided by it again:
    # few of their bits were left.
    strategy = torchstrategy.MirroredStrategy(["cpu", "cpu"])

    def step() -> torch.Tensor:
        context = torchstrategy.get_replica_context()
        replica = context.replica_id_in_sync_group
        assert isinstance(replica, int)
        own = torch.ones(2, dtype=torch.float16, requires_grad=True)
        everyone = context.all_gather(own, 0)
        return torch.autograd.grad(
            (everyone[2 * replica : 2 * replica + 2] * 2e-6).sum(), own
        )[0]

    expected = torch.full((2,), 2e-6, dtype=torch.float16)
    for weights in ([64, 1], [1, 1]):
        found = strategy.run(step, options=torchstrategy.RunOptions(examples=weights))
        for gradient in strategy.experimental_local_results(found):
            # One bit of these halves.
            torch.testing.assert_close(gradient, expected, rtol=0, atol=6e-8)


@pytest.mark.parametrize("weights", [[1, 1, 1], [3, 1, 2]])
def test_a_gradient_of_a_gradient_goes_through_an_all_reduce(
    weights: list[int],
) -> None:
    strategy = torchstrategy.MirroredStrategy(["cpu"] * 3)

    def step() -> torch.Tensor:
        x = torch.full((), 2.0, dtype=torch.float64, requires_grad=True)
        total = torchstrategy.get_replica_context().all_reduce("sum", x)
        (first,) = torch.autograd.grad(total**2, x, create_graph=True)
        return torch.autograd.grad(first, x)[0]

    found = strategy.experimental_local_results(
        strategy.run(step, options=torchstrategy.RunOptions(examples=weights))
    )
    # With n replicas of the weights w, backward of the total adds up (w_j / w_i) times
    # what replica j asks for. So the first gradient of replica i is 2 * total * sum(w)
    # / w_i, and its own gradient is n times 2 * sum(w) / w_i.
    expected = [2 * 3 * sum(weights) / weight for weight in weights]
    assert [gradient.item() for gradient in found] == pytest.approx(expected, rel=1e-12)


def test_deques_of_different_length_limits_are_one_result(
    several: torchstrategy.Strategy,
) -> None:
    n = several.num_replicas_in_sync

    def step(rows: torch.Tensor) -> deque[torch.Tensor]:
        return deque([rows.sum()], maxlen=len(rows))

    (batch,) = several.experimental_distribute_dataset([torch.ones(2 * n - 1, 1)])
    assert (
        several.reduce("sum", several.run(step, args=(batch,))[0], axis=None).item()
        == 2 * n - 1
    )


def test_a_function_of_update_non_slot_may_have_an_argument_named_device(
    several: torchstrategy.Strategy,
) -> None:
    devices = several.extended.worker_devices[:1]
    assert (
        several.extended.update_non_slot(
            devices, lambda device: device, kwargs={"device": 5}
        )
        == 5
    )


def test_one_value_is_reduced_by_the_users_reduce_implementation() -> None:
    class Counting(torchstrategy.ReductionToOneDevice):
        calls: list[str]

        def reduce_implementation(self, *args: Any) -> Any:
            self.calls.append("reduce")
            return super().reduce_implementation(*args)

        def batch_reduce_implementation(self, *args: Any) -> Any:
            self.calls.append("batch_reduce")
            return super().batch_reduce_implementation(*args)

    operations = Counting()
    operations.calls = []
    strategy = torchstrategy.MirroredStrategy(
        ["cpu", "cpu"], cross_device_ops=operations
    )
    value = strategy.run(lambda: torch.ones(()))
    operations.calls.clear()
    assert strategy.reduce("sum", value, axis=None).item() == 2
    assert operations.calls[:1] == ["reduce"]


def test_a_scope_cannot_be_left_on_another_thread() -> None:
    scope = torchstrategy.get_strategy().scope()
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            scope.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(error)

    with scope:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert len(errors) == 1 and "Scope nesting error" in str(errors[0])
