"""What differs between two records of the same step, and by how much.

It also tells whether a difference is more than rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch

from torchstrategy._base.options import ReduceOp
from torchstrategy.testing._same_as_plain.record import Numbers, Record

SECTIONS = (
    "losses",
    "gradients",
    "parameters",
    "buffers",
    "attributes",
    "tensors",
    "optimizer",
)
"""The sections of a record, in the order in which a difference spreads."""

_RETURNED = "{} that the step returns"
_ATTRIBUTE = "the attribute `{}`"
_GRADIENT = "the gradient of `{}`"

# By dtype: relative to the norm of a tensor, and absolute. To add the same numbers in
# another order costs some tens of the unit of rounding, and more where they cancel. A
# mistake in a program, such as a mean of means, costs a thousandth and more.
_TOLERANCES = {
    torch.float64: (1e-10, 1e-13),
    torch.float32: (1e-5, 1e-6),
    torch.bfloat16: (3e-2, 1e-3),
    torch.float16: (4e-3, 1e-4),
}


@final
@dataclass(frozen=True)
class Tolerance:
    """How much of a difference counts as rounding; None: the default for the dtype."""

    rtol: float | None = None
    atol: float | None = None

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """The relative and the absolute tolerance for tensors of a dtype.

        Integers have to be equal.
        """
        if dtype.is_complex:
            dtype = dtype.to_real()
        if not dtype.is_floating_point:
            return 0.0, 0.0
        rtol, atol = _TOLERANCES.get(dtype, (1e-1, 1e-2))
        return (
            rtol if self.rtol is None else self.rtol,
            atol if self.atol is None else self.atol,
        )


class Pair(NamedTuple):
    """Two numbers that should be the same."""

    section: str
    name: str  # the name in a message
    got: torch.Tensor | None
    expected: torch.Tensor | None
    where: str = ""  # the replica, in words


@final
@dataclass(frozen=True)
class Difference:
    """Two numbers that are not the same.

    Args:
        pair: The numbers.
        amount: How they differ, in words.
    """

    pair: Pair
    amount: str

    def __str__(self) -> str:
        return f"{self.pair.name}{self.pair.where} {self.amount}"


def differences(
    pairs: Sequence[Pair], tolerance: Tolerance, reference: str = "in plain PyTorch"
) -> list[Difference]:
    """The pairs that differ by more than rounding, each name once, by section.

    Args:
        pairs: The numbers to compare.
        tolerance: How much of a difference counts as rounding.
        reference: Where the expected numbers come from, in words.
    """
    largest = max(
        (_norm(pair.expected) for pair in pairs if pair.section == "gradients"),
        default=0.0,
    )
    found: dict[str, Difference] = {}
    for pair in sorted(pairs, key=lambda pair: SECTIONS.index(pair.section)):
        # Where the gradients of many rows cancel, their rounding error is as large as
        # that of other gradients in the model.
        difference = _difference(
            pair, tolerance, reference, largest if pair.section == "gradients" else 0.0
        )
        if difference is not None:
            found.setdefault(pair.name, difference)
    return list(found.values())


def against_plain(replicas: Record, plain: Record) -> list[Pair]:
    """Pairs the numbers that replicas made with those that plain PyTorch made.

    Plain PyTorch computes with the whole batch.
    """
    (alone,) = plain.seen
    pairs: list[Pair] = []
    for name in _names(*(seen.returned for seen in replicas.seen), alone.returned):
        parts, expected = (
            [seen.returned.get(name) for seen in replicas.seen],
            alone.returned.get(name),
        )
        together = _as_one(parts, expected, replicas)
        pairs.append(
            Pair("losses", _RETURNED.format(name or "the value"), together, expected)
        )
    for name in _names(*(seen.attributes for seen in replicas.seen), alone.attributes):
        parts, expected = (
            [seen.attributes.get(name) for seen in replicas.seen],
            alone.attributes.get(name),
        )
        rows = _gathered(parts, expected)
        if rows is not None:
            pairs.append(Pair("attributes", _ATTRIBUTE.format(name), rows, expected))
            continue
        for r, part in zip(replicas.shares.present, parts, strict=True):
            where = f" in replica {r}" if len(parts) > 1 else ""
            pairs.append(
                Pair("attributes", _ATTRIBUTE.format(name), part, expected, where)
            )
    return [*pairs, *_common(replicas, plain)]


def side_by_side(first: Record, other: Record) -> list[Pair]:
    """Pairs the numbers that the same replicas made in two runs."""
    pairs: list[Pair] = []
    for r, one, two in zip(first.shares.present, other.seen, first.seen, strict=True):
        where = f" in replica {r}"
        pairs += _matched("losses", _RETURNED, one.returned, two.returned, where)
        pairs += _matched(
            "attributes", _ATTRIBUTE, one.attributes, two.attributes, where
        )
    return [*pairs, *_common(other, first)]


def updates_agree(mine: Numbers, others: Numbers, tolerance: Tolerance) -> bool:
    """Whether two trainings are about to update from the same gradients."""
    return not differences(
        list(_matched("gradients", _GRADIENT, mine, others)), tolerance
    )


def _common(record: Record, reference: Record) -> Iterator[Pair]:
    steps, expected = (
        torch.tensor(len(record.updates)),
        torch.tensor(len(reference.updates)),
    )
    yield Pair("gradients", "the number of optimizer steps", steps, expected)
    for index, (one, two) in enumerate(
        zip(record.updates, reference.updates, strict=False)
    ):
        label = _GRADIENT + (f" at update {index + 1}" if index else "")
        yield from _matched("gradients", label, one, two)
    for section, label, one, two in (
        ("gradients", _GRADIENT, record.gradients, reference.gradients),
        ("parameters", "the parameter `{}`", record.parameters, reference.parameters),
        ("buffers", "the buffer `{}`", record.buffers, reference.buffers),
        ("tensors", "the tensor {}", record.tensors, reference.tensors),
        ("optimizer", "the optimizer's {}", record.optimizer, reference.optimizer),
    ):
        yield from _matched(section, label, one, two)


def _matched(
    section: str, label: str, got: Numbers, expected: Numbers, where: str = ""
) -> Iterator[Pair]:
    """Pairs the values of two tables by name."""
    for name in _names(got, expected):
        yield Pair(
            section,
            label.format(name or "the value"),
            got.get(name),
            expected.get(name),
            where,
        )


def _names(*tables: Numbers) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _as_one(
    parts: Sequence[torch.Tensor | None],
    expected: torch.Tensor | None,
    replicas: Record,
) -> torch.Tensor | None:
    """The value for the whole batch, as plain PyTorch would return it.

    It is joined from the values that the replicas returned.
    """
    shares = replicas.shares
    tensors = [part for part in parts if part is not None]
    if expected is None or len(tensors) < len(parts) or not tensors:
        return tensors[0] if expected is None and tensors else None
    gathered = _gathered(tensors, expected)
    if gathered is not None:
        return gathered
    weighed = [
        (t, shares.parts[r])
        for r, t in zip(shares.present, tensors, strict=True)
        if shares.weights[r]
    ]
    first = weighed[0][0]
    if (
        any(tensor.shape != first.shape for tensor, _ in weighed)
        or first.shape != expected.shape
    ):
        return first
    if shares.reduction is ReduceOp.MEAN and _is_inexact(first):
        together = _weighted(*zip(*weighed, strict=True))
        # A loss is a mean over what it was divided by, and what else the step returns
        # may be one over rows.
        if replicas.loss_parts is not None:
            by_loss = [
                replicas.loss_parts[r] for r in shares.present if shares.weights[r]
            ]
            also = _weighted([tensor for tensor, _ in weighed], by_loss)
            together = min(together, also, key=lambda found: _error(found, expected))
    else:
        together = torch.stack([tensor.to(_wide(tensor)) for tensor, _ in weighed]).sum(
            0
        )
        together = together.to(first.dtype) if _is_inexact(first) else together
    # A step may have reduced the value itself, with `all_reduce` say: then it is the
    # same in every replica.
    is_together = all(torch.equal(tensor, first) for tensor, _ in weighed)
    if is_together and _error(first, expected) <= _error(together, expected):
        return first
    return together if expected.dtype is not torch.bool else first


def _weighted(tensors: Sequence[torch.Tensor], parts: Sequence[float]) -> torch.Tensor:
    """The mean of tensors of floating-point numbers. What counts nothing may be NaN."""
    first = tensors[0]
    terms = [
        tensor.to(_wide(tensor)) * part
        for tensor, part in zip(tensors, parts, strict=True)
        if part
    ]
    return torch.stack(terms).sum(0).to(first.dtype)


def _gathered(
    parts: Sequence[torch.Tensor | None], expected: torch.Tensor | None
) -> torch.Tensor | None:
    """The rows of all replicas in one tensor.

    It is None unless all parts together have as many rows as expected.
    """
    tensors = [part for part in parts if part is not None]
    if expected is None or expected.dim() == 0 or len(tensors) < len(parts):
        return None
    if any(part.shape[1:] != expected.shape[1:] or part.dim() == 0 for part in tensors):
        return None
    if sum(len(part) for part in tensors) != len(expected):
        return None
    return torch.cat(tensors)


def _difference(
    pair: Pair, tolerance: Tolerance, reference: str, largest: float
) -> Difference | None:
    got, expected = pair.got, pair.expected
    if got is None and expected is None:
        return None
    if got is None or expected is None:
        return Difference(
            pair, f"is there {'only' if got is None else 'not'} {reference}"
        )
    if got.shape != expected.shape:
        return Difference(
            pair, f"is of shape {tuple(got.shape)}, {reference} {tuple(expected.shape)}"
        )
    rtol, atol = tolerance.of(
        got.dtype if _eps(got) > _eps(expected) else expected.dtype
    )
    error, norm = _error(got, expected), _norm(expected)
    allowed = rtol * (norm + largest) + (0.0 if pair.section == "optimizer" else atol)
    if error <= allowed:
        return None
    norms = "the norm and of that of the largest gradient" if largest else "the norm"
    least = "" if pair.section == "optimizer" else f", and atol={atol:g}"
    limit = f"allowed: {allowed:.2g}, which is rtol={rtol:g} of {norms}{least}"
    if got.dim() == 0:
        return Difference(
            pair,
            f"is {_shown(got)}, {reference} {_shown(expected)} (off by {error:.3g}; "
            f"{limit})",
        )
    if error == float("inf"):
        counts = [int((~torch.isfinite(tensor)).sum()) for tensor in (got, expected)]
        return Difference(
            pair,
            f"has {counts[0]} numbers that are NaN or infinite, {reference} "
            f"{counts[1]}",
        )
    relative = f"{error / norm:.2g} times" if norm else "and not zero as"
    return Difference(
        pair,
        f"is off by {error:.3g}, {relative} its norm {reference}, {norm:.3g} ({limit})",
    )


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    one, two = got.to(_wide(got)), expected.to(_wide(expected))
    # Infinities of one sign count as equal, and so does NaN.
    same = (one == two) | (one.isnan() & two.isnan())
    return _norm(torch.where(same, 0, one - two), or_infinite=True)


def _norm(tensor: torch.Tensor | None, or_infinite: bool = False) -> float:
    if tensor is None or not tensor.numel():
        return 0.0
    tensor = tensor.to(_wide(tensor))
    if or_infinite and not _finite(tensor):
        return float("inf")
    return float(torch.linalg.vector_norm(tensor.nan_to_num(0, 0, 0)))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _eps(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if _is_inexact(tensor) else 0.0


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _shown(scalar: torch.Tensor) -> str:
    value = scalar.item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
