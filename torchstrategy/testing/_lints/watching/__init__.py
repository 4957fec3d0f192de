"""A block in which lints watch a program.

What is replaced meanwhile, and what it tells the session of the run.

It answers: at which calls of torch does a lint learn of the program, and which run and
rank is it? A program that looks at what was replaced finds a function of the same name,
which gives the same results and raises the same errors.

    telling    which run a thread is in, and how its lints are told
    replaced   functions that tell of their calls, and late replacements
    exchanges  collectives, messages, groups, files, and waits for the device
    backwards  calls of `backward` and of `torch.autograd.grad`
    loaders    loaders and samplers
    models     models, their modes and replicas, and what `fully_shard` divides
    steps      optimizers, schedulers, `GradScaler` and CUDA graphs
    watch      all of these, in one block
"""

from torchstrategy.testing._lints.watching.watch import Watch

__all__ = ["Watch"]
