"""Puts a built site beside those of earlier releases, in a folder that any web server can serve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

FIRST_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>torchstrategy</title>
<meta http-equiv="refresh" content="0; url=latest/">
<a href="latest/">The documentation of the latest release</a>
"""

NEWEST = " (latest)"  # how the menu marks the newest release


def publish(site: Path, folder: Path, release: str) -> None:
    """Copies the site to a folder of its minor release, and to `latest` if no later one is there.

    Each page of the site reads `versions.json`, and shows a menu with the releases that it lists.
    """
    minor = ".".join(release.split(".")[:2])
    listed = folder / "versions.json"
    entries = json.loads(listed.read_text()) if listed.exists() else []
    titles = {entry["version"]: entry["title"].removesuffix(NEWEST) for entry in entries}
    titles[minor] = release
    newest, *older = sorted(titles, key=lambda version: [int(part) for part in version.split(".")], reverse=True)

    for name in [minor] + ["latest"] * (minor == newest):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(site, folder / name)
    entries = [{"version": newest, "title": titles[newest] + NEWEST, "aliases": ["latest"]}]
    entries += [{"version": version, "title": titles[version], "aliases": []} for version in older]
    listed.write_text(json.dumps(entries, indent=2) + "\n")
    (folder / "index.html").write_text(FIRST_PAGE)
