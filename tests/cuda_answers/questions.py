r"""The same questions to a GPU and to simulated devices.

Call it so: python tests/cuda_answers/questions.py OUT.json.

On a machine with a GPU, the answers are those of CUDA: `h100.json` has them. Under
`--as-cuda`, they are those of the simulation, and `test_answers.py` compares the two:

    python -m torchstrategy.testing.run --as-cuda \
        tests/cuda_answers/questions.py OUT.json

A question is code in `tables/*.txt`, under a line `== name`. The answer is what its
last expression gives, or the error that it raises, as a text without what must differ:
addresses, names of devices, amounts of memory. A failure of CUDA can end a process, so
`--resume` goes on after the last answer.
"""

from __future__ import annotations

import argparse
import ast
import collections
import copy
import faulthandler
import functools
import gc
import io
import itertools
import json
import linecache
import math
import os
import pickle
import re
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TABLES = Path(__file__).resolve().parent / "tables"
SECONDS = 100  # that a question may take, on a slow machine
SECONDS_IN_C = 200  # after which the process ends, where no signal is looked at
LONGEST = 120  # characters of an error's first line
DEPTH = 6  # of containers in an answer
FEW = 12  # elements of a tensor whose numbers are part of the answer


class TooLong(BaseException):
    """A question has taken too long."""


class Answer:
    """The text of an answer, as a part of another one."""

    def __init__(self, text: str) -> None:
        self.text = text


# An answer as text


def name_of(cls: type) -> str:
    return (
        cls.__qualname__
        if cls.__module__ == "builtins"
        else f"{cls.__module__}.{cls.__qualname__}"
    )


def number(value: complex) -> str:
    if isinstance(value, complex):
        return f"({number(value.real)}+{number(value.imag)}j)"
    if math.isnan(value) or math.isinf(value):
        return repr(value)
    text = f"{value:.4g}"
    if text in ("-0", "0"):
        return "0.0"
    return text if "." in text or "e" in text else text + ".0"


def values(tensor: torch.Tensor) -> str:
    """The numbers of a tensor, with four digits."""
    try:
        tensor = tensor.detach()
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            tensor = tensor.float()
        listed = tensor.cpu().resolve_conj().resolve_neg().tolist()
    except Exception as error:
        return f"<no values: {type(error).__name__}>"

    def walk(value: Any) -> str:
        if isinstance(value, list):
            return "[" + ",".join(map(walk, value)) + "]"
        return number(value) if isinstance(value, (float, complex)) else repr(value)

    return walk(listed)


def text_of_tensor(tensor: torch.Tensor) -> str:
    is_dense = tensor.layout is torch.strided
    parts = [
        str(tensor.dtype).removeprefix("torch."),
        str(list(tensor.shape)),
        str(tensor.device),
    ]
    if type(tensor) is not torch.Tensor:
        parts.append("type=" + name_of(type(tensor)))
    parts.append(
        "stride" + str(list(tensor.stride())) if is_dense else str(tensor.layout)
    )
    if tensor.requires_grad:
        parts.append("grad")
    if tensor.is_cpu and is_dense and tensor.is_pinned():
        parts.append("pinned")
    if tensor.numel() <= FEW:
        parts.append(values(tensor if is_dense else tensor.to_dense()))
    return "tensor(" + " ".join(parts) + ")"


def text_of(value: Any, depth: int = 0) -> str:
    if depth > DEPTH:
        return "..."
    inner = functools.partial(text_of, depth=depth + 1)
    if isinstance(value, torch.Tensor):
        return text_of_tensor(value)
    if isinstance(value, np.ndarray):
        return f"ndarray({value.dtype} {list(value.shape)})"
    if isinstance(value, np.generic):
        return f"np.{value.dtype}({value!s})"
    if value is None or isinstance(
        value, (bool, int, torch.dtype, torch.device, torch.memory_format, torch.layout)
    ):
        return repr(value)
    if isinstance(value, Answer):
        return value.text
    if isinstance(value, (float, complex)):
        return number(value)
    if isinstance(value, str):
        return repr(without_addresses(value)[:200])
    if isinstance(value, bytes):
        return f"bytes({len(value)})"
    if isinstance(value, type):
        return name_of(value)
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{inner(key)}: {inner(each)}" for key, each in value.items())
            + "}"
        )
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(inner, value))) + "}"
    if isinstance(value, (list, tuple)):
        first, last = "[]" if isinstance(value, list) else "()"
        kind = "" if type(value) in (list, tuple) else name_of(type(value))
        return kind + first + ", ".join(map(inner, value)) + last
    return f"<{name_of(type(value))}>"


def without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+", "ADDR", text)


def text_of_error(error: Exception) -> str:
    first = without_addresses(str(error)).strip().split("\n", 1)[0]
    return f"raises {name_of(type(error))}: {first[:LONGEST]}"


# What the tables use


