"""Runs a program for GPUs on simulated devices, and reports what it did.

messages     how an error that ended the program is printed
output       where the report goes
observer     copies between devices, and where the program waits for one
deep_alias   "cuda" also in what devices and tensors say of themselves
prediction   how long the program would take on GPUs
programs     a script or a module, run as Python runs it
report       what is printed at the end
comparison   two reports
command      the command line
"""

from torchstrategy.testing._runner.command import main

__all__ = ["main"]
