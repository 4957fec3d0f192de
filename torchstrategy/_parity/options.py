"""What a person says about how values travel between replicas.

It checks whether this machine can do that.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from torchstrategy._base.errors import as_int, require_type
from torchstrategy._base.types import Device
from torchstrategy._group.transfer import why_not_nccl


@final
class CommunicationImplementation(enum.Enum):
    """How values are combined across devices.

    Arguments that take a member take its name, too, in any case: `"nccl"`.

    `AUTO`: NCCL on devices that NCCL supports, and copies elsewhere.
    `RING`: TensorFlow's own rings, which this library does not have.
    `NCCL`: NVIDIA's library, for CUDA devices.

    Example:
        >>> torchstrategy.experimental.CommunicationImplementation("NCCL").name
        'NCCL'

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/experimental/CommunicationImplementation
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@final
@dataclass(frozen=True)
class CommunicationOptions:
    """Options of one reduction or gather, such as `ReplicaContext.all_reduce`.

    Args:
        bytes_per_pack: How many bytes are sent together at most: small tensors are
            flattened into buckets of at most this size, and a larger tensor is sent
            alone. It does not change the results. 0: the size that is best for each way
            of sending.
        timeout_seconds: Only None and 0 are allowed, since the replicas are in one
            process. There is no network to wait for, and a replica that waits for one
            that failed, or that will not come, is told so at once.
        implementation: How values are combined. `NCCL` is refused where it cannot be
            used, `RING` always.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> options = torchstrategy.experimental.CommunicationOptions(
        ...     bytes_per_pack=50 * 1024 * 1024
        ... )
        >>> def step():
        ...     gradients = [torch.ones(2), torch.ones(())]
        ...     return torchstrategy.get_replica_context().all_reduce(
        ...         "sum", gradients, options=options
        ...     )[0]
        >>> strategy.run(step)
        PerReplica:{
          0: tensor([2., 2.]),
          1: tensor([2., 2.])
        }

    Differs from tf.distribute:
        TensorFlow calls them hints, and many of its strategies ignore them. Here, the
        method that gets an option which it cannot follow raises an error.

    Raises:
        ValueError: If `bytes_per_pack` or `timeout_seconds` is negative, or
            `implementation` is or names none.
        TypeError: If `bytes_per_pack` is no integer or `timeout_seconds` no number.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/experimental/CommunicationOptions
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        what = "it is a whole number of bytes, such as 50 * 1024 * 1024."
        size = as_int(
            self.bytes_per_pack,
            f"CommunicationOptions(bytes_per_pack={self.bytes_per_pack!r}): {what}",
        )
        if size < 0:
            raise ValueError(
                f"CommunicationOptions(bytes_per_pack={size}): it is 0 or more; 0 is "
                "what is best."
            )
        object.__setattr__(self, "bytes_per_pack", size)
        seconds = self.timeout_seconds
        require_type(
            seconds,
            float | int | None,
            "CommunicationOptions(timeout_seconds=...) is a number, or None",
        )
        if seconds is not None and not seconds >= 0:
            raise ValueError(
                f"CommunicationOptions(timeout_seconds={seconds}): it is 0 or more; "
                "None is no limit."
            )
        said = self.implementation
        try:
            implementation = CommunicationImplementation(
                said.upper() if isinstance(said, str) else said
            )
        except ValueError:
            raise ValueError(
                f"CommunicationOptions(implementation={said!r}): say 'AUTO', 'RING' or "
                "'NCCL'."
            ) from None
        object.__setattr__(self, "implementation", implementation)


def CollectiveHints(
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """The older name of `CommunicationOptions`, which it returns.

    Args:
        bytes_per_pack: As in `CommunicationOptions`.
        timeout_seconds: As in `CommunicationOptions`.

    Example:
        >>> hints = torchstrategy.experimental.CollectiveHints(bytes_per_pack=1024)
        >>> hints.bytes_per_pack
        1024

    Raises:
        ValueError: If an argument is negative.
        TypeError: If `bytes_per_pack` is no integer or `timeout_seconds` no number.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/experimental/CollectiveHints
    """
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


def as_options(
    method: str, options: CommunicationOptions | None
) -> CommunicationOptions:
    """The options that the caller gave to `method`, or the default options for None.

    Raises:
        ValueError: If they are no options.
    """
    if not isinstance(options, (CommunicationOptions, type(None))):
        raise ValueError(
            f"{method}(options={options!r}): options are "
            "torchstrategy.experimental.CommunicationOptions."
        )
    return options or USUAL_OPTIONS


def check_usable(
    method: str,
    options: CommunicationOptions,
    devices: Callable[[], Sequence[Device]] | None = None,
) -> None:
    """Raises an error for options that the replicas of one process cannot follow.

    Args:
        method: The name of the method that was called.
        options: The options of this call.
        devices: Returns the device of each replica that takes part. None: the method
            does not use NCCL.

    Raises:
        ValueError: If they do.
    """
    refused = None
    if options.timeout_seconds:
        refused = (
            f"timeout_seconds={options.timeout_seconds})): the replicas are in one "
            "process, with no network to wait for. One that waits for another that "
            "failed, or that will not come, is told so at once."
        )
    elif options.implementation is CommunicationImplementation.RING:
        refused = "implementation=RING)): TensorFlow's rings are not here."
    elif options.implementation is CommunicationImplementation.NCCL:
        why = (
            why_not_nccl(devices())
            if devices
            else "NCCL is for sums; gathers are made by copies"
        )
        refused = f"implementation=NCCL)): {why}." if why else None
    if refused is not None:
        raise ValueError(
            f"{method}(options=CommunicationOptions({refused} Leave it out."
        )


USUAL_OPTIONS = CommunicationOptions()
