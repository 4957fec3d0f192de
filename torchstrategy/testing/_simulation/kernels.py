"""How a simulated device runs any operator: by the CPU's kernel, on its memory.

Tensors of the device and of the CPU share that memory.

Torch calls `run_on_cpu` for every operator that has a tensor of a simulated device
among its arguments and no kernel of its own. The function checks that all tensors are
on one device, runs the operator on the CPU's view of the memory, and returns new
results as tensors of the device. Tensors that the operator writes need no more, since
the bytes are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch

# This name stays torch's function where `cuda_alias` puts another in its place.
from torch import is_autocast_enabled

from torchstrategy.testing._simulation.accounts import is_out_of_memory, out_of_memory
from torchstrategy.testing._simulation.deterministic import (
    check_deterministic,
    not_deterministic,
)
from torchstrategy.testing._simulation.dtypes import IN_FLOAT32, check_of, in_float32
from torchstrategy.testing._simulation.generators import (
    inside,
    inside_default_generator,
    refused_by_the_cpu,
)
from torchstrategy.testing._simulation.listeners import listeners, listeners_to_launches
from torchstrategy.testing._simulation.memory import (
    Together,
    on_cpu,
    on_cpu_to_write,
    on_device,
    overlap,
)
from torchstrategy.testing._simulation.ordinals import (
    NAME,
    index_of,
    is_simulated,
    ordinal,
)
from torchstrategy.testing._simulation.shapes import (
    NOT_KNOWN,
    is_large,
    shaped,
    shapes_only,
)
from torchstrategy.testing._simulation.storages import adopt
from torchstrategy.testing._simulation.streams import (
    computed,
    launched,
    read_by_the_program,
)
from torchstrategy.testing._simulation.sync_debug import get_sync_debug_mode
from torchstrategy.testing._simulation.torch_internals import (
    DispatchKey,
    DispatchKeySet,
    schema,
    tensor_data,
    without_keys,
)

CPU = torch.device("cpu")
_AUTOCAST_CPU = DispatchKeySet(DispatchKey.AutocastCPU)

# The arguments that may be tensors of the CPU next to tensors of a device, as on
# accelerators.
_FROM_THE_CPU = {
    "aten.index.Tensor_out": "indices",
    "aten.index.Tensor": "indices",
    "aten._index_put_impl_.default": "indices",
    "aten.index_put_.default": "indices",
    "aten.index_put.default": "indices",
    "aten._pad_packed_sequence.default": "batch_sizes",
    "aten._pack_padded_sequence.default": "lengths",
    "aten._ctc_loss.Tensor": "input_lengths target_lengths",
    "aten.bernoulli.out": "self",
    "aten.bernoulli_.Tensor": "p",
    "aten.bernoulli.Tensor": "p",
}

# The arguments of a device that come to the CPU where the first argument is there, as
# from accelerators.
_COME_TO_THE_CPU = {
    "aten.fill_.Tensor": "value",
    "aten.index_put_.default": "indices",
    "aten._index_put_impl_.default": "indices",
    "aten.index_put.default": "indices",
}

# The operators with torch's tag `pointwise` that take no number from the CPU next to a
# tensor of a GPU: in torch's native_functions.yaml they lack `device_check: NoCheck`;
# of those that have it, `addcdiv` allows none.
_TAKE_NO_NUMBERS = frozenset(
    (
        *(
            "addcdiv",
            "clamp",
            "clamp_max",
            "clamp_min",
            "equal",
            "gcd",
            "gelu_backward",
            "igamma",
            "igammac",
            "lcm",
        ),
        *(
            "logaddexp",
            "logaddexp2",
            "logit_backward",
            "native_dropout_backward",
            "nextafter",
            "sigmoid_backward",
        ),
        *("silu_backward", "tanh_backward", "threshold_backward"),
    )
)

# The operators, besides those with torch's tag `pointwise`, that take a single number
# from the CPU, as on accelerators.
_TAKE_NUMBERS = (
    "_foreach_",
    "_fused_",
    "bernoulli",
    "binary_cross_entropy",
    "binomial",
    "fill",
    "floor_divide",
    "index_fill",
    "index_put",
    "_index_put_impl_",
    "masked_fill",
    "rsub",
)


_BYTES = (torch.bool, torch.uint8)


def _waits_for_indices(values: Any, indices: Sequence[Any], *_: Any) -> bool:
    """Whether a GPU makes the program wait for the indices of a call.

    A GPU counts which elements of a mask are True, and brings an index from the CPU to
    the values.
    """
    return any(
        index is not None and (index.dtype in _BYTES or index.is_cpu)
        for index in indices
    )


def _waits_to_put(
    target: Any, indices: Sequence[Any], value: Any, accumulate: bool = False, *_: Any
) -> bool:
    """A mask needs no indices where one number is put: that is `masked_fill`.

    For a GPU, that is so of numbers of the CPU. But for a simulated device torch makes
    them there, of Python's numbers.
    """
    is_number = not value.dim() and not accumulate
    is_mask = all(index is None or index.dtype in _BYTES for index in indices)
    return not (is_number and is_mask) and _waits_for_indices(target, indices)


def _waits_for_range(
    values: Any, bins: Any = None, least: Any = 0, most: Any = 0, *_: Any
) -> bool:
    """`histc` without limits takes those of the values."""
    return (least or 0) == (most or 0)


def _waits_to_compare(one: Any, other: Any) -> bool:
    """A tensor equals itself, and GPUs do not look at its numbers."""
    return bool(
        one.data_ptr() != other.data_ptr()
        or one.stride() != other.stride()
        or one.size() != other.size()
    )


def _waits(*_: Any) -> bool:
    return True


# The operators for which it depends on arguments whether the program waits for the
# device, and those that wait for another reason than that the program sees a number: a
# decomposition asks whether it has converged.
_WAIT_IF: dict[str, Callable[..., bool]] = {
    "aten.index.Tensor": _waits_for_indices,
    "aten.index.Tensor_out": _waits_for_indices,
    "aten.index_put.default": _waits_to_put,
    "aten.index_put_.default": _waits_to_put,
    "aten._index_put_impl_.default": _waits_to_put,
    "aten.histc.default": _waits_for_range,
    "aten.equal.default": _waits_to_compare,
    "aten._linalg_svd.default": _waits,
}


@final
class _Operator:
    """The facts about an operator that its schema tells."""

    def __init__(self, op: Any) -> None:
        declared = schema(op)
        arguments = declared.arguments
        self.name = str(op)
        self.check = check_of(self.name)
        self.names: list[str] = [argument.name for argument in arguments]
        self._from_the_cpu = _FROM_THE_CPU.get(self.name, "").split()
        self._come_to_the_cpu = _COME_TO_THE_CPU.get(self.name)
        short = self.name[len("aten.") :]
        is_pointwise = (
            torch.Tag.pointwise in op.tags
            and short.partition(".")[0].rstrip("_") not in _TAKE_NO_NUMBERS
        )
        self._takes_numbers = is_pointwise or short.startswith(_TAKE_NUMBERS)
        self.tensors = [
            i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type)
        ]
        self.generator = (
            self.names.index("generator") if "generator" in self.names else None
        )
        self.draws_unasked = (
            self.generator is None and torch.Tag.nondeterministic_seeded in op.tags
        )
        self.written = [
            i
            for i, a in enumerate(arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        self.outs = [i for i in self.written if arguments[i].kwarg_only]
        aliases = {
            name: i
            for i, a in enumerate(arguments)
            if a.alias_info is not None
            for name in a.alias_info.before_set
        }
        infos = [result.alias_info for result in declared.returns]
        self.is_view = any(info is not None and not info.is_write for info in infos)
        # A result that is no tensor is a number that the program sees, so the program
        # waits for the device.
        self._is_read = any(
            "Tensor" not in str(result.type) for result in declared.returns
        )
        # So does it where torch needs a number to know the size of a result: `nonzero`,
        # or an index of bools.
        self._has_unknown_size = torch.Tag.dynamic_output_shape in op.tags
        self._waits_if = _WAIT_IF.get(self.name)
        self.not_deterministic = not_deterministic(self.name)
        # For each result: the position of the argument that it is, or None if it is a
        # new tensor.
        self.returned = [
            None if info is None else aliases.get(next(iter(info.before_set), ""))
            for info in infos
        ]

    def argument(
        self, position: int, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The argument at a position of the schema; None if there is none."""
        return (
            args[position] if position < len(args) else kwargs.get(self.names[position])
        )

    def is_read_by_the_program(self, arguments: _Arguments) -> bool:
        """Whether the program waits for the device, to see a number."""
        if self._waits_if is not None:
            return self._waits_if(*map(arguments.given, range(len(self.names))))
        return self._is_read or self._has_unknown_size

    @property
    def has_known_sizes(self) -> bool:
        """Whether its results' sizes say all that the program gets to know of them."""
        return not self._is_read and not self._has_unknown_size and not self.outs

    def runs_on_the_cpu(self, args: Sequence[Any]) -> bool:
        """Whether it is a CPU operator to which its tensors of a device come."""
        return self._come_to_the_cpu is not None and args[0].device.type == "cpu"

    def brought_to_the_cpu(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, with those on the CPU that come to it."""
        name = self._come_to_the_cpu
        given = [
            _brought(value) if self.names[i] == name else value
            for i, value in enumerate(args)
        ]
        return given, {
            key: _brought(value) if key == name else value
            for key, value in kwargs.items()
        }

    def may_be_on_the_cpu(self, tensor: torch.Tensor, position: int) -> bool:
        """Whether accelerators accept this CPU tensor as the argument at a position."""
        if self.names[position] in self._from_the_cpu:
            return True
        return self._takes_numbers and not tensor.dim() and position not in self.written


def _brought(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_brought(inner) for inner in value]
    return value.cpu() if isinstance(value, torch.Tensor) else value


_operator = functools.cache(_Operator)


@final
class _Arguments:
    """The arguments of one call as tensors of the CPU, and their device."""

    def __init__(
        self, operator: _Operator, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._operator = operator
        self._device: int | None = None
        # The device of a tensor that should be on a simulated one.
        self._stranger: torch.device | None = None
        self._given_args, self._given_kwargs = args, kwargs
        self._look(on_cpu_to_write if operator.written else on_cpu)
        if operator.written and overlap([tensor for tensor, _ in self._seen.values()]):
            self._look(Together())

    def _look(self, see: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._see = see
        # The tensors of the device and of the CPU, by id.
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.args = [
            self._seen_by_cpu(value, i) for i, value in enumerate(self._given_args)
        ]
        names, given = self._operator.names, self._given_kwargs
        self.kwargs = {
            name: self._seen_by_cpu(value, names.index(name))
            for name, value in given.items()
        }

    @property
    def device(self) -> int:
        """The index of the one device of the call."""
        if self._device is None:
            return ordinal(self._given_kwargs.get("device"))
        if self._stranger is not None:
            raise mismatch(
                self._operator.name, torch.device(NAME, self._device), self._stranger
            )
        return self._device

    @property
    def are_of_the_cpu(self) -> bool:
        """Whether the call is one of the CPU.

        PyTorch has brought it here because of a generator of a device.
        """
        return self._device is None and self._given_kwargs.get("device") is None

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the simulated device among the arguments."""
        return [tensor for tensor, _ in self._seen.values()]

    def written(self) -> list[torch.Tensor]:
        """The tensors among the arguments that the operator writes."""
        given = [self.given(position) for position in self._operator.written]
        lists = [
            value if isinstance(value, (list, tuple)) else [value] for value in given
        ]
        return [
            value
            for values in lists
            for value in values
            if isinstance(value, torch.Tensor)
        ]

    def given(self, position: int) -> Any:
        """The caller's argument at a position of the schema; None if there is none."""
        return self._operator.argument(position, self._given_args, self._given_kwargs)

    def __getitem__(self, position: int) -> Any:
        return self._operator.argument(position, self.args, self.kwargs)

    def __setitem__(self, position: int, value: Any) -> None:
        if position < len(self.args):
            self.args[position] = value
        else:
            self.kwargs[self._operator.names[position]] = value

    def _seen_by_cpu(self, value: Any, position: int) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, position)
        if isinstance(value, (list, tuple)) and value and type(value[0]) is not int:
            return [self._seen_by_cpu(inner, position) for inner in value]
        if isinstance(value, torch.device):
            return CPU
        return value

    def _tensor(self, tensor: torch.Tensor, position: int) -> torch.Tensor:
        index = index_of(tensor)
        if index is None:
            if not self._operator.may_be_on_the_cpu(tensor, position):
                self._stranger = tensor.device
            return tensor
        if self._device is not None and index != self._device:
            raise mismatch(
                self._operator.name, torch.device(NAME, self._device), tensor.device
            )
        self._device = index
        if id(tensor) not in self._seen:
            self._seen[id(tensor)] = tensor, self._see(tensor)
        return self._seen[id(tensor)][1]


