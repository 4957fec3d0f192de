"""The user's objects: what they hold, what changed, how one acts as a replica's.

It answers: which tensors are in this object, at any depth? Does it hold other objects
now? Who is told that a module was created or that an optimizer took a step? Which
object does this thread see where the step says `model`?

    attribute_contents    what plain attributes hold: containers, objects and tensors
    module_traversal      the parts of a module, those in plain lists and dicts too
    torch_hooks           who is told of new objects and steps; what refuses steps
    proxies               how the user's object acts as the replica's own
    changes               how changes of what containers hold are seen
"""
