"""What a reader of the built site would trip over.

Links to nothing, files of other hosts, names of private modules.
"""

from __future__ import annotations

import ast
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

HOST = "site"
MODULES = ("", "nn", "testing", "experimental", "cluster_resolver", "compat/v1")


class Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.unresolved: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("script", "img", "iframe", "source", "video", "link"):
            self.loaded += [
                given[name] for name in ("src", "href", "srcset") if name in given
            ]
        elif tag == "autoref":
            self.unresolved.append(given.get("identifier", ""))


def faults_of(site: Path) -> list[str]:
    """One line for each fault of the site in this folder."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    faults = []
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        faults += [f"{name}: no object has the name {what}" for what in page.unresolved]
        faults += [
            f"{name} loads {url} from elsewhere"
            for url in page.loaded
            if _host(name, url) != HOST
        ]
        here = [
            url
            for url in page.links + page.loaded
            if _host(name, url) == HOST and name != "404.html"
        ]
        faults += [
            f"{name}: there is no {url}"
            for url in here
            if not _is_there(site, pages, name, url)
        ]
        if re.search(r"torchstrategy\._[a-z]", path.read_text()) and name.startswith(
            "reference/"
        ):
            faults.append(f"{name} names a private module")
    for style in sorted(site.rglob("*.css")):
        loaded = re.findall(
            r"(?:url\(|@import )['\"]?((?:https?:)?//[^)'\"]+)", style.read_text()
        )
        faults += [f"{style.name} loads {url} from elsewhere" for url in loaded]
    return faults


def _host(page: str, url: str) -> str:
    return urlparse(urljoin(f"http://{HOST}/{page}", url)).netloc


def _is_there(site: Path, pages: dict[Path, Page], page: str, url: str) -> bool:
    address, anchor = urldefrag(urljoin(f"http://{HOST}/{page}", url))
    there = site / unquote(urlparse(address).path).lstrip("/")
    there = there / "index.html" if there.is_dir() else there
    found = pages.get(there)
    return there.exists() and (
        not anchor or found is None or unquote(anchor) in found.anchors
    )


def public_names(root: Path) -> set[str]:
    """The full names of all that the modules for users export."""
    names = set()
    for module in MODULES:
        tree = ast.parse((root / "torchstrategy" / module / "__init__.py").read_text())
        for node in tree.body:
            if (
                isinstance(node, ast.Assign)
                and getattr(node.targets[0], "id", "") == "__all__"
            ):
                prefix = ".".join(filter(None, ("torchstrategy", *module.split("/"))))
                names |= {f"{prefix}.{name}" for name in ast.literal_eval(node.value)}
    return names - {"torchstrategy.compat"}


def described(site: Path) -> set[str]:
    """The anchors of the reference."""
    return {
        name
        for path in (site / "reference").rglob("*.html")
        for name in Page(path.read_text()).anchors
    }
