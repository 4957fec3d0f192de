"""What Python has once for a process: each rank has its own.

The caller finds its own again.
"""

from __future__ import annotations

import asyncio
import builtins
import csv
import gc
import io
import locale
import logging
import multiprocessing
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from torchstrategy._base.torch_internals import dispatch_modes, function_modes
from torchstrategy.testing import lint_training, run_ranks
from torchstrategy.testing._ranks.torch_settings import (
    NAMES,
    put_settings,
    take_settings,
)

python: Any = sys
private: Any = torch._C
modules: Any = torch.nn.modules.module
sharing: Any = torch.multiprocessing
frozen: Any = torch.backends.flags_frozen


def _set_print(rank: int) -> Callable[[], Any]:
    builtins.print = lambda *args: rank
    return lambda: print()


def _set_name(rank: int) -> Callable[[], Any]:
    vars(builtins)["only_here"] = rank
    return lambda: vars(builtins)["only_here"]


def _set_environment(rank: int) -> Callable[[], Any]:
    """A rank replaced `os.environ` for all, and the run ended with a KeyError."""
    os.environ["OF_A_RANK"] = str(rank)
    if rank == 0:
        vars(os)["environ"] = dict(os.environ, OF_ONE="1")

    def ask() -> int:
        assert ("OF_ONE" in os.environ) is (rank == 0) and os.environ["RANK"] == str(
            rank
        )
        return int(os.environ["OF_A_RANK"])

    return ask


def _set_arguments(rank: int) -> Callable[[], Any]:
    sys.argv.append(f"of rank {rank}")
    return lambda: int(sys.argv[-1][-1]) + 100 * sys.argv.count(f"of rank {1 - rank}")


def _set_output(rank: int) -> Callable[[], Any]:
    sys.stdout = io.StringIO()

    def ask() -> int:
        sys.stdout.truncate(sys.stdout.seek(0))
        print(rank)
        return int(python.stdout.getvalue())

    return ask


def _set_hook(rank: int) -> Callable[[], Any]:
    python.excepthook = lambda *error: rank
    return lambda: python.excepthook()


def _set_warnings(rank: int) -> Callable[[], Any]:
    shown: list[str] = []
    names: Any = warnings
    names.showwarning = lambda message, *where: shown.append(str(message))
    warnings.simplefilter("always" if rank else "ignore")

    def ask() -> int:
        shown.clear()
        warnings.warn("seen by rank 1 alone", stacklevel=1)
        return len(shown)

    return ask


def _set_logger(rank: int) -> Callable[[], Any]:
    logger, stream = logging.getLogger("of.a.rank"), io.StringIO()
    logger.addHandler(logging.StreamHandler(stream))
    logger.propagate = False

    def ask() -> int:
        stream.truncate(stream.seek(0))
        logger.error(rank)
        return int(stream.getvalue())

    return ask


def _set_level(rank: int) -> Callable[[], Any]:
    logging.getLogger("of.a.rank").setLevel(10 + rank)
    return lambda: logging.getLogger("of.a.rank").level - 10


def _set_all_loggers(rank: int) -> Callable[[], Any]:
    logging.disable(logging.CRITICAL if rank else logging.NOTSET)
    return lambda: int(
        not logging.getLogger("of.a.rank").isEnabledFor(logging.CRITICAL)
    )


def _set_words_of_loggers(rank: int) -> Callable[[], Any]:
    class _Logger(logging.Logger):
        of = rank

    factory: Any = logging.getLogRecordFactory()

    def make(*args: Any, **options: Any) -> logging.LogRecord:
        record: logging.LogRecord = factory(*args, **options)
        record.of = rank
        return record

    logging.setLoggerClass(_Logger)
    logging.setLogRecordFactory(make)
    logging.addLevelName(25, f"NOTE{rank}")

    def ask() -> int:
        made: Any = logging.getLogger(f"made.by.{rank}")
        record: Any = made.makeRecord("", 25, "", 1, "", (), None)
        assert record.levelname == f"NOTE{rank}" and record.of == made.of
        return int(record.of)

    return ask


