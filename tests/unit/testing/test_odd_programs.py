"""Programs that are right, with objects that answer no question of a lint.

Or with tensors that nobody can read.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
)

import linted
from conditions import for_changes, for_releases
from torchstrategy.testing import run_ranks

RANKS, ROWS = 2, 32
Program = Callable[[], object]
Make = Callable[[int], Any]


def says_nothing(program: Program) -> bool:
    return linted.names_of(program) == []


def in_ranks(main: Callable[[int], object], ranks: int = RANKS) -> Program:
    return lambda: run_ranks(main, ranks)


def wrapped(*layers: nn.Module) -> DistributedDataParallel:
    """A model that all ranks begin alike, and then draw rows of their own for."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(layers or (nn.Linear(4, 1),))))
    torch.manual_seed(dist.get_rank() + 1)
    return model


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = 4
) -> None:
    optimizer = optimizer or torch.optim.SGD(nn.Module.parameters(model), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).mean().backward()
        optimizer.step()


# Modules


class WithoutInit(nn.Module):
    """A loss whose `__init__` does not call torch's, as `__call__` does not need it."""

    def __init__(self) -> None:
        self.factor = 2

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value.mean() * self.factor


class Grouped(nn.Module):
    """A module whose `parameters` takes an argument and gives an optimizer groups."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))

    def forward(self, rows: torch.Tensor) -> Any:
        return self.layers(rows)

    def parameters(self, rate: float) -> Any:  # type: ignore[override]
        return [{"params": self.layers.parameters(), "lr": rate}]


class Unhashable(nn.Module):
    """A module with an `==`, and so without a hash."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)

    def forward(self, rows: torch.Tensor) -> Any:
        return self.layer(rows)


class EqualByElements(nn.Dropout):
    """A module whose `==` gives a tensor."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.layer = nn.Linear(4, 1)

    def __eq__(self, other: Any) -> Any:
        return self.layer.weight == other.layer.weight

    def __hash__(self) -> int:
        return id(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(self.layer(rows))


class Attention(nn.MultiheadAttention):
    """Attention whose rate of dropout is a layer."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.dropout = nn.Dropout(0.1)  # type: ignore[assignment]

    def forward(self, rows: torch.Tensor) -> Any:  # type: ignore[override]
        return self.out_proj(self.dropout(rows))  # type: ignore[operator]


class Recurrent(nn.LSTM):
    """The same of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.dropout = nn.Dropout(0.1)  # type: ignore[assignment]

    def forward(self, rows: torch.Tensor) -> Any:  # type: ignore[override]
        return self.dropout(rows)  # type: ignore[operator]


class Masking(nn.Dropout):
    """Dropout of the program's own, with no rate, or one for each feature."""

    def __init__(self, rate: Any) -> None:
        super().__init__()
        self.p = rate

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


def without_init() -> None:
    loss, model, unused = WithoutInit(), nn.Linear(4, 1), nn.Linear(4, 4)
    optimizer = torch.optim.Adam([*model.parameters(), *unused.parameters()], lr=0.01)
    for _ in range(6):
        optimizer.zero_grad()
        loss(model(torch.randn(8, 4))).backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def with_groups() -> None:
    model, unused = Grouped(), nn.Linear(4, 4)
    train(
        model,
        torch.optim.SGD(
            [*model.parameters(0.1), {"params": unused.parameters()}], lr=0.01
        ),
        6,
    )


def with_groups_in_ranks(rank: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Grouped()
    optimizer = torch.optim.SGD(model.parameters(0.1), lr=0.01)
    torch.manual_seed(rank + 1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).mean().backward()
        for parameter in nn.Module.parameters(model):
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS  # type: ignore[operator]
        optimizer.step()
        model.eval()
        model(torch.randn(8, 4))
        model.train()


def with_modes(make: Callable[[], nn.Module]) -> Program:
    def main() -> None:
        model = make()
        trained = [
            parameter for layer in model.children() for parameter in layer.parameters()
        ]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for _ in range(4):
            model.train()
            train(model, optimizer, 1)
            model.eval()
            with torch.no_grad():
                model(torch.randn(2, 4))

    return main


def scripted(rank: int) -> None:
    train(wrapped(torch.jit.script(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))))  # type: ignore[no-untyped-call]


