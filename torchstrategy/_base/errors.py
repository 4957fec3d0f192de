"""Words for messages, for the warnings of a run, and for notes on exceptions.

A note says in which replica an exception was raised.

The library raises Python's own kinds of exceptions, so `except ValueError` works
without importing the library:

    RuntimeError           a call inside instead of outside of `Strategy.run`, or the
                           reverse; a call in another strategy's scope; replicas that
                           disagree
    ValueError             something that the caller can change: a size, a device, an
                           option
    TypeError              an object of the wrong type
    NotImplementedError    something that a kind of strategy, or a class of the user's,
                           does not have

One exception has a class of its own, as in TensorFlow: `OutOfRangeError`, an
`EOFError`, says that a dataset has no more batches.

An exception that the user's code raises in a replica comes out of `Strategy.run` as the
same object; `add_note` adds to this object in which replica it was raised.

The warnings are about numbers that one device would not have. Only the user can tell
whether such a difference matters. A run warns once of each cause, at the user's line
that called `run`. Each kind of warning has a class, so that a user can silence it, or
make it an error, without the others.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import operator
import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any, final

from torch import nn


@final
class SharedWriteWarning(UserWarning):
    """Several replicas wrote in place, in one run, on one tensor that they share.

    All replicas share a tensor that is neither in a module of the strategy nor in a
    `Variable`, and that the step reaches by a name, an attribute or a container.
    `total.add_(loss)` adds one loss in plain PyTorch, and n losses in n replicas.
    `hits.add_(hits_in_these_rows)` and `bank[indices] = outputs` are right: silence the
    warning for those.

    Example:
        >>> import warnings
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> hits = torch.zeros(())
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", torchstrategy.SharedWriteWarning)
        ...     _ = strategy.run(lambda: hits.add_(1))
        >>> hits
        tensor(2.)

    Source: https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-operations-with-autograd
    """


@final
class ReplicaBufferWarning(UserWarning):
    """Replicas wrote different numbers on a buffer or plain attribute of a module.

    The strategy keeps the numbers of the first replica.

    The running statistics of normalisation layers are averaged instead. A queue, a
    codebook or a count of rows, which `forward` computes from the rows that it sees,
    needs the rows of all replicas: see "Other buffers" in docs/features.md.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", torchstrategy.ReplicaBufferWarning)

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_buffer
    """


@final
class LossWeightWarning(UserWarning):
    """Gradients were weighted by rows, but a loss was divided by something else.

    For example, the loss was divided by the number of tokens.

    The mean over the tokens of a batch is not the mean of the replicas' means, unless
    each has as many tokens. A run warns once for each step, if the gradient is another
    one than that of the whole batch. A strategy with `gradient_reduction="loss"` weighs
    by what the loss was divided by. One with `gradient_reduction="mean"` does not look.

    Example:
        >>> import warnings
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> model = strategy.distribute_module(torch.nn.Linear(1, 2))
        >>> def step(inputs, targets):
        ...     torch.nn.functional.cross_entropy(
        ...         model(inputs), targets, ignore_index=-100
        ...     ).backward()
        >>> batch = torch.ones(4, 1), torch.tensor([0, 1, -100, 1])
        >>> (batch,) = strategy.experimental_distribute_dataset([batch])
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", torchstrategy.LossWeightWarning)
        ...     strategy.run(step, args=batch)
        >>> str(caught[0].message)[:74]
        'The loss of `step` was divided by 2 in replica 0 and by 1 in replica 1 (it'

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
    """


@final
class UndistributedBatchWarning(UserWarning):
    """A step was trained on tensors that were not split among the replicas.

    So each replica computed with all rows. Pass batches of
    `experimental_distribute_dataset`.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", torchstrategy.UndistributedBatchWarning)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/Strategy#experimental_distribute_dataset
    """


def warn(message: str, kind: type[Warning]) -> None:
    """Gives a warning for the line where the user's code called into this package."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, kind, stacklevel=level)


# torch's `Module.__call__` calls a DataParallel, and `contextlib` calls some functions
# of this package; so frames of these files are not the user's, either.
_NOT_THE_USERS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    contextlib.__file__,
    inspect.getfile(nn.Module),
)


