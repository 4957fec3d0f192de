"""Workers with one replica each, on accelerators: the numbers of plain PyTorch.

Nobody waits for the device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchstrategy
from conditions import for_changes
from sharded_ranks import trained_in_shards, trained_plainly
from torchstrategy.testing import DeviceProfile, record_streams, run_ranks, virtual_time
from torchstrategy.testing._ranks.groups import RankGroup
from workers import exact_steps
from workers.trainings import Net, batches, cross_entropy

BACKENDS = ["nccl", "cuda:nccl,cpu:gloo"]
Results = list[torch.Tensor]


@pytest.fixture(autouse=True)
def rules_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group, as with NCCL and gloo, refuses a device for which it has no backend.

    It refuses the device's tensors.
    """
    meet = RankGroup._meet

    def checked(
        self: RankGroup,
        kind: str,
        shown: Sequence[torch.Tensor],
        *args: Any,
        **options: Any,
    ) -> Any:
        taken = dict(
            part.split(":") for part in dist.get_backend_config(self).split(",")
        )
        for tensor in shown:
            assert tensor.device.type in taken, (
                f"No backend type associated with device type {tensor.device.type}"
            )
            assert taken[tensor.device.type] == "gloo" or (
                tensor.is_contiguous() and not tensor.is_complex()
            )
        return meet(self, kind, shown, *args, **options)

    monkeypatch.setattr(RankGroup, "_meet", checked)


def strategy_here(
    backend: str = "nccl", is_simulated: bool = True
) -> torchstrategy.MultiWorkerMirroredStrategy:
    """That of a rank."""
    dist.init_process_group(backend)
    device = f"sim:{dist.get_rank()}" if is_simulated else "cpu"
    return torchstrategy.MultiWorkerMirroredStrategy(devices=[device])


def in_workers(
    train: Callable[[torchstrategy.Strategy], Results], count: int, *args: Any
) -> list[Results]:
    """What each worker comes to."""
    return run_ranks(
        lambda rank: [value.cpu() for value in train(strategy_here(*args))], count
    )[0]


# Numbers


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("size", [1, math.inf], ids=["sent early", "sent in the end"])
@pytest.mark.parametrize(
    "program",
    [
        exact_steps.cleared_here_and_there,
        exact_steps.assigned,
        exact_steps.assigned_from_the_batch,
        exact_steps.unused_by_some,
        exact_steps.sparse_and_dense,
        exact_steps.checkpointed_reentrant,
        exact_steps.group_added_later,
        exact_steps.complex_numbers,
        exact_steps.channels_last,
        pytest.param(exact_steps.line_search, marks=pytest.mark.slow),
    ],
    ids=lambda program: program.__name__,
)
def test_steps_compute_the_numbers_of_plain_torch(
    program: exact_steps.Program, size: float, count: int
) -> None:
    """Some batches have other numbers of rows for each worker, some none for one."""
    plain = exact_steps.come_to(torchstrategy.get_strategy(), program)
    with exact_steps.large_from(size):
        found = in_workers(
            lambda strategy: exact_steps.come_to(strategy, program),
            count,
            BACKENDS[count % 2],
        )
    for one in found:
        assert exact_steps.differ(one, plain) < exact_steps.LOOSE.get(
            program.__name__, 1e-12
        )
        assert exact_steps.differ(one, found[0]) == 0


@pytest.mark.parametrize("count", [2, 3])
def test_a_model_in_shards_has_the_numbers_of_plain_torch(count: int) -> None:
    for found in run_ranks(trained_in_shards, count)[0]:
        torch.testing.assert_close(found, trained_plainly(), rtol=1e-12, atol=1e-14)


def trained(
    strategy: torchstrategy.Strategy,
    make: Callable[[], nn.Module],
    sizes: Sequence[int] = (8, 8, 3),
) -> Results:
    """Parameters and buffers after some steps."""
    torch.manual_seed(0)
    with strategy.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    for batch in strategy.experimental_distribute_dataset(batches(sizes)):
        strategy.run(step, args=(batch,))
    return [value.detach() for value in model.state_dict().values()]


def counting_no_batches() -> nn.Module:
    """torch's kernels write its running statistics, and nothing counts the writes."""
    norm = nn.BatchNorm1d(8)
    norm.num_batches_tracked = None
    return Net(norm)


