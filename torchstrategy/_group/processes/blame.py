"""Which worker is lost, and why.

See Note [Exchanges between workers] in `process_group`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchstrategy._base.errors import described
from torchstrategy._group.processes.comparisons import is_outside_of_step
from torchstrategy._group.processes.lifelines import Lifelines


def told_of_lost(lines: Lifelines, names: Sequence[str], index: int) -> str | None:
    """What is known of the worker that is lost; None if nobody has said anything yet.

    Args:
        lines: The connections to the other workers.
        names: What to call each worker.
        index: Which of them this is.
    """
    lines.listen()
    said = lines.first("failed")
    if said is not None:
        return str(said[1]["text"])
    if lines.dead:
        dead = [names[w] for w in lines.dead]
        return (
            f"{' and '.join(dead)} {'is' if len(dead) == 1 else 'are'} gone: the "
            "process has ended"
        )
    said = lines.first("verdict")
    if said is None:
        return None
    finder, word = said
    if index in word["blamed"]:
        return (
            f"The others have given up waiting for this worker: {names[finder]} says "
            f"that {word['text']}"
        )
    return str(word["text"])


def guess_lost(
    lines: Lifelines,
    names: Sequence[str],
    where: str,
    seconds: float,
    error: BaseException,
) -> tuple[str, list[int]]:
    """What is most likely if nobody has said why, and which workers it blames.

    Args:
        lines: The connections to the other workers.
        names: What to call each worker.
        where: Where this worker waits.
        seconds: How long this worker has waited.
        error: What torch has raised.
    """
    left = lines.first("left")
    if left is not None:
        worker = left[0]
        why = (
            "its program has ended, has raised an exception outside of strategy.run, "
            "or has dropped the strategy"
        )
        # The others may have ended rightly, while one of them validates after the
        # training.
        hint = _IF_ENDED_RIGHTLY if is_outside_of_step(where) else ""
        return f"{names[worker]} has left: {why}{hint}", [worker]
    silent = lines.silent
    if not silent:
        return f"A connection between workers is broken: {described(error)}", []
    listed = " and ".join(names[w] for w in silent)
    has = "has" if len(silent) == 1 else "have"
    return (
        (
            f"{listed} {has} not answered for {seconds:.0f} s: stopped, hanging or "
            "still at work"
        ),
        silent,
    )


_IF_ENDED_RIGHTLY = (
    ". If one worker alone validates or logs when the others have ended, let all "
    "workers do so, and let one of them print the result"
)
