"""The pages on torch.nn.DataParallel say what is so: all of it runs.

torch.nn.DataParallel runs on simulated devices.
"""

from __future__ import annotations

import doctest
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy
from conditions import for_changes
from processes import NO_ACCELERATOR, python

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "migrating-from-dataparallel.md"
PAGES = {
    page.stem: page
    for page in (PAGE, *sorted((ROOT / "docs").glob("dataparallel-faults*.md")))
}
TEXT = PAGE.read_text()
PYTHON, DIFF = (
    re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)
    for language in ("python", "diff")
)
FAULTS = [
    fault
    for page in list(PAGES.values())[1:]
    for fault in re.findall(
        r"^## (.+?)\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S
    )
]

# The words that begin a paragraph, and where the snippets below it run. What is below
# none of them runs in both places.
MARKS = {
    "Before.": "with devices",
    "After.": "without",
    "After, on the same devices.": "with devices",
    "Before, without a GPU.": "without",
}
PLACES = {
    "without": "",
    "with devices": """
import torchstrategy.testing
torchstrategy.testing.simulate_devices(4)
torchstrategy.testing.cuda_alias().__enter__()
""",
}


def printed(place: str, program: str, folder: Path) -> str:
    """What a program prints in a process with four simulated devices, or none.

    The devices are called cuda.
    """
    paths = os.pathsep.join(
        map(
            str,
            (Path(__file__).parent, ROOT / "tests", ROOT / "tests" / "support", ROOT),
        )
    )
    done = python(
        "-c", PLACES[place] + program, folder=folder, PYTHONPATH=paths, **NO_ACCELERATOR
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


# The snippets


def snippets(place: str, page: str) -> str:
    """A page, with empty lines for what does not run in this place.

    What doctest does not run is empty, too.
    """
    lines, where = [], None
    for line in PAGES[page].read_text().splitlines():
        if mark := re.match(r"\*\*(.+?)\*\*", line):
            where = MARKS[mark[1]]
        elif line.startswith("#"):
            where = None
        lines.append(
            line if where in (None, place) and not line.startswith("```") else ""
        )
    return "\n".join(lines)


def run_snippets(place: str, page: str) -> None:
    """Prints those that do not print what the page shows, and how many there are."""
    names = {"__name__": "__main__"}
    test = doctest.DocTestParser().get_doctest(
        snippets(place, page), names, page, str(PAGES[page]), 0
    )
    print(doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test))


