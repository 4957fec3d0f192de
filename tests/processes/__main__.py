"""The interpreter that forks itself for every program that it is sent.

It gets them line by line, and answers with exit codes.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import runpy
import sys
import types
import warnings
from typing import Any

import pytest  # noqa: F401
import torch._dynamo  # noqa: F401  # which every optimizer imports


def sent() -> dict[str, Any] | None:
    """In a forked child, the program that it is to run.

    In this process, nothing, when no more are sent.
    """
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def settle(
    folder: str, environment: dict[str, str], timeout: int, outputs: list[str]
) -> None:
    """Makes this process one that was started in this folder and environment.

    It has no input.
    """
    for number, path in enumerate([os.devnull, *outputs]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    faulthandler.dump_traceback_later(timeout, exit=True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))


def run(arguments: list[str]) -> None:
    """Does what `python *arguments` does."""
    if arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    kind, *rest = arguments
    if kind == "-c":
        program, *rest = rest
        sys.argv, sys.path[:0] = ["-c", *rest], [""]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(program, vars(main))
    elif kind == "-m":
        sys.argv, sys.path[:0] = rest, [os.getcwd()]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = arguments, [os.path.dirname(kind)]
        runpy.run_path(kind, run_name="__main__")


del sys.path[0]  # this folder
gc.collect()
gc.freeze()  # so that children neither look at what is imported nor copy it
program = sent()
if program is not None:
    arguments = program.pop("arguments")
    settle(**program)
    run(arguments)
