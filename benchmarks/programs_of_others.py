"""The public programs that `public_programs` runs, and the data made up for them."""

from __future__ import annotations

import gzip
import pickle
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch


class Program(NamedTuple):
    """A public program.

    Attributes:
        repository: `owner/name` on GitHub.
        file: Of the program, in its folder.
        arguments: What it is called with.
        folder: In the repository, where it is run.
        on_cpu: What it is called with on the CPU; None: it needs GPUs.
        ranks: How many; 0: it is no program for `torchrun`.
        devices: How many.
        steps: Of an optimizer, after which it is ended; 0: it ends by itself.
        data: Makes up what it reads, in the clone.
        paths: In the clone, where it looks for modules.
        short: What of the arguments the table shows.
        why: If it is known to fail: why, and what to do.
        differs: If numbers are known to be others than on the CPU: why.
        loads_otherwise_on_gpus: Whether it shuffles on GPUs alone, or has workers there
            alone.
    """

    repository: str
    file: str
    arguments: Sequence[str] = ()
    folder: str = "."
    on_cpu: Sequence[str] | None = None
    ranks: int = 0
    devices: int = 2
    steps: int = 0
    data: Callable[[Path], None] | None = None
    paths: Sequence[str] = ()
    short: str = ""
    why: str = ""
    differs: str = ""
    loads_otherwise_on_gpus: bool = False

    @property
    def clone(self) -> str:
        """The folder of the clone."""
        return self.repository.rpartition("/")[2]

    @property
    def name(self) -> str:
        """By which results are kept."""
        return " ".join(
            filter(None, [self.repository, f"{self.folder}/{self.file}", self.short])
        )


def make_data(program: Program, clone: Path) -> None:
    """Makes up what a program reads, if it is not there."""
    if program.data is not None:
        program.data(clone)


def digits(clone: Path) -> None:
    """Images of noise in the files of MNIST.

    They lie beside all programs that look for them in `../data` or `./data`.
    """
    places = (
        "data",
        "data/mnist",
        "tutorials/data",
        "mnist_hogwild/data",
        "mnist_forward_forward/data",
        "vae/data",
    )
    for name in places:
        there = clone / name / "MNIST" / "raw"
        if there.is_dir() or not (
            name == "data/mnist" or (clone / name).parent.is_dir()
        ):
            continue
        there.mkdir(parents=True)
        chance = random.Random(0)
        for part, count in (("train", 256), ("t10k", 100)):
            images, labels = (
                chance.randbytes(count * 28 * 28),
                bytes(chance.randrange(10) for _ in range(count)),
            )
            for name, head, body in (
                (
                    f"{part}-images-idx3-ubyte",
                    struct.pack(">IIII", 2051, count, 28, 28),
                    images,
                ),
                (f"{part}-labels-idx1-ubyte", struct.pack(">II", 2049, count), labels),
            ):
                (there / name).write_bytes(head + body)
                with gzip.open(there / f"{name}.gz", "wb") as file:
                    file.write(head + body)


def text_of(words: int, lines: int) -> str:
    """Lines of words at random."""
    chance = random.Random(0)
    known = [
        f"{chance.choice('bcdfgkmt')}{chance.choice('aeiou')}{i}" for i in range(words)
    ]
    return "".join(" ".join(chance.choices(known, k=12)) + "\n" for _ in range(lines))


def train_txt(clone: Path) -> None:
    """A file of words."""
    there = clone / "tutorials" / "02-intermediate" / "language_model" / "data"
    there.mkdir(parents=True, exist_ok=True)
    (there / "train.txt").write_text(text_of(50, 200))


def wikitext(clone: Path) -> None:
    """Three files of words."""
    there = clone / "word_language_model" / "data" / "wikitext-2"
    there.mkdir(parents=True, exist_ok=True)
    for name, lines in (("train", 150), ("valid", 40), ("test", 40)):
        (there / f"{name}.txt").write_text(text_of(50, lines))


def tokens(clone: Path) -> None:
    """Two files of tokens, and what they stand for."""
    there = clone / "data" / "made_up"
    there.mkdir(parents=True, exist_ok=True)
    letters = "\n abcdefghijklmnopqrstuvwxyz"
    for name in ("train", "val"):
        made = torch.randint(
            len(letters), (20_000,), generator=torch.Generator().manual_seed(0)
        )
        (there / f"{name}.bin").write_bytes(made.to(torch.int16).numpy().tobytes())
    known = {
        "stoi": {letter: i for i, letter in enumerate(letters)},
        "itos": dict(enumerate(letters)),
    }
    (there / "meta.pkl").write_bytes(
        pickle.dumps({"vocab_size": len(letters), **known})
    )


