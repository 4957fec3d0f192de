"""A training script's modules, optimizers, clipping, loaders, checkpoints, copies."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
import torch.nn as nn
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

ZERO, ONE, TWO = (torch.device("sim", index) for index in range(3))

Maker = Callable[[], nn.Module]

MODELS: dict[str, tuple[Maker, Callable[[], tuple[torch.Tensor, ...]]]] = {
    "linear": (lambda: nn.Linear(4, 3), lambda: (torch.randn(5, 4),)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.ConvTranspose2d(6, 4, 2),
            nn.Conv2d(4, 4, 1, groups=2),
        ),
        lambda: (torch.randn(2, 3, 8, 8),),
    ),
    "channels_last": (
        lambda: nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        lambda: (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),),
    ),
    "norms": (
        lambda: nn.Sequential(
            nn.BatchNorm2d(4),
            nn.GroupNorm(2, 4),
            nn.LayerNorm([4, 4]),
            nn.InstanceNorm2d(4, affine=True),
        ),
        lambda: (torch.randn(3, 4, 4, 4),),
    ),
    "pools": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.MaxPool2d(2),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(3),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.ReflectionPad2d(1),
            nn.PReLU(),
            nn.LogSoftmax(1),
        ),
        lambda: (torch.randn(2, 3, 12, 12),),
    ),
    "embedding": (lambda: nn.Embedding(10, 4), lambda: (torch.randint(0, 10, (3, 5)),)),
    "embedding_bag": (
        lambda: nn.EmbeddingBag(10, 4),
        lambda: (torch.randint(0, 10, (3, 5)),),
    ),
    "lstm": (
        lambda: nn.LSTM(4, 5, 2, bidirectional=True, batch_first=True),
        lambda: (torch.randn(3, 6, 4),),
    ),
    "gru": (lambda: nn.GRU(4, 5, 2), lambda: (torch.randn(6, 3, 4),)),
    "rnn": (lambda: nn.RNN(4, 5), lambda: (torch.randn(6, 3, 4),)),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: (torch.randn(2, 5, 8),) * 3,
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: (torch.randn(2, 5, 8),),
    ),
    "bilinear": (
        lambda: nn.Bilinear(3, 4, 5),
        lambda: (torch.randn(2, 3), torch.randn(2, 4)),
    ),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        lambda: (torch.randn(5, 4),),
    ),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd_loop": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}

LOSSES: dict[
    str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
] = {
    "cross_entropy": lambda x, t, b: F.cross_entropy(x, t),
    "label_smoothing": lambda x, t, b: F.cross_entropy(
        x, b.softmax(1), label_smoothing=0.1
    ),
    "nll": lambda x, t, b: F.nll_loss(x.log_softmax(1), t),
    "logits": lambda x, t, b: F.binary_cross_entropy_with_logits(x, b),
    "binary": lambda x, t, b: F.binary_cross_entropy(x.sigmoid(), b),
    "huber": lambda x, t, b: F.huber_loss(x, b),
    "kl": lambda x, t, b: F.kl_div(
        x.log_softmax(1), b.softmax(1), reduction="batchmean"
    ),
    "ctc": lambda x, t, b: F.ctc_loss(
        x.log_softmax(1)[:, None],
        torch.tensor([[1, 2]], device=x.device),
        torch.tensor([4]),
        torch.tensor([2]),
    ),
}


def trained(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], make: Any = None, steps: int = 3
) -> nn.Module:
    optimizer = (make or OPTIMIZERS["sgd_foreach"])(model.parameters())

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        result = model(*inputs)
        value: torch.Tensor = (
            (result[0] if isinstance(result, tuple) else result).square().mean()
        )
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(loss)
    return model


@pytest.mark.parametrize(("make", "inputs"), MODELS.values(), ids=MODELS)
def test_a_model_trains_as_on_the_cpu(
    make: Maker, inputs: Callable[[], tuple[torch.Tensor, ...]]
) -> None:
    torch.manual_seed(0)
    model, batch = make(), inputs()
    ours = trained(copy.deepcopy(model).to(ONE), tuple(x.to(ONE) for x in batch))
    theirs = trained(model, batch)
    for mine, their in zip(
        ours.state_dict().values(), theirs.state_dict().values(), strict=True
    ):
        assert mine.device == ONE
        assert_close(mine.cpu(), their)
    assert all(type(parameter) is nn.Parameter for parameter in ours.parameters())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_steps_as_on_the_cpu(make: Any) -> None:
    model, x = (
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
        torch.randn(5, 4),
    )
    ours = trained(copy.deepcopy(model).to(ONE), (x.to(ONE),), make)
    theirs = trained(model, (x,), make)
    for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(mine.cpu(), their)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_optimizer_steps_parameters_of_several_devices(make: Any) -> None:
    def stepped(devices: list[str]) -> list[torch.Tensor]:
        parameters = [
            nn.Parameter(torch.full((3,), i + 1.0, device=d))
            for i, d in enumerate(devices)
        ]

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = sum(
                (p.to(devices[0]).square().sum() for p in parameters),
                torch.zeros((), device=devices[0]),
            )
            value.backward()
            return value

        optimizer = make(parameters)
        optimizer.step(loss)
        assert [p.device for p in parameters] == [torch.device(d) for d in devices]
        return [p.detach().cpu() for p in parameters]

    devices = ["sim:0", "sim:1", "sim:2"]
    if make is OPTIMIZERS["lbfgs"]:
        with pytest.raises(RuntimeError, match="same device"):
            # It puts all gradients into one vector, on accelerators too.
            stepped(devices)
    else:
        assert_close(stepped(devices), stepped(["cpu"] * 3))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_and_its_gradient_are_those_of_the_cpu(loss: Any) -> None:
    logits, targets, other = (
        torch.randn(4, 5),
        torch.tensor([0, 1, 2, 3]),
        torch.rand(4, 5),
    )
    found = []
    for device in (torch.device("cpu"), ONE):
        x = logits.to(device, copy=True).requires_grad_()
        value = loss(x, targets.to(device), other.to(device))
        value.backward()
        assert x.grad is not None
        found.append((value.detach().cpu(), x.grad.cpu()))
    assert_close(found[1], found[0])


def test_packed_sequences_run_through_an_lstm() -> None:
    model, x = nn.LSTM(4, 5, batch_first=True), torch.randn(3, 6, 4)

    def last(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, torch.tensor([6, 4, 2]), batch_first=True
        )
        padded, lengths = nn.utils.rnn.pad_packed_sequence(
            model(packed)[0], batch_first=True
        )
        assert lengths.device == torch.device("cpu")
        return padded

    ours = last(copy.deepcopy(model).to(ONE), x.to(ONE))
    assert ours.device == ONE
    assert_close(ours.cpu(), last(model, x))
    with pytest.raises(RuntimeError, match="CPU"):
        nn.utils.rnn.pack_padded_sequence(
            x.to(ONE), torch.tensor([6, 4, 2], device=ONE), batch_first=True
        )


def test_sparse_gradients_are_stepped() -> None:
    embedding = nn.Embedding(5, 2, sparse=True).to(ONE)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 1], device=ONE)).sum().backward()
    torch.optim.SGD(embedding.parameters(), lr=1.0).step()
    assert_close(
        (before - embedding.weight).cpu(),
        torch.tensor([[0.0, 0], [2, 2], [0, 0], [0, 0], [0, 0]]),
    )


def test_gradients_are_clipped_over_devices() -> None:
    def clipped(devices: list[Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        parameters = [nn.Parameter(torch.ones(3, device=device)) for device in devices]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 4)
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        return norm.cpu(), [
            parameter.grad.cpu()
            for parameter in parameters
            if parameter.grad is not None
        ]

    assert_close(clipped([ZERO, ONE]), clipped(["cpu", "cpu"]))


class TestMovingAModule:
    def test_parameters_stay_the_same_objects(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        parameters, references = (
            list(model.parameters()),
            [weakref.ref(p) for p in model.parameters()],
        )
        for device in ("sim:1", "sim:2", "cpu", "sim:1"):
            model.to(device)
            assert all(
                a is b for a, b in zip(model.parameters(), parameters, strict=True)
            )
            assert all(r() is p for r, p in zip(references, parameters, strict=True))
            assert {t.device for t in model.state_dict().values()} == {
                torch.device(device)
            }

    def test_an_optimizer_made_before_steps_the_moved_parameters(self) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(torch.ones(1, 2)).sum().backward()
        before = model.weight.detach().clone()
        model.to(ONE)
        assert model.weight.grad is not None and model.weight.grad.device == ONE
        optimizer.step()
        assert_close(model.weight.cpu(), before - 1)

    def test_optimizer_state_left_behind_is_refused(self) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        trained_once = model(torch.ones(1, 2)).sum()
        trained_once.backward()
        optimizer.step()
        model.to(ONE)
        with pytest.raises(RuntimeError, match="same device"):
            optimizer.step()

    def test_hooks_and_attributes_stay(self) -> None:
        seen: list[str] = []
        model = nn.Linear(2, 2, bias=False)
        model.weight.note = "mine"  # type: ignore[attr-defined]
        model.weight.register_hook(lambda gradient: seen.append("hook"))
        handle = model.weight.register_post_accumulate_grad_hook(
            lambda p: seen.append("accumulated")
        )
        model.to(ONE)(torch.ones(1, 2, device=ONE)).sum().backward()
        handle.remove()
        model.to("cpu")(torch.ones(1, 2)).sum().backward()
        assert seen == ["hook", "accumulated", "hook"]
        assert model.weight.note == "mine"

    def test_shared_parameters_stay_shared(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        model.to(ONE)
        assert model[1].weight is model[0].weight

    def test_between_forward_and_backward_it_is_refused(self) -> None:
        model = nn.Linear(2, 2)
        loss = model(torch.ones(1, 2)).square().sum()
        model.to(ONE)
        with pytest.raises(RuntimeError, match="between the"):
            loss.backward()
        model(torch.ones(1, 2, device=ONE)).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.device == ONE

    def test_a_result_of_autograd_does_not_change_its_device(self) -> None:
        y = torch.ones(2, requires_grad=True) * 2
        with pytest.raises(RuntimeError, match=r"Use `tensor.to"):
            y.data = torch.ones(2, device=ONE)

    def test_a_gradient_that_is_left_behind_is_not_added_to(self) -> None:
        parameter = nn.Parameter(torch.ones(2, device=ONE))
        parameter.square().sum().backward()
        parameter.data = torch.ones(2)
        with pytest.raises(
            RuntimeError,
            match="same device, but found at least two devices, sim:1 and cpu!",
        ):
            parameter.square().sum().backward()
        parameter.grad = None
        parameter.square().sum().backward()
        # The gradient is left on the CPU, and follows.
        parameter.data = torch.ones(2, device=ONE)
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data.to(ONE)
        parameter.square().sum().backward()
        parameter.data = parameter.data.to("cpu")
        parameter.data = parameter.data.to(ONE)  # it is back where its gradient stayed
        parameter.square().sum().backward()
        assert parameter.grad.tolist() == [6, 6]

    def test_the_new_data_is_shared(self) -> None:
        parameter, new = nn.Parameter(torch.ones(2)), torch.zeros(2, device=ONE)
        before = parameter.detach()
        parameter.data = new
        new.add_(5)
        assert (
            parameter.tolist() == [5, 5]
            and parameter.requires_grad
            and type(parameter) is nn.Parameter
        )
        assert before.tolist() == [1, 1]

    def test_lazy_modules_and_meta_modules_arrive(self) -> None:
        lazy = nn.Sequential(nn.LazyConv2d(2, 1), nn.LazyBatchNorm2d()).to(ONE)
        lazy(torch.ones(1, 2, 3, 3, device=ONE))
        assert {t.device for t in lazy.state_dict().values()} == {ONE}
        with torch.device("meta"):
            model = nn.Linear(2, 2)
        model.to_empty(device="sim:1").reset_parameters()
        assert model.weight.device == ONE and model.weight.abs().sum() > 0

    def test_swapped_parameters_arrive(self) -> None:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model = nn.Linear(2, 2)
            weight = model.weight
            assert model.to(ONE).weight is weight and weight.device == ONE
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


LOCATIONS: dict[str, tuple[Any, str]] = {
    "none": (None, "sim:1"),
    "cpu": ("cpu", "cpu"),
    "name": ("sim:0", "sim:0"),
    "device": (torch.device("sim:2"), "sim:2"),
    "dict": ({"sim:1": "sim:2"}, "sim:2"),
    "dict_to_the_cpu": ({"sim:1": "cpu"}, "cpu"),
    "function": (lambda storage, location: storage, "cpu"),
    "function_that_moves": (
        lambda storage, location: storage.to(device="sim:2"),
        "sim:2",
    ),
}


class TestCheckpoints:
    @pytest.mark.parametrize(
        ("location", "expected"), LOCATIONS.values(), ids=LOCATIONS
    )
    def test_map_location_says_where_tensors_go(
        self, location: Any, expected: str
    ) -> None:
        model, file = nn.Linear(3, 3).to(ONE), io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert {str(tensor.device) for tensor in loaded.values()} == {expected}
        assert_close(loaded["weight"].cpu(), model.weight.detach().cpu())

    def test_a_device_that_is_not_there_is_refused(self) -> None:
        file = io.BytesIO()
        torch.save(torch.ones(2, device=ONE), file)
        elsewhere = io.BytesIO(file.getvalue().replace(b"sim:1", b"sim:9"))
        with pytest.raises(
            RuntimeError, match=r"device 9 but torch.sim.device_count\(\) is 5"
        ):
            torch.load(elsewhere)

    @pytest.mark.parametrize("mmap", [False, True])
    def test_views_share_memory_after_loading(self, tmp_path: Path, mmap: bool) -> None:
        x = torch.arange(4.0, device=ONE)
        torch.save((x, x[1:]), tmp_path / "views")
        whole, part = torch.load(tmp_path / "views", mmap=mmap)
        part.zero_()
        assert whole.tolist() == [0, 0, 0, 0] and whole.device == part.device == ONE
        assert torch.load(tmp_path / "views")[0].tolist() == [0, 1, 2, 3]

    def test_a_whole_module_and_a_sparse_tensor_are_loaded(
        self, tmp_path: Path
    ) -> None:
        torch.save(
            (nn.Linear(2, 2).to(TWO), torch.eye(2, device=ONE).to_sparse()),
            tmp_path / "both",
        )
        model, sparse = torch.load(tmp_path / "both", weights_only=False)
        assert model.weight.device == TWO and type(model.weight) is nn.Parameter
        assert sparse.device == ONE

    def test_pickles_and_deep_copies_keep_the_device_and_share_nothing(self) -> None:
        model = nn.Linear(2, 2).to(TWO)
        for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert other.weight.device == TWO
            assert_close(other.weight, model.weight)
            other.weight.data.zero_()
            assert model.weight.abs().sum() > 0

    def test_a_deep_copied_optimizer_steps_its_own_parameters(self) -> None:
        parameter = nn.Parameter(torch.ones(2, device=ONE))
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.Adam([parameter])
        optimizer.step()
        other = copy.deepcopy(optimizer)
        (theirs,) = other.param_groups[0]["params"]
        theirs.grad = torch.ones_like(theirs)
        before = parameter.detach().clone()
        other.step()
        assert theirs.device == other.state[theirs]["exp_avg"].device == ONE
        assert torch.equal(parameter, before) and not torch.equal(theirs, before)

    def test_states_are_loaded_onto_the_device_of_the_parameters(self) -> None:
        one, two = nn.Linear(2, 2).to(ONE), nn.Linear(2, 2).to(TWO)
        first, second = (
            torch.optim.Adam(one.parameters()),
            torch.optim.Adam(two.parameters()),
        )
        one(torch.ones(1, 2, device=ONE)).sum().backward()
        first.step()
        two.load_state_dict(one.state_dict())
        second.load_state_dict(first.state_dict())
        assert_close(two.weight.cpu(), one.weight.cpu())
        assert two.weight.device == second.state[two.weight]["exp_avg"].device == TWO
        two(torch.ones(1, 2, device=TWO)).sum().backward()
        second.step()


class OnDevice(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index), device=ONE)


class TestLoading:
    # Of older loaders themselves.
    @pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor.pin_memory")
    @pytest.mark.parametrize("workers", [0, 2])
    def test_pinned_batches_are_sent_to_a_device(self, workers: int) -> None:
        rows = TensorDataset(torch.arange(8.0), torch.arange(8))
        batches = list(
            DataLoader(rows, batch_size=4, pin_memory=True, num_workers=workers)
        )
        assert all(x.is_pinned() and y.is_pinned() for x, y in batches)
        assert [x.to(ONE, non_blocking=True).sum().item() for x, _ in batches] == [
            6,
            22,
        ]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_batches_may_be_made_on_a_device(self, workers: int) -> None:
        context = "fork" if workers else None
        loader = DataLoader(
            OnDevice(),
            batch_size=2,
            num_workers=workers,
            multiprocessing_context=context,
        )
        batches = list(loader)
        assert [batch.device for batch in batches] == [ONE, ONE]
        assert [batch[:, 0].tolist() for batch in batches] == [[0, 1], [2, 3]]

    def test_memory_of_a_device_is_not_pinned(self) -> None:
        assert not torch.ones(2).is_pinned()
        with pytest.raises(RuntimeError, match="pin"):
            torch.ones(2, device=ONE).pin_memory()

    def test_tensors_go_through_queues_between_processes(self) -> None:
        queue = multiprocessing.get_context("fork").SimpleQueue()
        queue.put(
            (
                torch.arange(6.0, device=ONE).view(2, 3).t(),
                nn.Parameter(torch.ones(2, device=TWO)),
            )
        )
        view, parameter = queue.get()
        assert (
            view.device == ONE
            and view.tolist() == [[0, 3], [1, 4], [2, 5]]
            and view.stride() == (1, 3)
        )
        assert (
            type(parameter) is nn.Parameter
            and parameter.requires_grad
            and parameter.device == TWO
        )


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_traced_and_an_exported_module_run() -> None:
    model, x = nn.Linear(2, 2).to(ONE), torch.ones(1, 2, device=ONE)
    assert_close(torch.jit.trace(model, x)(x), model(x))
    assert_close(torch.export.export(model, (x,)).module()(x), model(x))
