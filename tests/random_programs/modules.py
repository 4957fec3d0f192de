"""Modules as users write them, with whatever users keep on a module."""

from __future__ import annotations

import abc
import collections
import types
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import numpy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchstrategy

T = TypeVar("T")


def filled(module: nn.Module, start: int = 1) -> nn.Module:
    """The module with numbers that are equal on all devices: none are drawn there."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters(), start):
            parameter.copy_(numbers(parameter.shape, index))
    return module


def numbers(shape: Any, start: float) -> torch.Tensor:
    """Numbers between -0.6 and 0.6 in no order."""
    count = torch.Size(shape).numel()
    return (
        torch.arange(count, dtype=torch.float64) * 1.7 + start * 0.61
    ).sin().reshape(shape) * 0.6


class Point:
    """A plain object that a module holds."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


def _kept(setting: T, changed: object) -> T:
    """The setting itself, which was changed in place."""
    return setting


def _one() -> float:
    return 1.0


# How a setting is kept, how it is read, and how it is changed between steps.
_SETTINGS: dict[
    str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, float], Any]]
] = {
    "number": (lambda: 1.0, lambda s: s, lambda s, v: v),
    "tuple": (lambda: (1.0, "a"), lambda s: s[0], lambda s, v: (v, "b")),
    "list": (
        lambda: [0, 1.0],
        lambda s: s[1],
        lambda s, v: _kept(s, s.__setitem__(1, v)),
    ),
    "dict": (
        lambda: {"scale": 1.0},
        lambda s: s["scale"],
        lambda s, v: _kept(s, s.update(scale=v)),
    ),
    "dict in a dict": (
        lambda: {"in": {"k": 1.0}},
        lambda s: s["in"]["k"],
        lambda s, v: _kept(s, s["in"].update(k=v)),
    ),
    "list in a list": (
        lambda: [0, [1.0]],
        lambda s: s[1][0],
        lambda s, v: _kept(s, s[1].__setitem__(0, v)),
    ),
    "dict in a tuple": (
        lambda: ({"k": 1.0},),
        lambda s: s[0]["k"],
        lambda s, v: _kept(s, s[0].update(k=v)),
    ),
    "object in a dict": (
        lambda: {"p": Point(1.0)},
        lambda s: s["p"].scale,
        lambda s, v: _kept(s, setattr(s["p"], "scale", v)),
    ),
    "object": (
        lambda: Point(1.0),
        lambda s: s.scale,
        lambda s, v: _kept(s, setattr(s, "scale", v)),
    ),
    "namespace": (
        lambda: types.SimpleNamespace(k=1.0),
        lambda s: s.k,
        lambda s, v: _kept(s, setattr(s, "k", v)),
    ),
    "tensor": (lambda: torch.ones(()), lambda s: s, lambda s, v: s.fill_(v)),
    "tensor in a dict": (
        lambda: {"t": torch.ones(2)},
        lambda s: s["t"][0],
        lambda s, v: _kept(s, s["t"].fill_(v)),
    ),
    "array": (
        lambda: numpy.ones(2),
        lambda s: float(s[1]),
        lambda s, v: _kept(s, s.fill(v)),
    ),
    "default dict": (
        lambda: collections.defaultdict(_one, {"other": 2.0}),
        lambda s: s["k"],
        lambda s, v: _kept(s, s.__setitem__("k", v)),
    ),
    "deque": (
        lambda: collections.deque([1.0], 2),
        lambda s: s[-1],
        lambda s, v: _kept(s, s.append(v)),
    ),
    "large dict": (
        lambda: {"scale": 1.0, **{f"w{i}": i for i in range(1200)}},
        lambda s: s["scale"],
        lambda s, v: _kept(s, s.update({"scale": v, f"w{v}": v})),
    ),
    "dict of many dicts": (
        lambda: {i: {"k": [1.0]} for i in range(600)},
        lambda s: s[7]["k"][-1],
        lambda s, v: _kept(s, s[7]["k"].append(v)),
    ),
    "list of many tuples": (
        lambda: [(1.0, str(i)) for i in range(600)],
        lambda s: s[-1][0],
        lambda s, v: _kept(s, s.append((v, "new"))),
    ),
    "large list that is replaced": (
        lambda: [1.0] * 1200,
        lambda s: s[3],
        lambda s, v: [v] * 1200,
    ),
    "function": (
        lambda: partial(float, 1.0),
        lambda s: s(),
        lambda s, v: partial(float, v),
    ),
}
SETTINGS = list(_SETTINGS)


