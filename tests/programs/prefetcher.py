"""A data prefetcher on a stream of its own, in the manner of apex.

Events, record_stream, wait_stream, timings.
"""

import sys

import torch
from torch import nn


class DataPrefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float().sub_(0.5).div_(0.25)

    def next(self):
        if "--forget" not in sys.argv:
            torch.cuda.current_stream().wait_stream(self.stream)
        input, target = self.next_input, self.next_target
        if input is not None:
            input.record_stream(torch.cuda.current_stream())
            target.record_stream(torch.cuda.current_stream())
        self.preload()
        return input, target


def main():
    torch.cuda.set_device("cuda:1")
    dataset = torch.utils.data.TensorDataset(torch.rand(32, 8), torch.randint(3, (32,)))
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, pin_memory=True)
    model = nn.Linear(8, 3).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start, end = (
        torch.cuda.Event(enable_timing=True),
        torch.cuda.Event(enable_timing=True),
    )
    prefetcher = DataPrefetcher(loader)
    start.record()
    input, target = prefetcher.next()
    while input is not None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(input), target).backward()
        optimizer.step()
        input, target = prefetcher.next()
    end.record()
    torch.cuda.synchronize()
    print(
        f"{start.elapsed_time(end):.2f} ms on",
        torch.cuda.get_device_name(torch.cuda.current_device()),
    )


if __name__ == "__main__":
    main()
