"""Mixed precision: losses with a scale, and weights in few bits.

It answers: is the scale of the loss gone when something reads the gradients, and does
an update change any bit?

    clipping          gradients that are clipped while they are scaled
    scaled_steps      steps with gradients that are still scaled
    unscaled_sums     scaled gradients that are added to unscaled ones
    mixed_scales      gradients of losses that have different scales of mixed precision
    scales_of_ranks   gradients reduced together, each with another scale
    scaled_penalties  penalties of gradients that are those of a scaled loss
    roundings         weights in bfloat16 that their updates do not change
"""

from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.precision.clipping import Clipping
from torchstrategy.testing._lints.precision.mixed_scales import MixedScales
from torchstrategy.testing._lints.precision.roundings import Roundings
from torchstrategy.testing._lints.precision.scaled_penalties import ScaledPenalties
from torchstrategy.testing._lints.precision.scaled_steps import ScaledSteps
from torchstrategy.testing._lints.precision.scales_of_ranks import ScalesOfRanks
from torchstrategy.testing._lints.precision.unscaled_sums import UnscaledSums


def make_lints() -> list[Lint]:
    """One of each lint of this room."""
    return [
        Clipping(),
        ScaledSteps(),
        UnscaledSums(),
        MixedScales(),
        ScalesOfRanks(),
        ScaledPenalties(),
        Roundings(),
    ]
