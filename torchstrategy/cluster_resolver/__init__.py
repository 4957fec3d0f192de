"""The names of `tf.distribute.cluster_resolver` that need no network.

They say who is in a cluster, and who this process is.

A cluster has jobs, a job has tasks, and a task has an address. A base class says what a
resolver knows; four are here.
"""

from torchstrategy._base.errors import explain_keywords as _explain_keywords
from torchstrategy.cluster_resolver._cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
]

for _name in __all__:
    globals()[_name].__module__ = __name__
_explain_keywords(globals(), __all__)
del _name