def t(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Answer:
    """What a call returns or raises."""
    try:
        return Answer(text_of(function(*args, **kwargs)))
    except Exception as error:
        return Answer(text_of_error(error))


def P(*functions: Callable[[], Any]) -> list[Answer]:
    return [t(function) for function in functions]


def D(**functions: Callable[[], Any]) -> dict[str, Answer]:
    return {name: t(function) for name, function in functions.items()}


def rnd(
    *shape: int, device: str = "cuda", requires_grad: bool = False, **options: Any
) -> torch.Tensor:
    """Random numbers that are the same everywhere: they are drawn on the CPU."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return (
        torch.randn(*shape, generator=generator)
        .to(device, **options)
        .requires_grad_(requires_grad)
    )


def det(make: Callable[[], Any], run: Callable[..., Any]) -> Answer:
    """The answer under deterministic algorithms."""
    inputs = make()
    torch.use_deterministic_algorithms(True)
    try:
        return t(lambda: run(*inputs))
    finally:
        torch.use_deterministic_algorithms(False)


def amp(dtype: torch.dtype, **functions: Callable[[], Any]) -> dict[str, Answer]:
    """The dtypes that functions return in a block of autocast."""

    def dtypes(function: Callable[[], Any]) -> Any:
        result = function()
        return (
            result.dtype
            if isinstance(result, torch.Tensor)
            else [each.dtype for each in result]
        )

    with torch.autocast("cuda", dtype):
        return {name: t(dtypes, function) for name, function in functions.items()}


def init_group(backend: str | None) -> None:
    folder = tempfile.mkdtemp()
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=0, world_size=1
    )


NAMES: dict[str, Any] = {
    **{
        part.__name__: part
        for part in (
            collections,
            copy,
            functools,
            gc,
            io,
            itertools,
            math,
            os,
            pickle,
            re,
        )
    },
    **{part.__name__: part for part in (tempfile, threading, time, warnings, torch)},
    **{
        part.__name__: part
        for part in (t, P, D, rnd, det, amp, init_group, values, name_of, Path, Answer)
    },
    **{"np": np, "dist": dist, "F": F, "nn": nn, "Outcome": Answer},
}


# Asking


def questions() -> dict[str, str]:
    """The code of each question, by its name."""
    found: dict[str, str] = {}
    name = ""
    for path in sorted(TABLES.glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.startswith("== "):
                name = line[3:].strip()
                assert name not in found, name
                found[name] = ""
            else:
                found[name] += line
    return found


def run(name: str, code: str) -> str:
    """The text of what the last expression gives."""
    file = f"<{name}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    lines = ast.parse(code, file)
    last = lines.body[-1] if lines.body else None
    space = {**NAMES, "__name__": "question_" + re.sub(r"\W", "_", name)}
    if not isinstance(last, ast.Expr):
        exec(compile(lines, file, "exec"), space)
        return "None"
    lines.body.pop()
    exec(compile(lines, file, "exec"), space)
    return text_of(eval(compile(ast.Expression(last.value), file, "eval"), space))


def ask(name: str, code: str) -> str:
    """The answer to a question, and what was warned of."""
    signal.alarm(SECONDS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            torch.manual_seed(0)
            answer = run(name, code)
        except TooLong:
            answer = f"longer than {SECONDS} s"
        except Exception as error:
            answer = text_of_error(error)
        finally:
            signal.alarm(0)
    said = {
        f"{name_of(one.category)}: {without_addresses(str(one.message)).strip()[:80]}"
        for one in caught
    }
    lines = [
        line.replace("\n", " ")
        for line in sorted(said)
        if not line.startswith("ResourceWarning")
    ]
    return answer + "".join(f"\n  warns {line}" for line in lines)


def restore() -> None:
    """Brings back what questions may have set."""
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.cuda.set_device(0)
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cuda", False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.benchmark = False
    torch.cuda.synchronize()
    gc.collect()


def end_question(signum: int, frame: object) -> None:
    raise TooLong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="where the answers go")
    parser.add_argument(
        "--only", default="", help="those questions whose names have this word"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the answers that are there, and ask the others",
    )
    told = parser.parse_args()
    signal.signal(signal.SIGALRM, end_question)
    torch.set_warn_always(True)
    answers = (
        json.loads(told.out.read_text()) if told.resume and told.out.exists() else {}
    )
    faulthandler.enable()
    gc.collect()
    gc.freeze()  # what was imported is not looked through after each question
    for name, code in questions().items():
        if told.only not in name or name in answers:
            continue
        answers[name] = "not answered: the program ended here"
        told.out.write_text(json.dumps(answers, indent=1))
        faulthandler.dump_traceback_later(SECONDS_IN_C, exit=True)
        answers[name] = ask(name, code)
        try:
            restore()
        except Exception as error:
            answers[name] += "\n  and after it " + text_of_error(error)
        faulthandler.cancel_dump_traceback_later()
        told.out.write_text(json.dumps(answers, indent=1))


if __name__ == "__main__":
    main()
