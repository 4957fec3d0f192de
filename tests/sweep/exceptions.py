"""What does not agree with the CPU, or is not tried, each with its reason.

With what takes tensors of two devices.
"""

_CSR = (
    "tensors in compressed sparse row format are not simulated; it raises and names "
    "the operator"
)
_NO_CPU = "for GPUs only: the CPU, with which it would be compared, does not have it"

OPERATORS = {
    "broadcast_shapes": "takes sizes and no tensors, so it is on no device",
    "jiterator_2inputs_2outputs": _NO_CPU,
    "jiterator_4inputs_with_extra_args": _NO_CPU,
    "jiterator_binary": _NO_CPU,
    "jiterator_binary_return_by_ref": _NO_CPU,
    "jiterator_unary": _NO_CPU,
    "nn_functional_batch_norm_without_cudnn": _NO_CPU,
    "sparse_mm_reduce": _CSR,
    "sparse_sampled_addmm": _CSR,
    "torch_ops_aten__efficient_attention_forward": _NO_CPU,
    "torch_ops_aten__flash_attention_forward": _NO_CPU,
}

MODULES: dict[str, str] = {}

OPTIMIZERS: dict[str, str] = {}

_SIZES = "reads only the sizes of the other tensor"
_COPIES = (
    "copies one tensor into a clone of the other, and copies go from any device to any"
)
_NUMBER = "reads single numbers out of tensors, as `item()` does"
_EACH = "does to each tensor what it does, on the device of that one"
_INDEX = "takes masks and indices of the CPU, as indexing does on accelerators"

# Operators that take a tensor on another device than the rest, and return the CPU's
# numbers.
MIXED = {
    "__getitem__": _INDEX,
    "_unsafe_masked_index": _INDEX,
    "_unsafe_masked_index_put_accumulate": _INDEX,
    "as_strided_scatter": _COPIES,
    "atleast_1d": _EACH,
    "atleast_2d": _EACH,
    "atleast_3d": _EACH,
    "broadcast_tensors": _SIZES,
    "diagonal_scatter": _COPIES,
    "expand_as": _SIZES,
    "index_put": _INDEX,
    "linspace_tensor_overload": _NUMBER,
    "logspace_tensor_overload": _NUMBER,
    "narrow": _NUMBER,
    "nn_functional_ctc_loss": (
        "brings the lengths to the CPU by itself, and takes targets of the CPU"
    ),
    "nn_functional_batch_norm": "returns an input without elements as it is",
    "reshape_as": _SIZES,
    "resize_as_": _SIZES,
    "select_scatter": _COPIES,
    "slice_scatter": _COPIES,
    "tensor_split": "wants indices on the CPU",
    "view_as": _SIZES,
}