MODULES: dict[str, Program] = {
    "without init": without_init,
    "groups": with_groups,
    "groups in ranks": in_ranks(with_groups_in_ranks),
    "no hash": with_modes(Unhashable),
    "== gives a tensor": with_modes(EqualByElements),
    "attention": with_modes(Attention),
    "recurrent": with_modes(lambda: nn.Sequential(Recurrent(), nn.Linear(4, 1))),
    "no rate": with_modes(lambda: nn.Sequential(Masking(None), nn.Linear(4, 1))),
    "several rates": with_modes(
        lambda: nn.Sequential(Masking(torch.full((4,), 0.1)), nn.Linear(4, 1))
    ),
    "statistics of a scripted norm": in_ranks(scripted),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("which", MODULES)
def test_modules_of_the_program(which: str) -> None:
    """Lints ask what a module has, not its methods, which programs may override."""
    assert says_nothing(MODULES[which])


# Data sets and samplers


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, **held: Any) -> None:
        self.numbers = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
        vars(self).update(held)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.numbers[int(row)]


class Refusing(Numbers):
    """A data set whose length is an error, which nobody asks for."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __len__(self) -> int:
        raise self.error


class Endless(Numbers):
    """A data set with more rows than a set of numbers can have."""

    def __len__(self) -> int:
        return 10**12


class Answering:
    """A data set with an error for each name that it does not know."""

    def __init__(self) -> None:
        self.names = {"rows": torch.ones(ROWS, 4)}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["names"][name]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.ones(4) * row


class Numbered(Numbers):
    """A data set with attributes whose names are no text."""

    def __init__(self) -> None:
        super().__init__()
        attributes: dict[Any, Any] = vars(self)
        attributes[1] = 2


class Slotted:
    """A part of a data set that has no `__dict__`, and an error in its place."""

    __slots__ = ("value",)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Unwritten(float):
    def __repr__(self) -> str:
        raise RuntimeError


class OwnSubset(Subset[torch.Tensor]):
    """A `Subset` without indices."""

    def __init__(self, dataset: Any, rank: int) -> None:
        self.dataset, self.rank = dataset, rank

    def __len__(self) -> int:
        return ROWS // RANKS

    def __getitem__(self, row: Any) -> Any:
        return self.dataset[RANKS * row + self.rank]

    def __getitems__(self, rows: Any) -> Any:
        return [self[row] for row in rows]


def part(rank: int, ranks: int = RANKS) -> list[int]:
    return list(range(rank, ROWS, ranks))


def words(rank: int) -> DataLoader[Any]:
    rows = [f"{row}" for row in part(rank)]
    return DataLoader(
        Subset({word: torch.ones(4) for word in rows}, rows), batch_size=4
    )  # type: ignore[arg-type]


def freed(rank: int) -> DataLoader[Any]:
    numbers = torch.randn(100_000)
    numbers.untyped_storage().resize_(0)
    return holding(lambda: numbers)(rank)


def of(make: Callable[[], Any], batch: int | None = 4) -> Make:
    return lambda rank: DataLoader(make(), sampler=part(rank), batch_size=batch)


def refusing(error: Exception) -> Make:
    return of(lambda: Refusing(error))


def holding(make: Callable[[], Any], name: str = "held") -> Make:
    return of(lambda: Numbers(**{name: make()}))


DATASETS: dict[str, Make] = {
    "words as indices": words,
    "no indices": lambda rank: DataLoader(OwnSubset(Numbers(), rank), batch_size=4),
    **{
        kind.__name__: refusing(kind())
        for kind in (RuntimeError, KeyError, ValueError, AttributeError)
    },
    "not implemented": refusing(NotImplementedError()),
    "many rows": of(Endless),
    "names": of(Answering, None),
    "one tensor": holding(lambda: torch.ones(ROWS), "tensors"),
    "a function of numpy": holding(lambda: np.tanh),
    "a vectorized function": holding(lambda: np.vectorize(abs)),
    "numbers as names": of(Numbered),
    "slots": holding(Slotted),
    "no text": holding(lambda: Unwritten(1)),
    "a quantized tensor": holding(
        lambda: torch.quantize_per_tensor(torch.ones(ROWS), 0.1, 0, torch.quint8)
    ),
    "a nested tensor": holding(
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    ),
    "freed memory": freed,
    "arrays of rows": lambda rank: DataLoader(
        Batched(),
        sampler=[np.arange(rank + start, start + 8, 2) for start in (0, 8, 16, 24)],
        batch_size=None,
    ),
}


class Batched(Numbers):
    def __getitem__(self, row: Any) -> torch.Tensor:
        return self.numbers[torch.as_tensor(row)]


class InOrder:
    """Gives a rank its part of the rows in order, without any setting."""

    def __init__(self, rank: int, ranks: int = RANKS) -> None:
        self.rows = part(rank, ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


class OfDistributed(InOrder, DistributedSampler[int]):
    """A `DistributedSampler` that has no setting of torch's."""