def new_setting(kind: str) -> Any:
    """A setting as it is at first."""
    return _SETTINGS[kind][0]()


def read_setting(kind: str, setting: Any) -> Any:
    """The number in a setting."""
    return _SETTINGS[kind][1](setting)


def changed(kind: str, setting: Any, value: float) -> Any:
    """The setting with another number."""
    return _SETTINGS[kind][2](setting, value)


class Settings(nn.Module):
    """Scales by a setting."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.setting = _SETTINGS[kind][0]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = _SETTINGS[self.kind][1](self.setting)
        return x * (scale.to(x.device) if isinstance(scale, torch.Tensor) else scale)

    def change(self, value: float) -> None:
        """What a user does between steps."""
        self.setting = _SETTINGS[self.kind][2](self.setting, value)


def _add_number(m: Any, n: int) -> None:
    m.seen += 1


def _add_float(m: Any, n: int) -> None:
    m.seen = m.seen * 0.5 + 1.0


def _next_tuple(m: Any, n: int) -> None:
    m.seen = (m.seen[0] + 1, "seen")


def _append(m: Any, n: int) -> None:
    m.seen.append(len(m.seen))


def _count_in_dict(m: Any, n: int) -> None:
    m.seen["calls"] = m.seen.get("calls", 0) + 1


def _count_deep(m: Any, n: int) -> None:
    m.seen["in"]["calls"] += 1


def _add_to_set(m: Any, n: int) -> None:
    m.seen.add(len(m.seen))


def _frozenset(m: Any, n: int) -> None:
    m.seen = m.seen | {len(m.seen)}


def _count_in_object(m: Any, n: int) -> None:
    m.seen.scale += 1


def _size(m: Any, n: int) -> None:
    m.seen = torch.Size([2, len(m.seen)])


def _string(m: Any, n: int) -> None:
    m.seen += "x"


def _counter(m: Any, n: int) -> None:
    m.seen["calls"] += 1


def _push(m: Any, n: int) -> None:
    m.seen.append(m.seen[-1] + 1)


def _append_tuple(m: Any, n: int) -> None:
    m.seen.append((len(m.seen), {"n": n}))


def _none(m: Any, n: int) -> None:
    m.seen = None if m.seen else True


def _array(m: Any, n: int) -> None:
    m.seen += 1


def _new_name(m: Any, n: int) -> None:
    m.calls = getattr(m, "calls", 0) + 1


def _deleted(m: Any, n: int) -> None:
    if hasattr(m, "seen"):
        del m.seen


def _append_deep(m: Any, n: int) -> None:
    m.seen[7][0].append(len(m.seen[7][0]))


_COUNTS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], None]]] = {
    "number": (lambda: 0, _add_number),
    "float": (lambda: 0.0, _add_float),
    "tuple": (lambda: (0, "no"), _next_tuple),
    "list": (list, _append),
    "dict": (dict, _count_in_dict),
    "dict in a dict": (lambda: {"in": {"calls": 0}}, _count_deep),
    "set": (set, _add_to_set),
    "frozenset": (frozenset, _frozenset),
    "object": (lambda: Point(0), _count_in_object),
    "size": (lambda: torch.Size([1]), _size),
    "string": (str, _string),
    "counter": (collections.Counter, _counter),
    "deque": (lambda: collections.deque([0], 3), _push),
    "list of tuples": (list, _append_tuple),
    "none": (lambda: None, _none),
    "array": (lambda: numpy.zeros(2), _array),
    "large dict": (lambda: {"calls": 0, **{i: i for i in range(1200)}}, _counter),
    "many lists": (lambda: [([i], "n") for i in range(600)], _append_deep),
    "new name": (lambda: 0, _new_name),
    "deleted": (lambda: 0, _deleted),
}
COUNTS = list(_COUNTS)


def new_count(kind: str) -> Any:
    """What is counted with, as it is at first."""
    return _COUNTS[kind][0]()


def count(kind: str, thing: Any, n: int) -> None:
    """Counts on an attribute of a thing."""
    _COUNTS[kind][1](thing, n)


class Counts(nn.Module):
    """Writes on an attribute in each forward, the same for whatever rows."""

    def __init__(self, kind: str, in_training: bool) -> None:
        super().__init__()
        self.kind, self.in_training = kind, in_training
        self.seen = _COUNTS[kind][0]()

    def reset(self) -> None:
        """What a user does after an epoch."""
        self.seen = _COUNTS[self.kind][0]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training or not self.in_training:
            _COUNTS[self.kind][1](self, x.shape[1])
        return x


def _row_sums(x: torch.Tensor) -> tuple[Any, Any]:
    context = torchstrategy.get_replica_context()
    assert context is not None
    return context.all_reduce("sum", (x.detach().sum(0), len(x)))


def _counted(m: Any, x: torch.Tensor) -> None:
    m.buffer += 1


def _counted_anew(m: Any, x: torch.Tensor) -> None:
    m.buffer = m.buffer + 1


def _counted_by_data(m: Any, x: torch.Tensor) -> None:
    m.buffer.data.add_(1)


def _counted_in_registration(m: Any, x: torch.Tensor) -> None:
    m._buffers["buffer"] = m._buffers["buffer"] + 1


def _follows_the_weight(m: Any, x: torch.Tensor) -> None:
    m.buffer.mul_(0.9).add_(m.weight.detach(), alpha=0.1)


def _running_mean(m: Any, x: torch.Tensor) -> None:
    total, rows = _row_sums(x)
    m.buffer.mul_(0.9).add_((total / rows).to(x.device), alpha=0.1)


def _nothing(m: Any, x: torch.Tensor) -> None:
    pass


def _made_in_forward(m: Any, x: torch.Tensor) -> None:
    if m.buffer is None:
        m.buffer = torch.full((x.shape[1],), 0.5, dtype=x.dtype, device=x.device)


def _masked(m: Any, x: torch.Tensor) -> None:
    m.buffer.logical_not_()


_BUFFERS: dict[
    str, tuple[Callable[[int], Any], Callable[[Any, torch.Tensor], None]]
] = {
    "constant": (lambda w: torch.ones(w), _nothing),
    "counter": (lambda w: torch.zeros((), dtype=torch.long), _counted),
    "counter, anew": (lambda w: torch.zeros((), dtype=torch.long), _counted_anew),
    "float counter": (lambda w: torch.zeros(w), _counted),
    "float counter, anew": (lambda w: torch.zeros(w), _counted_anew),
    "counter by data": (lambda w: torch.zeros(w), _counted_by_data),
    "counter in _buffers": (lambda w: torch.zeros(w), _counted_in_registration),
    "follows the weight": (lambda w: torch.zeros(w), _follows_the_weight),
    "running mean": (lambda w: torch.zeros(w), _running_mean),
    "none at first": (lambda w: None, _made_in_forward),
    "mask": (lambda w: torch.ones(w, dtype=torch.bool), _masked),
    "expanded": (lambda w: torch.ones(1).expand(w), _nothing),
    "view of another": (lambda w: torch.ones(2, w)[0], _nothing),
    "transposed": (lambda w: numbers((w, w), 3).t(), _nothing),
}
BUFFERS = list(_BUFFERS)


class Buffered(nn.Module):
    """Has a buffer, which scales; in training, forward writes on it."""

    def __init__(self, kind: str, width: int, persistent: bool) -> None:
        super().__init__()
        self.kind = kind
        # Until it is moved.
        self.shares_memory = kind in ("expanded", "view of another", "transposed")
        self.weight = nn.Parameter(torch.full((width,), 0.75))
        self.register_buffer("buffer", _BUFFERS[kind][0](width), persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training or self.buffer is None:
            with torch.no_grad():
                _BUFFERS[self.kind][1](self, x)
        scale = self.buffer[0] if self.buffer.dim() == 2 else self.buffer
        return x * self.weight * (1 + 0.1 * scale)


class SharedBuffer(nn.Module):
    """One buffer under two names, and in a plain attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("first", torch.ones(width))
        self.inner = nn.Module()
        self.inner.register_buffer("second", self.first)
        self.table = {"again": self.first}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.first.mul_(0.9)
        return x * self.inner.second + x * self.table["again"]


