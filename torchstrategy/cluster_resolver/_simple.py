"""A cluster of which everything was said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import final

from torchstrategy.cluster_resolver._cluster_resolver import ClusterResolver, refuse_config_proto, url
from torchstrategy.cluster_resolver._cluster_spec import ClusterSpec


@final
class SimpleClusterResolver(ClusterResolver):
    """Knows what it was told.

    Args:
        cluster_spec: The processes of the cluster.
        master: The address of the one that leads.
        task_type: The job of this process.
        task_id: Its index in the job.
        environment: Where it runs.
        num_accelerators: How many accelerators each task has, by kind: `{"GPU": 8}`.
        rpc_layer: The protocol, which is put before addresses.

    Example:
        >>> spec = torchstrategy.cluster_resolver.ClusterSpec({"worker": ["a:2222", "b:2222"]})
        >>> resolver = torchstrategy.cluster_resolver.SimpleClusterResolver(
        ...     spec, task_type="worker", task_id=0, num_accelerators={"GPU": 8}, rpc_layer="grpc"
        ... )
        >>> resolver.master("worker", 1)
        'grpc://b:2222'
        >>> resolver.num_accelerators()["GPU"]
        8

    Raises:
        TypeError: If `cluster_spec` is no `ClusterSpec`, `master` no string, or `num_accelerators` no dict.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/cluster_resolver/SimpleClusterResolver
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"cluster_spec is a ClusterSpec; got {cluster_spec!r}. Write "
                "torchstrategy.cluster_resolver.ClusterSpec({'worker': ['a:2222', 'b:2222']})."
            )
        if not isinstance(master, str):
            raise TypeError(f"master is an address, a string; got {master!r}.")
        if not isinstance(num_accelerators, (Mapping, type(None))):
            raise TypeError(
                f"num_accelerators is a dict from kinds to numbers, {{'GPU': 8}}; got {num_accelerators!r}."
            )
        self._cluster_spec = cluster_spec
        self._master = master
        self._environment = environment
        self._num_accelerators = Counter(num_accelerators or {})
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """What it was told."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the process that leads; or, if both `task_type` and `task_id` are given, of that task.

        Raises:
            ValueError: If there is no such task.
        """
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: None = None
    ) -> Counter[str]:
        """How many accelerators a task has, by kind. It is the same for each.

        Raises:
            ValueError: If `config_proto` is not None.
        """
        refuse_config_proto(config_proto)
        return Counter(self._num_accelerators)
