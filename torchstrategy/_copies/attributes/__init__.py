"""What attributes the user's objects have in each replica, and get from them.

It answers: the step writes `trainer.count += 1` or `self.cache = tensor` in each
replica; what does the user see? Which attributes the copies of a module have, and when
these get what the user has written, is told in `modules`: `plain_attributes` there.

    trainers            the attributes of the user's trainers, in each replica
    kept_by_hooks       what hooks keep outside of the model, for each replica
    merged_values       what the user's modules get for what replicas wrote
    attribute_tables    the `__dict__`s of the user's objects and of the copies
    late_attributes     large attributes, which replicas get when they read them
"""
