"""Virtual time: what a program would do on GPUs, and for how long, by a model.

profiles       what is known of GPUs
spans          what takes time
costs          how long an operator and a collective take: the cost model
steps          where a step of the program ends
acts           what a clock was told, in order
hosts          the clocks of the program, of ranks, and of others who bring theirs
clock          the clocks of streams and engines, and the rules
fused          what a step of an optimizer would cost, if it were fused
timeline       a stretch of virtual time
step_times     what each step takes
replay         the acts, played again
advice         changes that were predicted to be faster
report         in words
perfetto       as a file for Perfetto
picture        as a picture
trace          the questions that a block answers
virtual_time   the block
"""

from __future__ import annotations

from torchstrategy.testing._virtual_time.profiles import DeviceProfile
from torchstrategy.testing._virtual_time.trace import VirtualTrace
from torchstrategy.testing._virtual_time.virtual_time import virtual_time

__all__ = ["DeviceProfile", "VirtualTrace", "virtual_time"]
