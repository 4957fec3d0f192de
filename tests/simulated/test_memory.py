"""How much memory each device holds: exactly what is alive there, and nothing after it has gone."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn

ONE, TWO = torch.device("sim:1"), torch.device("sim:2")
sim: Any = torch.get_device_module("sim")


def held() -> list[int]:
    gc.collect()
    return [sim.memory_allocated(index) for index in range(5)]


@pytest.fixture(autouse=True, scope="module")
def what_is_here_is_not_garbage() -> Iterator[None]:
    """Without this, each look at all the objects of torch takes a tenth of a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = held()
    yield
    assert held() == before


class Counter:
    def __init__(self) -> None:
        self.before = held()

    def __call__(self, index: int) -> int:
        return held()[index] - self.before[index]


def test_views_and_aliases_cost_nothing_and_keep_memory_alive() -> None:
    more = Counter()
    x = torch.ones(1000, device=ONE)
    view, detached = x.view(10, 100)[2:].t(), x.detach()
    conjugate = torch.view_as_complex(x.view(500, 2)).conj()
    assert (more(1), more(0), more(2)) == (4000, 0, 0)
    del x, view, conjugate
    assert more(1) == 4000
    del detached
    assert more(1) == 0


COPIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "clone": lambda x: x.clone(),
    "deepcopy": lambda x: copy.deepcopy(x),
    "sum": lambda x: x + 1,
    "to": lambda x: x.to(ONE, copy=True),
    "from_the_cpu": lambda x: torch.ones(1000).to(ONE),
    "out": lambda x: torch.add(x, 1, out=torch.empty(0, device=ONE)),
    "resize": lambda x: torch.empty(10, device=ONE).resize_(1000),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_costs_its_bytes(copied: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(1000, device=ONE)
    more = Counter()
    other = copied(x)
    assert more(1) == 4000
    del other
    assert more(1) == 0


def test_looking_costs_nothing() -> None:
    x = torch.ones(1000, device=ONE)
    more = Counter()
    on_the_cpu = x.cpu()
    x.tolist(), repr(x), x[3].item()
    assert on_the_cpu.sum() == 1000 and more(1) == 0


def test_a_moved_parameter_leaves_nothing_behind() -> None:
    more = Counter()
    parameter = nn.Parameter(torch.ones(1000))
    for device, expected in ((ONE, (4000, 0)), (TWO, (0, 4000)), ("cpu", (0, 0)), (TWO, (0, 4000))):
        parameter.data = parameter.data.to(device)
        assert (more(1), more(2)) == expected


def test_training_holds_no_more_with_every_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.LSTM(8, 4)).to(ONE)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8, device=ONE))[0].sum().backward()
        optimizer.step()

    step()
    after_one = held()
    for _ in range(5):
        step()
    assert held() == after_one


def test_a_cycle_is_collected() -> None:
    more = Counter()
    cycle: list[Any] = [torch.ones(1000, device=ONE, requires_grad=True), sim.Stream(1), torch.Generator("sim:1")]
    cycle.append(cycle)
    (cycle[0] * 2).sum().backward()
    assert more(1) == 8000
    del cycle
    assert more(1) == 0


def test_an_operator_that_fails_keeps_nothing() -> None:
    more = Counter()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            torch.linalg.cholesky(-torch.eye(50, device=ONE))
    assert more(1) == 0


def test_loaded_views_share_their_bytes() -> None:
    file, x = io.BytesIO(), torch.ones(1000, device=ONE)
    torch.save((x, x[10:]), file)
    file.seek(0)
    more = Counter()
    loaded = torch.load(file)
    assert more(1) == 4000
    del loaded
    assert more(1) == 0


def test_the_peak_is_the_most_since_it_was_reset() -> None:
    before = held()[1]
    sim.reset_peak_memory_stats(1)
    x = torch.ones(1000, device=ONE)
    del x
    assert sim.max_memory_allocated(1) - before == 4000 == torch.accelerator.max_memory_allocated(1) - before
    torch.accelerator.reset_peak_memory_stats(1)
    assert sim.max_memory_allocated(ONE) == sim.memory_allocated(ONE) == torch.accelerator.memory_allocated(1)


def test_threads_leave_exact_accounts() -> None:
    def work(index: int) -> None:
        for _ in range(50):
            torch.ones(100, device=torch.device("sim", index)).add(1)

    more = Counter()
    threads = [threading.Thread(target=work, args=(index % 5,)) for index in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [more(index) for index in range(5)] == [0] * 5


def test_a_freed_storage_comes_back_and_does_not_grow() -> None:
    x = torch.ones(1000, device=ONE)
    storage = x.untyped_storage()
    more = Counter()
    storage.resize_(0)
    assert storage.nbytes() == 0 and more(1) == -4000
    storage.resize_(1000)
    assert more(1) == 1000 - 4000
    storage.resize_(4000)
    assert more(1) == 0
    x.fill_(2)
    assert storage.nbytes() == 4000 and x.sum() == 2000
    with pytest.raises(RuntimeError, match="cannot grow from the 4000 bytes"):
        storage.resize_(8000)
