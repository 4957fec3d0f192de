"""`python -m torchstrategy.testing.run`: public programs run untouched.

The report says what they did.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from conditions import for_changes, for_releases
from processes import LEAN, NO_ACCELERATOR, python
from torchstrategy.testing import RankRecord
from torchstrategy.testing._runner.comparison import differences
from torchstrategy.testing._runner.observer import Observations
from torchstrategy.testing._runner.report import Report

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ROOT / "tests" / "programs"
RUN = ("-W", "ignore", "-m", "torchstrategy.testing.run")


def run(
    folder: Path, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Runs a program; returns what it printed, and the numbers of the report."""
    file = folder / "report.json"
    done = python(
        *RUN, "--json", str(file), *arguments, folder=folder, **NO_ACCELERATOR
    )
    return done, json.loads(file.read_text()) if file.exists() else {}


# Programs: what they are called with, a line that they print, and what the report says

UNTOUCHED: dict[str, tuple[list[str], list[str], str, dict[str, Any]]] = {
    "one_epoch.py": ([], [], r"Test set: Average loss", {"steps": 4}),
    "data_parallel.py": ([], [], "=> using DataParallel on 4 GPUs", {"steps": 4}),
    "mixed_precision.py": ([], [], r"loss \d.* MB", {"steps": 4}),
    "gan.py": ([], ["--ngpu", "2"], "Loss_D", {"steps": 3}),
    "rnn.py": ([], [], "ppl", {"steps": 0}),
    "vae.py": ([], [], "Epoch: 4 Average loss", {"steps": 8}),
    "prefetcher.py": (
        ["--strict"],
        [],
        "ms on simulated device 1",
        {"steps": 4, "races": []},
    ),
    "spawned_ddp.py": ([], ["."], "rank 3 of 4 is on cuda:3", {"steps": 1}),
    "own_data_parallel.py": (["--ranks", "4"], [], "Rank  3 , epoch  1", {"steps": 4}),
    "torchrun_ddp.py": (
        ["--ranks", "4"],
        ["2", "1"],
        "Epoch 1 | Training snapshot",
        {"steps": 4},
    ),
    "tensor_parallel.py": (["--ranks", "4"], [], "iter 2 completed", {"steps": 3}),
    "fsdp_checkpoints.py": (
        ["--ranks", "4"],
        ["--folder", "dcp"],
        "step 1: ",
        {"steps": 2},
    ),
}


