"""Rows of a data set that several ranks or none get; one order in all epochs."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, final

import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from typing_extensions import override

from torchstrategy.testing._lints.evidence.asking import (
    asked,
    attribute,
    is_set,
    length_of,
    named_in,
    number_in,
)
from torchstrategy.testing._lints.evidence.contents import content_of
from torchstrategy.testing._lints.evidence.facts import Facts
from torchstrategy.testing._lints.evidence.objects import Objects
from torchstrategy.testing._lints.evidence.places import Place, here, in_words
from torchstrategy.testing._lints.findings import Finding, finding
from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.rows.orders import (
    are_of_other_orders,
    without_repeats,
)
from torchstrategy.testing._lints.torch_internals import is_subset

_MOST_EPOCHS, _MOST_ROWS, _ENOUGH, _ENOUGH_BATCHES, _SHARE = 3, 2_000_000, 8, 4, 0.05
# Between the rows of an order: those of a part in turn, and one to what fills it up.
_FEWEST_STEPS = 2
_OF_TORCH = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)


@final
@dataclass
class _Epoch:
    """One pass over a loader: its rows, as numbers in the data set.

    The data set is the one below all subsets of one rank.

    `is_told` says whether `set_epoch` of its sampler was called before it, and after
    the pass before.
    """

    is_told: bool = False
    rows: list[int] = field(default_factory=list)
    is_complete: bool = False
    is_training: bool = False


@final
@dataclass(eq=False)
class _Loader:
    """A loader, as one rank has it.

    Attributes:
        place: Where it is read.
        sampler: What chooses its rows.
        is_of_batches: Whether that is no `loader.sampler`, since the loader was given a
            batch sampler.
        subset: The rows of its data set in the one below; None if it is no subset.
        size: How many rows the data set has.
        below: How many rows the data set below a subset has.
        batch: How many rows a batch has, at most.
        leaves_out: Whether it was told to leave out what does not fill a batch, or all
            ranks.
        dataset: The data set, while it is there.
        content: What is kept of what it holds; of a subset, of what the data set below
            holds.
        companions: The ranks that train the same model with its rows.
    """

    place: Place
    sampler: Any
    is_of_batches: bool
    subset: list[int] | None
    size: int
    below: int
    batch: int
    leaves_out: bool
    dataset: Callable[[], Any]
    content: int = 0
    companions: tuple[int, ...] = ()
    epochs: list[_Epoch] = field(default_factory=list)
    is_readable: bool = True

    def base(self, row: int) -> int:
        return row if self.subset is None else self.subset[row]

    def offered(self) -> Collection[int]:
        return range(self.size) if self.subset is None else set(self.subset)

    def training(self) -> list[_Epoch]:
        return [epoch for epoch in self.epochs if epoch.is_training and epoch.rows]


@final
class Rows(Lint):
    """Notes which rows ranks draw from their loaders, of those that they train with."""

    def __init__(self) -> None:
        self._loaders: dict[int, Objects[Any, _Loader]] = defaultdict(Objects)
        self._in_order: dict[int, list[_Loader]] = defaultdict(list)
        # From which a rank has drawn last.
        self._last: dict[int, tuple[_Loader, _Epoch]] = {}
        # The samplers, by id, whose `set_epoch` was called.
        self._told: dict[int, dict[int, Any]] = defaultdict(dict)

    @override
    def opened(self, facts: Facts, loader: Any) -> None:
        of_rank = self._loaders[facts.rank]
        if loader not in of_rank:
            of_rank[loader] = self._known(facts.rank, loader) or _described(
                loader, facts.size, here()
            )
            if of_rank[loader] not in self._in_order[facts.rank]:
                self._in_order[facts.rank].append(of_rank[loader])
        told = self._told[facts.rank].pop(id(_sampler_of(loader)), None)
        of_rank[loader].epochs.append(_Epoch(told is not None))

    def _known(self, rank: int, loader: Any) -> _Loader | None:
        """What is known of an earlier loader in the place of this one.

        Some programs make one for each epoch.
        """
        place = here()
        for known in self._in_order[rank]:
            if known.place == place and known.dataset() is loader.dataset:
                known.sampler = _sampler_of(loader)
                return known
        return None

    @override
    def sets_epoch(self, facts: Facts, sampler: Any) -> None:
        self._told[facts.rank][id(sampler)] = sampler

    @override
    def drew(self, facts: Facts, loader: Any, rows: Any) -> None:
        known = self._loaders[facts.rank].get(loader)
        if known is None or not known.is_readable:
            return
        epoch = known.epochs[-1]
        if rows is None:
            epoch.is_complete = True
            return
        self._last[facts.rank] = known, epoch
        drawn = list(rows) if isinstance(rows, (list, tuple)) else [rows]
        if not all(isinstance(row, int) for row in drawn):
            known.is_readable = False
        elif known.subset is not None and not all(
            -len(known.subset) <= row < len(known.subset) for row in drawn
        ):
            known.is_readable = False  # its rows have become more
        elif len(known.epochs) <= _MOST_EPOCHS and len(epoch.rows) < _MOST_ROWS:
            epoch.rows += map(known.base, drawn)

    @override
    def stepped(self, facts: Facts, optimizer: torch.optim.Optimizer) -> None:
        if facts.rank in self._last:
            known, epoch = self._last[facts.rank]
            epoch.is_training = True
            known.companions = facts.companions() or known.companions

    @override
    def findings(self) -> list[Finding | None]:
        found: list[Finding | None] = []
        for loaders in self._together():
            first = loaders[min(loaders)]
            same_order = _same_order(first)
            if same_order is not None:
                found.append(same_order)
            if len(loaders) > 1:
                found += (
                    _shared(loaders) or _left_out(loaders) or _divided_twice(loaders)
                )
        return found

    def _together(self) -> list[dict[int, _Loader]]:
        """The loaders that belong together, of ranks that train one model with them."""
        together = []
        ranks = sorted(self._in_order)
        for index, first in enumerate(self._in_order[ranks[0]] if ranks else []):
            group = {ranks[0]: first}
            for rank in first.companions:
                others = self._in_order.get(rank, [])
                if (
                    rank != ranks[0]
                    and index < len(others)
                    and _belong_together(first, others[index])
                ):
                    group[rank] = others[index]
            if first.is_readable and first.training():
                together.append(group)
        return together


def _described(loader: Any, ranks: int, place: Place) -> _Loader:
    nothing = _Loader(
        place,
        _sampler_of(loader),
        False,
        None,
        0,
        0,
        1,
        True,
        _nothing,
        is_readable=False,
    )
    return asked(lambda: _answered(loader, ranks, place), nothing)


def _answered(loader: Any, ranks: int, place: Place) -> _Loader:
    """What a loader, its data set and its samplers say, which may refuse."""
    dataset, sampler, batches = (
        loader.dataset,
        _sampler_of(loader),
        loader.batch_sampler,
    )
    subset = None
    if is_subset(dataset):
        subset = [int(row) for row in dataset.indices]
    try:
        there: Callable[[], Any] = weakref.ref(dataset)
    except TypeError:  # a list, say
        there = _nothing
    size = len(dataset)
    below = len(dataset.dataset) if subset is not None else size
    return _Loader(
        place=place,
        sampler=sampler,
        is_of_batches=sampler is not loader.sampler,
        subset=subset,
        size=size,
        below=below,
        batch=number_in(batches, "batch_size") or 1,
        leaves_out=any(bool(attribute(one, "drop_last")) for one in (batches, sampler)),
        dataset=there,
        content=content_of(dataset.dataset if subset is not None else dataset)
        if ranks > 1
        else 0,
    )


def _sampler_of(loader: Any) -> Any:
    """What chooses the rows of a loader.

    `loader.sampler` is another one if a batch sampler was given.
    """
    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler
    return (
        batches.sampler if type(batches) is torch.utils.data.BatchSampler else batches
    )


def _nothing() -> None:
    return None


def _belong_together(loader: _Loader, other: _Loader) -> bool:
    # Ranks are threads here.
    is_shared = loader.dataset() is not None and loader.dataset() is other.dataset()
    has_same_rows = loader.below == other.below and (
        is_shared or loader.content == other.content
    )
    return loader.place == other.place and has_same_rows and other.is_readable


def _is(sampler: Any, *kinds: Any) -> bool:
    """Whether a sampler is one of torch's, or of a subclass that has its settings."""
    has_settings = (
        isinstance(sampler, SequentialSampler)
        or number_in(sampler, "num_samples") is not None
    )
    return isinstance(sampler, kinds) and has_settings


