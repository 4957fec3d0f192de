"""A failure that a test plans: who fails, where, with what, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import final

from torchstrategy._base.errors import plural

Error = BaseException | type[BaseException] | None


@final
class Injection:
    """A planned failure, and how often it still has to happen.

    Used on the thread of the one who fails.

    Args:
        tool: The public function that plans it, for messages.
        who: What fails, for messages: `replica`.
        index: Which of them fails.
        at: Where it fails.
        error: What it raises; None: a `RuntimeError` that says where it comes from.
        times: How often it fails.
        skip: How often it first gets away.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a number is too low.
    """

    def __init__(
        self,
        tool: str,
        who: str,
        index: int,
        at: str,
        error: Error,
        times: int,
        skip: int,
    ) -> None:
        self._tool, self._who = tool, who
        self.index, self.at = index, at
        self._times, self._skip = times, skip
        if not isinstance(at, str) or not at:
            raise TypeError(
                f"{self!r}: `at` is the name of where the {who} fails; got {at!r}."
            )
        for name, count, least in (("times", times, 1), ("skip", skip, 0)):
            if not isinstance(count, int) or isinstance(count, bool):
                raise TypeError(f"{self!r}: `{name}` is an int; got {count!r}.")
            if count < least:
                raise ValueError(f"{self!r}: `{name}` is {least} or more; got {count}.")
        self._make_error = self._maker_of(error)
        self._passed: Counter[str] = Counter()
        self._arrivals = 0
        self._failures = 0

    def check_happened(self) -> None:
        """Refuses that a test passes whose failure did not happen.

        Raises:
            AssertionError: If it has not happened as often as it should.
        """
        if self._failures < self._times:
            came_to = ", ".join(
                f"{where} ({n} times)" if n > 1 else where
                for where, n in self._passed.items()
            )
            raise AssertionError(
                f"The block of {self!r} has ended, and the {self._who} has failed "
                f"{plural(self._failures, 'time')} instead of {self._times}. "
                f"{self._who.capitalize()} {self.index} came to: "
                f"{came_to or 'nothing: it was in no run'}."
            )

    def came_to(self, index: int, where: str, matches: bool) -> None:
        """Somebody has come to somewhere, and fails if this is who and where."""
        if index != self.index:
            return
        self._passed[where] += 1
        self._arrivals += matches
        if matches and self._arrivals > self._skip and self._failures < self._times:
            self._failures += 1
            raise self._make_error()

    def __repr__(self) -> str:
        return (
            f"{self._tool}({self.index!r}, at={self.at!r}, times={self._times!r}, "
            f"skip={self._skip!r})"
        )

    def _maker_of(self, error: Error) -> Callable[[], BaseException]:
        if error is None:
            return lambda: RuntimeError(
                f"This failure was injected: {self!r}, and {self._who} {self.index} "
                f"has come to {self.at!r}."
            )
        if isinstance(error, BaseException):
            return lambda: error
        if isinstance(error, type) and issubclass(error, BaseException):
            # An error class that needs arguments is refused here, and not where it is
            # raised.
            error()
            return error
        raise TypeError(
            f"{self!r}: `error` is an exception or a class of exceptions; got "
            f"{error!r}."
        )
