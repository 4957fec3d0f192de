"""How much a loss counts: what it was divided by is read where its backward begins.

It answers: by which number was this loss divided, and what is its gradient to be multiplied by, so that the sum is the
gradient of the whole batch?

    graph_nodes      what the graph of a loss tells of its nodes: all that is private of them
    loss_terms       what a loss was divided by: read from its graph, when backward begins
    loss_weights     how much the loss of each replica counts, by what all replicas have read
    whole_batch      losses that need numbers of the whole batch: no weight of a replica makes them right
    told_losses      what workers tell one another of their losses
    loss_watchers    what a loss was divided by is read where its backward begins, and weighs its gradient
"""