def _chooses_as_it_likes(sampler: Any) -> bool:
    """Whether no class of torch gives the rows.

    Then a setting, as `shuffle`, may say nothing of them.
    """
    own = attribute(type(sampler), "__iter__")
    return all(vars(kind)["__iter__"] is not own for kind in _OF_TORCH)


def _is_shuffled(sampler: Any) -> bool:
    return isinstance(sampler, RandomSampler) or is_set(sampler, "shuffle")


def _shuffling(sampler: Any, epochs: list[_Epoch]) -> Any:
    """What shuffles the rows: a sampler, or one in the program's own batch sampler.

    None if nothing does, or if the program has told a sampler of its own the epoch.
    """
    if _is_shuffled(sampler):
        return (
            None
            if _chooses_as_it_likes(sampler) and _steps(epochs) <= _FEWEST_STEPS
            else sampler
        )
    held = named_in(sampler).values()
    shuffled = next(
        (
            one
            for one in held
            if isinstance(one, DistributedSampler) and is_set(one, "shuffle")
        ),
        None,
    )
    if shuffled is not None:
        return shuffled
    is_own = (
        attribute(sampler, "set_epoch") is not None
        and attribute(sampler, "shuffle") is None
    )
    if not is_own or epochs[1].is_told:
        return None
    return sampler if _steps(epochs) > _ENOUGH else None


