"""The strategy over several processes: who they are, and how all leave together.

It also says which devices this process has.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any, Literal, NamedTuple, final

import torch.distributed as dist

from torchstrategy._base.devices import local_accelerators
from torchstrategy._base.errors import plural, require_type
from torchstrategy._base.options import ReduceOp
from torchstrategy._base.types import Device, DeviceLike
from torchstrategy._group.processes.joining import has_group, join
from torchstrategy._group.processes.process_group import ProcessGroup
from torchstrategy._group.worker_streams import WorkerStreams
from torchstrategy._group.workers import LONE, Workers
from torchstrategy._parity.options import CommunicationOptions, as_options, check_usable
from torchstrategy._run.example_counts import check_count
from torchstrategy.cluster_resolver import ClusterResolver, TFConfigClusterResolver
from torchstrategy.replicated import ReplicatedExtended
from torchstrategy.strategies import devices_of_replicas, make_storage
from torchstrategy.strategy import Strategy, StrategyBase

_NAME = "MultiWorkerMirroredStrategy"


class WorkerPlace(NamedTuple):
    """Where a process stands among those that train together."""

    rank: int = 0
    num_workers: int = 1
    address: str = ""  # of the first process; empty: the environment says it
    local_rank: int = 0  # its number among the processes of its machine
    local_count: int = 1


class MultiWorkerMirroredBase(StrategyBase):
    """The constructor of `MultiWorkerMirroredStrategy`."""

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: Sequence[DeviceLike] | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        gradient_reduction: ReduceOp | str | None = None,
        buffer_aggregation: Literal["mean", "only_first_replica"] = "mean",
        examples: Callable[..., Any] | None = None,
    ) -> None:
        count = check_count(examples)
        require_type(
            cluster_resolver,
            ClusterResolver | None,
            "cluster_resolver is a ClusterResolver or None",
        )
        _check_timeout(timeout)
        said = as_options(_NAME, communication_options)
        if said.bytes_per_pack:
            raise ValueError(
                f"{_NAME}(options=CommunicationOptions(bytes_per_pack="
                f"{said.bytes_per_pack})): workers send all gradients of a step "
                "together. Leave it out."
            )
        check_usable(_NAME, replace(said, timeout_seconds=None), lambda: [])
        if timeout is None and said.timeout_seconds:
            timeout = timedelta(seconds=said.timeout_seconds)
        place = _find_place(cluster_resolver)
        on = (
            _own_devices(place)
            if devices is None
            else devices_of_replicas("devices", devices)
        )
        workers = _workers(place, process_group, timeout, len(on))
        streams = WorkerStreams(workers, on[0]) if workers.count > 1 else None
        storage = make_storage(
            on,
            on[0],
            buffer_aggregation,
            is_mirrored=True,
            workers=workers,
            streams=streams,
        )
        super().__init__(
            ReplicatedExtended(storage, gradient_reduction, examples=count)
        )
        self._extended._cluster_resolver = cluster_resolver


@final
class MultiWorkerMirroredStrategy(MultiWorkerMirroredBase, Strategy):
    """Trains in several processes, on one machine or several.

    It is `MirroredStrategy` for programs that `torchrun` starts.

    Every process runs the same script, and is a *worker*. Each has replicas of its own,
    and all workers together compute what one device computes for the whole batch, also
    where its rows cannot be divided equally. The script keeps the batch size of all
    workers: the strategy gives each worker its rows. A worker that got no rows runs the
    step on rows of another one, so that it synchronizes with the others, and nothing
    that it computes counts.

    The first worker's values are those of all. Before a module is first used, the
    others get its parameters. The random generators of all workers have the state of
    the first one's, from the first run on. A shuffled dataset has the order that the
    first worker's has.

    All workers have to call `run`, `reduce` and `gather`, and begin to iterate over a
    dataset, in the same order. All else may be done by one of them: `if
    strategy.extended.should_checkpoint: torch.save(model.state_dict(), path)`. If a
    worker fails, is killed, hangs or goes another way, the others raise a `WorkerError`
    that names it. None of them can go on then: start them again from the last
    checkpoint, as `torchrun --max-restarts=3` does.

    The strategy asks these, one after the other, who the workers are: `process_group`;
    the group that `torch.distributed.init_process_group` has made; `cluster_resolver`;
    the environment variables of torchrun; and `TF_CONFIG`. If none of them says, this
    process is the only worker.

    Args:
        cluster_resolver: Knows the addresses of the workers. The first chief or worker
            keeps the store by which they find each other, at its address.
        communication_options: `timeout_seconds` is the `timeout`.
            `implementation="NCCL"` is refused where there is no NCCL.
        devices: The device of each replica of this worker; all workers have the same
            number. None: if this machine has several workers, the accelerator of this
            worker's number; else all accelerators, or one CPU.
        process_group: The processes that train together, if these are not all.
        timeout: How long a worker waits for the others. None: torch's own limit for the
            group, half an hour.
        gradient_reduction: How the gradients of the replicas become one; see
            `RunOptions`. None: `"mean"`, with a `LossWeightWarning` where a loss is a
            mean over something else than rows.
        buffer_aggregation: What becomes of the running statistics of normalisation
            layers; see `CentralStorageStrategy`.
        examples: A function that says how much each replica counts; see
            `CentralStorageStrategy`. All workers give one, or none does.

    Example:
        >>> # The only worker:
        >>> strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu", "cpu"])
        >>> strategy.num_replicas_in_sync, strategy.extended.should_checkpoint
        (2, True)

    Differs from tf.distribute:
        `devices`, `process_group`, `timeout`, `gradient_reduction`,
        `buffer_aggregation` and `examples` are ours. The numbers are exact for every
        batch. TensorFlow has no cluster of a single task with several replicas on one
        CPU.

    Raises:
        ValueError: If this task is none that trains, such as `"ps"`; if the workers
            have different numbers of replicas; if a device is not there, or an option
            asks for what cannot be done.
        TypeError: If an argument is of the wrong kind, as `timeout=6`.
        WorkerError: If a worker does not come within `timeout`, or ends before all have
            come.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/MultiWorkerMirroredStrategy
    """


@final
class PreemptionCheckpointHandler:
    """Tells a training that this process, or another worker's, will soon be ended.

    Clusters that need a machine for something else send its processes the signal
    SIGTERM, and end them some time later. This object takes the signal, which would
    have ended the process at once. Workers tell each other in each run, so `requested`
    becomes True after the same run in all of them, whichever got the signal. Ask it
    after each `strategy.run`; if it is True, save a checkpoint and leave the loop.

    It takes signals until `close()`, or until the end of its `with` block. What
    happened at a signal before happens again then.

    Args:
        strategy: The strategy of the training. If it is no
            `MultiWorkerMirroredStrategy`, this process is the only one.
        signals: The signals that announce the end. Slurm sends another one if you say
            so: `sbatch --signal=USR1@120`.

    Example:
        >>> import os, signal
        >>> strategy = torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"])
        >>> from torchstrategy.experimental import PreemptionCheckpointHandler
        >>> with PreemptionCheckpointHandler(strategy) as handler:
        ...     for step in range(5):
        ...         result = strategy.run(lambda: None)
        ...         if step == 2:
        ...             os.kill(os.getpid(), signal.SIGTERM)  # as a cluster does
        ...         if handler.requested:
        ...             break
        >>> step
        2

    Differs from tf.distribute:
        TensorFlow's class saves by itself and ends the process, as its
        `TerminationConfig` says; it counts the steps that it runs. Here the script
        saves and ends, since it knows what a checkpoint holds.

    Raises:
        TypeError: If `strategy` is no strategy.
        RuntimeError: If this is not the main thread of the program, which alone gets
            signals.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/PreemptionCheckpointHandler
    """

    def __init__(
        self,
        strategy: StrategyBase,
        *,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM,),
    ) -> None:
        require_type(
            strategy,
            StrategyBase,
            "PreemptionCheckpointHandler takes a torchstrategy.Strategy",
        )
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "A PreemptionCheckpointHandler gets signals in the main thread only: "
                "make it there."
            )
        self._workers = strategy.extended._workers
        self._workers.watches_leaving = True
        self._is_asked = False
        self._before = {one: signal.signal(one, self._note) for one in signals}

    @property
    def requested(self) -> bool:
        """Whether a worker was asked to end.

        Between two runs, all workers get the same answer.
        """
        return self._workers.all_leave if self._workers.count > 1 else self._is_asked

    def close(self) -> None:
        """Takes no more signals. `requested` stays as it is."""
        for one, handler in self._before.items():
            if handler is not None:  # what was not set in Python cannot be put back
                signal.signal(one, handler)
        self._before.clear()
        self._workers.watches_leaving = False

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = self._workers.is_asked_to_leave = True


def _check_timeout(timeout: object) -> None:
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        raise TypeError(
            f"{_NAME}(timeout={timeout!r}): a number does not say of what. Write "
            f"timeout=timedelta(seconds={timeout!r}), after `from datetime import "
            "timedelta`."
        )
    require_type(
        timeout,
        timedelta | None,
        f"{_NAME}(timeout=...) takes a datetime.timedelta or None",
    )
    if isinstance(timeout, timedelta) and timeout <= timedelta():
        raise ValueError(
            f"{_NAME}(timeout={timeout!r}): the others have no time to come. Give a "
            "timeout above 0."
        )


def _find_place(resolver: ClusterResolver | None) -> WorkerPlace:
    """Where this process stands, if a resolver or the environment says so.

    Else this process is alone.
    """
    local_rank, local_count = (
        int(os.environ.get("LOCAL_RANK", 0)),
        int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    )
    if has_group():
        rank, count = dist.get_rank(), dist.get_world_size()
        return WorkerPlace(
            rank=rank, num_workers=count, local_rank=local_rank, local_count=local_count
        )
    if resolver is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return WorkerPlace(
            rank=rank, num_workers=count, local_rank=local_rank, local_count=local_count
        )
    return _place_in_cluster(resolver or TFConfigClusterResolver())


def _place_in_cluster(resolver: ClusterResolver) -> WorkerPlace:
    spec, kind, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    # The chief comes first.
    jobs = sorted({"chief", "master", "worker"}.intersection(spec.jobs))
    training = [(job, i) for job in jobs for i in spec.task_indices(job)]
    if kind in ("ps", "evaluator") or (
        kind is not None and kind not in spec.jobs and spec
    ):
        raise ValueError(
            f"This process is the task {kind!r} of the cluster {spec}, and {_NAME} "
            "trains in the jobs 'chief' and 'worker'. Start only these with this "
            "script: there are no parameter servers, and an evaluator is another."
        )
    if len(training) < 2:
        return WorkerPlace()
    if kind is None or index is None:
        raise ValueError(
            f"The cluster {spec} has several tasks, and the resolver does not say "
            "which of them this process is. Give "
            'it a task_type and a task_id; in TF_CONFIG: "task": {"type": "worker", '
            '"index": 0}.'
        )
    addresses = [spec.task_address(job, i) for job, i in training]
    rank = training.index((kind, index))
    hosts = [address.rpartition(":")[0] for address in addresses]
    own_host = hosts[rank]
    return WorkerPlace(
        rank=rank,
        num_workers=len(training),
        address=addresses[0],
        local_rank=hosts[:rank].count(own_host),
        local_count=hosts.count(own_host),
    )


def _own_devices(place: WorkerPlace) -> list[Device]:
    accelerators = local_accelerators()
    if place.local_count < 2 or not accelerators:
        return devices_of_replicas("devices", None)
    if len(accelerators) == 1 and any(
        name.endswith("VISIBLE_DEVICES") for name in os.environ
    ):
        return accelerators  # as where Slurm shows each task its own one only
    if len(accelerators) < place.local_count:
        raise ValueError(
            f"This machine has {plural(len(accelerators), 'accelerator')} and "
            f"{plural(place.local_count, 'worker')}, and each takes one. Start fewer "
            f"workers; or say what each of them has: {_NAME}(devices=[...])."
        )
    return [accelerators[place.local_rank]]


def _workers(
    place: WorkerPlace,
    group: dist.ProcessGroup | None,
    timeout: timedelta | None,
    num_replicas: int,
) -> Workers:
    if group is None and place.num_workers == 1:
        return LONE
    if not has_group():
        join(place.rank, place.num_workers, place.address, timeout)
    workers = ProcessGroup(group, timeout, str(num_replicas))
    of_all = list(map(int, workers.told_by_all))
    for w, count in enumerate(of_all):
        if count != of_all[0]:
            raise ValueError(
                "All workers have the same number of replicas: worker 0 has "
                f"{plural(of_all[0], 'device')}, and worker {w} has {count}. Give each "
                f"as many: {_NAME}(devices=[...])."
            )
    return workers
