"""`torch.nn.parallel.comm` on simulated devices is like torch's C++.

Sizes, formats, views and streams are.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.parallel import comm

from torchstrategy.testing import record_streams, simulated_devices

SIM = simulated_devices()


@pytest.mark.parametrize("source", ["cpu", SIM[0]], ids=str)
@pytest.mark.parametrize("sizes", [None, [7, 3]])
def test_scatter_keeps_the_format(source: object, sizes: list[int] | None) -> None:
    x = torch.randn(10, 3, 8, 8, device=source).contiguous(
        memory_format=torch.channels_last
    )  # type: ignore[call-overload]
    parts = comm.scatter(x, (0, 1), sizes)
    assert all(part.is_contiguous(memory_format=torch.channels_last) for part in parts)
    assert [part.device for part in parts] == SIM[:2]
    assert torch.equal(torch.cat([part.cpu() for part in parts]), x.cpu())


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_part_that_stays_on_its_device_is_a_view(dim: int) -> None:
    x = torch.randn(4, 6, device=SIM[0])
    here, there = comm.scatter(x, (0, 1), dim=dim)
    assert here.data_ptr() == x.data_ptr() and here._base is x
    assert torch.equal(torch.cat([here.cpu(), there.cpu()], dim), x.cpu())


def test_scatter_copies_on_the_streams_that_it_is_given() -> None:
    streams = [torch.Stream(device=device) for device in SIM[:2]]
    with record_streams() as record:
        parts = comm.scatter(torch.ones(4).pin_memory(), (0, 1), streams=streams)
        for stream, part in zip(streams, parts, strict=True):
            part.record_stream(stream)
            stream.synchronize()
    launches = [
        (event.device, event.stream)
        for event in record.events
        if event.what == "launch"
    ]
    assert launches == [(stream.device_index, stream.stream_id) for stream in streams]


def test_scatter_gather_and_broadcast_write_where_they_are_told() -> None:
    x = torch.arange(24.0).view(4, 6).to(SIM[0])
    out = [torch.empty(1, 6, device=SIM[0]), torch.empty(3, 6, device=SIM[1])]
    parts = comm.scatter(x, out=out)
    assert parts[0] is out[0] and parts[1] is out[1]
    assert torch.equal(out[1].cpu(), x[1:].cpu())
    whole = torch.empty(4, 6, device=SIM[2])
    assert comm.gather(out, out=whole) is whole
    assert torch.equal(whole.cpu(), x.cpu())
    copies = [torch.empty(4, 6, device=device) for device in SIM[1:3]]
    assert comm.broadcast(x, out=copies)[0] is copies[0]
    assert all(torch.equal(copy.cpu(), x.cpu()) for copy in copies)
    wide = [torch.empty(4, 2, device=SIM[0]), torch.empty(4, 4, device=SIM[1])]
    comm.scatter(x, out=wide, dim=-1)
    assert torch.equal(wide[1].cpu(), x[:, 2:].cpu())


def test_gather_keeps_the_format_that_all_parts_have() -> None:
    parts = [
        torch.randn(2, 3, 4, 4, device=device).to(memory_format=torch.channels_last)
        for device in SIM[:2]
    ]
    assert comm.gather(parts, destination=SIM[0]).is_contiguous(
        memory_format=torch.channels_last
    )
    assert comm.gather(
        [parts[0], parts[1].contiguous()], destination=SIM[0]
    ).is_contiguous()
    on_cpu = comm.gather(parts, destination="cpu")
    assert on_cpu.device.type == "cpu" and torch.equal(on_cpu[2:], parts[1].cpu())


WRONG: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "too few rows": (
        lambda x: comm.scatter(x, out=[torch.empty(1, 6, device=SIM[0])]),
        r"have 1 rows along dimension 0, and the tensor has 4",
    ),
    "another width": (
        lambda x: comm.scatter(x, out=[torch.empty(4, 5, device=SIM[0])]),
        r"scatter\(out=\.\.\.\), part 0, has the size \(4, 5\)",
    ),
    "the CPU": (
        lambda x: comm.scatter(x, out=[torch.empty(4, 6)]),
        r"part 0, is on cpu: it has to be on one of the",
    ),
    "nowhere": (lambda x: comm.scatter(x, out=[]), r"has nowhere to write"),
    "a gather that is too small": (
        lambda x: comm.gather([x, x], out=torch.empty(4, 6, device=SIM[0])),
        r"the tensors have 8 rows along dimension 0, and `out` has 4",
    ),
    "a broadcast of another size": (
        lambda x: comm.broadcast(x, out=[torch.empty(6, 4, device=SIM[0])]),
        r"broadcast\(out=\.\.\.\), tensor 0, has the size \(6, 4\)",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused(what: str) -> None:
    call, message = WRONG[what]
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(4, 6, device=SIM[0]))
