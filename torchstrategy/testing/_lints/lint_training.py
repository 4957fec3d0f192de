"""Lints for tests: a block that watches a training, and fails if it sees mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from typing_extensions import override

from torchstrategy._base.torch_internals import TorchDispatchMode
from torchstrategy.testing._lints.findings import Finding
from torchstrategy.testing._lints.watching import Watch
from torchstrategy.testing._ranks.witnesses import witnesses
from torchstrategy.testing._simulation.replacing import replacing
from torchstrategy.testing._simulation.thread_modes import starting_in


@final
@dataclass
class TrainingRecord:
    """What `lint_training` has found.

    Example:
        >>> with torchstrategy.testing.lint_training() as record:
        ...     pass  # train
        >>> record.findings
        []
    """

    findings: list[Finding] = field(default_factory=list)
    """What was found. It is empty until the block ends."""


@contextmanager
def lint_training(check: bool = True) -> Iterator[TrainingRecord]:
    """Watches a training for mistakes that raise no error and give wrong numbers.

    It watches the thread of the block, and the ranks of each `run_ranks` in it: weights
    that differ between ranks, gradients that were not reduced, rows that several ranks
    get, losses that are divided twice or not at all, and others. `docs/testing.md` has
    the table of names. A comment on a line that a finding names silences it there:
    `# torchstrategy: ignore[same-order]`.

    Args:
        check: Whether findings are an error when the block ends; if not, they are only
            in the record.

    Yields:
        A record, whose `findings` are there after the block.

    Raises:
        AssertionError: At the end of the block, with all findings.
        RuntimeError: If such a block is open already.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with torchstrategy.testing.lint_training(check=False) as record:
        ...     for _ in range(4):
        ...         model(torch.randn(2, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> [finding.name for finding in record.findings]
        ['loss-not-divided']
    """
    if witnesses:
        raise RuntimeError(
            "lint_training() is at work already, and watches all ranks: leave that "
            "block first."
        )
    watch, record = Watch(), TrainingRecord()
    mode = _Operators(watch)
    with (
        watch.watching(),
        replacing([starting_in(mode)]),
        mode,
    ):
        yield record
    record.findings = watch.findings()
    if check and record.findings:
        raise AssertionError(
            "\n- ".join(
                ["This training seems to be wrong:", *map(str, record.findings)]
            )
        )


@final
class _Operators(TorchDispatchMode):
    """Sees the operators of a thread that is in it."""

    supports_higher_order_operators = True  # such as `torch.cond`

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch wraps the method below, which costs each operator two microseconds.
        return False

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling():  # the compiler reads this method
            return func(*args, **(kwargs or {}))
        self._watch.writes(func, args)
        result = func(*args, **(kwargs or {}))
        self._watch.operator(func, args, kwargs or {}, result)
        return result