class Keeps(nn.Module):
    """Keeps what it computed, which is each replica's own."""

    def __init__(self, width: int, detached: bool) -> None:
        super().__init__()
        self.inner = filled(nn.Linear(width, width))
        self.detached = detached
        self.kept_output = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        self.kept_output = out.detach() if self.detached else out
        return out


class Held(nn.Module):
    """Holds its layer's parameters in a further way, and uses them so."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.inner = filled(nn.Linear(width, width))
        self.held: Any
        if kind == "dict":
            self.held = {"p": self.inner.weight}
        elif kind == "list":
            self.held = [self.inner.weight]
        elif kind == "tuple":
            self.held = (0, (self.inner.weight,))
        elif kind == "bound method":
            self.held = self.inner.forward
        elif kind == "partial":
            self.held = partial(nn.functional.linear, weight=self.inner.weight)
        elif kind == "list of modules":
            self.held = [self.inner]
        elif kind == "dict of modules":
            self.held = {"m": self.inner}
        elif kind == "parent in a list":
            self.inner.parents = [self]
        elif kind == "own method":
            self.held = self._product
        elif kind == "object":
            self.held = Point(self.inner.weight)  # type: ignore[arg-type]

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind, held = self.kind, self.held if self.kind != "parent in a list" else None
        if kind == "dict":
            return self.inner(x) + x @ held["p"]
        if kind == "list":
            return self.inner(x) + x @ held[0]
        if kind == "tuple":
            return self.inner(x) + x @ held[1][0]
        if kind == "object":
            return self.inner(x) + x @ held.scale
        if kind in ("bound method", "partial", "own method"):
            return self.inner(x) + held(x)
        if kind == "list of modules":
            return self.inner(x) + held[0](x)
        if kind == "dict of modules":
            return self.inner(x) + held["m"](x)
        return self.inner(x) + self.inner.parents[0]._product(x)


HELD = [
    "dict",
    "list",
    "tuple",
    "bound method",
    "partial",
    "list of modules",
    "dict of modules",
    "parent in a list",
]
HELD += ["own method", "object"]


class Lists(nn.Module):
    """torch's own containers of parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(width), torch.full((width,), 0.5)])
        self.shifts = nn.ParameterDict(
            {"a": torch.zeros(width), "b": torch.ones(width)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x * self.scales[0] * (1 + self.scales[1])
            + self.shifts["a"]
            + self.shifts["b"]
        )


class Scalar(nn.Module):
    """A parameter without dimensions, and one that is nobody's default."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.8))
        self.shift = nn.Parameter(torch.zeros(1, width))
        self.unused = nn.Parameter(torch.ones(2))
        self.register_parameter("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


class Recurrent(nn.Module):
    """A recurrent layer: parameters that it also has flat."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.inner = filled(
            {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind](
                width, width, batch_first=True
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.stack([x, x * 0.5], 1))[0][:, -1]


class Attention(nn.Module):
    """Attention of a row over two versions of itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = filled(nn.MultiheadAttention(width, 1, batch_first=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.stack([x, x * 0.5], 1)
        return self.inner(both, both, both)[0][:, 0]


class Embedded(nn.Module):
    """Adds an embedding of a row's sign."""

    def __init__(self, width: int, sparse: bool) -> None:
        super().__init__()
        self.inner = filled(nn.Embedding(3, width, sparse=sparse))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner((x[:, 0] > 0).long())


class Convolved(nn.Module):
    """A convolution along the columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = filled(nn.Conv1d(1, 1, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.unsqueeze(1)).squeeze(1)


class Wrapped(nn.Module):
    """A layer, called in another way."""

    def __init__(self, inner: nn.Module, way: str) -> None:
        super().__init__()
        self.inner, self.way = inner, way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "residual":
            return x + self.inner(x)
        if self.way == "checkpoint":
            return checkpoint(self.inner, x, use_reentrant=False)
        if self.way == "reentrant checkpoint":
            return (
                checkpoint(self.inner, x, use_reentrant=True)
                if x.requires_grad
                else self.inner(x)
            )
        if self.way == "functional call":
            return torch.func.functional_call(
                self.inner, dict(self.inner.named_parameters()), (x,)
            )
        if self.way == "saved tensors hooks":
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: t * 2, lambda t: t / 2
            ):
                return self.inner(x)
        if self.way == "by parts":
            return torch.cat([self.inner(part) for part in x.split(2)])
        assert self.way == "vmap"
        return torch.func.vmap(self.inner)(x)


WAYS_OF_CALLING = [
    "residual",
    "checkpoint",
    "reentrant checkpoint",
    "functional call",
    "saved tensors hooks",
]
WAYS_OF_CALLING += ["by parts", "vmap"]


class InContainer(nn.Module):
    """Layers that it calls one after the other, from a container.

    It is one of torch's or one of its own.
    """

    def __init__(self, kind: str, inside: list[nn.Module]) -> None:
        super().__init__()
        self.kind = kind
        if kind == "dict":
            self.inside: Any = nn.ModuleDict(
                {f"layer{i}": module for i, module in enumerate(inside)}
            )
        else:
            self.inside = nn.ModuleList(inside)
        if kind == "list and names":
            self.first, self.last = inside[0], inside[-1]
            self.order = {"again": inside}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = {
            "dict": lambda: self.inside.values(),
            "list": lambda: self.inside,
        }.get(self.kind, lambda: self.order["again"])
        for module in inside():
            x = module(x)
        return x


class OfSomeRows(nn.Module):
    """A head that only some rows use, as of an expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = filled(nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, 0].detach() > 0
        if not chosen.any():
            return x
        return torch.where(chosen.unsqueeze(1), self.head(x), x)


class Evaluating(nn.BatchNorm1d):
    """Batch normalisation that is frozen, as in detection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.train()

    def train(self, mode: bool = True) -> Evaluating:
        return super().train(False)

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        self.running_mean.fill_(0.1)


class Doubled(torch.autograd.Function):
    """x * 2, as a function of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class WithFunction(nn.Module):
    """Calls an autograd function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x) * 0.5


class _Abstract(abc.ABC):
    @abc.abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class OfAbstract(_Abstract, nn.Module):
    """Its first base is an abstract class."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = filled(nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class OfGeneric(Generic[T], nn.Module):
    """Its first base is generic."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = filled(nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class WithProperty(nn.Module):
    """Has a property that writes, names that it hands on, and a forward by keyword."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = filled(nn.Linear(width, width))
        self._rate = 1.0

    @property
    def rate(self) -> float:
        return self._rate

    @rate.setter
    def rate(self, value: float) -> None:
        self._rate = value

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.rate = min(self.rate + 1.0, 3.0) if self.training else self.rate
        return nn.functional.linear(x, self.weight, self.bias) * scale


ODD = {"abstract": OfAbstract, "generic": OfGeneric, "property": WithProperty}


class Half(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.tanh() * 0.5

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight * 2).clamp(-0.9, 0.9).atanh()
