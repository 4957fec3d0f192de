"""What virtual time predicts, beside figures that others have published.

python benchmarks/figures.py [--json FILE]

Nothing is measured here. Constants of the cost model were fitted to the figures marked `fitted`. Those marked `held
out` were predicted, and the predictions committed, before they were looked up.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from contest import Row, hold
from networks import GPT2, VisionTransformer, resnet
from torchstrategy.testing import DeviceProfile, simulate_devices, virtual_time

DEVICE = "sim:0"
HALF = {"AMP": torch.float16, "bfloat16": torch.bfloat16}


class Figure(NamedTuple):
    """Something that somebody has measured and published."""

    what: str
    gpu: str
    make: Callable[[], nn.Module]
    batch: int
    precision: str = "AMP"  # or float32, TF32, bfloat16
    channels_last: bool = False
    trains: bool = True
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    published: float | None = None  # images, or rows of tokens, a second; None: not looked up yet
    source: str = ""
    used: str = "held out"  # or fitted; or seen: known before the prediction, and no constant was fitted to it


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """As programs for ImageNet use it."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


_4090 = DeviceProfile.named("RTX-4090")
# The figures of https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf
_3090 = replace(
    _4090,
    name="RTX-3090",
    tflops={torch.float32: 35.6, torch.float16: 71.0, torch.bfloat16: 71.0, torch.float64: 0.56, "tf32": 35.6},
    bandwidth=936,
    processors=82,
)
OTHERS: Mapping[str, DeviceProfile] = {_3090.name: _3090}

LECTURE = '"Let\'s reproduce GPT-2 (124M)", A. Karpathy, 2024: batch 16 of 1,024 tokens'
NANOGPT = "README of nanoGPT, December 2022: batch 8 of that commit's train.py assumed, no dropout"
EXAMPLES_A100 = "NVIDIA DeepLearningExamples, ResNet-50 v1.5, 21.03: batch 256 assumed"
EXAMPLES_V100 = "NVIDIA DeepLearningExamples, ResNet-50 v1.5, V100 16 GB: batch 128 assumed for FP32 and 256 for AMP"
TIMM = "timm at aa4b5850, results/benchmark-"
TORCHVISION = "github.com/sandeepkumar-skb/pytorch_experiments, torchvision_exp: batch 128"


def timm(what: str, gpu: str, make: Callable[[], nn.Module], batch: int, file: str, published: float | None) -> Figure:
    """A figure of timm's tables; the name of its file says what was measured."""
    is_last, trains = "-nhwc-" in file, file.startswith("train")
    return Figure(what, gpu, make, batch, "AMP", is_last, trains, sgd, published, f"{TIMM}{file}.csv")


INFER_4090 = "infer-amp-{}-pt240-cu124-rtx4090"
TRAIN_3090 = "train-amp-{}-pt112-cu113-rtx3090"
FIGURES = [
    Figure("GPT-2", "A100", GPT2, 16, "float32", published=16.0, source=LECTURE, used="fitted"),
    Figure("GPT-2", "A100", GPT2, 16, "TF32", published=16 / 0.333, source=LECTURE, used="fitted"),
    Figure("GPT-2", "A100", GPT2, 16, "bfloat16", published=16 / 0.300, source=LECTURE, used="fitted"),
    Figure(
        "GPT-2",
        "A100-SXM-40GB",
        lambda: GPT2(by_hand=True),
        8,
        "bfloat16",
        published=8 / 0.250,
        source=NANOGPT,
        used="fitted",
    ),
    *[
        Figure("ResNet-50", gpu, lambda: resnet(50), batch, precision, is_last, True, sgd, rate, source, "fitted")
        for gpu, batch, precision, is_last, rate, source in (
            ("A100", 256, "TF32", False, 938.0, EXAMPLES_A100),
            ("A100", 256, "AMP", True, 2470.0, EXAMPLES_A100),
            ("V100", 128, "float32", False, 367.0, EXAMPLES_V100),
            ("V100", 256, "AMP", True, 1200.0, EXAMPLES_V100),
        )
    ],
    *[
        Figure("ResNet-50", "V100", lambda: resnet(50), 128, precision, is_last, True, sgd, rate, TORCHVISION, "seen")
        for precision, is_last, rate in (
            ("float32", False, 128 / 0.34237),
            ("float32", True, 128 / 0.41284),
            ("AMP", False, 128 / 0.15220),
            ("AMP", True, 128 / 0.11093),
        )
    ],
    timm("ResNet-18", "RTX-4090", lambda: resnet(18), 512, INFER_4090.format("nhwc"), None),
    timm("ResNet-50", "RTX-4090", lambda: resnet(50), 512, INFER_4090.format("nhwc"), None),
    timm("ResNet-50", "RTX-4090", lambda: resnet(50), 1024, INFER_4090.format("nchw"), None),
    timm("ResNet-101", "RTX-4090", lambda: resnet(101), 512, INFER_4090.format("nhwc"), None),
    timm("ViT-S/16", "RTX-4090", lambda: VisionTransformer(384, 12, True), 1024, INFER_4090.format("nchw"), None),
    timm("ViT-B/16", "RTX-4090", lambda: VisionTransformer(768, 12, True), 1024, INFER_4090.format("nchw"), None),
    timm("ViT-L/16", "RTX-4090", lambda: VisionTransformer(1024, 24, True), 1024, INFER_4090.format("nchw"), None),
    timm("ResNet-18", "RTX-3090", lambda: resnet(18), 512, TRAIN_3090.format("nchw"), None),
    timm("ResNet-50", "RTX-3090", lambda: resnet(50), 512, TRAIN_3090.format("nchw"), None),
    timm("ResNet-50", "RTX-3090", lambda: resnet(50), 512, TRAIN_3090.format("nhwc"), None),
    timm("ViT-B/16", "RTX-3090", lambda: VisionTransformer(768, 12, False), 192, TRAIN_3090.format("nchw"), None),
]


