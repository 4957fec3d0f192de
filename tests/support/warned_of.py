"""What is warned of in a call."""

from __future__ import annotations

import warnings
from collections.abc import Callable


def messages_of(kind: type[Warning], call: Callable[[], object]) -> list[str]:
    """The messages of all warnings in a call, which are of this kind."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(warning.category is kind for warning in caught)
    return [str(warning.message) for warning in caught]
