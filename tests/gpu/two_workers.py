"""Two workers share a GPU, so NCCL must not be asked. `python -m tests.gpu "two workers"` starts them."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

import torchstrategy
from gpu.trainings import IN_ONE_PRECISION, ON

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, training in IN_ONE_PRECISION.items():
        found = training.trained(torchstrategy.MultiWorkerMirroredStrategy(devices=[ON]))
        torch.testing.assert_close(found, replace(training, options=None).trained(None), rtol=1e-6, atol=1e-6)
        print(f"worker {dist.get_rank()}: {name}: equal", flush=True)
    dist.destroy_process_group()
