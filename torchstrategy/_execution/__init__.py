"""Threads, turns, synchronization points and random streams.

A run calls the step once in each replica, and each replica runs on a thread of its own. When all replicas have come to
a synchronization point, a function runs once on the thread that called `run`, and each replica gets its result.

    instruments        the hooks for tests: they are told where replicas are, and may say which one goes next
    replica            one replica of one run: it synchronizes with the others, and reduces and gathers with them
    replica_threads    where the replicas of a strategy run, whose turn it is, and the random numbers of each
"""