class OfRandom(InOrder, RandomSampler):
    """A `RandomSampler` that draws nothing."""


class AnyAnswer(InOrder, Sampler[int]):
    """A sampler that has an answer to each name."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 3


class NoAnswer(InOrder, Sampler[int]):
    """A sampler that has an error for each name that it does not know."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Batches:
    """A batch sampler whose size of a batch is something else than a number."""

    def __init__(self, rank: int, size: Any = None) -> None:
        self.rows, self.batch_size, self.drop_last = part(rank), size, False

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.rows[at : at + 4] for at in range(0, len(self.rows), 4))


def mocked(rank: int) -> DataLoader[Any]:
    batches = MagicMock()
    batches.__iter__.side_effect = lambda: iter(Batches(rank))
    batches.__len__.return_value = 4
    return DataLoader(Numbers(), batch_sampler=batches)


def sampled(kind: Any) -> Make:
    return lambda rank: DataLoader(Numbers(), sampler=kind(rank), batch_size=4)


def batched(size: Any) -> Make:
    return lambda rank: DataLoader(Numbers(), batch_sampler=Batches(rank, size))  # type: ignore[arg-type]


def with_shuffles(rank: int) -> DataLoader[Any]:
    sampler: Any = InOrder(rank)
    sampler.shuffle = np.ones(2)
    return DataLoader(Numbers(), sampler=sampler, batch_size=4)


SAMPLERS: dict[str, Make] = {
    "distributed": sampled(OfDistributed),
    "random": sampled(OfRandom),
    "any answer": sampled(AnyAnswer),
    "no answer": sampled(NoAnswer),
    "a mock": mocked,
    "sizes of batches": batched([4, 4]),
    "a tensor of sizes": batched(torch.tensor([4, 4])),
    "several shuffles": with_shuffles,
}
LOADERS = DATASETS | SAMPLERS


@pytest.mark.filterwarnings("ignore")  # of prototypes
@pytest.mark.parametrize("which", LOADERS)
def test_data_sets_and_samplers_of_the_program(which: str) -> None:
    """One that refuses to be asked is left alone.

    Rows in order are not shuffled, whatever a sampler says.
    """

    def main(rank: int) -> None:
        model = wrapped()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = LOADERS[which](rank)
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                model(batch.view(-1, 4)).mean().backward()
                optimizer.step()
        with torch.no_grad():
            found = torch.cat([model(batch.view(-1, 4)) for batch in loader])
        dist.all_gather([torch.empty_like(found) for _ in range(RANKS)], found)

    assert says_nothing(in_ranks(main))


def test_a_sampler_without_settings_in_more_ranks() -> None:
    """In more than two ranks, one more lint asks a `DistributedSampler`."""

    def main(rank: int) -> None:
        model = wrapped()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in DataLoader(
            Numbers(), sampler=OfDistributed(rank, 4), batch_size=4
        ):
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()

    assert says_nothing(in_ranks(main, 4))


@for_changes
def test_a_subset_may_grow() -> None:
    """A program appends the rows of the next epoch to the indices of its subset."""

    def main(rank: int) -> None:
        model, rows = wrapped(), list(range(rank, 8, RANKS))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(Subset(Numbers(), rows), batch_size=2, shuffle=True)
        for epoch in range(3):
            rows += range(8 + rank + 8 * epoch, 16 + 8 * epoch, RANKS)
            for batch in loader:
                optimizer.zero_grad()
                model(batch).mean().backward()
                optimizer.step()

    assert says_nothing(in_ranks(main))


