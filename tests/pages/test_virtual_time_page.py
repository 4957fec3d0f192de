"""docs/virtual-time.md shows what its own programs draw.

What they print is checked with the other pages.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from processes import NO_ACCELERATOR, python
from torchstrategy.testing import DeviceProfile
from torchstrategy.testing._virtual_time import profiles

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "virtual-time.md"
PROGRAMS = dict(
    re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```$",
        PAGE.read_text(),
        re.MULTILINE | re.DOTALL,
    )
)


# Since Python 3.12 a list comprehension is no function, and the picture names the one
# around it.
@pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="the pictures of the page were drawn with an older Python",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "picture"), [("train.py", "slow"), ("tuned.py", "tuned")]
)
def test_the_pictures_are_those_that_the_programs_draw(
    program: str, picture: str, tmp_path: Path
) -> None:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"# {name}\n{text}")
    done = python(program, folder=tmp_path, **NO_ACCELERATOR)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "timeline.svg").read_bytes() == (
        PAGE.parent / f"virtual-time-{picture}.svg"
    ).read_bytes()


def test_the_page_names_all_profiles() -> None:
    named = re.search(
        r"^## The profiles\n\n(.*?)\.", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert named is not None
    names = re.findall(r'`"(.+?)"`', named[1])
    assert names and all(DeviceProfile.named(name).name == name for name in names)
    assert len(names) == len(profiles._PROFILES)
