"""What a GPU answers, and simulated devices answered otherwise.

It was seen with torch 2.11 on an H100.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from conditions import for_releases
from torchstrategy.testing import cuda_alias, record_streams

# Libraries of operators. After one has gone, torch 2.10 compiles nothing any more in
# this process.
KEPT: list[torch.library.Library] = []


@pytest.fixture(autouse=True)
def alias(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # A test before may have left it off, which is a setting of the process: layers
    # would not be those of cuDNN.
    monkeypatch.setattr(torch.backends.cudnn, "enabled", True)
    with cuda_alias():
        yield


def ones(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*sizes, device="cuda", dtype=dtype)


# Programs that run


def test_a_tensor_of_scalars_is_made_while_operators_are_watched() -> None:
    s = torch.tensor(1.5, device="cuda", dtype=torch.float16)
    with record_streams():
        made = torch.tensor([[s, s], [s, s]], device="cuda")
        on_cpu = torch.as_tensor([s, s])
        with pytest.raises(
            ValueError,
            match="only one element tensors can be converted to Python scalars",
        ):
            torch.tensor([ones(2), ones(2)])
    assert (
        made.tolist() == [[1.5, 1.5]] * 2
        and made.dtype == torch.float16
        and made.device.type == "sim"
    )
    assert on_cpu.tolist() == [1.5, 1.5] and on_cpu.device.type == "cpu"


def test_a_kernel_that_is_registered_for_cuda_runs() -> None:
    library = torch.library.Library("answers", "DEF")
    KEPT.append(library)
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x + 1, "CUDA")
    library.impl("f", lambda x: x - 1, "CPU")
    assert torch.ops.answers.f(ones(2)).tolist() == [2, 2]
    assert torch.ops.answers.f(torch.ones(2)).tolist() == [0, 0]
    # torch's FSDP registers one kernel for both kinds of devices.
    library.impl("f", lambda x: x + 1, "PrivateUse1")


def test_an_operator_of_ones_own_has_a_kernel_for_cuda() -> None:
    @torch.library.custom_op("answers::twice", mutates_args=(), device_types="cuda")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.library.custom_op("answers::thrice", mutates_args=())
    def thrice(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the kernel of other devices")

    thrice.register_kernel("cuda")(lambda x: x * 3)
    assert twice(ones(2)).tolist() == [2, 2] and thrice(ones(2)).tolist() == [3, 3]
    with pytest.raises(
        NotImplementedError,
        match="'answers::twice' with arguments from the 'CPU' backend",
    ):
        twice(torch.ones(2))


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # as on a GPU
def test_a_kernel_for_cuda_replaces_torchs_own_while_its_library_lives() -> None:
    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl("sin", lambda x: x - 7)
    assert ones(1).sin().item() == -6
    library._destroy()
    assert ones(1).sin().item() == pytest.approx(0.8415, abs=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # a FutureWarning since torch 2.14
def test_a_scripted_module_moves() -> None:
    module = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    weight = module.state_dict()["0.weight"].clone()
    module.cuda()
    assert module(ones(3, 2)).device.type == "sim"
    assert {value.device.type for value in module.state_dict().values()} == {"sim"}
    assert module.cpu()(torch.ones(3, 2)).device.type == "cpu"
    assert torch.equal(module.state_dict()["0.weight"], weight)


# Autocast


@for_releases
def test_autocast_knows_the_operators_that_torch_casts_on_cuda() -> None:
    def has(name: str, key: str) -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))

    names = torch._C._dispatch_get_all_op_names()
    lists = {
        key: {n for n in names if n.startswith("aten::") and has(n, key)}
        for key in ("AutocastCUDA", KEY)
    }
    cuda = {
        name
        for name in lists["AutocastCUDA"]
        if not name.startswith(("aten::cudnn_", "aten::_cudnn_"))
    }
    # Named tensors, which torch has given up.
    cuda -= {name for name in cuda if "imname" in name or "names" in name}
    of_cudnn = {
        f"aten::{name}.{overload}" for name in LAYERS for overload in ("input", "data")
    }
    assert lists[KEY] - of_cudnn <= cuda
    # Newer than the version that was looked at.
    assert cuda - lists[KEY] <= {"aten::linalg_matrix_sqrth"}


KEY = "AutocastPrivateUse1"
LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_as_on_cuda(dtype: torch.dtype) -> None:
    image, rows = ones(1, 2, 4, 4, dtype=dtype), ones(2, 1, 3)
    layers = [nn.LSTM(3, 2).cuda(), nn.GRU(3, 2).cuda(), nn.RNN(3, 2).cuda()]
    with torch.autocast("cuda", dtype):
        for mode in ("nearest", "bilinear", "bicubic", "nearest-exact"):
            assert (
                nn.functional.interpolate(image, scale_factor=2, mode=mode).dtype
                == torch.float32
            )
        for layer in layers:  # cuDNN's kernel takes float16 alone
            assert layer(rows)[0].dtype == torch.float16
            layer(rows)[0].sum().backward()
            assert layer.weight_ih_l0.grad.dtype == torch.float32


def test_autocast_refuses_the_cross_entropy_of_probabilities() -> None:
    for dtype in (torch.float32, torch.float16):
        p = ones(2, dtype=dtype) / 2
        with torch.autocast("cuda"):
            for loss in (nn.functional.binary_cross_entropy, nn.BCELoss()):
                with pytest.raises(
                    RuntimeError, match="BCELoss are unsafe to autocast"
                ):
                    loss(p, p)
            with torch.autocast("cuda", enabled=False):
                nn.functional.binary_cross_entropy(p, p)


def test_autocast_to_a_wide_dtype_is_no_error() -> None:
    with torch.autocast("cuda", torch.float32):
        assert (
            torch.is_autocast_enabled("cuda")
            and (ones(2, 2).half() @ ones(2, 2)).dtype == torch.float32
        )


# Operators and dtypes


def integers(*sizes: int) -> torch.Tensor:
    return ones(*sizes, dtype=torch.int64)


LOW = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: integers(2, 2) @ integers(2, 2),
            "\"addmm_cuda\" not implemented for 'Long'",
        ),
        (
            lambda: nn.functional.linear(integers(2, 2).int(), integers(2, 2).int()),
            "\"addmm_cuda\" not .* 'Int'",
        ),
        (
            lambda: torch.einsum("ij,jk->ik", integers(2, 2), integers(2, 2)),
            "\"baddbmm_cuda\" not .* 'Long'",
        ),
        (
            lambda: integers(1, 2, 2) @ integers(1, 2, 2),
            "\"baddbmm_cuda\" not implemented for 'Long'",
        ),
        (lambda: integers(2) @ integers(2), "\"dot\" not implemented for 'Long'"),
        (
            lambda: nn.functional.dropout(integers(2)),
            "\"fused_dropout\" not implemented for 'Long'",
        ),
        (
            lambda: nn.functional.conv2d(integers(1, 1, 2, 2), integers(1, 1, 1, 1)),
            "not implemented for 'Long'",
        ),
        (
            lambda: nn.functional.max_pool2d(integers(1, 2, 2), 2),
            "not implemented for 'Long'",
        ),
        (
            lambda: nn.functional.interpolate(
                ones(1, 1, 2, 2, dtype=torch.uint8), 4, mode="bilinear"
            ),
            "for 'Byte'",
        ),
        (
            lambda: nn.functional.cross_entropy(ones(1, 2), integers(1).int()),
            "_cuda_kernel_2d_index\" .* for 'Int'",
        ),
        (lambda: torch.histogram(ones(2), 2), "Could not run 'aten::histogram'"),
        (
            lambda: ones(2, dtype=torch.bfloat16).histc(2),
            "\"histc\" not implemented for 'BFloat16'",
        ),
    ],
)
def test_operators_that_cuda_does_not_have_for_a_dtype_are_refused(
    call: Any, message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda h: nn.LayerNorm(4).cuda()(h),
            "expected scalar type Half but found Float",
        ),
        (
            lambda h: nn.GroupNorm(2, 4).cuda()(h),
            "expected scalar type Half but found Float",
        ),
        (
            lambda h: nn.Conv1d(4, 1, 1, bias=False).cuda()(h[..., None]),
            (
                r"Input type \(torch.cuda.HalfTensor\) and weight type "
                r"\(torch.cuda.FloatTensor\) should be the same"
            ),
        ),
        (lambda h: h.histc(2), "HalfTensor is not supported"),
        (
            lambda h: torch._int_mm(h.char(), h.char().T),
            r"self.size\(0\) needs to be greater than 16, but got 2",
        ),
    ],
)
def test_mixed_dtypes_are_refused_as_on_cuda(call: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(ones(2, 4, dtype=torch.float16))


@pytest.mark.parametrize("dtype", LOW)
def test_operators_that_cuda_has_for_low_precision_are_computed(
    dtype: torch.dtype,
) -> None:
    x = torch.tensor(
        [[1.25, 2.0], [3.0, 4.5]], device="cuda", dtype=dtype, requires_grad=True
    )
    assert x.trace().item() == 5.75 and x.trace().dtype == dtype
    pooled = nn.functional.avg_pool3d(x[None, None], (1, 2, 2))
    assert pooled.item() == 2.6875 and pooled.dtype == dtype
    loss = nn.functional.multi_margin_loss(x, torch.tensor([0, 1], device="cuda"))
    (pooled.sum() + loss).backward()
    assert loss.dtype == dtype and x.grad is not None and x.grad.dtype == dtype
    with torch.autocast("cuda", dtype):
        assert (
            nn.functional.layer_norm(x, (2,), ones(2), ones(2)).dtype == torch.float32
        )


def test_what_has_no_elements_is_not_refused() -> None:
    assert (integers(0, 2) @ integers(2, 2)).shape == (0, 2) and nn.functional.dropout(
        integers(2), 0.0
    ).sum() == 2


# Layers


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_in_eval_mode_has_no_backward(layer: Any) -> None:
    model, x = layer(3, 4).cuda().eval(), ones(2, 1, 3).requires_grad_()
    with pytest.raises(
        RuntimeError, match="cudnn RNN backward can only be called in training mode"
    ):
        model(x)[0].sum().backward()
    with pytest.raises(
        RuntimeError, match="cudnn RNN backward can only be called in training mode"
    ):
        model(nn.utils.rnn.pack_sequence([ones(2, 3)]))[0].data.sum().backward()
    with torch.no_grad():
        expected = model(x)[0]
    for one, other in zip(
        flattened(model(x)), flattened(copy.deepcopy(model).cpu()(x.cpu())), strict=True
    ):
        torch.testing.assert_close(one.cpu(), other)
        assert one.stride() == other.stride()
    with torch.inference_mode():
        assert torch.equal(model(x)[0], expected)
    model.train()(x)[0].sum().backward()
    with torch.backends.cudnn.flags(enabled=False):
        model.eval()(x)[0].sum().backward()


def flattened(results: Any) -> list[torch.Tensor]:
    output, state = results
    return [output, *(state if isinstance(state, tuple) else (state,))]


FLASH, EFFICIENT, CUDNN = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)


def attend(
    dtype: torch.dtype, backends: Any, *mask: torch.Tensor, **options: Any
) -> torch.Tensor:
    x = torch.linspace(0, 1, 8, device="cuda").view(1, 1, 4, 2).to(dtype)
    with sdpa_kernel(backends):
        return nn.functional.scaled_dot_product_attention(x, x, x, *mask, **options)


@pytest.mark.parametrize(
    ("dtype", "backends", "has_mask"),
    [
        (torch.float32, FLASH, False),
        (torch.float16, FLASH, True),
        (torch.float64, EFFICIENT, False),
        (torch.float32, CUDNN, False),
    ],
)
def test_attention_refuses_a_kernel_that_does_not_compute_it(
    dtype: Any, backends: Any, has_mask: bool
) -> None:
    mask = [ones(4, 4).bool()] if has_mask else []
    with pytest.raises(RuntimeError, match="No available kernel"):
        attend(dtype, backends, *mask)
    assert attend(dtype, [backends, SDPBackend.MATH], *mask).dtype == dtype


def test_attention_computes_and_refuses_as_on_cuda() -> None:
    with pytest.raises(
        RuntimeError,
        match="No viable backend for scaled_dot_product_attention was found",
    ):
        attend(torch.float16, [])
    assert attend(torch.float32, EFFICIENT, ones(4, 4).bool()).dtype == torch.float32
    x, half = ones(1, 1, 4, 2), ones(1, 1, 4, 2).half()
    with pytest.raises(
        RuntimeError, match="Expected query, key, and value to have the same dtype"
    ):
        nn.functional.scaled_dot_product_attention(half, x, x)
    with pytest.raises(
        RuntimeError,
        match="Expected attn_mask dtype to be bool or float or to match query dtype",
    ):
        nn.functional.scaled_dot_product_attention(x, x, x, integers(4, 4))
    causal = attend(
        torch.float32, list(SDPBackend.__members__.values())[1:5], is_causal=True
    )
    for mask in (ones(4, 4).bool(), torch.zeros(4, 4, device="cuda")):
        both = attend(torch.float32, [EFFICIENT, SDPBackend.MATH], mask, is_causal=True)
        torch.testing.assert_close(both, causal)


def test_drivers_of_linear_algebra_are_those_of_cuda() -> None:
    matrix = torch.tensor([[2.0, 1.0], [1.0, 2.0]], device="cuda")
    for driver in ("gesvd", "gesvdj", "gesvda"):
        assert torch.linalg.svd(matrix, driver=driver)[1].tolist() == pytest.approx(
            [3, 1]
        )
    with pytest.raises(RuntimeError, match="unknown svd driver gelsd"):
        torch.linalg.svdvals(matrix, driver="gelsd")
    solved = torch.linalg.lstsq(matrix, matrix)
    torch.testing.assert_close(solved.solution.cpu(), torch.eye(2))
    assert solved.rank.numel() == 0  # CUDA does not say it
    with pytest.raises(
        RuntimeError, match="`driver` other than `gels` is not supported on CUDA"
    ):
        torch.linalg.lstsq(matrix, matrix, driver="gelsd")


def test_errors_have_the_types_and_names_of_cuda() -> None:
    x, index = ones(2, 2), torch.zeros(1, 2, device="cuda", dtype=torch.int64)
    with pytest.raises(
        RuntimeError, match="Index is supposed to be an empty tensor or a vector"
    ):
        x.index_select(0, index)
    with pytest.raises(
        RuntimeError,
        match=r"have one of the following scalar types.*got torch.cuda.ShortTensor",
    ):
        nn.functional.embedding(index.short(), x)
    with pytest.raises(
        RuntimeError, match="Expected all tensors to be on the same device"
    ):
        torch.sparse_coo_tensor(index, torch.ones(2), (3,), check_invariants=False)
    for make in (torch.empty, torch.zeros, torch.rand):
        with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
            make(2, device="cuda", pin_memory=True)
    with pytest.raises(RuntimeError, match="Invalid device string: 'cuda:x'"):
        torch.device("cuda:x")
    with pytest.raises(
        NotImplementedError, match="\"addmm_sparse_cuda\" not implemented for 'Half'"
    ):
        torch.sparse.mm(x.half().to_sparse(), x.half())