class OfTheSystem(Numbers):
    """It draws from the generator of the system, which has no state and no copies."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.SystemRandom()

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.numbers[row] * self.generator.random()


def test_generators_without_a_state() -> None:
    """Each worker draws other numbers from the generator of the system."""
    assert says_nothing(
        lambda: list(
            DataLoader(OfTheSystem(), batch_size=4, shuffle=True, num_workers=2)
        )
    )


class Circles(IterableDataset[Any]):
    """Its batches have themselves."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            batch: list[Any] = []
            batch.append(batch)
            yield batch


def test_what_has_itself() -> None:
    """A list in a batch or in a state may have itself."""

    def main(rank: int) -> None:
        model = wrapped()
        for _ in DataLoader(Circles(), batch_size=None, collate_fn=lambda one: one):
            train(model, steps=1)
        circle: list[Any] = []
        circle.append(circle)
        model.load_state_dict({**model.state_dict(), "more": circle}, strict=False)

    assert says_nothing(in_ranks(main))


# Tensors


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)


class Keeping(torch.optim.SGD):
    """An optimizer that keeps something of each parameter."""

    def __init__(self, parameters: Any, make: Callable[[], Any]) -> None:
        super().__init__(parameters, lr=0.01)
        self.make = make

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = self.make()


def empty(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(4, dtype=torch.uint8).view(dtype)


STATES: dict[str, Callable[[], Any]] = {
    "quantized": quantized,
    "four bits": empty(torch.uint4),
    "pairs of floats": empty(torch.float4_e2m1fn_x2),
    "bits": empty(torch.bits8),
    "eight bits": lambda: torch.full((4,), float("nan")).to(torch.float8_e4m3fn),
    "a large number": lambda: 10**400,
    "complex": lambda: torch.randn(4, dtype=torch.complex64),
}


@pytest.mark.filterwarnings("ignore")  # quantized tensors are deprecated
@pytest.mark.parametrize("which", STATES)
def test_states_that_nobody_can_read(which: str) -> None:
    """Lints compare states of ranks' optimizers, as far as they can be read."""

    def main(rank: int) -> None:
        model = wrapped()
        train(model, Keeping(model.parameters(), STATES[which]))

    assert says_nothing(in_ranks(main))


@pytest.mark.parametrize("state", [None, [1, 2]])
def test_optimizers_without_a_state(state: Any) -> None:
    """An optimizer that needs no state may have something else there."""

    class Stateless(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter -= 0.1 * parameter.grad

    def main(rank: int) -> None:
        model = wrapped()
        optimizer = Stateless(model.parameters(), lr=0.1)
        optimizer.state = state
        train(model, optimizer)

    assert says_nothing(in_ranks(main))


def with_quantized_buffers(rank: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1))
    model.register_buffer("table", quantized())
    model.register_buffer("none", None)
    both = DistributedDataParallel(model, init_sync=False)
    train(both.module, torch.optim.SGD(model.parameters(), lr=0.0))


def with_a_buffer_on_some_ranks(rank: int) -> None:
    model = wrapped()
    train(model, steps=1)
    if rank < 2:
        model.module.register_buffer("more", torch.ones(5))
    train(model, steps=3)


def with_freed_memory(rank: int) -> None:
    dist.init_process_group("gloo")
    unused = nn.Parameter(torch.randn(100_000))
    unused.data.untyped_storage().resize_(0)
    model = wrapped()
    train(model, torch.optim.SGD([*model.parameters(), unused], lr=0.01))


def in_transforms(rank: int) -> None:
    """A model is called in `vmap` and `jvp`, whose tensors have no memory."""
    model = wrapped(nn.Dropout(0.1), nn.Linear(4, 1))
    train(model)
    rows = torch.randn(3, 8, 4)
    torch.func.vmap(model, randomness="different")(rows)
    torch.func.vmap(model, randomness="different")(rows[0])
    torch.func.jvp(model, (rows[0],), (rows[0],))


def with_nested_rows(rank: int) -> None:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        rows = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
        optimizer.zero_grad()
        model(rows).to_padded_tensor(0.0).mean().backward()
        optimizer.step()


def with_single_numbers(rank: int) -> None:
    """A row of a tensor without dimensions, a complex mean, and other odd values.

    One that float32 cannot hold, and a bias that is one.
    """
    train(wrapped())
    # Some libraries replace torch's.
    torch.ops.aten.index_select(torch.tensor(1.0), 0, torch.randint(0, 1, (4,))[:1])
    torch.randn(4, dtype=torch.complex64).mean().item()
    torch.full((4,), 1e300, dtype=torch.float64).mean().item()
    weight, bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.tensor(0.5))
    dist.all_reduce(torch.nn.functional.linear(torch.randn(8, 4), weight) + bias)


