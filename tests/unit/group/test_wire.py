"""Values that workers send to each other arrive as they were.

What nobody has sent runs nothing.
"""

from __future__ import annotations

import copy
import enum
import math
import pickle
import random
import struct
import types
import warnings
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from torchstrategy._group.processes.wire import decode, encode

PLAIN: list[Any] = [
    None,
    True,
    0,
    -1,
    2**63,
    -(2**20000),
    1.5,
    0.1,
    5e-324,
    1.7976931348623157e308,
    "",
    "ab",
    "\u00e9\U0001f600\x00",
    b"",
    b"\x00\xff",
    (1, [2, {3, 4}], frozenset({"a"}), ()),
    {"b": 1, "a": 2, 3: None, (4, "x"): [5], None: 6, 2.5: 7},
    {1: {True: "one"}},
    OrderedDict([("b", 1), ("a", 2)]),
    deque([1, 2], 3),
    range(1, 9, 2),
    slice(None, 3),
    Decimal("1.10"),
    Fraction(10**30, 7),
    timedelta(days=-1, seconds=3, microseconds=5),
    date(2020, 2, 29),
    datetime(2020, 2, 29, 1, 2, 3, 4, fold=1),
    time(1, 2),
    PurePosixPath("/a/b"),
    torch.float16,
    torch.device("cuda", 1),
    torch.Size([2, 0, 3]),
    1 + 2j,
]


