"""A training whose loss is a mean over tokens, and the losses that it logs.

In plain PyTorch and under a strategy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy

TOKENS, CLASSES, IGNORED = 5, 4, -100
# By batch, the tokens of each row that count. A replica may have rows without tokens,
# or no row.
VALID = ((5, 1, 2, 4, 1, 3, 2), (3, 5, 4, 1, 0, 0, 0), (4,), (1, 5, 0))
BY_LOSS = torchstrategy.RunOptions(gradient_reduction="loss")


def token_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for valid in VALID:
        x = torch.randn(len(valid), TOKENS, 3, generator=generator, dtype=torch.float64)
        labels = torch.randint(CLASSES, (len(valid), TOKENS), generator=generator)
        labels[torch.arange(TOKENS) >= torch.tensor(valid)[:, None]] = IGNORED
        made.append((x, labels))
    return made


def tokens_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (labels != IGNORED).sum()


def tagger() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(3, CLASSES).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.3)


def logged_over_tokens(
    strategy: torchstrategy.Strategy,
    counts: str = "a tensor",
    options: torchstrategy.RunOptions = BY_LOSS,
) -> list[float]:
    """The loss of each step, and that of the epoch, as docs/logging.md logs them."""
    with strategy.scope():
        model, optimizer = tagger()

    def step(x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Any]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).transpose(1, 2), labels)
        loss.backward()
        optimizer.step()
        tokens = tokens_of(x, labels)
        return loss.detach(), tokens if counts == "a tensor" else int(tokens)

    losses, total, count = [], 0.0, 0.0
    for batch in strategy.experimental_distribute_dataset(token_batches()):
        loss, tokens = strategy.run(step, args=tuple(batch), options=options)
        mean = float(strategy.reduce("mean", loss, axis=None, weights=tokens))
        of_all = float(strategy.reduce("sum", tokens, axis=None))
        losses.append(mean)
        total, count = total + mean * of_all, count + of_all
    return [*losses, total / count]


def printed_over_tokens() -> list[float]:
    """What plain PyTorch prints."""
    model, optimizer = tagger()
    losses, total, count = [], 0.0, 0
    for x, labels in token_batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).transpose(1, 2), labels)
        loss.backward()
        optimizer.step()
        tokens = int(tokens_of(x, labels))
        losses.append(loss.item())
        total, count = total + loss.item() * tokens, count + tokens
    return [*losses, total / count]
