"""Threads, turns, synchronization points and random streams.

A run calls the step once in each replica. Each of several replicas runs on a thread of its own, a single one on the
thread that called `run`. When all replicas have come to a synchronization point, a function runs once on the thread
that called `run`, and each replica gets its result.

    instruments        the hooks for tests: they are told where replicas are, and may say which one goes next
    random_streams     the random numbers of each replica
    replica            one replica of one run: it synchronizes with the others, and reduces and gathers with them
    worker_streams     the caller's generators, which all workers keep in the state of worker 0
    replica_threads    where the replicas of a strategy run, and whose turn it is
"""