@for_changes
@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("page", PAGES)
def test_snippets_print_what_the_page_shows(
    page: str, place: str, tmp_path: Path
) -> None:
    program = (
        f"import test_migrating_page; test_migrating_page.run_snippets({place!r}, "
        f"{page!r})"
    )
    attempted = snippets(place, page).count("\n>>> ")
    assert attempted > (4 if PAGES[page] == PAGE else 50)
    assert (
        printed(place, program, tmp_path)
        == f"TestResults(failed=0, attempted={attempted})\n"
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_is_run(page: str) -> None:
    text = PAGES[page].read_text()
    assert set(re.findall(r"^```(\w+)$", text, re.M)) <= {
        "python",
        "diff",
        "pycon",
        "shell",
    }
    shown = [snippets(place, page).splitlines() for place in PLACES]
    run = {
        n for lines in shown for n, line in enumerate(lines) if line.startswith(">>> ")
    }
    assert len(run) == text.count("\n>>> ")


@pytest.mark.parametrize(("title", "text"), FAULTS, ids=[title for title, _ in FAULTS])
def test_each_fault_is_shown_before_and_after(title: str, text: str) -> None:
    pieces = re.split(r"^\*\*(.+?)\*\*", text, flags=re.M)
    shown = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    assert {"Before.", "After."} <= set(shown)
    assert all("```pycon\n>>> " in piece for piece in shown.values())


# The scripts


def patched(script: str, diff: str) -> str:
    for hunk in diff.split("@@\n"):
        old, new = (
            "".join(line[1:] for line in hunk.splitlines(True) if line[0] in side)
            for side in (" -", " +")
        )
        assert script.count(old) == 1, f"the script does not have\n{old}"
        script = script.replace(old, new)
    return script


def run_scripts() -> None:
    """Runs the first script, the same with the drop-in, and the one with a strategy."""
    (before, with_a_strategy), (diff,) = PYTHON, DIFF
    for number, script in enumerate([before, patched(before, diff), with_a_strategy]):
        exec(script, {"__name__": "__main__"})
        Path("net.pt").rename(f"{number}.pt")


@for_changes
@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_the_three_scripts_print_the_same_and_save_the_same_weights(
    place: str, tmp_path: Path
) -> None:
    said = printed(
        place, "import test_migrating_page; test_migrating_page.run_scripts()", tmp_path
    ).splitlines()
    assert said[0].startswith("loss of the last batch: ") and said == said[:1] * 3
    first, *others = [
        torch.load(tmp_path / f"{number}.pt", map_location="cpu") for number in range(3)
    ]
    assert list(first) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for weights in others:
        torch.testing.assert_close(weights, first)


# The table of lines


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return self(rows)


def table() -> list[list[list[str]]]:
    """Of each of its rows, the code in each cell."""
    _, _, below = TEXT.partition(
        "\n| with `nn.DataParallel` | with the drop-in | with a strategy "
        "|\n|---|---|---|\n"
    )
    rows = [
        line.strip("| ").split(" | ")
        for line in below.partition("\n\n")[0].splitlines()
    ]
    return [[_code(cell, row[0]) for cell in row] for row in rows]


def _code(cell: str, first: str) -> list[str]:
    return re.findall("`(.+?)`", first if cell.startswith("the same") else cell)


def names(column: int) -> dict[str, Any]:
    """What the lines of a column find."""
    net, rows, classes = (
        Net().cuda(),
        torch.ones(5, 4).cuda(),
        torch.zeros(5, dtype=torch.int64).cuda(),
    )
    found: dict[str, Any] = {
        **globals(),
        "net": net,
        "rows": rows,
        "classes": classes,
        "loader": [(rows, classes)],
    }
    found["saved"] = {
        f"module.{name}": value for name, value in net.state_dict().items()
    }
    if column < 2:
        found["model"] = model = (nn.DataParallel, torchstrategy.DataParallel)[column](
            net, [0, 1]
        )
        found["loss"] = F.cross_entropy(model(rows), classes)
    else:
        strategy = torchstrategy.CentralStorageStrategy(["cuda:0", "cuda:1"], "cuda:0")
        found["model"] = model = strategy.distribute_module(net)
        (batch,) = strategy.experimental_distribute_dataset([rows])
        found |= {
            "strategy": strategy,
            "batch": batch,
            "losses": strategy.run(lambda rows: rows[:, 0], args=(batch,)),
        }
    found["optimizer"] = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    return found


def run_table() -> None:
    """Runs each line in a column of its own sort of model."""
    for row in table():
        for column, code in enumerate(row):
            found = names(column)
            for line in code:
                exec(f"{line} pass" if line.endswith(":") else line, found)
    print("done")


@for_changes
@pytest.mark.slow
def test_each_line_of_the_table_runs(tmp_path: Path) -> None:
    assert len(table()) > 10 and all(row[0] and row[1] for row in table())
    program = "import test_migrating_page; test_migrating_page.run_table()"
    assert printed("with devices", program, tmp_path).endswith("done\n")


# Where links lead


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    links = re.findall(
        r"\]\((\S+?)\)",
        re.sub(r"^```.*?^```$", "", PAGES[page].read_text(), flags=re.M | re.S),
    )
    assert links
    for link in links:
        name, _, anchor = link.partition("#")
        there = PAGE.parent / name if name else PAGES[page]
        assert there.is_file() and (not anchor or anchor in anchors(there)), link


def test_other_pages_lead_to_the_page() -> None:
    for page in (ROOT / "README.md", PAGE.parent / "data_parallel.md"):
        assert f"({PAGE.relative_to(page.parent)})" in page.read_text()
