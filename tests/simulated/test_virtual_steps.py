"""Reports, pictures and files of virtual time know the steps of a program.

They know what it waits for in each.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from round_numbers import PROFILE, US
from torchstrategy.testing import (
    DeviceProfile,
    VirtualTrace,
    run_ranks,
    simulated_devices,
    step,
    virtual_time,
)
from torchstrategy.testing._virtual_time.step_times import Steps, steps_of

SIM = simulated_devices()
SVG = "{http://www.w3.org/2000/svg}"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.second(self.first(inputs).relu())
        return outputs


def train(steps: int = 4) -> None:
    model = Net().to(SIM[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        inputs = torch.ones(8, 64).to(SIM[0])
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()


def steps(trace: VirtualTrace) -> Steps:
    found = steps_of(trace._timeline())
    assert found is not None
    return found


@pytest.fixture(scope="module")
def trained() -> VirtualTrace:
    with virtual_time("H100-SXM") as trace:
        train()
    return trace


# Where steps end


def test_a_step_ends_with_that_of_the_optimizer(trained: VirtualTrace) -> None:
    found = steps(trained)
    assert len(trained._clock.ends) == 4 and len(found.times) == 3 and found.has_first
    assert found.set_up + sum(
        time.seconds for time in found.times
    ) + found.after == pytest.approx(trained.seconds)
    assert found.times[0].seconds == pytest.approx(found.times[1].seconds)


def test_set_up_is_not_counted(trained: VirtualTrace) -> None:
    whole, typical = trained.device(0), steps(trained).typical()
    # The model came in meanwhile, and nothing was computed.
    assert typical.devices[0].mfu > whole.mfu
    assert typical.seconds < steps(trained).set_up


def test_what_a_step_is_made_of_adds_up(trained: VirtualTrace) -> None:
    for time in steps(trained).times:
        device = time.devices[0]
        assert device.computes + device.exposed + device.idle == pytest.approx(
            time.seconds
        )
        assert 0 < device.computes < time.seconds and device.copies > 0
        assert time.waits_while_idle + time.waits_while_busy < time.seconds


def test_where_there_is_no_optimizer_the_program_says_it() -> None:
    x = torch.ones(1000, device=SIM[0])
    with virtual_time(PROFILE) as trace:
        for _ in range(3):
            x.add_(1)
            torch.accelerator.synchronize()
            step()
    assert len(trace._clock.ends) == 3
    # 10 us to launch it, and 3 us and 8,000 bytes.
    assert [time.seconds for time in steps(trace).times] == pytest.approx(
        [21 * US, 21 * US]
    )


def test_to_say_it_beside_an_optimizer_changes_nothing() -> None:
    weight = nn.Parameter(torch.ones(10, device=SIM[0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with virtual_time(PROFILE) as trace:
        for _ in range(3):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            step()
    assert len(trace._clock.ends) == 3
    step()  # and outside of a block, nothing at all
    assert len(trace._clock.ends) == 3


def test_two_optimizers_make_one_step_together() -> None:
    weights = [nn.Parameter(torch.ones(10, device=SIM[0])) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    with virtual_time(PROFILE) as trace:
        for _ in range(3):
            for weight, optimizer in zip(weights, optimizers, strict=True):
                weight.grad = torch.ones_like(weight)
                optimizer.step()
    assert len(trace._clock.ends) == 3


def test_a_mark_tells_the_first_step_from_set_up() -> None:
    x = torch.ones(1000, device=SIM[0])
    with virtual_time(PROFILE) as trace:
        torch.ones(10, device=SIM[0]).add_(1)
        torch.accelerator.synchronize()
        trace.mark()
        for _ in range(2):
            x.add_(1)
            step()
    found = steps(trace)
    assert not found.has_first and len(found.times) == 2
    assert trace.report().splitlines()[2].startswith("  set-up: ")


def test_a_program_of_two_steps_or_less_has_none_to_show() -> None:
    with virtual_time("H100-SXM") as trace:
        train(2)
    assert steps_of(trace._timeline()) is None
    assert (
        "set-up" not in trace.report()
        and "Predicted to be faster" not in trace.report()
    )


def test_of_ranks_the_steps_of_the_first_count() -> None:
    def main(rank: int) -> None:
        torch.distributed.init_process_group("nccl")
        x = torch.ones(1000, device=SIM[rank])
        for _ in range(3):
            torch.distributed.all_reduce(x)
            x.mul_(0.5)
            step()

    with virtual_time(PROFILE) as trace:
        run_ranks(main, 2)
    found = steps(trace)
    assert len(trace._clock.ends) == 3 and set(found.typical().devices) == {0, 1}
    for device in found.typical().devices.values():
        assert device.exposed > device.computes > 0


# Waits that matter


def test_a_wait_while_the_device_computes_costs_nothing() -> None:
    x, number = torch.ones(25_000, device=SIM[0]), torch.ones(1, device=SIM[0])
    with virtual_time(PROFILE) as trace:
        x.add_(1)  # from 10 to 213 us
        number.item()  # the program waits from 20 us on; its copy takes until 218 us
    (wait,) = trace._timeline().waits()
    assert (wait.seconds, wait.idle) == (pytest.approx(198 * US), pytest.approx(5 * US))
    assert (
        "193.0 us" not in trace.report()
        and "5.0 us of it while its device is idle" in trace.report()
    )


def test_a_wait_while_the_device_is_idle_comes_first() -> None:
    x, number, batch = (
        torch.ones(25_000, device=SIM[0]),
        torch.ones(1, device=SIM[0]),
        torch.ones(10_000),
    )
    with virtual_time(PROFILE) as trace:
        x.add_(1)
        number.item()
        batch.to(SIM[0])  # 40,000 bytes and 5 us: 85 us, while nothing computes
    first, second = trace._timeline().waits()
    assert first.why.startswith(
        "a copy to"
    ) and first.idle == first.seconds == pytest.approx(85 * US)
    assert second.seconds > first.seconds
    assert re.search(
        r"85\.0 us at test_virtual_steps\.py:\d+: a copy to .* pinned, while its "
        r"device is idle",
        str(trace),
    )


# What an operator is a part of


def test_an_operator_is_of_the_forward_of_backward_or_of_the_optimizer(
    trained: VirtualTrace,
) -> None:
    phases: dict[str, set[str]] = {}
    for span in trained._clock.spans:
        if span.kind == "compute":
            phases.setdefault(span.phase, set()).add(span.name)
    assert set(phases) == {"forward", "backward", "optimizer"}
    assert {"addmm", "relu"} <= phases["forward"] and "addmm" not in phases[
        "backward"
    ] | phases["optimizer"]
    assert {"mm", "threshold_backward"} <= phases["backward"]
    assert all(name.startswith("_foreach_") for name in phases["optimizer"])
    assert {
        span.users_function for span in trained._clock.spans if span.name == "relu"
    } <= {"Net.forward", "forward"}


def test_what_is_called_from_an_optimizer_and_in_backward_is_told_apart() -> None:
    weight = nn.Parameter(torch.ones(10, device=SIM[0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step_in_backward(parameter: torch.Tensor) -> None:
        optimizer.step()

    with virtual_time(PROFILE) as trace:
        (weight * 2).sum().backward()
        nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.zero_grad(set_to_none=False)
        handle = weight.register_post_accumulate_grad_hook(step_in_backward)
        (weight * 2).sum().backward()
        handle.remove()
        weight.detach().cos()
    phases = {(span.name, span.phase) for span in trace._clock.spans}
    assert (
        ("cos", "forward") in phases
        and ("sum", "forward") in phases
        and ("mul", "backward") in phases
    )
    by_optimizer = {name for name, phase in phases if phase == "optimizer"}
    assert {"zero_"} <= by_optimizer and any("norm" in name for name in by_optimizer)
    assert any("add_" in name for name in by_optimizer), by_optimizer


# Pictures and files


def drawn(trace: VirtualTrace, folder: Path) -> ElementTree.Element:
    trace.save(folder / "timeline.svg")
    return ElementTree.parse(folder / "timeline.svg").getroot()


def texts(picture: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]


def test_the_first_lane_of_a_picture_is_when_the_gpu_is_idle(
    trained: VirtualTrace, tmp_path: Path
) -> None:
    picture = drawn(trained, tmp_path)
    lanes = [text for text in texts(picture) if re.match(r"host$|sim:0", text)]
    share = 1 - trained.device(0).busy / trained.seconds
    assert lanes[0] == f"sim:0 is idle for {share:.0%} of the time"
    assert lanes[1:5] == [
        "host",
        "sim:0, forward",
        "sim:0, backward",
        "sim:0, optimizer",
    ]
    idle = [bar for bar in picture.iter(f"{SVG}rect") if bar.get("class") == "bar idle"]
    width = sum(float(bar.get("width", "")) for bar in idle)
    assert width == pytest.approx(share * (960 - 2 * 16), rel=0.1)


def test_a_picture_has_the_steps_and_says_on_its_bars_how_long_the_gpu_is_idle(
    tmp_path: Path,
) -> None:
    # So it waits long, and seldom.
    with virtual_time(replace(DeviceProfile.named("H100-SXM"), launch=2e-6)) as trace:
        train()
    picture = drawn(trace, tmp_path)
    assert {"set-up and step 1", "step 2", "step 3", "step 4"} <= set(texts(picture))
    labels = [text for text in picture.iter(f"{SVG}text") if text.get("class") == "in"]
    assert any((label.text or "").startswith("idle ") for label in labels)


def test_many_operators_in_a_row_say_which_and_in_which_function(
    tmp_path: Path,
) -> None:
    x = torch.ones(10, device=SIM[0])

    def smooth() -> None:
        for _ in range(1000):
            x.add_(1).mul_(0.5)

    with virtual_time(PROFILE) as trace:
        smooth()
    picture = drawn(trace, tmp_path)
    titles = [bar.findtext(f"{SVG}title") or "" for bar in picture.iter(f"{SVG}rect")]
    assert any(
        re.search(r"in a row, .* together: (add_, mul_|mul_, add_), in smooth$", title)
        for title in titles
    )


def test_a_file_for_perfetto_has_phases_and_functions(
    trained: VirtualTrace, tmp_path: Path
) -> None:
    trained.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {
        event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert {"forward", "backward", "optimizer"} <= names
    relu = next(event for event in events if event["name"] == "relu")
    assert relu["args"]["phase"] == "forward" and relu["args"]["function"].endswith(
        "forward"
    )
