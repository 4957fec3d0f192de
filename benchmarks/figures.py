"""What virtual time predicts, beside figures that others have published.

python benchmarks/figures.py [--json FILE] [--measure DEVICE]

Nothing is measured here, unless you ask for it: `--measure cuda:0` takes the time of
some steps on that GPU, and prints it beside what was predicted for an H100. Constants
of the cost model were fitted to figures marked `fitted`, and to none that is marked
`seen` or `held out`. Figures with a line `foretold` were predicted, and the predictions
committed, before they were looked up or measured. Then the profile of the RTX 4090 was
corrected by two of them.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from contest import Row, arguments, clock, hold, machine, timed
from networks import GPT2, VisionTransformer, resnet
from torchstrategy.testing import DeviceProfile, simulate_devices, virtual_time

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
    # Images, or rows of tokens, a second; None: nobody has measured it yet.
    published: float | None = None
    source: str = ""
    # Known, and no constant was fitted to it; or fitted; or held out.
    used: str = "seen"
    # The ms of the prediction that was committed before the figure was looked up.
    foretold: float | None = None


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """As programs for ImageNet use it."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


_4090 = DeviceProfile.named("RTX-4090")
# The figures of
# https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf
_3090 = replace(
    _4090,
    name="RTX-3090",
    tflops={
        torch.float32: 35.6,
        torch.float16: 71.0,
        torch.bfloat16: 71.0,
        torch.float64: 0.56,
        "tf32": 35.6,
    },
    bandwidth=936,
    processors=82,
)
OTHERS: Mapping[str, DeviceProfile] = {_3090.name: _3090}

LECTURE = '"Let\'s reproduce GPT-2 (124M)", A. Karpathy, 2024: batch 16 of 1,024 tokens'
NANOGPT = (
    "README of nanoGPT, December 2022: batch 8 of that commit's train.py assumed, no "
    "dropout"
)
EXAMPLES_A100 = "NVIDIA DeepLearningExamples, ResNet-50 v1.5, 21.03: batch 256 assumed"
EXAMPLES_V100 = (
    "NVIDIA DeepLearningExamples, ResNet-50 v1.5, V100 16 GB: batch 128 assumed for "
    "FP32 and 256 for AMP"
)
TIMM = "timm at aa4b5850, results/benchmark-"
TORCHVISION = (
    "github.com/sandeepkumar-skb/pytorch_experiments, torchvision_exp: batch 128"
)
OWN = "benchmarks/figures.py --measure cuda:0"


def timm(
    what: str,
    gpu: str,
    make: Callable[[], nn.Module],
    batch: int,
    file: str,
    published: float,
    foretold: float,
) -> Figure:
    """A figure of timm's tables; the name of its file says what was measured."""
    is_last, trains = "-nhwc-" in file, file.startswith("train")
    used = (
        "fitted" if (what, is_last) in CORRECTING and gpu == "RTX-4090" else "held out"
    )
    return Figure(
        what,
        gpu,
        make,
        batch,
        "AMP",
        is_last,
        trains,
        sgd,
        published,
        f"{TIMM}{file}.csv",
        used,
        foretold,
    )


def own(
    what: str,
    make: Callable[[], nn.Module],
    batch: int,
    precision: str,
    is_last: bool,
    trains: bool,
    measured: float | None,
    foretold: float,
) -> Figure:
    """A figure that this script has measured, with torch 2.11, on 2026-11-27."""
    used = (
        "fitted"
        if (what, precision, is_last, batch) == ("ResNet-50", "float32", False, 128)
        else "held out"
    )
    return Figure(
        what,
        "H100",
        make,
        batch,
        precision,
        is_last,
        trains,
        sgd,
        measured,
        OWN,
        used,
        foretold,
    )


