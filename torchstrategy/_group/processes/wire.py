"""Values as bytes that hold no code, as workers send them to each other.

What comes from a socket may be anybody's. To unpickle it means to do what it says; so
do `marshal` and `torch.load`. Here the bytes say only which numbers and texts there
are, and in which of Python's own containers:

    8 bytes      the length of the structure
    structure    JSON: None, booleans, numbers and texts as they are; anything else as a
                 list of its kind and its parts
    the rest     the bytes of tensors, arrays and `bytes`, one after the other, in the
                 order of the structure

A class of the user's is refused by its name: to make one of its objects, a worker would
have to run what the class says. Whoever has such a value takes it apart, and the other
worker puts it together by a structure of its own.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, NoReturn, final

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from torchstrategy._base.errors import an, described
from torchstrategy._base.memory import bits
from torchstrategy._base.torch_internals import sparse_indices, sparse_values

_LENGTH = 8  # bytes of the length of the structure
# Numbers from here on are written in hexadecimal, which Python reads whatever their
# length is.
_WIDE = 2**63


def encode(value: object) -> bytes:
    """A value as bytes, of which `decode` makes an equal one.

    Args:
        value: None, a number, a text, `bytes`, a tensor, an array, a thing of the
            standard library that says what it is by such, or a list, tuple, set, dict,
            `OrderedDict` or deque of these. A tensor arrives on the CPU, without its
            history.

    Raises:
        TypeError: If there is something else in it, which is named.
        ValueError: If it holds itself, or is nested too deeply.
    """
    blobs: list[bytes] = []
    try:
        structure = json.dumps(
            _node(value, blobs), allow_nan=False, separators=(",", ":")
        ).encode()
    except RecursionError:
        raise ValueError(
            f"{an(type(value).__name__).capitalize()} holds itself, or is nested too "
            "deeply, and cannot be sent to other workers."
        ) from None
    return b"".join([len(structure).to_bytes(_LENGTH, "big"), structure, *blobs])


def decode(data: bytes) -> Any:
    """The value of which `encode` made these bytes.

    Raises:
        ValueError: If they are no such bytes. Nothing larger than they are is made of
            them.
    """
    try:
        size = int.from_bytes(data[:_LENGTH], "big")
        rest = _Rest(data, _LENGTH + size)
        value = _value(json.loads(data[_LENGTH : rest.position]), rest)
        if rest.position != len(data):
            raise ValueError(f"{len(data) - rest.position} bytes are left over")
        return value
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        AttributeError,
        RuntimeError,
        struct.error,
    ) as error:
        raise ValueError(
            f"What came from another worker is no value: {described(error)}"
        ) from error


def _node(value: Any, blobs: list[bytes]) -> Any:
    """What stands for a value in the structure.

    The bytes of tensors and the like are appended to `blobs`.
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -_WIDE < value < _WIDE else ["int", hex(value)]
    if kind is float:
        return (
            value if math.isfinite(value) else ["float", struct.pack("<d", value).hex()]
        )
    if kind is str:
        return _node_of_text(value)
    if kind is bytes:
        return ["bytes", _blob(value, blobs)]
    if kind in _CONTAINERS:
        return [_CONTAINERS[kind], *[_node(item, blobs) for item in value]]
    if kind is dict or kind is OrderedDict:
        items = [_node(item, blobs) for pair in value.items() for item in pair]
        return ["dict" if kind is dict else "ordered", *items]
    if kind in _ATOMS:
        name, parts_of, _ = _ATOMS[kind]
        return [name, *[_node(part, blobs) for part in parts_of(value)]]
    if isinstance(value, torch.Tensor):
        return _node_of_tensor(value, blobs)
    if isinstance(value, np.generic):
        return ["scalar", *_node_of_array(np.asarray(value), blobs)[1:]]
    if kind is np.ndarray or kind is np.memmap:
        return _node_of_array(value, blobs)
    _refuse(an(kind.__name__))