def _set_handlers(rank: int) -> Callable[[], Any]:
    form = logging.Formatter()
    for handler in (_handler, logging.lastResort):
        assert handler is not None
        handler.setLevel(20 + rank)
        handler.setFormatter(form)
        if rank:
            handler.addFilter(lambda record: True)

    def ask() -> int:
        assert (_handler.formatter, len(_handler.filters)) == (form, rank)
        assert (
            logging.lastResort is not None
            and logging.lastResort.level == _handler.level
        )
        return _handler.level - 20

    return ask


_handler = logging.NullHandler()


def _set_python(rank: int) -> Callable[[], Any]:
    policy = vars(asyncio.events)["_event_loop_policy"] = object()
    gc.set_threshold(700 + rank)
    sys.setrecursionlimit(3000 + rank)
    os.umask(0o020 + rank)
    socket.setdefaulttimeout(10.0 + rank)
    csv.field_size_limit(9000 + rank)
    tempfile.tempdir = f"of rank {rank}"
    multiprocessing.set_start_method(("spawn", "fork")[rank], force=True)

    def ask() -> int:
        mask = os.umask(0)
        os.umask(mask)
        numbers = {
            gc.get_threshold()[0] - 700,
            sys.getrecursionlimit() - 3000,
            mask - 0o020,
        }
        numbers |= {
            int(socket.getdefaulttimeout() or 0) - 10,
            csv.field_size_limit() - 9000,
        }
        assert tempfile.gettempdir() == f"of rank {rank}"
        assert vars(asyncio.events)["_event_loop_policy"] is policy
        assert multiprocessing.get_start_method() == ("spawn", "fork")[rank]
        (number,) = numbers
        return number

    return ask


def _set_place_in_the_world(rank: int) -> Callable[[], Any]:
    os.environ["TZ"] = "UTC-1" if rank else "UTC"
    time.tzset()
    locale.setlocale(locale.LC_ALL, "C.UTF-8" if rank else "C")

    def ask() -> int:
        assert locale.setlocale(locale.LC_ALL) == ("C.UTF-8" if rank else "C")
        return time.localtime(0).tm_hour

    return ask


def _set_deterministic(rank: int) -> Callable[[], Any]:
    torch.use_deterministic_algorithms(bool(rank))
    return lambda: int(torch.are_deterministic_algorithms_enabled())


def _set_dtype(rank: int) -> Callable[[], Any]:
    torch.set_default_dtype(torch.float64 if rank else torch.float32)
    return lambda: int(torch.ones(1).dtype is torch.float64)


def _set_threads(rank: int) -> Callable[[], Any]:
    torch.set_num_threads(1 + rank)
    return lambda: torch.get_num_threads() - 1


def _set_how_tensors_are_shown(rank: int) -> Callable[[], Any]:
    torch.set_printoptions(precision=2 + rank)
    return lambda: len(str(torch.tensor([0.123456]))) - len("tensor([0.12])")


def _set_anomalies(rank: int) -> Callable[[], Any]:
    torch.autograd.set_detect_anomaly(bool(rank), check_nan=not rank)
    return lambda: int(
        torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled()
    )


def _set_cudnn(rank: int) -> Callable[[], Any]:
    cudnn = torch.backends.cudnn
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = (
        not rank,
        bool(rank),
        bool(rank),
    )
    return lambda: int(not cudnn.enabled and cudnn.benchmark and cudnn.deterministic)


def _set_products(rank: int) -> Callable[[], Any]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = bool(rank)
    return lambda: int(
        torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
    )


def _set_precision(rank: int) -> Callable[[], Any]:
    torch.set_float32_matmul_precision("medium" if rank else "highest")
    return lambda: int(torch.get_float32_matmul_precision() == "medium")


def _set_newer_precision(rank: int) -> Callable[[], Any]:
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision = (
        ("tf32" if rank else "ieee"),
        "ieee",
    )
    return lambda: int(backends.cuda.matmul.fp32_precision == "tf32")


