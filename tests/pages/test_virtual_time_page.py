"""docs/virtual-time.md shows what its own programs draw.

What they print is checked with the other pages.
"""

from __future__ import annotations

import re
from pathlib import Path

from torchstrategy.testing import DeviceProfile
from torchstrategy.testing._virtual_time import profiles

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "virtual-time.md"


def test_the_page_names_all_profiles() -> None:
    named = re.search(
        r"^## The profiles\n\n(.*?)\.", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert named is not None
    names = re.findall(r'`"(.+?)"`', named[1])
    assert names and all(DeviceProfile.named(name).name == name for name in names)
    assert len(names) == len(profiles._PROFILES)
