"""What a program does with gradients between `backward` and a step.

It answers: does every gradient come to the step that it is for, and whole?

    clipped_alone   gradients that each rank clips before they are reduced
    gradient_hooks  hooks of gradients whose result is no mean over ranks
    zeroed          gradients that are set to zero before anything has read them
    dropped         results computed from parameters or gradients, and dropped
    opponents       gradients that are left from the step of an opponent
"""

from torchstrategy.testing._lints.gradients.clipped_alone import ClippedAlone
from torchstrategy.testing._lints.gradients.dropped import Dropped
from torchstrategy.testing._lints.gradients.gradient_hooks import GradientHooks
from torchstrategy.testing._lints.gradients.opponents import Opponents
from torchstrategy.testing._lints.gradients.zeroed import Zeroed
from torchstrategy.testing._lints.lint import Lint


def make_lints() -> list[Lint]:
    """One of each lint of this room."""
    return [ClippedAlone(), GradientHooks(), Zeroed(), Dropped(), Opponents()]
