"""Parts of torch that look at devices in ways of their own.

TorchScript, fake tensors, DTensor's random numbers.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from conditions import for_changes
from torchstrategy.testing import simulated_devices

SIM = simulated_devices()

PROGRAMS = {
    "TorchScript compiles functions that make tensors": """
        def made(x: torch.Tensor):
            return x + torch.tensor(1.0) + torch.as_tensor(2.0)
        assert torch.jit.script(made)(torch.ones(1)).item() == 4
    """,
    "optimizers of several processes can be imported": "import torch.distributed.optim",
    "a DTensor draws other numbers for each shard, and the same ones for copies": """
        import torch.distributed as dist
        from torch.distributed import tensor
        from torch.distributed.device_mesh import DeviceMesh
        from torch.testing._internal.distributed.fake_pg import FakeStore

        def draw(rank):
            dist.init_process_group("cpu:fake,sim:fake", store=FakeStore(), rank=rank, world_size=4)
            torch.sim.set_device(rank)
            mesh = DeviceMesh("sim", torch.arange(4))
            torch.manual_seed(3)
            tensor._random._rng_tracker = None
            made = [
                tensor.randn(8, 2, device_mesh=mesh, placements=[placement]).to_local().cpu()
                for placement in (tensor.Shard(0), tensor.Replicate(), tensor.Replicate())
            ]
            made.append(torch.randn(4, device="sim").cpu())
            dist.destroy_process_group()
            return [tuple(values.flatten().tolist()) for values in made]

        shards, copies, later, plain = zip(*map(draw, range(4)))
        assert len(set(shards)) == 4 and [len(set(s)) for s in (copies, later, plain)] == [1, 1, 1]
        assert copies[0] != later[0]
        assert draw(2)[0] == shards[2]
    """,  # noqa: E501
}


@for_changes
@pytest.mark.parametrize("what", PROGRAMS)
def test_a_program_runs_where_devices_are_simulated(what: str, tmp_path: Path) -> None:
    beginning = (
        "import torch\nfrom torchstrategy.testing import "
        "simulate_devices\nsimulate_devices(4)\n"
    )
    (tmp_path / "program.py").write_text(beginning + textwrap.dedent(PROGRAMS[what]))
    command = [sys.executable, "-W", "ignore", str(tmp_path / "program.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_fake_tensor_is_on_the_device_that_is_current_each_time() -> None:
    with FakeTensorMode():
        for index in (1, 2, 1):
            with torch.accelerator.device_index(index):
                made = [
                    torch.empty(2, device="sim"),
                    torch.zeros(2, device="sim"),
                    torch.ones(2).to("sim"),
                ]
            assert [tensor.device for tensor in made] == [SIM[index]] * 3


def test_a_counted_state_leads_to_the_same_numbers_again() -> None:
    state = torch.tensor([5, 8]).view(torch.uint8)
    draws = []
    before = torch.sim.get_rng_state(SIM[1])
    for _ in range(2):
        torch.sim.set_rng_state(state, SIM[1])
        draws.append(torch.rand(3, device=SIM[1]).tolist())
    torch.sim.set_rng_state(torch.tensor([5, 12]).view(torch.uint8), SIM[1])
    draws.append(torch.rand(3, device=SIM[1]).tolist())
    torch.sim.set_rng_state(before, SIM[1])
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(torch.sim.get_rng_state(SIM[1]), before)
