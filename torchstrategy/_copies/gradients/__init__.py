"""The gradients of several replicas become the gradient of the whole batch, for one update.

It answers: where is a gradient weighed and added up? Backward adds to the gradients of each replica's parameters
(`replica_gradients`). At a synchronization point `gradient_reducer` multiplies the gradients of each replica by its
weight, adds them up, and gives the sum to the user's own parameters, which the user's optimizer then updates once.

    replica_gradients    the gradients of one replica, as its step sees them; none may be read before it is complete
    user_gradients       the tensors that hold the user's gradients, and are written in place
    gradient_hooks       the user's hooks, late gradients, and a graph that goes on to the user's parameters
    early_copies         gradients that leave an accelerator for the CPU while backward still makes more of them
    worker_gradients     the gradients of all workers, added up
    written_gradients    gradients that every replica has written, on an accelerator, as clipping does
    gradient_reducer     the gradients of all replicas, reduced to the gradient of the whole batch
"""