def _steps(epochs: list[_Epoch]) -> int:
    """How many steps there are between rows.

    Nothing else says whether a sampler of the program's own shuffles.
    """
    return len({later - earlier for earlier, later in pairwise(epochs[0].rows)})


def _same_order(loader: _Loader) -> Finding | None:
    epochs = loader.training()
    if len(epochs) < 2:
        return None
    first, second = epochs[0].rows, epochs[1].rows
    sampler = _shuffling(loader.sampler, epochs)
    if sampler is None:
        return None
    count = min(len(first), len(second))
    if count < _ENOUGH or first[:count] != second[:count]:
        return None
    write = "Seed its generator once, before the first epoch."
    if attribute(sampler, "set_epoch") is not None:
        write = "Call `sampler.set_epoch(epoch)` at the beginning of each epoch."
        if loader.is_of_batches:
            write += (
                " It is that of the batch sampler: `loader.sampler` is another one."
            )
    kind = type(sampler).__name__
    return finding(
        "same-order",
        f"The loader that is read at {loader.place} is shuffled by `{kind}`, and the "
        f"first {count} rows of the second epoch have the order of the first epoch: "
        f"{', '.join(map(str, first[:4]))}, ...",
        write,
        [loader.place],
    )


def _shared(loaders: dict[int, _Loader]) -> list[Finding | None]:
    """The first two ranks that have drawn the same rows."""
    ranks = sorted(loaders)
    for rank in ranks[1:]:
        mine, theirs = loaders[ranks[0]].training(), loaders[rank].training()
        for epoch, other in list(zip(mine, theirs, strict=False))[:1]:
            count = min(len(epoch.rows), len(other.rows))
            some, others = epoch.rows[:count], other.rows[:count]
            if _have_too_many_in_common(loaders[rank], some, others, len(ranks)):
                return [
                    _shared_finding(
                        loaders, ranks[0], rank, len(set(some) & set(others)), count
                    )
                ]
    return []


def _have_too_many_in_common(
    loader: _Loader, rows: list[int], others: list[int], ranks: int
) -> bool:
    """Whether two ranks have more rows in common than their samplers may give them."""
    is_equal = rows == others
    if _is(loader.sampler, *_OF_TORCH) or is_equal:
        return len(set(rows) & set(others)) > _allowed(loader, ranks, is_equal)
    return _are_drawn_apart(loader, rows, others, ranks)


def _are_drawn_apart(
    loader: _Loader, rows: list[int], others: list[int], ranks: int
) -> bool:
    """Whether a sampler of the program's own gives ranks parts of different orders.

    They draw these apart. It may also give all the same rows.

    It may also give each row to several ranks at nearly the same time, with other
    augmentation.
    """
    if len(rows) < _ENOUGH_BATCHES * loader.batch or without_repeats(rows) < len(rows):
        return False
    at, there = (
        {row: place for place, row in enumerate(those)} for those in (rows, others)
    )
    both = at.keys() & there.keys()
    near = sum(abs(at[row] - there[row]) <= loader.batch for row in both)
    if near >= (1 - _SHARE) * len(both):
        return False
    return len(both) == len(rows) or are_of_other_orders(rows, others, ranks)


def _allowed(loader: _Loader, ranks: int, is_equal: bool) -> int:
    """How many rows two ranks may have in common: samplers fill up what is missing."""
    sampler = loader.sampler
    if is_equal:
        return 1
    if isinstance(sampler, WeightedRandomSampler) or is_set(sampler, "replacement"):
        return loader.below
    return ranks - 1