def with_empty_parameters() -> None:
    """A parameter without numbers, of whose moments the first one would be asked."""
    model = nn.Linear(4, 1)
    nothing = nn.ParameterList([nn.Parameter(torch.empty(0, 4))])
    optimizer = torch.optim.Adam([*model.parameters(), *nothing.parameters()], lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.randn(8, 4)).mean() + nothing[0].sum()).backward()
        optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def with_complex_gradients() -> None:
    """Two optimizers, of which one has complex parameters."""
    model, phases = nn.Linear(4, 1), nn.Parameter(torch.randn(3, dtype=torch.complex64))
    first, second = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.SGD([phases], lr=0.1),
    )
    for _ in range(4):
        (model(torch.randn(2, 4)).mean() + phases.abs().sum()).backward()
        first.step()
        (phases.abs().sum() * 2).backward()
        second.step()
        first.zero_grad()
        second.zero_grad()


TENSORS: dict[str, Program] = {
    "quantized buffers": in_ranks(with_quantized_buffers),
    "a buffer on some ranks": in_ranks(with_a_buffer_on_some_ranks, 3),
    "freed memory": in_ranks(with_freed_memory),
    "transforms": in_ranks(in_transforms),
    "nested rows": in_ranks(with_nested_rows),
    "single numbers": in_ranks(with_single_numbers),
    "empty parameters": with_empty_parameters,
    "complex gradients": with_complex_gradients,
}


@pytest.mark.filterwarnings(
    "error:Casting complex values", "error:overflow", "ignore:The PyTorch API of nested"
)
@pytest.mark.filterwarnings("ignore:torch.ao", "ignore:.*quantize", "ignore:`torch.jit")
@pytest.mark.parametrize("which", TENSORS)
def test_tensors_of_the_program(which: str) -> None:
    """Lints read no tensor that has no numbers, or none that torch can compute with."""
    assert says_nothing(TENSORS[which])


# Groups, schedules and checkpoints


def two_layers() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).bfloat16()
    groups = [{"params": layer.parameters()} for layer in model]
    return model, torch.optim.SGD(groups, lr=1e-2)


def removed_between_steps() -> None:
    model, optimizer = two_layers()
    for step in range(12):
        if step == 7:
            del optimizer.param_groups[1]
        model.zero_grad()
        model(torch.randn(8, 4).bfloat16()).sum().backward()
        optimizer.step()


def removed_within_a_step() -> None:
    model, optimizer = two_layers()
    steps = iter(range(12))

    def closure() -> float:
        model.zero_grad()
        loss = model(torch.randn(8, 4).bfloat16()).sum()
        loss.backward()
        if next(steps) == 5:
            optimizer.param_groups.pop()
        return float(loss.detach())

    for _ in range(8):
        optimizer.step(closure)


def removed_beside_sharded_ones(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, beside = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), nn.Linear(1, 1)
    fully_shard(model)
    optimizer = torch.optim.SGD(
        [{"params": model.parameters()}, {"params": beside.parameters()}], lr=0.1
    )
    torch.manual_seed(rank + 1)
    for step in range(5):
        if step == 2:
            del optimizer.param_groups[1]
        optimizer.zero_grad()
        beside(model(torch.randn(8, 4))).mean().backward()
        for parameter in beside.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS
        optimizer.step()


