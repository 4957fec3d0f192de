"""What a person says of one distributed dataset, and of a dataset function's input."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, final

from torchstrategy._base.row_errors import indivisible_batch_error


@final
class InputReplicationMode(enum.Enum):
    """Whether a dataset function is called for a process or for a replica.

    `PER_WORKER`: once for each process; its replicas take turns in reading the dataset
    that the function returns. `PER_REPLICA`: once for each replica, which reads its own
    dataset.

    Example:
        >>> torchstrategy.InputReplicationMode("PER_REPLICA").name
        'PER_REPLICA'

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/InputReplicationMode
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@final
class AutoShardPolicy(enum.Enum):
    """Which rows a worker reads of a dataset, where replicas are in several processes.

    `AUTO` and `DATA`: all workers have the same dataset, whose batches are those of all
    workers. Each reads its own rows of a `DataLoader` of a dataset that is read by
    index. Each reads all of any other dataset, and keeps its own rows.

    `OFF`: each worker has a dataset of its own, such as a `DataLoader` with a
    `DistributedSampler`. A batch of it is split among the replicas of this worker. The
    epoch ends where the longest of the datasets ends.

    `FILE`: refused.

    Example:
        >>> policy = torchstrategy.experimental.AutoShardPolicy.OFF
        >>> options = torchstrategy.InputOptions(experimental_auto_shard_policy=policy)

    Differs from tf.distribute:
        TensorFlow has it in `tf.data.Options`. There, `AUTO` means `FILE` if a dataset
        reads files, and batches have the size of all workers with `OFF`, too. There is
        no `HINT`.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/data/experimental/AutoShardPolicy
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2


@final
@dataclass(frozen=True, slots=True)
class InputContext:
    """Says which part of the input a dataset function is to make.

    `Strategy.distribute_datasets_from_function` calls the function with it.

    Args:
        num_input_pipelines: How often the function is called, in all processes
            together.
        input_pipeline_id: The number of this call, from 0.
        num_replicas_in_sync: How many replicas the strategy has.

    Example:
        >>> context = torchstrategy.InputContext(
        ...     num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4
        ... )
        >>> print(context)
        torchstrategy.InputContext(input pipeline id 1, total: 2)
        >>> list(range(10))[context.input_pipeline_id :: context.num_input_pipelines]
        [1, 3, 5, 7, 9]

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/InputContext
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """How many rows of a batch of `global_batch_size` each replica gets.

        Example:
            >>> context = torchstrategy.InputContext(num_replicas_in_sync=4)
            >>> context.get_per_replica_batch_size(64)
            16

        Raises:
            ValueError: If they are not the same number for each.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/InputContext#get_per_replica_batch_size
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise indivisible_batch_error(global_batch_size, self.num_replicas_in_sync)
        return size

    def __str__(self) -> str:
        pipeline, total = self.input_pipeline_id, self.num_input_pipelines
        return (
            f"torchstrategy.InputContext(input pipeline id {pipeline}, total: {total})"
        )


DatasetFn = Callable[[InputContext], Any]


@final
@dataclass(frozen=True)
class InputOptions:
    """Options of one distributed dataset.

    Args:
        experimental_fetch_to_device: Whether the values for the replicas are copied to
            the replicas' devices, as is the default. False leaves them in host memory.
        experimental_replication_mode: Whether a dataset function is called for a
            process or for a replica.
        experimental_place_dataset_on_device: Only False is accepted: a loader runs in
            host memory.
        experimental_per_replica_buffer_size: How many batches are read ahead at most,
            if any are.
        experimental_prefetch_to_device: The name of `experimental_fetch_to_device` in
            TensorFlow 2.3 and 2.4.
        load_ahead: Whether batches are read on a background thread, ahead of their
            steps. None: yes, if the loader has workers of its own, `num_workers > 0`;
            any other loader is read on the caller's thread, when the program asks for a
            batch. False: never. True: always. With True, a loader without workers, its
            sampler and its dataset run at the same time as the step. Their draws from
            torch's global generator, and those of the step, then come in another order
            than in plain PyTorch, and a seed does not repeat this order. So give the
            DataLoader a generator of its own, `generator=torch.Generator()`, and let
            the dataset draw nothing from the global generator.
        row_shares: How many rows each replica gets, in proportion: one number for each
            replica, for devices of unequal speed. With `[3, 1]`, replica 0 gets three
            rows for each row of replica 1, as nearly as whole rows allow. Gradients
            stay exact, since the gradient of each replica is weighted by its number of
            rows. A replica whose share is 0 gets no rows, and takes no part in the
            step. None: TensorFlow's rule, parts of equal size, of which the last ones
            are smaller if the rows cannot be divided equally.
        lists_are_rows: Whether each item of a list in a batch is a row, also if it is a
            tensor or a dict of tensors. `collate_fn=list` makes such lists of
            sequences, and code for object detection makes them of the boxes of images.
            By default, a list with tensors in it is a container, and each tensor is
            split along its first dimension. False means the same, without a warning.
        experimental_auto_shard_policy: Which rows of a dataset each worker reads; see
            `experimental.AutoShardPolicy`. It means nothing where one process has all
            replicas, and for `distribute_datasets_from_function`.

    Example:
        >>> options = torchstrategy.InputOptions(
        ...     experimental_fetch_to_device=False, row_shares=[3, 1]
        ... )
        >>> options.row_shares
        (3.0, 1.0)

    Differs from tf.distribute:
        TensorFlow reads one batch ahead by default, this library reads two. TensorFlow
        ignores some options under some strategies. It does not have `load_ahead`,
        `row_shares` and `lists_are_rows`, and the policy is in its `tf.data.Options`.

    Raises:
        ValueError: If an option is set to something that no strategy does,
            `experimental_fetch_to_device` and its older name contradict each other, or
            shares are negative, not finite, all zero, or missing.
        TypeError: If an option is of the wrong type.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/InputOptions
    """

    # None becomes True when the object is made. It tells an option that was left out
    # from a True that the user gave, which must not contradict the option's older name.
    experimental_fetch_to_device: bool = None  # type: ignore[assignment]
    experimental_replication_mode: InputReplicationMode = (
        InputReplicationMode.PER_WORKER
    )
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 2
    # The first field has its value.
    experimental_prefetch_to_device: bool | None = field(default=None, compare=False)
    load_ahead: bool | None = None
    row_shares: Sequence[float] | None = None
    lists_are_rows: bool | None = None
    experimental_auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO

    def __post_init__(self) -> None:
        for name in (
            "experimental_fetch_to_device",
            "experimental_prefetch_to_device",
            "load_ahead",
            "lists_are_rows",
        ):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise self._wrong_type(name, "True or False")
        if not isinstance(self.experimental_replication_mode, InputReplicationMode):
            raise self._wrong_type(
                "experimental_replication_mode", "a torchstrategy.InputReplicationMode"
            )
        if not isinstance(self.experimental_auto_shard_policy, AutoShardPolicy):
            raise self._wrong_type(
                "experimental_auto_shard_policy",
                "a torchstrategy.experimental.AutoShardPolicy",
            )
        if self.experimental_auto_shard_policy is AutoShardPolicy.FILE:
            raise ValueError(
                f"{self._said('experimental_auto_shard_policy')}: a loader does not "
                "say which files it reads, so they cannot be dealt out. Let a function "
                "make the dataset of each worker, of files of its own: "
                "strategy.distribute_datasets_from_function(dataset_fn)."
            )
        if not isinstance(self.experimental_place_dataset_on_device, bool):
            raise self._wrong_type("experimental_place_dataset_on_device", "False")
        if self.experimental_place_dataset_on_device:
            raise ValueError(
                f"{self._said('experimental_place_dataset_on_device')}: a loader runs "
                "in host memory. Leave the option out: what the loader yields is "
                "copied to the devices without it."
            )
        size = self.experimental_per_replica_buffer_size
        if not isinstance(size, int) or isinstance(size, bool):
            raise self._wrong_type(
                "experimental_per_replica_buffer_size", "a whole number of batches"
            )
        if size < 1:
            raise ValueError(
                f"{self._said('experimental_per_replica_buffer_size')}: it is at least "
                "1 batch. To read no batch ahead of its step, say load_ahead=False."
            )
        fetch, prefetch = (
            self.experimental_fetch_to_device,
            self.experimental_prefetch_to_device,
        )
        if fetch is not None and prefetch is not None and fetch != prefetch:
            raise ValueError(
                f"InputOptions(experimental_fetch_to_device={fetch}, "
                f"experimental_prefetch_to_device={prefetch}): these are two names of "
                "one option, and contradict each other. Give the first alone."
            )
        object.__setattr__(
            self,
            "experimental_fetch_to_device",
            fetch is not False and prefetch is not False,
        )
        if self.row_shares is not None:
            object.__setattr__(self, "row_shares", self._shares(self.row_shares))

    def _shares(self, given: Sequence[float]) -> tuple[float, ...]:
        if not isinstance(given, Sequence) or not all(
            isinstance(share, Real) for share in given
        ):
            raise self._wrong_type(
                "row_shares", "a list of numbers, one for each replica"
            )
        shares = tuple(map(float, given))
        if not all(share >= 0 for share in shares) or not 0 < sum(shares) < math.inf:
            raise ValueError(
                f"{self._said('row_shares')}: it says in which proportion the replicas "
                "get rows, as in [3, 1]. Give one finite number for each replica, none "
                "of them negative and not all of them 0."
            )
        return shares

    def _wrong_type(self, name: str, wanted: str) -> TypeError:
        return TypeError(f"{self._said(name)}: it is {wanted}.")

    def _said(self, name: str) -> str:
        return f"InputOptions({name}={getattr(self, name)!r})"