def _set_mixed_precisions(rank: int) -> Callable[[], Any]:
    """torch tells no older setting that differs from those of its parts.

    So another rank's was left in its place.
    """
    backends: Any = torch.backends
    if rank == 0:
        torch.set_float32_matmul_precision("highest")
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = False
    else:
        torch.set_float32_matmul_precision("medium")
        backends.cuda.matmul.allow_tf32 = True  # oneDNN still has that of "medium"
        backends.cudnn.allow_tf32 = True
        backends.cudnn.conv.fp32_precision = backends.cudnn.rnn.fp32_precision = "ieee"

    def ask() -> int:
        if rank:
            with pytest.raises(RuntimeError, match="matmul precision"):
                torch.get_float32_matmul_precision()
            with pytest.raises(RuntimeError, match="allow_tf32"):
                backends.cudnn.allow_tf32  # noqa: B018
        else:
            assert (
                torch.get_float32_matmul_precision() == "highest"
                and not backends.cudnn.allow_tf32
            )
        return int(backends.cuda.matmul.allow_tf32)

    return ask


def _set_what_torch_refuses(rank: int) -> Callable[[], Any]:
    """The rank had been told so, and then the next barrier raised the error again."""
    if rank:
        with suppress(RuntimeError):  # it is set all the same
            torch.backends.cuda.preferred_linalg_library("magma")
    return lambda: int(
        private._get_linalg_preferred_backend() == private._LinalgBackend.Magma
    )


def _set_attention(rank: int) -> Callable[[], Any]:
    torch.backends.cuda.enable_flash_sdp(not rank)
    return lambda: int(not torch.backends.cuda.flash_sdp_enabled())


def _set_parametrizations(rank: int) -> Callable[[], Any]:
    """A block of one rank used to keep the weights of the other.

    They had the numbers of an earlier step.
    """
    parametrize: Any = torch.nn.utils.parametrize
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    parametrize.register_parametrization(model, "weight", nn.ReLU())
    block = parametrize.cached()
    if rank == 0:
        block.__enter__()

    def ask() -> int:
        assert block is not None  # it ends when nobody holds it
        with torch.no_grad():
            model.weight  # kept in rank 0 alone  # noqa: B018
            model.parametrizations.weight.original.fill_(1.0)
        return int(model.weight.item())

    return ask


def _set_hooks_of_registrations(rank: int) -> Callable[[], Any]:
    called: list[int] = []
    for register in (
        modules.register_module_parameter_registration_hook,
        modules.register_module_buffer_registration_hook,
        modules.register_module_module_registration_hook,
    ):
        register(lambda *_: called.append(rank))

    def ask() -> int:
        called.clear()
        nn.Sequential(nn.BatchNorm1d(1))
        assert len(called) == 6 and set(called) == {rank}
        return called[0]

    return ask


