"""The attributes of the user's objects in each replica, and what the user's objects get for them.

It answers: the step writes `trainer.count += 1` or `self.cache = tensor` in each replica; what does the user see?
Which attributes the copies of a module have, and when these get what the user has written, is told in `modules`:
`plain_attributes` there.

    trainers            the attributes of the user's trainers, in each replica
    kept_by_hooks       what hooks keep outside of the model, of which each replica has its own
    merged_values       what the user's modules get for the attributes that replicas wrote
    attribute_tables    the `__dict__`s of modules and tensors, with those of the replicas' copies
    late_attributes     large attributes of modules, which replicas get when a step first reads them
"""
