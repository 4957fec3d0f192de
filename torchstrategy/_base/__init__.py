"""What every other room uses: types, errors, options, devices, values, and where a thread is.

It answers: what is a device, a value of several replicas, a nested container? Where is this thread? No file here
decides what becomes of a model, a gradient or a batch. But `torch_internals` reads and writes gradients for the rooms
above, and a `PerReplica` keeps how many rows of a batch each replica got. `tree` takes nested containers of values
apart and puts them together again. A value of several replicas is a `DistributedValues`. `context` says in which
replica a thread is.

    errors                words for messages, the warnings of a run, and where in a replica an exception was raised
    row_errors            the errors for rows that do not fit, all in one place
    options               what a person says about one run, one variable or one value function
    torch_internals       the only imports of private names of torch, each with its reason
    recurrent_layers      the weights of recurrent layers, which cuDNN wants in one piece of memory
    memory                where the numbers of a tensor lie: several at one place, or in memory that tensors share
    marks                 whether a tensor was written, and whether two have the same numbers: the one way to ask each
    writes                writes on tensors that have copies, those that torch does not count included
    plain                 what a plain value is: a number, a text or the like, in which nobody can change anything
    worker_threads        whether this thread stands for a process, as tests run workers
    types                 type aliases, and what the lower rooms know of a strategy, a replica's context and variables
    devices               which device a name means, and whether it is there
    streams               which streams of accelerators are current on a thread
    trace                 the ranges that torch's profilers show of a run
    tree                  nested containers and dataclasses: taking them apart, and putting them together again
    context               of each thread: in which strategy and replica it is, on which device, and torch's own state
    distributed_values    one value per replica: how they are made, taken apart and printed, and what they refuse
    row_lists             lists of Python objects with one for each row, of which each replica has its own
    result_leaves         the leaves of what steps return, those in dataclasses included
    objects               what the user's objects hold, what has changed in them, and how one acts as a replica's own
"""
