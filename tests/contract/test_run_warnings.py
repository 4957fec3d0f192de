"""What a run warns of besides writes on shared tensors.

Buffers that lose something, batches nobody dealt out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from conditions import needs_simulated_devices
from problems import data, deal, mlp, mse, replica_id, sgd
from topologies import compute_devices
from torchstrategy.testing import count_traffic
from warned_of import messages_of

BUFFERS, PLAIN = (
    torchstrategy.ReplicaBufferWarning,
    torchstrategy.UndistributedBatchWarning,
)


# Buffers


class Queue(nn.Module):
    """MoCo's: each step puts its rows into a queue, in the place of the oldest."""

    def __init__(self, gathers: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 2, dtype=torch.float64)
        self.register_buffer("queue", torch.zeros(40, 2, dtype=torch.float64))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self._gathers = gathers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.encoder(x)
        rows = keys.detach()
        if self._gathers:
            rows = context().all_gather(rows, axis=0)
        self.queue[int(self.pointer) : int(self.pointer) + len(rows)] = rows
        self.pointer.add_(len(rows))
        return keys


class Codebook(nn.Module):
    """Moving averages of what is nearest to each code.

    They have a name of their own, and are put in place of the old.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.ones(4, 3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes = self.codes * 0.9 + 0.1 * x.mean(0)
        return x


def context() -> torchstrategy.ReplicaContext:
    found = torchstrategy.get_replica_context()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("make", "name"), [(Queue, "Queue.queue"), (Codebook, "Codebook.codes")]
)
def test_a_buffer_of_which_replicas_lose_rows_is_warned_of_once(
    several: torchstrategy.Strategy, make: Callable[[], nn.Module], name: str
) -> None:
    """A queue kept the rows of replica 0 and lost all others, silently."""
    with several.scope():
        module = make()

    def run() -> None:
        several.run(
            lambda batch: module(batch[0]).detach(), args=(deal(several, data(12)),)
        )

    texts = messages_of(BUFFERS, lambda: [run() for _ in range(4)])
    assert [text.split()[2] for text in texts] == [name]
    assert "all_gather(rows, axis=0)" in texts[0]
    with several.scope():
        # Copies are made anew, and the old buffer is not warned of again.
        other = make()
    assert messages_of(BUFFERS, run) == []
    module = other
    assert len(messages_of(BUFFERS, run)) == 1


def test_the_warning_of_a_buffer_is_at_the_users_line(
    in_one_place: torchstrategy.Strategy,
) -> None:
    with in_one_place.scope():
        queue = Queue()
    with pytest.warns(BUFFERS) as caught:
        in_one_place.run(
            lambda batch: queue(batch[0]).detach(), args=(deal(in_one_place, data(8)),)
        )
    assert {warning.filename for warning in caught} == {__file__}


def test_rows_that_are_gathered_are_those_of_plain_pytorch(
    several: torchstrategy.Strategy,
) -> None:
    with several.scope():
        queue = Queue(gathers=True)
    plain = Queue()
    plain.load_state_dict(queue.state_dict())
    for k in range(3):
        batch = data(7, seed=k)
        several.run(
            lambda batch: queue(batch[0]).detach(), args=(deal(several, batch),)
        )
        plain(batch[0])
    torch.testing.assert_close(queue.queue.cpu(), plain.queue)
    assert int(queue.pointer) == int(plain.pointer) == 21


class Counters(nn.Module):
    """What is not warned of.

    Counts of steps, statistics that are averaged, one writer, what follows the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.spectral = nn.utils.parametrizations.spectral_norm(
            nn.Linear(3, 3, dtype=torch.float64)
        )
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("running_mean", torch.zeros(()))
        self.register_buffer("of_the_first", torch.zeros(()))
        self.register_buffer("not_a_number", torch.tensor(float("nan")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.running_mean = x.mean().float()
        self.not_a_number *= 1
        if replica_id() == 0:
            self.of_the_first.add_(1)
        return self.spectral(self.norm(x))


def test_other_buffers_are_not_warned_of(several: torchstrategy.Strategy) -> None:
    with several.scope():
        model = Counters()
    assert (
        messages_of(
            BUFFERS,
            lambda: [train_with(several, model, data(8, seed=k)) for k in range(3)],
        )
        == []
    )


def train_with(strategy: torchstrategy.Strategy, model: nn.Module, batch: Any) -> None:
    strategy.run(
        lambda batch: model(batch[0]).sum().backward(), args=(deal(strategy, batch),)
    )


def test_statistics_of_the_first_replica_on_request_are_not_warned_of() -> None:
    strategy = torchstrategy.CentralStorageStrategy(
        compute_devices(2), buffer_aggregation="only_first_replica"
    )
    with strategy.scope():
        norm = nn.BatchNorm1d(3, dtype=torch.float64)
    assert messages_of(BUFFERS, lambda: train_with(strategy, norm, data(8))) == []


def test_rows_that_data_parallel_loses_are_warned_of() -> None:
    model = torchstrategy.DataParallel(
        Codebook().to(compute_devices(2)[0]), compute_devices(2)
    )
    with pytest.warns(BUFFERS, match=r"Codebook\.codes") as caught:
        model(data(8)[0])
    assert caught[0].filename == __file__
    assert messages_of(BUFFERS, lambda: model(data(8)[0])) == []


@needs_simulated_devices  # on the CPU nothing is sent
def test_comparing_ends() -> None:
    """Numbers of accelerators that are compared need a wait: not in each run."""
    devices = compute_devices(2)
    strategy = torchstrategy.CentralStorageStrategy(devices, devices[0])
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), Counters())
    batch = deal(strategy, data(8))

    def copies() -> int:
        with count_traffic() as traffic:
            strategy.run(lambda batch: model(batch[0]).detach(), args=(batch,))
        return traffic.copies

    counts = [copies() for _ in range(7)]
    assert counts[2] == counts[4] == counts[5] == counts[6] < counts[3]


