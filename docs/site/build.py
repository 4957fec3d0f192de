"""Builds the site in build/site: `python docs/site/build.py`. It ends with 1 if anything is wrong.

The pages in docs/ are written to be read in the repository. For the site, examples become pages, links between files
become links between pages, and the drawings in docs/pictures are put into the pages, where they follow the light or
dark scheme. Nothing is downloaded, neither by this program nor by a reader of the site.

Zensical builds it. `python docs/site/build.py mkdocs` builds the same pages with MkDocs, if mkdocs-material is
installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import checks

ROOT = Path(__file__).resolve().parents[2]
SOURCE, SITE = ROOT / "build" / "site-pages", ROOT / "build" / "site"
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
DRAWING = re.compile(r"^!\[[^\]]*\]\(((?:\.\./|docs/)*pictures/[^)]+\.svg)\)$", re.MULTILINE)
COMMENT = re.compile(r"^<!--.*?-->\n\n", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def page_of(path: Path) -> str:
    """Where on the site a file of the repository is."""
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    if path.suffix == ".py":
        return f"code/{name.removesuffix('.py')}.md"
    return name.removeprefix("docs/")


def converted(path: Path) -> tuple[str, set[Path]]:
    """The text of a page of the site, and the files of the repository to which it links."""
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
        return f'<figure class="drawing">{(path.parent / match[1]).read_text().strip()}</figure>'

    parts = FENCED.split(COMMENT.sub("", path.read_text()))
    parts[::2] = [IMAGE.sub(image, LINK.sub(link, DRAWING.sub(drawing, part))) for part in parts[::2]]
    return "".join(parts), linked


def write_pages() -> None:
    """Writes all pages: those in docs/, the examples, and every file to which one of them links."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    todo = {*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py"), *(ROOT / name for name in PAGES)}
    done: set[Path] = set()
    while todo := todo - done:
        for path in sorted(todo):
            page = SOURCE / (page_of(path))
            page.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                text, linked = converted(path)
                page.write_text(text)
                todo = todo | linked
            elif path.suffix == ".py":
                page.write_text(f"# {path.name}\n\n```python\n{path.read_text()}```\n")
            elif path.name == "LICENSE":
                page.write_text(f"# Licence\n\n```text\n{path.read_text()}```\n")
            else:
                shutil.copy(path, page)
            done.add(path)
    shutil.copy(STYLE, SOURCE)


def hide_private_modules() -> None:
    """A type in a signature shows on hover where its class is, and that is private: the name of the class is left."""
    for path in (SITE / "reference").rglob("*.html"):
        path.write_text(re.sub(r'title="torchstrategy(?:\.\w+)*\.(?=[A-Z]|\w+")', 'title="', path.read_text()))


def main() -> None:
    start = time.perf_counter()
    write_pages()
    shutil.rmtree(SITE, ignore_errors=True)
    tool = Path(sys.executable).with_name(sys.argv[1] if sys.argv[1:] else "zensical")
    command = [str(tool), "build", "--strict", "-f", "mkdocs.yml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    printed = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    print(printed)
    if done.returncode:
        sys.exit(done.returncode)
    hide_private_modules()
    wrong = [line for line in printed.splitlines() if re.match(r"griffe:|warning|error", line, re.IGNORECASE)]
    wrong += checks.faults_of(SITE)
    wrong += [f"the reference lacks {name}" for name in sorted(checks.public_names(ROOT) - checks.described(SITE))]
    print("\n".join(wrong))
    print(f"{len(list(SITE.rglob('*.html')))} pages in {time.perf_counter() - start:.0f} s, {len(wrong)} faults")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
