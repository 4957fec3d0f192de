"""All benchmarks, in one table.

    python benchmarks [--rounds N] [--json FILE] [--simulated GPU] [names...]

Each script runs in an interpreter of its own: none meets what another one has left,
such as simulated devices. What a script cannot measure here it says, and leaves out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from contest import HEADER, PREDICTED, Row, arguments, line, write

SCRIPTS = (
    "one_device",
    "replicas",
    "replication",
    "reduction",
    "prefetch",
    "processes",
    "workers",
    "memory",
    "accelerator",
    "simulated",
    "ranks",
    "exposed",
    "waits",
    "figures",
)


def main() -> int:
    """Runs the scripts that are named, or all of them. Returns how many failed."""
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "names", nargs="*", help=f"some of {', '.join(SCRIPTS)}; all, if none is named"
    )
    parser.add_argument(
        "--simulated",
        metavar="GPU",
        help="predict the contests of `accelerator` for a GPU: H100",
    )
    told = parser.parse_args()
    if told.simulated:
        told.names = ["accelerator"]
    if unknown := set(told.names) - set(SCRIPTS):
        parser.error(
            f"there is no {', '.join(sorted(unknown))}; there are {', '.join(SCRIPTS)}"
        )
    where, rows, failed = "", [], 0
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        for name in told.names or SCRIPTS:
            script = str(Path(__file__).with_name(f"{name}.py"))
            command = [
                sys.executable,
                script,
                "--rounds",
                str(told.rounds),
                "--json",
                str(figures),
            ]
            command += ["--simulated", told.simulated] if told.simulated else []
            if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
                print(f"{name}: failed", file=sys.stderr, flush=True)
                failed += 1
                continue
            if not figures.exists():
                continue  # it has said why
            found = json.loads(figures.read_text())
            figures.unlink()
            if not where:
                where = found["machine"]
                print(f"{where}\n\n{PREDICTED if told.simulated else HEADER}")
            rows += [{"script": name, **row} for row in found["rows"]]
            print("\n".join(line(Row(**row)) for row in found["rows"]), flush=True)
    if told.json:
        write(told.json, where, rows)
    return failed


if __name__ == "__main__":
    sys.exit(main())
