"""Looks at the built site in a browser: weak colours, and what is wider than a phone.

`python docs/site/look.py`.

It opens every page in Chromium, 400 and 1280 pixels wide, in the light and the dark
scheme. It prints one line for each fault, and ends with 1 if there is one. Without
Chromium it says so and ends with 0.
"""

from __future__ import annotations

import functools
import http.server
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
SCRIPT = Path(__file__).with_name("look.js")
# The browser opens pages of our own, so it needs no sandbox. It asks no other host.
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",  # without it, the browser ends when the page is loaded
    "--window-size=1400,900",
)
LIMIT = 900.0  # seconds for a whole site on a busy machine


def browser() -> str | None:
    """The command that starts Chromium. None: it is not installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def faults_of(site: Path, command: str) -> list[str]:
    """One line for each fault that the browser sees on a page in this folder."""
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    script = f"const PAGES = {json.dumps(pages)};\n{SCRIPT.read_text()}"
    faults: list[str] = answer_of(script, site, command)
    return faults


def answer_of(script: str, site: Path, command: str) -> Any:
    """What a script passes to `answer` in its own page, beside the site's folder."""
    answers: queue.Queue[Any] = queue.Queue()
    answer = (
        "const answer = what => fetch('/look/', { method: 'POST', body: "
        "JSON.stringify(what) });"
    )
    page = (
        "<!doctype html><meta "
        f"charset='utf-8'><body><script>{answer}\n{script}</script>"
    ).encode()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/look/":
                self.reply(page)
            else:
                super().do_GET()

        def do_POST(self) -> None:
            answers.put(
                json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            )
            self.reply(b"")

        def reply(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing of each file."""

    handler = functools.partial(Handler, directory=str(site))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/look/"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started = subprocess.Popen(
            [command, *OPTIONS, f"--user-data-dir={profile}", address], **quiet
        )
        try:
            return answers.get(timeout=LIMIT)
        except queue.Empty:
            sys.exit(f"{command} has not looked at all pages within {LIMIT:.0f} s")
        finally:
            started.terminate()
            started.wait()
            server.shutdown()


def main() -> None:
    command = browser()
    if command is None:
        print("Chromium is not installed: nobody has looked at the pages")
        return
    faults = faults_of(SITE, command)
    print("\n".join([*faults, f"{len(faults)} faults in {command}"]))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
