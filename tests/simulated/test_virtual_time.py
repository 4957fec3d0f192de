"""Virtual time: steps, memory, shapes, determinism, costs, and what is put back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy
from problems import data, deal, mlp, mse, sgd
from torchstrategy.testing import (
    DeviceProfile,
    Lockstep,
    VirtualTrace,
    record_streams,
    simulated_devices,
    virtual_time,
)

SIM = simulated_devices()
A100 = DeviceProfile.named("A100-SXM-80GB")
# What the strategy does on the CPU takes no time.
OF_DEVICES = replace(A100, cpu_operator=0.0, cpu_bandwidth=1e9)
NAMES = (
    "A100-SXM-80GB",
    "A100-SXM-40GB",
    "H100-SXM",
    "H200-SXM",
    "V100-SXM-16GB",
    "RTX-4090",
    "L4",
)


def timed(
    call: Callable[[], object], profile: DeviceProfile = A100, shapes_only: bool = False
) -> VirtualTrace:
    with virtual_time(profile, shapes_only) as trace:
        call()
    return trace


def seconds_of(call: Callable[[], object], profile: DeviceProfile = A100) -> float:
    """How long the last operator of a call takes."""
    return timed(call, profile, shapes_only=True)._clock.spans[-1].seconds


# Costs


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_computes_at_most_at_its_peak(name: str) -> None:
    profile = DeviceProfile.named(name)
    a = torch.empty(4096, 4096, device=SIM[0], dtype=torch.float16)
    trace = timed(lambda: a @ a, profile, shapes_only=True)
    (span,) = trace._clock.spans
    assert span.flops == 2 * 4096**3
    assert profile.matmul * 0.8 < span.at_peak / span.seconds < 1
    large = torch.empty(2**26, device=SIM[0])
    assert (
        0.5
        < 2
        * large.nbytes
        / (profile.bandwidth * 1e9)
        / seconds_of(lambda: large.exp(), profile)
        < 1
    )


def test_tensor_cores_are_used_if_the_program_says_so() -> None:
    a = torch.empty(4096, 4096, device=SIM[0])
    plain = seconds_of(lambda: a @ a)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        fast = seconds_of(lambda: a @ a)
    finally:
        torch.set_float32_matmul_precision(before)
    half = a.bfloat16()
    assert plain / fast > 5
    assert fast > 1.5 * seconds_of(lambda: half @ half)


def test_a_product_of_sizes_that_do_not_divide_is_slower() -> None:
    even, odd = (
        torch.empty(2048, n, device=SIM[0], dtype=torch.bfloat16) for n in (1024, 1023)
    )
    assert seconds_of(lambda: odd @ odd.T) > 1.5 * seconds_of(lambda: even @ even.T)


def test_channels_last_is_faster_where_there_are_tensor_cores() -> None:
    inputs = torch.empty(32, 64, 56, 56, device=SIM[0], dtype=torch.float16)
    weight = torch.empty(64, 64, 3, 3, device=SIM[0], dtype=torch.float16)
    last = inputs.to(memory_format=torch.channels_last)
    assert seconds_of(lambda: F.conv2d(last, weight)) < seconds_of(
        lambda: F.conv2d(inputs, weight)
    )


def test_attention_as_one_kernel_is_faster_than_taken_apart() -> None:
    q = torch.empty(8, 12, 1024, 64, device=SIM[0], dtype=torch.bfloat16)
    fused = timed(
        lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        shapes_only=True,
    )
    apart = timed(lambda: (q @ q.transpose(-1, -2)).softmax(-1) @ q, shapes_only=True)
    assert len(fused._clock.spans) == 1 and fused.seconds < apart.seconds / 2
    # Half of two products.
    assert fused.device(0).flops == 2 * 8 * 12 * 1024 * 1024 * 64


def test_an_operator_on_lists_is_a_launch_for_many_tensors() -> None:
    tensors = [torch.zeros(10, device=SIM[0]) for _ in range(50)]
    others = [torch.zeros(10, device=SIM[0]) for _ in range(50)]
    many = timed(lambda: [tensor.add_(1.0) for tensor in tensors])
    assert len(many._clock.spans) == 50
    for call in (
        lambda: torch._foreach_add_(tensors, 1.0),
        lambda: torch._foreach_copy_(tensors, others),
    ):
        one = timed(call)
        assert len(one._clock.spans) == 1 and one.seconds < many.seconds / 10


# Shapes only


def small_transformer() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(1000, 128), layer, nn.Linear(128, 1000)).to(
        SIM[0]
    )
    return (
        model,
        torch.optim.AdamW(model.parameters()),
        torch.randint(1000, (8, 64), device=SIM[0]),
    )


def train(steps: int = 3) -> list[float]:
    model, optimizer, tokens = small_transformer()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_shapes_only_takes_the_same_virtual_time_and_memory() -> None:
    computed, shaped = timed(train), timed(train, shapes_only=True)
    # The first copies of the losses are of small tensors, and both wait for the same
    # operators.
    assert shaped._clock.spans == computed._clock.spans
    assert shaped.device(0) == computed.device(0)


def test_shapes_only_computes_what_is_small_and_nothing_else() -> None:
    with virtual_time(A100, shapes_only=True):
        small = torch.ones(3, device=SIM[0]) * 2
        large = torch.ones(200, 200, device=SIM[0])
        (large * 2).add_(1)
        total = large.sum()
        rounds = torch.zeros(1, device=SIM[0]).add_(1)
        assert small.tolist() == [2, 2, 2] and rounds.item() == 1
        assert total.item() == 0  # not 40,000: nobody added it up
    assert (torch.ones(200, 200, device=SIM[0])).sum().item() == 40_000


def test_a_model_that_would_not_fit_here_needs_no_memory() -> None:
    """Eight tensors of 4 GiB."""
    resident = memory_here()
    with virtual_time("H100-SXM", shapes_only=True) as trace:
        tensors = [torch.zeros(2**30, device=SIM[0]) for _ in range(4)]
        results = [tensor.exp() for tensor in tensors]
    assert trace.device(0).peak_bytes >= 32 * 2**30
    assert memory_here() - resident < 2**28
    del tensors, results


def memory_here() -> int:
    pages = Path("/proc/self/statm")
    if not pages.exists():
        pytest.skip("only Linux says how much memory a process has")
    return int(pages.read_text().split()[1]) * 4096


# Memory


def test_what_does_not_fit_raises() -> None:
    tiny = replace(
        A100,
        name="a tiny one",
        memory=torch.accelerator.memory_allocated(SIM[0]) + 2**20,
    )
    with (
        virtual_time(tiny),
        pytest.raises(
            torch.OutOfMemoryError, match=r"sim:0 is out of memory: .* a tiny one has"
        ),
    ):
        torch.zeros(2**19, device=SIM[0])
    before = torch.accelerator.memory_allocated(SIM[0])
    with virtual_time(tiny):
        for _ in range(5):
            torch.zeros(2**17, device=SIM[0])  # half of it each, and free again
    assert torch.accelerator.memory_allocated(SIM[0]) == before


def test_peaks_are_those_of_a_step() -> None:
    before = torch.accelerator.memory_allocated(SIM[0])
    with virtual_time(A100) as trace:
        for size in (1000, 100_000, 10):
            trace.mark()
            torch.zeros(size, device=SIM[0])
    peaks = [trace.step(i).device(0).peak_bytes - before for i in range(3)]
    assert peaks == [4000, 400_000, 40]
    assert trace.device(0).peak_bytes - before == 400_000


# Steps


def test_steps_are_from_mark_to_mark() -> None:
    x = torch.zeros(1000, device=SIM[0])
    with virtual_time(A100) as trace:
        x.add_(1)
        for count in (2, 5):
            trace.mark()
            for _ in range(count):
                x.add_(1)
                x[0].item()
    assert [len(trace.step(i).synchronizations) for i in (0, 1)] == [2, 5]
    assert len(trace.synchronizations) == 7
    assert trace.step(-1).seconds == trace.step(1).seconds > 2 * trace.step(0).seconds
    first = trace.seconds - trace.step(0).seconds - trace.step(1).seconds
    assert first == pytest.approx(A100.launch)
    with pytest.raises(
        IndexError,
        match=r"There is no step 2: the program said trace\.mark\('step'\) 2 times",
    ):
        trace.step(2)


# The same again


def run_of_two_replicas() -> VirtualTrace:
    strategy = torchstrategy.MirroredStrategy(SIM[:2])
    with strategy.scope():
        torch.manual_seed(0)
        model = mlp()
        optimizer = sgd(model)

    def step(batch: object) -> torch.Tensor:
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        optimizer.step()
        return torchstrategy.get_replica_context().all_reduce("mean", loss.detach())

    with virtual_time("A100-SXM-80GB") as trace:
        for seed in range(2):
            strategy.run(step, args=(deal(strategy, data(7, seed=seed)),))
    return trace


def everything(trace: VirtualTrace) -> object:
    clock = trace._clock
    return (
        clock.spans,
        clock.copies,
        clock.synchronizations,
        clock.cpu_work,
        trace.seconds,
        trace.report(),
    )


def test_two_runs_are_equal_to_the_last_digit(tmp_path: Path) -> None:
    first, second = timed(train), timed(train)
    assert everything(first) == everything(second)
    for name in ("timeline.svg", "trace.json"):
        first.save(tmp_path / f"first-{name}")
        second.save(tmp_path / f"second-{name}")
        assert (tmp_path / f"first-{name}").read_bytes() == (
            tmp_path / f"second-{name}"
        ).read_bytes()


def test_replicas_on_two_devices_take_the_same_time_in_every_run() -> None:
    first = everything(run_of_two_replicas())
    assert all(everything(run_of_two_replicas()) == first for _ in range(10))


def test_replicas_share_pythons_lock_and_begin_together() -> None:
    strategy = torchstrategy.MirroredStrategy(SIM[:2])
    tensors = [torch.zeros(10, device=device) for device in SIM[:2]]

    def step() -> None:
        tensors[torchstrategy.get_replica_context().replica_id_in_sync_group].add_(1)

    strategy.run(step)
    trace = timed(lambda: strategy.run(step), OF_DEVICES)
    adds = [span for span in trace._clock.spans if span.name == "add_"]
    assert [span.device for span in adds] == [0, 1]
    assert [span.start for span in adds] == pytest.approx([2 * A100.launch] * 2)
    assert trace.seconds == pytest.approx(2 * A100.launch + adds[0].seconds)


def test_a_replica_that_waits_goes_on_when_the_last_one_has_come() -> None:
    strategy = torchstrategy.MirroredStrategy(SIM[:2])
    tensors = [torch.zeros(10, device=device) for device in SIM[:2]]

    def step() -> None:
        context = torchstrategy.get_replica_context()
        mine = tensors[context.replica_id_in_sync_group]
        for _ in range(9 if context.replica_id_in_sync_group else 1):
            mine.add_(1)
        context.merge_call(lambda strategy: None)
        mine.mul_(2)

    trace = timed(lambda: strategy.run(step), OF_DEVICES)
    starts = {(span.device, span.name): span.start for span in trace._clock.spans}
    assert starts[0, "mul_"] == starts[1, "mul_"] == pytest.approx(20 * A100.launch)


def test_two_that_give_turns_are_refused_by_name() -> None:
    strategy = torchstrategy.MirroredStrategy(SIM[:2])
    with (
        virtual_time(A100),
        Lockstep([1, 0]),
        pytest.raises(RuntimeError, match=r"^virtual_time\(\) and Lockstep"),
    ):
        strategy.run(lambda: None)


# The block


def test_the_programs_clock_answers_if_it_is_asked_for() -> None:
    x = torch.zeros(10, device=SIM[0])
    functions = time.time, time.perf_counter, time.monotonic
    with virtual_time(A100, program_clock=True):
        before = time.perf_counter(), time.time()
        for _ in range(1000):
            x.add_(1)
        assert time.perf_counter() - before[0] == pytest.approx(1000 * A100.launch)
        assert time.time() - before[1] == pytest.approx(1000 * A100.launch, abs=1e-5)
    assert (time.time, time.perf_counter, time.monotonic) == functions


def test_the_numbers_of_a_training_are_those_without_the_block() -> None:
    plain = train()
    with virtual_time("V100-SXM-16GB"), record_streams():
        assert train() == plain


def test_what_cannot_be_is_refused() -> None:
    with (
        pytest.raises(
            ValueError,
            match=r"There is no profile 'H1000'\. Choose from 'A100-SXM-80GB'",
        ),
        virtual_time("H1000"),
    ):
        raise AssertionError("not reached")
    with (
        pytest.raises(
            TypeError, match=r"takes the name of a GPU or a DeviceProfile; got 3"
        ),
        virtual_time(3),
    ):  # type: ignore[arg-type]
        raise AssertionError("not reached")
    with (
        virtual_time("L4"),
        pytest.raises(RuntimeError, match=r"^virtual_time\(\) is at work already"),
        virtual_time("L4"),
    ):
        raise AssertionError("not reached")


def test_a_size_that_depends_on_numbers_is_waited_for() -> None:
    x = torch.arange(10.0, device=SIM[0])
    waits = {
        "nonzero": lambda: x.nonzero(),
        "a mask": lambda: x[x > 3],
        "masked_select": lambda: x.masked_select(x > 3),
        "equal": lambda: torch.equal(x, x + 0),
    }
    for name, call in waits.items():
        assert len(timed(call).synchronizations) == 1, name
    indices = torch.tensor([1, 2], device=SIM[0])
    assert timed(lambda: x[indices]).synchronizations == []


@pytest.mark.parametrize("of", ["inputs", "weight"])
def test_channels_stay_last_where_only_shapes_are_computed(of: str) -> None:
    images = torch.zeros(8, 16, 64, 64, device=SIM[0])
    convolution = torch.nn.Conv2d(16, 32, 3, device=SIM[0])
    if of == "inputs":
        images = images.contiguous(memory_format=torch.channels_last)
    else:
        convolution.to(memory_format=torch.channels_last)
    with virtual_time("A100", shapes_only=True), torch.no_grad():
        made = convolution(images)
    assert (
        made.is_contiguous(memory_format=torch.channels_last)
        and made.stride() == convolution(images).stride()
    )
