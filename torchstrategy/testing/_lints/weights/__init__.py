"""Weights and buffers that are to be alike, or to share their memory.

It answers: do all copies of a parameter or buffer still hold the same values, and if
not, since which step and why?

    multiplied_apart  equal gradients that ranks multiply by other numbers
    causes            why copies have parted
    left_out          gradients that a program forgets to reduce
    replicas          weights that differ between ranks
    untrained_copies  models that ranks train, and copies that nobody trains
    unlike_models     models that all ranks call without gradients, and that differ
    kept_buffers      buffers that a program forgets to broadcast
    thrown_replicas   what a module writes on replicas that are thrown away
    old_copies        copies from before the last steps that losses still use
    aliases           averages of weights that share their memory
    ties              parameters that share their memory
    lost_ties         parameters that shared their memory until their module was moved
"""

from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.weights.aliases import Aliases
from torchstrategy.testing._lints.weights.kept_buffers import KeptBuffers
from torchstrategy.testing._lints.weights.lost_ties import LostTies
from torchstrategy.testing._lints.weights.old_copies import OldCopies
from torchstrategy.testing._lints.weights.replicas import Replicas
from torchstrategy.testing._lints.weights.thrown_replicas import ThrownReplicas
from torchstrategy.testing._lints.weights.ties import Ties
from torchstrategy.testing._lints.weights.unlike_models import UnlikeModels


def make_lints() -> list[Lint]:
    """One of each lint of this room."""
    replicas = Replicas()
    return [
        replicas,
        UnlikeModels(replicas.have_parted),
        KeptBuffers(),
        ThrownReplicas(),
        OldCopies(),
        Aliases(),
        Ties(),
        LostTies(),
    ]
