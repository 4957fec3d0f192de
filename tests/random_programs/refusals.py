"""The refusals that are documented: their words, and where that is said."""

from __future__ import annotations

# Words of the message: a page, and a sentence that stands there.
DOCUMENTED: dict[str, tuple[str, str]] = {
    "has a gradient hook, and the step ran backward": (
        "docs/features.md",
        "a strategy refuses a parameter with a hook",
    ),
    "and then changed it in place": (
        "docs/several-machines.md",
        "A gradient that you assign and then change in place is refused",
    ),
    "is a tensor that requires grad in a plain attribute": (
        "docs/features.md",
        "A strategy refuses a module with a trainable tensor in a plain attribute",
    ),
}


def documented(message: str) -> str:
    """The words of the documented refusal that a message is; empty if it is none."""
    return next((words for words in DOCUMENTED if words in message), "")
