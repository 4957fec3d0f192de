"""A plugin: with `-p gpu.on_one_device`, all replicas are on one device.

It is for tests of simulated devices.

The tests compare with plain PyTorch on the CPU, and a GPU draws other numbers. So what
the program's own thread draws on the GPU is drawn on the CPU and copied. Replicas draw
as they do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

import torchstrategy.testing
from gpu.trainings import ON

torchstrategy.testing.simulated_devices = lambda: [ON] * 5


def is_programs_own() -> bool:
    return threading.current_thread() is threading.main_thread()


def in_place(name: str) -> Callable[..., torch.Tensor]:
    """A method that writes random numbers on a tensor."""
    plain = getattr(torch._C.TensorBase, name)

    def draw(
        self: torch.Tensor, *args: Any, generator: Any = None, **options: Any
    ) -> torch.Tensor:
        if generator is not None:
            options["generator"] = generator
        elif self.is_cuda and is_programs_own():
            drawn = plain(
                torch.empty(self.shape, dtype=self.dtype, device="cpu"),
                *args,
                **options,
            )
            with torch.no_grad():
                return self.copy_(drawn)
        return plain(self, *args, **options)

    return draw


def anew(name: str) -> Callable[..., torch.Tensor]:
    """A function that makes a tensor of random numbers."""
    plain = getattr(torch, name)

    def draw(
        *args: Any, device: Any = None, requires_grad: bool = False, **options: Any
    ) -> torch.Tensor:
        where = torch.get_default_device() if device is None else torch.device(device)
        if (
            where.type != "cuda"
            or not is_programs_own()
            or options.keys() & {"generator", "out"}
        ):
            return plain(*args, device=device, requires_grad=requires_grad, **options)
        return (
            plain(*args, device="cpu", **options)
            .to(where)
            .requires_grad_(requires_grad)
        )

    return draw


def like(name: str) -> Callable[..., torch.Tensor]:
    """A function that makes a tensor of random numbers in the shape of another one."""
    plain = getattr(torch, name)

    def draw(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if tensor.is_cuda and is_programs_own():
            return plain(tensor.cpu(), *args, **options).to(tensor.device)
        return plain(tensor, *args, **options)

    return draw


for _name in ("uniform_", "normal_", "random_", "bernoulli_", "exponential_"):
    setattr(torch.Tensor, _name, in_place(_name))
for _name in ("randn", "rand", "randint"):
    setattr(torch, _name, anew(_name))
for _name in ("randn_like", "rand_like"):
    setattr(torch, _name, like(_name))
