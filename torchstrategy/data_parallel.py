"""The module `DataParallel`, whose forward runs in replicas.

Use it in scripts that compute the loss outside of the replicas.

inputs --- a piece for each replica ---> forward in each ---> outputs, on one device
                                                                   |
the user's parameters <--- the sum of all gradients <--- the loss, and its backward

                        scattered                     gathered
a tensor                pieces along `dim`            concatenated along `dim`
... without dimensions  given to each replica         stacked to a vector
None                    given to each replica         None
a list, tuple or dict   the same container of pieces  the same of gathered values
a dataclass, a mapping  a copy with pieces            the first, with gathered values
anything else           given to each replica         a list with each replica's item
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from torchstrategy._base import row_errors
from torchstrategy._base.context import is_accelerator, is_in_replica, using_device
from torchstrategy._base.devices import (
    canonical_device,
    copies_by_itself,
    local_accelerators,
    memory_device,
)
from torchstrategy._base.distributed_values import (
    ABSENT,
    DistributedValues,
    PerReplica,
    select,
)
from torchstrategy._base.errors import an, as_int, hide_frames, require_type
from torchstrategy._base.objects.module_traversal import move
from torchstrategy._base.options import ReduceOp
from torchstrategy._base.torch_internals import hide_from_compiler, is_transforming
from torchstrategy._base.tree import (
    columns_of,
    is_record,
    leaves_within,
    map_within,
    parts_of,
    with_parts,
)
from torchstrategy._base.types import Device, DeviceLike, Tree
from torchstrategy._copies.given_weights import (
    call_with,
    own_weights_in_place,
    send_given,
)
from torchstrategy._copies.gradients.gradient_hooks import attach_to_graph
from torchstrategy._copies.refusals import refuse_uncopyable
from torchstrategy._data.steps import split_equally
from torchstrategy._group.reductions import check_gatherable
from torchstrategy._group.transfer import concatenate_on
from torchstrategy.strategies import CentralStorageStrategy, devices_of_replicas


@final
class DataParallel(nn.Module):
    """Runs a module's forward in several replicas, each with its part of the batch.

    It takes the place of `torch.nn.DataParallel` in scripts that compute the loss
    outside: `criterion(model(inputs), targets)`. Such a script trains as it does on one
    device, also with uneven batches, on the CPU, or with two replicas on one device. If
    each replica computes its own loss, in a step for `Strategy.run`, no outputs have to
    be gathered.

    Every tensor in the inputs, also in lists, tuples, dicts and dataclasses, is cut
    along `dim` into pieces of ceil(rows / replicas) rows, one for each replica. Any
    other value, and a tensor without dimensions, is given to every replica. There may
    be fewer pieces than replicas; if no input has rows, only the first replica runs.

    Outputs may be nested in the same ways. Their tensors are gathered along `dim`, and
    tensors without dimensions become a vector. None stays None. Any other value becomes
    a list with one item from each replica that had rows. With one device the output is
    what the module returns.

    A loss of the gathered outputs is that of the whole batch, and so is its gradient,
    whatever the loss is a mean over: rows, tokens, class weights, what a mask leaves,
    or pairs of rows. Nothing has to be said of it. A loss that `forward` returns is one
    for each replica, a mean over its own rows or tokens: compute it outside, or train
    with a strategy, whose `gradient_reduction="loss"` is for that.

    Replicas are made at the first forward, and kept. Running statistics of
    normalisation layers become the mean of the replicas'. The state dict has the names
    of the module's own state dict. One with `module.` before each name, as
    `torch.nn.DataParallel` saves it, can be loaded, too.

    Args:
        module: The module to run. Its parameters and buffers have to be on the first
            device when it is called.
        device_ids: The device of each replica: a `torch.device`, a name, or the index
            of an accelerator. A device may be in the list several times. None: all
            accelerators of this machine; if it has none, the module is called as it is.
        output_device: The device on which outputs are gathered. None: the first device.
        dim: The dimension of rows in inputs and outputs.

    Attributes:
        module: The module. Its other methods and attributes are found there, as in
            `model.module.encode`.
        device_ids: The devices, an accelerator by its index. Empty on a machine without
            accelerators.
        output_device: The device of outputs, an accelerator by its index. None if
            outputs stay where they are.

    Example:
        >>> model = torchstrategy.DataParallel(
        ...     torch.nn.Linear(2, 1), device_ids=["cpu", "cpu"]
        ... )
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> inputs, targets = torch.ones(5, 2), torch.ones(5, 1)
        >>> loss = torch.nn.functional.mse_loss(model(inputs), targets)
        >>> loss.backward()
        >>> optimizer.step()
        >>> list(model.state_dict())
        ['weight', 'bias']

    Differs from torch.nn.DataParallel:
        Inputs with different numbers of rows, and devices that do not exist, are
        refused. There are no `scatter`, `replicate`, `parallel_apply` and `gather` to
        override. `torch.compile` of a DataParallel compiles nothing: compile the
        module. docs/data_parallel.md has the whole table.

    Raises:
        TypeError: If `module` is no module, or is one that cannot be copied; if an
            argument is of the wrong kind; from a call, if it is not known how to cut an
            input.
        ValueError: If a device is none, or one that this machine does not have; from a
            call, if inputs have different numbers of rows, or outputs do not fit
            together.
        RuntimeError: From a call, if the module is not on the first device or belongs
            to a strategy, or in a replica.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        if isinstance(device_ids, (str, int, torch.device)):
            raise TypeError(
                "device_ids is a list of devices, one for each replica: write "
                f"[{device_ids!r}]."
            )
        devices = (
            local_accelerators()
            if device_ids is None
            else devices_of_replicas("device_ids", device_ids)
        )
        self._devices: tuple[Device, ...] = tuple(devices)
        require_type(module, nn.Module, "DataParallel runs a torch.nn.Module")
        if isinstance(module, DataParallel):
            raise TypeError(
                "The module is a DataParallel already: its replicas would have "
                "replicas. Wrap it once."
            )
        if len(self._devices) > 1:
            with own_weights_in_place(module):
                refuse_uncopyable([module], are_all=False)
        output = (
            self._devices[0]
            if output_device is None and self._devices
            else output_device
        )
        self._output = None if output is None else canonical_device(output)
        self.dim = as_int(
            dim,
            f"dim is the index of a dimension; got {dim!r}, {an(type(dim).__name__)}.",
        )
        self.device_ids = [_as_torch_has_it(device) for device in self._devices]
        self.output_device = (
            None if self._output is None else _as_torch_has_it(self._output)
        )
        self.module = module
        self._strategy: CentralStorageStrategy | None = None
        nn.Module.register_state_dict_post_hook(self, _take_prefix_off)
        nn.Module.register_load_state_dict_pre_hook(self, _put_prefix_on)
        if len(self._devices) == 1:
            move(module, memory_device(self._devices[0]))

    def __getstate__(self) -> dict[str, Any]:
        # The threads of a strategy can be neither copied nor pickled. The copy makes a
        # strategy at its first forward.
        return {**self.__dict__, "_strategy": None}

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module in the replicas.

        Args:
            inputs: The positional arguments of the module.
            kwargs: The keyword arguments of the module.
        """
        _refuse_in_replica()
        devices = self._devices
        if len(devices) > 1:
            try:
                return self._in_replicas(inputs, kwargs)
            except BaseException as error:
                __tracebackhide__ = True  # pytest knows this name
                hide_frames(error)
                raise
        if devices:
            _require_place(self.module, devices[0])
            inputs, kwargs = move_to((inputs, kwargs), devices[0])
        output = self.module(*inputs, **kwargs)
        return (
            output
            if self._output is None or self._output in devices
            else move_to(output, self._output)
        )

    def _in_replicas(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_transforming():
            raise RuntimeError(_TRANSFORMED)
        _require_place(self.module, self._devices[0])
        with own_weights_in_place(self.module) as given:
            return self._with_weights(given, inputs, kwargs)

    def _with_weights(
        self,
        given: dict[str, torch.Tensor],
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        # `self.module` may have been replaced since the last forward, by one that the
        # strategy does not have.
        if (
            self._strategy is None
            or not self._strategy.extended.variable_created_in_scope(self.module)
        ):
            self._strategy = _strategy_for(self.module, self._devices)
            self._strategy.distribute_module(self.module)
        pieces = cut(inputs, kwargs, self._devices, self.dim)
        # In a script for `torch.nn.DataParallel`, `torch.zeros(2)` in forward is on the
        # caller's default device. With a default device of the replicas' type, it is on
        # the replica's device, as in a step.
        default = torch.get_default_device()
        callers_device = None if default.type == self._devices[0].type else default
        weights = (
            PerReplica([send_given(given, device) for device in self._devices])
            if given
            else None
        )
        owners = list(self.module.parameters())
        outputs = self._strategy.run(
            forward, (self.module, owners, pieces, callers_device, weights)
        )
        present = [
            r for r, piece in enumerate(pieces._components) if piece is not ABSENT
        ]
        assert self._output is not None
        return put_together(
            [select(outputs, r) for r in present], present, self.dim, self._output
        )


# A compiler that traced a DataParallel would trace its threads and locks, and not the
# forward that they run.
hide_from_compiler(DataParallel.forward)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Calls a module in several replicas, as `DataParallel` does.

    Use it in modules that split a part of their forward.

    The replicas are kept until the module is gone, or is called with other devices.

    Args:
        module: The module to call, which is on the first device.
        inputs: Its positional arguments: a tuple, or the only one. None: there are
            none.
        device_ids: The device of each replica; see `DataParallel`.
        output_device: The device on which outputs are gathered. None: the first device.
        dim: The dimension of rows in inputs and outputs.
        module_kwargs: Its keyword arguments.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> inputs = torch.ones(5, 2)
        >>> torch.equal(
        ...     torchstrategy.data_parallel(layer, inputs, device_ids=["cpu", "cpu"]),
        ...     layer(inputs),
        ... )
        True

    Differs from torch.nn.parallel.data_parallel:
        What `DataParallel` says of itself.

    Raises:
        TypeError: As `DataParallel` does.
        ValueError: As `DataParallel` does.
        RuntimeError: As `DataParallel` does.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.data_parallel.html
    """
    _refuse_in_replica()
    called = DataParallel(module, device_ids, output_device, dim)
    kept = _of_calls.get(module)
    if kept is not None and kept.extended.worker_devices != called._devices:
        del kept, _of_calls[module]  # a module belongs to one strategy
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    output = called(*inputs, **(module_kwargs or {}))
    _of_calls[module] = called._strategy
    return output


