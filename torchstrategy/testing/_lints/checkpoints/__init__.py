"""What a program saves and loads, and how training goes on from it.

It answers: did every value of a checkpoint come back to where it was, and does training
go on as if it had not ended?

    checkpoints      checkpoints that a program loads, and what they fill
    moved_moments    states of an optimizer that are loaded for other parameters
    kept_states      states that a program keeps, and whose memory is that of the module
    unmatched_names  checkpoints of other names than those of the model that loads them
    resumes          training that goes on with an optimizer that has forgotten
    repeated_epochs  samplers that repeat epochs from before a checkpoint
"""

from torchstrategy.testing._lints.checkpoints.checkpoints import Checkpoints
from torchstrategy.testing._lints.checkpoints.kept_states import KeptStates
from torchstrategy.testing._lints.checkpoints.moved_moments import MovedMoments
from torchstrategy.testing._lints.checkpoints.repeated_epochs import RepeatedEpochs
from torchstrategy.testing._lints.checkpoints.resumes import Resumes
from torchstrategy.testing._lints.checkpoints.unmatched_names import UnmatchedNames
from torchstrategy.testing._lints.lint import Lint


def make_lints() -> list[Lint]:
    """One of each lint of this room."""
    loaded = Checkpoints()
    return [
        loaded,
        Resumes(loaded),
        RepeatedEpochs(loaded),
        MovedMoments(),
        KeptStates(),
        UnmatchedNames(),
    ]
