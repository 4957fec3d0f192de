"""What every other room uses.

It has types, errors, options, devices, values, and where a thread is.

It answers: what is a device, a value of several replicas, a nested container? Where is
this thread? No file here decides what becomes of a model, a gradient or a batch. But
`torch_internals` reads and writes gradients for the rooms above, and a `PerReplica`
keeps how many rows of a batch each replica got. `tree` takes nested containers of
values apart and puts them together again. A value of several replicas is a
`DistributedValues`. `context` says in which replica a thread is.

    errors                words for messages, the warnings of a run, and notes on errors
    row_errors            the errors for rows that do not fit, all in one place
    options               what a person says about a run, a variable or a function
    torch_internals       the only imports of private names of torch, with reasons
    recurrent_layers      their weights, which cuDNN wants in one piece of memory
    memory                where the numbers of a tensor lie, also in shared memory
    marks                 whether a tensor was written, or two have the same numbers
    writes                writes on tensors that have copies, also uncounted ones
    weak_references       which of the user's objects still live
    plain                 what a plain value is, such as a number: nobody can change it
    worker_threads        whether this thread stands for a process, as tests run workers
    types                 type aliases, and what lower rooms know of strategies
    devices               which device a name means, and whether it is there
    streams               which streams of accelerators are current on a thread
    trace                 the ranges that torch's profilers show of a run
    tree                  nested containers and dataclasses, taken apart and rebuilt
    context               in which strategy and replica a thread is, and torch's state
    distributed_values    one value per replica: how they are made and what they refuse
    row_lists             lists of Python objects with one object for each row
    result_leaves         the leaves of what steps return, those in dataclasses included
    objects               what the user's objects hold, and how one acts as a replica's
"""