# What the profile of the RTX 4090 was corrected by.
CORRECTING = (("ViT-L/16", False), ("ResNet-50", True))
INFER_4090 = "infer-amp-{}-pt240-cu124-rtx4090"
TRAIN_3090 = "train-amp-{}-pt112-cu113-rtx3090"
FIGURES = [
    Figure(
        "GPT-2",
        "A100",
        GPT2,
        16,
        "float32",
        published=16.0,
        source=LECTURE,
        used="fitted",
    ),
    Figure(
        "GPT-2",
        "A100",
        GPT2,
        16,
        "TF32",
        published=16 / 0.333,
        source=LECTURE,
        used="fitted",
    ),
    Figure(
        "GPT-2",
        "A100",
        GPT2,
        16,
        "bfloat16",
        published=16 / 0.300,
        source=LECTURE,
        used="fitted",
    ),
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
        Figure(
            "ResNet-50",
            gpu,
            lambda: resnet(50),
            batch,
            precision,
            is_last,
            True,
            sgd,
            rate,
            source,
            "fitted",
        )
        for gpu, batch, precision, is_last, rate, source in (
            ("A100", 256, "TF32", False, 938.0, EXAMPLES_A100),
            ("A100", 256, "AMP", True, 2470.0, EXAMPLES_A100),
            ("V100", 128, "float32", False, 367.0, EXAMPLES_V100),
            ("V100", 256, "AMP", True, 1200.0, EXAMPLES_V100),
        )
    ],
    *[
        Figure(
            "ResNet-50",
            "V100",
            lambda: resnet(50),
            128,
            precision,
            is_last,
            True,
            sgd,
            rate,
            TORCHVISION,
            "seen",
        )
        for precision, is_last, rate in (
            ("float32", False, 128 / 0.34237),
            ("float32", True, 128 / 0.41284),
            ("AMP", False, 128 / 0.15220),
            ("AMP", True, 128 / 0.11093),
        )
    ],
    timm(
        "ResNet-18",
        "RTX-4090",
        lambda: resnet(18),
        512,
        INFER_4090.format("nhwc"),
        18247.43,
        44.49,
    ),
    timm(
        "ResNet-50",
        "RTX-4090",
        lambda: resnet(50),
        512,
        INFER_4090.format("nhwc"),
        5088.39,
        137.22,
    ),
    timm(
        "ResNet-50",
        "RTX-4090",
        lambda: resnet(50),
        1024,
        INFER_4090.format("nchw"),
        4217.6,
        377.72,
    ),
    timm(
        "ResNet-101",
        "RTX-4090",
        lambda: resnet(101),
        512,
        INFER_4090.format("nhwc"),
        3320.94,
        223.73,
    ),
    timm(
        "ViT-S/16",
        "RTX-4090",
        lambda: VisionTransformer(384, 12, True),
        1024,
        INFER_4090.format("nchw"),
        7693.38,
        166.02,
    ),
    timm(
        "ViT-B/16",
        "RTX-4090",
        lambda: VisionTransformer(768, 12, True),
        1024,
        INFER_4090.format("nchw"),
        2787.15,
        457.56,
    ),
    timm(
        "ViT-L/16",
        "RTX-4090",
        lambda: VisionTransformer(1024, 24, True),
        1024,
        INFER_4090.format("nchw"),
        912.7,
        1435.19,
    ),
    timm(
        "ResNet-18",
        "RTX-3090",
        lambda: resnet(18),
        512,
        TRAIN_3090.format("nchw"),
        2764.22,
        250.73,
    ),
    timm(
        "ResNet-50",
        "RTX-3090",
        lambda: resnet(50),
        512,
        TRAIN_3090.format("nchw"),
        826.06,
        731.38,
    ),
    timm(
        "ResNet-50",
        "RTX-3090",
        lambda: resnet(50),
        512,
        TRAIN_3090.format("nhwc"),
        1218.01,
        620.83,
    ),
    timm(
        "ViT-B/16",
        "RTX-3090",
        lambda: VisionTransformer(768, 12, False),
        192,
        TRAIN_3090.format("nchw"),
        390.86,
        715.31,
    ),
    *[
        own(what, make, batch, precision, is_last, trains, rate, foretold)
        for what, make, batch, precision, is_last, trains, rate, foretold in (
            (
                "ResNet-50",
                lambda: resnet(50),
                128,
                "float32",
                False,
                True,
                836.6,
                96.83,
            ),
            ("ResNet-50", lambda: resnet(50), 128, "TF32", False, True, 1799.6, 70.56),
            ("ResNet-50", lambda: resnet(50), 128, "AMP", False, True, 2663.2, 36.51),
            ("ResNet-50", lambda: resnet(50), 128, "AMP", True, True, 4240.6, 28.79),
            ("ResNet-18", lambda: resnet(18), 512, "AMP", True, False, 41337.4, 10.8),
            ("ResNet-18", lambda: resnet(18), 16, "float32", False, True, 1484.2, 5.07),
            ("GPT-2", GPT2, 8, "float32", False, True, 39.4, 197.52),
            ("GPT-2", GPT2, 8, "TF32", False, True, 83.0, 86.35),
            ("GPT-2", GPT2, 8, "bfloat16", False, True, 94.5, 77.56),
            (
                "GPT-2, fused attention",
                lambda: GPT2(is_fused=True),
                8,
                "bfloat16",
                False,
                True,
                198.8,
                36.37,
            ),
            (
                "ViT-B/16",
                lambda: VisionTransformer(768, 12, True),
                128,
                "AMP",
                False,
                True,
                2647.9,
                47.0,
            ),
            (
                "ViT-L/16",
                lambda: VisionTransformer(1024, 24, True),
                256,
                "AMP",
                False,
                False,
                2820.0,
                82.7,
            ),
            (
                "ResNet-18",
                lambda: resnet(18),
                128,
                "float32",
                False,
                True,
                2610.1,
                62.42,
            ),
            (
                "ResNet-101",
                lambda: resnet(101),
                64,
                "float32",
                False,
                True,
                468.9,
                139.54,
            ),
            ("ResNet-101", lambda: resnet(101), 64, "TF32", True, True, 1335.3, 45.41),
            (
                "ResNet-50",
                lambda: resnet(50),
                256,
                "float32",
                False,
                False,
                3436.0,
                102.14,
            ),
            (
                "ViT-S/16",
                lambda: VisionTransformer(384, 12, True),
                256,
                "TF32",
                False,
                True,
                2728.3,
                69.77,
            ),
            (
                "GPT-2 355M",
                lambda: GPT2(is_fused=True, width=1024, layers=24),
                8,
                "bfloat16",
                False,
                True,
                101.9,
                71.0,
            ),
        )
    ],
]