@for_changes
@pytest.mark.parametrize("name", UNTOUCHED)
def test_a_public_program_runs_untouched(name: str, tmp_path: Path) -> None:
    options, arguments, printed, reported = UNTOUCHED[name]
    done, report = run(
        tmp_path,
        "--devices",
        "4",
        "--as-cuda",
        *options,
        str(PROGRAMS / name),
        *arguments,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(printed.replace("|", r"\|"), done.stdout), done.stdout
    assert {key: report[key] for key in reported} == reported
    assert f"{name}: " in done.stderr and "exit status 0" in done.stderr


@for_changes
def test_a_program_in_a_package_runs_with_m_and_stops_where_it_is_told(
    tmp_path: Path,
) -> None:
    options = ("--as-cuda", "--stop-after", "2", "-m", "tests.programs.packaged", "5")
    done, report = run(ROOT, "--json", str(tmp_path / "report.json"), *options)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"] == 2 and done.stdout.count("step ") == 1
    assert {"from": "cuda:0", "to": "cuda:1", "copies": 2, "bytes": 1024} in report[
        "routes"
    ]


@for_releases
def test_lines_that_programs_for_cuda_say_hold(tmp_path: Path) -> None:
    lines = PROGRAMS / "cudaisms.txt"
    done, _ = run(
        tmp_path,
        "--devices",
        "4",
        "--as-cuda",
        str(PROGRAMS / "says_cuda.py"),
        str(lines),
    )
    wrong = done.stdout.splitlines()
    assert len(lines.read_text().splitlines()) == 111
    assert done.returncode == 0 and len(wrong) <= 4, done.stdout


# What is changed, and when


@for_changes
def test_the_type_of_devices_is_touched_by_the_runner_alone() -> None:
    program = """
        import torch
        before, shown = dict(torch.device.__dict__), repr(torch.device("cuda:1"))
        import torchstrategy.testing
        import torchstrategy.testing.run
        assert dict(torch.device.__dict__) == before

        from torchstrategy.testing._runner.deep_alias import deep_alias
        torchstrategy.testing.simulate_devices(2)
        device, constructor, is_cuda = torch.device("sim:1"), torch.device, torch.Tensor.is_cuda
        for _ in range(2):
            with deep_alias():
                assert (device.type, str(device), repr(device)) == ("cuda", "cuda:1", "device(type='cuda', index=1)")
                x = torch.ones(1, device="cuda")
                assert x.is_cuda and x.device == torch.device("cuda", 0) and isinstance(x.device, torch.device)
                assert f"{torch.device('cpu')} {torch.device('meta').type}" == "cpu meta"
            assert (device.type, str(device), repr(device)) == ("sim", "sim:1", "device(type='sim', index=1)")
            assert dict(torch.device.__dict__) == before and torch.device is constructor
            assert torch.Tensor.is_cuda is is_cuda and not x.is_cuda
        assert repr(torch.device("cuda:1")) == shown
    """  # noqa: E501
    done = python("-W", "ignore", "-c", textwrap.dedent(program), **NO_ACCELERATOR)
    assert done.returncode == 0, done.stderr


@for_changes
def test_a_torch_that_was_built_for_cuda_keeps_its_version() -> None:
    """It said 12.8, and torchvision did not let itself be imported.

    Torchvision was built for 13.0 as torch was.
    """
    program = """
        import torch
        import torchstrategy.testing
        from torchstrategy.testing._runner.deep_alias import deep_alias
        torchstrategy.testing.simulate_devices(2)
        built_for = torch.version.cuda
        for version in built_for, None, "13.0":
            torch.version.cuda = version
            with deep_alias():
                assert torch.version.cuda == (version or "12.8")
            assert torch.version.cuda == version
    """
    done = python("-W", "ignore", "-c", textwrap.dedent(program), **NO_ACCELERATOR)
    assert done.returncode == 0, done.stderr


@for_releases
def test_functions_of_torch_that_ask_for_devices_run(tmp_path: Path) -> None:
    program = """
        import torch
        from torch import nn

        class Moves(nn.Module):
            def forward(self, x):
                return x.to("cuda") + torch.ones(2, device=x.device)

        x = torch.ones(3, 2, device="cuda")
        assert torch.func.vmap(lambda row: row * 2)(x).tolist() == [[2, 2]] * 3
        for module, strict in ((Moves(), False), (nn.Softmax(-1), True)):
            exported = torch.export.export(module, (x,), strict=strict).module()
            assert torch.equal(exported(x), module(x))
        assert torch.device(type="cuda", index=0) == x.device
        assert x.to_sparse().cpu().to_dense().sum() == 6

        @torch.library.custom_op("answers::thrice", mutates_args=(), device_types="cuda")
        def thrice(x: torch.Tensor) -> torch.Tensor:
            return x * 3

        thrice.register_autocast("cuda", torch.float16)
        with torch.autocast("cuda"):
            assert thrice(x).dtype == torch.float16
        assert thrice(x).dtype == torch.float32
    """  # noqa: E501
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    done, _ = run(tmp_path, "--devices", "1", "--as-cuda", "program.py")
    assert done.returncode == 0, done.stderr


# Exit status, and what ends a program


@for_changes
@pytest.mark.parametrize(
    ("program", "status", "printed"),
    [
        ("raise SystemExit(7)", 7, "exit status 7"),
        ("raise SystemExit('no GPU is fast enough')", 1, "no GPU is fast enough"),
        (
            "import torch\ntorch.ones(1).cuda() + torch.ones(1).cuda(1)",
            1,
            "Expected all tensors to be on the same device",
        ),
        ("def f(:", 2, "SyntaxError"),
    ],
)
def test_the_exit_status_is_that_of_the_program(
    program: str, status: int, printed: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(program)
    done, _ = run(tmp_path, "program.py")
    assert done.returncode == status, done.stderr
    assert printed in done.stderr


@for_changes
def test_a_race_is_an_exit_status_if_it_is_asked_for(tmp_path: Path) -> None:
    program = str(PROGRAMS / "prefetcher.py")
    done, report = run(tmp_path, program, "--forget")
    assert done.returncode == 0 and report["races"]
    done, _ = run(tmp_path, "--strict", program, "--forget")
    assert done.returncode == 1 and "does not wait for it" in done.stderr


@for_changes
def test_a_write_of_numpy_on_a_buffer_that_is_copied_is_a_race(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "buffer = torch.ones(1024).pin_memory()\n"
        "rows = buffer.numpy()\n"
        "batch = buffer.to('cuda', non_blocking=True)\n"
        "rows[:] = 7\n"
        "batch.sum().item()\n"
    )
    done, report = run(tmp_path, "--strict", "program.py")
    assert done.returncode == 1 and len(report["races"]) == 1
    assert (
        "a copy (program.py:4), on the default stream of cuda:0, reads was written on "
        "the CPU" in done.stderr
    )


@for_changes
def test_memory_may_be_pinned_where_it_is_made(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        """if True:
        import os, torch, torch.distributed as dist
        from torch import nn
        x, pinned = torch.ones(2, 3, 4, 5), dict(pin_memory=True)
        made = [
            torch.empty(4, **pinned), torch.zeros(2, 3, **pinned), torch.ones((), **pinned),
            torch.full((2,), 1.5, **pinned),
            torch.tensor([1, 2], **pinned), torch.rand(3, **pinned), torch.randn(3, **pinned),
            torch.arange(3, **pinned),
            torch.randint(3, (4,), **pinned), torch.eye(3, **pinned), torch.linspace(0, 1, 4, **pinned),
            torch.empty_like(x, **pinned), torch.zeros_like(x, dtype=torch.float16, **pinned),
            torch.rand_like(x, **pinned),
            x.new_empty(3, **pinned), x.new_zeros((2, 2), **pinned), x.new_full((3,), 2, **pinned),
            torch.empty_strided((2, 3), (1, 2), **pinned),
            torch.empty(2, 3, 4, 5, memory_format=torch.channels_last, **pinned),
            torch.zeros_like(torch.ones(3, device="cuda"), device="cpu", **pinned),
        ]
        assert all(tensor.is_pinned() and tensor.is_cpu for tensor in made), [tensor.is_pinned() for tensor in made]
        assert made[1].tolist() == [[0.0] * 3] * 2 and made[4].dtype is torch.int64 and made[13].mean() > 0
        assert made[-3].stride() == (1, 2) and made[-2].is_contiguous(memory_format=torch.channels_last)
        assert made[11].stride() == x.stride() and not torch.empty(4).is_pinned() and not torch.zeros(4).is_pinned()
        assert torch.empty(2, 0, 3).stride() == (3, 3, 1) and torch.empty(0).shape == (0,)

        weight = torch.ones(3, device="cuda", requires_grad=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = weight.square().sum()
        loss.backward()
        assert weight.grad.tolist() == [2, 2, 2]

        dist.init_process_group("nccl")
        rank = dist.get_rank()
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).cuda()
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = layers
            def forward(self, x, index):
                return self.layers[index](x)
        model = nn.parallel.DistributedDataParallel(Model(), device_ids=[rank], find_unused_parameters=True)
        for step in range(2):
            model.zero_grad()
            model(torch.full((1, 2), rank + 1.0, device="cuda"), step).sum().backward()
            assert layers[step].weight.grad.flatten().tolist() == [1.5] * 4
        print("ok")
        """  # noqa: E501
    )
    done, _ = run(tmp_path, "--ranks", "2", "program.py")
    assert done.returncode == 0 and done.stdout == "ok\nok\n", done.stderr


@for_changes
def test_ctrl_c_ends_a_program_with_the_report_so_far(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import torch\ntorch.ones(3).cuda()\nprint('now', flush=True)\nwhile "
        "True:\n    torch.ones(1)\n"
    )
    # Whoever is started in the background of a shell ignores Ctrl-C, and so would the
    # program.
    begin = (
        "import runpy, signal; signal.signal(signal.SIGINT, "
        "signal.default_int_handler); "
    )
    begin += f"runpy.run_module({RUN[-1]!r}, run_name='__main__', alter_sys=True)"
    command = [sys.executable, *RUN[:-2], "-c", begin, "--ranks", "2", "program.py"]
    environment = {**os.environ, **LEAN, **NO_ACCELERATOR, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGINT)
        try:
            _, printed = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 130
    assert (
        "program.py: 0 steps" in printed
        and "cpu -> cuda:0  12 bytes in 1 tensor" in printed
    )


@for_changes
def test_the_report_says_who_waited_where_beside_the_failure(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import argparse\n"
        "import torch\nimport torch.distributed as dist\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', type=int, default=-1)\n"
        "rank = parser.parse_args().local_rank\n"
        "torch.cuda.set_device(rank)\n"
        "dist.init_process_group('nccl')\n"
        "compiled = torch.compile(torch.nn.Linear(2, 2).cuda())\n"
        "if rank == 1:\n"
        "    torch.ones(2, device='cuda:0') + torch.ones(2, device='cuda:1')\n"
        "dist.all_reduce(torch.ones(4, device='cuda'))\n"
    )
    done, report = run(
        tmp_path, "--ranks", "2", "--as-cuda", "--order", "random:3", "program.py"
    )
    assert done.returncode == 1
    waits = "rank 0 waits in all_reduce #1 of 4 float32, sum (program.py:12) for rank 1"
    assert done.stderr.count(waits) >= 1 and report["ranks"]["order"] == "random:3"
    assert [
        (failed["rank"], failed["error"][:12]) for failed in report["ranks"]["failed"]
    ] == [(1, "RuntimeError")]
    assert report["ranks"]["waiting"] == [
        {"rank": 0, "where": waits.removeprefix("rank 0 ")}
    ]
    assert (
        "Order of the ranks: random:3\nRanks that could not go on\n  rank 1 failed: "
        "RuntimeError: " in done.stderr
    )
    # Messages are in the program's words, and have none of our frames.
    assert (
        "cuda:0 and cuda:1" in done.stderr
        and "sim:" not in done.stderr
        and "torchstrategy/testing" not in done.stderr
    )
    assert report["notes"] == [
        "torch.compile was called 2 times for inductor, and ran aot_eager (--compile)",
        (
            "each rank was given --local_rank=RANK, as torch.distributed.launch does; "
            "torchrun sets LOCAL_RANK instead"
        ),
    ]


@for_changes
def test_a_program_without_ranks_is_alone(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "x = torch.ones(2, device='cuda')\n"
        "dist.all_reduce(x)\ndist.barrier()\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, "
        "1).cuda())\n"
        "model(x).sum().backward()\n"
        "print(dist.get_world_size(), x.tolist())\n"
        "dist.destroy_process_group()\n"
        "os.environ['LOCAL_RANK']\n"
    )
    done, report = run(tmp_path, "--compile", "refuse", "program.py")
    assert (
        done.stdout == "1 [1.0, 1.0]\n"
        and report["collectives"]["barrier"]["calls"] == 1
    )
    assert (
        done.returncode == 1
        and "which torchrun sets: run it with --ranks 2." in done.stderr
    )


@for_changes
@pytest.mark.parametrize("spawned", [True, False])
def test_ranks_of_a_program_that_sets_no_seed_draw_other_numbers(
    tmp_path: Path, spawned: bool
) -> None:
    """Each process of `torchrun` has seeds of its own.

    A lint said that all ranks of a program dropped the same.
    """
    (tmp_path / "program.py").write_text(
        "import random, numpy, torch\n"
        "def draw(*_):\n"
        "    draws = (torch.rand, lambda n: torch.rand(n, device='cuda').cpu(), "
        "numpy.random.rand)\n"
        "    print('drawn', random.random(), *(float(draw(1)[0]) for draw in draws))\n"
        "    torch.manual_seed(3)\n"
        "    print('seeded', *(float(draw(1)[0]) for draw in draws[:2]))\n"
        + ("torch.multiprocessing.spawn(draw, nprocs=2)\n" if spawned else "draw()\n")
    )
    done, _ = run(tmp_path, *([] if spawned else ["--ranks", "2"]), "program.py")
    lines = [line.split() for line in done.stdout.splitlines()]
    drawn, seeded = (
        [line[1:] for line in lines if line[0] == word] for word in ("drawn", "seeded")
    )
    assert len(drawn) == 2 and all(
        one != other for one, other in zip(*drawn, strict=True)
    ), drawn
    assert len(seeded) == 2 and seeded[0] == seeded[1]


@for_changes
def test_each_rank_of_a_program_may_start_hydra(tmp_path: Path) -> None:
    """The second rank's `hydra.main` ended: `GlobalHydra is already initialized`."""
    (tmp_path / "hydra" / "core").mkdir(parents=True)
    (tmp_path / "hydra" / "core" / "global_hydra.py").write_text(
        "class GlobalHydra:\n"
        "    one = None\n"
        "    hydra = None\n"
        "    @classmethod\n"
        "    def instance(cls):\n"
        "        cls.one = cls.one or cls()\n"
        "        return cls.one\n"
    )
    (tmp_path / "program.py").write_text(
        "import os, torch.distributed as dist\n"
        "from hydra.core.global_hydra import GlobalHydra\n"
        "assert GlobalHydra.instance().hydra is None\n"
        "GlobalHydra.instance().hydra = os.environ['RANK']\n"
        "dist.init_process_group('nccl')\n"
        "dist.barrier()\n"
        "print('hydra of', os.environ['RANK'], GlobalHydra.instance().hydra)\n"
    )
    done, _ = run(tmp_path, "--ranks", "2", "program.py")
    assert sorted(done.stdout.splitlines()) == ["hydra of 0 0", "hydra of 1 1"], (
        done.stderr
    )


@for_releases
@pytest.mark.parametrize("shared", [True, False])
def test_a_program_whose_processes_share_a_model_is_told_to_use_ranks(
    tmp_path: Path, shared: bool
) -> None:
    """It ended with `bad value(s) in fds_to_keep`, which named no cause.

    It did not say what to do either.
    """
    (tmp_path / "program.py").write_text(
        "import torch, torch.multiprocessing as mp\n"
        "def train(model): print('trains')\n"
        "if __name__ == '__main__':\n"
        "    mp.set_start_method('spawn', force=True)\n"
        f"    model = torch.nn.Linear(2, 1).to('{'cuda' if shared else 'cpu'}')\n"
        "    model.share_memory()\n"
        "    process = mp.Process(target=train, args=(model,))\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    done, _ = run(tmp_path, str(tmp_path / "program.py"))
    assert done.returncode == int(shared) and ("trains" in done.stdout) is not shared, (
        done.stderr
    )
    assert (
        "cannot share a tensor on cuda:0. Let torch.multiprocessing.spawn"
        in done.stderr
    ) is shared


@for_changes
def test_a_program_that_silences_its_ranks_does_not_silence_the_report(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(
        """if True:
        import builtins, os, sys, logging
        import torch, torch.distributed as dist
        dist.init_process_group("nccl")
        if dist.get_rank():
            builtins.print = lambda *args, **kwargs: None
            sys.stdout = sys.stderr = open(os.devnull, "w")
        dist.barrier()
        print("rank", dist.get_rank())
        logging.warning("rank %s warns", dist.get_rank())
        dist.barrier()
        raise ValueError("of all ranks")
        """
    )
    done, _ = run(tmp_path, "--ranks", "2", "program.py")
    assert done.returncode == 1 and done.stdout == "rank 0\n"
    assert "rank 0 warns" in done.stderr and "rank 1 warns" not in done.stderr
    assert "ValueError: of all ranks" in done.stderr and "exit status 1" in done.stderr


@for_changes
@pytest.mark.parametrize("ranks", [[], ["--ranks", "2"]])
@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("import builtins; builtins.print = None", 0),
        ("import sys; sys.stderr.close(); sys.stderr = None", 0),
        ("import os; os.chdir('/')", 0),
        ("import os; os._exit(0)", 0),
        ("import os; os._exit(3)", 3),
        ("import os; os.execv('/bin/true', ['true'])", 1),
    ],
)
def test_no_program_ends_without_a_report(
    program: str, status: int, ranks: list[str], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(program)
    options = ["--json", "report.json", *ranks]  # a folder is that of the start
    done = python(*RUN, *options, "program.py", folder=tmp_path, **NO_ACCELERATOR)
    assert done.returncode == status, done.stderr
    assert (
        f"program.py: 0 steps on 2 simulated devices, exit status {status}"
        in done.stderr
    )
    assert json.loads((tmp_path / "report.json").read_text())["status"] == status
    assert (
        "os.execv" not in program
        or "Start what it starts with torchstrategy.testing.run" in done.stderr
    )


@for_changes
def test_a_report_that_cannot_be_written_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('ran')")
    done = python(
        *RUN,
        "--json",
        "missing/report.json",
        "program.py",
        folder=tmp_path,
        **NO_ACCELERATOR,
    )
    assert done.returncode == 1 and done.stdout == "ran\n"
    assert (
        "the report could not be written: " in done.stderr
        and "missing/report.json" in done.stderr
    )


@for_changes
def test_a_collective_that_nobody_waits_for_is_found_in_a_program(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(
        "import torch\nimport torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "x = torch.ones(4, device='cuda')\n"
        "work = dist.all_reduce(x, async_op=True)\n"
    )
    done, _ = run(tmp_path, "--ranks", "2", "program.py")
    assert done.returncode == 1
    assert (
        "never waited for all_reduce #1 of 4 float32, sum (program.py:5)" in done.stderr
    )


@for_changes
def test_each_rank_finds_the_classes_of_its_script_where_pickle_looks(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(
        "import torch.distributed as dist\n"
        "class Found:\n    pass\n"
        "dist.init_process_group('nccl')\n"
        "found = [None] * 3\n"
        "dist.all_gather_object(found, Found())\n"
        "assert all(type(thing) is Found for thing in found)\n"
    )
    done, _ = run(tmp_path, "--ranks", "3", "program.py")
    assert done.returncode == 0, done.stderr


@for_changes
def test_shards_of_a_tensor_draw_other_numbers_on_each_rank(tmp_path: Path) -> None:
    """torch draws them by another way on devices that say that they are CUDA's."""
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "x = distribute_tensor(torch.zeros(4, 3, device='cuda'), "
        "init_device_mesh('cuda', (2,)), [Shard(0)])\n"
        "torch.nn.init.normal_(x)\n"
        "assert len(set(x.full_tensor().flatten().tolist())) == 12\n"
    )
    done, _ = run(tmp_path, "--ranks", "2", "--as-cuda", "program.py")
    assert done.returncode == 0, done.stderr


@for_changes
def test_a_rank_that_waits_for_ever_is_named(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os\nimport torch.distributed as dist\ndist.init_process_group('nccl')\n"
        "if os.environ['RANK'] == '0':\n    dist.barrier()\n"
    )
    done, report = run(tmp_path, "--ranks", "2", "program.py")
    assert done.returncode == 1
    assert "rank 0 waits in barrier #1 (program.py:5) for rank 1" in done.stderr
    assert report["collectives"] == {}


@for_changes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "No such file or directory: 'missing.py'"),
        (
            ["-m", "a_module_that_is_missing"],
            "No module named 'a_module_that_is_missing' that could be run",
        ),
        (["--devices", "0", "program.py"], "'0' is not 1 or more"),
        (["--profile", "Z80", "program.py"], "There is no profile 'Z80'"),
        (["--shapes-only", "program.py"], "--shapes-only needs --profile"),
        (["--trace", "here", "program.py"], "--trace needs --profile"),
    ],
)
def test_what_cannot_be_run_is_a_usage_error(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    done, report = run(tmp_path, *arguments)
    assert done.returncode == 2 and message in done.stderr and not report


# The report


def test_the_report_and_its_json_have_the_same_numbers() -> None:
    seen = Observations(
        steps=2,
        bytes_by_route=Counter({("cpu", "sim:0"): 20_000_000, ("sim:0", "cpu"): 8}),
        copies_by_route=Counter({("cpu", "sim:0"): 3, ("sim:0", "cpu"): 1}),
        blocking_copies=Counter({f"train.py:{line}": line for line in range(1, 8)}),
        pageable_copies=Counter({"train.py:7": 2, "train.py:8": 0}),
        synchronizations=Counter({("a number is read", "train.py:9"): 5}),
    )
    report = Report(
        "train.py", 0, seen, [123, 9_999_999], ["one race"], RankRecord(), "cuda"
    )
    assert str(report) == (
        "train.py: 2 steps on 2 simulated devices, exit status 0\n"
        "Copies\n"
        "  cpu -> cuda:0  19.07 MiB in 3 tensors\n"
        "  cuda:0 -> cpu  8 bytes in 1 tensor\n"
        "  28 block the program: train.py:7 (7), train.py:6 (6), train.py:5 (5), "
        "train.py:4 (4), train.py:3 (3),  and 2 more lines\n"
        "  2 are from or to pageable memory: train.py:7 (2)\n"
        "Waits of the program for a device: 5, 2.5 a step\n"
        "      5  a number is read  train.py:9\n"
        "Peak memory\n"
        "  cuda:0  123 bytes\n"
        "  cuda:1  9.54 MiB\n"
        "Collectives of all ranks\n"
        "Races: 1\n"
        "  one race"
    )
    assert report.as_json() == {
        "program": "train.py",
        "status": 0,
        "devices": 2,
        "steps": 2,
        "routes": [
            {"from": "cpu", "to": "cuda:0", "copies": 3, "bytes": 20_000_000},
            {"from": "cuda:0", "to": "cpu", "copies": 1, "bytes": 8},
        ],
        "blocking_copies": {f"train.py:{line}": line for line in range(7, 0, -1)},
        "pageable_copies": {"train.py:7": 2},
        "synchronizations": [
            {"why": "a number is read", "line": "train.py:9", "times": 5}
        ],
        "peak_bytes": {"cuda:0": 123, "cuda:1": 9_999_999},
        "races": ["one race"],
        "notes": [],
        "findings": [],
        "collectives": {},
        "ranks": {"order": None, "failed": [], "waiting": []},
        "predicted": None,
    }


# Times

MEASURED = """
import os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl")
model = DistributedDataParallel(torch.nn.Linear(4096, 4096, device="cuda"), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    start = time.perf_counter()
    optimizer.zero_grad()
    model(torch.ones(4096, 4096, device="cuda")).mean().backward()
    optimizer.step()
    torch.cuda.synchronize()
    if rank == 0:
        print(time.perf_counter() - start)
"""  # noqa: E501


@for_changes
def test_a_profile_predicts_times_on_the_programs_own_clock_too(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(MEASURED)
    options = (
        "--ranks",
        "2",
        "--profile",
        "A100",
        "--shapes-only",
        "--trace",
        "deep/timeline",
    )
    done, report = run(tmp_path, *options, "program.py")
    assert done.returncode == 0, done.stderr
    predicted = report["predicted"]
    printed = [float(line) for line in done.stdout.split()]
    assert predicted["profile"] == "A100-SXM-80GB"
    assert predicted["steps"] == pytest.approx(printed[1:], rel=0.01)
    assert predicted["steps"][0] == pytest.approx(predicted["steps"][1], rel=0.1)
    assert sum(printed) < predicted["seconds"]

    # The text has the same numbers.
    step, without = predicted["typical_step"], predicted["without_set_up"]
    assert step["seconds"] == sorted(predicted["steps"])[1]
    assert (
        f"set-up, with the first step: {1e3 * predicted['set_up']:.2f} ms"
        in done.stderr
    )
    assert f"a step takes {1e3 * step['seconds']:.2f} ms" in done.stderr
    for name, device in step["devices"].items():
        busy, mfu = without["busy"][name] / without["seconds"], without["mfu"][name]
        assert (
            f"{name}: computes {busy:.0%} of the time of the steps, MFU {mfu:.1%}"
            in done.stderr
        )
        assert f"{1e3 * device['computes']:.2f} ms computing" in done.stderr
        assert device["computes"] + device["exposed"] + device["idle"] == pytest.approx(
            step["seconds"]
        )
    assert len(predicted["each_step"]) == len(predicted["steps"]) == 3
    longest = max(predicted["waits"], key=lambda wait: wait["seconds"])
    assert f"{1e3 * longest['seconds']:.2f} ms at {longest['line']}" in done.stderr
    assert "sim:" not in done.stderr
    assert {file.name for file in (tmp_path / "deep" / "timeline").iterdir()} == {
        "timeline.svg",
        "trace.json",
    }


STEPS = """
import sys, torch
from torchstrategy.testing import step
x = torch.ones(64, 64, device="cuda")
for _ in range(4):
    (x @ x).sum().{read}
    step()
"""


@for_changes
def test_a_program_without_an_optimizer_says_where_its_steps_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(STEPS.format(read="cpu()"))
    done, report = run(tmp_path, "--profile", "A100", "--stop-after", "3", "program.py")
    assert done.returncode == 0, done.stderr
    assert report["steps"] == 3 and len(report["predicted"]["steps"]) == 2


@for_changes
def test_advice_is_in_the_report_and_in_its_json(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STEPS.format(read="item()"))
    done, report = run(tmp_path, "--profile", "A100", "program.py")
    (advice,) = report["predicted"]["advice"]
    assert (
        advice["write"] == "no .item() each step (program.py:6)"
        and advice["after"] < advice["before"]
    )
    figures = (
        f"{1e6 * advice['before']:.1f} us -> {1e6 * advice['after']:.1f} us a step"
    )
    assert (
        f"Predicted to be faster\n  no .item() each step (program.py:6): {figures}\n"
        in done.stderr
    )


# Two reports


@for_changes
def test_a_report_is_compared_with_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STEPS.format(read="item()"))
    before, _ = run(tmp_path, "--profile", "A100", "program.py")
    assert "Compared" not in before.stderr
    (tmp_path / "report.json").rename(tmp_path / "before.json")
    same, _ = run(
        tmp_path, "--profile", "A100", "--compare", "before.json", "program.py"
    )
    assert same.stderr.endswith(
        "\nCompared with before.json, program.py: no difference\n"
    )
    (tmp_path / "program.py").write_text(STEPS.format(read="add(1)"))
    after, _ = run(
        tmp_path, "--profile", "A100", "--compare", "before.json", "program.py"
    )
    lines = after.stderr.partition("Compared with before.json, program.py\n")[
        2
    ].splitlines()
    assert "  waits a step: 1 -> 0 (-100%)" in lines
    assert any(
        re.fullmatch(r"  a step: [\d.]+ us -> [\d.]+ us \(-\d+%\)", line)
        for line in lines
    ), lines


@for_changes
@pytest.mark.parametrize("text", ["", "[]", "{}", None])
def test_what_is_no_report_cannot_be_compared(text: str | None, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('it ran')")
    if text is not None:
        (tmp_path / "before.json").write_text(text)
    done, report = run(tmp_path, "--compare", "before.json", "program.py")
    assert done.returncode == 2 and not report and "it ran" not in done.stdout
    assert "torchstrategy.testing.run: --compare before.json: " in done.stderr
    assert done.stderr.endswith("Name a file that --json has written.\n")


def test_findings_and_races_that_are_new_or_gone_are_a_difference() -> None:
    report = Report(
        "train.py", 0, Observations(), [10], ["an old race"], None, "cuda"
    ).as_json()
    found = {"name": "same-order", "says": "", "write": "", "lines": ["train.py:3"]}
    later = {
        **report,
        "races": [],
        "findings": [found],
        "peak_bytes": {"cuda:0": 20_000},
    }
    assert differences(report, later, "before.json") == [
        "Compared with before.json, train.py",
        "  peak memory of cuda:0: 10 bytes -> 0.02 MiB (+199900%)",
        "  a finding is new: same-order (train.py:3)",
        "  a race is gone: an old race",
    ]


@for_changes
def test_a_program_that_does_not_fit_into_the_gpu_runs_out_of_memory(
    tmp_path: Path,
) -> None:
    program = (
        "import torch\nx = [torch.empty(2**30, device='cuda') for _ in range(5)]\n"
    )
    (tmp_path / "program.py").write_text(program)
    done, report = run(tmp_path, "--profile", "V100", "--shapes-only", "program.py")
    assert done.returncode == 1 and "V100-SXM-16GB has 16.00 GiB" in done.stderr
    assert report["predicted"]["devices"]["cuda:0"]["peak_bytes"] > 2**34


@for_changes
def test_the_text_of_a_program_of_the_docs_has_the_numbers_of_its_json(
    tmp_path: Path,
) -> None:
    page = (ROOT / "docs" / "testing-cuda-scripts.md").read_text()
    program = page[page.index("# train.py") :]
    (tmp_path / "train.py").write_text(program[: program.index("```")])
    done, report = run(
        tmp_path, "--devices", "2", "--as-cuda", "train.py", "--steps", "2"
    )
    for route in report["routes"]:
        size = (
            f"{route['bytes'] / 2**20:,.2f} MiB"
            if route["bytes"] >= 10_000
            else f"{route['bytes']} bytes"
        )
        line = (
            f"  {route['from']} -> {route['to']}  {size} in {route['copies']} tensors"
        )
        assert line in done.stderr and line in page
    for wait in report["synchronizations"]:
        line = f"{wait['times']:7}  {wait['why']}  {wait['line']}"
        assert line in done.stderr and line in page
    for name, size in report["peak_bytes"].items():
        line = f"  {name}  {size / 2**20:,.2f} MiB"
        assert line in done.stderr and line in page
    for what in ("blocking_copies", "pageable_copies"):
        line = ", ".join(f"{line} ({times})" for line, times in report[what].items())
        assert (
            f"  {sum(report[what].values())} " in done.stderr
            and line in done.stderr
            and line in page
        )


@for_changes
def test_what_is_counted_is_what_the_program_does(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "x = torch.ones(100).cuda()\n"
        "y = torch.ones(50).pin_memory().cuda(non_blocking=True)\n"
        "z = torch.ones(10).cuda(non_blocking=True)\n"
        "w = x.to('cuda:1')\n"
        "x.sum().item()\n"
        "bool(y[0] > 0)\n"
        "w.cpu()\n"
        "x.nonzero()\n"
        "torch.cuda.synchronize()\n"
        "torch.cuda.current_stream().synchronize()\n"
    )
    done, report = run(tmp_path, "program.py")
    assert done.returncode == 0, done.stderr
    assert report["routes"] == [
        {"from": "cpu", "to": "cuda:0", "copies": 3, "bytes": 640},
        {"from": "cuda:0", "to": "cuda:1", "copies": 1, "bytes": 400},
        {"from": "cuda:1", "to": "cpu", "copies": 1, "bytes": 400},
    ]
    assert report["blocking_copies"] == {
        "program.py:2": 1,
        "program.py:4": 1,
        "program.py:8": 1,
    }
    assert report["pageable_copies"] == {
        "program.py:2": 1,
        "program.py:4": 1,
        "program.py:8": 1,
    }
    assert {(wait["line"], wait["why"]) for wait in report["synchronizations"]} == {
        ("program.py:6", "a number is read"),
        ("program.py:7", "a number is read"),
        ("program.py:9", "the size of a result is read"),
        ("program.py:10", "synchronize()"),
        ("program.py:11", "stream.synchronize()"),
    }
    assert report["peak_bytes"]["cuda:1"] == 400
