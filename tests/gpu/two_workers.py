"""Two workers share a GPU, so NCCL must not be asked; or each has its own.

`python -m tests.gpu` starts them.

With `--nccl`, each worker takes the GPU of its number, and they are joined by NCCL.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

if "--nccl" in sys.argv:
    # Before the devices are looked at.
    os.environ["ON"] = f"cuda:{os.environ['LOCAL_RANK']}"

import torch
import torch.distributed as dist

import torchstrategy
from gpu.trainings import IN_ONE_PRECISION, ON

if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if "--nccl" in sys.argv else "gloo")
    for name, training in IN_ONE_PRECISION.items():
        found = training.trained(
            torchstrategy.MultiWorkerMirroredStrategy(devices=[ON])
        )
        torch.testing.assert_close(
            found, replace(training, options=None).trained(None), rtol=1e-6, atol=1e-6
        )
        print(f"worker {dist.get_rank()}: {name}: equal", flush=True)
    dist.destroy_process_group()
