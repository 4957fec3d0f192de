"""How the gradients of several replicas become that of the whole batch.

It answers: where is a gradient weighed and added up? Backward adds to the gradients of
each replica's parameters (`replica_gradients`). At a synchronization point
`gradient_reducer` multiplies the gradients of each replica by its weight, adds them up,
and gives the sum to the user's own parameters, which the user's optimizer then updates
once.

    replica_gradients    one replica's gradients, as its step may see them
    user_gradients       the tensors of the user's gradients, written in place
    gradient_hooks       the user's hooks, late gradients, and the user's graph
    early_copies         gradients that leave an accelerator during backward
    worker_gradients     the gradients of all workers, added up
    written_gradients    gradients that every replica has written, as by clipping
    gradient_reducer     all replicas' gradients, reduced to that of the batch
"""
