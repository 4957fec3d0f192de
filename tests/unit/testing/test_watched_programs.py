"""A program that lints watch computes what it computes alone.

It does whatever objects of its own it has.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchstrategy._base.objects.proxies import parameters_of
from torchstrategy.testing import lint_training, run_ranks
from torchstrategy.testing._simulation.replacing import replacing

PROGRAMS: list[Callable[[Path], object]] = []
FILE = "there.txt"


def program(main: Callable[[Path], object]) -> Callable[[Path], object]:
    """Adds a program, which gets a folder with a file in it; returns its result."""
    PROGRAMS.append(main)
    return main


@pytest.mark.parametrize("main", PROGRAMS, ids=lambda main: str(main.__name__))
def test_a_watched_program_computes_what_it_computes_alone(
    main: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / FILE).write_text("text")
    alone = main(tmp_path)
    with lint_training(check=False) as record:
        watched = main(tmp_path)
    assert watched == alone
    assert record.findings == []


@pytest.mark.parametrize("main", PROGRAMS, ids=lambda main: str(main.__name__))
def test_so_does_a_watched_rank(main: Callable[[Path], object], tmp_path: Path) -> None:
    """Lints ask more in ranks: which files one of them has written, say."""
    (tmp_path / FILE).write_text("text")

    def of_rank(rank: int) -> object:
        dist.init_process_group("gloo")
        return main(tmp_path)

    alone = run_ranks(of_rank, 2)[0]
    with lint_training(check=False) as record:
        watched = run_ranks(of_rank, 2)[0]
    assert watched == alone
    assert [
        finding.name for finding in record.findings if finding.name == "lint-failed"
    ] == []


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    """The sums of parameters after three steps."""
    chosen = (
        torch.optim.SGD(nn.Module.parameters(model), 0.1)
        if optimizer is None
        else optimizer
    )
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        chosen.zero_grad()
        model(rows).square().mean().backward()
        chosen.step()
    return [
        float(parameter.detach().sum()) for parameter in nn.Module.parameters(model)
    ]


def linear(kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    torch.manual_seed(0)
    return kind(4, 2)


# What can be gone through only once


@program
def backward_of_a_generator(folder: Path) -> object:
    weight = torch.ones(3, requires_grad=True)
    torch.autograd.backward((weight * number).sum() for number in (1, 2))
    assert weight.grad is not None
    return weight.grad.tolist()


@program
def backward_of_a_map(folder: Path) -> object:
    weight = torch.ones(3, requires_grad=True)
    torch.autograd.backward(map(torch.sum, [weight * 2, weight * 3]))
    assert weight.grad is not None
    return weight.grad.tolist()


def test_a_group_of_a_generator() -> None:
    def main(rank: int) -> int:
        dist.init_process_group("gloo")
        group: Any = dist.new_group(rank for rank in range(2))
        return dist.get_world_size(group)

    with lint_training():
        assert run_ranks(main, 2)[0] == [2, 2]


# Functions of Python that are replaced


class Opens:
    # Builtin ones are no methods.
    opens, lists, looks = open, os.listdir, os.path.getsize


@program
def builtin_functions_as_attributes_of_a_class(folder: Path) -> object:
    reads: Any = Opens()
    with reads.opens(folder / FILE) as file:
        text = file.read()
    return text, reads.lists(folder), Opens.looks(folder / FILE)


@program
def replaced_functions_are_pickled(folder: Path) -> object:
    functions: list[Any] = [
        torch.load,
        torch.save,
        os.listdir,
        os.replace,
        os.path.exists,
        os.path.getmtime,
        open,
        dist.new_group,
    ]
    return [pickle.loads(pickle.dumps(function)) is function for function in functions]


@program
def one_function_has_two_names(folder: Path) -> object:
    return open is io.open


@program
def arguments_by_name(folder: Path) -> object:
    return os.path.getsize(filename=folder / FILE), os.path.exists(path=folder / FILE)


@program
def arguments_that_do_not_fit(folder: Path) -> object:
    looks: Any = os.path.exists
    with pytest.raises(TypeError, match="exists"):
        looks()
    return None


def test_the_clock_as_an_attribute_of_a_class() -> None:
    """Virtual time replaces the clock, which is a builtin function, too."""
    with replacing([(time, "perf_counter", lambda: 1.0)]):

        class Timer:
            now = time.perf_counter

        assert Timer().now() == 1.0


def test_a_working_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(rank: int) -> bool:
        return os.path.exists("something")

    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    with lint_training():
        gone.rmdir()
        assert run_ranks(main, 2)[0] == [False, False]


# Operators of another kind


def test_a_branch_that_is_an_operator() -> None:
    rows = torch.ones(3)
    with lint_training():
        result: torch.Tensor = torch.cond(
            rows.sum() > 2, lambda x: x * 2, lambda x: x * 3, (rows,)
        )
    assert result.tolist() == [2, 2, 2]


# Modules, optimizers and samplers of the program's own


class Unhashable(nn.Linear):
    def __eq__(self, other: object) -> bool:
        return self.weight.shape == getattr(other, "weight", torch.ones(0)).shape

    __hash__ = None  # type: ignore[assignment]


@program
def a_module_without_a_hash_is_moved(folder: Path) -> object:
    return linear(Unhashable).to(torch.float64).weight.tolist()


class OtherNames(nn.Linear):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name, parameter, "learned"


@program
def a_module_with_other_names_is_moved(folder: Path) -> object:
    return linear(OtherNames).to(torch.float64).weight.tolist()


@dataclasses.dataclass
class Plain(torch.optim.Optimizer):
    """It has an `==` and no hash, as any dataclass."""

    of: list[nn.Parameter]

    def __post_init__(self) -> None:
        super().__init__(self.of, {})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.of:
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]


@program
def an_optimizer_without_a_hash(folder: Path) -> object:
    model = linear()
    return trained(model, Plain(list(model.parameters())))


class Compares(torch.optim.SGD):
    def __eq__(self, other: object) -> Any:
        return torch.tensor([True, False])

    __hash__ = torch.optim.SGD.__hash__


@program
def an_optimizer_whose_comparison_is_no_bool(folder: Path) -> object:
    model = linear()
    optimizers = [Compares(model.parameters(), 0.1) for _ in range(2)]
    trained(model, optimizers[0])
    return trained(model, optimizers[1])


class WithoutParameters(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.settings = {"decay": 0.1}

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.param_groups.append(self.settings)

    def step(self, closure: Any = None) -> Any:
        self.param_groups.remove(self.settings)
        return super().step(closure)


@program
def a_group_without_parameters(folder: Path) -> object:
    model = linear()
    return trained(model, WithoutParameters(model.parameters()))


class Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.name, ctx.variable = "named", rows.detach()
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@program
def a_function_with_a_name(folder: Path) -> object:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(2):
        Named.apply(weight.sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return weight.tolist()


class Refuses:
    """Batches of a sampler that nobody may ask for."""

    @property
    def sampler(self) -> Any:
        raise RuntimeError("not yet")

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [2, 3])

    def __len__(self) -> int:
        return 2


class Forbids(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"{name} is final")


class Fixed(Refuses, metaclass=Forbids):
    sampler = None  # type: ignore[assignment]

    def set_epoch(self, epoch: int) -> None:
        pass


class Counts:
    __slots__ = ("_left",)  # so that nobody can refer to it without keeping it

    def __init__(self, left: int) -> None:
        self._left = left

    def __iter__(self) -> Counts:
        return self

    def __next__(self) -> int:
        if not self._left:
            raise StopIteration
        self._left -= 1
        return self._left


class Loader(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return Counts(2)


@program
def loaders_of_the_programs_own(folder: Path) -> object:
    rows = TensorDataset(torch.arange(4.0))
    batches = [
        [row.tolist() for (row,) in DataLoader(rows, batch_sampler=kind())]
        for kind in (Refuses, Fixed)
    ]
    return batches, list(Loader(rows))


def test_threads_of_the_program_are_watched_as_well() -> None:
    found: list[object] = []
    with lint_training():
        thread = threading.Thread(target=lambda: found.append(trained(linear())))
        thread.start()
        thread.join()
    assert found == [trained(linear())]


def test_a_group_without_parameters_is_asked_for_none() -> None:
    """Where a strategy with one replica is at work, the library asks all optimizers.

    It asks those of the process for theirs.
    """
    optimizer = WithoutParameters(linear().parameters())
    optimizer.zero_grad()  # adds such a group
    assert [parameter.shape for parameter in parameters_of(optimizer)] == [(2, 4), (2,)]
