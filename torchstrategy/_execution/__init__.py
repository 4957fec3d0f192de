"""Threads, turns, synchronization points and random streams.

A run calls the step once in each replica, on the thread that called `run` or, where replicas have to wait for one
another, on threads of their own. When all replicas have come to a synchronization point, a function runs once on the
thread that called `run`, and each replica gets its result.

    device_streams     the streams of accelerators that replicas use, and who waits for whom
    instruments        the hooks for tests: they are told where replicas are, and may say which one goes next
    random_streams     the random numbers of each replica
    graph_nodes        what the graph of a loss tells of its nodes: all that is private of them
    loss_terms         what a loss was divided by: read from its graph, when backward begins
    loss_weights       how much the loss of each replica counts, by what all replicas have read
    replica_weights    how much each replica of a run counts, and which replicas take part
    replica            one replica of one run: it synchronizes with the others, and reduces and gathers with them
    worker_streams     the caller's generators, which all workers keep in the state of worker 0
    one_of_several     one of several replicas, on the caller's thread or on one of its own, and what it reports
    replica_threads    where the replicas of a strategy run, and whose turn it is
"""