def is_same(one: Any, other: Any) -> bool:
    """Equal, of the same types and in the same order throughout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return is_same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    assert is_same(decode(encode(value)), value)
    assert is_same(decode(encode([value, {"x": value}])), [value, {"x": value}])


@pytest.mark.parametrize(
    "number",
    [
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        struct.unpack("<d", b"\1\0\0\0\0\0\xf8\xff")[0],
    ],
)
def test_floats_arrive_to_the_bit(number: float) -> None:
    assert struct.pack("<d", decode(encode(number))) == struct.pack("<d", number)
    back = decode(encode(complex(number, -0.0)))
    assert struct.pack("<2d", back.real, back.imag) == struct.pack("<2d", number, -0.0)


@pytest.mark.parametrize("text", ["\ud83d", "a\udcffb", "\ud83d" + "\ude00"])
def test_halves_of_characters_arrive(text: str) -> None:
    assert decode(encode({text: text})) == {text: text}


DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    - {torch.quint4x2, torch.quint2x4},
    key=str,
)


@pytest.mark.parametrize(
    "dtype",
    [d for d in DTYPES if not str(d).startswith(("torch.q", "torch.bits"))],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)], ids=str)
def test_tensors_of_every_dtype_arrive(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    size = math.prod(shape) * dtype.itemsize
    data = torch.randint(2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
    tensor = data.view(dtype).view(shape)
    back = decode(encode([tensor, tensor]))[1]
    assert (type(back), back.dtype, back.shape) == (torch.Tensor, dtype, tensor.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), data)


def test_tensors_of_every_layout_arrive() -> None:
    wide = torch.arange(6.0).reshape(2, 3)
    for tensor in (
        wide.t(),
        wide[:, ::2],
        wide[:1].expand(4, 3),
        torch.tensor([1 + 2j]).conj(),
        wide.requires_grad_(),
    ):
        back = decode(encode(tensor))
        assert torch.equal(back, tensor) and not back.requires_grad
    sparse = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse()
    twice = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True)
    for tensor in (sparse, twice):
        back = decode(encode(tensor))
        assert back.is_coalesced() == tensor.is_coalesced() and torch.equal(
            back.to_dense(), tensor.to_dense()
        )
    nested = torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged
    )
    assert [part.tolist() for part in decode(encode(nested)).unbind()] == [
        part.tolist() for part in nested.unbind()
    ]
    packed = pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)
    back = decode(encode(packed))
    assert type(back) is PackedSequence and all(map(torch.equal, back, packed))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3).T,
        np.array(1.5, ">f8"),
        np.array(["a", "bcd"]),
        np.array([b"a"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([1], "m8[25s]"),
        np.zeros((0, 3), np.float16),
        np.array([True, False]),
        np.array([[1 + 2j]], np.complex64),
        np.array([], "U9"),
        np.array([["a", None], [1, (2,)]], object),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_and_their_scalars_arrive(array: np.ndarray[Any, Any]) -> None:
    back = decode(encode(array))
    assert (back.dtype, back.shape, back.tolist()) == (
        array.dtype,
        array.shape,
        array.tolist(),
    )
    assert back.flags.writeable
    if array.size and array.dtype != object:
        scalar = array.reshape(-1)[0]
        assert is_same(decode(encode(scalar)), scalar)


Pair = namedtuple("Pair", "one two")


@dataclass
class Held:
    x: int


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    pass


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Pair(1, 2), "A Pair "),
        ({"x": [Held(1)]}, "A Held "),
        (Color.RED, "A Color "),
        (Text("a"), "A Text "),
        (defaultdict(int), "A defaultdict "),
        (len, "A builtin_function_or_method "),
        (object, "A type "),
        (np.ma.masked_array([1]), "A MaskedArray "),
        (np.zeros(1, [("x", "i4")]), "An array of the dtype "),
        (
            lambda: torch.zeros(2, 2).to_sparse_csr(),
            "A tensor of the layout torch.sparse_csr ",
        ),
        (
            lambda: torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.quint8),
            "A quantized tensor ",
        ),
        (torch.ones(1, device="meta"), "A tensor on 'meta'"),
        (
            torch.ones(1).as_subclass(type("Image", (torch.Tensor,), {})),
            "A tensor of the class Image ",
        ),
        (datetime(2020, 1, 1, tzinfo=timezone.utc), "A datetime with a time zone "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_only_its_class_could_make_is_refused_by_name(
    value: Any, told: str
) -> None:
    with warnings.catch_warnings():
        # Torch's, of layouts and dtypes that are new or old.
        warnings.simplefilter("ignore")
        value = value() if isinstance(value, types.FunctionType) else value
    with pytest.raises(TypeError, match="^" + told.replace(".", r"\.")):
        encode(value)


def test_what_holds_itself_is_refused() -> None:
    held: list[Any] = []
    held.append(held)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (held, deep):
        with pytest.raises(
            ValueError, match=r"^A list holds itself, or is nested too deeply"
        ):
            encode(value)


class Running:
    """Runs something where somebody unpickles it."""

    ran: ClassVar[list[str]] = []

    def __reduce__(self) -> Any:
        return self.ran.append, ("ran",)


def with_structure(structure: bytes, rest: bytes = b"") -> bytes:
    return len(structure).to_bytes(8, "big") + structure + rest


HOSTILE = {
    "a pickle": pickle.dumps(Running()),
    "nothing": b"",
    "a short length": b"\0\0",
    "a length beyond the end": (10**12).to_bytes(8, "big") + b"1",
    "no JSON": with_structure(b"{["),
    "an object": with_structure(b'{"a": 1}'),
    "deep": with_structure(b"[" * 100_000),
    "deep lists": with_structure(b'["list",' * 100_000 + b"1" + b"]" * 100_000),
    "a kind that is none": with_structure(b'["os.system","ls"]'),
    "an empty node": with_structure(b"[]"),
    "a long number": with_structure(b"9" * 100_000),
    "a large tensor": with_structure(
        b'["tensor","float32",[1000000,1000000],4000000000000]'
    ),
    "a larger tensor": with_structure(
        b'["tensor","float32",[1000000,1000000],4]', b"1234"
    ),
    "a negative size": with_structure(b'["tensor","float32",[-1],-4]'),
    "sizes beyond 64 bits": with_structure(
        b'["tensor","float32",[0,' + b"9" * 30 + b"],0]"
    ),
    "half a number": with_structure(b'["tensor","float32",[1.5],6]', b"123456"),
    "a dtype that is none": with_structure(b'["tensor","load",[],0]'),
    "an array of objects": with_structure(b'["array","|O8",[1],8]', b"12345678"),
    "an array of a comma": with_structure(b'["array","(99999,)f8,i4",[0],0]'),
    "an array of large items": with_structure(b'["array","|S2000000000",[0],0]'),
    "indices that are outside": with_structure(
        b'["sparse",[2],false,["tensor","int64",[1,1],8],["tensor","float32",[1],4]]',
        struct.pack("<qf", 9, 1.0),
    ),
    "rows that are outside": with_structure(
        b'["nested",1,["tensor","float32",[1],4],["tensor","int64",[2],16],null]',
        struct.pack("<fqq", 1.0, 0, 99),
    ),
    "steps that are outside": with_structure(
        b'["packed",["tensor","float32",[1],4],["tensor","int64",[1],8],null,null]',
        struct.pack("<fq", 1.0, 99),
    ),
    "a set of lists": with_structure(b'["set",["list"]]'),
    "half a dict": with_structure(b'["dict",1]'),
    "a large fraction": with_structure(b'["fraction","1e999999999"]'),
    "a fraction of nothing": with_structure(b'["fraction",1,0]'),
    "half a float": with_structure(b'["float","00"]'),
    "bytes that are left over": encode(1) + b"2",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_other_bytes_are_refused_and_run_nothing(name: str) -> None:
    """Once, whoever reached the port of a worker could let it run anything.

    Messages were unpickled.
    """
    with pytest.raises(ValueError, match=r"^What came from another worker is no value"):
        decode(HOSTILE[name])
    assert not Running.ran


def test_damaged_bytes_are_refused_or_are_other_values() -> None:
    whole = encode(
        [PLAIN, torch.arange(3.0), np.array(["a"]), {"x": torch.eye(2).to_sparse()}]
    )
    draw = random.Random(0)
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        cut = bytes(data[: draw.choice([len(data), draw.randrange(len(data))])])
        try:
            decode(copy.copy(cut))
        except ValueError as error:
            assert "What came from another worker is no value" in str(error)
