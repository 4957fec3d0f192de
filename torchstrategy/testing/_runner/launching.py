"""The argument `--local_rank`, which `torch.distributed.launch` gave each rank.

`torchrun` does not give it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

_SPELLINGS = ("--local_rank", "--local-rank")


def wanted_spelling(file: str, arguments: Sequence[str]) -> str | None:
    """How a script spells the argument that it takes.

    It is None if it takes none, or if the caller gives it.
    """
    if any(argument.partition("=")[0] in _SPELLINGS for argument in arguments):
        return None
    try:
        source = Path(file).read_text(errors="replace")
    except OSError:
        return None
    for spelling in _SPELLINGS:
        if re.search(rf"add_argument\([^)]*['\"]{spelling}['\"]", source):
            return spelling
    return None


def give_local_rank(spelling: str | None, rank: int) -> None:
    """Adds the argument to those of this rank."""
    if spelling is not None:
        sys.argv.insert(1, f"{spelling}={rank}")
