"""Simulated devices: how a process gets them.

What they then do is tested in tests/simulated.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import torchstrategy.testing
from conditions import for_changes, for_releases
from processes import python
from torchstrategy.testing import _simulation

ROOT = Path(__file__).resolve().parents[3]

runs_here = pytest.mark.skipif(
    bool(_simulation.why_not_simulated()), reason=str(_simulation.why_not_simulated())
)
is_plain = pytest.mark.skipif(
    bool(torchstrategy.testing.simulated_devices()),
    reason="begins without simulated devices: run pytest without --simulate-devices",
)


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own, in which warnings are errors."""
    lines = ["import torch", "import torchstrategy.testing as testing", program]
    return python("-W", "error", "-c", "\n".join(lines), folder=ROOT)


@pytest.mark.parametrize("count", [0, -1, 65, 10**9])
def test_a_count_that_makes_no_sense_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"simulate_devices\\({count}\\).* 1 to 64"):
        torchstrategy.testing.simulate_devices(count)


@pytest.mark.parametrize("count", [True, 2.0, "2", None, torch.tensor(2)], ids=str)
def test_a_count_that_is_no_number_is_refused(count: Any) -> None:
    with pytest.raises(TypeError, match="takes a number of devices"):
        torchstrategy.testing.simulate_devices(count)


@for_releases
@is_plain
def test_an_older_torch_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_simulation, "register_python_backend", None)
    with pytest.raises(RuntimeError, match="or newer, and this is"):
        torchstrategy.testing.simulate_devices(2)
    assert torchstrategy.testing.simulated_devices() == []


@is_plain
def test_another_device_type_from_outside_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_simulation, "privateuse1_name", lambda: "npu")
    with pytest.raises(RuntimeError, match="'npu' has taken it"):
        torchstrategy.testing.simulate_devices(2)


@is_plain
def test_an_alias_of_no_devices_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"call torchstrategy.testing.simulate_devices\(n\) first"
    ):
        torchstrategy.testing.cuda_alias().__enter__()
    assert not hasattr(torch, "sim")


@for_changes
@runs_here
def test_importing_the_library_simulates_nothing() -> None:
    done = run_program(
        "before = torch.Tensor.to, torch.tensor, torch.Generator, "
        "torch.accelerator.device_count\n"
        "import torchstrategy, torchstrategy.testing._simulation\n"
        "assert (torch.Tensor.to, torch.tensor, torch.Generator, "
        "torch.accelerator.device_count) == before\n"
        "assert torch.Tensor.to is torch._C.TensorBase.to and not hasattr(torch, "
        "'sim')\n"
        "assert torch.utils.backend_registration._privateuse1_backend_name == "
        "'privateuseone'\n"
        "assert testing.simulated_devices() == []\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


@for_changes
@runs_here
def test_the_same_count_may_be_asked_for_again_and_another_may_not() -> None:
    done = run_program(
        "first = testing.simulate_devices(2)\n"
        "assert testing.simulate_devices(2) == first == testing.simulated_devices()\n"
        "first.clear()\n"
        "assert len(testing.simulated_devices()) == 2\n"
        "testing.simulate_devices(3)\n"
    )
    assert (
        "RuntimeError: simulate_devices(3): this process simulates 2 devices"
        in done.stderr
    )


@for_changes
@runs_here
def test_one_device_is_enough_and_the_last_one_is_the_last() -> None:
    done = run_program(
        "print(testing.simulate_devices(1), torch.ones(2, device='sim') + "
        "1)\ntorch.ones(1, device='sim:1')\n",
    )
    assert (
        done.stdout
        == "[device(type='sim', index=0)] tensor([2., 2.], device='sim:0')\n"
    )
    assert "sim error: invalid device ordinal" in done.stderr


@for_changes
@runs_here
def test_a_process_ends_cleanly_with_work_graphs_and_cycles_alive() -> None:
    done = run_program(
        "import threading\n"
        "testing.simulate_devices(3)\n"
        "x = torch.ones(3, device='sim:1', requires_grad=True)\n"
        "y = (x * 2).sum()\n"
        "class Holder: pass\n"
        "holder = Holder(); holder.me = holder; holder.all = [x, y, "
        "torch.Generator('sim:2'), torch.sim.Stream(1)]\n"
        "def work():\n"
        "    for _ in range(50): (torch.ones(2, device='sim:2', requires_grad=True) * "
        "2).sum().backward()\n"
        "threading.Thread(target=work).start()\n"
        "torch.set_default_device('sim:2')\n"
        "testing.cuda_alias().__enter__()\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@for_releases
@runs_here
def test_a_spawned_process_is_sent_tensors_if_it_simulates_devices_too(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch.multiprocessing as multiprocessing\n"
        "import torchstrategy.testing as testing\n"
        "def work(inbox, outbox):\n"
        "    try: inbox.get()\n"
        "    except RuntimeError as error: outbox.put(str(error))\n"
        "    testing.simulate_devices(3)\n"
        "    outbox.put(str(inbox.get()))\n"
        "if __name__ == '__main__':\n"
        "    testing.simulate_devices(3)\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    inbox, outbox = context.SimpleQueue(), context.SimpleQueue()\n"
        "    for _ in range(2): inbox.put(torch.ones(2, device='sim:2'))\n"
        "    process = context.Process(target=work, args=(inbox, outbox))\n"
        "    process.start()\n"
        "    for _ in range(2): print(outbox.get())\n"
        "    process.join()\n"
    )
    without, with_devices = python(
        str(program), folder=ROOT, PYTHONPATH=str(ROOT)
    ).stdout.splitlines()
    assert (
        "Call torchstrategy.testing.simulate_devices(3), or more, in it as well"
        in without
    )
    assert with_devices == "tensor([1., 1.], device='sim:2')"


@for_changes
@runs_here
def test_a_spawned_process_is_given_a_model(tmp_path: Path) -> None:
    """Starting it failed with `bad value(s) in fds_to_keep`.

    Two weights were sent by one file descriptor.
    """
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch.multiprocessing as multiprocessing\n"
        "import torchstrategy.testing as testing\n"
        "testing.simulate_devices(2)\n"
        "def work(model, outbox):\n"
        "    outbox.put([str(weight.detach()) for weight in model.parameters()])\n"
        "if __name__ == '__main__':\n"
        "    model = torch.nn.Linear(2, 1).to('sim:1')\n"
        "    for weight in model.parameters(): weight.data.fill_(weight.dim())\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    outbox = context.SimpleQueue()\n"
        "    process = context.Process(target=work, args=(model, outbox))\n"
        "    process.start()\n"
        "    print(outbox.get())\n"
        "    process.join()\n"
    )
    done = python(str(program), folder=ROOT, PYTHONPATH=str(ROOT))
    shown = ["tensor([[2., 2.]], device='sim:1')", "tensor([1.], device='sim:1')"]
    assert done.stdout == f"{shown}\n", done.stderr


@for_changes
@runs_here
def test_a_strategy_that_ran_before_devices_were_simulated_goes_on() -> None:
    # What device types have autocast was read once, when theirs had another name.
    done = run_program("""
import torchstrategy
strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
strategy.run(lambda: torch.ones(2))
testing.simulate_devices(2)
strategy.run(lambda: torch.ones(2))
strategy = torchstrategy.MirroredStrategy(["sim:0", "sim:1"])
with torch.autocast("sim", dtype=torch.float16):
    products = strategy.run(lambda: torch.ones(2, 2) @ torch.ones(2, 2))
print({product.dtype for product in products.values})
""")
    assert (done.returncode, done.stdout) == (0, "{torch.float16}\n"), done.stderr
