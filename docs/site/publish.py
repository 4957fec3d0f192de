"""Puts a built site beside those of earlier releases.

The folder is one that any web server can serve.
"""

from __future__ import annotations

import html
import json
import shutil
from pathlib import Path

FIRST_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>torchstrategy</title>
<meta http-equiv="refresh" content="0; url=latest/">
<a href="latest/">The documentation of the latest release</a>
"""

# What a reader without JavaScript has for the menu: the script of the theme makes it.
LIST = """<!doctype html>
<meta charset="utf-8">
<title>Releases of torchstrategy</title>
<h1>Releases of torchstrategy</h1>
<ul>
{items}
</ul>
"""
LINK_TO_LIST = (
    '<noscript><a class="releases" href="{up}releases.html">Releases</a></noscript>'
)

# The menu reads there which pages a release has. It puts the address of the release in
# place of this one.
SITEMAP = """<?xml version="1.0" encoding="UTF-8"?>
<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">
{urls}
</urlset>
"""
ANY_HOST = "https://site.invalid/"

NEWEST = " (latest)"  # how the menu marks the newest release


def publish(site: Path, folder: Path, release: str) -> None:
    """Copies the site to its minor release's folder, and to `latest` if it is the last.

    Each page of the site reads `versions.json`, and shows a menu with the releases that
    it lists. An entry leads to the same page of the other release if its `sitemap.xml`
    names it, and else to its home page.
    """
    minor = ".".join(release.split(".")[:2])
    listed = folder / "versions.json"
    entries = json.loads(listed.read_text()) if listed.exists() else []
    titles = {
        entry["version"]: entry["title"].removesuffix(NEWEST) for entry in entries
    }
    titles[minor] = release
    newest, *older = sorted(
        titles,
        key=lambda version: [int(part) for part in version.split(".")],
        reverse=True,
    )

    for name in [minor] + ["latest"] * (minor == newest):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(site, folder / name)
        link_to_list(folder / name)
    entries = [
        {"version": newest, "title": titles[newest] + NEWEST, "aliases": ["latest"]}
    ]
    entries += [
        {"version": version, "title": titles[version], "aliases": []}
        for version in older
    ]
    listed.write_text(json.dumps(entries, indent=2) + "\n")
    (folder / "index.html").write_text(FIRST_PAGE)
    items = [
        f'<li><a href="{entry["version"]}/">{html.escape(str(entry["title"]))}</a></li>'
        for entry in entries
    ]
    (folder / "releases.html").write_text(LIST.format(items="\n".join(items)))
    # For all releases: those of earlier programs have a sitemap without pages.
    for name in [*titles, "latest"]:
        write_sitemap(folder / name)


def link_to_list(release: Path) -> None:
    """Gives the header of each page a link to the list of releases.

    It is for readers without JavaScript.
    """
    for path in release.rglob("*.html"):
        up = "../" * len(path.relative_to(release).parts)
        text = path.read_text().replace(
            "</header>", LINK_TO_LIST.format(up=up) + "</header>", 1
        )
        path.write_text(text)


def write_sitemap(release: Path) -> None:
    """Names the pages of a release, which stand as folders in addresses."""
    pages = sorted(
        path.parent.relative_to(release).as_posix()
        for path in release.rglob("index.html")
    )
    addresses = [ANY_HOST if page == "." else f"{ANY_HOST}{page}/" for page in pages]
    urls = "\n".join(
        f"<url><loc>{html.escape(address)}</loc></url>" for address in addresses
    )
    (release / "sitemap.xml").write_text(SITEMAP.format(urls=urls))
