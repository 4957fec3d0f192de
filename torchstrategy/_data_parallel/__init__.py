"""`DataParallel`: a module whose forward runs in replicas, for scripts that compute the loss outside of them.

The arguments of a call are scattered, the module's forward runs under a `CentralStorageStrategy`, and the outputs are
gathered on one device, in one autograd graph with the user's own parameters.

    scatter_gather    scatters the arguments of one call to the replicas, and gathers their outputs
    data_parallel     the module `DataParallel`
"""
