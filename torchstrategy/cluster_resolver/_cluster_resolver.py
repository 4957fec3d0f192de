"""What knows who is in a cluster, and which of them this process is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import NamedTuple

from torchstrategy._core.devices import local_accelerators
from torchstrategy.cluster_resolver._cluster_spec import ClusterSpec, as_index


class Task(NamedTuple):
    """What a resolver has found out about this process."""

    type: str | None = None
    id: int | None = None
    rpc_layer: str | None = None


class ClusterResolver(ABC):
    """Knows which processes a cluster has, and which of them this one is. The base of one's own.

    A subclass says `cluster_spec` and `master`; and which task it is, by setting `task_type`, `task_id` and
    `rpc_layer`. They may be set anew at any time.

    Example:
        >>> class OnOneHost(torchstrategy.cluster_resolver.ClusterResolver):
        ...     def cluster_spec(self):
        ...         return torchstrategy.cluster_resolver.ClusterSpec({"worker": ["localhost:2222", "localhost:2223"]})
        ...     def master(self, task_type=None, task_id=None, rpc_layer=None):
        ...         return self.cluster_spec().task_address(task_type or "worker", task_id or 0)
        >>> resolver = OnOneHost()
        >>> resolver.task_id = 1
        >>> resolver.master(), resolver.task_type, resolver.task_id
        ('localhost:2222', None, 1)

    Differs from tf.distribute:
        `num_accelerators` counts those of this machine, and is refused for another task, whose machine it cannot see.
        There are no sessions, and so no `config_proto`.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/cluster_resolver/ClusterResolver
    """

    # What was said of this process. On the class, since a subclass may not call our constructor.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str | None = ""

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The processes of the cluster, as they are now."""

    @abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the process that leads, or of the task that is named.

        Args:
            task_type: The job of the task.
            task_id: Its index in the job.
            rpc_layer: The protocol, which is put before the address: `"grpc"` makes `"grpc://host:port"`.
        """

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: None = None
    ) -> Counter[str]:
        """How many accelerators this process has, by kind: `{"GPU": 8}`, and 0 for a kind that it has none of.

        Args:
            task_type: The job of the task that is asked about. None: this one's.
            task_id: Its index. None: this one's.
            config_proto: None: there are no sessions.

        Raises:
            ValueError: If it is asked about another task, or `config_proto` is not None.
        """
        refuse_config_proto(config_proto)
        asked = (self.task_type if task_type is None else task_type, self.task_id if task_id is None else task_id)
        if asked != (self.task_type, self.task_id):
            raise ValueError(
                f"num_accelerators was asked about {asked[0]} {asked[1]}, and this process, {self.task_type} "
                f"{self.task_id}, sees the accelerators of its own machine only. Say how many each task has with "
                "SimpleClusterResolver(cluster_spec, num_accelerators={'GPU': 8})."
            )
        count = len(local_accelerators())
        return Counter(GPU=count) if count else Counter()

    @property
    def environment(self) -> str | None:
        """Where it runs, as it was told; in TensorFlow `"google"` or, elsewhere, empty."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """The job of this process, such as `"worker"`; None if that is not known."""
        return self._found().type if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None if that is not known."""
        return self._found().id if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = None if task_id is None else as_index(task_id)

    @property
    def rpc_layer(self) -> str | None:
        """The protocol of the cluster, such as `"grpc"`; None if there is none."""
        return self._found().rpc_layer if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _found(self) -> Task:
        """What holds where nothing was said."""
        return Task()


def url(address: str, rpc_layer: str | None) -> str:
    """An address with the protocol before it."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


def refuse_config_proto(config_proto: object) -> None:
    """Refuses the configuration of a session.

    Raises:
        ValueError: If there is one.
    """
    if config_proto is not None:
        raise ValueError(f"config_proto={config_proto!r} configures a session, and there are none here. Leave it out.")
