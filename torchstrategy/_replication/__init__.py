"""The user's modules and optimizers in several replicas, kept in step with the user's own objects.

The first run copies the modules for each replica. A replica's parameter on the device of the user's parameter shares
its memory. Before each run the copies get what the user has changed, and after it the user's objects get what the step
has changed.

    copyable                 refuses objects of which replicas cannot have copies, by their path in the model
    metrics                  metrics of torchmetrics: each replica counts, and the counts become one
    replica_variable         a variable of a module, in one replica
    storage                  where parameters live, and to which strategy they belong; a single replica needs no more
    module_replica           the copies of the user's modules that one replica has
    run_warnings             warnings of a run: of batches, of buffers and of writes on shared tensors
    plain_attributes         what plain attributes hold, in the user's modules and in the replicas' copies
    replicated_modules       the copies of all replicas, kept in step with the user's modules
    replica_set              what all replicas have of the user's modules and optimizers, for one run at a time
    replicated_run           one run on one replica set: how it begins, how it ends, and how it is undone
    replicated_storage       the user's parameters, and the replica sets that runs have of them
"""
