"""What a GPU answers, and simulated devices answered otherwise; seen with torch 2.11 on an H100."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from torchstrategy.testing import cuda_alias, record_streams


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
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
        with pytest.raises(ValueError, match="only one element tensors can be converted to Python scalars"):
            torch.tensor([ones(2), ones(2)])
    assert made.tolist() == [[1.5, 1.5]] * 2 and made.dtype == torch.float16 and made.device.type == "sim"
    assert on_cpu.tolist() == [1.5, 1.5] and on_cpu.device.type == "cpu"


def test_a_kernel_that_is_registered_for_cuda_runs() -> None:
    library = torch.library.Library("answers", "DEF")
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
    with pytest.raises(NotImplementedError, match="'answers::twice' with arguments from the 'CPU' backend"):
        twice(torch.ones(2))


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # as on a GPU
def test_a_kernel_for_cuda_takes_the_place_of_torchs_own_as_long_as_its_library_lives() -> None:
    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl("sin", lambda x: x - 7)
    assert ones(1).sin().item() == -6
    library._destroy()
    assert ones(1).sin().item() == pytest.approx(0.8415, abs=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_module_moves() -> None:
    module = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    weight = module.state_dict()["0.weight"].clone()
    module.cuda()
    assert module(ones(3, 2)).device.type == "sim"
    assert {value.device.type for value in module.state_dict().values()} == {"sim"}
    assert module.cpu()(torch.ones(3, 2)).device.type == "cpu"
    assert torch.equal(module.state_dict()["0.weight"], weight)


# Autocast


def test_autocast_knows_the_operators_that_torch_casts_on_cuda() -> None:
    def has(name: str, key: str) -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))

    names = torch._C._dispatch_get_all_op_names()
    lists = {key: {n for n in names if n.startswith("aten::") and has(n, key)} for key in ("AutocastCUDA", KEY)}
    cuda = {name for name in lists["AutocastCUDA"] if not name.startswith(("aten::cudnn_", "aten::_cudnn_"))}
    cuda -= {name for name in cuda if "imname" in name or "names" in name}  # named tensors, which torch has given up
    of_cudnn = {f"aten::{name}.{overload}" for name in LAYERS for overload in ("input", "data")}
    assert lists[KEY] - of_cudnn <= cuda
    assert cuda - lists[KEY] <= {"aten::linalg_matrix_sqrth"}  # newer than the version that was looked at


KEY = "AutocastPrivateUse1"
LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_as_on_cuda(dtype: torch.dtype) -> None:
    image, rows = ones(1, 2, 4, 4, dtype=dtype), ones(2, 1, 3)
    layers = [nn.LSTM(3, 2).cuda(), nn.GRU(3, 2).cuda(), nn.RNN(3, 2).cuda()]
    with torch.autocast("cuda", dtype):
        for mode in ("nearest", "bilinear", "bicubic", "nearest-exact"):
            assert nn.functional.interpolate(image, scale_factor=2, mode=mode).dtype == torch.float32
        for layer in layers:  # cuDNN's kernel takes float16 alone
            assert layer(rows)[0].dtype == torch.float16
            layer(rows)[0].sum().backward()
            assert layer.weight_ih_l0.grad.dtype == torch.float32


def test_autocast_refuses_the_cross_entropy_of_probabilities() -> None:
    for dtype in (torch.float32, torch.float16):
        p = ones(2, dtype=dtype) / 2
        with torch.autocast("cuda"):
            for loss in (nn.functional.binary_cross_entropy, nn.BCELoss()):
                with pytest.raises(RuntimeError, match="BCELoss are unsafe to autocast"):
                    loss(p, p)
            with torch.autocast("cuda", enabled=False):
                nn.functional.binary_cross_entropy(p, p)


def test_autocast_to_a_wide_dtype_is_no_error() -> None:
    with torch.autocast("cuda", torch.float32):
        assert torch.is_autocast_enabled("cuda") and (ones(2, 2).half() @ ones(2, 2)).dtype == torch.float32