def predicted(figure: Figure) -> float:
    """The seconds of a step."""
    profile = OTHERS.get(figure.gpu) or DeviceProfile.named(figure.gpu)
    tf32 = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    kind = "ieee" if figure.precision == "float32" else "tf32"
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = kind
    try:
        # What fits is not the question here, and their batches did.
        with virtual_time(replace(profile, memory=2**50), shapes_only=True) as trace:
            step = trained(figure) if figure.trains else inferred(figure)
            for _ in range(2):  # the first step makes the state of the optimizer
                torch.accelerator.synchronize()
                trace.mark()
                step()
        return trace.step(1).seconds
    finally:
        torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = tf32


def parts(figure: Figure) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The network, a batch and its labels."""
    layout = torch.channels_last if figure.channels_last else torch.contiguous_format
    with torch.device(DEVICE):
        model = figure.make()
        if isinstance(model, GPT2):
            tokens = torch.zeros(figure.batch, 1024, dtype=torch.int64)
            return model, tokens, tokens
        images = torch.zeros(figure.batch, 3, 224, 224).contiguous(memory_format=layout)
        return model.to(memory_format=layout), images, torch.zeros(figure.batch, dtype=torch.int64)


def autocast(precision: str) -> torch.autocast | nullcontext[None]:
    """The block in which half precision is used, if it is."""
    return torch.autocast("sim", HALF[precision]) if precision in HALF else nullcontext()


def trained(figure: Figure) -> Callable[[], None]:
    """A step of training."""
    model, batch, labels = parts(figure)
    optimizer = figure.optimizer(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with autocast(figure.precision):
            loss = F.cross_entropy(model(batch).flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()

    return step


def inferred(figure: Figure) -> Callable[[], None]:
    """A step of inference."""
    model, batch, _ = parts(figure)
    model.eval()

    def step() -> None:
        with torch.no_grad(), autocast(figure.precision):
            model(batch)

    return step


def figures(rounds: int) -> Iterator[Row]:
    """Every figure, and a line for the prediction; a model says the same in each round."""
    errors = []
    for figure in FIGURES:
        layout = ", NHWC" if figure.channels_last else ""
        does = "training" if figure.trains else "inference"
        name = f"{figure.what} on {figure.gpu}, {does}, {figure.precision}{layout}, {figure.batch} ({figure.used})"
        seconds = predicted(figure)
        if figure.published is None:
            yield Row(name, "predicted", seconds, "ms", "", 1.0, 1.0, 1.0, None)
            continue
        published = figure.batch / figure.published
        ratio = seconds / published
        errors.append(ratio - 1)
        yield Row(name, "published", published, "ms", "", 1.0, 1.0, 1.0, None)
        yield Row(name, "predicted", seconds, "ms", "published", ratio, ratio, ratio, 1.3)
    mean = statistics.mean(map(abs, errors))
    print(f"mean error {mean:.0%}, worst {max(errors, key=abs):+.0%}, of {len(errors)}", file=sys.stderr)


CONTESTS = (figures,)

if __name__ == "__main__":
    simulate_devices(1)
    hold(CONTESTS, __doc__ or "")
