"""Model parallelism on two GPUs, with a scheduler and memory statistics reset."""

import sys

import torch
import torch.nn as nn

from .model import SiameseNetwork


def main():
    steps = int(sys.argv[1])
    torch.manual_seed(0)
    model, criterion = SiameseNetwork(), nn.BCELoss()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for step in range(steps):
        torch.cuda.reset_peak_memory_stats(1)
        a, b = torch.randn(2, 8, 1, 8, 8).cuda(0)
        optimizer.zero_grad()
        output = model(a, b).squeeze()
        loss = criterion(output, torch.ones(8).to(output.device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        free, total = torch.cuda.mem_get_info(1)
        print(
            f"step {step}: loss {loss.item():.4f}, {total - free} bytes on "
            f"{output.device}"
        )
        assert output.get_device() == 1 and output.is_cuda


if __name__ == "__main__":
    main()