def predicted(figure: Figure) -> float:
    """The seconds of a step, by the model."""
    profile = OTHERS.get(figure.gpu) or DeviceProfile.named(figure.gpu)
    # What fits is not the question here, and their batches did.
    with (
        precision(figure),
        virtual_time(replace(profile, memory=2**50), shapes_only=True) as trace,
    ):
        step = step_of(figure, torch.device("sim", 0))
        for _ in range(2):  # the first step makes the state of the optimizer
            torch.accelerator.synchronize()
            trace.mark()
            step()
    return trace.step(1).seconds


def measured(figure: Figure, device: torch.device) -> float:
    """The seconds of a step on a GPU that is here.

    It is the median of five times that a few steps take.
    """
    with precision(figure):
        step = step_of(figure, device)
        for _ in range(3):  # kernels are chosen and loaded, and memory is taken
            step()
        few = timed(step, 4, clock(device))
        return statistics.median(few() for _ in range(5))


@contextmanager
def precision(figure: Figure) -> Iterator[None]:
    """A block in which float32's products and convolutions have a given precision.

    It is the precision of a figure.
    """
    tf32 = (
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
    )
    kind = "ieee" if figure.precision == "float32" else "tf32"
    torch.backends.cuda.matmul.fp32_precision = (
        torch.backends.cudnn.conv.fp32_precision
    ) = kind
    try:
        yield
    finally:
        (
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.cudnn.conv.fp32_precision,
        ) = tf32


