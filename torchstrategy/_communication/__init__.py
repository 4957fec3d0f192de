"""Copies and sums between devices.

Tensors of several replicas come in; copies of them on other devices, or their sums, go out. `transfer` alone calls
`torch.nn.parallel` and NCCL.

    buckets             many small tensors sent as a few large ones
    operands            which values can be added up or put together, and what does not fit
    transfer            copies and sums between devices
    weighted_sums       weighted sums of gradients, of one parameter or of many at once
    options             what a person says about how values travel, and whether this machine can do it
    reductions          the arithmetic of `Strategy.reduce` and `Strategy.gather`
    cross_device_ops    the public ways of reducing and broadcasting across devices
"""