def hide_frames(error: BaseException) -> None:
    """Takes this package's frames after the user's last one out of a traceback.

    A bare `raise` follows. In Python 3.10 it goes on with the traceback that the error
    had when it was caught, so the first frame stays: that of the function which caught
    it.
    """
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    of_users = [
        not frame.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS[0])
        for frame in frames
    ]
    said = os.environ.get("TORCHSTRATEGY_FULL_TRACEBACK", "0")
    if not any(of_users) or said not in ("", "0"):
        return  # an error of this package is told with all its frames
    # Those below the user's last frame stay: they say what became of the user's call.
    kept = [
        frame for i, frame in enumerate(frames) if of_users[i] or not any(of_users[i:])
    ]
    for above, below in pairwise(kept):
        above.tb_next = below
    if frames[0] is not kept[0]:
        frames[0].tb_next = kept[0]
    error.__traceback__ = kept[0]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'reduce'?`, if a public name is like the name; else nothing."""
    public = {one.lower(): one for one in known if not one.startswith("_")}
    # What a name is called that has no other ending.
    if f"experimental_{name}" in public:
        return f" Did you mean 'experimental_{name}'?"
    like = difflib.get_close_matches(name.lower(), public, n=1, cutoff=0.7)
    return (
        f" Did you mean {public[like[0]]!r}?"
        if like and not name.startswith("_")
        else ""
    )


def explain_keywords(
    names: dict[str, Any], public: Iterable[str], methods_of: tuple[type, ...] = ()
) -> None:
    """Lets public callables say which keyword argument you meant, if one is misspelt.

    The callables are functions, constructors and methods.

    Args:
        names: The namespace that has them. Functions are replaced there.
        public: Their names. Classes that the package makes for users, often, are left
            out.
        methods_of: Classes whose public methods say so, too.
    """
    for name in public:
        thing = names[name]
        if isinstance(thing, FunctionType):
            names[name] = _with_explained_keywords(thing, name)
        elif isinstance(thing, type):
            for base in thing.__mro__:
                _explain_methods(
                    base,
                    [one for one in vars(base) if one in ("__init__", "__new__")],
                    "",
                )
    for cls in methods_of:
        for base in cls.__mro__:
            _explain_methods(
                base, [one for one in vars(base) if not one.startswith("_")], None
            )


def _explain_methods(cls: type, names: Iterable[str], shown: str | None) -> None:
    if not cls.__module__.startswith(__name__.partition(".")[0]):
        return  # a class of torch, or of Python
    for name in list(names):
        method = vars(cls)[name]
        is_static = (
            name == "__new__"
            and isinstance(method, staticmethod)
            and not issubclass(cls, tuple)
        )
        function = method.__func__ if is_static else method
        if isinstance(function, FunctionType) and not hasattr(function, _EXPLAINED):
            explained = _with_explained_keywords(
                function, name if shown is None else shown
            )
            setattr(cls, name, staticmethod(explained) if is_static else explained)


_EXPLAINED = "_has_explained_keywords"


def _with_explained_keywords(function: FunctionType, shown: str) -> Callable[..., Any]:
    """The function, with a hint in the error for an unknown keyword argument.

    `shown` is the function's name for the hint, or empty.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [
        one.name
        for one in parameters
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    if any(one.kind is one.VAR_KEYWORD for one in parameters) or not known:
        return function
    taken = frozenset(known)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs and not taken.issuperset(kwargs):
            wrong = next(name for name in kwargs if name not in taken)
            made = args[0] if shown == "" else None  # the object, or its class
            called = shown or (made if isinstance(made, type) else type(made)).__name__
            usable = [name for name in known if name not in ("self", "cls")]
            raise TypeError(
                f"{called}() got an unexpected keyword argument "
                f"{wrong!r}.{did_you_mean(wrong, usable)} It takes {', '.join(usable)}."
            )
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            # Its traceback is as without this function, where Python is 3.11 or newer:
            # see `hide_frames`.
            if error.__traceback__ is not None:
                error.__traceback__ = error.__traceback__.tb_next
            raise

    setattr(checked, _EXPLAINED, True)
    return checked


def plural(count: int, noun: str) -> str:
    """`1 replica`, `3 replicas`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def an(noun: str) -> str:
    """`a list`, `an int`."""
    return f"an {noun}" if noun[0] in "aeiouAEIOU" else f"a {noun}"


def require_type(value: object, kind: Any, what: str) -> None:
    """Raises a TypeError for a value of another type.

    `what` says in the user's words what is wanted.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{what}; got {value!r:.200}, {an(type(value).__name__)}.")


def as_int(value: object, otherwise: str) -> int:
    """An integer, or what Python takes for one.

    For anything else, it raises a TypeError that says `otherwise`.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(otherwise) from None


def unpicklable(thing: object, why: str) -> TypeError:
    """The error for saving an object that is of use in this process only.

    The user saves the object, or sends it to another process.
    """
    return TypeError(f"This {type(thing).__name__} cannot be pickled: {why}")


def described(error: BaseException) -> str:
    """The type and text of an error.

    If the `__str__` of the error raises, the text says so.

    What cannot be printed or sent, as half of a surrogate pair, becomes an escape.
    """
    text = "its text cannot be had"
    with suppress(Exception):
        text = str(error).encode(errors="backslashreplace").decode()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def add_note(error: BaseException, note: str) -> None:
    """Adds `note` to what a traceback prints below `error`.

    It adds the note once, even if the same object is raised several times.
    """
    notes = getattr(error, "__notes__", [])
    if note in notes:
        # A module that raises one prepared exception object would collect a note at
        # every step.
        return
    # An exception whose class refuses attributes gets no note.
    with suppress(AttributeError, TypeError):
        # On Python 3.10 tracebacks do not print notes, but debuggers and loggers can
        # read them.
        error.__notes__ = [*notes, note]
