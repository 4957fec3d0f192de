"""Lints over ranks, for mistakes that raise no error and give wrong numbers.

They are seen while a program runs.

`Watch` replaces some functions of torch while a program runs, and tells the `Session`
of the run what the program does. The session tells each lint. A lint is a class in a
room that is named after what the lint looks at. It keeps what it needs to know, and
says at the end what it has found.

    torch_internals  the private names of torch that this needs
    evidence         what lints know of a program before they judge it
    findings         what lints have found
    lint             what every lint is told
    layers           batch norm and dropout, in training and in evaluation
    optimizers       what optimizers and schedulers have, and when they are stepped
    checkpoints      what a program saves and loads, and how training goes on from it
    rows             which rows ranks train on, and with which random numbers
    collectives      what ranks exchange: groups, collectives, messages, files
    means            sums and means over ranks, rows, tokens and micro-batches
    gathered         rows that ranks gather from each other for a loss
    precision        losses with a scale of mixed precision, and weights in few bits
    weights          weights and buffers that are to be alike, or to share their memory
    gradients        what a program does with gradients between `backward` and a step
    sharding         models whose parameters ranks divide among themselves
    session          one run of a program, and the lints that are told of it
    watching         a block in which lints watch a program
    lint_training    lints for tests
"""

from torchstrategy.testing._lints.findings import Finding
from torchstrategy.testing._lints.lint_training import TrainingRecord, lint_training
from torchstrategy.testing._lints.watching import Watch

__all__ = ["Finding", "TrainingRecord", "Watch", "lint_training"]
