"""Rows that ranks gather from each other for a loss.

It answers: do they keep their gradients, and do they stand in the order of what they
are compared with?

    gathered         tensors that lose their gradients when they are gathered
    gathered_orders  rows gathered in another order than what they meet
    one_sided        rows gathered for a loss, without others' gradients
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
