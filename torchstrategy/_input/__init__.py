"""Datasets: what is read, how a batch is split, and how its parts come to the replicas' devices.

`source` reads a batch from the loader, `splitting` splits it, and `steps` has the parts for each step.
`device_transfer` copies the parts to the devices: when the caller asks for the step (`on_demand`), or ahead of that
(`prefetcher`). `iterator` returns them to the caller.

    arrays             arrays in memory as a dataset of their rows
    loader_states      the saved position of a loader, and whether it can be restored
    options            what a person says about one distributed dataset
    registration       batches of types of the user's own
    batch_types        which values of a batch have rows, how many, and how some of the rows are taken
    source             the loader or iterable that is read, and where its iteration stands
    device_transfer    how a replica's part of a batch comes to its device
    spec               the shapes and dtypes of a dataset's elements
    splitting          which rows of a batch go to which replica
    steps              what is read for each step, and what each replica gets of it
    on_demand          reading when the caller asks for a step
    iterator           one iteration over a distributed dataset
    prefetcher         reading ahead on threads while the step before still runs
    dataset            the distributed dataset, and the ways to make one
    input_iterator     an iterator that can be begun again, as in TensorFlow 1
"""