def words_of_gpt(clone: Path) -> None:
    """A text."""
    (clone / "distributed" / "minGPT-ddp" / "mingpt" / "made_up.txt").write_text(
        text_of(50, 100)
    )


def letters_of_chargpt(clone: Path) -> None:
    """A text."""
    (clone / "projects" / "chargpt" / "input.txt").write_text(
        text_of(50, 100) + "O God, O God!"
    )


def images_and_masks(clone: Path) -> None:
    """Small images, and a mask of each."""
    from PIL import Image

    for name, mode in (("imgs", "RGB"), ("masks", "L")):
        there = clone / "data" / name
        there.mkdir(parents=True, exist_ok=True)
        for i in range(8):
            image = torch.randint(
                2,
                (32, 32),
                generator=torch.Generator().manual_seed(i),
                dtype=torch.uint8,
            )
            Image.fromarray(image.numpy() * 255).convert(mode).save(there / f"{i}.png")


def save_images(there: Path, count: int, mode: str = "RGB") -> None:
    """Small images of noise."""
    from PIL import Image

    there.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        image = torch.randint(
            256,
            (32, 32, 3),
            generator=torch.Generator().manual_seed(i),
            dtype=torch.uint8,
        )
        Image.fromarray(image.numpy()).convert(mode).save(there / f"{i}.png")


def folders_of_images(clone: Path) -> None:
    """Images of two classes, to train with and to validate with."""
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            save_images(clone / "made_up" / part / name, 4)


def photographs(clone: Path) -> None:
    """Images where a program looks for those of Berkeley."""
    for part in ("train", "test"):
        save_images(
            clone / "super_resolution" / "dataset" / "BSDS300" / "images" / part, 4
        )


def papers(clone: Path) -> None:
    """A graph of papers that cite one another, as that of Cora."""
    chance = random.Random(0)
    words = [[str(chance.randrange(2)) for _ in range(20)] for _ in range(1700)]
    lines = [
        "\t".join([str(i), *row, f"class{chance.randrange(7)}"])
        for i, row in enumerate(words)
    ]
    edges = {(chance.randrange(1700), chance.randrange(1700)) for _ in range(3000)}
    there = clone / "gat" / "cora"
    there.mkdir(exist_ok=True)
    (there / "cora.content").write_text("\n".join(lines))
    (there / "cora.cites").write_text(
        "\n".join(f"{one}\t{other}" for one, other in sorted(edges))
    )


