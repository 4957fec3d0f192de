"""Programs for GPUs, written as public ones are.

Nothing in them knows that devices are simulated.
"""
