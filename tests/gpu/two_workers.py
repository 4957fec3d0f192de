"""Two workers share a GPU, so NCCL must not be asked. `python -m tests.gpu "two workers"` starts them."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

import torchstrategy
from gpu.trainings import ON, Recurrent, Training, fused_adam

TRAININGS = {
    "usual": Training(),
    "loads ahead": Training(options=torchstrategy.InputOptions(load_ahead=True)),
    "on a side stream": Training(on_side_stream=True),
    "clipped": Training(clips=True),
    "keeps gradients": Training(keeps_gradients=True),
    "fused": Training(optimizer=fused_adam),
    "recurrent": Training(make=Recurrent),
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, training in TRAININGS.items():
        found = training.trained(torchstrategy.MultiWorkerMirroredStrategy(devices=[ON]))
        torch.testing.assert_close(found, replace(training, options=None).trained(None), rtol=1e-6, atol=1e-6)
        print(f"worker {dist.get_rank()}: {name}: equal", flush=True)
    dist.destroy_process_group()
