"""Gradients of several replicas become the gradient of the whole batch, and one update follows for all of them.

Backward adds to the parameters of a replica (`replica_gradients`); at a synchronization point `gradient_reducer` weighs
what the replicas have (`replica_weights`), adds it up, and gives the sum to the user's own parameters, which the
user's optimizer then updates once.

    replica_gradients        the gradients of one replica, as its step sees them
    replica_weights          how much each replica counts: its rows, of the rows of the batch
    schedulers               learning-rate schedulers and `GradScaler`, which count each step once
    all_reduced_gradients    gradients that an all-reduce left on every device
    graph_parameter          a replica's parameter as a part of the user's own autograd graph
    hooked_gradients         the user's gradient hooks, which see the sum of all replicas once
    late_gradients           gradients of a backward that runs between two runs
    optimizer_copies         copies of the user's optimizers, where replicas have parameters of their own
    replica_optimizer        an optimizer in a replica: its step is one for all replicas
    gradient_reducer         the gradients of all replicas, and what they are together
"""
