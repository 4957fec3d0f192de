"""The strategy that holds where no other does."""

from __future__ import annotations

from typing import final

from torchstrategy._strategy.single import SingleExtended
from torchstrategy._strategy.strategy import Strategy


@final
class DefaultStrategy(Strategy):
    """Plain PyTorch: one replica, wherever the caller is. There is one; `torchstrategy.get_strategy()` returns it.

    Raises:
        RuntimeError: When another one is made.
    """

    _made = False

    def __init__(self) -> None:
        if DefaultStrategy._made:
            raise RuntimeError(
                "There is one default strategy; torchstrategy.get_strategy() returns it outside any scope."
            )
        DefaultStrategy._made = True
        super().__init__(SingleExtended(None, None))