def with_settings_of_two_kinds() -> None:
    class Still(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            pass

    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    groups = [
        {"params": model.parameters()},
        {"params": other.parameters(), "betas": 0.5},
    ]
    optimizer = Still(groups, {"lr": 0.1, "betas": (0.9, 0.9)})
    for group in optimizer.param_groups:
        group["betas"] = 0.6
    train(model, optimizer)


def with_a_parameter_that_grows() -> None:
    """Of two optimizers with opposed gradients, one's parameter gets more numbers."""
    first, second, more = nn.Linear(4, 4), nn.Linear(4, 1), nn.Parameter(torch.ones(4))
    one, two = (
        torch.optim.SGD(first.parameters(), lr=0.1),
        torch.optim.SGD([*second.parameters(), more], lr=0.1),
    )
    for step in range(3):
        (second(first(torch.randn(4, 4))).mean() + more.mean()).backward()
        one.step()
        if step == 0:
            more.grad, more.data = None, torch.ones(6)
        (second(torch.randn(4, 4)).mean() - more.sum()).backward()
        two.step()
        one.zero_grad()
        two.zero_grad()


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """A schedule without a hash, and with a horizon that is an error."""

    def __eq__(self, other: object) -> bool:
        return True

    @property
    def T_max(self) -> int:
        raise KeyError("T_max")


def with_an_own_schedule(rank: int) -> None:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rate: Any = lambda step: 0.9**step  # noqa: E731
    rate.__defaults__ = (1, 2, 3)  # more than it has arguments
    schedule = Schedule(optimizer, rate)
    for _ in range(4):
        train(model, optimizer, 1)
        schedule.step()


def with_a_group_of_settings() -> None:
    """A wrapper keeps settings in a group without parameters."""

    class Still(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            pass

    model = nn.Linear(4, 1)
    optimizer = Still(model.parameters(), lr=0.1)
    optimizer.param_groups.append({"lr": 0.2})
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(8, 4)).mean().backward()
        optimizer.step()


class Named(dict[str, Any]):
    """A dictionary whose `get` is not that of Python."""

    def get(self, name: str) -> Any:  # type: ignore[override]
        return self[name]


class Trainer:
    """A trainer with slots, and an error for each name that it does not know."""

    __slots__ = ("file",)

    def __init__(self, file: Path) -> None:
        self.file = file

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def run(self) -> None:
        model = nn.Linear(4, 1)
        torch.save(Named(model=model.state_dict(), epoch=3), self.file)
        checkpoint = torch.load(self.file, weights_only=False)
        model.load_state_dict(checkpoint["model"])
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(4):
            train(model, optimizer, 1)


OTHERS: dict[str, Program] = {
    "removed between steps": removed_between_steps,
    "removed within a step": removed_within_a_step,
    "removed beside sharded ones": in_ranks(removed_beside_sharded_ones),
    "a group of settings": with_a_group_of_settings,
    "settings of two kinds": with_settings_of_two_kinds,
    "a parameter that grows": with_a_parameter_that_grows,
    "an own schedule": in_ranks(with_an_own_schedule),
}


@for_releases
@pytest.mark.parametrize("which", OTHERS)
def test_groups_and_schedules_of_the_program(which: str) -> None:
    """A program may change its groups at any time, with schedules that say nothing.

    They answer no question.
    """
    assert says_nothing(OTHERS[which])


def test_checkpoints_of_an_own_class(tmp_path: Path) -> None:
    """A checkpoint is a dictionary with a `get` of its own.

    The trainer has no attributes but slots.
    """
    assert says_nothing(Trainer(tmp_path / "checkpoint.pt").run)


# Comments

SUMS = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for _ in range(4):
        model(torch.randn(2, 4)).square().mean().backward()  # torchstrategy: ignore[loss-not-divided]
    optimizer.step()
    optimizer.zero_grad()
"""  # noqa: E501


@pytest.mark.parametrize("start", ["\n\f\n", "# -*- coding: latin-1 -*-\n# caf\xe9\n"])
def test_comments_below_a_form_feed_or_in_another_encoding(
    start: str, tmp_path: Path
) -> None:
    """A form feed ends no line of Python.

    The first lines of a file name its encoding.
    """
    for name, program, expected in (
        ("silent", SUMS, 0),
        ("told", SUMS.replace("torchstrategy", ""), 1),
    ):
        file = tmp_path / f"{name}.py"
        file.write_bytes((start + program).encode("latin-1"))
        assert len(linted.findings_of_file(file)) == expected
