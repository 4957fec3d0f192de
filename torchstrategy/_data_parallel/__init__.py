"""`DataParallel`: a module whose forward runs in replicas, for scripts that compute the loss outside of them.

The arguments of a call are scattered, the module's forward runs under a `CentralStorageStrategy`, and the outputs are
gathered on one device, in one autograd graph with the user's own parameters.

    given_weights    weights that `torch.func.functional_call` gives to such a module for one forward
    data_parallel    the module `DataParallel`, how arguments are scattered, and how outputs are gathered
"""