@pytest.mark.parametrize(
    "make",
    [lambda: Net(nn.BatchNorm1d(8)), counting_no_batches],
    ids=["usual", "uncounted"],
)
def test_batch_norm_is_as_on_the_cpu(make: Callable[[], nn.Module]) -> None:
    train = partial(trained, make=make, sizes=(8, 8, 4))
    on_cpu, on_devices = in_workers(train, 2, "gloo", False), in_workers(train, 2)
    torch.testing.assert_close(on_devices, on_cpu, rtol=1e-12, atol=1e-12)


def test_dropout_is_that_of_as_many_replicas_in_one_process() -> None:
    train = partial(trained, make=lambda: Net(dropout=0.5), sizes=(8,))
    in_one = [
        value.cpu()
        for value in train(torchstrategy.MirroredStrategy(["sim:0", "sim:1"]))
    ]
    for found in in_workers(train, 2):
        torch.testing.assert_close(found, in_one, rtol=1e-12, atol=1e-12)


def test_half_precision_is_added_up_in_half_precision() -> None:
    def halved(strategy: torchstrategy.Strategy) -> Results:
        with strategy.scope():
            model = Net().bfloat16()

        def step(batch: Any) -> None:
            cross_entropy(model, batch[0].bfloat16(), batch[1]).backward()

        for batch in strategy.experimental_distribute_dataset(batches((8,))):
            strategy.run(step, args=(batch,))
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = halved(torchstrategy.get_strategy())
    for found in in_workers(halved, 2):
        torch.testing.assert_close(found, plain, rtol=0.05, atol=0.01)


