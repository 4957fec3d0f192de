"""What pages and messages tell readers to write works under every strategy.

Strategies range from one device to two workers.
"""

from __future__ import annotations

import doctest
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torchstrategy
from torchstrategy.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
MAKERS: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "default": torchstrategy.get_strategy,
    "one_device": lambda: torchstrategy.OneDeviceStrategy("cpu"),
    "central_1": lambda: torchstrategy.CentralStorageStrategy(["cpu"]),
    "central_3": lambda: torchstrategy.CentralStorageStrategy(["cpu"] * 3),
    "mirrored_1": lambda: torchstrategy.MirroredStrategy(["cpu"]),
    "mirrored_3": lambda: torchstrategy.MirroredStrategy(["cpu"] * 3),
    "workers": lambda: torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"]),
}
TAUGHT = 'torchstrategy.MirroredStrategy(["cpu"] * 4)'
PROGRAMS = [ROOT / "README.md", *sorted((ROOT / "docs" / "recipes").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
every_strategy = pytest.mark.parametrize("name", MAKERS)


def run_under(name: str, check: Callable[[torchstrategy.Strategy], None]) -> None:
    """Calls `check` with the strategy; in two workers, if it is that of workers."""

    def main(rank: int) -> None:
        torch.manual_seed(0)
        check(MAKERS[name]())

    if name == "workers":
        run_ranks(main, 2)
    else:
        main(0)


def run_text(text: str, strategy: torchstrategy.Strategy) -> None:
    assert TAUGHT in text
    exec(
        compile(text.replace(TAUGHT, "STRATEGY"), "page", "exec"),
        {"__name__": "__main__", "STRATEGY": strategy},
    )


def programs_of(page: Path) -> str:
    return "\n".join(BLOCK.findall(page.read_text()))


@pytest.mark.slow
@every_strategy
@pytest.mark.parametrize(
    "page",
    [page for page in PROGRAMS if TAUGHT in programs_of(page)],
    ids=lambda page: page.stem,
)
def test_programs_of_pages(
    page: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (page.stem, name) == ("saving", "default"):
        pytest.skip(
            "the default strategy returns the loader itself, which has no state; the "
            "page says so"
        )
    monkeypatch.chdir(tmp_path)
    run_under(name, lambda strategy: run_text(programs_of(page), strategy))


class SummaryWriter:
    """Takes what the page on logging calls of TensorBoard."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def add_scalar(self, tag: str, value: object, step: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


@every_strategy
def test_each_line_of_the_page_on_logging(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "logging.md").read_text()
    lines = [
        example.source
        for example in doctest.DocTestParser().get_examples(page)
        if example.exc_msg is None
    ]
    run_under(name, lambda strategy: run_text("".join(lines), strategy))


def lines_of_the_message() -> list[str]:
    value = torchstrategy.MirroredStrategy(["cpu"] * 2).run(
        lambda: torchstrategy.get_replica_context().replica_id_in_sync_group
    )
    with pytest.raises(AttributeError) as raised:
        value.item()
    return re.findall(r"^  (strategy\..*?\))  ", str(raised.value), re.MULTILINE)


@every_strategy
def test_each_line_that_a_per_replica_value_recommends(name: str) -> None:
    lines = lines_of_the_message()
    assert len(lines) == 4

    def check(strategy: torchstrategy.Strategy) -> None:
        with strategy.scope():
            model = torch.nn.Linear(3, 1)
        (batch,) = strategy.experimental_distribute_dataset([torch.ones(6, 3)])
        value = strategy.run(lambda rows: model(rows).detach()[:, 0], args=(batch,))
        for line in lines:
            eval(line, {"strategy": strategy, "value": value, "batch": batch})
        assert (
            strategy.count_rows(batch)
            == strategy.count_rows(value)
            == len(strategy.gather(value, axis=0))
            == 6
        )

    run_under(name, check)


@every_strategy
def test_a_checkpoint_of_one_worker_that_all_read(name: str, tmp_path: Path) -> None:
    def check(strategy: torchstrategy.Strategy) -> None:
        if strategy.extended.should_checkpoint:
            (tmp_path / "checkpoint").write_text("written")
        strategy.barrier()
        assert (tmp_path / "checkpoint").read_text() == "written"

    run_under(name, check)
