"""A word-level LSTM learns the manual of the Python language.

The program shows mixed precision, padded batches and accumulated gradients.

The text is what `help("class")` and the like show. It comes with every Python, as
`pydoc_data.topics`: some 2,300 different sentences of 55,000 words, of which every
tenth sentence is held out.

Sentences differ in length, so replicas, batches and updates have different numbers of
words, and the loss is the mean over all words of an update. By
`gradient_reduction="loss"`, N replicas and K batches compute exactly this mean, and
learn what plain PyTorch learns from one large batch:

    python examples/language_model.py --replicas 3 --accumulate 4 --check
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from tqdm import tqdm

import torchstrategy

PAD, UNKNOWN, END = range(3)
# How much losses and weights may differ from those of plain PyTorch in the same
# precision: replicas add the same numbers in another order, and mixed precision keeps
# two or three digits of each sum.
ALLOWED = {"float32": (1e-5, 1e-5), "bfloat16": (5e-3, 5e-2), "float16": (5e-3, 5e-2)}


@functools.cache
def corpus() -> tuple[list[list[int]], list[list[int]], int]:
    """Sentences to train on and to test on, and how many different words there are.

    Each sentence is a list of the numbers of its words.
    """
    paragraphs = (
        " ".join(paragraph.split())
        for topic in topics.values()
        for paragraph in topic.split("\n\n")
    )
    sentences = dict.fromkeys(
        s for p in paragraphs if p.endswith(".") for s in re.split(r"(?<=[.:;]) ", p)
    )
    # Words and punctuation.
    tokens = [re.findall(r"\w+|[^\w\s]", sentence.lower()) for sentence in sentences]
    counts = Counter(word for sentence in tokens for word in sentence)
    known = [word for word, count in counts.items() if count > 1]
    numbers = {word: number for number, word in enumerate(known, start=END + 1)}
    encoded = [
        [END, *(numbers.get(word, UNKNOWN) for word in sentence), END]
        for sentence in tokens
    ]
    return (
        [s for i, s in enumerate(encoded) if i % 10],
        encoded[::10],
        END + 1 + len(known),
    )


def padded(sentences: list[list[int]]) -> tuple[Tensor, int]:
    """A batch, of shape [sentences, longest]; and its number of words to predict."""
    batch = pad_sequence(
        [torch.tensor(s) for s in sentences], batch_first=True, padding_value=PAD
    )
    return batch, sum(len(s) - 1 for s in sentences)


class LanguageModel(nn.Module):
    """The logits of each next word.

    The decoder shares its weight with the embedding.
    """

    def __init__(self, words: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        # On the CPU in float32: torch's LSTM has no bfloat16 there, unless the
        # processor has.
        with torch.autocast("cpu", enabled=False):
            features, _ = self.lstm(self.embedding(words))
        return self.decoder(features)


def word_loss(
    model: nn.Module, sentences: Tensor, precision: str = "float32"
) -> Tensor:
    """The mean loss of the next words; padding is none."""
    with torch.autocast(
        sentences.device.type, getattr(torch, precision), enabled=precision != "float32"
    ):
        logits = model(sentences[:, :-1])
    return F.cross_entropy(
        logits.float().transpose(1, 2), sentences[:, 1:], ignore_index=PAD
    )


def build(options: argparse.Namespace, updates: int) -> tuple[Any, ...]:
    """The model, and its optimizer, scheduler and scaler."""
    model = LanguageModel(corpus()[2])
    # The usual eps of 1e-8 is as small as float32's rounding errors here, and Adam
    # would amplify these errors.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, eps=1e-6)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=options.lr, total_steps=updates
    )
    # Only float16 needs a scaler. For the others it is disabled and does nothing, and
    # the step is the same for all.
    scaler = torch.amp.GradScaler(
        torch.device(options.device).type, enabled=options.precision == "float16"
    )
    return model, optimizer, scheduler, scaler


def update(model: nn.Module, optimizer: Any, scheduler: Any, scaler: Any) -> None:
    """One update by the gradients that are there."""
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()


def groups(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """The batches of one update after the other, for ever."""
    while True:
        iterator = iter(batches)
        while group := list(itertools.islice(iterator, size)):
            yield group


def train(options: argparse.Namespace, updates: int) -> tuple[nn.Module, list[Tensor]]:
    """The trained model, and the mean loss of each update."""
    torch.manual_seed(options.seed)
    devices = [options.device] * options.replicas
    strategy = torchstrategy.CentralStorageStrategy(
        devices, options.device, gradient_reduction="loss"
    )
    loader = DataLoader(
        corpus()[0], options.batch_size, shuffle=True, collate_fn=padded
    )
    loader = strategy.experimental_distribute_dataset(loader)
    with strategy.scope():
        model, optimizer, scheduler, scaler = build(options, updates)

    def train_step(
        sentences: Tensor, share: float, is_last: bool
    ) -> tuple[Tensor, Tensor]:
        """Trains on one batch, which has this share of the words of the update."""
        loss = word_loss(model, sentences, options.precision) * share
        scaler.scale(loss).backward()
        if is_last:
            update(model, optimizer, scheduler, scaler)
        return loss.detach(), (sentences[:, 1:] != PAD).sum()

    losses = []
    all_groups = itertools.islice(groups(loader, options.accumulate), updates)
    for group in tqdm(
        all_groups, total=updates, unit="update", disable=None, leave=False
    ):
        words = sum(count for _, count in group)
        loss = 0.0
        for i, (sentences, count) in enumerate(group, start=1):
            own_losses, own_words = strategy.run(
                train_step, args=(sentences, count / words, i == len(group))
            )
            loss += strategy.reduce("mean", own_losses, axis=None, weights=own_words)
        losses.append(loss)
    return model, losses


def train_plainly(
    options: argparse.Namespace, updates: int
) -> tuple[nn.Module, list[Tensor]]:
    """The same in plain PyTorch, with one large batch for each update."""
    torch.manual_seed(options.seed)
    loader = DataLoader(
        corpus()[0],
        options.batch_size * options.accumulate,
        shuffle=True,
        collate_fn=padded,
    )
    with torch.device(options.device):
        model, optimizer, scheduler, scaler = build(options, updates)
    losses = []
    for [(sentences, _)] in itertools.islice(groups(loader, 1), updates):
        loss = word_loss(model, sentences.to(options.device), options.precision)
        scaler.scale(loss).backward()
        update(model, optimizer, scheduler, scaler)
        losses.append(loss.detach())
    return model, losses


@torch.no_grad()
def perplexity(model: nn.Module, device: str) -> float:
    """The perplexity of the held-out sentences.

    Outside `run` the model is plain PyTorch.
    """
    loader = DataLoader(corpus()[1], 64, collate_fn=padded)
    loss = sum(
        word_loss(model, sentences.to(device)).item() * words
        for sentences, words in loader
    )
    return math.exp(loss / sum(words for _, words in loader))


def unigram_perplexity() -> float:
    """The perplexity of a model that only knows how frequent each word is."""
    sentences, held_out, different = corpus()
    counts = Counter(word for sentence in sentences for word in sentence[1:])
    total = sum(counts.values()) + different
    logs = [
        math.log((counts[word] + 1) / total)
        for sentence in held_out
        for word in sentence[1:]
    ]
    return math.exp(-sum(logs) / len(logs))


def check(options: argparse.Namespace, precision: str, updates: int = 8) -> None:
    """Trains a little in replicas and plainly.

    The program exits with an error unless the results are the same.
    """
    options = argparse.Namespace(**{**vars(options), "precision": precision})
    model, losses = train(options, updates)
    plain_model, plain_losses = train_plainly(options, updates)
    loss = distance(losses, plain_losses)
    weight = distance(model.state_dict().values(), plain_model.state_dict().values())
    allowed_loss, allowed_weight = ALLOWED[precision]
    print(
        f"largest difference from plain PyTorch in {precision}: losses {loss:.1e} "
        f"(allowed {allowed_loss:.0e}), weights {weight:.1e} (allowed "
        f"{allowed_weight:.0e})"
    )
    # The condition is written like this so that a NaN fails.
    if not (loss <= allowed_loss and weight <= allowed_weight):
        sys.exit("the run under the strategy is not the plain one")


def distance(tensors: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    return max(
        (a - b).abs().max().item() for a, b in zip(tensors, expected, strict=True)
    )


def main(options: argparse.Namespace) -> None:
    if options.check:
        for precision in {"float32": 1, options.precision: 1}:
            check(options, precision)
    start = time.perf_counter()
    model, losses = train(options, options.updates)
    print(
        f"{len(losses)} updates in {time.perf_counter() - start:.1f} s, last loss "
        f"{losses[-1]:.4f}"
    )
    found, unigram = perplexity(model, options.device), unigram_perplexity()
    print(
        f"perplexity of held-out sentences: {found:.1f}; of a unigram model: "
        f"{unigram:.1f}"
    )
    if options.check and not found < unigram / 2:
        sys.exit("the model has not learned the language")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=positive, default=2, help="default: 2")
    parser.add_argument("--device", default="cpu", help="of all replicas; default: cpu")
    parser.add_argument(
        "--precision",
        choices=list(ALLOWED),
        default="bfloat16",
        help="default: bfloat16",
    )
    parser.add_argument(
        "--updates",
        type=positive,
        default=270,
        help="default: 270, four times through the text",
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=16,
        help="sentences, over all replicas; default: 16",
    )
    parser.add_argument(
        "--accumulate",
        type=positive,
        default=2,
        help="batches of an update; default: 2",
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=0.02,
        help="the highest learning rate; default: 0.02",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first weights and of the shuffling; default: 0",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also train plainly, and fail if the two differ",
    )
    return parser


if __name__ == "__main__":
    main(argument_parser().parse_args())