def test_a_scaler_skips_the_step_of_all_where_one_worker_overflows() -> None:
    def scaled(strategy: torchstrategy.Strategy) -> Results:
        scaler = torch.amp.GradScaler("sim", init_scale=2.0**10)
        with strategy.scope():
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            scaler.scale(cross_entropy(model, *batch)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

        data = batches((8, 8, 8))
        data[1][0][0, 0] = math.inf
        for batch in strategy.experimental_distribute_dataset(data):
            strategy.run(step, args=(batch,))
        return [
            *(p.detach() for p in model.parameters()),
            torch.tensor(scaler.get_scale(), device="cpu"),
        ]

    plain = [v.cpu() for v in scaled(torchstrategy.OneDeviceStrategy("sim:0"))]
    assert plain[-1] == 2.0**9
    for found in in_workers(scaled, 2):
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


# Waits


class Large(nn.Module):
    """Two layers whose gradients are sent while backward goes on.

    There are statistics, random numbers and a count, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = (
            nn.Linear(4, 300),
            nn.BatchNorm1d(300),
            nn.Dropout(0.3),
        )
        self.middle = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300))
        self.last = nn.Linear(300, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return self.last(self.drop(self.middle(self.norm(self.first(x)).relu())))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def capturable(model: nn.Module) -> torch.optim.Optimizer:
    rate = torch.tensor(0.01, device=next(model.parameters()).device)
    return torch.optim.Adam(model.parameters(), lr=rate, capturable=True)


def updates(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor
) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def accumulates(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor
) -> None:
    loss.backward(retain_graph=True)
    # Within it, the default device is still that of the program.
    torch.autograd.backward([loss])


def steps_with_closure(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor
) -> None:
    loss.backward()
    optimizer.step(lambda: loss)  # type: ignore[arg-type,return-value]


def assigns(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor
) -> None:
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def waits_of_a_warm_step(
    count: int,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    what: Callable[..., None],
) -> list[Counter[str]]:
    """What some workers wait for, and what each copies from its device.

    It is plain PyTorch if there is one.
    """
    sizes, found = (8, 8, 6, 8, 5), []

    def main(rank: int) -> tuple[int, int]:
        device, seen = torch.device("sim", rank), (0, 0)
        strategy = (
            strategy_here() if count > 1 else torchstrategy.OneDeviceStrategy(device)
        )
        data = batches(sizes)
        with strategy.scope(), torch.device(device):
            model = Large()
            optimizer = make(model)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            what(model, optimizer, cross_entropy(model, batch[0].float(), batch[1]))

        for batch in strategy.experimental_distribute_dataset(data):
            seen = len(trace.synchronizations), len(trace.copies)
            with torch.device(device):
                strategy.run(step, args=(batch,))
        return seen

    with virtual_time("H100") as trace:
        results, _ = run_ranks(main, count)
    for rank, (first, first_copy) in enumerate(results):
        syncs = [
            one.why
            for one in trace.synchronizations[first:]
            if one.host == f"rank {rank}"
        ]
        found.append(
            Counter(
                syncs
                + [
                    c.route
                    for c in trace.copies[first_copy:]
                    if c.route.startswith("sim")
                ]
            )
        )
    return found


@pytest.mark.parametrize("make", [adamw, capturable])
@pytest.mark.parametrize("what", [updates, accumulates, steps_with_closure, assigns])
def test_a_warm_step_waits_for_no_device(
    make: Callable[[nn.Module], torch.optim.Optimizer], what: Callable[..., None]
) -> None:
    """What it waits for is in the memory of the CPU.

    That is the mark of an exchange, and the message before a sum.
    """
    (plain,) = waits_of_a_warm_step(1, make, what)
    assert not plain
    of_cpu = {"a all_reduce of ranks", "a all_gather of ranks"}
    for waits in waits_of_a_warm_step(2, make, what):
        assert waits.keys() <= of_cpu
        if what is updates:
            assert waits == {"a all_reduce of ranks": 1}


def counted_on_devices(kind: str) -> None:
    """A loss that is a mean over targets waits for no device.

    Each worker has other targets.
    """
    sizes, found = (8, 8, 8, 8), []

    def main(rank: int) -> tuple[int, int, list[torch.Tensor]]:
        device, seen = torch.device("sim", rank), 0
        strategy = strategy_here()
        with strategy.scope(), torch.device(device):
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            of_valid(kind, model, *batch).backward()
            optimizer.step()

        for batch in strategy.experimental_distribute_dataset(valid_batches(sizes)):
            seen = len(trace.synchronizations)
            with torch.device(device):
                strategy.run(
                    step,
                    args=(batch,),
                    options=torchstrategy.RunOptions(gradient_reduction="loss"),
                )
        end = len(trace.synchronizations)
        return seen, end, [p.detach().cpu() for p in model.parameters()]

    with virtual_time("H100") as trace:
        results, _ = run_ranks(main, 2)
    torch.manual_seed(0)
    plain = Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in valid_batches(sizes):
        optimizer.zero_grad()
        of_valid(kind, plain, *batch).backward()
        optimizer.step()
    for rank, (first, end, parameters) in enumerate(results):
        torch.testing.assert_close(
            parameters, [p.detach() for p in plain.parameters()], rtol=1e-12, atol=1e-13
        )
        found.append(
            Counter(
                one.why
                for one in trace.synchronizations[first:end]
                if one.host == f"rank {rank}"
            )
        )
    assert all(waits.keys() <= {"a all_reduce of ranks"} for waits in found), found


def of_valid(
    kind: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    if kind == "targets":
        return nn.functional.cross_entropy(model(x), y)
    losses, mask = nn.functional.cross_entropy(model(x), y, reduction="none"), y != -100
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def valid_batches(sizes: Sequence[int]) -> list[Any]:
    """In the second batch, a worker has no valid target."""
    made = batches(sizes)
    for k, (_, y) in enumerate(made):
        y[: (3, 4, 1, 2)[k % 4]] = -100
    return made


@pytest.mark.parametrize("kind", ["targets", "mask"])
@pytest.mark.parametrize("size", [1, math.inf], ids=["sent early", "sent in the end"])
def test_a_loss_that_is_counted_waits_for_no_device(kind: str, size: float) -> None:
    with exact_steps.large_from(size):
        counted_on_devices(kind)


def test_the_streams_of_a_training_do_not_race() -> None:
    def main(rank: int) -> None:
        trained(strategy_here(), lambda: Net(nn.BatchNorm1d(8)), (8, 8, 4))

    with record_streams() as record, exact_steps.large_from(1):
        run_ranks(main, 2)
    assert not record.races


@for_changes
@pytest.mark.slow
def test_sending_exposes_no_more_than_ddp_does(
    monkeypatch: pytest.MonkeyPatch, contests: Any
) -> None:
    import exposed
    from networks import GPT2

    make, profile = partial(GPT2, width=256, layers=2), DeviceProfile.named("H100")
    found = exposed.exposed_of(2, make, (8, 1024), profile)
    assert 0 < found[exposed.OURS] <= min(found[exposed.DDP], found[exposed.VIEWS])