def small_images(clone: Path) -> None:
    """Images of noise in the files of CIFAR.

    Torchvision is told not to look at the sums of files.
    """
    chance = random.Random(0)
    data = clone / ("tutorials/data" if (clone / "tutorials").is_dir() else "data")
    for folder, files, labels, names in (
        (
            "cifar-10-batches-py",
            [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"],
            "labels",
            "label_names",
        ),
        ("cifar-100-python", ["train", "test"], "fine_labels", "fine_label_names"),
    ):
        (data / folder).mkdir(parents=True, exist_ok=True)
        for file in files:
            pixels = np.frombuffer(chance.randbytes(8 * 3072), np.uint8).reshape(
                8, 3072
            )
            (data / folder / file).write_bytes(
                pickle.dumps({"data": pixels, labels: [i % 10 for i in range(8)]})
            )
        meta = data / folder / ("batches.meta" if labels == "labels" else "meta")
        meta.write_bytes(pickle.dumps({names: [str(i) for i in range(100)]}))
    (clone / "no_sums").mkdir(exist_ok=True)
    (clone / "no_sums" / "sitecustomize.py").write_text(
        "import torchvision.datasets.cifar as cifar\ncifar.check_integrity = lambda "
        "*_: True\n"
    )


_EXAMPLES = "pytorch/examples"
_NANO = [
    "--dataset=made_up",
    "--batch_size=4",
    "--block_size=64",
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=64",
]
_NANO += [
    "--max_iters=3",
    "--eval_iters=1",
    "--eval_interval=2",
    "--gradient_accumulation_steps=2",
    "--dtype=float32",
]
_NANO_CPU = ["--device=cpu", "--compile=False"]
_NO_DROPOUT = ["--model.attn_pdrop=0", "--model.resid_pdrop=0", "--model.embd_pdrop=0"]
_ADDER = ["--trainer.max_iters=4", *_NO_DROPOUT]
_CHARS = [
    "--trainer.max_iters=2",
    "--trainer.batch_size=4",
    "--model.model_type=gpt-nano",
    *_NO_DROPOUT,
]
_IMAGENET = ["--dummy", "-b", "8", "-j", "0", "-p", "1", "--seed", "1", "--epochs", "1"]
_WORDS = [
    "--epochs",
    "1",
    "--dropout",
    "0",
    "--emsize",
    "32",
    "--nhid",
    "32",
    "--log-interval",
    "5",
]
_UPSCALE = [
    "--upscale_factor",
    "4",
    "--batchSize",
    "2",
    "--nEpochs",
    "1",
    "--threads",
    "0",
]
_DCGAN = [
    "--dataset",
    "fake",
    "--niter",
    "1",
    "--batchSize",
    "8",
    "--workers",
    "0",
    "--manualSeed",
    "1",
]
_PPO = ["--total-timesteps", "256", "--num-steps", "32", "--num-envs", "2"]
_DQN = [
    "--total-timesteps",
    "300",
    "--learning-starts",
    "100",
    "--buffer-size",
    "500",
    "--batch-size",
    "16",
]
_PENDULUM = ["--env-id", "Pendulum-v1"]
_ACTOR = [
    *_PENDULUM,
    "--total-timesteps",
    "200",
    "--learning-starts",
    "50",
    "--buffer-size",
    "500",
]
_POLICY = [*_PENDULUM, "--total-timesteps", "256", "--num-steps", "128"]
_PQN = ["--total-timesteps", "256", "--num-steps", "32", "--num-envs", "2"]
_DIFFUSION = [
    "--data_dir",
    "made_up/train/cat",
    "--image_size",
    "32",
    "--num_channels",
    "32",
    "--num_res_blocks",
    "1",
]
_DIFFUSION += ["--batch_size", "2", "--log_interval", "1"]
_TIMM = ["--model", "resnet18", "--img-size", "64", "-b", "4", "-j", "1"]
_TIMM_TRAIN = [
    *_TIMM,
    "--data-dir",
    "made_up",
    "--num-classes",
    "2",
    "--epochs",
    "1",
    "--log-interval",
    "1",
]
_GANS = [
    "aae",
    "acgan",
    "began",
    "bgan",
    "dcgan",
    "dragan",
    "ebgan",
    "gan",
    "infogan",
    "lsgan",
    "relativistic_gan",
]
_GANS += ["cgan", "sgan", "softmax_gan", "wgan", "wgan_div", "wgan_gp"]
_HALVES = "two GPUs normalise a half of the batch each"
_SMALL_GPT = [
    "data_config.path=made_up.txt",
    "data_config.truncate=1",
    "data_config.block_size=16",
]
_SMALL_GPT += [
    "trainer_config.batch_size=4",
    "trainer_config.data_loader_workers=0",
    "gpt_config.n_layer=1",
]
_SMALL_GPT += ["gpt_config.n_embd=64"]


def _mnist(
    folder: str, *arguments: str, accel: Sequence[str] = (), **more: Any
) -> Program:
    both = ["--epochs", "1", *arguments]
    return Program(
        _EXAMPLES, "main.py", [*accel, *both], folder, both, data=digits, **more
    )


def _distributed(
    folder: str, file: str, *arguments: str, ranks: int = 2, **more: Any
) -> Program:
    return Program(
        _EXAMPLES,
        file,
        arguments,
        f"distributed/{folder}",
        ranks=ranks,
        devices=max(ranks, 2),
        **more,
    )


def _tutorial(
    folder: str, data: Callable[[Path], None] = digits, **more: Any
) -> Program:
    return Program(
        "yunjey/pytorch-tutorial",
        "main.py",
        (),
        f"tutorials/{folder}",
        (),
        data=data,
        **more,
    )


def _cleanrl(name: str, both: Sequence[str]) -> Program:
    return Program(
        "vwxyzjn/cleanrl", f"cleanrl/{name}.py", both, on_cpu=both, paths=["."], steps=8
    )


def _gan(name: str) -> Program:
    both = ["--n_epochs", "1", "--batch_size", "64"]
    return Program(
        "eriklindernoren/PyTorch-GAN",
        f"{name}.py",
        both,
        f"implementations/{name}",
        both,
        data=digits,
    )


PROGRAMS = [
    Program(
        _EXAMPLES,
        "main.py",
        [*_IMAGENET, "--gpu", "0"],
        "imagenet",
        _IMAGENET,
        devices=1,
        steps=2,
        short="--dummy --gpu 0",
    ),
    Program(
        _EXAMPLES, "main.py", _IMAGENET, "imagenet", devices=4, steps=2, short="--dummy"
    ),
    _mnist(
        "mnist", "--dry-run", "--test-batch-size", "50", loads_otherwise_on_gpus=True
    ),
    _mnist(
        "mnist_rnn",
        "--dry-run",
        "--test-batch-size",
        "50",
        accel=["--accel"],
        loads_otherwise_on_gpus=True,
    ),
    _mnist("vae", "--batch-size", "50"),
    _mnist(
        "siamese_network",
        "--dry-run",
        "--test-batch-size",
        "50",
        loads_otherwise_on_gpus=True,
    ),
    Program(
        *(
            _EXAMPLES,
            "main.py",
            ["--epochs", "2", "--train_size", "200", "--test_size", "100"],
        ),
        *(
            "mnist_forward_forward",
            ["--epochs", "2", "--train_size", "200", "--test_size", "100"],
        ),
        data=digits,
        loads_otherwise_on_gpus=True,
    ),
    Program(
        _EXAMPLES,
        "main.py",
        ["--cuda", "--epochs", "1", "--dry-run"],
        "mnist_hogwild",
        data=digits,
    ),
    Program(
        _EXAMPLES,
        "main.py",
        [*_DCGAN, "--accel", "--ngpu", "2"],
        "dcgan",
        _DCGAN,
        steps=2,
        short="--ngpu 2",
        differs=_HALVES,
    ),
    Program(_EXAMPLES, "main.py", [*_DCGAN, "--accel"], "dcgan", _DCGAN, steps=2),
    Program(
        _EXAMPLES,
        "main.py",
        ["--accel", *_WORDS],
        "word_language_model",
        _WORDS,
        data=wikitext,
        short="LSTM",
    ),
    Program(
        *(
            _EXAMPLES,
            "main.py",
            ["--accel", "--model", "Transformer", *_WORDS],
            "word_language_model",
        ),
        *(["--model", "Transformer", *_WORDS],),
        data=wikitext,
        short="--model Transformer",
    ),
    Program(
        *(_EXAMPLES, "main.py", ["--accel", *_UPSCALE], "super_resolution", _UPSCALE),
        data=photographs,
    ),
    Program(_EXAMPLES, "main.py", ["--dry-run"], "gat", ["--dry-run"], data=papers),
    _distributed("ddp", "example.py"),
    _distributed(
        "ddp-tutorial-series", "single_gpu.py", "1", "1", "--batch_size", "512", ranks=0
    ),
    _distributed(
        "ddp-tutorial-series", "multigpu.py", "1", "1", "--batch_size", "256", ranks=0
    ),
    _distributed(
        "ddp-tutorial-series", "multigpu_torchrun.py", "1", "1", "--batch_size", "256"
    ),
    _distributed(
        "ddp-tutorial-series", "multinode.py", "1", "1", "--batch_size", "256"
    ),
    _distributed("tensor_parallelism", "tensor_parallel_example.py", ranks=4),
    _distributed("tensor_parallelism", "sequence_parallel_example.py", ranks=4),
    _distributed("tensor_parallelism", "fsdp_tp_example.py", ranks=4, steps=1),
    _distributed("FSDP2", "example.py"),
    _distributed(
        "FSDP2",
        "example.py",
        "--mixed-precision",
        "--dcp-api",
        short="--mixed-precision --dcp-api",
    ),
    _distributed(
        "minGPT-ddp/mingpt", "main.py", *_SMALL_GPT, steps=2, data=words_of_gpt
    ),
    Program(
        "karpathy/nanoGPT", "train.py", _NANO, on_cpu=[*_NANO, *_NANO_CPU], data=tokens
    ),
    Program(
        "karpathy/nanoGPT", "train.py", _NANO, ranks=2, data=tokens, short="in ranks"
    ),
    Program(
        *(
            "karpathy/nanoGPT",
            "sample.py",
            ["--num_samples=1", "--max_new_tokens=8", "--start=a", "--dtype=float32"],
            ".",
        ),
        *(
            [
                "--num_samples=1",
                "--max_new_tokens=8",
                "--start=a",
                "--dtype=float32",
                *_NANO_CPU,
            ],
        ),
        data=tokens,
    ),
    Program(
        *(
            "karpathy/nanoGPT",
            "bench.py",
            [
                "--real_data=False",
                "--batch_size=1",
                "--block_size=32",
                "--dtype=float32",
            ],
        ),
        *(
            ".",
            [
                "--real_data=False",
                "--batch_size=1",
                "--block_size=32",
                "--dtype=float32",
                *_NANO_CPU,
            ],
        ),
        steps=2,
    ),
    Program(
        "karpathy/minGPT", "adder.py", _ADDER, "projects/adder", _ADDER, paths=["."]
    ),
    Program(
        "karpathy/minGPT",
        "chargpt.py",
        _CHARS,
        "projects/chargpt",
        _CHARS,
        paths=["."],
        data=letters_of_chargpt,
    ),
    Program(
        *("huggingface/pytorch-image-models", "benchmark.py"),
        [
            "--model",
            "resnet18",
            "-b",
            "2",
            "--img-size",
            "64",
            "--num-warm-iter",
            "1",
            "--num-bench-iter",
            "10",
        ],
        short="--model resnet18",
    ),
    Program(
        *("huggingface/pytorch-image-models", "train.py", _TIMM_TRAIN, "."),
        [*_TIMM_TRAIN, "--device", "cpu"],
        data=folders_of_images,
    ),
    Program(
        *(
            "huggingface/pytorch-image-models",
            "validate.py",
            ["--data-dir", "made_up", *_TIMM],
            ".",
        ),
        ["--data-dir", "made_up", *_TIMM, "--device", "cpu"],
        data=folders_of_images,
    ),
    Program(
        "vwxyzjn/cleanrl", "cleanrl/ppo.py", _PPO, on_cpu=_PPO, paths=["."], steps=8
    ),
    Program(
        "vwxyzjn/cleanrl", "cleanrl/dqn.py", _DQN, on_cpu=_DQN, paths=["."], steps=8
    ),
    Program(
        "vwxyzjn/cleanrl", "cleanrl/c51.py", _DQN, on_cpu=_DQN, paths=["."], steps=8
    ),
    _cleanrl("ppo_continuous_action", _POLICY),
    _cleanrl("rpo_continuous_action", _POLICY),
    _cleanrl("td3_continuous_action", _ACTOR),
    _cleanrl("ddpg_continuous_action", _ACTOR),
    _cleanrl("sac_continuous_action", _ACTOR),
    _cleanrl("pqn", _PQN),
    Program(
        *(
            "milesial/Pytorch-UNet",
            "train.py",
            ["-e", "1", "-b", "2", "-s", "1.0"],
            ".",
            ["-e", "1", "-b", "2", "-s", "1.0"],
        ),
        data=images_and_masks,
        steps=2,
    ),
    _tutorial("01-basics/feedforward_neural_network"),
    _tutorial("01-basics/logistic_regression"),
    _tutorial("02-intermediate/convolutional_neural_network", steps=4),
    _tutorial("02-intermediate/recurrent_neural_network"),
    _tutorial("02-intermediate/bidirectional_recurrent_neural_network"),
    _tutorial("02-intermediate/language_model", steps=3, data=train_txt),
    # Of 100 images; it takes no batch of fewer.
    _tutorial("03-advanced/generative_adversarial_network", steps=2),
    _tutorial("03-advanced/variational_autoencoder", steps=6),
    _tutorial(
        "02-intermediate/deep_residual_network",
        steps=2,
        data=small_images,
        paths=["no_sums"],
    ),
    *map(_gan, _GANS),
    Program(
        *(
            "weiaicunzai/pytorch-cifar100",
            "train.py",
            ["-net", "mobilenet", "-gpu", "-b", "4"],
            ".",
        ),
        ["-net", "mobilenet", "-b", "4"],
        steps=4,
        data=small_images,
        paths=["no_sums"],
    ),
    Program(
        *(
            "openai/improved-diffusion",
            "scripts/image_train.py",
            _DIFFUSION,
            ".",
            _DIFFUSION,
        ),
        steps=3,
        data=folders_of_images,
        paths=["."],
    ),
]