# Batches


def made(strategy: torchstrategy.Strategy) -> tuple[nn.Module, torch.optim.Optimizer]:
    with strategy.scope():
        model = mlp()
        optimizer = sgd(model)
    return model, optimizer


def here(batch: Any) -> Any:
    device = torch.get_default_device()
    return [tensor.to(device) for tensor in batch]


BATCHES: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "batch": lambda: ((data(6),), {}),
    "two": lambda: (data(6), {}),
    "dict": lambda: (({"x": data(6)[0], "y": data(6)[1]},), {}),
    "keywords": lambda: ((), {"x": data(6)[0], "y": data(6)[1]}),
}


def rows_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = kwargs or (args[0] if len(args) == 1 else args)
    return here(given.values() if isinstance(given, dict) else given)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("updates", [True, False])
def test_a_plain_batch_is_warned_of_once(
    several: torchstrategy.Strategy, kind: str, updates: bool
) -> None:
    """A batch of the loader that was not distributed was done by each replica.

    That is n times the work, silently.
    """
    model, optimizer = made(several)

    def step(*args: Any, **kwargs: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        mse(model, rows_in(args, kwargs)).backward()
        if updates:
            optimizer.step()

    args, kwargs = BATCHES[kind]()
    (text,) = messages_of(
        PLAIN, lambda: [several.run(step, args, kwargs) for _ in range(3)]
    )
    assert (
        f"each of the {several.num_replicas_in_sync} replicas computed with all rows"
        in text
    )
    assert "experimental_distribute_dataset(loader)" in text


def test_the_warning_of_a_batch_is_at_the_users_line(
    in_one_place: torchstrategy.Strategy,
) -> None:
    model, _ = made(in_one_place)
    with pytest.warns(PLAIN) as caught:
        in_one_place.run(
            lambda batch: mse(model, here(batch)).backward(), args=(data(6),)
        )
    assert caught[0].filename == __file__


def test_other_plain_tensors_are_not_warned_of(several: torchstrategy.Strategy) -> None:
    """Noise and masks beside a batch, scalars, evaluation, and replicas' own values.

    Rows are chosen by the id, too.
    """
    model, optimizer = made(several)
    batch, plain = deal(several, data(6)), data(6)
    mask, rate = torch.ones(2, dtype=torch.float64), torch.tensor(0.1)
    ids = several.experimental_distribute_values_from_function(
        lambda c: c.replica_id_in_sync_group
    )

    def train(batch: Any, *others: Any) -> None:
        mse(model, here(batch)).backward()
        optimizer.step()

    def evaluate(batch: Any) -> torch.Tensor:
        return model(here(batch)[0]).detach()

    def with_own_rows(batch: Any) -> None:
        train([tensor[replica_id() :: 4] for tensor in batch])

    def calls() -> None:
        several.run(train, args=(batch, mask))
        several.run(lambda rate: train(plain), args=(rate,))
        several.run(evaluate, args=(plain,))
        several.run(lambda own, batch: train(batch), args=(ids, plain))
        several.run(with_own_rows, args=(plain,))
        several.run(lambda x: x * 3, args=(torch.ones(3),))
        several.run(lambda: train(plain))

    assert messages_of(PLAIN, calls) == []


def test_a_lone_replica_may_have_a_plain_batch(
    strategy: torchstrategy.Strategy,
) -> None:
    if strategy.num_replicas_in_sync == 1:
        model, _ = made(strategy)
        assert (
            messages_of(
                PLAIN,
                lambda: strategy.run(
                    lambda b: mse(model, here(b)).backward(), args=(data(6),)
                ),
            )
            == []
        )
