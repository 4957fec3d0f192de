"""Which rows ranks train on, and with which random numbers.

It answers: does each row of the data count once, and do ranks draw the same numbers
where they should, and others where they should?

    orders             orders of rows, one for all ranks or another one on each
    rows               rows that several ranks get, or none
    fed_rows           rows of a program's own batches that ranks share
    streams            `IterableDataset`s that give all ranks the same rows
    padding            rows of an evaluation that count twice
    generators         random numbers that are alike on ranks
    noise              random numbers that all ranks put together with rows that differ
    worker_generators  a data set's generators, copied to each loader worker
    divided_rows       rows that differ between ranks which divide a model
"""

from torchstrategy.testing._lints.lint import Lint
from torchstrategy.testing._lints.rows.divided_rows import DividedRows
from torchstrategy.testing._lints.rows.fed_rows import FedRows
from torchstrategy.testing._lints.rows.generators import Generators
from torchstrategy.testing._lints.rows.noise import Noise
from torchstrategy.testing._lints.rows.padding import Padding
from torchstrategy.testing._lints.rows.rows import Rows
from torchstrategy.testing._lints.rows.streams import Streams
from torchstrategy.testing._lints.rows.worker_generators import WorkerGenerators


def make_lints() -> list[Lint]:
    """One of each lint of this room."""
    return [
        Rows(),
        FedRows(),
        Streams(),
        Padding(),
        Generators(),
        Noise(),
        WorkerGenerators(),
        DividedRows(),
    ]