# The strategies of modules that `data_parallel` has called: without them, each call
# would make replicas anew.
_of_calls: weakref.WeakKeyDictionary[nn.Module, CentralStorageStrategy | None] = (
    weakref.WeakKeyDictionary()
)
_strategies: weakref.WeakSet[CentralStorageStrategy] = weakref.WeakSet()
_lock = threading.Lock()


def _strategy_for(
    module: nn.Module, devices: tuple[Device, ...]
) -> CentralStorageStrategy:
    """The strategy for a module on these devices, which DataParallels may share.

    Two DataParallels share it if their modules have a part in common. Else the strategy
    is new.
    """
    # A module or parameter belongs to one strategy, so two DataParallels over the same
    # layers have to share theirs.
    things: list[Any] = [*module.modules(), *module.parameters()]
    with _lock:
        for strategy in _strategies:
            extended = strategy.extended
            if extended.worker_devices == devices and any(
                map(extended.variable_created_in_scope, things)
            ):
                return strategy
        # Gradients of a backward within forward are added up over the replicas, as
        # those of a backward outside are.
        strategy = CentralStorageStrategy(
            devices, devices[0], gradient_reduction=ReduceOp.SUM
        )
        _strategies.add(strategy)
        return strategy


def forward(
    module: nn.Module,
    owners: Sequence[torch.Tensor],
    arguments: Any,
    callers_device: Device | None,
    weights: dict[str, torch.Tensor] | None,
) -> Any:
    """Calls the module, with given weights if there are any. Runs in each replica."""
    inputs, kwargs = arguments
    pairs = (
        zip(module.parameters(), owners, strict=True) if torch.is_grad_enabled() else ()
    )
    with using_device(callers_device), attach_to_graph(pairs):
        if weights:
            return call_with(module, weights, inputs, kwargs)
        return module(*inputs, **kwargs)


