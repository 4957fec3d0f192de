"""The errors for rows that do not fit.

A value cannot be split, or its parts would not agree with those of another one.

Whoever finds such a thing raises what a function here returns, so that all that is said
of rows reads alike. That batches are laid out with something else first is told by
`_data/layouts`, and that workers have read different rows by `_data/same_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchstrategy._base.errors import described, plural

# Of a batch, when a dataset splits it


def unbatched_error(replicas: int) -> ValueError:
    """For an element of a dataset in which nothing has rows."""
    return ValueError(
        f"An element of the dataset has no rows to distribute to {replicas} replicas: "
        "it is not batched. Batch it with the global batch size, as in "
        "torch.utils.data.DataLoader(dataset, batch_size=...)."
    )


def single_elements_error(kind: str, replicas: int) -> ValueError:
    """For a dataset, of this kind, that is read by index."""
    return ValueError(
        f"{kind} yields single elements, which cannot be distributed to {replicas} "
        "replicas. Batch it: torch.utils.data.DataLoader(dataset, batch_size=...), "
        "with the global batch size."
    )


def unequal_leaves_error(
    first: str, rows: int, other: str, other_rows: int
) -> ValueError:
    """The error for two leaves of a batch that have different numbers of rows.

    It names each leaf by the Python code that reads it.
    """
    return ValueError(
        f"The leaves of a batch have different numbers of rows: {first} has {rows} and "
        f"{other} has {other_rows}. Cut into pieces they would no longer belong "
        "together. Give each as many rows; or make what is not per row a tensor "
        "without dimensions, or, of a list, a dict. Where time comes first, put the "
        "rows first: pad_sequence(..., batch_first=True). Where each item of a list is "
        "a row, as with images of other sizes and their boxes, say "
        "InputOptions(lists_are_rows=True); of a tuple, make a list, as "
        "collate_fn=lambda batch: tuple(map(list, zip(*batch))) does. Or make the "
        "batch an object of a class of your own, and say how it is cut: "
        "torchstrategy.register_batch_type(...)."
    )


def samples_are_no_rows_error(rows: int, samples: int) -> ValueError:
    """The error for a loader of several workers whose samples are no rows.

    Such a loader does not make one row of each of its samples.
    """
    return ValueError(
        f"The loader made {plural(rows, 'row')} of {plural(samples, 'sample')}. Each "
        "worker loads only samples of its own, so the rows of a batch have to be its "
        "samples. Let the collate_fn make one row of each; or give the strategy an "
        "iterable of batches that is no DataLoader: every worker reads all of it, and "
        "keeps its own rows."
    )


def no_empty_part_error(kind: str, error: Exception) -> ValueError:
    """The error for a replica without rows, where a value without rows cannot be made.

    The user's function makes no value of this kind without rows.
    """
    return ValueError(
        f"A replica got no rows, and there is no {kind} without rows to give it: "
        f"{described(error)}. Leave out RunOptions(run_empty_replicas=True), and such "
        "a replica sits the step out; or let the take function that the type was "
        "registered with make one for slice(0, 0)."
    )


def taken_rows_error(told: str, rows: int, part: slice) -> ValueError:
    """The error for a user's function, `told`, that returned a wrong number of rows."""
    wanted = part.stop - part.start
    return ValueError(
        f"{told} returned {plural(rows, 'row')} for slice({part.start}, {part.stop}), "
        f"which is {wanted}."
    )


def row_shares_error(shares: Sequence[float], replicas: int) -> ValueError:
    """For `InputOptions.row_shares` of another number of replicas."""
    return ValueError(
        f"InputOptions(row_shares={shares}) has {plural(len(shares), 'number')} for "
        f"{plural(replicas, 'replica')}."
    )


