"""Several replicas in one process: what a replica has in the place of a user's object.

It answers: which objects does the step name, which copies does a replica get of them,
and what do the user's objects get back? The first run copies the modules for each
replica. A replica's parameter on the device of the user's parameter shares its memory.
Before each run the copies get what the user has changed, and after it the user's
objects get what the step has changed. The door is `ReplicatedStorage.begin_run` in
`replicated_storage`; of the rest, `DataParallel` uses `given_weights`, `refusals` and
the hooks of gradients.

    refusals              refusals of what cannot be copied
    tensor_copies         copies of tensors, which share memory if the user's do
    given_weights         weights that `functional_call` gives to such a module
    references            which objects a step uses by name
    run_warnings          a run's warnings: batches, lost numbers, shared tensors
    device_errors         which of the step's tensors a device error of torch is about
    attributes            what trainers and hooks keep, in each replica
    gradients             the gradients of all replicas become one
    replica_steppers      optimizers, schedulers and scalers: one step for all
    optimizer_copies      copies of optimizers, for replicas with own parameters
    modules               the copies of the user's modules, kept in step
    replicated_run        what all replicas have, and one run on it, also if it fails
    replicated_storage    which copies a run has: it is begun, ended and undone here
"""
