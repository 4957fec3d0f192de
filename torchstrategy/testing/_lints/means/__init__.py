"""Sums and means: over ranks, rows, tokens and micro-batches.

It answers: is the mean of all ranks and micro-batches the mean of all rows?

    scales  losses that are divided too often or not at all
    means   means of means over different numbers
    totals  totals that ranks add up again, with what they have added up before
    biases  biases that count once for each rank
"""

from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.means.biases import Biases
from torchstrategy.testing._lints.means.means import Means
from torchstrategy.testing._lints.means.scales import Scales
from torchstrategy.testing._lints.means.totals import Totals


def make_lints() -> list[Lint]:
    """One of each lint of this room."""
    return [Scales(), Means(), Totals(), Biases()]
