"""A cluster that the environment variable TF_CONFIG describes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar, final

from torchstrategy.cluster_resolver._cluster_resolver import ClusterResolver, Task, url
from torchstrategy.cluster_resolver._cluster_spec import ClusterSpec, as_index

T = TypeVar("T")


@final
class TFConfigClusterResolver(ClusterResolver):
    """Knows what the environment variable `TF_CONFIG` says, which is read each time that something is asked.

    `TF_CONFIG` is JSON: `{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}`; also
    `"rpc_layer"` and `"session_master"` are known. What is given here wins over it.

    Args:
        task_type: The job of this process.
        task_id: Its index in the job.
        rpc_layer: The protocol, which is put before addresses.
        environment: Where it runs.

    Example:
        >>> import json, os
        >>> cluster = {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": "1"}}
        >>> os.environ["TF_CONFIG"] = json.dumps(cluster)
        >>> resolver = torchstrategy.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
        >>> resolver.task_type, resolver.task_id, resolver.master()
        ('worker', 1, 'grpc://b:2222')
        >>> del os.environ["TF_CONFIG"]
        >>> resolver.task_id, bool(resolver.cluster_spec())
        (None, False)

    Raises:
        ValueError: When something is asked, and `TF_CONFIG` is not JSON, or not of this form.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """The processes that `TF_CONFIG` names; none if it is not set.

        Raises:
            ValueError: If `TF_CONFIG` is not JSON, or describes no cluster.
        """
        return _said(ClusterSpec, _config().get("cluster", {}))

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of this task, or of the one that is named; empty in a cluster of one task or none.

        A `"session_master"` in `TF_CONFIG` is returned as it is.

        Raises:
            ValueError: If it is not known which task this is, there is no such task, or `TF_CONFIG` is not JSON.
        """
        session_master = _text("session_master", _config())
        if session_master is not None:
            return session_master
        cluster = self.cluster_spec()
        if sum(map(cluster.num_tasks, cluster.jobs)) <= 1 >= len(cluster.jobs):
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise ValueError(
                f"TF_CONFIG has a cluster of the jobs {cluster.jobs}, and does not say which of its tasks this is. Add "
                '"task": {"type": "worker", "index": 0} to it, or give the resolver a task_type and a task_id.'
            )
        return url(cluster.task_address(task_type, task_id), self.rpc_layer if rpc_layer is None else rpc_layer)

    def _found(self) -> Task:
        task = _config().get("task", {})
        if not isinstance(task, dict):
            raise ValueError(f'"task" in TF_CONFIG is an object with a "type" and an "index"; it is {task!r:.60}.')
        index = task.get("index")
        return Task(
            _text("type", task), None if index is None else _said(as_index, index), _text("rpc_layer", _config())
        )


def _text(name: str, where: dict[str, Any]) -> str | None:
    text = where.get(name)
    if not isinstance(text, (str, type(None))):
        raise ValueError(f'"{name}" in the environment variable TF_CONFIG is a string; it is {text!r:.60}.')
    return text


def _said(make: Callable[[Any], T], value: Any) -> T:
    """What is made of a value that the variable holds; whatever is wrong with it, the variable has to be changed."""
    try:
        return make(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error} It stands in the environment variable TF_CONFIG.") from None


def _config() -> dict[str, Any]:
    text = os.environ.get("TF_CONFIG", "{}")
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(
            f"The environment variable TF_CONFIG is not JSON: {error.msg}", text, error.pos
        ) from None
    except (RecursionError, ValueError) as error:
        why = "its brackets are nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"The environment variable TF_CONFIG is no description of a cluster: {why}.") from None
    if not isinstance(config, dict):
        raise ValueError(f'The environment variable TF_CONFIG is no object such as {{"cluster": ...}}: {text:.60}')
    return config
