"""The private names of torch that only ranks in one process need, each with its reason.

When torch moves one of them, this file changes and no other does.
`tests/unit/testing/test_ranks_and_torch.py` has a test for each. Settings of torch are
in `torch_settings.py`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._functorch import pyfunctorch
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh

from torchstrategy._base.torch_internals import dispatch_modes
from torchstrategy.testing._simulation.replacing import replacing

T = TypeVar("T")

_c10d: Any = torch._C._distributed_c10d
# C++ keeps a table of process groups by name. With isolation, each thread has a table
# of its own.
isolate_threads: Callable[[bool], None] = _c10d._set_thread_isolation_mode
_dist: Any = dist
Store: Any = _dist.Store  # type checkers do not know it
# A block outside of the transforms of `torch.func` in which this thread is: tensors
# there are not their wrappers.
outside_of_transforms: Callable[[], AbstractContextManager[Any]] = (
    pyfunctorch.temporarily_clear_interpreter_stack
)

_TIMEOUT = timedelta(minutes=30)  # torch asks for one; nothing here waits for a clock


@dataclass(frozen=True)
class _Variable:
    """What a process has once, and ranks on threads must not share.

    Attributes:
        module: The module that has it. It may be imported in the middle of a run.
        path: Where it is there: `name`, or `Class.name`.
        make: What it holds in a process that has just imported the module.
        is_inherited: Whether it is set by libraries that are imported, or by who starts
            the ranks. Then a rank begins with a copy of it.
    """

    module: str
    path: str
    make: Callable[[], Any]
    is_inherited: bool = False

    def find_owner(self) -> Any:
        """The module, class or object that has it; None if there is none yet.

        It is also None if this version of torch has none.
        """
        owner: Any = sys.modules.get(self.module)
        if owner is None:
            return None
        for name in self.path.split(".")[:-1]:
            owner = getattr(owner, name, None)
        return owner if hasattr(owner, self.name) else None

    @property
    def name(self) -> str:
        return self.path.split(".")[-1]


@final
class _Variables:
    """Those of the variables of a process that there are.

    It looks for each until it is there: ranks often ask.
    """

    def __init__(self, variables: Sequence[_Variable]) -> None:
        self._missing = list(variables)
        self._present: list[tuple[Any, str, _Variable]] = []

    def present(self) -> list[tuple[Any, str, _Variable]]:
        """The owner of each that there is, its name there, and the variable."""
        for variable in [
            variable for variable in self._missing if variable.module in sys.modules
        ]:
            if (owner := variable.find_owner()) is not None:
                self._missing.remove(variable)
                self._present.append((owner, variable.name, variable))
        return self._present


def _nothing() -> None:
    return None


def _make_handlers() -> Any:
    dispatcher: Any = sys.modules[
        "torch.distributed.tensor._api"
    ].DTensor._op_dispatcher
    return type(dispatcher)()._custom_op_handlers


def _make_stance() -> Any:
    return sys.modules["torch._dynamo.eval_frame"].DynamoStance()


# `tests/unit/testing/test_ranks_and_torch.py` looks for others: for caches and
# variables in all of `torch.distributed`.
_OF_A_PROCESS = [
    # The process groups.
    _Variable(c10d.__name__, "_pg_map", dict),
    _Variable(c10d.__name__, "_pg_names", dict),
    _Variable(c10d.__name__, "_pg_group_ranks", dict),
    _Variable(c10d.__name__, "_pg_backend_config", dict),
    _Variable(c10d.__name__, "_group_count", int),
    _Variable(c10d.__name__, "_tags_to_pg", dict),
    _Variable(c10d.__name__, "_pg_to_tag", dict),
    _Variable(c10d.__name__, "_backend", _nothing),
    _Variable(c10d.__name__, "_world", c10d._World),
    _Variable(c10d.__name__, "_default_pg_init_method", _nothing),
    # The group that `load_with_process_group` sets.
    _Variable("torch.distributed._shard.api", "_CURRENT_PROCESS_GROUP", _nothing),
    # Tables by the name of a group, and the groups of ranks have the same names.
    _Variable("torch.distributed._symmetric_memory", "_group_name_to_store", dict),
    _Variable(
        "torch.distributed._symmetric_memory", "_group_name_to_workspace_tensor", dict
    ),
    # The generator that DTensor draws from.
    _Variable("torch.distributed.tensor._random", "_rng_tracker", _nothing),
    # The operators that `loss_parallel` takes over, from its beginning to its end.
    _Variable(
        "torch.distributed.tensor._api",
        "DTensor._op_dispatcher._custom_op_handlers",
        _make_handlers,
        True,
    ),
    # How DTensors change their places: plans by mesh, each with the place of its rank;
    # and what blocks switch.
    _Variable("torch.distributed.tensor._redistribute", "_planner_cache", dict),
    _Variable(
        "torch.distributed.tensor._redistribute",
        "_FORCE_MIN_COST_REDISTRIBUTION_PLAN",
        _nothing,
    ),
    _Variable(
        "torch.distributed.tensor._redistribute",
        "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION",
        bool,
    ),
    _Variable("torch.distributed.tensor._redistribute", "_warned_flatten_issues", set),
    # The plans of checkpoints, by the class of the planner.
    _Variable(
        "torch.distributed.checkpoint.planner", "SavePlanner._cached_save_plan", dict
    ),
    _Variable(
        "torch.distributed.checkpoint.planner",
        "SavePlanner._cached_final_save_plan",
        dict,
    ),
    _Variable(
        "torch.distributed.checkpoint.planner", "SavePlanner._cached_all_plans", dict
    ),
    _Variable(
        "torch.distributed.checkpoint.planner", "SavePlanner._cached_global_plan", dict
    ),
    _Variable(
        "torch.distributed.checkpoint.planner", "SavePlanner._cached_metadata", dict
    ),
    # The numbers of parameters, and whose forward runs.
    _Variable(
        "torch.distributed.fsdp._fully_shard._fsdp_param",
        "_orig_param_uid_counter",
        count,
    ),
    _Variable(
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "_enable_fsdp_module_new_init",
        lambda: True,
    ),
    _Variable(
        "torch.nn.parallel.distributed",
        "DistributedDataParallel._active_ddp_module",
        _nothing,
    ),
    # What `torch.compiler.set_stance` sets.
    _Variable("torch._dynamo.eval_frame", "_stance", _make_stance, True),
]
_variables = _Variables(_OF_A_PROCESS)
_FAKE_TENSORS = "torch._subclasses.fake_tensor"
_REDISTRIBUTE, _COLLECTIVES = (
    "torch.distributed.tensor._redistribute",
    "torch.distributed.tensor._collective_utils",
)


def variables_of_a_new_process() -> dict[str, Any]:
    """What `put_variables` gives `torch.distributed` for a rank yet to run."""
    new: dict[str, Any] = {}
    for owner, name, variable in _variables.present():
        new[variable.path] = (
            copy.copy(getattr(owner, name))
            if variable.is_inherited
            else variable.make()
        )
    return new


def take_variables() -> dict[str, Any]:
    """What the variables of `torch.distributed` hold now."""
    return {
        variable.path: getattr(owner, name)
        for owner, name, variable in _variables.present()
    }


def put_variables(values: dict[str, Any]) -> None:
    """Sets the variables of `torch.distributed` to what `take_variables` returned.

    A variable whose module another rank has imported since then gets what a new process
    has.
    """
    for owner, name, variable in _variables.present():
        setattr(
            owner,
            name,
            values[variable.path] if variable.path in values else variable.make(),
        )


# The tables of hooks that torch calls for every module, for each part that a module
# gets, and for every optimizer. Others hold them, so ranks take turns with what is in
# them.
_MODULES: Any = torch.nn.modules.module
_OPTIMIZERS: Any = sys.modules["torch.optim.optimizer"]
# Over some of them torch loops as they are. The loops over the others go through a
# copy.
_LOOPED: list[tuple[Any, str]] = [
    (_MODULES, "_global_module_registration_hooks"),
    (_MODULES, "_global_parameter_registration_hooks"),
    (_MODULES, "_global_buffer_registration_hooks"),
    (_OPTIMIZERS, "_global_optimizer_pre_hooks"),
    (_OPTIMIZERS, "_global_optimizer_post_hooks"),
]
_HOOKS: list[dict[int, Any]] = [
    _MODULES._global_forward_pre_hooks,
    _MODULES._global_forward_hooks,
    _MODULES._global_forward_hooks_always_called,
    _MODULES._global_forward_hooks_with_kwargs,
    _MODULES._global_backward_pre_hooks,
    _MODULES._global_backward_hooks,
    *[getattr(owner, name) for owner, name in _LOOPED],
]
_Hooks = tuple[list[dict[int, Any]], bool | None]


def take_hooks() -> _Hooks:
    """The hooks for all modules and optimizers that there are now.

    It also says of which kind the hooks of backward are.
    """
    return [dict(table) for table in _HOOKS], _MODULES._global_is_full_backward_hook


def put_hooks(hooks: _Hooks) -> None:
    """Makes the hooks for modules and optimizers those that `take_hooks` returned."""
    tables, _MODULES._global_is_full_backward_hook = hooks
    for table, content in zip(_HOOKS, tables, strict=True):
        if table or content:
            table.clear()
            table.update(content)


@final
class _Table(MutableMapping[int, Any]):
    """One of torch's tables of hooks, which a rank may replace during a loop.

    A loop over its values does not see that another rank's hooks are put there.

    A hook may hold a collective, and then other ranks run in the middle of torch's
    loop.
    """

    def __init__(self, table: dict[int, Any]) -> None:
        self._table = table

    def __getitem__(self, number: int) -> Any:
        return self._table[number]

    def __setitem__(self, number: int, hook: Any) -> None:
        self._table[number] = hook

    def __delitem__(self, number: int) -> None:
        del self._table[number]

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._table))

    def __len__(self) -> int:
        return len(self._table)

    def values(self) -> Any:
        return list(self._table.values())


def hooks_that_change() -> AbstractContextManager[None]:
    """A block in which a hook may let other ranks run while torch loops over hooks.

    Meanwhile, `put_hooks` may be called.
    """
    return replacing(
        [(owner, name, _Table(getattr(owner, name))) for owner, name in _LOOPED]
    )


@contextmanager
def meshes_marked_by(mark: Callable[[], int]) -> Iterator[None]:
    """A block in which a `DeviceMesh` gets a mark when it is made.

    A mesh equals only meshes with the same mark.

    torch keeps results by mesh, and many depend on the rank: how large its shard is,
    what it sends to whom. Meshes of two ranks are equal otherwise, as they never meet
    in processes. torch marks meshes in this way for threads, too, with `_thread_id`,
    but only for a backend of its own. A thread's number would not do here: one of a
    later run may have it again.
    """
    names: Any = DeviceMesh
    real_init, real_setstate = names.__init__, vars(names).get("__setstate__")

    def init(mesh: Any, *args: Any, **options: Any) -> None:
        real_init(mesh, *args, **options)
        mesh._thread_id = mark()

    def setstate(mesh: Any, state: dict[str, Any]) -> None:
        # It may come from another rank.
        state = state | {"_thread_id": mark(), "_hash": None}
        if real_setstate is not None:
            real_setstate(mesh, state)
        else:  # torch before 2.11: all of its state are attributes
            vars(mesh).update(state)

    names.__init__, names.__setstate__ = init, setstate
    try:
        yield
    finally:
        names.__init__, names.__setstate__ = real_init, real_setstate
        if real_setstate is None:
            del names.__setstate__


def forget_meshes() -> None:
    """Empties torch's caches of meshes.

    A later run finds no mesh of its own in them, and old meshes keep all of their run
    alive.
    """
    redistribute: Any = sys.modules.get(_REDISTRIBUTE)
    if redistribute is not None:
        redistribute._gen_transform_infos.cache_clear()
    collectives: Any = sys.modules.get(_COLLECTIVES)
    if collectives is not None:
        collectives.MeshTopoInfo.build_from_mesh.cache_clear()


def forget_fake_results() -> None:
    """Empties the cache of fake tensors.

    The cache takes the current device of one rank for that of all ranks.
    """
    fake_tensors: Any = sys.modules.get(_FAKE_TENSORS)
    if fake_tensors is not None and fake_tensors.FakeTensorMode.cache:
        fake_tensors.FakeTensorMode.cache_clear()


_DEBUG_MODE = "torch.distributed.tensor.debug._comm_mode"


def counted_as(name: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Makes a method of a process group one whose calls `CommDebugMode` counts.

    torch calls the methods of a group of its own through operators, which this mode
    sees, and those of a group that is written in Python directly.

    Args:
        name: Of the operator in `torch.ops.c10d`.
    """

    def wrap(method: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(method)
        def counted(*args: Any, **options: Any) -> T:
            if (module := sys.modules.get(_DEBUG_MODE)) is not None:
                for mode in dispatch_modes():
                    if isinstance(mode, module.CommDebugMode):
                        mode.__torch_dispatch__(
                            _Counted(getattr(torch.ops.c10d, name).default), ()
                        )
            return method(*args, **options)

        return counted

    return wrap


@final
class _Counted:
    """An operator that only counts: the method of the group does its work."""

    def __init__(self, operator: Any) -> None:
        self._operator, self._overloadpacket = operator, operator._overloadpacket

    def __call__(self) -> None:
        pass

    def __str__(self) -> str:
        return str(self._operator)


@contextmanager
def groups_made_by(
    make: Callable[[str, list[int]], dist.ProcessGroup],
    store_of: Callable[[], Any],
    stores: Mapping[str, type[Any]],
    ranks: Callable[[int, int], tuple[int, int]],
) -> Iterator[None]:
    """A block in which `torch.distributed` asks `make` for every process group.

    It does so whatever backend a program names.

    torch's backend "fake" stays what it is: it exchanges nothing, and each process may
    take any rank in it.

    Args:
        make: Gets the name of a group and the ranks in it, none for the group of all.
        store_of: What a program that gives no store finds in its place.
        stores: The classes that it makes stores of, by torch's names.
        ranks: Gets the rank and the number of ranks that a program names, -1 for what
            it does not; returns true ones.
    """
    dist.Backend.register_backend(
        _BACKEND,
        lambda options, _: make(options.group_id, list(options.global_ranks_in_group)),
        True,
        ["cpu"],
    )
    real = c10d._new_process_group_helper

    def helper(
        size: int,
        rank: int,
        members: Any,
        backend: Any,
        store: Any,
        name: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        if str(backend) == _FAKE:
            return real(size, rank, members, backend, store, name, *args, **options)
        # What is for one backend alone: a device that is bound eagerly, options of
        # NCCL.
        bound = options.pop("device_id", None)
        for unused in ("backend_options", "pg_options"):
            options.pop(unused, None)
        rank, size = ranks(rank, size) if not members else (rank, size)
        group: Any
        kept: Any
        group, kept = real(
            size, rank, members, dist.Backend(_BACKEND), store, name, **options
        )
        if group in c10d._world.pg_map:
            # What `dist.get_backend` says.
            c10d._world.pg_map[group] = (dist.Backend(str(backend)), kept)
            config = c10d._world.pg_backend_config[group] = _config_of(str(backend))
            backends = dict(part.split(":") for part in config.split(","))
            group.serve(
                str(backend), {} if _find_accelerator() is None else backends, bound
            )
        return group, kept

    def rendezvous(
        url: str, rank: int = -1, world_size: int = -1, **options: Any
    ) -> Iterator[Any]:
        yield (store_of(), *ranks(rank, world_size))

    in_place = [
        (c10d, "_new_process_group_helper", helper),
        (c10d, "rendezvous", rendezvous),
        *[
            (module, name, kind)
            for name, kind in stores.items()
            for module in _MAKING_STORES
        ],
        *_replaced_for_ranks(),
    ]
    if dist.rpc.is_available():
        in_place.append(
            (
                dist.rpc,
                "init_rpc",
                _refuse_in_ranks(dist.rpc.init_rpc, lambda: ranks(-1, -1)[1]),
            )
        )
    try:
        with replacing(in_place):
            yield
    finally:
        plugins: Any = dist.Backend._plugins
        del plugins[_BACKEND.upper()]  # it holds all of the run


def _replaced_for_ranks() -> list[tuple[Any, str, Any]]:
    """What else of torch would wait, ask for a backend, or be one for all ranks.

    A backend is gloo or NCCL. Each entry is the owner, the name and the replacement.
    """
    in_place: list[tuple[Any, str, Any]] = [
        (c10d, "_store_based_barrier", lambda *args, **options: None),
        (
            c10d,
            "_get_object_coll_device",
            _keep_objects_here(c10d._get_object_coll_device),
        ),
        # Torch's warns where it has no NCCL.
        (c10d, "_get_default_timeout", lambda backend: _TIMEOUT),
        (torch.cuda.nccl, "version", lambda: _NCCL),
        (_DDP, "_get_ddp_logging_data", _name_the_backend(_DDP._get_ddp_logging_data)),
        (
            Join,
            "notify_join_context",
            staticmethod(_keep_works(Join.notify_join_context)),
        ),
        (_GROUPS, "WORLD", property(_read_default_group, _GROUPS.WORLD.fset)),
    ]
    if hasattr(c10d, _RECORDER):
        in_place.append((c10d, _RECORDER, lambda *args: None))
    return in_place


def _refuse_in_ranks(
    init_rpc: Callable[..., Any], size: Callable[[], int]
) -> Callable[..., Any]:
    """Makes a replacement for `init_rpc`.

    A rank that is alone has the agent of its process for itself.
    """

    @functools.wraps(init_rpc)
    def init(*args: Any, **options: Any) -> Any:
        if size() > 1:
            raise RuntimeError(
                "init_rpc was called in a rank. torch.distributed.rpc has one agent "
                "for a process, and ranks share one: start this program with torchrun, "
                "in processes."
            )
        return init_rpc(*args, **options)

    return init


# `dist.rendezvous` is a function, and its module makes some stores, too.
_MAKING_STORES = (dist, sys.modules["torch.distributed.rendezvous"])
_DDP: Any = torch.nn.parallel.DistributedDataParallel


def _name_the_backend(
    read: Callable[[Any], dict[str, Any]],
) -> Callable[[Any], dict[str, Any]]:
    """Makes a replacement for what reads the log of a `DistributedDataParallel`.

    C++ writes another backend there.
    """

    def read_log(model: Any) -> dict[str, Any]:
        return {**read(model), "backend_name": dist.get_backend(model.process_group)}

    return read_log


def _keep_works(notify: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes a replacement for what tells the ranks in a `Join` that one goes on.

    The replacement keeps the last collective of each rank.

    `DistributedDataParallel` gives it to C++, which waits for it in the backward pass,
    and does not keep the object of Python. Without that, C++ knows no way to wait for
    it, and stands still.
    """
    works: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def notify_and_keep(joinable: Any) -> Any:
        works[joinable] = work = notify(joinable)
        return work

    return notify_and_keep


# The class of `group`, whose `WORLD` is the default group.
_GROUPS: Any = c10d._WorldMeta


def _read_default_group(_: Any) -> Any:
    """What `torch.distributed.group.WORLD` is.

    Some functions of torch have it as the default of an argument. A module that a rank
    imports after `init_process_group` would keep the group of this rank for all others.
    None means the same to these functions, and is what they have where the module is
    imported before.
    """
    here = inspect.currentframe()
    reader = None if here is None else here.f_back
    if reader is not None and str(reader.f_globals.get("__name__")).startswith(
        "torch."
    ):
        # A function, and not the body of a module or a class.
        is_in_function = reader.f_code.co_flags & inspect.CO_OPTIMIZED
        if not is_in_function:
            return None
    return c10d._world.default_pg


def is_read_by_torch() -> bool:
    """Whether it was code of torch that read the property that asks this."""
    here = inspect.currentframe()
    reader = None if here is None or here.f_back is None else here.f_back.f_back
    return reader is not None and str(reader.f_globals.get("__name__")).startswith(
        "torch."
    )


OBJECTS_OF = c10d.__name__  # the module with `all_gather_object` and its like


def _keep_objects_here(find: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a replacement for what finds the device to which bytes are moved.

    `all_gather_object` and its like move bytes to this device.

    They stay on the CPU: their bytes on a device are no part of the program. Others ask
    for tensors of their own.
    """

    def find_device(*args: Any, **options: Any) -> Any:
        here = inspect.currentframe()
        asks = None if here is None else here.f_back
        is_theirs = asks is not None and asks.f_globals.get("__name__") == OBJECTS_OF
        return "cpu" if is_theirs else find(*args, **options)

    return find_device


def _find_accelerator() -> torch.device | None:
    """The kind of accelerator that is here: one that is simulated, mostly.

    A build for CUDA alone is none.
    """
    return torch.accelerator.current_accelerator(check_available=True)


def _config_of(backend: str) -> str:
    """What `dist.get_backend_config` says.

    This is the devices whose tensors a group takes, each with its backend.
    """
    accelerator = _find_accelerator()
    kind = "cpu" if accelerator is None else accelerator.type
    if backend == dist.Backend.UNDEFINED:
        return "cpu:gloo" if kind == "cpu" else f"{kind}:nccl"
    config = str(c10d.BackendConfig(dist.Backend(backend)))
    # A simulated device stands for a GPU.
    return config if kind == "cpu" else config.replace("cuda:", f"{kind}:")


_BACKEND, _FAKE = "torchstrategy_ranks", "fake"
# Of torch 2.15: what records the last collectives of a group. It asks C++ for the name
# of the group, which only a group with a backend of C++ has there.
_RECORDER = "_maybe_attach_flight_recorder"
# torch logs it with an error of a collective, and cannot find it where it has no NCCL.
_NCCL = (2, 27, 5)


# The files through which every call of a collective passes. The last three are between
# a program and the collective where a function mode is at work, a default device is
# set, or the call is wrapped in a context such as `no_grad`.
ENTRANCES = (
    c10d.__name__,
    "torch.distributed.c10d_logger",
    "torch.overrides",
    "torch.utils._device",
    "torch.utils._contextlib",
)

# The class under every profiler of torch.
PROFILER: Any = torch.autograd.profiler.profile


def factor_of(operation: Any) -> float:
    """The factor of a `PREMUL_SUM`.

    NCCL multiplies each rank's numbers by this factor before it adds them.
    """
    return float(operation.__getstate__()[1])


def after_backward(call: Callable[[], None]) -> bool:
    """Calls a function at the end of the backward pass on this thread.

    It returns False if no backward runs.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    try:
        engine.queue_callback(call)
    except RuntimeError:  # there is no other way to ask
        return False
    return True