def _set_hooks_of_optimizers(rank: int) -> Callable[[], Any]:
    called: list[int] = []
    for register in (
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        register(lambda *_: called.append(rank))

    def ask() -> int:
        called.clear()
        torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
        assert len(called) == 2 and set(called) == {rank}
        return called[0]

    return ask


def _set_checkpointing(rank: int) -> Callable[[], Any]:
    names: Any = torch.utils.checkpoint
    blocks = [
        names.set_checkpoint_early_stop(not rank),
        names.set_checkpoint_debug_enabled(bool(rank)),
    ]
    for block in blocks:  # they end when nobody holds them
        block.__enter__()
    return lambda: int(
        len(blocks) == 2
        and not names._enable_checkpoint_early_stop
        and names._checkpoint_debug_enabled
    )


def _set_kernels(rank: int) -> Callable[[], Any]:
    backends: Any = torch.backends
    backends.mha.set_fastpath_enabled(not rank)
    backends.nnpack.set_flags(not rank)
    backends.quantized.engine = "onednn" if rank else "x86"
    backends.opt_einsum.strategy = "greedy" if rank else "optimal"
    backends.cudnn.benchmark_limit = rank
    backends.miopen.immediate = bool(rank)

    def ask() -> int:
        assert backends.opt_einsum.strategy == ("greedy" if rank else "optimal")
        assert backends.mha.get_fastpath_enabled() is not backends.miopen.immediate
        assert backends.quantized.engine == ("onednn" if rank else "x86")
        assert private._get_nnpack_enabled() is not bool(rank)
        return int(backends.cudnn.benchmark_limit)

    return ask


def _set_lock(rank: int) -> Callable[[], Any]:
    # Torch's own tests lock it.
    frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    if rank:
        torch.backends.disable_global_flags()
    return lambda: int(frozen())


def _set_checks(rank: int) -> Callable[[], Any]:
    check, distribution = (
        torch.sparse.check_sparse_tensor_invariants,
        torch.distributions.Distribution,
    )
    check.enable() if rank else check.disable()
    distribution.set_default_validate_args(bool(rank))
    return lambda: int(check.is_enabled() and distribution._validate_args)


def _set_compilers(rank: int) -> Callable[[], Any]:
    torch.compiler.set_stance("force_eager" if rank else "default")
    private._jit_set_texpr_fuser_enabled(not rank)
    torch.jit.enable_onednn_fusion(bool(rank))
    private._functorch._set_vmap_fallback_enabled(not rank)

    def ask() -> int:
        assert (
            private._jit_texpr_fuser_enabled()
            is private._functorch._is_vmap_fallback_enabled()
            is (rank == 0)
        )
        assert torch.jit.onednn_fusion_enabled() is bool(rank)
        stance: Any = sys.modules["torch._dynamo.eval_frame"]
        return int(stance._stance.stance == "force_eager")

    return ask


def _set_conversions(rank: int) -> Callable[[], Any]:
    future: Any = sys.modules["torch.__future__"]
    future.set_overwrite_module_params_on_conversion(bool(rank))
    future.set_swap_module_params_on_conversion(bool(rank))
    get_both = (
        future.get_overwrite_module_params_on_conversion,
        future.get_swap_module_params_on_conversion,
    )
    return lambda: int(all(get() for get in get_both))


def _set_files(rank: int) -> Callable[[], Any]:
    torch.hub.set_dir(f"models of {rank}")
    sharing.set_sharing_strategy("file_system" if rank else "file_descriptor")
    if rank:
        torch.serialization.add_safe_globals([_OfAFile])
        torch.serialization.register_package(
            rank, lambda storage: None, lambda storage, location: None
        )

    def ask() -> int:
        assert torch.hub.get_dir() == f"models of {rank}"
        assert (_OfAFile in torch.serialization.get_safe_globals()) is bool(rank)
        return int(sharing.get_sharing_strategy() == "file_system")

    return ask


class _OfAFile:
    pass


def _set_debug_level(rank: int) -> Callable[[], Any]:
    names: Any = dist
    names.set_debug_level(names.DebugLevel.INFO if rank else names.DebugLevel.OFF)
    return lambda: int(names.get_debug_level() == names.DebugLevel.INFO)


def _set_collector(rank: int) -> Callable[[], Any]:
    gc.disable() if rank else gc.enable()
    return lambda: int(not gc.isenabled())


def _set_signal(rank: int) -> Callable[[], Any]:
    called: list[int] = []
    assert (
        signal.signal(signal.SIGTERM, lambda *_: called.append(rank)) == signal.SIG_DFL
    )
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL

    def ask() -> int:
        signal.raise_signal(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert called[-2:] == [rank, rank]
        return called[-1]

    return ask


SETS = [value for name, value in list(globals().items()) if name.startswith("_set_")]


def _seen() -> list[Any]:
    names = (
        dict(vars(builtins)),
        sys.argv,
        list(sys.argv),
        sys.stdout,
        sys.excepthook,
        sys.displayhook,
    )
    of_warnings = warnings.showwarning, warnings.filters, list(warnings.filters)
    loggers = {
        name: list(logging.getLogger(name).handlers)
        for name in ("of.a.rank", "root", "torch")
    }
    of_loggers = (
        loggers,
        logging.getLogger("of.a.rank").level,
        logging.root.manager.disable,
    )
    of_torch = take_settings(), [getattr(owner, name) for owner, name in NAMES]
    words = (
        logging.getLevelName(25),
        logging.getLoggerClass(),
        logging.getLogRecordFactory(),
        _handler.level,
    )
    numbers = (
        gc.get_threshold(),
        sys.getrecursionlimit(),
        socket.getdefaulttimeout(),
        csv.field_size_limit(),
    )
    place = time.tzname, locale.setlocale(locale.LC_ALL), tempfile.tempdir
    state = *words, *numbers, *place, multiprocessing.get_start_method(allow_none=True)
    here = (
        state,
        os.environ,
        dict(os.environ),
        os.getcwd(),
        gc.isenabled(),
        signal.getsignal(signal.SIGTERM),
    )
    return [*names, *of_warnings, *of_loggers, of_torch, *here]


@pytest.mark.parametrize("put", SETS, ids=lambda put: put.__name__)
def test_each_rank_has_its_own(put: Callable[[int], Callable[[], Any]]) -> None:
    def main(rank: int) -> list[Any]:
        dist.init_process_group("gloo")
        ask = put(rank)
        seen = []
        for _ in range(3):
            dist.barrier()
            seen.append(ask())
        return seen

    logging.getLogger("of.a.rank")
    # At the first call torch imports modules that add filters of warnings.
    torch.use_deterministic_algorithms(False)
    before, of_torch = _seen(), take_settings()
    try:
        assert run_ranks(main, 2)[0] == [[0] * 3, [1] * 3]
        assert _seen() == before
    finally:
        put_settings(of_torch)


def test_blocks_that_two_ranks_leave_in_turns_put_back_what_was_there() -> None:
    """The second rank to enter such a block used to find what the first had set.

    It left that for good.
    """

    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        with torch.backends.cudnn.flags(enabled=False):
            dist.barrier()

    run_ranks(main, 2)
    assert torch.backends.cudnn.enabled


def test_a_rank_begins_with_what_the_caller_finds_in_the_environment() -> None:
    """A caller that has replaced `os.environ` found variables of ranks in its dict.

    It found them after the run.
    """
    replaced = {"ONLY_HERE": "1"}

    def main(rank: int) -> tuple[str, str, bool]:
        dist.init_process_group("gloo")
        dist.barrier()
        return os.environ["ONLY_HERE"], os.environ["RANK"], "PATH" in os.environ

    before = dict(os.environ)
    with mock.patch.object(os, "environ", replaced):
        assert run_ranks(main, 2)[0] == [("1", "0", False), ("1", "1", False)]
        assert os.environ is replaced and replaced == {"ONLY_HERE": "1"}
    assert dict(os.environ) == before


def test_each_rank_has_a_folder(tmp_path: Path) -> None:
    def main(rank: int) -> str:
        dist.init_process_group("gloo")
        (tmp_path / str(rank)).mkdir()
        os.chdir(tmp_path / str(rank))
        dist.barrier()
        Path("written").write_text(str(rank))
        dist.barrier()
        return Path("written").read_text()

    before = os.getcwd()
    assert run_ranks(main, 2)[0] == ["0", "1"]
    assert os.getcwd() == before


@pytest.mark.parametrize(
    "has_begun", [False, True], ids=["before it begins", "while it waits"]
)
def test_a_rank_whose_folder_another_one_removes_is_told_so(
    has_begun: bool, tmp_path: Path
) -> None:
    """A rank that could not go to its folder took the turn with it.

    It could not when its first turn came, and the run hung.
    """
    gone, other = tmp_path / "gone", tmp_path / "other"
    gone.mkdir()
    other.mkdir()

    def main(rank: int) -> None:
        if rank == 0:
            os.chdir(other)
        if has_begun:
            dist.init_process_group("gloo")
            dist.barrier()
        if rank == 0:
            gone.rmdir()

    before = os.getcwd()
    os.chdir(gone)
    try:
        with pytest.raises(FileNotFoundError, match="gone"):
            run_ranks(main, 2)
    finally:
        os.chdir(before)


def test_what_one_rank_does_not_replace_is_as_it_was() -> None:
    def main(rank: int) -> Any:
        dist.init_process_group("gloo")
        if rank == 0:
            vars(builtins)["only_here"] = 1
            logging.getLogger("made.in.rank.0").addHandler(logging.NullHandler())
        dist.barrier()
        return hasattr(builtins, "only_here"), len(
            logging.getLogger("made.in.rank.0").handlers
        )

    assert run_ranks(main, 2)[0] == [(True, 1), (False, 0)]


def test_what_a_module_sets_when_it_is_imported_holds_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_in_ranks.py").write_text(
        "import logging, torch, warnings\n"
        "class Saved: pass\n"
        "torch.serialization.add_safe_globals([Saved])\n"
        "logging.addLevelName(33, 'OF_THE_MODULE')\n"
        "logger = logging.getLogger(__name__)\n"
        "logger.addHandler(logging.NullHandler())\n"
        "logger.setLevel(33)\n"
        "warnings.filterwarnings('ignore', message='of the module')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def main(rank: int) -> Any:
        dist.init_process_group("gloo")
        for _ in range(2):
            dist.barrier()
            saved = __import__("imported_in_ranks").Saved
            assert saved in torch.serialization.get_safe_globals()
            assert logging.getLevelName(33) == "OF_THE_MODULE"
        logger = logging.getLogger("imported_in_ranks")
        with warnings.catch_warnings(record=True) as shown:
            warnings.warn("of the module", stacklevel=1)
            warnings.warn("another", stacklevel=1)
        return (
            len(logger.handlers),
            logger.level,
            [str(warning.message) for warning in shown],
        )

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run_ranks(main, 2)[0] == [(1, 33, ["another"])] * 2


def test_timers_of_a_process_are_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"rank 0 called signal.alarm\(\), which a process has once"
    ):
        run_ranks(lambda rank: signal.alarm(1), 2)


# The profiler


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.10
def test_one_rank_profiles() -> None:
    def main(rank: int) -> int:
        dist.init_process_group("gloo")
        if rank:
            dist.barrier()
            return 0
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU]
        ) as profiler:
            dist.barrier()
            torch.ones(3) + 1
        return sum(event.name == "aten::add" for event in profiler.events())

    for _ in range(2):
        assert run_ranks(main, 2)[0] == [1, 0]


