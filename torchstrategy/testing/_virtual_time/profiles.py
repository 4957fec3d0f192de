"""What is known of GPUs: the figures of their makers, and guesses.

A guess says how much of a maker's figure a program gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import torch

US = 1e-6
GIB = 2**30


@final
@dataclass(frozen=True)
class DeviceProfile:
    """What `virtual_time` takes a simulated device for: speed, memory and links.

    The peaks are those of data sheets. The parts of them that a program gets are
    guesses or were fitted, so results are those of a model, about 30 % off.
    `dataclasses.replace` makes a profile of your own out of one of `virtual_time`'s.

    Attributes:
        name: What reports call it.
        tflops: Peak in 10^12 floating-point operations a second, by dtype; by `"tf32"`
            of float32 in tensor cores.
        bandwidth: Of the device's memory, in 10^9 bytes a second.
        memory: Of the device, in bytes; more raises `torch.OutOfMemoryError`.
        processors: How many streaming multiprocessors there are.
        pinned: The link to the CPU from and to pinned memory, in each direction, in
            10^9 bytes a second.
        pageable: The same from and to memory that is not pinned.
        peer: The link to each other device, in each direction, in 10^9 bytes a second;
            of ranks, to all others.
        matmul: The part of the peak that a large matrix product gets.
        simple_matmul: The part that it gets without tensor cores.
        convolution: The part that a convolution gets.
        simple_convolution: The part that it gets without tensor cores.
        attention: The part that fused attention gets.
        streaming: The part of the bandwidth that an operator gets that computes little.
        launch: Seconds that the program takes for an operator: Python, PyTorch,
            autograd and the driver together.
        kernel: The least seconds that an operator takes on its stream.
        copy: The least seconds that a copy takes.
        event: Seconds that the program takes to record an event, to ask it or to let a
            stream wait for it.
        cpu_bandwidth: The bytes that operators of the CPU read and write, in 10^9 a
            second.
        cpu_operator: The least seconds that an operator of the CPU takes.
        collective: The least seconds that a collective of ranks takes.

    Example:
        >>> import dataclasses
        >>> profile = torchstrategy.testing.DeviceProfile.named("A100-SXM-80GB")
        >>> slow_link = dataclasses.replace(
        ...     profile, name="A100 on a slow link", pinned=12.0
        ... )
        >>> slow_link.memory // 2**30
        80
    """

    name: str
    tflops: Mapping[torch.dtype | str, float]
    bandwidth: float
    memory: int
    processors: int
    pinned: float
    pageable: float
    peer: float
    matmul: float = 0.80
    simple_matmul: float = 0.93
    convolution: float = 0.50
    simple_convolution: float = 0.80
    attention: float = 0.55
    streaming: float = 0.85
    launch: float = 25 * US
    kernel: float = 2.5 * US
    copy: float = 8 * US
    event: float = 1 * US
    cpu_bandwidth: float = 20.0
    cpu_operator: float = 2 * US
    collective: float = 20 * US

    @staticmethod
    def named(name: str) -> DeviceProfile:
        """The profile of this name, or the first one whose name begins so.

        For example, `"A100"` means `"A100-SXM-80GB"`.

        Raises:
            ValueError: If there is none.
        """
        for profile in _PROFILES:
            if f"{profile.name}-".startswith(f"{name}-"):
                return profile
        known = ", ".join(repr(profile.name) for profile in _PROFILES)
        raise ValueError(
            f"There is no profile {name!r}. Choose from {known}; or make one of your "
            "own with dataclasses.replace."
        )

    def peak(self, dtype: torch.dtype, tensor_cores: bool = False) -> float:
        """Floating-point operations a second.

        For float32, you may ask for `tensor_cores`, if the device has TF32.
        """
        key: torch.dtype | str = (
            "tf32"
            if dtype is torch.float32 and tensor_cores and "tf32" in self.tflops
            else dtype
        )
        return self.tflops.get(key, self.tflops[torch.float32]) * 1e12

    def __repr__(self) -> str:
        return f"DeviceProfile({self.name!r})"


def _tflops(
    float32: float,
    half: float,
    float64: float,
    tf32: float | None = None,
    bfloat16: float | None = None,
) -> Mapping[torch.dtype | str, float]:
    peaks: dict[torch.dtype | str, float] = {
        torch.float32: float32,
        torch.float16: half,
        torch.bfloat16: half if bfloat16 is None else bfloat16,
        torch.float64: float64,
    }
    return peaks if tf32 is None else {**peaks, "tf32": tf32}


# Peaks, bandwidths, sizes and links are the makers'; figures with sparsity are halved.
# The parts of them that a program gets are guesses (kernel, copy, collective, pageable
# links, 0.80 to 0.83 of a pinned link and of NVLink), or were fitted to published times
# of training on A100 and V100 (matmul, simple_matmul, convolution, attention,
# streaming): of GPT-2 124M in float32, TF32 and bfloat16, and of ResNet-50 in float32,
# TF32 and AMP. `launch` is between the 35 us that were measured, on a virtual machine
# with an H100, of five programs whose GPU waits for them (11 us if no gradient is asked
# for), and the 20 us or so of such steps on faster hosts.
# https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf
_A100 = DeviceProfile(
    "A100-SXM-80GB",
    _tflops(19.5, 312, 19.5, tf32=156),
    2039,
    80 * GIB,
    108,
    pinned=25,
    pageable=8,
    peer=250,
)
# https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper
_H100 = DeviceProfile(
    "H100-SXM",
    _tflops(67, 989, 67, tf32=494),
    3350,
    80 * GIB,
    132,
    pinned=50,  # measured: 54 in one direction, 44 in each of both at once
    pageable=7,  # measured: 6.6 to the device, 11 from it, 1.4 from it to new memory
    peer=400,
    # The wider tensor cores are harder to feed; a guess.
    matmul=0.70,
    convolution=0.40,
    simple_convolution=0.41,  # fitted to one measured step, of ResNet-50 in float32
    attention=0.45,
)
_PROFILES = (
    _A100,
    replace(_A100, name="A100-SXM-40GB", bandwidth=1555, memory=40 * GIB),
    _H100,
    # https://www.nvidia.com/en-us/data-center/h200/
    replace(_H100, name="H200-SXM", bandwidth=4800, memory=141 * 10**9),
    # https://images.nvidia.com/content/volta-architecture/pdf/volta-architecture-whitepaper.pdf;
    # bfloat16 is emulated.
    DeviceProfile(
        "V100-SXM-16GB",
        _tflops(15.7, 125, 7.8, bfloat16=15.7),
        900,
        16 * GIB,
        80,
        pinned=12,
        pageable=6,
        peer=45,
    ),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf;
    # float16 with accumulation in float32. Devices reach each other through the CPU's
    # memory only.
    DeviceProfile(
        "RTX-4090",
        _tflops(82.6, 165.2, 1.29, tf32=82.6),
        1008,
        24 * GIB,
        128,
        pinned=25,
        pageable=8,
        peer=12,
        # It runs above its rated clock, and has less arithmetic to feed for each byte
        # of bandwidth. Fitted to ViT-L/16 and ResNet-50 in inference:
        # `benchmarks/figures.py`.
        matmul=1.0,
        convolution=0.85,
        streaming=0.93,
    ),
    # https://www.nvidia.com/en-us/data-center/l4/
    DeviceProfile(
        "L4",
        _tflops(30.3, 121, 0.47, tf32=60),
        300,
        24 * GIB,
        58,
        pinned=25,
        pageable=8,
        peer=12,
    ),
)