def _value(node: Any, rest: _Rest) -> Any:
    """The reverse of `_node`."""
    kind = type(node)
    if kind is list:
        name, *parts = node
        return _READERS[name](parts, rest)
    if kind is dict:
        raise ValueError("JSON objects stand for nothing")
    return node


@final
class _Rest:
    """The bytes after the structure, which are read one after the other.

    Args:
        data: All bytes.
        position: Where the next ones begin.
    """

    def __init__(self, data: bytes, position: int) -> None:
        self._data = memoryview(data)
        self.position = position
        self.take(0)

    def take(self, size: int) -> memoryview:
        """The next bytes.

        Raises:
            ValueError: If there are fewer.
        """
        end = self.position + size
        if type(size) is not int or size < 0 or end > len(self._data):
            raise ValueError(f"there are no {size!r} bytes from {self.position} on")
        taken = self._data[self.position : end]
        self.position = end
        return taken


def _refuse(what: str) -> NoReturn:
    raise TypeError(
        f"{what[0].upper()}{what[1:]} cannot be sent to other workers: these take "
        "None, numbers, texts, bytes, tensors and arrays, and lists, tuples, sets and "
        "dicts of them. Make such of it first."
    )


def _blob(data: bytes, blobs: list[bytes]) -> int:
    blobs.append(data)
    return len(data)


# Texts


def _node_of_text(text: str) -> Any:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON would make one character of two halves of one
        return ["text", text.encode("utf-8", "surrogatepass").hex()]
    return text


# Tensors

_DTYPES = {
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if type(found) is torch.dtype
}


def _node_of_tensor(tensor: torch.Tensor, blobs: list[bytes]) -> Any:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not tensor.is_nested:
        _refuse(f"a tensor of the class {type(tensor).__name__}")
    if tensor.is_quantized or tensor.is_meta:
        _refuse(
            "a quantized tensor"
            if tensor.is_quantized
            else "a tensor on 'meta', which has no numbers,"
        )
    tensor = tensor.detach()
    tensor = tensor if tensor.is_cpu else tensor.cpu()
    if tensor.is_nested:
        return _node_of_nested(tensor, blobs)
    if tensor.layout is torch.sparse_coo:
        parts = [
            _node_of_tensor(part, blobs)
            for part in (sparse_indices(tensor), sparse_values(tensor))
        ]
        return ["sparse", list(tensor.shape), tensor.is_coalesced(), *parts]
    if tensor.layout is not torch.strided:
        _refuse(f"a tensor of the layout {tensor.layout}")
    data = bits(tensor.resolve_conj().resolve_neg()).numpy().tobytes()
    return [
        "tensor",
        str(tensor.dtype).removeprefix("torch."),
        list(tensor.shape),
        _blob(data, blobs),
    ]


def _node_of_nested(tensor: Any, blobs: list[bytes]) -> Any:
    if tensor.layout is not torch.jagged:
        _refuse(f"a nested tensor of the layout {tensor.layout}")
    dimension = next(
        d for d, size in enumerate(tensor.shape) if not isinstance(size, int)
    )
    parts = tensor.values(), tensor.offsets(), tensor.lengths()
    return ["nested", dimension, *[_node(part, blobs) for part in parts]]