# Checks of the constructor's arguments, and of where the module is


def _refuse_in_replica() -> None:
    if is_in_replica():
        raise RuntimeError(
            "A DataParallel was called in a replica, where the batch is split already. "
            "In a step, or in a module that is in a DataParallel itself, call the "
            "module that it wraps, `.module`."
        )


_TRANSFORMED = (
    "A DataParallel with several devices was called in a transform of torch.func: "
    "grad, vmap, jvp, jacrev, hessian and so on. Its replicas run on threads of their "
    "own, which no transform sees. Transform the module that it wraps, which runs on "
    "one device: torch.func.functional_call(model.module, weights, inputs). Or let "
    "each replica transform it, in a step that strategy.run runs. Derivatives by "
    "torch.autograd.grad(..., create_graph=True) work as they are."
)


def _as_torch_has_it(device: Device) -> int | Device:
    return device.index if is_accelerator(device) else device


def _require_place(module: nn.Module, device: Device) -> None:
    kind, place = type(module).__name__, memory_device(device)
    tensors = (
        tensor
        for part in module.modules()
        for table in (part._parameters, part._buffers)
        for tensor in table.values()
    )
    if all(tensor is None or tensor.device == place for tensor in tensors):
        return  # without the names, which take longer than the devices
    for name, tensor in chain(
        module.named_parameters(kind), module.named_buffers(kind)
    ):
        if tensor.device != place:
            raise RuntimeError(
                "The module of a DataParallel has to be on the first of its devices, "
                f"{place}, and {name} is on {tensor.device}. Move it there before the "
                f"forward: model.to({str(place)!r})."
            )


