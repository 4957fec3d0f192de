"""The messages of what replicas in turns cannot do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def unlike_clearing(name: str) -> str:
    """The message for a gradient that some replicas have cleared and others not."""
    return (
        f"The replicas disagree about the gradient of {name}: some cleared or changed "
        "what was accumulated and others did not. Do it in every replica, or outside "
        "of strategy.run."
    )


def changed_own_rows(name: str) -> str:
    """The message for a gradient of a replica's own rows that was written in place."""
    return (
        f"The step has put a gradient of its own rows into {name}.grad, and then "
        "changed it in place, as clip_grad_norm_ does: the gradient of the whole batch "
        "was not known yet. Call loss.backward(), which makes it at once. If you only "
        "add or scale, do it out of place: parameter.grad = parameter.grad + new."
    )


def ambiguous_sum(name: str) -> str:
    """The message for an assigned gradient that may have an earlier one in it."""
    return (
        f"The step has assigned the gradient of {name}, which had one before, and "
        "gradient_reduction='sum' adds up what all replicas have there. The earlier "
        "gradient may be a part of it, and would count once for each replica. Call "
        "optimizer.zero_grad() before strategy.run, or let loss.backward() make the "
        "gradient."
    )


def advanced_iterator(name: str) -> str:
    """The message for an iterator of which several replicas took items."""
    return (
        f"The step took items of {name}, which gives out each item once: every replica "
        "got others, or only the first one got any. Take the item before, and give it "
        "to the step: strategy.run(step, args=(next(iterator),))."
    )


RUN_IN_RUN = (
    "strategy.run was called during another run of the same strategy. The replicas "
    "take turns on your own objects, so that one run at a time can have them: call run "
    "when the other has returned."
)


def only_outside(name: str, method: str) -> str:
    """The message for a method of an optimizer that acts on no gradient."""
    return (
        f"{name}.{method}() was called in a replica, which shares the optimizer with "
        "the others. Call it outside of strategy.run, or from a merge function: "
        "get_replica_context().merge_call(...)."
    )


def written_large(name: str) -> str:
    """The message for a write on a tensor of which nobody has kept what was there."""
    return (
        f"{name} was written in place in a replica. It is too large to keep what it "
        "held before, in no module of the strategy, or of a kind that cannot be "
        "copied, so the other replicas cannot be given what they should see. Register "
        "it as a buffer of a module: module.register_buffer(name, tensor); or write on "
        "it after strategy.run, or in get_replica_context().merge_call(lambda "
        "strategy: ...)."
    )


def unknown_optimizer(name: str) -> str:
    """The message for an optimizer that the step reaches in a way that nobody sees."""
    return (
        f"{name}.step() was called in a replica, or on a thread that a replica "
        "started, in a way that the strategy could not see before: every replica would "
        "take a step of its own on the shared parameters. Name the optimizer in the "
        "step, or keep it in an attribute, a list or a dict; call its method there, "
        "and none that was taken from it before; and call it on the thread of the "
        "step. Or step after strategy.run."
    )


def unlike_shapes(
    name: str, shapes: Sequence[tuple[int, ...]], replicas: Sequence[int]
) -> str:
    """The message for a buffer of another shape in each replica."""
    shown = ", ".join(
        f"{shape} in replica {r}" for shape, r in zip(shapes, replicas, strict=True)
    )
    return (
        f"The replicas replaced the buffer {name} by tensors of different shapes: "
        f"{shown}. The module can have one of them only. Make it of the same shape in "
        "each replica, or keep it in a plain attribute, which may differ."
    )


def unequal_backwards(counts: Mapping[int, int]) -> str:
    """The message for replicas that ran unequal numbers of backwards and then wrote."""
    shown = ", ".join(f"{count} in replica {r}" for r, count in counts.items())
    return (
        "The replicas synchronized a different number of times: they ran backward "
        f"{shown}, and wrote on gradients in place, as clip_grad_norm_ does, before "
        "the last of these. Run as many backwards in each replica: a replica that has "
        "no rows left runs one of zero, (outputs.sum() * 0).backward()."
    )


def made_part(name: str) -> str:
    """The message for a module or parameter that a step has made."""
    return (
        f"{name} was made in a replica: each replica has made its own, and the model "
        "and its optimizer can have one of them only. Do it outside of strategy.run. "
        "If forward makes it when it is first called, call the module with one batch "
        "before the first run; the module of a DataParallel is model.module."
    )


def unlike_flags(name: str, replica: int) -> str:
    """The message for a parameter that some replicas have frozen and others not."""
    return (
        f"The replicas disagree on whether {name} requires grad: replica {replica} has "
        "set it otherwise than the first one. Set it in every replica, or outside of "
        "strategy.run."
    )


def taken_away(name: str) -> str:
    """The message for a tensor whose memory a step has taken away."""
    return (
        f"The step has written {name}, and has taken its memory away in a replica, as "
        "tensor.untyped_storage().resize_(0) does. After a run, it has the values of "
        "the replicas. Take the memory away between runs, or train with one replica in "
        "each process, by MultiWorkerMirroredStrategy."
    )
