"""How much memory each device holds: exactly what is alive there.

It holds nothing after that has gone.
"""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn

from torchstrategy.testing import cuda_alias

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
    for device, expected in (
        (ONE, (4000, 0)),
        (TWO, (0, 4000)),
        ("cpu", (0, 0)),
        (TWO, (0, 4000)),
    ):
        parameter.data = parameter.data.to(device)
        assert (more(1), more(2)) == expected


def test_training_holds_no_more_with_every_step() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.LSTM(8, 4)
    ).to(ONE)
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
    cycle: list[Any] = [
        torch.ones(1000, device=ONE, requires_grad=True),
        sim.Stream(1),
        torch.Generator("sim:1"),
    ]
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
    assert (
        sim.max_memory_allocated(1) - before
        == 4000
        == torch.accelerator.max_memory_allocated(1) - before
    )
    torch.accelerator.reset_peak_memory_stats(1)
    assert (
        sim.max_memory_allocated(ONE)
        == sim.memory_allocated(ONE)
        == torch.accelerator.memory_allocated(1)
    )


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


# What `torch.cuda` says


def test_cuda_counts_in_blocks() -> None:
    with cuda_alias():
        for asked, found in (
            (1, 512),
            (512, 512),
            (513, 1024),
            (2**20 + 1, 2**20 + 512),
            (0, 0),
        ):
            before, exactly = torch.cuda.memory_allocated(1), Counter()
            torch.cuda.reset_peak_memory_stats(1)
            x = torch.empty(asked, dtype=torch.uint8, device=ONE)
            assert (
                torch.cuda.memory_allocated(1) - before
                == torch.accelerator.memory_allocated(1) - before
                == found
            )
            assert (
                torch.cuda.max_memory_allocated(1) - before == found
                and exactly(1) == asked
            )
            del x
            assert torch.cuda.memory_allocated(1) == before


def test_memory_stays_reserved_until_the_cache_is_emptied() -> None:
    with cuda_alias():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(1)
        before = torch.cuda.memory_reserved(1)
        x = torch.empty(30 * 2**20, dtype=torch.uint8, device=ONE)
        with_it = torch.cuda.memory_reserved(1)
        assert (
            with_it - before >= 30 * 2** 20
            and with_it >= torch.cuda.memory_allocated(1)
        )
        del x
        assert (
            torch.cuda.memory_reserved(1)
            == with_it
            == torch.cuda.max_memory_reserved(1)
        )
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(1)
        assert (
            torch.cuda.memory_reserved(1) == before == torch.cuda.max_memory_reserved(1)
        )


def test_the_statistics_have_the_keys_of_cuda() -> None:
    with cuda_alias():
        x = torch.ones(1000, device=ONE)
        stats, nested = (
            torch.cuda.memory_stats(1),
            torch.cuda.memory_stats_as_nested_dict(1),
        )
        assert (
            type(stats) is OrderedDict
            and len(stats) == 122
            and list(stats) == sorted(stats)
        )
        assert (
            stats["allocated_bytes.all.current"]
            == torch.cuda.memory_allocated(1)
            >= x.nbytes
        )
        assert stats["requested_bytes.all.current"] == sim.memory_allocated(1)
        assert stats["reserved_bytes.all.current"] == torch.cuda.memory_reserved(1)
        assert (
            nested["allocated_bytes"]["all"]["current"]
            == stats["allocated_bytes.all.current"]
        )
        assert sorted(nested["active"]) == ["all", "large_pool", "small_pool"]
        summary = torch.cuda.memory_summary(1, abbreviated=True)
        assert "PyTorch CUDA memory summary, device ID 1 " in summary.splitlines()[1]


TOO_LARGE: dict[str, Callable[[], object]] = {
    "empty": lambda: torch.empty(2**50, dtype=torch.uint8, device=ONE),
    "strided": lambda: torch.empty_strided(
        (2**50,), (1,), dtype=torch.uint8, device=ONE
    ),
    "operator": lambda: torch.zeros(1, device=ONE).expand(2**48).clone(),
    "sum": lambda: torch.zeros(1, device=ONE).expand(2**48) + 1,
}


@pytest.mark.parametrize("make", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_does_not_fit_raises_cudas_error(make: Callable[[], object]) -> None:
    with cuda_alias():
        before = torch.cuda.memory_stats(1)["num_ooms"]
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. "):
            make()
        assert torch.cuda.memory_stats(1)["num_ooms"] == before + 1
        assert torch.ones(2, device=ONE).sum() == 2


def test_a_part_of_the_memory_is_all_that_a_program_gets_that_asks_for_it() -> None:
    with cuda_alias():
        share = torch.cuda.mem_get_info(1)[1] // 100
        torch.cuda.set_per_process_memory_fraction(0.01, 1)
        try:
            with pytest.raises(
                torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate"
            ):
                torch.empty(2 * share, dtype=torch.uint8, device=ONE)
            torch.empty(share // 2, dtype=torch.uint8, device=ONE)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, 1)
        torch.empty(2 * share, dtype=torch.uint8, device=ONE)
