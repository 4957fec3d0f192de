"""What a plain value is: a number or a text, in which nobody can change anything.

Replicas need no copies of plain values, the library looks into none of them for tensors
or modules, and two that are equal are one for all purposes. There are three tables,
since three questions are asked:

    PLAIN_TYPES    is this surely plain? By `type(value) in`, which takes a tenth of the
                   time of the next: there may be millions of values. A subclass may
                   have attributes of its own, and is not among them.
    PLAIN          is this plain? By `isinstance`
    ROW_OBJECTS    may this be what a list has for one row of a batch? A dtype, a range
                   or a slice stands for no row.
"""

from __future__ import annotations

import enum
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

PLAIN_TYPES: frozenset[type] = frozenset(
    {bool, int, float, complex, str, bytes, type(None)}
)

_NUMBERS = (
    bool,
    int,
    float,
    complex,
    np.generic,
    Decimal,
    Fraction,
    datetime,
    date,
    time,
    timedelta,
)
PLAIN = (
    *_NUMBERS,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    enum.Enum,
    range,
    slice,
    PurePath,
)

ROW_OBJECTS = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    enum.Enum,
    date,
    timedelta,
    PurePath,
)


def are_equal(value: Any, other: Any) -> bool:
    """Whether two values are one object, equal plain values, or tuples of such.

    Equal plain values have the same type.

    Two equal tensors, or other objects, count as different: later, one of them may be
    changed in one replica.
    """
    if type(value) is not type(other):
        return False
    if isinstance(value, tuple):
        return len(value) == len(other) and all(map(are_equal, value, other))
    return value is other or (isinstance(value, PLAIN) and bool(value == other))
