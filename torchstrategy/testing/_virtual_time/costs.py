"""How long an operator takes on a device, and a collective of ranks: the cost model.

An operator takes as long as its arithmetic or its traffic with memory, whichever is
more, and at least `DeviceProfile.kernel`. All constants are in this file and in
`profiles`.

Note [Where the constants come from]
They were chosen once, and corrected once, by the published times of training that
`profiles` lists: they are a fit, not a measurement. `_TILES` and `_ramp` describe how
libraries of matrix products divide their work; `_PASSES` how often kernels of torch go
over their tensors, counted in their source; `_SLOWER` is a guess for kernels that do
more than to add up."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch.utils.flop_counter import flop_registry

from torchstrategy.testing._virtual_time.profiles import DeviceProfile


class Cost(NamedTuple):
    """What one operator costs."""

    seconds: float
    flops: int
    bytes: int  # that go between the device and its memory
    # The seconds that its arithmetic would take at the peak of its dtype.
    at_peak: float
    launches: int = 1  # how many kernels it is
    # The part of the seconds that transposes images. Images in channels-last order do
    # not need it.
    layout: float = 0.0


# How a matrix product is divided: rows and columns of a tile, and how well a
# multiprocessor is used by such tiles.
_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.93),
    (128, 64, 0.75),
    (64, 64, 0.55),
)
_LEAST_SPLIT = 512  # of the inner dimension of a product with few tiles, if it is split
_ALIGNMENT = 16  # bytes of a row of which tensor cores want multiples
_UNALIGNED = {2: 0.35}  # by the bytes of an element: the part of the speed that is left
_UNALIGNED_ELSE = 0.6

# How often a kernel goes over its bytes, in units of reading its inputs and writing its
# outputs once.
_PASSES = {
    "native_batch_norm": 1.5,
    "native_batch_norm_backward": 5 / 3,
    "_log_softmax": 1.5,
    "_log_softmax_backward_data": 1.34,
}
_TRAINING = 5  # the position of this argument of a batch norm
# Kernels that get less of the bandwidth than others, and the part of it that they get.
_SLOWER = dict.fromkeys(
    (
        "_log_softmax",
        "_log_softmax_backward_data",
        "_softmax",
        "_softmax_backward_data",
        "masked_fill_",
        "native_batch_norm",
        "native_batch_norm_backward",
        "native_layer_norm_backward",
        "where",
    ),
    0.8,
)
# The part of the bandwidth of a copy that changes the order of elements or the dtype.
_STRIDED_COPY = 0.75
_WRITES_ONLY = (
    "fill_",
    "zero_",
    "uniform_",
    "normal_",
    "bernoulli_",
    "random_",
    "exponential_",
)
_GATHERS = ("embedding", "index_select", "gather", "index")
# For each operator, the position of the first factor.
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1}
_MAY_USE_TF32 = {*_PRODUCTS, "convolution", "convolution_backward"}
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# How few channels slow a convolution down, as of an image's three, and the part of its
# speed that is left.
_FEW_CHANNELS, _OF_FEW_CHANNELS = 8, 0.35
_TENSORS_IN_A_LAUNCH = 60  # of an operator on lists
_NOT_A_KERNEL = ("is_set_to",)
# How much of the whole goes over each link of a ring of n ranks, in units of (n - 1) /
# n. What is not here goes over a link once.
_PART_OF_RING = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "gather": 1,
    "scatter": 1,
    "all_to_all": 1,
}


@final
class CostModel:
    """Says what operators cost on the device of a profile."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._known: dict[Any, Cost | None] = {}

    def of(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any
    ) -> Cost | None:
        """The cost of an operator; None if it is no kernel.

        Only sizes, strides and dtypes are looked at.
        """
        key: tuple[Any, ...] = (
            op,
            _signature(args),
            _signature(tuple(kwargs.items())) if kwargs else (),
        )
        if (name := name_of(op)) in _MAY_USE_TF32:
            key = (*key, _uses_tf32(name not in _PRODUCTS))
        if key not in self._known:
            self._known[key] = self._computed(op, args, kwargs, results)
        return self._known[key]

    def copy_within(self, source: torch.Tensor, target: torch.Tensor) -> Cost:
        """The cost of a copy within one device."""
        is_straight = (
            source.dtype == target.dtype and source.stride() == target.stride()
        )
        moved = size_of(source) + size_of(target)
        seconds = (
            self._memory(moved) / (1 if is_straight else _STRIDED_COPY)
            + self._profile.kernel
        )
        return Cost(seconds, 0, moved, 0.0)

    def _computed(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any
    ) -> Cost | None:
        name = name_of(op)
        if name in _NOT_A_KERNEL:
            return None
        moved = _traffic(op, name, args, kwargs, results)
        memory = self._memory(moved) / (
            1.0 if _is_known_norm(name, args) else _SLOWER.get(name, 1.0)
        )
        flops, compute, dtype, layout, images = 0, 0.0, torch.float32, 0.0, 0.0
        uses_tensor_cores = False
        if name in _PRODUCTS:
            first, second = args[_PRODUCTS[name] : _PRODUCTS[name] + 2]
            batch = first.shape[0] if first.dim() == 3 else 1
            m, k, n = first.shape[-2], first.shape[-1], second.shape[-1]
            flops, dtype, uses_tensor_cores = (
                2 * batch * m * n * k,
                first.dtype,
                _uses_tf32(False),
            )
            compute = self._matmul(batch, m, n, k, dtype)
        elif name in ("convolution", "convolution_backward"):
            flops = int(
                flop_registry[op.overloadpacket](*args, **kwargs, out_val=results)
            )
            inputs, weight = args[:2] if name == "convolution" else args[1:3]
            dtype, uses_tensor_cores = inputs.dtype, _uses_tf32(True)
            compute, layout = self._convolution(flops, inputs, weight, results)
            images = layout if inputs.dim() == 4 else 0.0
        elif name.startswith(_ATTENTION):
            flops, dtype = _attention_flops(name, args, kwargs), args[0].dtype
            part = self._profile.attention * (
                0.8 if name.endswith("_backward") else 1.0
            )
            compute = flops / (self._profile.peak(dtype) * part)
        at_peak = flops / self._profile.peak(dtype, uses_tensor_cores)
        launches = _launches(name, args)
        seconds = max(compute, memory) + layout + launches * self._profile.kernel
        return Cost(seconds, flops, moved, at_peak, launches, images)

    def _memory(self, moved: float) -> float:
        return moved / (self._profile.bandwidth * 1e9 * self._profile.streaming)

    def _has_no_tensor_cores(self, dtype: torch.dtype, tf32: bool) -> bool:
        return self._profile.peak(dtype, tf32) <= self._profile.peak(torch.float32)

    def _matmul(self, batch: int, m: int, n: int, k: int, dtype: torch.dtype) -> float:
        if not batch * m * n * k:
            return 0.0
        tf32, size, used = _uses_tf32(False), dtype.itemsize, 0.0
        is_simple = self._has_no_tensor_cores(dtype, tf32)
        processors = self._profile.processors
        for rows, columns, quality in _TILES:
            tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
            waves = math.ceil(tiles / processors)
            filled = batch * m * n / (rows * columns) / (waves * processors)
            if tiles < processors and k >= 2 * _LEAST_SPLIT:
                filled *= max(1.0, 0.8 * min(processors // tiles, k // _LEAST_SPLIT))
            used = max(used, min(1.0, filled) * quality)
        if is_simple or (k * size % _ALIGNMENT == 0 and n * size % _ALIGNMENT == 0):
            aligned = 1.0
        else:
            aligned = _UNALIGNED.get(size, _UNALIGNED_ELSE)
        part = self._profile.simple_matmul if is_simple else self._profile.matmul
        return (
            2
            * batch
            * m
            * n
            * k
            / (self._profile.peak(dtype, tf32) * part * used * _ramp(k) * aligned)
        )

    def _convolution(
        self, flops: int, inputs: torch.Tensor, weight: torch.Tensor, results: Any
    ) -> tuple[float, float]:
        tf32 = _uses_tf32(True)
        is_simple = self._has_no_tensor_cores(inputs.dtype, tf32)
        part = (
            self._profile.simple_convolution if is_simple else self._profile.convolution
        )
        if inputs.shape[1] == weight.shape[1] < _FEW_CHANNELS:
            part *= _OF_FEW_CHANNELS
        layout = 0.0
        is_last = inputs.dim() == 4 and inputs.is_contiguous(
            memory_format=torch.channels_last
        )
        if not is_simple and not is_last:
            # Tensor cores want channels last, so the inputs and the outputs are
            # transposed.
            layout = self._memory(
                2 * (size_of(inputs) + sum(map(size_of, list(tensors_in(results))[:1])))
            )
        return flops / (self._profile.peak(inputs.dtype, tf32) * part), layout


def _ramp(k: int) -> float:
    """The part of a product's time in which its main loop is at full speed."""
    return k / (k + 64)


def size_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor; elements that an expanded tensor repeats count once."""
    count = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results of an operator."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)


def _traffic(
    op: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any
) -> int:
    """The bytes that an operator reads and writes."""
    inputs, outputs = (
        list(tensors_in([*args, *kwargs.values()])),
        list(tensors_in(results)),
    )
    made = sum(
        size_of(tensor)
        for tensor in outputs
        if not any(tensor is other for other in inputs)
    )
    if name in _GATHERS:
        return 2 * made
    if name == "nll_loss_forward":
        # It reads one number of each row, from a line of memory of its own.
        return int(64 * args[1].numel())
    if name == "nll_loss_backward":
        return 2 * made  # set to zero, then written here and there
    if name == "embedding_dense_backward":
        return 2 * size_of(args[0]) + 2 * made
    rewritten = sum(
        size_of(tensor)
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(
            args[i] if i < len(args) else kwargs.get(argument.name)
        )
    )
    if name in _WRITES_ONLY:
        return rewritten
    if name == "_foreach_copy_":
        return 2 * rewritten
    passes = 1.0 if _is_known_norm(name, args) else _PASSES.get(name, 1.0)
    return int((sum(map(size_of, inputs)) + rewritten + made) * passes)


def _is_known_norm(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator is a batch norm in evaluation, with known statistics.

    Such a batch norm is a product and a sum for each element.
    """
    return name == "native_batch_norm" and not args[_TRAINING]


def _attention_flops(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    is_backward = name.endswith("_backward")
    query, key, value = args[1:4] if is_backward else args[:3]
    position = 7 if is_backward else 4
    is_causal = (
        args[position] if len(args) > position else kwargs.get("is_causal", False)
    )
    batch, heads, rows, width = query.shape
    columns, value_width = key.shape[2], value.shape[3]
    products = batch * heads * rows * columns * (width + value_width)
    # The backward computes the scores again, and has four products of its own. Half of
    # a causal one is left out.
    return int((5 if is_backward else 2) * products // (2 if is_causal else 1))


def _launches(name: str, args: Sequence[Any]) -> int:
    if not name.startswith(("_foreach_", "_fused_")):
        return 1
    count = next((len(value) for value in args if isinstance(value, (list, tuple))), 1)
    return max(1, math.ceil(count / _TENSORS_IN_A_LAUNCH))


def _uses_tf32(in_convolutions: bool) -> bool:
    """Whether float32 is computed in tensor cores, as the program set for CUDA."""
    backends: Any = torch.backends
    settings = backends.cudnn.conv if in_convolutions else backends.cuda.matmul
    return bool(settings.fp32_precision == "tf32")


@functools.cache
def name_of(op: Any) -> str:
    """The name of an operator without its overload: `"add"`."""
    return str(op.overloadpacket.__name__)


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.size(), value.stride()
    if isinstance(value, (list, tuple)):
        return tuple([_signature(inner) for inner in value])
    # Numbers of the same type cost the same, such as the learning rate of this step and
    # of the next one.
    return value if isinstance(value, (int, bool, str)) else type(value)


def collective_seconds(
    kind: str, size: int, ranks: int, on_devices: bool, profile: DeviceProfile
) -> float:
    """The seconds that a collective takes from when the last rank has come.

    Bytes go around a ring of all ranks, each link carrying its part.

    Args:
        kind: Which collective.
        size: The bytes of the whole.
        ranks: How many ranks there are.
        on_devices: Whether the tensors are on devices; else they are on the CPU.
        profile: What is known of the devices.
    """
    if kind in _PART_OF_RING:
        part = _PART_OF_RING[kind] * (ranks - 1) / ranks
    else:
        part = 1.0 if ranks > 1 else 0.0
    bandwidth = profile.peer if on_devices else profile.cpu_bandwidth
    return profile.collective + size * part / (bandwidth * 1e9)