def _shared_finding(
    loaders: dict[int, _Loader], first: int, second: int, both: int, count: int
) -> Finding | None:
    loader, other = loaders[first], loaders[second]
    place, sampler = loader.place, loader.sampler
    says = (
        f"Of the first {count} rows of an epoch at {place}, ranks {first} and {second} "
        f"have {both} in common"
    )
    if (
        loader.subset is not None
        and other.subset is not None
        and set(loader.subset) != set(other.subset)
    ):
        return finding(
            "random-split-differs",
            f"{says}: their subsets of the data were chosen at random, with other "
            "seeds.",
            "Give `random_split` a generator with the same seed on all ranks: "
            "`generator=torch.Generator().manual_seed(0)`.",
            [place],
        )
    write = (
        "Give the loader `sampler=DistributedSampler(dataset)`, and it no "
        "`shuffle=True`."
    )
    if not isinstance(sampler, _OF_TORCH) and type(sampler).__module__.partition(".")[
        0
    ] in ("torch", "builtins"):
        write = (
            "Draw one order on all ranks, and give the loader a part of it, "
            "`sampler=order[rank::ranks]`."
        )
    elif not isinstance(sampler, _OF_TORCH):
        write = (
            f"Let {type(sampler).__name__} draw one order for all ranks, from a "
            "generator with a seed of the epoch alone, and take a part of it for each "
            "rank."
        )
    if isinstance(sampler, DistributedSampler):
        is_same_rank = number_in(sampler, "rank") == number_in(other.sampler, "rank")
        write = (
            "Let its DistributedSampler have the rank of the process: leave `rank` and "
            "`num_replicas` away."
            if is_same_rank
            else (
                "Give DistributedSampler the same `seed` on all ranks: it cuts one "
                "order into parts."
            )
        )
    return finding("same-rows", f"{says}.", write, [place])


def _takes_all(loader: _Loader) -> bool:
    """Whether a sampler is one of torch's that take all rows of all ranks once."""
    sampler = loader.sampler
    if _is(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples >= loader.size
    return _is(sampler, DistributedSampler, SequentialSampler)


def _divided_twice(loaders: dict[int, _Loader]) -> list[Finding | None]:
    """Parts of the data, one for each rank, of which a sampler takes a part again."""
    places, rows = [loader.place for loader in loaders.values()], 0
    taken: set[int] = set()
    for loader in loaders.values():
        sampler = loader.sampler
        if (
            loader.subset is None
            or not _is(sampler, DistributedSampler)
            or not loader.training()
        ):
            return []
        offered = set(loader.subset)
        if sampler.num_replicas != len(loaders) or not offered or offered & taken:
            return []
        taken |= offered
        rows += length_of(sampler) or 0
    return [
        finding(
            "divided-twice",
            f"Each of {len(loaders)} ranks has a part of the data of its own at "
            f"{in_words(places)}, {len(taken)} rows together, and its "
            f"DistributedSampler takes a part of that again: {rows} rows in an epoch.",
            "Give DistributedSampler the whole data set on all ranks, or leave it "
            "away.",
            places,
        )
    ]


def _left_out(loaders: dict[int, _Loader]) -> list[Finding | None]:
    """Rows that no rank has drawn, in no epoch."""
    first = loaders[min(loaders)]
    drawn: set[int] = set()
    offered: set[int] = set()
    if not _takes_all(first) or first.below > _MOST_ROWS:  # not all rows are noted
        return []
    for loader in loaders.values():
        epochs = loader.training()
        if (
            not epochs
            or not all(epoch.is_complete for epoch in epochs)
            or loader.leaves_out
        ):
            return []
        for epoch in epochs:
            drawn |= set(epoch.rows)
        offered.update(loader.offered())
    missing = offered - drawn
    is_cut = any(loader.subset != first.subset for loader in loaders.values())
    write = (
        "The data are divided among ranks twice: by a subset for each rank, and by its "
        "sampler. Leave one away."
    )
    if not is_cut:
        write = (
            "Give the sampler the number of ranks that there are: "
            "`num_replicas=dist.get_world_size()`."
        )
    elif not missing:
        # Parts of equal size leave out fewer rows than there are ranks, at the end.
        end = max(offered, default=-1) + 1
        missing = set(range(end, first.below))
        write = (
            "Give the first ranks one row more, `range(rank, len(dataset), ranks)`, or "
            "use DistributedSampler."
        )
        if len(missing) >= len(loaders) or len(offered) != end:
            return []
    if not missing:
        return []
    places = [loader.place for loader in loaders.values()]
    shown = ", ".join(map(str, sorted(missing)[:4]))
    return [
        finding(
            "rows-on-none",
            f"{len(missing)} of {first.below} rows are drawn by no rank in any epoch "
            f"at {in_words(places)}: {shown}{', ...' if len(missing) > 4 else ''}.",
            write,
            places,
        )
    ]
