"""Reads lists that Slurm writes in short form in environment variables.

Some lists name nodes, and others say how many tasks each node has.
"""

from __future__ import annotations

import itertools
import math
import re

_MOST = 1_000_000  # nodes, and tasks: more than Slurm manages
_MOST_DIGITS = 100


def expand_counts(name: str, text: str) -> list[int]:
    """The numbers of tasks that Slurm writes in short: `"2(x3),1"`.

    Raises:
        ValueError: If the text is not of this form, or has more nodes than there can
            be.
    """
    parts = [
        re.fullmatch(r"(\d{1,9})(?:\(x(\d+)\))?", part.strip())
        for part in text.split(",")
    ]
    if None in parts:
        raise ValueError(
            f"{name}={shorten(text)} is no list of numbers such as '2(x3),1'."
        )
    repeated = [(part[1], part[2] or "1") for part in parts if part]
    _check_count(sum(_size("1", times) for _, times in repeated), name, text)
    return [int(tasks) for tasks, times in repeated for _ in range(int(times))]


def expand_nodes(name: str, nodes: str) -> list[str]:
    """The names of nodes that Slurm writes in short: `"node[08-10,12],login"`.

    Args:
        name: The environment variable that has it.
        nodes: What it has.

    Raises:
        ValueError: If the text is not of this form, or has more nodes than there can
            be.
    """
    found: list[str] = []
    # Commas within brackets part ranges, and others part nodes.
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes):
        parts = re.split(r"\[([^\]]*)\]", entry.strip())
        ranges = [_ranges(part, name) for part in parts[1::2]]
        counts = [sum(_size(first, last) for first, last in some) for some in ranges]
        _check_count(len(found) + math.prod(counts), name, nodes)
        choices = [
            _numbers(ranges[i // 2]) if i % 2 else [part]
            for i, part in enumerate(parts)
        ]
        found += map("".join, itertools.product(*choices))
    return found


def _check_count(count: int, name: str, text: str) -> None:
    if count > _MOST:
        raise ValueError(
            f"{name}={shorten(text)} lists more than {_MOST:,} nodes, which no cluster "
            "of Slurm has. Look at what sets this variable, or leave the "
            "SlurmClusterResolver out."
        )


def _ranges(text: str, name: str) -> list[tuple[str, str]]:
    """The first and the last number of each range in a pair of brackets."""
    ranges: list[tuple[str, str]] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None:
            raise ValueError(
                f"{part!r} in {name} is no number and no range such as 08-10, in a "
                "list of Slurm's nodes."
            )
        ranges.append((found[1], found[2] or found[1]))
    return ranges


def _size(first: str, last: str) -> int:
    """How many numbers a range has.

    Of numbers with thousands of digits, of which Python makes none, too many.
    """
    if len(first) > _MOST_DIGITS or len(last) > _MOST_DIGITS:
        return _MOST + 1
    return max(0, int(last) + 1 - int(first))


def _numbers(ranges: list[tuple[str, str]]) -> list[str]:
    numbers: list[str] = []
    for first, last in ranges:
        numbers += [
            str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)
        ]
    return numbers


def shorten(text: str) -> str:
    """A value for a message, in which no more than its beginning is read."""
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}..."
