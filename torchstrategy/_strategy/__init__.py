"""The public classes: what a strategy is, and of which parts each of them is made.

`Strategy.run` goes through `strategy` to `replicated`, which tells the story of a step: weigh the replicas, begin
the run, call the step in each replica, put the results together, end the run.

    strategy_extended        `Strategy.extended`, and what a strategy of one's own defines
    strategy                 `Strategy`, as TensorFlow 2 has it, and what it shares with that of TensorFlow 1
    replica_context          `ReplicaContext`: who a replica is, and how it synchronizes with the others
    example_counts           how much each replica counts, where a function of the user's says so
    run_losses               which runs look at their losses, and what they warn of
    given_values             values that replicas are given, or have made: where they are sent, and what they hold
    lone_replica             a run in the only replica of one of several workers
    replicated               what the strategies here have in common, and the story of a step in several replicas
    strategies               the strategies on one machine: each picks where the replicas run and where parameters live
    multi_worker_mirrored    the strategy over several processes: who they are, and how all leave after the same step
"""
