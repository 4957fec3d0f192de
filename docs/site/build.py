"""Builds the site in build/site: `python docs/site/build.py`.

It ends with 1 if anything is wrong.

The pages in docs/ are written to be read in the repository. For the site, examples
become pages, links between files become links between pages, and the drawings in
docs/pictures are put into the pages, where they follow the light or dark scheme.
Nothing is downloaded, neither by this program nor by a reader of the site.

Zensical builds it. `python docs/site/build.py mkdocs` builds the same pages with
MkDocs, if mkdocs-material is installed.

If the environment variable REPOSITORY_URL is set, every page has links to the
repository and to its own source. `--publish FOLDER` also puts the site into this
folder, beside those of earlier releases, with a menu of them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import checks
import publish

ROOT = Path(__file__).resolve().parents[2]
SOURCE, SITE = ROOT / "build" / "site-pages", ROOT / "build" / "site"
REPOSITORY = os.environ.get("REPOSITORY_URL", "").rstrip("/")
STYLE = Path(__file__).with_name("style.css")

# Files outside of docs/ and examples/ that are pages.
PAGES = {
    "README.md": "start.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "LICENSE": "license.md",
    "benchmarks/README.md": "benchmarks.md",
}

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
DRAWING = re.compile(
    r"^!\[[^\]]*\]\(((?:\.\./|docs/)*pictures/[^)]+\.svg)\)$", re.MULTILINE
)
COMMENT = re.compile(r"^<!--.*?-->\n\n", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
FRONT = re.compile(r"\A---\n(.*?)^---\n", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)


def page_of(path: Path) -> str:
    """Where on the site a file of the repository is."""
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    if path.suffix == ".py":
        return f"code/{name.removesuffix('.py')}.md"
    return name.removeprefix("docs/")


def converted(path: Path) -> tuple[str, set[Path]]:
    """The text of a page of the site, and the repository's files that it links to."""
    page, linked = page_of(path), set()
    up = "../" * page.count("/")

    def target(name: str) -> str | None:
        file = (path.parent / name).resolve()
        if not file.is_relative_to(ROOT) or not file.exists():
            sys.exit(f"{path.relative_to(ROOT)} links to {name}, which does not exist")
        if file.is_dir():
            return None
        linked.add(file)
        return f"{up}{page_of(file)}"

    def link(match: re.Match[str]) -> str:
        words, name, anchor = match[1], match[2], match[3] or ""
        if "://" in name:
            return match[0]
        there = target(name)
        return f"[{words}]({there}{anchor})" if there else words  # a folder has no page

    def image(match: re.Match[str]) -> str:
        return match[0].replace(f"({match[1]})", f"({target(match[1])})")

    def drawing(match: re.Match[str]) -> str:
        return (
            "<figure "
            f'class="drawing">{(path.parent / match[1]).read_text().strip()}</figure>'
        )

    parts = FENCED.split(COMMENT.sub("", path.read_text()))
    parts[::2] = [
        IMAGE.sub(image, LINK.sub(link, DRAWING.sub(drawing, part)))
        for part in parts[::2]
    ]
    return "".join(parts), linked


def finished(text: str, source: str, repository: str) -> str:
    """The text of a page with what the theme wants to know of it.

    It has the URL to install from, if there is one.
    """
    front = FRONT.match(text)
    settings = front[1] if front else ""
    text = text[front.end() :] if front else text
    if not settings and not re.search(r"^(?:##|:::) ", text, re.MULTILINE):
        # A page without sections gives the place of their list to its code and tables.
        settings = "hide: [toc]\n"
    if repository:
        text = text.replace("git+URL", f"git+{repository}")
        edit = "-/edit" if "gitlab" in repository else "edit"
        settings += f"edit: {repository}/{edit}/main/{source}\n"
    return f"---\n{settings}---\n{text}" if settings else text


