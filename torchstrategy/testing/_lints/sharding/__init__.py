"""Models whose parameters ranks divide among themselves.

It answers: do the parts belong to one model, and does each gradient count once?

    divided        parameters that all ranks have whole, in a model that they divide
    shards         parts of gradients that ranks scale apart
    sharded_apart  parameters that ranks shard from other weights
    unreduced      steps while gradients of sharded parameters wait to be reduced
    unsharded      parameters beside those of `fully_shard`
"""

from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.sharding.divided import Divided
from torchstrategy.testing._lints.sharding.sharded_apart import ShardedApart
from torchstrategy.testing._lints.sharding.shards import Shards
from torchstrategy.testing._lints.sharding.unreduced import Unreduced
from torchstrategy.testing._lints.sharding.unsharded import Unsharded


def make_lints() -> list[Lint]:
    """One of each lint of this room."""
    return [Divided(), Shards(), ShardedApart(), Unreduced(), Unsharded()]