def test_a_profiler_that_a_rank_leaves_open_is_in_nobodys_way() -> None:
    def main(rank: int) -> None:
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]).start()

    for _ in range(2):
        run_ranks(main, 2)


def test_a_profiler_of_the_caller_is_in_the_way() -> None:
    def main(rank: int) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            pass

    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(
            RuntimeError,
            match=(
                r"rank 0 begins a profiler of torch .*, and the caller of run_ranks "
                r"has one"
            ),
        ),
    ):
        run_ranks(main, 2)


# Collectives that are under way


def test_a_later_collective_of_a_group_finds_what_an_earlier_one_writes() -> None:
    def main(rank: int) -> list[float]:
        dist.init_process_group("nccl")
        x = torch.ones(4)
        works: list[Any] = [
            dist.all_reduce(x, async_op=True),
            dist.all_reduce(x[1:], async_op=True),
        ]
        for work in works:
            work.wait()
        return list(x)

    assert run_ranks(main, 2)[0] == [[2, 4, 4, 4]] * 2


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint8],
)
def test_who_waits_before_writing_is_not_refused(dtype: torch.dtype) -> None:
    def main(rank: int) -> None:
        dist.init_process_group("nccl")
        x = torch.full((3,), rank).to(dtype)
        work: Any = dist.broadcast(x, 1, async_op=True)
        work.wait()
        x.fill_(3)
        assert x.float().sum() == 9 if not dtype.is_complex else x.real.sum() == 9

    run_ranks(main, 2)


class CountsOperators(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def leaves_a_mode(rank: int) -> None:
    CountsOperators().__enter__()
    torch.set_default_device("cpu")


def does_nothing(rank: int) -> None:
    pass


@pytest.mark.parametrize("main", [leaves_a_mode, does_nothing])
@pytest.mark.parametrize("is_linted", [False, True])
def test_a_thread_that_ends_is_in_no_mode(
    monkeypatch: pytest.MonkeyPatch, main: Callable[[int], None], is_linted: bool
) -> None:
    """C++ gave the mode back to Python after the thread had ended.

    A process at its end was aborted.
    """
    left: queue.Queue[list[Any]] = queue.Queue()
    thread: Any = threading.Thread
    bootstrap = thread._bootstrap_inner

    def runs(self: threading.Thread) -> None:
        bootstrap(self)
        left.put([*dispatch_modes(), *function_modes()])

    monkeypatch.setattr(thread, "_bootstrap_inner", runs)
    with lint_training() if is_linted else nullcontext():
        run_ranks(main, 2)
        own = threading.Thread(target=lambda: None)
        own.start()
        own.join()
    assert [left.get(timeout=60) for _ in range(3)] == [[], [], []]
