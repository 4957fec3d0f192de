"""The names of `tf.distribute.cluster_resolver` that need no network: who is in a cluster, and who this process is."""

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
del _name
