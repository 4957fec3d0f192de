"""How much a loss counts: what it was divided by is read where its backward begins.

It answers: by which number was this loss divided, and what is its gradient to be
multiplied by, so that the sum is the gradient of the whole batch?

    graph_nodes      what the graph of a loss tells of its nodes, and is private
    loss_terms       what a loss was divided by, from its graph, at backward
    loss_weights     how much each replica's loss counts, by what all have read
    whole_batch      losses that need numbers of the whole batch, not weights
    told_losses      what workers tell one another of their losses
    loss_watchers    a loss is read where its backward begins, and weighed
"""
