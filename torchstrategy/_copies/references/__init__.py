"""Which objects a step uses by name, and which of them its hooks reach.

It answers: the step is a function; which modules, tensors, optimizers and trainers does
it close over? And which function has a replica, that closes over its own objects
instead?

    deep_copies        deep copies, and functions that close over replicas' objects
    step_references    the modules, tensors and trainers that a step uses by name
    hook_references    what hooks reach outside of the model, and so may write
"""
