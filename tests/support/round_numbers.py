"""The profile of a device whose times are round numbers.

So a timeline can be computed by hand.
"""

from __future__ import annotations

import torch

from torchstrategy.testing import DeviceProfile

US = 1e-6

# A thousand bytes take a microsecond nearly everywhere. The program takes 10 us to
# launch something, an operator takes at least 3 us, and a copy 5 us.
PROFILE = DeviceProfile(
    "round numbers",
    {torch.float32: 1.0},
    bandwidth=1.0,
    memory=2**30,
    processors=1,
    pinned=1.0,
    pageable=0.5,
    peer=2.0,
    streaming=1.0,
    launch=10 * US,
    kernel=3 * US,
    copy=5 * US,
    event=1 * US,
    cpu_bandwidth=1.0,
    cpu_operator=2 * US,
)
