"""Pages of the documentation, run from top to bottom as one doctest."""

from __future__ import annotations

import doctest
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def examples_run_on(
    page: Path, names: Mapping[str, Any] | None = None, optionflags: int = 0
) -> int:
    """Fails if an example of the page prints something else than the page shows.

    Returns how many examples there are.

    Args:
        page: The page.
        names: What the examples find; None: nothing, as in a new interpreter.
        optionflags: Those of doctest.
    """
    text = page.read_text()
    # A fence would be part of what is printed before it.
    bare = re.sub(r"^```\w*$", "", text, flags=re.MULTILINE)
    globs = {"__name__": "__main__"} if names is None else dict(names)
    test = doctest.DocTestParser().get_doctest(bare, globs, page.name, str(page), 0)
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False, optionflags=optionflags).run(
        test, out=said.append
    )
    assert result.attempted == text.count("\n>>> ")
    assert result.failed == 0, "".join(said)
    return result.attempted


def anchors_of(text: str) -> set[str]:
    """Where links may lead on a page: its titles, as GitHub and the site write them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def dead_links_of(page: Path) -> list[str]:
    """The links to files and to parts of pages, outside of code, that lead nowhere."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    dead = []
    for link in re.findall(r"\]\((?!https?:)(\S+?)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.is_file() or (
            anchor and anchor not in anchors_of(target.read_text())
        ):
            dead.append(link)
    return dead
