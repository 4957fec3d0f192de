"""A Note tells what is longer than a line, once, beside the code; the code cites it."""

from __future__ import annotations

import re
from collections import Counter

from house.rooms import ROOT, files, listed

CITED = re.compile(r"Note \[([^\]]+)\]")
WRITTEN = re.compile(r"^ *(?:# )?Note \[([^\]]+)\](?::|$)", re.MULTILINE)


def unwrapped(text: str) -> str:
    """A text in one line, as if no comment or docstring had been wrapped."""
    return re.sub(r"\s*\n\s*(?:# *)?", " ", text)


def written() -> Counter[str]:
    """The titles of all Notes, each with how often a Note has it."""
    texts = [path.read_text(encoding="utf-8") for path in files()]
    return Counter(title for text in texts for title in WRITTEN.findall(text))


def test_a_note_is_written_once() -> None:
    twice = [title for title, count in written().items() if count > 1]
    assert not twice, f"give each of these Notes a title of its own:{listed(twice)}"


def test_a_note_that_is_cited_is_there() -> None:
    """A reader who looks for a Note by its title finds it."""
    wrapped = "    # What is told. See Note [What\n    # happens on Ctrl-C].\n"
    assert CITED.findall(unwrapped(wrapped)) == ["What happens on Ctrl-C"]
    known = written()
    missing = [
        f"{path.name}: Note [{title}]"
        for path in [*files(), ROOT / "CONTRIBUTING.md"]
        for title in CITED.findall(unwrapped(path.read_text(encoding="utf-8")))
        if title not in known
    ]
    assert not missing, f"no Note has this title:{listed(missing)}"
