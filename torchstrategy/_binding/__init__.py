"""How a name in the step comes to mean the replica's own object, and how changes of the user's objects are seen.

A step uses names such as `model`. Before a run, `step_references` finds the objects that the step names, and `proxies`
makes these objects act, in each replica, as the replica's own copy. Other files copy what the user's objects hold, or
find what the user has changed since the last run.

    attribute_contents    what plain attributes hold, at any depth: containers, objects and tensors
    copies                deep copies, and functions that close over a replica's own objects
    module_traversal      the parts of a module, those in plain lists and dicts too
    torch_hooks           who is told of what is created and of steps, and guards that refuse steps of schedulers
    proxies               how the user's object acts as the replica's own
    changes               how changes of what containers hold, and writes on tensors, are seen
    step_references       the modules, tensors, optimizers and trainers that a step uses by name
    hook_references       what hooks reach outside of the model, and so may write
    object_attributes     the attributes of the user's trainers, in each replica
"""
