"""The pages of the site say what is so, and its checks find what they are for.

`.ci/run` builds it.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy
from conditions import for_changes, for_releases
from processes import NO_ACCELERATOR, python

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS / "site")
    return importlib.import_module("checks")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS / "site")
    return importlib.import_module("build")


# The home page


def test_the_diff_of_the_home_page_makes_a_program_that_learns_the_same() -> None:
    diff = re.search(
        r"^```diff\n(.*?)^```$",
        (DOCS / "index.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert diff is not None
    lines = diff[1].splitlines()
    plain, under_strategy = (
        "\n".join(line[2:] for line in lines if line[:1] in ("", " ", sign))
        for sign in "-+"
    )
    expected, found = (
        weights_after(plain),
        weights_after(under_strategy.replace("()  #", '(["cpu"] * 4)  #')),
    )
    assert "strategy" not in plain
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def weights_after(program: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    rows = torch.utils.data.TensorDataset(
        torch.randn(25, 4, dtype=torch.float64), torch.arange(25) % 3
    )
    names: dict[str, Any] = {"torch": torch, "torchstrategy": torchstrategy, "F": F}
    names["Net"] = lambda: nn.Linear(4, 3, dtype=torch.float64)
    names["loader"] = torch.utils.data.DataLoader(rows, batch_size=10)
    exec(program, names)
    state: dict[str, torch.Tensor] = names["model"].state_dict()
    return state


def tabs() -> dict[str, str]:
    """The tabs of the home page by their titles."""
    found = re.findall(
        r'^=== "(.+?)"\n\n((?:    .*\n|\n)+)',
        (DOCS / "index.md").read_text(),
        re.MULTILINE,
    )
    return {title: textwrap.dedent(text) for title, text in found}


def test_each_tab_of_the_home_page_ends_in_a_command() -> None:
    assert list(tabs()) == ["One machine", "torchrun", "Tests on a laptop"]
    for text in tabs().values():
        assert re.search(
            r"^```shell\n(?:python|torchrun|pytest) .*\n```\s*$", text, re.MULTILINE
        )


@for_changes
@pytest.mark.slow
def test_the_test_on_the_home_page_passes(tmp_path: Path) -> None:
    (test,) = re.findall(
        r"^```py\n# test_train.py\n(.*?)^```$",
        tabs()["Tests on a laptop"],
        re.MULTILINE | re.DOTALL,
    )
    (tmp_path / "test_train.py").write_text(test)
    done = python(
        "-m", "pytest", "--simulate-devices=2", folder=tmp_path, **NO_ACCELERATOR
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


# Guides


@pytest.mark.parametrize(
    "page", sorted(DOCS.glob("migrating-from-*.md")), ids=lambda page: page.stem
)
def test_a_guide_has_numbered_steps_and_ends_in_a_command(page: Path) -> None:
    text = page.read_text()
    numbers = [int(number) for number in re.findall(r"^(\d)\. ", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= 5
    *_, last = re.findall(r"^ *```(\w+)$", text, re.MULTILINE)
    assert last == "shell"


def test_the_steps_of_the_guide_for_ddp_are_lines_of_the_program_that_is_tested() -> (
    None
):
    """test_several_machines_page.py trains the program, and runs its table.

    It trains the program before and after, and runs each line of the table.
    """
    tested = (DOCS / "several-machines.md").read_text()
    for line in re.findall(
        r"^ *[-+](\S.*)$", (DOCS / "migrating-from-ddp.md").read_text(), re.MULTILINE
    ):
        words = (
            line.strip()
            .replace("Net().to(device)", "model")
            .replace("    train_step(batch)", "")
        )
        assert (
            words in tested
            or words.replace("model", "net") in tested
            or "Net()" in words
            or "Adam" in words
        ), line


# Recipes: tests/pages/test_readme.py runs them


# Every page is found, and looks as it was written


def test_what_belongs_to_an_item_of_a_list_is_indented_by_four() -> None:
    """With three, the site ended the list at each program.

    The steps of the guide for DDP were 1, 1, 1, 1, 1, 2, 3.
    """
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]:
        text = re.sub(
            r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL
        )
        parts = re.findall(r"(?<=\n\n) {1,3}\S.*", text)
        assert parts == [], page


def test_every_page_of_the_documentation_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    examples = [
        f"code/examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.py")
    ]
    assert [
        page
        for page in pages + examples
        if not re.search(rf"[ \[]{re.escape(page)}\b", menu)
    ] == []


def test_every_public_name_has_a_place_in_the_reference(checks: ModuleType) -> None:
    if not (ROOT / "torchstrategy").exists():
        pytest.skip(
            "the sources are not here: .ci/run compares the names with the built site"
        )
    pages = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    placed = set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))
    lacking = [
        name
        for name in checks.public_names(ROOT)
        if name not in placed and name.rpartition(".")[0] not in placed
    ]
    assert lacking == []


# The checks


def site_with(folder: Path, body: str, name: str = "page/index.html") -> Path:
    for file, text in {
        "index.html": '<p id="here"></p>',
        "reference/index.html": '<p id="x"></p>',
        name: body,
    }.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="../nowhere/">', "page/index.html: there is no ../nowhere/"),
        ('<a href="../#nothing">', "page/index.html: there is no ../#nothing"),
        ('<img src="picture.png">', "page/index.html: there is no picture.png"),
        (
            '<script src="https://example.org/a.js">',
            "page/index.html loads https://example.org/a.js from elsewhere",
        ),
        (
            '<link href="//example.org/a.css">',
            "page/index.html loads //example.org/a.css from elsewhere",
        ),
        (
            '<autoref identifier="torch.Nothing">',
            "page/index.html: no object has the name torch.Nothing",
        ),
    ],
)
def test_a_fault_of_a_page_is_found(
    checks: ModuleType, tmp_path: Path, body: str, fault: str
) -> None:
    assert checks.faults_of(site_with(tmp_path, body)) == [fault]


# The repository, the version and the releases

REPOSITORY = "https://example.org/somebody/torchstrategy"


def test_a_page_says_where_it_is_edited_if_the_repository_is_known(
    build: ModuleType,
) -> None:
    text = "---\nhide: [toc]\n---\n# Title\n\npip install git+URL\n"
    edited = build.finished(text, "README.md", REPOSITORY)
    assert edited == (
        f"---\nhide: [toc]\nedit: {REPOSITORY}/edit/main/README.md\n---\n# "
        f"Title\n\npip install git+{REPOSITORY}\n"
    )
    assert build.finished(text, "README.md", "") == text


def rendered(folder: Path, build: ModuleType, repository: str) -> str:
    """The HTML of one page, with the site's menus and plugins that stand alone.

    These need nothing else.
    """
    pytest.importorskip("zensical")
    program = Path(sys.executable).with_name("zensical")
    settings = (ROOT / "mkdocs.yml").read_text()
    settings = re.sub(
        r"^(?:nav|plugins):\n(?: .*\n)+", "", settings, flags=re.MULTILINE
    )
    (folder / "mkdocs.yml").write_text(settings)
    shutil.copytree(DOCS / "site" / "theme", folder / "docs" / "site" / "theme")
    page = folder / "build" / "site-pages" / "index.md"
    page.parent.mkdir(parents=True)
    page.write_text(build.finished("# Title\n", "docs/index.md", repository))
    environment = build.settings_of_the_site(versions=False)
    environment.pop("REPOSITORY_URL", None)
    if repository:
        environment["REPOSITORY_URL"] = repository
    command = [str(program), "build", "-f", "mkdocs.yml"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "build" / "site" / "index.html").read_text()


@for_releases
@pytest.mark.parametrize("repository", ["", REPOSITORY])
def test_the_top_of_a_page_has_the_version_and_the_repository(
    build: ModuleType, tmp_path: Path, repository: str
) -> None:
    page = rendered(tmp_path, build, repository)
    header = page[page.index("<header") : page.index("</header>")]
    assert f"torchstrategy {build.version()}" in header
    assert (f'href="{REPOSITORY}"' in header) == bool(repository)
    assert (f'href="{REPOSITORY}/edit/main/docs/index.md"' in page) == bool(repository)
    # The theme would ask the host for its stars.
    assert 'data-md-component="source"' not in page


@for_releases
def test_a_release_is_put_beside_the_earlier_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(DOCS / "site")
    publish = importlib.import_module("publish").publish
    site, folder = tmp_path / "site", tmp_path / "public"
    site.mkdir()
    for release in ("0.9.0", "0.10.0", "0.9.1"):
        (site / "index.html").write_text(release)
        publish(site, folder, release)

    assert json.loads((folder / "versions.json").read_text()) == [
        {"version": "0.10", "title": "0.10.0 (latest)", "aliases": ["latest"]},
        {"version": "0.9", "title": "0.9.1", "aliases": []},
    ]
    texts = {
        name: (folder / name / "index.html").read_text()
        for name in ("0.9", "0.10", "latest")
    }
    assert texts == {"0.9": "0.9.1", "0.10": "0.10.0", "latest": "0.10.0"}
    assert "url=latest/" in (folder / "index.html").read_text()
