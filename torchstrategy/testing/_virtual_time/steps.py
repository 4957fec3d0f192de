"""Steps of a program: each ends with `optimizer.step()`, or with the call `step()`.

The program may call `torchstrategy.testing.step` itself.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from torch.optim.optimizer import register_optimizer_step_post_hook

from torchstrategy.testing._ranks.world import current_rank

# A function that gets the rank, 0 where there are no ranks, and how many steps it has
# made.
Ended = Callable[[int, int], None]

_SAID = 0  # stands for the program among the ids of its optimizers


@final
class _Steps:
    """Counts the steps of a program, or of each of its ranks.

    If there are several optimizers, it counts the one that makes most steps.

    A program with two optimizers, such as a GAN, makes one step when the first of them
    has made one.
    """

    def __init__(self, ended: Ended, of_each_thread: bool) -> None:
        self._ended, self._of_each_thread = ended, of_each_thread
        # How many steps were made, by rank or thread, and optimizer.
        self._counts: Counter[tuple[int, int]] = Counter()
        self._most: Counter[int] = Counter()  # by rank or thread

    def end(self, who: int) -> None:
        rank = max(current_rank(), 0)
        place = threading.get_ident() if self._of_each_thread else rank
        self._counts[place, who] += 1
        if self._counts[place, who] > self._most[place]:
            self._most[place] = self._counts[place, who]
            self._ended(rank, self._most[place])


_following: list[_Steps] = []


@contextmanager
def following_steps(ended: Ended, of_each_thread: bool = False) -> Iterator[None]:
    """A block in which somebody is told of each step that ends.

    Those who came first are told first.

    Args:
        ended: Called when a step has ended.
        of_each_thread: Whether each thread makes steps of its own, as ranks do in any
            case.
    """
    steps = _Steps(ended, of_each_thread)
    hook = register_optimizer_step_post_hook(
        lambda optimizer, *_: steps.end(id(optimizer))
    )
    _following.append(steps)
    try:
        yield
    finally:
        _following.remove(steps)
        hook.remove()


def step() -> None:
    """Says that a step ends here, in a program without an optimizer of torch.

    Where an optimizer makes a step, `virtual_time` and `python -m
    torchstrategy.testing.run` see this without help, and a call of this function
    changes nothing. Elsewhere, as in a program that only computes, they tell one step
    from the next by it. Outside of both, it does nothing.

    Example:
        >>> for batch in range(3):
        ...     pass  # compute
        ...     torchstrategy.testing.step()
    """
    for steps in tuple(_following):
        steps.end(_SAID)
