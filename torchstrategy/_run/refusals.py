"""Messages of what replicas of one process cannot do, however they run."""

from __future__ import annotations


def written_parameter(name: str) -> str:
    """The message for a parameter on which a step wrote in place."""
    return (
        f"{name} was written in place in a replica, or on a thread that a replica "
        "started. Every replica would make this change, and copies on other devices "
        "would not agree; where replicas share memory, it was made. Write on "
        "parameters after strategy.run, or in get_replica_context().merge_call(lambda "
        "strategy: ...)."
    )


def written_state(name: str) -> str:
    """The message for a write on the state of an optimizer."""
    return (
        f"A step wrote on the state of {name} in a replica, which shares the optimizer "
        "with the others. Write on it in a method of the optimizer's class, which is "
        "called once for all of them; after strategy.run; or in a merge function: "
        "get_replica_context().merge_call(...)."
    )


def changed_groups(name: str) -> str:
    """The message for parameters that a step has moved between groups."""
    return (
        f"The step changed the parameters of {name}.param_groups, or the groups "
        "themselves, in a replica, which shares the optimizer with the others. Do it "
        "outside of strategy.run. To freeze parameters in a step, set their "
        "requires_grad."
    )


def unlike_settings(
    setting: str, own: object, replica: int, other: object, there: int
) -> str:
    """The message for a setting that two replicas have set to different values."""
    return (
        f"The replicas set {setting} to different values: {own!r} in replica {replica} "
        f"and {other!r} in replica {there}. They share the optimizer. Set the same "
        "value in each: get_replica_context().all_reduce(...) makes one of all."
    )


def data_parallel(path: str) -> str:
    """The message for a `torch.nn.DataParallel` in a model."""
    return (
        f"{path} is a torch.nn.DataParallel, and would make replicas of each replica. "
        "Use the module that it wraps, `.module`: the batch is split already."
    )


def lazy(name: str, kind: str) -> str:
    """The message for a parameter of a lazy module that has seen no batch."""
    return (
        f"{name} has no shape yet: {kind} is lazy. Run one batch through the module, "
        "outside of strategy.run, before the first step."
    )
