"""Several replicas of one process take turns on the program's own objects.

A replica has no copy of the model. It has an *image*: what the objects hold while it is
this replica's turn. At a hand-over the image of one replica is taken off, and that of
the next is put on; only what differs is written. So `model` is the program's own model
in every replica, on every thread, and in every hook and closure.

    reachable    one walk: the mutable objects that a step reaches
    held         what their containers hold, compared at the speed of C
    image        what they hold in one replica, and how images are exchanged
    gradients    the end of a backward: `.grad` becomes that of the whole batch
    acting       what acts once for all replicas: optimizers, schedulers, scalers
    merging      what the replicas leave in the objects
    run          one run: it begins, replicas take turns, it ends or is undone
    storage      the objects of a strategy's scope
    refusals     messages; `_run/refusals` has those that copies share

`testing/_ranks/belongings` does the same for what a process has once. A strategy with
one replica in a process needs none of it: `_run/own`.
"""
