"""The user's modules and optimizers in several replicas, kept in step with the user's own objects.

The first run copies the modules for each replica. A replica's parameter on the device of the user's parameter shares
its memory. Before each run the copies get what the user has changed, and after it the user's objects get what the step
has changed.

    placement                where the copies are, and how they are kept in step
    copyable                 the parameters and buffers of modules, and refusals of what cannot be copied
    tensor_copies            copies of tensors, which share memory where the user's tensors do
    kept_by_hooks            what hooks keep outside of the model, of which each replica has its own
    merged_values            what the user's modules get for the attributes that replicas wrote
    attribute_tables         the `__dict__`s of modules and tensors, with those of the replicas' copies
    late_attributes          large attributes of modules, which replicas get when a step first reads them
    metrics                  metrics of torchmetrics: each replica counts, and the counts become one
    module_replica           the copies of the user's modules and variables that one replica has
    waiting_attributes       the large attributes that wait until a step reads them
    run_warnings             warnings of a run: of batches, of lost numbers and of writes on shared tensors
    device_errors            which of the step's tensors a device error of torch is about
    plain_attributes         what plain attributes hold, in the user's modules and in the replicas' copies
    running_statistics       the means of running statistics on accelerators, which the host does not read
    worker_values            the values that all workers have alike, where the replicas are in several processes
    replicated_modules       the copies of all replicas, kept in step with the user's modules
    replicated_run           what all replicas have, and one run on it: how it begins, ends and is undone
    storage                  the user's parameters, to whom they belong, and the replica sets that runs have of them
"""
