"""Layers that compute one thing in training and another in evaluation.

The statistics that they keep are looked at, too.

Batch norm and dropout. It answers: which rows do their statistics come from, and is the
mode the one that the program means?

    batch_norm     batch norm with the statistics of one rank
    frozen_norms   batch norm of a frozen part that is in training mode
    averages       averages that lack the statistics of batch norm
    counted_again  batch norm that counts a batch again in a part that is computed again
    modes          models that are trained in evaluation mode after an evaluation
    undone_modes   frozen parts whose evaluation mode is undone
    recomputed     dropout that drops other values when a part is computed again
"""

from torchstrategy.testing._lints.layers.averages import Averages
from torchstrategy.testing._lints.layers.batch_norm import FewStatistics
from torchstrategy.testing._lints.layers.counted_again import CountedAgain
from torchstrategy.testing._lints.layers.frozen_norms import FrozenNorms
from torchstrategy.testing._lints.layers.modes import Modes
from torchstrategy.testing._lints.layers.recomputed import Recomputed
from torchstrategy.testing._lints.layers.undone_modes import UndoneModes
from torchstrategy.testing._lints.lint import Lint


def make_lints() -> list[Lint]:
    """One of each lint of this room."""
    norms = FrozenNorms()
    return [
        norms,
        FewStatistics(norms.has_found),
        Averages(),
        CountedAgain(),
        Modes(),
        UndoneModes(),
        Recomputed(),
    ]
