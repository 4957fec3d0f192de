"""Tensors of simulated devices compute what the CPU computes.

Where they are, and what may be mixed, is tested, too.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import torchstrategy.testing

MIXED = "Expected all tensors to be on the same device"
CPU = torch.device("cpu")
ONE, TWO = torch.device("sim:1"), torch.device("sim:2")

DTYPES = [
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint32,
]

FACTORIES: dict[str, Callable[..., torch.Tensor]] = {
    "empty": lambda **on: torch.empty(2, 3, **on),
    "empty_strided": lambda **on: torch.empty_strided((2, 3), (1, 2), **on),
    "zeros": lambda **on: torch.zeros(2, 3, **on),
    "ones": lambda **on: torch.ones(2, 3, **on),
    "full": lambda **on: torch.full((2,), 3.0, **on),
    "tensor": lambda **on: torch.tensor([1.0, 2.0], **on),
    "tensor_of_an_array": lambda **on: torch.tensor(np.ones(2), **on),
    "as_tensor": lambda **on: torch.as_tensor([1, 2], **on),
    "asarray": lambda **on: torch.asarray([1, 2], **on),
    "scalar_tensor": lambda **on: torch.scalar_tensor(1.0, **on),
    "arange": lambda **on: torch.arange(5, **on),
    "linspace": lambda **on: torch.linspace(0, 1, 5, **on),
    "eye": lambda **on: torch.eye(3, **on),
    "tril_indices": lambda **on: torch.tril_indices(3, 3, **on),
    "kaiser_window": lambda **on: torch.kaiser_window(5, **on),
    "rand": lambda **on: torch.rand(2, **on),
    "randn": lambda **on: torch.randn(2, **on),
    "randint": lambda **on: torch.randint(0, 5, (3,), **on),
    "randperm": lambda **on: torch.randperm(5, **on),
    "sparse": lambda **on: torch.sparse_coo_tensor(
        [[0], [1]], [1.0], (2, 2), check_invariants=True, **on
    ),
}

MIXTURES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda a, b: a + b,
    "add_": lambda a, b: a.add_(b),
    "mm": lambda a, b: a @ b,
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "cat": lambda a, b: torch.cat([a, b]),
    "cat_of_nothing": lambda a, b: torch.cat([a[:0], b[:0]]),
    "stack": lambda a, b: torch.stack([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.5),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 1.0),
    "gather": lambda a, b: a.gather(0, b.long()),
    "scatter": lambda a, b: a.scatter(0, b.long(), 1.0),
    "index_select": lambda a, b: a.index_select(0, b[0].long()),
    "index_put": lambda a, b: a.__setitem__(a[:, 0].long(), b),
    "linear": lambda a, b: F.linear(a, b),
    "conv1d": lambda a, b: F.conv1d(a[None], b[:, :, None]),
    "embedding": lambda a, b: F.embedding(a.long(), b),
    "layer_norm": lambda a, b: F.layer_norm(a, (2,), b[0]),
    "batch_norm": lambda a, b: F.batch_norm(a, b[0], b[1]),
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "cross_entropy": lambda a, b: F.cross_entropy(a, b[0].long()),
    "equal": lambda a, b: torch.equal(a, b),
    "allclose": lambda a, b: torch.allclose(a, b),
    "out": lambda a, b: torch.add(a, 1, out=b),
    "foreach": lambda a, b: torch._foreach_add([a, b], [b, b]),
}


# Which torch 2.11 says once a process.
SPARSE_CHECKS = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
@SPARSE_CHECKS
class TestFactories:
    @pytest.mark.parametrize("device", ["sim:0", "sim:3", TWO], ids=str)
    def test_a_tensor_is_a_plain_one_on_the_device_it_was_made_on(
        self, make: Any, device: Any
    ) -> None:
        made = make(device=device)
        assert type(made) is torch.Tensor
        assert made.device == torch.device(device)

    def test_without_an_index_it_is_made_on_the_current_device(self, make: Any) -> None:
        with torch.accelerator.device_index(2):
            assert make(device="sim").device == TWO
            assert make(device=torch.device("sim")).device == TWO

    def test_it_is_made_on_the_default_device(self, make: Any) -> None:
        with torch.device("sim:1"):
            assert make().device == ONE
        with torch.accelerator.device_index(2), torch.device("sim"):
            assert make().device == TWO
        assert make().device == CPU


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_dtype_go_and_come_back_with_the_same_bits(
    dtype: torch.dtype,
) -> None:
    original = (
        torch.arange(8, dtype=torch.uint8).repeat(2).view(dtype)
        if dtype is not torch.bool
        else torch.eye(2) > 0
    )
    assert torch.equal(
        original.to(ONE).to(TWO).cpu().view(torch.uint8), original.view(torch.uint8)
    )
    assert original.to(ONE).dtype == dtype


def test_a_set_default_device_holds_until_it_is_taken_back() -> None:
    torch.set_default_device("sim:1")
    try:
        assert torch.tensor([1.0]).device == torch.nn.Linear(2, 2).weight.device == ONE
        assert torch.tensor([1.0], device="cpu").device == CPU
    finally:
        torch.set_default_device(None)
    assert torch.tensor([1.0]).device == CPU


MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to": lambda x: x.to("sim"),
    "to_named": lambda x: x.to(device="sim"),
    "to_device": lambda x: x.to(torch.device("sim")),
    "to_dtype": lambda x: x.to("sim", torch.float64),
    "sim": lambda x: x.sim(),  # type: ignore[attr-defined]
    "new_zeros": lambda x: x.new_zeros(2, device="sim"),
    "new_tensor": lambda x: x.new_tensor([1.0], device="sim"),
    "zeros_like": lambda x: torch.zeros_like(x, device="sim"),
    "type": lambda x: x.type("torch.sim.FloatTensor"),
    "module": lambda x: torch.nn.Linear(2, 2).to("sim").weight,
    "storage": lambda x: torch.empty(0, device="sim").set_(
        torch.UntypedStorage(8, device="sim")
    ),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_move_without_an_index_goes_to_the_current_device(
    move: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with torch.accelerator.device_index(2):
        assert move(torch.ones(2)).device == TWO


FOLLOWERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "new": lambda x: x.new(2),
    "new_of_a_list": lambda x: x.new([1.0, 2.0]),
    "new_of_a_storage": lambda x: x.new(x.untyped_storage()),
    "new_tensor": lambda x: x.new_tensor([1.0], requires_grad=True),
    "new_ones": lambda x: x.new_ones(2),
    "type": lambda x: x.type("torch.sim.DoubleTensor"),
    "double": lambda x: x.double(),
    "zeros_like": lambda x: torch.zeros_like(x),
    "rand_like": lambda x: torch.rand_like(x),
    "type_as": lambda x: torch.ones(2).type_as(x),
    "to_other": lambda x: torch.ones(2).to(x),
    "deepcopy": lambda x: copy.deepcopy(x),
    "sparse": lambda x: torch.eye(2, device=x.device).to_sparse(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0, 1.0, 2.0),
    "one_hot": lambda x: F.one_hot(x.long(), 3),
}


@pytest.mark.parametrize("make", FOLLOWERS.values(), ids=FOLLOWERS)
def test_what_is_made_of_a_tensor_is_where_the_tensor_is(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    made = make(torch.ones(2, device=TWO))  # while sim:0 is current
    assert made.device == TWO
    assert made.is_leaf


def test_each_thread_has_a_current_device_of_its_own() -> None:
    seen: list[torch.device] = []
    with torch.accelerator.device_index(2):
        thread = threading.Thread(
            target=lambda: seen.append(torch.ones(1, device="sim").device)
        )
        thread.start()
        thread.join()
    assert seen == [torch.device("sim:0")]


@pytest.mark.parametrize("mix", MIXTURES.values(), ids=MIXTURES)
class TestMixing:
    def test_two_devices_are_refused(self, mix: Any) -> None:
        with pytest.raises(RuntimeError, match=MIXED):
            mix(torch.zeros(2, 2, device=ONE), torch.zeros(2, 2, device=TWO))

    def test_the_cpu_and_a_device_are_refused(self, mix: Any) -> None:
        for devices in ((ONE, CPU), (CPU, ONE)):
            first, second = (torch.zeros(2, 2, device=device) for device in devices)
            with pytest.raises(RuntimeError, match=MIXED):
                mix(first, second)


def test_the_refusal_names_both_devices() -> None:
    with pytest.raises(RuntimeError, match="sim:1 and sim:2"):
        torch.ones(2, device=ONE) + torch.ones(2, device=TWO)


TAKE_NUMBERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, n: x + n,
    "radd": lambda x, n: n + x,
    "mul_": lambda x, n: x.clone().mul_(n),
    "where": lambda x, n: torch.where(x > 0, x, n),
    "maximum": lambda x, n: torch.maximum(x, n),
    "addcmul": lambda x, n: torch.addcmul(x, x, n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "setitem": lambda x, n: torch.stack([x, x]).index_put(
        (torch.tensor([0], device=x.device),), n
    ),
    "copy_": lambda x, n: x.clone().copy_(n),
    "foreach": lambda x, n: torch._foreach_mul([x], n)[0],
}


@pytest.mark.parametrize("take", TAKE_NUMBERS.values(), ids=TAKE_NUMBERS)
def test_a_single_number_may_come_from_the_cpu(
    take: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    x, number = torch.arange(3.0), torch.tensor(2.0)
    taken = take(x.to(ONE), number)
    assert taken.device == ONE
    assert_close(taken.cpu(), take(x, number))


REFUSE_NUMBERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "gather": lambda x, n: x.gather(0, n.long()),
    "take": lambda x, n: torch.take(x, n.long()),
    "index_select": lambda x, n: x.index_select(0, n.long()),
    "index_add": lambda x, n: x.index_add(0, n.long(), x[:1]),
    "scatter": lambda x, n: x.scatter(0, n.long(), 1.0),
    "nll_loss": lambda x, n: F.nll_loss(x, n.long()),
    "addmm": lambda x, n: torch.addmm(n, x[None], x[:, None]),
    "stack": lambda x, n: torch.stack([x[0], n]),
    "equal": lambda x, n: torch.equal(x[0], n),
    "isin": lambda x, n: torch.isin(x, n),
    "clamp": lambda x, n: x.clamp(n),
    "clamp_max": lambda x, n: x.clamp_(max=n),
    "addcdiv": lambda x, n: torch.addcdiv(x, x, n),
    "logaddexp": lambda x, n: torch.logaddexp(x, n),
    "add_to_it": lambda x, n: n.add_(x[0]),
    "out": lambda x, n: torch.add(x[0], 1, out=n),
}


@pytest.mark.parametrize("mix", REFUSE_NUMBERS.values(), ids=REFUSE_NUMBERS)
def test_a_single_number_of_the_cpu_is_refused_where_accelerators_refuse_it(
    mix: Any,
) -> None:
    with pytest.raises(RuntimeError, match=MIXED):
        mix(torch.arange(3.0, device=ONE), torch.tensor(0.0))


def test_attention_over_two_devices_is_refused() -> None:
    query, value = (
        torch.ones(1, 1, 2, 2, device=ONE),
        torch.ones(1, 1, 2, 2, device=TWO),
    )
    with pytest.raises(RuntimeError, match="device"):
        F.scaled_dot_product_attention(query, query, value)


def test_a_single_number_of_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match=MIXED):
        torch.ones(3, device=ONE) + torch.tensor(1.0, device=TWO)


COME_TO_THE_CPU: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "fill_": lambda x, i: x.fill_(i[1]),
    "index": lambda x, i: x.__setitem__(i, 5.0),
    "mask": lambda x, i: x.__setitem__(torch.zeros(4, device=i.device) == 0, 5.0),
    "index_put_": lambda x, i: x.index_put_((i,), torch.ones(2)),
}


@pytest.mark.parametrize("write", COME_TO_THE_CPU.values(), ids=COME_TO_THE_CPU)
def test_indices_and_a_single_number_come_to_a_tensor_of_the_cpu(
    write: Callable[..., Any],
) -> None:
    there, here, index = torch.zeros(4), torch.zeros(4), torch.tensor([0, 1])
    write(there, index.to(ONE))
    write(here, index)
    assert there.device == CPU
    assert_close(there, here)
    with pytest.raises(RuntimeError, match="fill_ only supports 0-dimension"):
        there.fill_(index.to(ONE))


def test_probabilities_may_come_from_the_cpu() -> None:
    assert torch.bernoulli(torch.ones(3), out=torch.zeros(3, device=ONE)).tolist() == [
        1,
        1,
        1,
    ]
    assert torch.zeros(3, device=ONE).bernoulli_(torch.ones(3)).tolist() == [1, 1, 1]


class Watching(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_list_of_numbers_of_a_device_makes_a_tensor_while_operators_are_watched() -> (
    None
):
    number = torch.tensor(2, device=ONE)
    with Watching():
        there, here = (
            torch.tensor([number, number], device=ONE),
            torch.tensor([[number.double()], [torch.tensor(3)]]),
        )
        new = here.new_tensor([number, 1])
    assert (there.device, there.dtype, there.tolist()) == (ONE, torch.int64, [2, 2])
    assert (here.device, here.dtype, here.tolist()) == (
        CPU,
        torch.float64,
        [[2.0], [3.0]],
    )
    assert new.tolist() == [2, 1]


def test_values_of_the_cpu_are_not_written_into_a_device_by_index() -> None:
    x = torch.zeros(4, device=ONE)
    index = torch.tensor([0, 1])
    x[index] = torch.ones(2, device=ONE)  # the index may be the CPU's
    with pytest.raises(RuntimeError, match=MIXED):
        x[index.to(ONE)] = torch.full((2,), 5.0)
    assert x.tolist() == [1, 1, 0, 0]


def test_a_slice_takes_values_from_anywhere() -> None:
    x = torch.zeros(4, device=ONE)
    x[1:3] = torch.ones(2)
    x[3] = torch.tensor(5.0, device=TWO)
    assert x.tolist() == [0, 1, 1, 5]


def test_there_is_no_device_beyond_the_last() -> None:
    for make in (
        lambda: torch.ones(2, device="sim:9"),
        lambda: torch.ones(2).to("sim:9"),
        lambda: torch.ones(2).sim(9),
    ):  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="sim:9: this process simulates"):
            make()


CALCULATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2 + 1).exp().sum(1) / 3 - x.mean(),
    "matrices": lambda x: x @ x.mT,
    "maximum": lambda x: x.max(1),
    "sort": lambda x: x.sort(1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "svd": lambda x: torch.linalg.svdvals(x),
    "fft": lambda x: torch.fft.rfft(x),
    "unique": lambda x: x.round().unique(return_counts=True),
    "topk": lambda x: x.topk(2),
    "mask": lambda x: x[x > 0],
    "advanced_index": lambda x: x[torch.tensor([0, 2]), 1:],
    "ellipsis": lambda x: x[..., None, 1:3],
    "unfold": lambda x: x.unfold(1, 2, 1),
    "nothing": lambda x: x[:0].sum(0),
    "window": lambda x: torch.kaiser_window(5, device=x.device) * x[:, :5],
}


@pytest.mark.parametrize("calculate", CALCULATIONS.values(), ids=CALCULATIONS)
def test_a_device_computes_what_the_cpu_computes(
    calculate: Callable[[torch.Tensor], Any],
) -> None:
    x = torch.randn(4, 6)
    ours, theirs = calculate(x.to(ONE)), calculate(x)
    for mine, their in zip(
        *((r,) if isinstance(r, torch.Tensor) else r for r in (ours, theirs)),
        strict=True,
    ):
        assert mine.device == ONE
        assert_close(mine.cpu(), their)


COMPLEX: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conj": lambda c: c.conj(),
    "product": lambda c: c.conj() * c,
    "imag_of_conj": lambda c: c.conj().imag,
    "stack": lambda c: torch.stack([c.conj(), c]),
    "dot": lambda c: torch.vdot(c, c),
    "as_real": lambda c: torch.view_as_real(c),
    "add_to_conj": lambda c: (c := c.clone(), c.conj().add_(1j))[0],
    "scale_imag_of_conj": lambda c: (c := c.clone(), c.conj().imag.mul_(2))[0],
    "copy_into_conj": lambda c: (d := torch.zeros_like(c), d.conj().copy_(c))[0],
    "copy_of_conj": lambda c: torch.zeros_like(c).copy_(c.conj()),
    "out_conj": lambda c: (d := torch.zeros_like(c), torch.add(c, 1, out=d.conj()))[0],
    "other_device": lambda c: c.conj().to("cpu" if c.device == CPU else "sim:2"),
}


@pytest.mark.parametrize("calculate", COMPLEX.values(), ids=COMPLEX)
def test_conjugated_and_negated_views_hold_the_numbers_of_the_cpu(
    calculate: Any,
) -> None:
    c = torch.randn(3, dtype=torch.complex64)
    ours, theirs = calculate(c.to(ONE)), calculate(c)
    assert ours.tolist() == theirs.tolist()
    assert repr(ours).startswith("tensor(")
    assert_close(ours.cpu(), theirs)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "slice": lambda x: x[1:3].add_(1),
    "transposed": lambda x: x.t()[0].fill_(5),
    "strided": lambda x: x.view(-1)[::2].mul_(2),
    "diagonal": lambda x: x.diagonal().fill_(9),
    "unfolded": lambda x: x.unfold(0, 2, 2)[0].sub_(1),
    "detached": lambda x: x.detach().neg_(),
    "data": lambda x: x.data.neg_(),
    "mask": lambda x: x.__setitem__(x > 5, 0),
    "rows": lambda x: x.__setitem__(torch.tensor([0, 2]), x[:2] * 3),
    "augmented": lambda x: x[:, [0, 1]].add_(1),
    "masked_scatter": lambda x: x.masked_scatter_(x > 5, x.flatten() * 2),
    "index_add": lambda x: x.index_add_(
        0, torch.tensor([0, 0], device=x.device), x[:2].clone()
    ),
    "scatter": lambda x: x.scatter_(
        1, torch.zeros(4, 1, dtype=torch.long, device=x.device), 7.0
    ),
    "out": lambda x: torch.add(x[:2].clone(), 1, out=x[::2]),
    "out_transposed": lambda x: torch.add(x.clone(), 1, out=x.t()),
    "out_nothing": lambda x: torch.add(
        torch.ones(3, device=x.device), 1, out=x.view(-1)[:0]
    ),
    "foreach": lambda x: torch._foreach_mul_([x[0], x[1]], 2.0),
    "resize_smaller": lambda x: x.resize_(2, 3),
    "resize_channels_last": lambda x: x.resize_(
        1, 2, 2, 4, memory_format=torch.channels_last
    ),
    "set_": lambda x: x.set_(x.untyped_storage(), 1, (2, 2), (4, 1)),
    "overlapping": lambda x: x[1:].copy_(x[:-1].clone()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_through_a_view_reaches_what_it_reaches_on_the_cpu(
    write: Callable[[torch.Tensor], Any],
) -> None:
    theirs = torch.arange(16.0).view(4, 4)
    ours = theirs.to(ONE)
    base_of_ours, base_of_theirs = ours.detach(), theirs.detach()
    write(ours)
    write(theirs)
    assert (ours.shape, ours.stride(), ours.storage_offset()) == (
        theirs.shape,
        theirs.stride(),
        theirs.storage_offset(),
    )
    assert_close(ours.cpu(), theirs)
    assert_close(base_of_ours.cpu(), base_of_theirs)


def test_views_share_storage_base_and_version() -> None:
    x = torch.zeros(4, 4, device=ONE)
    view, detached = x.view(16), x.detach()
    detached.fill_(1)
    assert view._base is x
    assert x._version == detached._version == view._version == 1
    assert (
        x.untyped_storage().data_ptr()
        == view.untyped_storage().data_ptr()
        == detached.untyped_storage().data_ptr()
    )
    assert view.sum() == 16


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from(
        [torch.float32, torch.bfloat16, torch.int16, torch.complex64]
    ),
)
def test_copies_between_devices_keep_numbers_and_strides(
    sizes: list[int], order: Any, dtype: torch.dtype
) -> None:
    axes = list(range(len(sizes)))
    order.shuffle(axes)
    theirs = torch.randn(sizes).to(dtype).permute(axes)
    ours = theirs.to(ONE).to(TWO)
    assert torch.equal(ours.cpu(), theirs)
    assert ours.stride() == theirs.clone().stride()


def test_memory_formats_survive_a_move() -> None:
    theirs = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    ours = theirs.to(ONE)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert ours.to(memory_format=torch.contiguous_format).is_contiguous()
    assert ours.to(TWO, memory_format=torch.contiguous_format).is_contiguous()


def test_to_copies_only_when_it_has_to() -> None:
    x = torch.ones(2, device=ONE)
    assert x.to(ONE) is x and x.to("sim:1", torch.float32) is x
    assert x.to(ONE, copy=True).data_ptr() != x.data_ptr()
    moved = x.to(TWO, non_blocking=True)
    x.zero_()
    assert moved.tolist() == [1, 1]


@pytest.mark.parametrize(
    "move",
    [torch.as_tensor, torch.tensor, torch.asarray],
    ids=lambda call: call.__name__,
)
def test_a_device_never_shares_memory_with_an_array(move: Any) -> None:
    array = np.ones(3, dtype=np.float32)
    move(array, device=ONE).add_(1)
    torch.from_numpy(array).to(ONE).add_(1)
    torch.from_numpy(array).pin_memory().add_(1)
    assert array.tolist() == [1, 1, 1]


def test_a_copy_on_the_cpu_is_not_the_memory_of_the_device() -> None:
    x = torch.ones(3, device=ONE)
    x.cpu().add_(1)
    x.cpu().numpy()[:] = 9
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "export", [torch.Tensor.numpy, np.asarray], ids=["numpy", "asarray"]
)
def test_numpy_is_refused_a_tensor_of_a_device(export: Any) -> None:
    with pytest.raises(
        TypeError,
        match=r"can't convert sim:1 device type tensor to numpy. Use Tensor.cpu\(\)",
    ):
        export(torch.ones(2, device=ONE))
    assert torch.ones(2, device=ONE).numpy(force=True).tolist() == [1, 1]


def test_other_libraries_do_not_take_its_memory_for_the_cpus() -> None:
    with pytest.raises((RuntimeError, BufferError, ValueError)):
        np.from_dlpack(torch.ones(2, device=ONE))


def test_it_is_printed_with_its_device_and_read_as_numbers() -> None:
    x = torch.arange(3.0, device=ONE)
    assert repr(x) == "tensor([0., 1., 2.], device='sim:1')"
    assert (x[1].item(), int(x[2]), bool(x[0] > 0), x.tolist()) == (
        1.0,
        2,
        False,
        [0.0, 1.0, 2.0],
    )
    assert x.is_sim and not x.cpu().is_sim  # type: ignore[attr-defined]


OUTS: dict[str, Callable[[torch.device], Any]] = {
    "add": lambda d: torch.add(
        torch.ones(3, 4, device=d), 1, out=torch.empty(0, device=d)
    ),
    "cat": lambda d: torch.cat(
        [torch.ones(2, device=d)] * 2, out=torch.empty(0, device=d)
    ),
    "max": lambda d: torch.max(
        torch.eye(3, device=d),
        1,
        out=(torch.empty(0, device=d), torch.empty(0, dtype=torch.long, device=d)),
    )[1],
    "arange": lambda d: torch.arange(5, out=torch.empty(0, device=d)),
    "nonzero": lambda d: torch.nonzero(
        torch.eye(2, device=d), out=torch.empty(0, dtype=torch.long, device=d)
    ),
    "masked_select": lambda d: torch.masked_select(
        torch.eye(2, device=d), torch.eye(2, device=d) > 0, out=torch.empty(0, device=d)
    ),
    "other_dtype": lambda d: torch.add(
        torch.ones(2, device=d), 1, out=torch.empty(2, dtype=torch.float64, device=d)
    ),
}


@pytest.mark.parametrize("call", OUTS.values(), ids=OUTS)
def test_out_takes_the_size_and_the_numbers_of_the_result(
    call: Callable[[torch.device], Any],
) -> None:
    ours = call(ONE)
    assert ours.device == ONE
    assert_close(ours.cpu(), call(CPU))


def test_out_warns_when_it_has_to_resize_what_holds_numbers() -> None:
    out = torch.zeros(2, device=ONE)
    with pytest.warns(UserWarning, match="resized"):
        torch.add(torch.ones(3, 4, device=ONE), 1, out=out)
    assert_close(out.cpu(), torch.full((3, 4), 2.0))


def test_memory_grows_with_what_it_holds() -> None:
    x = torch.arange(4.0, device=ONE).resize_(8)
    assert x[:4].tolist() == [0, 1, 2, 3]
    assert x.device == ONE


def test_memory_that_others_share_does_not_grow() -> None:
    x = torch.ones(2, device=ONE)
    view = x[:1]
    with pytest.raises(NotImplementedError, match="resize_"):
        x.resize_(10)
    assert view.item() == 1 and x.shape == (2,)


UNSUPPORTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "csr": lambda x: x.to_sparse_csr(),
    "quantize": lambda x: torch._empty_affine_quantized(
        x.shape, scale=1.0, zero_point=0, dtype=torch.qint8, device=ONE
    ),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: (
        torch.nested.nested_tensor([x, x], layout=torch.strided, device=ONE) + 1
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_is_not_simulated_raises_and_names_itself(
    call: Callable[[torch.Tensor], Any],
) -> None:
    with pytest.raises(NotImplementedError, match=r"aten.*sim"):
        call(torch.ones(2, 2, device=ONE))


FAILURES: dict[str, Callable[[torch.Tensor], Any]] = {
    "cholesky": lambda x: torch.linalg.cholesky(-x),
    "inverse": lambda x: torch.linalg.inv(x * 0),
    "shapes": lambda x: x @ x[:2],
    "index": lambda x: x[7],
    "gather": lambda x: x.gather(0, torch.tensor([[9]], device=x.device)),
    "embedding": lambda x: F.embedding(torch.tensor([9], device=x.device), x),
    "target": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 9], device=x.device)),
    "view": lambda x: x.view(5),
    "overlap": lambda x: torch.add(x[0], 1, out=x[0, :1].expand(3)),
}


@pytest.mark.parametrize("call", FAILURES.values(), ids=FAILURES)
def test_an_error_of_an_operator_is_that_of_the_cpu_and_writes_nothing(
    call: Callable[[torch.Tensor], Any],
) -> None:
    x = torch.ones(3, 3)
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        call(x)
    mine = x.to(ONE)
    with pytest.raises(theirs.type) as ours:
        call(mine)
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]
    assert torch.equal(mine.cpu(), x)


def test_modes_see_torch_as_it_is_written() -> None:
    seen = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Recorder():
        torch.as_tensor(torch.tensor([1.0]).to("sim:1").new_tensor([2.0]))
    expected = [torch.tensor, torch.Tensor.to, torch.Tensor.new_tensor, torch.as_tensor]
    assert [func for func in seen if func in expected] == expected


def test_a_subclass_stays_one() -> None:
    class Special(torch.Tensor):
        pass

    x = torch.ones(2).as_subclass(Special).to("sim:1")
    assert type(x) is type(x + 1) is type(x.cpu()) is Special
    assert (x + 1).device == ONE


@SPARSE_CHECKS
def test_sparse_tensors_compute_what_the_cpus_compute() -> None:
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    sparse = dense.to(ONE).to_sparse()
    assert_close((sparse + sparse * 2).to_dense().cpu(), dense * 3)
    assert_close(torch.sparse.mm(sparse, dense.to(ONE)).cpu(), dense @ dense)
    assert_close(sparse.to(TWO).t().to_dense().cpu(), dense.t())
    for other in (sparse.to(TWO), dense.to_sparse()):
        with pytest.raises(RuntimeError, match=r"[Dd]evice"):
            sparse + other
    twice = torch.sparse_coo_tensor(
        [[0, 0], [1, 1]], [1.0, 2.0], (2, 2), device=ONE, check_invariants=True
    )
    assert twice.coalesce().values().tolist() == [3.0]
    assert twice.coalesce().values().device == copy.deepcopy(twice).device == ONE


@SPARSE_CHECKS
@pytest.mark.parametrize(
    "call",
    [
        torch.sum,
        torch.abs,
        torch.nan_to_num,
        torch.isinf,
        torch.Tensor.abs_,
        torch.norm,
        torch.clone,
        torch.deg2rad,
    ],
    ids=lambda call: call.__name__,
)
def test_what_the_cpu_does_at_once_with_a_sparse_tensor_is_not_taken_apart(
    call: Callable[..., Any],
) -> None:
    """A random program: torch took `sum` apart.

    A variant of it without dimensions came back as it went in.
    """
    dense = torch.tensor([[0.0, -1.0], [2.0, 0.0]])
    expected, found = call(dense.to_sparse()), call(dense.to(ONE).to_sparse())
    assert (found.shape, found.layout, found.device) == (
        expected.shape,
        expected.layout,
        ONE,
    )
    assert_close(found.cpu().to_dense(), expected.to_dense())


def test_the_gradient_of_a_sparse_embedding_can_be_zeroed_and_added_to() -> None:
    """A random program: the CPU would give no other indices to a device's memory."""
    embeddings = [torch.nn.Embedding(4, 2, sparse=True)]
    embeddings.append(copy.deepcopy(embeddings[0]).to(ONE))
    for rows in ([0, 1], [1, 3, 3], [2]):
        for embedding in embeddings:
            embedding.zero_grad(set_to_none=False)
            embedding(
                torch.tensor(rows, device=embedding.weight.device)
            ).square().sum().backward()
            embedding(
                torch.tensor([0], device=embedding.weight.device)
            ).sum().backward()
        here, there = (embedding.weight.grad for embedding in embeddings)
        assert_close(there.to_dense().cpu(), here.to_dense())


def test_a_loop_over_lists_leaves_tensors_of_the_cpu_there() -> None:
    here, there = torch.ones(2), torch.ones(2, device=ONE)
    doubled = torch._foreach_mul([here, there], 2.0)
    assert [tensor.device for tensor in doubled] == [here.device, ONE]
    torch._foreach_add_(doubled, [here, there])
    assert [tensor.tolist() for tensor in doubled] == [[3.0, 3.0]] * 2


def test_deterministic_algorithms_fill_what_is_uninitialised() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=ONE).isnan().all()
        assert (
            torch.zeros(1, device=ONE).index_add_(
                0, torch.tensor([0, 0], device=ONE), torch.ones(2, device=ONE)
            )
            == 2
        )
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_devices_are_those_that_were_asked_for() -> None:
    assert torchstrategy.testing.simulated_devices() == [
        torch.device("sim", index) for index in range(5)
    ]
