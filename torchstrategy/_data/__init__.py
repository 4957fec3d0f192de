"""Datasets: what is read, how a batch is split, and how its parts travel.

The parts travel to the devices of the replicas.

`source` reads a batch from the loader, and `steps` splits it into the parts for each
step. `reading` copies the parts to the devices, as soon as the caller asks for the
step, or ahead of that. The iterators of `dataset` return them to the caller.

    arrays          arrays in memory as a dataset of their rows
    options         what a person says about one distributed dataset
    batch_types     which values have rows, and how to take some; own types
    layouts         batches whose first dimension holds no rows, as time first
    loader_state    the saved position of a loader, and what is wrong with one
    same_rows       whether all workers read the same rows in the same order
    shards          the rows of a global batch that one worker loads
    source          the loader or iterable that is read, and where its iteration stands
    steps           which rows of a batch go to which worker and which replica
    reading         reads the steps of an epoch, and brings parts to devices
    dataset         the distributed dataset, its iterators, and the ways to make one
"""
