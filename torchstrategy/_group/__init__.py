"""Who waits for whom, and how values become one.

It answers: who takes part in a run, and how much does each count? Where do replicas
wait for one another, and what do they get there? A group is a replica alone, several
replicas in this process (`replica_threads`), or several processes (`processes`).
Tensors of several replicas come in; copies of them on other devices, or their sums, go
out. `transfer` alone calls `torch.nn.parallel` and NCCL.

    native_dtypes      tensors as NCCL and gloo take them: they know few dtypes
    copy_streams       the streams on which values come to an accelerator and leave it
    transfer           copies and sums between devices; small tensors sent together
    weighing           gradients times weights; a Note says where that is done
    workers            the processes that train together, as one of them sees the others
    reductions         the arithmetic of `Strategy.reduce` and `Strategy.gather`
    device_streams     the streams that replicas use, and who waits for whom
    instruments        the hooks for tests, which hear where replicas are
    random_streams     the random numbers of each replica
    participants       how much each replica counts, and which ones take part
    group              one replica of one run: it meets the others and reduces
    worker_streams     the caller's generators, which all workers keep alike
    one_of_several     one of several replicas, on a thread, and what it reports
    replica_threads    where the replicas of a strategy run, and whose turn it is
    processes          processes that train together: how they meet, who is lost
"""
