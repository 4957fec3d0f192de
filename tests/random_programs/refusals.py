"""The refusals that are documented: their words, and the sentence in docs/ that says so."""

from __future__ import annotations

DOCUMENTED: dict[str, str] = {}


def documented(message: str) -> str:
    """The words of the documented refusal that a message is; empty if it is none."""
    return next((words for words in DOCUMENTED if words in message), "")
