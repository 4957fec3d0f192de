"""Why copies of weights have parted, and what to write."""

from __future__ import annotations

from torchstrategy._base.errors import plural
from torchstrategy.testing._lints.evidence.copies import Copies, Parted
from torchstrategy.testing._lints.findings import named_ranks


def cause_of(copies: Copies, parted: Parted) -> tuple[str, str]:
    """Why gradients differed, as a part of a sentence, and what to write."""
    taken = list(parted.snapshots.values())
    sparse = [{one.sparse.get(name) for one in taken} for name in parted.names]
    if all(
        None not in parts and len({part[1] for part in parts if part}) == 1 < len(parts)
        for parts in sparse
    ):
        return (
            (
                ", sparse ones, whose values are alike while their indices differ: "
                "values of other rows were added"
            ),
            (
                "Gather the indices and the values of all ranks and make one sparse "
                "gradient of them, or reduce `p.grad.to_dense()`."
            ),
        )
    if copies.key[0] == "beside":
        return (
            " for parameters that are in no DistributedDataParallel",
            "Wrap the module that has them, too, or put it into the wrapped one.",
        )
    if not copies.is_wrapped:
        return (
            "",
            (
                "Reduce the gradients of all parameters in all steps: "
                "`dist.all_reduce(p.grad)`, and divide them."
            ),
        )
    if not all(one.way.was_called for one in taken):
        return (
            ", and the model was called past DistributedDataParallel",
            (
                "Call the wrapped model, `model(x)`, and not `model.module(x)`: only "
                "then the gradients are reduced."
            ),
        )
    if not all(one.way.was_synchronized for one in taken):
        return (
            ", and all forward passes were in `no_sync()`",
            "Leave `no_sync()` for the last forward and backward before each step.",
        )
    if all(one.way.was_left_open for one in taken):
        return (
            (
                ", and the last forward pass before it was in `no_sync()`: what its "
                "backward has added is of one rank"
            ),
            (
                "Leave `no_sync()` for the last of the micro-batches of a step, and "
                "for no other one."
            ),
        )
    if copies.begun.isdisjoint(parted.names):
        return (
            (
                " of parameters that were added to the model after "
                f"DistributedDataParallel wrapped it ({copies.wrapped_at}): it never "
                "reduces their gradients"
            ),
            (
                "Wrap the model after you have built all of it, or again, `model = "
                "DistributedDataParallel(net)`, on all ranks."
            ),
        )
    if copies.frozen.issuperset(parted.names):
        return (
            (
                " of parameters whose `requires_grad` was False when "
                f"DistributedDataParallel wrapped the model ({copies.wrapped_at}): it "
                "never reduces their gradients"
            ),
            (
                "Wrap the model again after you have unfrozen them, `model = "
                "DistributedDataParallel(net)`, on all ranks."
            ),
        )
    return (
        "",
        (
            "Let backward of the wrapped model make all of the gradient: what is added "
            "to `p.grad` later, or by another backward, is of one rank."
        ),
    )


def cause_of_other_updates(parted: Parted) -> tuple[str, str]:
    """Why values differ though gradients were alike, in a sentence; what to write."""
    ways = {rank: taken.way for rank, taken in sorted(parted.snapshots.items())}
    first, *others = ways
    for rank in others:
        rates = list(zip(ways[first].rates or (), ways[rank].rates or (), strict=False))
        for rate, other_rate in rates:
            if rate != other_rate:
                return (
                    (
                        f" Their learning rates differ: {rate:g} on rank {first} and "
                        f"{other_rate:g} on rank {rank}."
                    ),
                    (
                        "Change the learning rate alike on all ranks: a scheduler that "
                        "gets a metric, as `ReduceLROnPlateau` does, needs that of all "
                        "ranks, after `dist.all_reduce`."
                    ),
                )
        for name, kept in ways[first].state.items():
            other = ways[rank].state.get(name)
            if kept == other or kept is None or other is None:
                continue
            are_numbers = isinstance(kept, float) and isinstance(other, float)
            shown = (
                f"is {kept:g} on rank {first} and {other:g} on rank {rank}"
                if are_numbers
                else "differs"
            )
            return (
                (
                    " Their optimizers have kept something else of earlier steps: "
                    f"{name!r} {shown}."
                ),
                (
                    "Load the state of the optimizer on all ranks: "
                    "DistributedDataParallel broadcasts the weights of rank 0, and "
                    "nothing of an optimizer."
                ),
            )
    return (
        "",
        (
            "Let no rank alone write there: all need the same learning rate and the "
            "same clipping, and what one rank computes for all has to be broadcast."
        ),
    )


def skipped_apart(copies: Copies, parted: Parted) -> tuple[str, str] | None:
    """What to say if `GradScaler` skipped steps on some ranks only; else None."""
    skips = {rank: parted.snapshots[rank].way.skips for rank in copies.ranks}
    most, least = max(skips.values()), min(skips.values())
    if most == least:
        return None
    skipped = [rank for rank in copies.ranks if skips[rank] == most]
    made = [rank for rank in copies.ranks if skips[rank] == least]
    return (
        (
            f"`GradScaler` has skipped {plural(most, 'step')} on "
            f"{named_ranks(skipped)} and {least} on {named_ranks(made)}: `unscale_` "
            "has found an infinity or NaN in the gradients of some ranks only "
            "(found_inf)"
        ),
        (
            "Reduce the gradients of all ranks before `scaler.unscale_(optimizer)`, or "
            "before `scaler.step(optimizer)` if you do not unscale. All ranks then "
            "find the same, and skip the same steps."
        ),
    )
