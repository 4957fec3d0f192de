"""Compares the same step in plain PyTorch and in replicas, and says why they differ.

device_errors    torch's errors about tensors and generators of another device
held             what a function holds besides its arguments
kept_state       what the step keeps in globals, closures and attributes
loss_counts      what the losses of the replicas were divided by
record           what one step of a training leaves behind, as numbers on the CPU
difference       what differs between two records of the same step
randomness       the random numbers and tensors that several trainings share
row_statistics   where the step makes one number of its rows
training         one training of the problem, in plain PyTorch or under the strategy
comparison       both trainings, step by step, until they differ
experiments      the problem with one thing changed, trained again
causes           why a step in replicas differs from the step in plain PyTorch
messages         the message of a failed comparison
same_as_plain    the assertion that a user calls
"""

from torchstrategy.testing._same_as_plain.same_as_plain import assert_same_as_plain

__all__ = ["assert_same_as_plain"]