def _tensor_of(parts: Sequence[Any], rest: _Rest) -> torch.Tensor:
    name, shape, size = parts
    dtype, taken = _DTYPES[name], rest.take(size)
    if _product(shape) * dtype.itemsize != size:
        raise ValueError(f"{size} bytes are no tensor of shape {shape} and {dtype}")
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    if size:
        flat = torch.frombuffer(bytearray(taken), dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def _sparse_of(parts: Sequence[Any], rest: _Rest) -> torch.Tensor:
    shape, coalesced, *nodes = parts
    indices, values = (_tensor_at(node, rest) for node in nodes)
    made = torch.sparse_coo_tensor(
        indices, values, shape, check_invariants=True, device="cpu"
    )
    # A tensor that says that it is coalesced, and is not, would be read wrongly.
    return made.coalesce() if coalesced else made


def _nested_of(parts: Sequence[Any], rest: _Rest) -> torch.Tensor:
    dimension, *nodes = parts
    values, offsets = (_tensor_at(node, rest) for node in nodes[:2])
    lengths = None if nodes[2] is None else _tensor_at(nodes[2], rest)
    # torch reads memory by these numbers and does not look at them.
    begins, ends = offsets[:-1], offsets[1:]
    if lengths is not None:
        ends = begins + lengths
    steps = ends - begins
    is_inside = 1 <= dimension <= values.dim() and bool(
        (begins >= 0).all() and (steps >= 0).all()
    )
    if not is_inside or bool((ends > values.shape[dimension - 1]).any()):
        raise ValueError(
            f"the rows {offsets.tolist()} are not in a tensor of shape "
            f"{tuple(values.shape)}"
        )
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, dimension)


def _tensor_at(node: Any, rest: _Rest) -> torch.Tensor:
    found = _value(node, rest)
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"{type(found).__name__} stands in the place of a tensor")
    return found


def _product(shape: Any) -> int:
    if type(shape) is not list or any(
        type(size) is not int or size < 0 for size in shape
    ):
        raise ValueError(f"{shape!r:.60} is no shape")
    return math.prod(shape)


# Arrays

_KINDS = "biufcSUMm"  # of dtypes that hold numbers, texts and times
_NAME_OF_DTYPE = re.compile(rf"[<>|=][{_KINDS}]\d+(\[\w+\])?")
_LARGE_ITEM = 2**20  # bytes


def _node_of_array(array: np.ndarray[Any, Any], blobs: list[bytes]) -> Any:
    if array.dtype.kind == "O":
        return [
            "objects",
            list(array.shape),
            *[_node(item, blobs) for item in array.reshape(-1).tolist()],
        ]
    if array.dtype.kind not in _KINDS:
        _refuse(f"an array of the dtype {array.dtype}")
    return ["array", array.dtype.str, list(array.shape), _blob(array.tobytes(), blobs)]


def _array_of(parts: Sequence[Any], rest: _Rest) -> np.ndarray[Any, Any]:
    name, shape, size = parts
    if not _NAME_OF_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r:.60} is no dtype")
    dtype, taken = np.dtype(name), rest.take(size)
    # NumPy takes memory for one item of an empty array, too.
    if _product(shape) * dtype.itemsize != size or dtype.itemsize > max(
        size, _LARGE_ITEM
    ):
        raise ValueError(f"{size} bytes are no array of shape {shape} and {dtype}")
    made = np.empty(shape, dtype)
    if size:
        made.reshape(-1).view(np.uint8)[:] = np.frombuffer(taken, np.uint8)
    return made


def _objects_of(parts: Sequence[Any], rest: _Rest) -> np.ndarray[Any, Any]:
    shape, *nodes = parts
    if _product(shape) != len(nodes):
        raise ValueError(f"{len(nodes)} objects are no array of shape {shape}")
    made = np.empty(len(nodes), object)
    for i, node in enumerate(nodes):
        made[i] = _value(node, rest)
    return made.reshape(shape)


# Containers, and things of the standard library and of torch that say what they are by
# a few parts

_CONTAINERS: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
}
_Parts = Callable[[Any], Sequence[Any]]
_Made = Callable[..., Any]
_Paths = (PurePosixPath, PosixPath, PureWindowsPath, WindowsPath)


def _as_text(thing: Any) -> Sequence[Any]:
    return (str(thing),)


def _moment(thing: Any) -> Sequence[Any]:
    if getattr(thing, "tzinfo", None) is not None:
        _refuse(f"{an(type(thing).__name__)} with a time zone")
    return (thing.isoformat(), getattr(thing, "fold", 0))


def _date_of(text: str, fold: int) -> date:
    return date.fromisoformat(text)


