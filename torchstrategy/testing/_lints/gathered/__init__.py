"""Rows that ranks gather from each other for a loss.

It answers: do they keep their gradients, and do they stand in the order of what they are compared with?

    gathered         tensors that lose their gradients when they are gathered
    gathered_orders  rows that are gathered in another order than what they are compared with
    one_sided        rows that are gathered for a loss, and get no gradient from other ranks
    positives        targets among gathered rows that are those of another rank
"""

from torchstrategy.testing._lints.gathered.gathered import Gathered
from torchstrategy.testing._lints.gathered.gathered_orders import GatheredOrders
from torchstrategy.testing._lints.gathered.one_sided import OneSided
from torchstrategy.testing._lints.gathered.positives import Positives
from torchstrategy.testing._lints.lint import Lint


def make_lints() -> list[Lint]:
    """One of each lint of this room."""
    return [Gathered(), GatheredOrders(), OneSided(), Positives()]
