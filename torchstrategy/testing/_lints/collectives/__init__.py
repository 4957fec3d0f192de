"""What ranks make and exchange: groups, collectives, messages and files.

It answers: do all ranks meet in the same calls, and has each waited for what it uses?

    waits           tensors that are used before the program has waited for them
    outputs         collectives that write on one tensor what several ranks give
    files           files that one rank writes and another reads, in no order
    process_groups  process groups that ranks make with other members
    messages        gradients that come back for the output of another micro-batch
"""

from torchstrategy.testing._lints.collectives.files import Files
from torchstrategy.testing._lints.collectives.messages import Messages
from torchstrategy.testing._lints.collectives.outputs import Outputs
from torchstrategy.testing._lints.collectives.process_groups import ProcessGroups
from torchstrategy.testing._lints.collectives.waits import Waits
from torchstrategy.testing._lints.lint import Lint


def make_lints() -> list[Lint]:
    """One of each lint of this room."""
    return [Waits(), Outputs(), Files(), ProcessGroups(), Messages()]
