"""One call of `run`: how it begins, calls the step and ends, on the user's own objects.

It answers: what happens on one device, and where each of several workers has one replica (`own`)? How much does a loss
count (`losses`)? What is alike in all workers? It knows no copies: those are in `_copies`, on the floor above.

    placement         where the copies are, and how they are kept in step
    metrics           metrics of torchmetrics: each replica counts, and the counts become one
    worker_values     the values that all workers have alike, where the replicas are in several processes
    example_counts    how much each replica counts, where a function of the user's says so
    given_values      values that replicas are given, or have made: where they are sent, and what they hold
    losses            how much the loss of each replica counts, by what it was divided by
    storage           where parameters live, and to which strategy each module and parameter belongs
    module_tensors    the parameters and buffers of modules, and the tensors that learn and are neither
    own               the step of a worker with one replica, on the user's own objects
    run_losses        which runs look at their losses, and what they warn of
    lone_replica      a run in the only replica of one of several workers
"""
