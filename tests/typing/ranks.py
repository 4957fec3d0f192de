"""`torchstrategy.testing` is there, with its types, in every program.

The program imports only `torchstrategy`.
"""

from typing_extensions import reveal_type

import torchstrategy


def main(rank: int) -> int:
    return 2 * rank


results, record = torchstrategy.testing.run_ranks(main, 2)
reveal_type(results)  # list[int]
reveal_type(record)  # RankRecord
