"""The user's objects: what they hold, what has changed in them, and how one acts as a replica's own.

It answers: which tensors are in this object, at any depth? Does it hold other objects now? Who is told that a module
was created or that an optimizer took a step? Which object does this thread see where the step says `model`?

    attribute_contents    what plain attributes hold, at any depth: containers, objects and tensors
    module_traversal      the parts of a module, those in plain lists and dicts too
    torch_hooks           who is told of what is created and of steps, and guards that refuse steps of schedulers
    proxies               how the user's object acts as the replica's own
    changes               how changes of what containers hold are seen
"""
