"""Who waits for whom, and how values become one.

It answers: who takes part in a run, and how much does each count? Where do replicas wait for one another, and what do
they get there? A group is a replica alone, several replicas in this process (`replica_threads`), or several processes
(`processes`). Tensors of several replicas come in; copies of them on other devices, or their sums, go out. `transfer`
alone calls `torch.nn.parallel` and NCCL.

    native_dtypes      tensors as NCCL and gloo take them, which know fewer dtypes than torch
    copy_streams       the streams on which values come to an accelerator and leave it
    transfer           copies and sums between devices, and many small tensors sent as a few
    weighing           gradients times the weights of replicas; and a Note that lists where a gradient is weighed
    workers            the processes that train together, as one of them sees the others
    reductions         the arithmetic of `Strategy.reduce` and `Strategy.gather`, and sums of sparse gradients
    device_streams     the streams of accelerators that replicas use, and who waits for whom
    instruments        the hooks for tests: they are told where replicas are, and may say which one goes next
    random_streams     the random numbers of each replica
    participants       how much each replica of a run counts, and which replicas take part
    group              one replica of one run: it synchronizes with the others, and reduces and gathers with them
    worker_streams     the caller's generators, which all workers keep in the state of worker 0
    one_of_several     one of several replicas, on the caller's thread or on one of its own, and what it reports
    replica_threads    where the replicas of a strategy run, and whose turn it is
    processes          several processes that train together: how they meet, what they send, and who is lost
"""
