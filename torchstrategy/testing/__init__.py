"""Tests code for several devices on one device.

It simulates devices, and tells a right step from a wrong one.
"""

from torchstrategy._base.errors import explain_keywords as _explain_keywords
from torchstrategy.testing._counters import Traffic, count_traffic
from torchstrategy.testing._drift import assert_replicas_agree
from torchstrategy.testing._faults import fail_in_replica, slow_replica
from torchstrategy.testing._leaks import (
    no_leaks,
    no_scope_leaks,
    no_thread_leaks,
    no_torch_state_leaks,
)
from torchstrategy.testing._lints import Finding, TrainingRecord, lint_training
from torchstrategy.testing._lockstep import Lockstep
from torchstrategy.testing._ranks import (
    Collective,
    RankRecord,
    RanksStopped,
    fail_in_rank,
    run_ranks,
)
from torchstrategy.testing._replica_clocks import (
    clocks_of_replicas as _clocks_of_replicas,
)
from torchstrategy.testing._same_as_plain import assert_same_as_plain
from torchstrategy.testing._simulation import (
    cuda_alias,
    record_streams,
    simulate_devices,
    simulated_devices,
)
from torchstrategy.testing._virtual_time import (
    DeviceProfile,
    VirtualTrace,
    virtual_time,
)
from torchstrategy.testing._virtual_time.hosts import (
    also_in_each_block as _also_in_each_block,
)
from torchstrategy.testing._virtual_time.steps import step
from torchstrategy.testing._worker_drift import assert_workers_agree

__all__ = [
    "Collective",
    "DeviceProfile",
    "Finding",
    "Lockstep",
    "RankRecord",
    "RanksStopped",
    "Traffic",
    "TrainingRecord",
    "VirtualTrace",
    "assert_replicas_agree",
    "assert_same_as_plain",
    "assert_workers_agree",
    "count_traffic",
    "cuda_alias",
    "fail_in_rank",
    "fail_in_replica",
    "lint_training",
    "no_leaks",
    "no_scope_leaks",
    "no_thread_leaks",
    "no_torch_state_leaks",
    "record_streams",
    "run_ranks",
    "simulate_devices",
    "simulated_devices",
    "slow_replica",
    "step",
    "virtual_time",
]

# Simulated devices, virtual time, ranks and the runner know no strategies: here the
# replicas of strategies join them.
_also_in_each_block(_clocks_of_replicas)

for _name in __all__:
    globals()[_name].__module__ = "torchstrategy.testing"
_explain_keywords(globals(), __all__)
del _name