def mismatch(operator: str, one: torch.device, other: torch.device) -> RuntimeError:
    """The error that torch raises for accelerators, in its words."""
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two "
        f"devices, {one} and {other}! (when checking arguments of {operator})"
    )


def run_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of every operator.

    Raises:
        RuntimeError: If its tensors are on several devices.
        NotImplementedError: If what it makes or draws from is not simulated, or the CPU
            cannot do it.
    """
    operator = _operator(op)
    if operator.is_view or operator.draws_unasked:
        what = (
            "makes a view"
            if operator.is_view
            else "draws random numbers and takes no generator"
        )
        raise NotImplementedError(
            f"The operator {op} {what}, and is not simulated on '{NAME}' devices."
        )
    return _run(op, op, operator, args, kwargs)


def written_for_cpu(op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a kernel of a function of tensors of the CPU.

    The kernel is for an operator that torch has for GPUs only.
    """
    operator = _operator(op)

    @functools.wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _run(op, function, operator, args, kwargs)

    return kernel


def _run(
    op: Any,
    call: Callable[..., Any],
    operator: _Operator,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    if operator.runs_on_the_cpu(args):
        args, kwargs = operator.brought_to_the_cpu(args, kwargs)
        values = (*args, *kwargs.values())
        tensors = (value for value in values if isinstance(value, torch.Tensor))
        if not any(map(is_simulated, tensors)):
            return call(*args, **kwargs)
    arguments = _Arguments(operator, args, kwargs)
    device = arguments.device
    if operator.check is not None:
        operator.check(arguments.args, arguments.kwargs)
    if (
        operator.not_deterministic is not None
        and torch.are_deterministic_algorithms_enabled()
    ):
        check_deterministic(
            operator.not_deterministic,
            lambda name: arguments[operator.names.index(name)],
        )
    if operator.generator is not None:
        _give_generator(arguments, operator.generator, device)
    if listeners_to_launches():
        launched(operator.name, device, arguments.tensors(), arguments.written())
    for position in operator.written:
        written = arguments[position]
        if isinstance(written, torch.Tensor) and written.layout is not torch.strided:
            # A sparse tensor may get other indices, which need memory of another size.
            arguments[position] = written.clone()
    results = NOT_KNOWN
    if shapes_only() and operator.has_known_sizes and is_large(arguments.tensors()):
        same = [
            None if position is None else arguments[position]
            for position in operator.returned
        ]
        results = shaped(op, call, arguments.args, arguments.kwargs, same)
    if results is NOT_KNOWN:
        # The caller's autocast of the CPU is for the caller's own tensors of the CPU,
        # and not for these.
        with (
            without_keys(_AUTOCAST_CPU) if is_autocast_enabled("cpu") else nullcontext()
        ):
            try:
                results = _called(call, operator, arguments)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise out_of_memory(device, None) from None
                raise
    if listeners():
        computed(op, device, arguments.args, arguments.kwargs, results)
    if (listeners() or get_sync_debug_mode()) and operator.is_read_by_the_program(
        arguments
    ):
        read_by_the_program(device, operator.name)
    for position in operator.written:
        _bring_back(arguments.given(position), arguments[position], device)
    return _given_back(operator, arguments, results, device)


def _give_generator(arguments: _Arguments, position: int, device: int) -> None:
    generator = arguments[position]
    if generator is None:
        arguments[position] = inside_default_generator(device)
    elif arguments.are_of_the_cpu:
        raise refused_by_the_cpu()
    else:
        arguments[position] = inside(generator)


def _called(
    call: Callable[..., Any], operator: _Operator, arguments: _Arguments
) -> Any:
    try:
        return call(*arguments.args, **arguments.kwargs)
    except RuntimeError as error:
        if operator.name in IN_FLOAT32 and "not implemented for" in str(error):
            return in_float32(call, arguments.args, arguments.kwargs)
        if "Expected a value of type 'Tensor" in str(error):
            # Torch wraps a number in a tensor where an operator wants a tensor, and
            # unwraps it again for a kernel that is written in Python. Not every
            # operator of the CPU accepts the number.
            for position in operator.tensors:
                value = arguments[position]
                if isinstance(value, (bool, int, float, complex)):
                    arguments[position] = torch.scalar_tensor(
                        value, dtype=_dtype_of(value), device=CPU
                    )
        elif operator.outs and "not resizable" in str(error):
            for position in operator.outs:
                if isinstance(arguments[position], torch.Tensor):
                    _check_whole(arguments.given(position), operator)
                    arguments[position] = torch.empty(
                        0, dtype=arguments[position].dtype, device=CPU
                    )
        else:
            raise
    return call(*arguments.args, **arguments.kwargs)


def _check_whole(out: torch.Tensor, operator: _Operator) -> None:
    if out.untyped_storage().nbytes() > out.nbytes:
        raise NotImplementedError(
            f"The operator {operator.name} would have to let `out` grow, of size "
            f"{tuple(out.size())}, which is a part of a larger tensor. That is not "
            f"simulated on '{NAME}' devices: give it a tensor of the result's size."
        )


def _dtype_of(value: complex) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    return {int: torch.int64, float: torch.float64, complex: torch.complex128}[
        type(value)
    ]


def _bring_back(target: Any, written: Any, device: int) -> None:
    """Brings the result that the CPU wrote to a tensor of the device.

    Nothing is to do if both have the same memory.
    """
    if isinstance(target, (list, tuple)):
        for one, other in zip(target, written, strict=True):
            _bring_back(one, other, device)
        return
    if not isinstance(target, torch.Tensor) or index_of(target) is None:
        return
    if target.layout is not torch.strided:
        tensor_data.__set__(target, on_device(written, device))
        return
    if written.is_conj() != target.is_conj() or written.is_neg() != target.is_neg():
        # The CPU may only have marked its result as conjugated or negated, for whoever
        # reads it.
        written = written.resolve_conj().resolve_neg()
    if written.size() != target.size() or not target.numel():
        adopt(target, written)
    elif written.data_ptr() != target.data_ptr():
        on_cpu(target).copy_(written)


def _given_back(
    operator: _Operator, arguments: _Arguments, results: Any, device: int
) -> Any:
    if not operator.returned:
        return None
    if len(operator.returned) == 1:
        position = operator.returned[0]
        return (
            _as_the_devices(results, device, operator)
            if position is None
            else arguments.given(position)
        )
    return tuple(
        _as_the_devices(result, device, operator)
        if position is None
        else arguments.given(position)
        for position, result in zip(operator.returned, results, strict=True)
    )


def _as_the_devices(result: Any, device: int, operator: _Operator) -> Any:
    if isinstance(result, torch.Tensor):
        if (
            result.layout not in (torch.strided, torch.sparse_coo)
            or result.is_quantized
        ):
            raise NotImplementedError(
                f"The operator {operator.name} makes a tensor of dtype {result.dtype} "
                f"and layout {result.layout}, and that is not simulated on '{NAME}' "
                "devices."
            )
        return on_device(result, device)
    if isinstance(result, (list, tuple)):
        return [_as_the_devices(inner, device, operator) for inner in result]
    return result


# Their kernels for CUDA write without counting it in the versions of the tensors, seen
# with torch 2.11 on an H100.
_UNCOUNTED = (
    "aten._foreach_lerp_.Scalar",
    "aten._foreach_lerp_.ScalarList",
    "aten._foreach_zero_.default",
)


def run_each_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of operators on lists, such as `_foreach_add_`.

    The lists may hold tensors of several devices.
    """
    operator = _operator(op)
    lists = [
        v
        for v in (*args, *kwargs.values())
        if isinstance(v, (list, tuple)) and v and _is_tensor(v[0])
    ]
    on_one_device = len({tensor.device for tensors in lists for tensor in tensors}) <= 1
    results = (
        run_on_cpu(op, *args, **kwargs)
        if on_one_device
        else _one_by_one(op, len(lists[0]), args, kwargs)
    )
    if str(op) in _UNCOUNTED:
        return results
    # Nobody else counts these writes on the device's tensors: torch leaves it to the
    # kernels of operators on lists, and the CPU's kernel has counted them on its own
    # tensors.
    targets = [
        tensor
        for position in operator.written
        for tensor in operator.argument(position, args, kwargs)
    ]
    written = [tensor for tensor in targets if not tensor.is_inference()]
    torch.autograd.graph.increment_version(written)
    return results


def _one_by_one(
    op: Any, count: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    def one(value: Any, i: int) -> Any:
        return (
            [value[i]]
            if isinstance(value, (list, tuple)) and len(value) == count
            else value
        )

    def run(*args: Any, **kwargs: Any) -> Any:
        lists = [
            value for value in (*args, *kwargs.values()) if isinstance(value, list)
        ]
        is_the_cpus = not any(
            _is_tensor(value) and is_simulated(value)
            for values in lists
            for value in values
        )
        return op(*args, **kwargs) if is_the_cpus else run_on_cpu(op, *args, **kwargs)

    results = [
        run(
            *(one(value, i) for value in args),
            **{name: one(value, i) for name, value in kwargs.items()},
        )
        for i in range(count)
    ]
    kinds = len(schema(op).returns)
    if kinds == 0:
        return None
    if kinds == 1:
        return [result[0] for result in results]
    return tuple([result[kind][0] for result in results] for kind in range(kinds))


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
