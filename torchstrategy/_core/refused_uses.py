"""What a per-replica value says if a program uses it as the tensor or number that one device would have there.

Every such use ends in one message, which says what the value is and what to write. `==` and `hash` stay those of an
object, since dicts, sets and `in` need them, and so does `print`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchstrategy._core.errors import plural
from torchstrategy._core.tree import tree_leaves


def misused(value: Any, use: str) -> str:
    """The message for a program that wrote `use` of a per-replica value."""
    rows = "" if value.rows is None else f" (rows of the batch: {', '.join(map(str, value.rows))})"
    return (
        f"{use} does not work: this value is a PerReplica, with a component for each of "
        f"{plural(len(value._components), 'replica')}{rows}, and not one tensor or number. Outside of the step, write\n"
        '  strategy.reduce("mean", value, axis=None)      for the mean over replicas; over rows: weights=batch\n'
        "  strategy.gather(value, axis=0)                 for the rows of all replicas in one tensor\n"
        "  strategy.experimental_local_results(value)     for the component of each replica: the tuple value.values\n"
        "  sum(map(len, value.values))                    for the number of rows of all replicas\n"
        "In the step, pass it on: strategy.run(step, args=(value,)) gives each replica its own component."
    )


def refuse_uses(cls: type) -> None:
    """Makes a class of per-replica values refuse every use as a tensor or number."""
    # They are set here and not written in the class: a type checker shall not take every name for an attribute.
    methods: dict[str, Any] = {name: _refusal(use) for name, use in _USES.items()}
    methods |= {"__getattr__": _no_attribute, "__format__": _formatted, "__torch_function__": classmethod(_no_function)}
    for name, method in methods.items():
        setattr(cls, name, method)


def _refusal(use: str) -> Callable[..., Any]:
    def refuse(self: Any, *others: Any, **options: Any) -> Any:
        raise TypeError(misused(self, use))

    return refuse


def _no_attribute(self: Any, name: str) -> Any:
    # Python, torch and numpy ask every object for some names with underscores, and expect a short answer.
    raise AttributeError(name if name.startswith("_") else misused(self, f"value.{name}"))


def _formatted(self: Any, spec: str) -> str:
    if spec:
        raise TypeError(misused(self, f'f"{{value:{spec}}}"'))
    return str(self)


def _no_function(cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    value = next(found for found in tree_leaves((args, kwargs)) if isinstance(found, cls))
    raise TypeError(misused(value, f"torch.{getattr(func, '__name__', func)}(value)"))


_CALLS = ("float", "int", "bool", "complex", "len", "iter", "abs", "round", "divmod")
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_SIGNS |= {"matmul": "@", "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>"}
_USES = {f"__{name}__": f"{name}(value)" for name in _CALLS}
_USES |= {f"__{name}__": f"math.{name}(value)" for name in ("floor", "ceil", "trunc")}
_USES |= {f"__{name}__": f"value {sign} ..." for name, sign in (_SIGNS | _COMPARISONS).items()}
_USES |= {f"__r{name}__": f"... {sign} value" for name, sign in _SIGNS.items()}
_USES |= {"__neg__": "-value", "__pos__": "+value", "__invert__": "~value", "__getitem__": "value[...]"}
_USES |= {"__setitem__": "value[...] = ...", "__index__": "value as an index", "__array__": "value as a numpy array"}
