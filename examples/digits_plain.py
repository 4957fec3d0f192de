"""A small convolutional network learns the 1,797 handwritten digits of scikit-learn.

digits_plain.py is plain PyTorch, and digits.py is the same program under a strategy. To
see all that changes:

    diff examples/digits_plain.py examples/digits.py
"""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import digits_problem as problem


def build(options: Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = problem.Net()
    if options.optimizer == "adam":
        # The usual eps of 1e-8 is as small as float32's rounding errors here, and Adam
        # would amplify these errors.
        return model, torch.optim.Adam(model.parameters(), lr=options.lr, eps=1e-6)
    return model, torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)


def train(options: Namespace) -> tuple[nn.Module, list[Tensor]]:
    """The trained model, and the mean loss of each step."""
    torch.manual_seed(options.seed)
    loader = problem.batches(options)
    model, optimizer = build(options)

    def train_step(batch: list[Tensor]) -> Tensor:
        images, labels = batch
        optimizer.zero_grad()
        losses = F.cross_entropy(model(images), labels, reduction="none")
        losses.mean().backward()
        optimizer.step()
        return losses.detach()

    losses = []
    for epoch in range(options.epochs):
        for batch in problem.progress(loader, epoch):
            losses.append(train_step(batch).mean())
    return model, losses


if __name__ == "__main__":
    parser = problem.argument_parser()
    problem.main(train, parser.parse_args())
