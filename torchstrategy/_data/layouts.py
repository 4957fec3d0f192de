"""Batches that are not laid out with rows first.

These are lists of samples, and padded sequences with time first.

A strategy cuts each tensor of a batch along its first dimension. Where that holds no
rows, it would cut images into their channels and sequences into pieces of time, and
often nothing disagrees: the step fails later, or computes other numbers. A loader says
how many samples its batch is made of, and by this number such a batch is known. Where
it is not known, this file can only warn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from torchstrategy._base import tree
from torchstrategy._base.errors import warn
from torchstrategy._base.types import Tree
from torchstrategy._data.batch_types import registration_of

_A_FEW = 3  # a list of two tensors probably has inputs and targets
_CHANNELS = {1, 3, 4}


def refuse_samples(batch: Tree, samples: int | None) -> None:
    """Refuses a batch in which a list or tuple has an item for each sample.

    Otherwise each item would be cut as if it had rows.

    Args:
        batch: The first batch that was read. Later ones may have fewer samples.
        samples: Of how many samples it was made. None: nobody knows.

    Raises:
        ValueError: Naming the list or tuple.
    """
    if samples is None or samples < 2:
        return
    for name, items in _sequences("batch", batch):
        if len(items) != samples or len({_form(item) for item in items}) > 1:
            continue
        sizes = [leaf.shape[0] for leaf in _tensors_in(items)]
        other = next((size for size in sizes if size != samples), None)
        if other is not None:
            kind = type(items).__name__
            raise ValueError(
                _SAMPLES.format(name=name, kind=kind, count=samples, size=other)
            )


def warn_of_layout(batch: Tree, samples: int | None) -> bool:
    """Warns at the user's line if a batch looks as if its first dimension held no rows.

    Returns whether it did.
    """
    shown: set[str] = set()
    if type(batch) is list and len(batch) >= _A_FEW:
        shown = {_shown(item) for item in batch}
    if len(shown) == 1 and "" not in shown:
        warn(_LIST.format(what=f"a list of {len(batch)} {shown.pop()}"), UserWarning)
        return True
    for name, items in _sequences("batch", batch):
        if len(items) >= _A_FEW and _are_images(items, samples):
            what = f"a {type(items).__name__} of {len(items)} tensors of the shapes "
            shapes = ", ".join(str(tuple(item.shape)) for item in items[:_A_FEW])
            warn(_IMAGES.format(name=name, what=what + shapes), UserWarning)
            return True
    tensors = list(_tensors_in(batch))
    if samples is None or samples < 2 or not tensors:
        return False
    if all(_has_time_first(one, samples) for one in tensors):
        warn(_TIME_FIRST.format(count=samples, time=tensors[0].shape[0]), UserWarning)
        return True
    return False


def _sequences(name: str, value: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    """The lists and tuples in a batch, each with its path."""
    try:
        yield from _sequences_within(name, value)
    except RecursionError:
        tree.check_depth(value)
        raise


def _sequences_within(name: str, value: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    if registration_of(value) is not None:
        return
    if isinstance(value, (list, tuple)) and not tree.is_one_thing(value):
        if type(value) in (list, tuple):
            yield name, value
        for index, item in enumerate(value):
            yield from _sequences_within(f"{name}[{index}]", item)
    elif type(value) is dict:
        for key, item in value.items():
            yield from _sequences_within(f"{name}[{key!r}]", item)
    elif tree.is_record(value):
        for part, held in tree.parts_of(value).items():
            yield from _sequences_within(name + part, held)


def _tensors_in(value: Any) -> Iterator[Any]:
    """The tensors and arrays with dimensions in lists, tuples and dicts."""
    for leaf in tree.tree_leaves(value):
        if (
            isinstance(leaf, (torch.Tensor, np.ndarray))
            and leaf.ndim
            and registration_of(leaf) is None
        ):
            yield leaf


def _form(item: Any) -> object:
    """What the samples of one dataset have in common."""
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return type(item), item.dtype, item.ndim
    if type(item) is dict:
        return dict, tuple(item)
    return (type(item), len(item)) if type(item) is tuple else type(item)


def _shown(item: Any) -> str:
    """What a message says of an item of a list; empty if it does not look like rows.

    Items that look alike have the same text.
    """
    if isinstance(item, torch.Tensor) and item.dim():
        return f"tensors of shape {tuple(item.shape)} and {item.dtype}"
    if type(item) in (dict, tuple) and any(True for _ in _tensors_in(item)):
        return f"{type(item).__name__}s of {len(item)} items"
    return ""


def _are_images(items: Sequence[Any], samples: int | None) -> bool:
    """Whether items look like images of several sizes, with channels first.

    Items that may be columns of the samples do not count as images.
    """
    if not all(isinstance(item, torch.Tensor) and item.dim() == 3 for item in items):
        return False
    channels, sizes = (
        {item.shape[0] for item in items},
        {item.shape[1:] for item in items},
    )
    return len(channels) == 1 and channels <= _CHANNELS - {samples} and len(sizes) > 1


def _has_time_first(tensor: Any, samples: int) -> bool:
    return bool(
        tensor.ndim > 1 and tensor.shape[0] != samples and tensor.shape[1] == samples
    )


_SAMPLES = (
    "{name} is a {kind} of {count} items, as many as there are samples in the loader's "
    "batch, so each item seems to be one sample's, as an image or the boxes of an "
    "image are. A strategy would cut each tensor in it along its first dimension, "
    "which has a size of {size}. If each item is a row, make it a list and say so: "
    "collate_fn=lambda batch: tuple(map(list, zip(*batch))) makes a list of images and "
    "a list of targets, and torchstrategy.InputOptions(lists_are_rows=True) lets "
    "replicas have some of the items. Or make the batch an object of a class of your "
    "own, and say how it is cut: torchstrategy.register_batch_type(...). If each item "
    "is a column that has rows of its own, say InputOptions(lists_are_rows=False)."
)

_LIST = (
    "A batch is {what}, which are cut along their first dimension, as the columns of a "
    "table are. If each of them is a row, as collate_fn=list makes them of sequences, "
    "say so: InputOptions(lists_are_rows=True). If not, say lists_are_rows=False."
)

_IMAGES = (
    "{name} is {what}, as if they were images: each is cut along its first dimension, "
    "into channels. If each is a row, make it a list and say so: "
    "InputOptions(lists_are_rows=True); or make the batch an object of a class of your "
    "own, and say how it is cut: torchstrategy.register_batch_type(...). If they have "
    "rows, say lists_are_rows=False."
)

_TIME_FIRST = (
    "Each tensor of a batch has {time} items along its first dimension, where it is "
    "cut, and {count} along its second, as many as there are samples in the loader's "
    "batch. If time comes first, as torch.nn.utils.rnn.pad_sequence has it, let the "
    "collate_fn put the samples first, pad_sequence(..., batch_first=True), and "
    "transpose in the step. If the first dimension has the rows, say "
    "InputOptions(lists_are_rows=False)."
)
