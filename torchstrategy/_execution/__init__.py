"""Threads, turns, synchronization points and random streams.

A run enters here as a function for each replica. Each replica runs on a thread of its own; where all of them come to
a synchronization point, a function runs once on the thread that called `run`, and each replica gets its result.

    instruments        the one hook for tests: what hears where replicas are, and may say who goes next
    random_streams     the random numbers of each replica
    replica            one replica of one run: it can synchronize with the others
    collectives        differentiable all-reduce and all-gather among replicas
    replica_threads    the threads of several replicas, and whose turn it is
    replica_group      the replicas of one run, as one of them sees the others
    replicas           where replicas run: one on the caller's thread, several on threads
"""
