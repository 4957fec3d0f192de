"""What people's training scripts do, each written once.

Plain PyTorch and a strategy train it.

A feature is a class: what it makes, and what it does with a batch. Plain PyTorch calls
its `step`. A strategy runs its `step`; or it runs its `backward`, and the update is
made after the run. The state of a training is everything that can be asked for its
`state_dict` (models, optimizers, schedulers, scalers), all gradients, and what its step
has noted.
"""

from __future__ import annotations

import importlib

# Each part adds its features to `features.training.FEATURES`. Their order decides under
# which strategy the matrix trains a feature that differs little from others.
for part in (
    "mixed_precision",
    "compilation",
    "autograd",
    "layers",
    "between_steps",
    "gradients",
    "optimizers",
    "schedulers",
    "losses",
):
    importlib.import_module(f"features.{part}")