def indivisible_batch_error(global_batch_size: int, replicas: int) -> ValueError:
    """The error for a batch size that does not divide equally among the replicas.

    Somebody asks for the batch size of a replica.
    """
    next_size = (global_batch_size // replicas + 1) * replicas
    return ValueError(
        f"A global batch size of {global_batch_size} does not divide into {replicas} "
        f"replicas. The next size that does is {next_size}; "
        "Strategy.experimental_distribute_dataset takes any size."
    )


# Of the arguments of a run


def unequal_arguments_error(
    records: Sequence[tuple[int, ...]], told: str = ""
) -> ValueError:
    """For arguments of one run that were split with different numbers of rows.

    Args:
        records: The rows by replica, of each argument.
        told: What this comes to, if more can be said of it; after a space.
    """
    shown = " and ".join(map(str, records))
    return ValueError(_UNEQUAL_ARGUMENTS.format(records=shown, told=told))


_UNEQUAL_ARGUMENTS = (
    "The arguments of this run were split with different numbers of rows, {records} by "
    "replica, as a labelled batch and a larger unlabelled one are. No share of a "
    "replica in the gradient fits both, so a mean over a replica's own rows cannot be "
    "right.{told} Let the step make each mean by "
    "torchstrategy.nn.compute_average_loss(losses), where losses has one number for "
    "each row, as by reduction='none'; and give the run "
    "options=torchstrategy.RunOptions(gradient_reduction='sum', "
    "run_empty_replicas=True). If the means are right as they are, and you know the "
    "shares: RunOptions(examples=[...], run_empty_replicas=True), with a number above "
    "0 for each replica that has rows."
)


def examples_count_error(examples: Sequence[float], replicas: int) -> ValueError:
    """For `RunOptions.examples` of another number of replicas."""
    return ValueError(
        f"RunOptions(examples={tuple(examples)}) has "
        f"{plural(len(examples), 'number')}; the strategy has "
        f"{plural(replicas, 'replica')}."
    )


# Of a batch whose rows are counted


def several_batches_error(rows: set[tuple[int, ...]]) -> ValueError:
    """For parts of several batches, where one is to be counted."""
    return ValueError(
        "count_rows takes one batch; got parts of several, with the rows "
        f"{sorted(rows)}."
    )


def nothing_to_count_error(batch: object) -> ValueError:
    """For a value without rows."""
    return ValueError(
        "count_rows takes a batch, or a value with rows; nothing in this one has any: "
        f"{batch!r:.200}."
    )


# Of arrays that become a dataset


def no_arrays_error() -> ValueError:
    """For arrays of which there are none."""
    return ValueError(
        "numpy_input has no array in it, and so no rows. Give it an array, or a dict "
        "of arrays."
    )


def rowless_array_error(name: str) -> ValueError:
    """For an array without dimensions."""
    return ValueError(
        f"{name} has no dimensions, and so no rows. Give it a row for each element: "
        "numpy.full(rows, value)."
    )


def unequal_arrays_error(
    first: str, rows: int, other: str, other_rows: int
) -> ValueError:
    """For two arrays, by their names, that have different numbers of rows."""
    return ValueError(
        f"The arrays have different numbers of rows: {first} has {rows} and {other} "
        f"has {other_rows}. An element has one row of each. Give each as many rows."
    )


# Of the inputs of a `DataParallel`


def no_such_dimension_error(dim: int, name: str, shape: tuple[int, ...]) -> ValueError:
    """For an input without the dimension along which inputs are cut."""
    return ValueError(
        f"Inputs are cut along dim={dim}, and {name}, of shape {shape}, has no such "
        "dimension."
    )


def unequal_inputs_error(
    dim: int, first: str, rows: int, other: str, other_rows: int
) -> ValueError:
    """For two inputs, by their names, that have different numbers of rows."""
    return ValueError(
        f"Inputs are cut along dim={dim}, where {first} has {rows} rows and {other} "
        f"has {other_rows}: cut into pieces they would no longer belong together. Give "
        "each as many: tensor.expand(...) repeats rows without copying them. What is "
        "the same for all rows may be a buffer of the module."
    )
