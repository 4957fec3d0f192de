"""The public classes: what a strategy is, and of which parts each of them is made.

`Strategy.run` goes through `strategy_base` to `replicated`, which tells the story of a step: weigh the replicas, begin
the run, call the step in each replica, put the results together, end the run.

    weighted_mean         the mean of what replicas computed, each weighing its rows
    strategy_extended     `Strategy.extended`, and what a strategy of one's own defines
    strategy_base         the methods that strategies of TensorFlow 1 and 2 have
    strategy              `Strategy`, as TensorFlow 2 has it
    replica_context       `ReplicaContext`: who a replica is, and how it synchronizes with the others
    one_machine           what the strategies on one machine have in common, and those of a single replica
    replicated            several replicas, and the story of a step in them
    strategies            the strategies on one machine: each picks where the replicas run and where parameters live
    preemption            lets all workers leave after the same step, if one of them is asked to end
    multi_worker_mirrored    the strategy over several processes: who they are, and which devices this one has
"""
