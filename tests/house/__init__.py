"""The words and the rooms of the package, for who reads its code.

A *strategy* runs an ordinary PyTorch step in several *replicas* and makes of their work
what one device would have made of the whole batch. It brings the API of
`tf.distribute.Strategy` to PyTorch, and replaces `torch.nn.DataParallel`.

    replica           one copy of the step, with an id from 0 to n - 1, on a device
    cross-replica     speaking for all replicas at once: in a `scope()`, in a merge
                      function
    per-replica       a value with one component for each replica, which may differ
    mirrored          a value with one component for each replica, known to be equal
    present, absent   a replica that got no rows sits the step out: it is absent
    fraction          a replica's rows, divided by the rows of the whole batch
    weight            what a replica's gradient is multiplied by: if gradients are
                      averaged (`ReduceOp.MEAN`), its fraction; if they are added up
                      (`SUM`), 1; if its gradient is dropped, 0
    weighing          said of a replica whose weight is not 0
    accumulated       the `.grad` of an owner from before the run, and all gradients
                      that were reduced since
    owner             a parameter of the user's own module, which the optimizer updates
    local             a replica's own: its copy of a module, its parameter, its gradient
    plain attribute   an attribute of a module that is no parameter, buffer, layer or
                      table of torch's: `model.config`; and what a program sets on a
                      tensor: `weight.is_expert`
    trainer           an object of the user's that holds models or what trains them
    stepper           a learning-rate scheduler or a `GradScaler`, which counts steps
    merge function    what `get_replica_context().merge_call` calls, once for all
                      replicas
    outsider          a trainable tensor that a step names and of which replicas have no
                      copies
    lead              the first replica that is present: where one replica speaks for
                      all of them, it does
    worker            one of several processes that train together, each with replicas
                      of its own
    understudy        a worker without rows: its first replica runs the step on others'
                      rows, and nothing of it counts; `_group/participants.py` says why
    lane              the replicas that take turns: those on one physical device, or all
                      of them

At a *synchronization point* every replica brings something, and all go on together:
`optimizer.step()`, a collective.

The rooms of the package, from the lowest floor up. A room imports only from lower
floors, which stand before it here; a file imports only files that stand before it in
its room's docstring.

    _base                  what every other room uses: types, errors, devices, values
    ----
    _group                 who takes part and who waits for whom; how values become one
    cluster_resolver       who is in a cluster, and which process this is
    ----
    _data                  datasets: reading, splitting, prefetching
    _variables             tensors that replicas share and assign
    _parity                cross-device operations and options, as TensorFlow has them
    ----
    extended               `Strategy.extended`, and what a strategy of one's own defines
    nn                     losses and batch normalisation over the whole batch
    ----
    strategy               `Strategy`: what users call
    ----
    replica_context        `ReplicaContext`: what a step calls
    ----
    _run                   one call of `run`, on the user's own objects
    ----
    _copies                several replicas in one process: copies of the user's objects
    ----
    replicated             what the strategies share, and a step's story: read it first
    ----
    strategies             the constructors: where replicas run and parameters live
    ----
    multi_worker_mirrored  the strategy over several processes
    data_parallel          a module with replicas, in place of `torch.nn.DataParallel`
    ----
    experimental           names that may still change
    ----
    testing                simulated devices, and checks for tests of the user's own
    compat                 the names of TensorFlow 1
"""
