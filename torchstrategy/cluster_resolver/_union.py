"""Several clusters as one."""

from __future__ import annotations

from collections import Counter
from typing import final

from torchstrategy.cluster_resolver._cluster_resolver import ClusterResolver, Task, url
from torchstrategy.cluster_resolver._cluster_spec import ClusterSpec


@final
class UnionResolver(ClusterResolver):
    """Several clusters as one. Whatever is not the sum of all comes from the first.

    A job that several of them have is that job, with the tasks of all: one after the other where all tasks are known,
    that is, in lists; by index where not.

    Args:
        resolvers: What knows the clusters.
        task_type: The job of this process.
        task_id: Its index in the job.
        rpc_layer: The protocol, which is put before addresses.

    Example:
        >>> from torchstrategy.cluster_resolver import ClusterSpec, SimpleClusterResolver, UnionResolver
        >>> workers = SimpleClusterResolver(ClusterSpec({"worker": ["a:2222"]}), task_type="worker", task_id=0)
        >>> more = SimpleClusterResolver(ClusterSpec({"worker": ["b:2222"], "ps": ["c:2222"]}))
        >>> union = UnionResolver(workers, more)
        >>> union.cluster_spec()
        ClusterSpec({'worker': ['a:2222', 'b:2222'], 'ps': ['c:2222']})
        >>> union.task_type
        'worker'

    Differs from tf.distribute:
        A `task_id` of 0 that is given wins over the first resolver's, as any other does. `master` puts the `rpc_layer`
        of the union before every address, and that of the first resolver where the union has none.

    Raises:
        ValueError: If there is no resolver.
        TypeError: If one is something else.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/cluster_resolver/UnionResolver
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not resolvers:
            raise ValueError("UnionResolver() has nothing to unite: give it one ClusterResolver or more.")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"UnionResolver unites ClusterResolvers; got {resolver!r}.")
        self._resolvers = resolvers
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """The jobs of all.

        Raises:
            KeyError: If a job has one task twice, where they go by their indices.
        """
        clusters = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        jobs = dict.fromkeys(job for cluster in clusters for job in cluster)
        return ClusterSpec({job: _united(job, [c[job] for c in clusters if job in c]) for job in jobs})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """What the first says; or, if both `task_type` and `task_id` are given, the address of that task.

        Raises:
            ValueError: If there is no such task.
        """
        rpc_layer = rpc_layer or self.rpc_layer
        if task_type is not None and task_id is not None:
            return url(self.cluster_spec().task_address(task_type, task_id), rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: None = None
    ) -> Counter[str]:
        """What the first says."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str | None:
        """What the first says."""
        return self._resolvers[0].environment

    def _found(self) -> Task:
        first = self._resolvers[0]
        return Task(first.task_type, first.task_id, first.rpc_layer)


def _united(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    """The tasks of one job."""
    if all(isinstance(part, list) for part in parts):
        return [address for part in parts for address in part]  # type: ignore[misc]  # they are lists
    united: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        twice = sorted(united.keys() & tasks.keys())
        if twice:
            raise KeyError(f"The clusters to unite both have a task {twice[0]} of the job {job!r}.")
        united.update(tasks)
    return united
