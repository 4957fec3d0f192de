"""The ranks of a distributed program, as threads of one process.

torch_internals  the private names of torch that this needs
orders           which rank goes on, of those that can
happened         what each rank knows of what the others have done
turns            one rank runs at a time, until it waits
record           what ranks have told each other
lines            at which line of the user's program something happened
names            what the user's program calls a tensor
swaps            collectives that ranks call in another order, though they fit together
tensors          numbers taken from tensors, and brought to them
refusals         what a backend refuses of the tensors of one rank
moments          when ranks come to a collective, and have what they get
witnesses        who is told of each collective
exchanges        what ranks bring to a collective, and what they get
world            the ranks of a run, and what they exchange
store            the store of `torch.distributed`
groups           the process group
alone            a program without ranks is the only rank
profilers        one rank at a time may have torch's profiler
imports          what modules say of loggers and warnings while they are imported
part             a part of what a process has once
process          what Python keeps once for a process
belongings       what each rank has for itself, as a process has
signals          each rank has handlers of signals
injection        failures that a test plans
faults           ranks that fail where the test says
run_ranks        runs the ranks
marked_tests     a test that runs in ranks
"""

from torchstrategy.testing._ranks.faults import fail_in_rank
from torchstrategy.testing._ranks.record import Collective, RankRecord
from torchstrategy.testing._ranks.run_ranks import run_ranks
from torchstrategy.testing._ranks.turns import RanksStopped

__all__ = ["Collective", "RankRecord", "RanksStopped", "fail_in_rank", "run_ranks"]
