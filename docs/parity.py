"""Makes docs/parity.md from docs/parity.csv: how tf.distribute is here.

It goes name by name.

The table is edited by hand; then `python docs/parity.py` makes the page.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_suffix(".csv")
PAGE = Path(__file__).with_suffix(".md")

STATUSES = {
    "same": "It is here, and does what TensorFlow documents.",
    "differs": (
        "It is here, and does what TensorFlow documents, except as the table says."
    ),
    "absent": "It is for TPUs, sessions or Estimator, which PyTorch does not have.",
    "torch": "It is not here: PyTorch has its own way, which the table names.",
    "cluster": "It is useful only with several machines, and is not here.",
    "extra": "It is torchstrategy's own.",
}
# The sections of the page, and where the names in them are here. The longest beginning
# of a name counts.
SECTIONS = {
    "tf.distribute.": "torchstrategy.",
    "tf.distribute.experimental.": "torchstrategy.experimental.",
    "tf.distribute.cluster_resolver.": "torchstrategy.cluster_resolver.",
    "tf.compat.v1.distribute.": "torchstrategy.compat.v1.",
    "tf.types.experimental.distributed.": "torchstrategy.",
    "tf.": "torchstrategy.",
    "torchstrategy.": "torchstrategy.",
}
HEAD = """\
# tf.distribute, name by name

This page is made from [parity.csv](parity.csv) by [parity.py](parity.py). Tests compare the table with the code.

It lists the public names of `tf.distribute` in TensorFlow 2.2, 2.3 and 2.4, with their parameters, and the names
elsewhere in `tf` that they use. Every public class, function and enumeration that has come since, up to TensorFlow
2.21, has a line that says *2.21*. Where releases differ, the page shows the newest release that has the name; *pages*
means that a name is in TensorFlow's documentation only. A parameter has its own line only if it is not the same.
Inherited names are listed with the class that defines them.

"""  # noqa: E501


class Row(NamedTuple):
    """A name, or one of its parameters."""

    name: str  # TensorFlow's; torchstrategy's if it is extra
    parameter: str  # empty: the row is about the name
    kind: str  # alias: of another row's; interface: a class whose objects one is given
    default: str  # of a parameter; empty: it must be given
    releases: str
    status: str
    # Where the name is, or how the parameter is called, if not as in TensorFlow.
    here: str
    why: str  # how it differs, or why it is not there

    @property
    def section(self) -> str:
        """Which of the `SECTIONS` it is in."""
        return max(filter(self.name.startswith, SECTIONS), key=len)

    @property
    def place(self) -> str:
        """Where it is in torchstrategy, or how the parameter is called."""
        return (
            self.here
            or self.parameter
            or SECTIONS[self.section] + self.name.removeprefix(self.section)
        )


def rows() -> list[Row]:
    """The table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def page(table: Sequence[Row]) -> str:
    """The page, in Markdown."""
    counts = Counter(row.status for row in table)
    legend = "".join(
        f"- **{status}** ({counts[status]} rows): {meaning}\n"
        for status, meaning in STATUSES.items()
    )
    return (
        HEAD
        + legend
        + "".join(
            _section(name, [row for row in table if row.section == name])
            for name in SECTIONS
        )
    )


def _section(section: str, table: Sequence[Row]) -> str:
    lines = [
        line
        for _, of_name in groupby(table, key=lambda row: row.name)
        for line in _lines(list(of_name))
    ]
    here = (
        ""
        if section == SECTIONS[section]
        else f"Here it is `{SECTIONS[section]}*`, unless the table says otherwise.\n\n"
    )
    return (
        f"\n## {section}*\n\n{here}| name | releases | is | |\n|---|---|---|---|\n"
        + "".join(lines)
    )


def _lines(of_name: Sequence[Row]) -> Iterator[str]:
    """The lines of one name: its own, and those of parameters that are not the same."""
    for row in of_name:
        name = row.name.removeprefix(row.section)
        if not row.parameter:
            place = f"`{row.here}`." if row.here else ""
            yield _line(
                name + _parentheses(row, of_name), row, f"{place} {row.why}".strip()
            )
        elif row.status != "same":
            yield _line(f"{name}(... {row.parameter} ...)", row, row.why)


def _line(name: str, row: Row, sentences: str) -> str:
    return f"| `{name}` | {row.releases} | {row.status} | {sentences} |\n"


def _parentheses(row: Row, of_name: Sequence[Row]) -> str:
    newest = [
        r for r in of_name if r.parameter and r.releases[-3:] == row.releases[-3:]
    ]
    if not newest and row.kind not in ("function", "method"):
        return ""
    parameters = [r.parameter + (f"={r.default}" if r.default else "") for r in newest]
    return "(...)" if row.status == "extra" else f"({', '.join(parameters)})"


if __name__ == "__main__":
    PAGE.write_text(page(rows()), encoding="utf-8")
