"""One call of `run`: how it begins, calls the step and ends, on the user's own objects.

It answers: what happens on one device, and where each of several workers has one
replica (`own`)? How much does a loss count (`losses`)? What is alike in all workers? It
knows no copies: those are in `_copies`, on the floor above.

    placement         where the copies are, and how they are kept in step
    metrics           torchmetrics: each replica counts, and the counts become one
    worker_values     the values that the workers of a strategy have alike
    example_counts    how much each replica counts, as the user's function says
    given_values      values that replicas get or make: where and what they are
    losses            how much each replica's loss counts, by what divided it
    storage           where parameters live, and to which strategy they belong
    module_tensors    parameters, buffers, and tensors that learn and are neither
    own               the step of a worker with one replica, on the user's own objects
    run_losses        which runs look at their losses, and what they warn of
    shared_methods    methods that run once for all replicas, and their arguments
    refusals          messages of what replicas cannot do, however they run
    lone_replica      a run in the only replica of one of several workers
"""