def write_pages() -> None:
    """Writes all pages: those in docs/, the examples, and every file they link to."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    todo = {
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.py"),
        *(ROOT / name for name in PAGES),
    }
    done: set[Path] = set()
    while todo := todo - done:
        for path in sorted(todo):
            page = SOURCE / (page_of(path))
            page.parent.mkdir(parents=True, exist_ok=True)
            text = ""
            if path.suffix == ".md":
                text, linked = converted(path)
                todo = todo | linked
            elif path.suffix == ".py":
                text = f"# {path.name}\n\n```python\n{path.read_text()}```\n"
            elif path.name == "LICENSE":
                text = f"# Licence\n\n```text\n{path.read_text()}```\n"
            else:
                shutil.copy(path, page)
            if text:
                page.write_text(
                    finished(text, path.relative_to(ROOT).as_posix(), REPOSITORY)
                )
            done.add(path)
    shutil.copy(STYLE, SOURCE)


def polish(text: str) -> str:
    """The HTML of a page with what neither Markdown nor the theme can say."""
    # A type in a signature shows on hover where its class is, and that is private: the
    # name of the class is left.
    text = re.sub(r'title="torchstrategy(?:\.\w+)*\.(?=[A-Z]|\w+")', 'title="', text)
    # On a phone, the name of a class may go to the next line after a dot, and not
    # within a word.
    text = re.sub(
        r'(?<=doc-class-name">)[\w.]+',
        lambda name: name[0].replace(".", ".<wbr>"),
        text,
    )
    return TABLE.sub(label_cells, text)


def label_cells(table: re.Match[str]) -> str:
    """Names the column in each cell.

    On a phone, a row with many columns becomes lines, one below the other.
    """
    names = [
        re.sub(r"<[^>]*>", "", name).strip()
        for name in re.findall(r"<th[^>]*>(.*?)</th>", table[0], re.DOTALL)
    ]
    rows = table[0].split("<tr>")
    for at, row in enumerate(rows):
        columns = iter(names)
        rows[at] = re.sub(
            r"<td",
            lambda _, columns=columns: f'<td data-column="{next(columns, "")}"',
            row,
        )  # type: ignore[misc]
    return "<tr>".join(rows)


def version() -> str:
    """That of the installed package: the site is tested where its sources are not."""
    return importlib.metadata.version("torchstrategy")


def settings_of_the_site(versions: bool) -> dict[str, str]:
    """The environment for mkdocs.yml: the name with its version.

    It also says whether there is a menu of releases.
    """
    given = {
        "SITE_NAME": f"torchstrategy {version()}",
        "SITE_VERSIONS": "mike" if versions else "none",
    }
    return {**os.environ, **given}


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the site in build/site.")
    parser.add_argument(
        "tool", nargs="?", default="zensical", choices=["zensical", "mkdocs"]
    )
    parser.add_argument(
        "--publish",
        type=Path,
        metavar="FOLDER",
        help="put it beside the sites of earlier releases",
    )
    options = parser.parse_args()
    start = time.perf_counter()
    write_pages()
    shutil.rmtree(SITE, ignore_errors=True)
    command = [
        str(Path(sys.executable).with_name(options.tool)),
        "build",
        "--strict",
        "-f",
        "mkdocs.yml",
    ]
    settings = settings_of_the_site(versions=options.publish is not None)
    done = subprocess.run(
        command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False
    )
    printed = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    print(printed)
    if done.returncode:
        sys.exit(done.returncode)
    for path in SITE.rglob("*.html"):
        path.write_text(polish(path.read_text()))
    wrong = [
        line
        for line in printed.splitlines()
        if re.match(r"griffe:|warning|error", line, re.IGNORECASE)
    ]
    wrong += checks.faults_of(SITE)
    wrong += [
        f"the reference lacks {name}"
        for name in sorted(checks.public_names(ROOT) - checks.described(SITE))
    ]
    print("\n".join(wrong))
    print(
        f"{len(list(SITE.rglob('*.html')))} pages in {time.perf_counter() - start:.0f} "
        f"s, {len(wrong)} faults"
    )
    if options.publish and not wrong:
        publish.publish(SITE, options.publish, version())
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