def _datetime_of(text: str, fold: int) -> datetime:
    return datetime.fromisoformat(text).replace(fold=fold)


def _time_of(text: str, fold: int) -> time:
    return time.fromisoformat(text).replace(fold=fold)


def _packed_of(
    data: torch.Tensor, sizes: torch.Tensor, order: Any, back: Any
) -> PackedSequence:
    steps = sizes.tolist()
    is_whole = sum(steps) == len(data) and all(step > 0 for step in steps[:-1])
    # torch does not look at them, and reads by them.
    if not is_whole or steps != sorted(steps, reverse=True):
        raise ValueError(
            f"{len(data)} rows are no sequences that have {steps} in each step"
        )
    return PackedSequence(data, sizes, order, back)


def _fraction_of(over: int, under: int) -> Fraction:
    # The text "1e999999999" would be a number of that length.
    if type(over) is not int or type(under) is not int:
        raise TypeError("a fraction is made of two integers")
    return Fraction(over, under)


def _dtype_of(name: str) -> torch.dtype:
    return _DTYPES[name]


_ATOMS: dict[type, tuple[str, _Parts, _Made]] = {
    complex: ("complex", lambda z: (z.real, z.imag), complex),
    range: ("range", lambda r: (r.start, r.stop, r.step), range),
    slice: ("slice", lambda s: (s.start, s.stop, s.step), slice),
    Decimal: ("decimal", _as_text, Decimal),
    Fraction: ("fraction", lambda f: (f.numerator, f.denominator), _fraction_of),
    timedelta: ("timedelta", lambda t: (t.days, t.seconds, t.microseconds), timedelta),
    date: ("date", _moment, _date_of),
    datetime: ("datetime", _moment, _datetime_of),
    time: ("time", _moment, _time_of),
    **{kind: (kind.__name__, _as_text, kind) for kind in _Paths},
    torch.Size: ("size", tuple, lambda *sizes: torch.Size(sizes)),
    torch.device: ("device", _as_text, torch.device),
    torch.dtype: (
        "dtype",
        lambda dtype: (str(dtype).removeprefix("torch."),),
        _dtype_of,
    ),
    PackedSequence: ("packed", tuple, _packed_of),
    deque: (
        "deque",
        lambda items: (items.maxlen, *items),
        lambda most, *items: deque(items, most),
    ),
}

_Reader = Callable[[Sequence[Any], _Rest], Any]


def _reader_of(made: _Made) -> _Reader:
    """Reads all parts, and makes one thing of them."""
    return lambda parts, rest: made(*[_value(part, rest) for part in parts])


def _dict_of(*items: Any) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _ordered_of(*items: Any) -> OrderedDict[Any, Any]:
    return OrderedDict(_dict_of(*items))


def _float_of(parts: Sequence[Any], rest: _Rest) -> float:
    (number,) = struct.unpack("<d", bytes.fromhex(parts[0]))
    return float(number)


_READERS: dict[str, _Reader] = {
    "int": lambda parts, rest: int(parts[0], 16),
    "float": _float_of,
    "text": lambda parts, rest: bytes.fromhex(parts[0]).decode(
        "utf-8", "surrogatepass"
    ),
    "bytes": lambda parts, rest: bytes(rest.take(parts[0])),
    "tensor": _tensor_of,
    "sparse": _sparse_of,
    "nested": _nested_of,
    "array": _array_of,
    "scalar": lambda parts, rest: _array_of(parts, rest)[()],
    "objects": _objects_of,
    "list": lambda parts, rest: [_value(part, rest) for part in parts],
    "tuple": _reader_of(lambda *items: items),
    "set": _reader_of(lambda *items: set(items)),
    "frozenset": _reader_of(lambda *items: frozenset(items)),
    "dict": _reader_of(_dict_of),
    "ordered": _reader_of(_ordered_of),
    **{name: _reader_of(made) for name, _, made in _ATOMS.values()},
}
