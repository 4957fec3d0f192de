"""Each snippet of each page, and each recommended line, works under all strategies.

A message recommends such a line.

A snippet may be about one strategy, or about a number of replicas: `ABOUT_ONE` and
`NOT_UNDER` say which, and why. What the snippets print is compared where each page is
tested, with the strategy that the page names.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_every_strategy import MAKERS, PROGRAMS, ROOT, every_strategy, run_under
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import torchstrategy
from conditions import for_changes

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TAUGHT = re.compile(
    r"^((?:\+ )?strategy = )"
    r"torchstrategy\.(?:Mirrored|CentralStorage|MultiWorkerMirrored)Strategy"
    r"\(.*?\)(?=$|  #)",
    re.M,
)
# Two workers make each line anew, with its exchanges.
every_strategy_but_workers = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[for_changes] if name == "workers" else [])
        for name in MAKERS
    ],
)

# Pages that run as a whole, one snippet after the other.
SNIPPETS = ("features.md", "data.md", "metrics.md", "performance.md")
# Pages whose snippets are about one strategy or about none, and the strategy of all
# others.
ABOUT_ONE = {
    "logging.md": "tests/pages/test_every_strategy.py runs it under every strategy",
    "custom-strategies.md": "a strategy of its own",
    "data_parallel.md": "the drop-in, which has no strategy",
    "dataparallel-faults.md": "torch.nn.DataParallel and the drop-in",
    "dataparallel-faults-in-modules.md": "torch.nn.DataParallel and the drop-in",
    "language-models.md": "a strategy that reads losses",
    "sharded-models.md": "a model that workers share among them",
    "testing.md": "tests of four replicas; the fixture `strategy` has all of them",
    "testing-cuda-scripts.md": "scripts for CUDA",
    "testing-ranks.md": "scripts for torchrun",
    "tutorial.md": "one process, two, and two ranks run its script",
    "virtual-time.md": "the costs of a strategy on modelled GPUs",
}
# What begins a snippet, the strategies under which it cannot work, and what says so.
NOT_UNDER: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    "data.md": {
        r".*by_items\)": (
            ("default",),
            "the page: the default strategy refuses options",
        ),
        r".*element_spec": (
            ("default",),
            "the default strategy returns the loader itself",
        ),
        r"(?s)for batch in .* options\s*\):": (
            tuple(MAKERS),
            "shares for two replicas of one process",
        ),
        r"for compute_devices in ": (
            tuple(MAKERS),
            "it makes its own strategies, to compare them",
        ),
    },
    "features.md": {
        r"reduces\(.*\"loss\"": (("workers",), "the page: the replicas of one process"),
    },
    "performance.md": {
        r"with profile|for event in": (
            ("workers",),
            "torch has one profiler a process, and these workers are threads",
        ),
    },
}


def pages_with_code() -> list[Path]:
    kinds = {"python", "py", "pycon", "diff"}
    return [
        page
        for page in sorted(DOCS.rglob("*.md"))
        if kinds & {kind for kind, _ in BLOCK.findall(page.read_text())}
    ]


def test_no_page_is_forgotten() -> None:
    programs = {"index.md", "migrating-from-dataparallel.md", "several-machines.md"}
    found = {page.name for page in pages_with_code() if page not in PROGRAMS}
    assert found == {*SNIPPETS, *ABOUT_ONE, *programs}


# Pages of snippets


def failures_of(
    page: str, name: str, strategy: torchstrategy.Strategy
) -> Iterator[str]:
    """Runs the snippets of a page in order; yields those that wrongly raise.

    They were not to raise.
    """
    text = re.sub(r"^```\w*$", "", (DOCS / page).read_text(), flags=re.MULTILINE)
    names: dict[str, Any] = {"__name__": "__main__", "STRATEGY": strategy}
    for example in doctest.DocTestParser().get_examples(text):
        source = TAUGHT.sub(r"\1STRATEGY", example.source)
        if any(
            name in under and re.match(start, source)
            for start, (under, _) in NOT_UNDER.get(page, {}).items()
        ):
            continue
        try:
            exec(compile(source, page, "exec"), names)
        except Exception as error:
            if example.exc_msg is None:
                yield (
                    f"{page}:{example.lineno + 1}: {source.splitlines()[0]}\n    "
                    f"{type(error).__name__}: {error}"
                )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@every_strategy
@pytest.mark.parametrize("page", SNIPPETS)
def test_snippets_of_a_page(
    page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def check(strategy: torchstrategy.Strategy) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            failed = list(failures_of(page, name, strategy))
        assert failed == [], "\n".join(failed)

    run_under(name, check)


# Whole programs


def blocks(page: str, *kinds: str) -> list[str]:
    return [
        text for kind, text in BLOCK.findall((DOCS / page).read_text()) if kind in kinds
    ]


def after_the_diff(diff: str) -> str:
    return "\n".join(
        line[2:] for line in diff.splitlines() if line[:1] in ("", " ", "+")
    )


def run_program(program: str, strategy: torchstrategy.Strategy, **names: Any) -> None:
    assert TAUGHT.search(program), "the program makes no strategy"
    program = TAUGHT.sub(r"\1STRATEGY", program)
    exec(
        compile(program, "page", "exec"),
        {"__name__": "__main__", "STRATEGY": strategy, **names},
    )


@every_strategy
def test_the_program_of_the_home_page(name: str) -> None:
    (diff,) = blocks("index.md", "diff")
    rows = torch.utils.data.TensorDataset(torch.randn(25, 4), torch.arange(25) % 3)
    names = {
        "torch": torch,
        "torchstrategy": torchstrategy,
        "F": F,
        "Net": lambda: nn.Linear(4, 3),
    }
    loader = DataLoader(rows, batch_size=7)
    run_under(
        name,
        lambda strategy: run_program(
            after_the_diff(diff), strategy, loader=loader, **names
        ),
    )


@every_strategy
def test_the_program_of_the_migration_from_dataparallel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, with_a_strategy = blocks("migrating-from-dataparallel.md", "python")
    run_under(name, lambda strategy: run_program(with_a_strategy, strategy))


def snippets_of_several_machines() -> Iterator[str]:
    """Those that are not about errors, and need no process group of torch's."""
    found = BLOCK.findall((DOCS / "several-machines.md").read_text())
    for (kind, text), (_, following) in itertools.pairwise([*found, ("", "")]):
        needs_group = re.search(
            r"torch\.distributed\.get_rank|DistributedSampler", text
        )
        if kind == "py" and "Error: " not in following and not needs_group:
            yield text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "workers"])
