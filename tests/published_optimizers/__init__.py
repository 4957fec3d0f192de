"""The optimizers of `torch_optimizer` and `pytorch_optimizer`, in replicas.

They are packages; plain PyTorch is the comparison.

    pip install '.[optimizers]'
    python tests/published_optimizers                      all of them, on the CPU
    python tests/published_optimizers --simulate-devices   on devices with own memory
    python tests/published_optimizers --only Lion,SAM      some classes

A *recipe* is a class, how it is made and how it takes a step: `recipes` finds the first
way in which a small model trains in plain PyTorch. A *trial* trains the same model
under a strategy, with `optimizer.step()` in the step or after the run, and compares
parameters and the optimizer's state, in float64.
"""