def parts(
    figure: Figure, device: torch.device
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The network, a batch and its labels.

    They are random numbers: a GPU computes with zeros faster than with others.
    """
    layout = torch.channels_last if figure.channels_last else torch.contiguous_format
    with device:
        model = figure.make()
        if isinstance(model, GPT2):
            tokens = torch.randint(50257, (figure.batch, 1024))
            return model, tokens, tokens
        images = torch.randn(figure.batch, 3, 224, 224).contiguous(memory_format=layout)
        return (
            model.to(memory_format=layout),
            images,
            torch.randint(1000, (figure.batch,)),
        )


def step_of(figure: Figure, device: torch.device) -> Callable[[], None]:
    """What is timed: a step of training, or of inference."""
    return (trained if figure.trains else inferred)(figure, device)


def autocast(
    figure: Figure, device: torch.device
) -> torch.autocast | nullcontext[None]:
    """The block in which half precision is used, if it is."""
    half = HALF.get(figure.precision)
    return nullcontext() if half is None else torch.autocast(device.type, half)


def trained(figure: Figure, device: torch.device) -> Callable[[], None]:
    """A step of training."""
    model, batch, labels = parts(figure, device)
    optimizer = figure.optimizer(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with autocast(figure, device):
            loss = F.cross_entropy(model(batch).flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()

    return step


def inferred(figure: Figure, device: torch.device) -> Callable[[], None]:
    """A step of inference."""
    model, batch, _ = parts(figure, device)
    model.eval()

    def step() -> None:
        with torch.no_grad(), autocast(figure, device):
            model(batch)

    return step


def figures(rounds: int) -> Iterator[Row]:
    """Every figure, and a line for each prediction, which is the same in each round."""
    errors: dict[str, list[float]] = {}
    seconds = {figure: predicted(figure) for figure in FIGURES}
    for figure in FIGURES:
        name = f"{named(figure)} ({figure.used})"
        if figure.published is None:
            yield Row(name, "predicted", seconds[figure], "ms", "", 1.0, 1.0, 1.0, None)
            continue
        published = figure.batch / figure.published
        yield Row(name, "published", published, "ms", "", 1.0, 1.0, 1.0, None)
        says = {"predicted": seconds[figure]}
        if figure.foretold is not None:
            says["foretold"] = figure.foretold / 1e3
        for word, amount in says.items():
            ratio = amount / published
            errors.setdefault(figure.used if word == "predicted" else word, []).append(
                ratio - 1
            )
            yield Row(name, word, amount, "ms", "published", ratio, ratio, ratio, 1.3)
    errors["all"] = errors["fitted"] + errors["seen"] + errors["held out"]
    for word, those in errors.items():
        mean, worst = statistics.mean(map(abs, those)), max(those, key=abs)
        print(
            f"{word}: mean error {mean:.0%}, worst {worst:+.0%}, of {len(those)}",
            file=sys.stderr,
        )
    right = [(slow, fast, seconds[fast] < seconds[slow]) for slow, fast in pairs()]
    print(
        f"{sum(is_right for *_, is_right in right)} of {len(right)} gains on the right "
        "side",
        file=sys.stderr,
    )
    for slow, fast, is_right in right:
        if not is_right:
            print(f"  not {named(slow)} -> {named(fast)}", file=sys.stderr)


def measure(device: torch.device) -> None:
    """Prints what each of this script's own figures takes, beside the prediction.

    It measures on a device.
    """
    print(
        f"{machine()}\n\n| | measured | a second | foretold | of measured "
        "|\n|---|---:|---:|---:|---:|"
    )
    for figure in FIGURES:
        if figure.source == OWN:
            seconds, foretold = measured(figure, device), figure.foretold or math.nan
            rate, ratio = figure.batch / seconds, foretold / 1e3 / seconds
            print(
                f"| {named(figure)} | {1e3 * seconds:.2f} ms | {rate:,.1f} | "
                f"{foretold:.2f} ms | {ratio:.2f} |"
            )


def named(figure: Figure) -> str:
    """What was measured."""
    layout = ", NHWC" if figure.channels_last else ""
    does = "training" if figure.trains else "inference"
    return (
        f"{figure.what} on {figure.gpu}, {does}, {figure.precision}{layout}, "
        f"{figure.batch}"
    )


def pairs() -> Iterator[tuple[Figure, Figure]]:
    """Figures of one source that differ by 10 % or more: the slower and the faster.

    They differ in precision or layout.
    """
    for one, other in itertools.combinations(FIGURES, 2):
        alike = (
            one[:2] == other[:2]
            and one.batch == other.batch
            and one.trains == other.trains
        )
        is_of_one = one.source == other.source or one.source.startswith(TIMM)
        if alike and is_of_one and one.published and other.published:
            slow, fast = (
                (one, other) if one.published < other.published else (other, one)
            )
            if max(one.published, other.published) >= 1.1 * min(
                one.published, other.published
            ):
                yield slow, fast


CONTESTS = (figures,)

if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--measure",
        metavar="DEVICE",
        type=torch.device,
        help="measure steps on a GPU: cuda:0",
    )
    told = parser.parse_args()
    if told.measure is not None:
        measure(told.measure)
    else:
        simulate_devices(1)
        hold(CONTESTS, "", told)
