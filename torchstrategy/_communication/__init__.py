"""Copies and sums between devices, and between processes.

Tensors of several replicas come in; copies of them on other devices, or their sums, go out. `transfer` alone calls
`torch.nn.parallel` and NCCL.

    native_dtypes       tensors as NCCL and gloo take them, which know fewer dtypes than torch
    copy_streams        the streams on which values come to an accelerator and leave it
    transfer            copies and sums between devices, weighted sums, and many small tensors sent as a few
    options             what a person says about how values travel, and whether this machine can do it
    wire                values as bytes that hold no code, as workers send them to each other
    workers             the processes that train together, as one of them sees the others
    comparisons         what workers compare, as bytes and in words
    reductions          the arithmetic of `Strategy.reduce` and `Strategy.gather`, and sums of sparse gradients
    bounded             calls that may never return
    inherited           what a process that is forked from a worker gives back
    lifelines           connections between all workers, by which they hear why and that one of them is lost
    network_interfaces  the addresses of the network interfaces that the user has chosen
    blame               which worker is lost, and why
    meeting             how workers find each other, and who has not come
    threads             how workers meet that are threads of one process, as tests run them
    joining             how a process joins groups of `torch.distributed`, and leaves them
    operations          operations of `torch.distributed` that are under way, and how they end
    process_group       workers that are joined by a process group of `torch.distributed`
    cross_device_ops    the public ways of reducing and broadcasting: on one device, or on all devices at once
"""
