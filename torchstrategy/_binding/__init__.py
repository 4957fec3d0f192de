"""How a name in the step comes to mean the replica's own object, and how changes of the user's objects are seen.

A step uses names such as `model`. Before a run, `step_references` finds the objects that the step names, and `proxies`
makes these objects act, in each replica, as the replica's own copy. Other files copy what the user's objects hold, or
find what the user has changed since the last run.

    attribute_contents    what plain attributes hold, at any depth: containers, objects and tensors
    closure_rebinding     functions that close over parts of a model, for a replica's parts
    creation_hooks        which modules, optimizers and schedulers are created while a scope is open
    deep_copy             deep copies in which an object that cannot be copied is the same object
    module_traversal      the parts of a module, those in plain lists and dicts too
    optimizer_hooks       who is told of the steps that optimizers take
    stepper_guards        refuse steps of schedulers and scalers that a run does not know
    proxies               how the user's object acts as the replica's own
    uncounted_writes      writes on tensors for which torch's version counter does not go up
    snapshots             how changes of what containers hold are seen
    step_references       the modules, tensors, optimizers and trainers that a step uses by name
    tensor_versions       the user's tensors, and whether they were written since the copies last agreed
    object_attributes     the attributes of the user's trainers, in each replica
"""