# Names in a state dict


def _take_prefix_off(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Gives a state dict the names that the module has without a DataParallel."""
    long = f"{prefix}module."
    _rename(
        state_dict,
        {
            key: prefix + key.removeprefix(long)
            for key in state_dict
            if key.startswith(long)
        },
    )
    # The versions of modules stay under their long names and get the short ones, too:
    # the state dict may be loaded with a DataParallel or without.
    versions = getattr(state_dict, "_metadata", {})
    for key, version in list(versions.items()):
        path = f"{key}."
        if path.startswith(long):
            short = prefix + path.removeprefix(long)
            versions[short.rstrip(".")] = version


def _put_prefix_on(
    module: DataParallel, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Gives a state dict that is loaded the names with `module.`, unless it has them.

    It may have been saved with a `torch.nn.DataParallel`, or without.
    """
    own, long = module.module.state_dict(keep_vars=True).keys(), f"{prefix}module."
    keys = [key for key in state_dict if key.startswith(prefix)]
    num_without = sum(key.removeprefix(prefix) in own for key in keys)
    num_with = sum(
        key.startswith(long) and key.removeprefix(long) in own for key in keys
    )
    if num_without < num_with:
        return  # it was saved with them
    _rename(state_dict, {key: long + key.removeprefix(prefix) for key in keys})
    # Only a whole state dict has the versions of modules. For a part of one, as of a
    # parent module, there are none.
    versions = getattr(state_dict, "_metadata", {"module": None})
    if "module" not in versions:
        versions.update(
            {f"module.{key}".rstrip("."): version for key, version in versions.items()}
        )


def _rename(state_dict: dict[str, Any], names: dict[str, str]) -> None:
    state_dict.update({new: state_dict.pop(old) for old, new in names.items()})


# Scattering the arguments, and gathering the outputs


def cut(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[Device], dim: int
) -> PerReplica:
    """The arguments of each replica, on its device.

    Each piece has ceil(rows / replicas) rows; the last pieces may have fewer.

    If nothing has rows, only the first replica gets the arguments. Gradients flow back
    to them.

    Raises:
        ValueError: If two tensors have different numbers of rows, or one has no such
            dimension.
        TypeError: If something has rows and cannot be cut.
    """
    rows = _rows([("inputs", inputs), *kwargs.items()], dim)
    if not rows:
        return PerReplica(
            [move_to((inputs, kwargs), devices[0]), *[ABSENT] * (len(devices) - 1)]
        )

    def piece(part: slice, device: Device) -> Tree:
        def narrow_leaf(leaf: Tree) -> Tree:
            is_cut = isinstance(leaf, torch.Tensor) and leaf.dim()
            return (
                leaf.narrow(dim, part.start, part.stop - part.start) if is_cut else leaf
            )

        return (
            move_to(map_within(narrow_leaf, (inputs, kwargs)), device)
            if part.stop > part.start
            else ABSENT
        )

    # As `torch.chunk` cuts the inputs of `torch.nn.DataParallel`.
    parts = split_equally(len(devices), rows)
    return PerReplica(
        list(map(piece, parts, devices)),
        tuple(part.stop - part.start for part in parts),
    )


def put_together(
    outputs: Sequence[Tree],
    replicas: Sequence[int],
    dim: int,
    device: Device,
    name: str = "output",
) -> Tree:
    """Makes one value on `device` of the values that replicas returned as `name`.

    Gradients flow back to these.

    Raises:
        ValueError: If they differ in structure, or tensors do not fit together.
    """
    columns, spec = columns_of(outputs, replicas, are_results=False, what=f"an {name}")
    names = [
        path
        for path, _ in leaves_within(outputs[0], name, is_record=lambda leaf: False)
    ]
    united = [
        _unite(column, replicas, dim, device, path)
        for column, path in zip(columns, names, strict=True)
    ]
    return spec.unflatten(united)


def move_to(tree: Tree, device: Device) -> Tree:
    """A tree with its tensors on a device. Gradients flow back."""
    target = memory_device(device)

    def move(leaf: Tree) -> Tree:
        is_movable = isinstance(leaf, (torch.Tensor, PackedSequence))
        return (
            leaf.to(target, non_blocking=copies_by_itself(target))
            if is_movable
            else leaf
        )

    return map_within(move, tree)


def _rows(arguments: Sequence[tuple[str, Tree]], dim: int) -> int | None:
    """How many rows all tensors have; None if there are no tensors with rows."""
    first_name, first_rows = "", None
    for name, leaf in chain.from_iterable(
        leaves_within(tree, name) for name, tree in arguments
    ):
        if isinstance(leaf, DistributedValues):
            raise TypeError(
                f"{name} is a distributed value, which is in pieces already. Give the "
                "whole batch, or call the module in a step that strategy.run runs."
            )
        if isinstance(leaf, PackedSequence):
            raise TypeError(
                f"{name} is {an(type(leaf).__name__)}, whose tensors have no dimension "
                "with a row for each sequence. Give the padded sequences and their "
                "lengths, and pack them in the module."
            )
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            continue
        if not -leaf.dim() <= dim < leaf.dim():
            raise row_errors.no_such_dimension_error(dim, name, tuple(leaf.shape))
        if first_rows is None:
            first_name, first_rows = name, leaf.size(dim)
        if leaf.size(dim) != first_rows:
            raise row_errors.unequal_inputs_error(
                dim, first_name, first_rows, name, leaf.size(dim)
            )
    return first_rows


def _unite(
    values: Sequence[Tree], replicas: Sequence[int], dim: int, device: Device, name: str
) -> Tree:
    first = values[0]
    if all(isinstance(value, torch.Tensor) for value in values):
        return _unite_tensors(values, dim, memory_device(device), name)
    if all(value is None for value in values):
        return None
    if not is_record(first) or any(type(value) is not type(first) for value in values):
        return [move_to(value, device) for value in values]
    parts = [parts_of(value) for value in values]
    for r, other in zip(replicas, parts, strict=True):
        if other.keys() != parts[0].keys():
            raise ValueError(
                f"Replicas {replicas[0]} and {r} returned an {name} of different "
                f"structure. They differ in what they hold: {', '.join(parts[0])} and "
                f"{', '.join(other)}. Return the same containers whatever the rows are."
            )

    def unite_part(part: str, _: Tree) -> Tree:
        return put_together(
            [held[part] for held in parts], replicas, dim, device, f"{name}{part}"
        )

    return with_parts(first, unite_part)


def _unite_tensors(
    tensors: Sequence[torch.Tensor], dim: int, device: Device, name: str
) -> torch.Tensor:
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack([tensor.to(device) for tensor in tensors])
    try:
        check_gatherable(tensors, dim)
    except ValueError:
        shapes = " and ".join(
            dict.fromkeys(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
        )
        raise ValueError(
            f"What the replicas returned as {name} cannot be put together along "
            f"dim={dim}: {shapes}. The tensors may differ in the size of that "
            "dimension only. Two causes are frequent: squeeze() takes away the rows, "
            "too, where there is one: name the dimension, as in squeeze(1). And "
            "pad_packed_sequence pads to the longest of a replica's own rows: give it "
            "total_length."
        ) from None
    return (
        tensors[0].to(device)
        if len(tensors) == 1
        else concatenate_on(tensors, dim, device)
    )
