"""What optimizers and schedulers have, and when they are stepped.

It answers: does each parameter belong to an optimizer that steps, and does each step
use the rate that is meant?

    scheduled            schedulers of learning rates, and where they are stepped
    schedulers           schedules that count micro-batches
    replaced_optimizers  schedulers whose optimizer makes no steps
    horizons             schedules as long as the batches of all ranks
    captured_rates       learning rates of steps that a CUDA graph has captured
    metrics              metrics of schedulers that differ between ranks
    orphans              optimizers whose parameters nobody trains
    frozen_updates       frozen parameters that their optimizer still changes
    group_settings       settings of groups that one value overwrites
"""

from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.optimizers.captured_rates import CapturedRates
from torchstrategy.testing._lints.optimizers.frozen_updates import FrozenUpdates
from torchstrategy.testing._lints.optimizers.group_settings import GroupSettings
from torchstrategy.testing._lints.optimizers.horizons import Horizons
from torchstrategy.testing._lints.optimizers.metrics import Metrics
from torchstrategy.testing._lints.optimizers.orphans import Orphans
from torchstrategy.testing._lints.optimizers.replaced_optimizers import (
    ReplacedOptimizers,
)
from torchstrategy.testing._lints.optimizers.schedulers import Schedulers


def make_lints() -> list[Lint]:
    """One of each lint of this room."""
    return [
        Schedulers(),
        ReplacedOptimizers(),
        Horizons(),
        CapturedRates(),
        Metrics(),
        Orphans(),
        FrozenUpdates(),
        GroupSettings(),
    ]