def test_programs_of_several_machines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page tells readers to run their script alone first.

    Two processes run them where the page is tested.
    """
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("several-machines.md", "python")
    snippets = list(snippets_of_several_machines())
    assert len(snippets) == 5
    beginning = program.partition("\n\nfor epoch")[0]

    def check(strategy: torchstrategy.Strategy) -> None:
        run_program(program, strategy)
        failed = []
        for snippet in snippets:
            if (name == "default" and "dataset.load_state_dict" in snippet) or (
                strategy.num_replicas_in_sync == 3
                and "get_per_replica_batch_size(64)" in snippet
            ):
                # The default strategy returns the loader itself; 64 rows are not
                # divided by three.
                continue
            names = {"STRATEGY": strategy, "__name__": "__main__"}
            failed += failures_among(
                [TAUGHT.sub(r"\1STRATEGY", f"{beginning}\n\n\n{snippet}")], names
            )
        assert failed == [], "\n".join(failed)

    run_under(name, check)


# Tables of lines


def lines_of_table(page: str, header: str) -> list[list[str]]:
    """The code in the last column of a table, row by row.

    "The same" is that of the first column.
    """
    below = (DOCS / page).read_text().partition(f"\n{header}\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in below.splitlines()[1:]]
    cells = [row[0] if row[-1].startswith("the same") else row[-1] for row in rows]
    return [
        re.findall("`(.+?)`", cell)
        for cell in cells
        if not cell.startswith("no such line")
    ]


def names_for(
    strategy: torchstrategy.Strategy, folder: Path, count: int = 7
) -> dict[str, Any]:
    """What the lines of tables and messages find, and batches of so many rows."""
    torch.manual_seed(0)
    rows, classes = torch.randn(count, 4), torch.arange(count) % 3
    net = nn.Linear(4, 3)
    with strategy.scope():
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.utils.data.TensorDataset(rows, classes), batch_size=count)
    batch = next(iter(strategy.experimental_distribute_dataset(loader)))

    def step(batch: Any) -> torch.Tensor:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        losses.mean().backward()
        return losses.detach()

    losses = strategy.run(step, args=(batch,))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    optimizer.step()
    saved = {f"module.{name}": value for name, value in model.state_dict().items()}
    found = {name: value for name, value in locals().items() if name != "folder"}
    found |= {
        "torch": torch,
        "nn": nn,
        "F": F,
        "torchstrategy": torchstrategy,
        "DataLoader": DataLoader,
    }
    found |= {
        "train_step": step,
        "backward_step": step,
        "path": folder / "net.pt",
        "dataset": loader.dataset,
    }
    return found | {"device": "cpu", "Net": lambda: nn.Linear(4, 3)}


TABLES = {
    "several-machines.md": "| with `DistributedDataParallel` | with the strategy |",
    "migrating-from-dataparallel.md": (
        "| with `nn.DataParallel` | with the drop-in | with a strategy |"
    ),
}


@pytest.mark.slow
@every_strategy_but_workers
@pytest.mark.parametrize("page", TABLES)
def test_lines_of_tables(
    page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        lines
        for lines in lines_of_table(page, TABLES[page])
        if not re.search("cuda|WorkerMirrored", str(lines))
    ]
    assert len(rows) > 8

    def check(strategy: torchstrategy.Strategy) -> None:
        failed = []
        for lines in rows:
            names = names_for(strategy, tmp_path)
            names["model"].encode = names["model"].forward
            if "dataparallel" in page:  # there a batch is its rows
                names["batch"] = names["batch"][0]
            failed += failures_among(
                [f"{line} pass" if line.endswith(":") else line for line in lines],
                names,
            )
        assert failed == [], "\n".join(failed)

    run_under(name, check)


def failures_among(lines: Iterable[str], names: dict[str, Any]) -> list[str]:
    failed = []
    for line in lines:
        try:
            exec(line, names)
        except Exception as error:
            failed.append(f"{line}\n    {type(error).__name__}: {error}")
    return failed


@every_strategy
def test_lines_of_the_table_on_losses(name: str) -> None:
    lines = [
        line
        for lines in lines_of_table("logging.md", "| the step returns | write |")
        for line in lines
    ]
    assert len(lines) == 6

    def check(strategy: torchstrategy.Strategy) -> None:
        (batch,) = strategy.experimental_distribute_dataset([torch.randn(7, 3)])
        returned = {
            "loss": lambda rows: rows.mean(),
            "losses": lambda rows: rows.mean(1),
            "correct": lambda rows: (rows > 0).sum(),
            "tokens": lambda rows: torch.tensor(float(rows.numel())),
            "scores": lambda rows: rows,
            "texts": lambda rows: [str(row) for row in rows],
        }
        names = {
            name: strategy.run(step, args=(batch,)) for name, step in returned.items()
        }
        failed = failures_among(lines, {**names, "strategy": strategy, "batch": batch})
        assert failed == [], "\n".join(failed)

    run_under(name, check)


# Lines of messages

CALL = re.compile(
    r"\b(?:torchstrategy|strategy|optimizer|model|variable|dataset)\.[A-Za-z_.]+\("
)
# They simulate devices in this process for good, or are part of another line.
NOT_RUN = (
    "torchstrategy.testing.simulate_devices(2)",
    "torchstrategy.testing.simulate_devices(n)",
    "model.module(x)",  # what not to call
    "optimizer.step(closure)",  # the step's own closure
    # A model of FSDP2, which no strategy is needed for.
    "model.set_requires_gradient_sync(True)",
)


def calls_in(text: str) -> Iterator[str]:
    """Each whole call that a text shows, with what is called on its result."""
    for start in CALL.finditer(text):
        end = end_of_call(text, start.end() - 1)
        while end and (more := re.compile(r"\.[A-Za-z_.]+\(").match(text, end)):
            end = end_of_call(text, more.end() - 1)
        if end:
            yield text[start.start() : end]


def end_of_call(text: str, opening: int) -> int:
    """Where the parenthesis that opens here is closed; 0 if it is not."""
    depth = 0
    for place in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    return 0


def texts_in(file: Path) -> Iterator[str]:
    """The texts of a file that are no docstrings, with {} for what is put into them."""
    tree = ast.parse(file.read_text())
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in node.values}
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}"
                for part in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inner
        ):
            yield node.value


def lines_of_messages() -> list[str]:
    package = Path(torchstrategy.__file__).parent
    calls = {
        call
        for file in package.rglob("*.py")
        for text in texts_in(file)
        for call in calls_in(text)
    }
    # Those are what objects are shown as.
    return sorted(call for call in calls if "id {}" not in call)


def names_of_messages(strategy: torchstrategy.Strategy, folder: Path) -> dict[str, Any]:
    names = names_for(strategy, folder, count=6)  # as many rows in each replica
    with strategy.scope():
        names["variable"] = torchstrategy.Variable(
            1.0, aggregation=torchstrategy.VariableAggregation.MEAN
        )
    names["value"] = names["predictions"] = names["losses"]
    names |= {
        "module": nn.Linear(2, 1),
        "fn": lambda variable: variable.assign(2.0),
        "reduce_op": "mean",
    }
    names["dataset"] = strategy.experimental_distribute_dataset(names["loader"])
    names |= {
        "dataset_fn": lambda context: names["loader"],
        "value_fn": lambda context: torch.ones(2),
    }
    # The default strategy returns the loader itself.
    if isinstance(names["dataset"], DataLoader):
        names["dataset"].state_dict = dict
    names["step"] = lambda *args: None
    names |= {"loss": names["losses"], "counts": names["batch"]}
    names["iterator"] = itertools.count()
    return names


def is_for_a_step(line: str) -> bool:
    return "get_replica_context" in line or "compute_average_loss" in line


def failure_of(
    line: str, names: dict[str, Any], strategy: torchstrategy.Strategy
) -> list[str]:
    """Runs a line of a message with what it finds."""
    names = dict(names)
    if "..." in line or "{}" in line:  # an outline: what it calls has to be there
        line = line.partition("(")[0]
    if "distribute_module(model)" in line:
        names["model"] = nn.Linear(2, 1)
    if "distribute_optimizer(optimizer)" in line:
        module = strategy.distribute_module(nn.Linear(2, 1))
        names["optimizer"] = torch.optim.SGD(module.parameters(), lr=0.1)
    if "Variable(value" in line:  # the value of a variable that the line makes
        names["value"] = torch.ones(2)
    if not is_for_a_step(line):
        return failures_among([line], names)

    def step(batch: Any) -> None:
        rows = batch[0]
        failed.extend(
            failures_among([line], {**names, "rows": rows, "losses": rows.mean(1)})
        )

    failed: list[str] = []
    strategy.run(step, args=(names["batch"],))
    return failed


@for_changes
@pytest.mark.slow
@every_strategy_but_workers
def test_lines_that_messages_recommend(name: str, tmp_path: Path) -> None:
    lines = [line for line in lines_of_messages() if line not in NOT_RUN]
    assert len(lines) > 30

    def check(strategy: torchstrategy.Strategy) -> None:
        names = names_of_messages(strategy, tmp_path)
        failed = [
            failure for line in lines for failure in failure_of(line, names, strategy)
        ]
        assert failed == [], "\n".join(failed)

    run_under(name, check)
