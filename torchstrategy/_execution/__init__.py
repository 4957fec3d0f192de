"""Threads, turns, synchronization points and random streams.

A run calls the step once in each replica, and each replica runs on a thread of its own. When all replicas have come to
a synchronization point, a function runs once on the thread that called `run`, and each replica gets its result.

    instruments        the hooks for tests: they are told where replicas are, and may say which one goes next
    random_streams     the random numbers of each replica
    replica            one replica of one run: it can synchronize with the others
    replica_threads    the threads of several replicas, and whose turn it is
    replica_group      the replicas of one run, as one of them sees the others
    replicas           where replicas run: one on the caller's thread, several on threads
"""
