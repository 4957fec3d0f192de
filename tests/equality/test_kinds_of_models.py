"""Models of many kinds train on replicas as they do in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from conditions import for_changes
from nets import F64, Net, train
from problems import (
    assert_close,
    built,
    close,
    compare,
    data,
    deal,
    gradients,
    mlp,
    mse,
    sgd,
    where_it_is,
)
from topologies import SIMULATED, central, central_with_copies


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **kwargs: Any) -> None:
        super().__init__()
        self.rnn = kind(3, 4, num_layers=2, batch_first=True, **F64, **kwargs)
        self.head = nn.Linear(4 * (2 if kwargs.get("bidirectional") else 1), 2, **F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(_sequences(x))[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 3, batch_first=True, **F64)
        self.head = nn.Linear(3, 2, **F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = _sequences(x)
        return self.head(self.attention(h, h, h)[0].mean(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            4, 2, 8, dropout=0.0, batch_first=True, **F64
        )
        self.stem, self.head = nn.Linear(3, 4, **F64), nn.Linear(4, 2, **F64)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.stem(_sequences(x))).mean(1))


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, **F64)
        self.middle = nn.Linear(4, 4, **F64)
        self.out = nn.Linear(4, 5, bias=False, **F64)
        self.out.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.abs() * 10).long().remainder(5)
        return self.out(self.middle(self.table(words)).tanh()).mean(1)[:, :2]


class Upsampling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(1, 4, 3, stride=2, **F64)
        self.norm = nn.GroupNorm(2, 4, **F64)
        self.instance = nn.InstanceNorm1d(4, affine=True, **F64)
        self.down = nn.Conv1d(4, 2, 3, padding=1, **F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self.down(self.instance(self.norm(self.up(x.unsqueeze(1)))).tanh())
            .square()
            .mean(-1)
        )


def _sequences(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x.sin(), x.cos()], 1)


def _parametrized(
    parametrize: Callable[[nn.Module], nn.Module],
) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = mlp()
        parametrize(model[0])
        parametrize(model[2])
        return model

    return build


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "lstm": lambda: Recurrent(nn.LSTM),
    "lstm, bidirectional, projected": lambda: Recurrent(
        nn.LSTM, bidirectional=True, proj_size=0
    ),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": Attending,
    "transformer": Transformer,
    "tied": TiedLanguageModel,
    "conv_transpose, group_norm, instance_norm": Upsampling,
    "weight_norm": _parametrized(parametrizations.weight_norm),
    "spectral_norm": _parametrized(parametrizations.spectral_norm),
    "orthogonal": _parametrized(parametrizations.orthogonal),
    "prelu, layer_norm": lambda: nn.Sequential(
        mlp(), nn.LayerNorm(2, **F64), nn.PReLU(**F64)
    ),
    "batch_norm in evaluation": lambda: nn.Sequential(
        nn.BatchNorm1d(3, **F64).eval(), mlp()
    ),
    "batch_norm without statistics, frozen": lambda: nn.Sequential(
        nn.BatchNorm1d(3, **F64).eval().requires_grad_(False), mlp()
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_on_replicas_as_it_does_in_plain_torch(make, name):
    for n in (1, 3):
        model, twin = compare(
            make, n, train, build=MODELS[name], case=name, relative=1e-9
        )
        assert_close(
            dict(model.named_buffers()),
            dict(twin.named_buffers()),
            f"{name}, buffers",
            1e-9,
        )
        assert list(model.state_dict()) == list(twin.state_dict())
        model.eval()
        twin.eval()
        close(*(m(where_it_is(m, data(5))[0]) for m in (model, twin)))


def test_a_recurrent_model_that_changes_its_dtype_between_steps_trains_on(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, lambda: Recurrent(nn.LSTM), None)
    for dtype in (torch.float64, torch.float32, torch.float64):
        for m in (model, twin):
            m.zero_grad()
            m.to(dtype)
        batch = data(7, dtype)
        strategy.run(lambda b: mse(model, b).backward(), args=(deal(strategy, batch),))
        mse(twin, batch).backward()
        assert_close(gradients(model), gradients(twin), f"{dtype}", 1e-6)


def test_batch_norm_models_train_on_replicas(make):
    strategy = make(3)

    def build():
        return nn.Sequential(
            nn.Linear(3, 4, **F64),
            nn.BatchNorm1d(4, **F64),
            nn.ReLU(),
            nn.Linear(4, 2, **F64),
        )

    (model, optimizer), _ = built(strategy, build, sgd)
    batch = data(12)
    whole = where_it_is(model, batch)
    before = float(mse(model, whole).detach())
    model.train()
    for _ in range(30):
        strategy.run(
            lambda b: train(model, optimizer, b), args=(deal(strategy, batch),)
        )
    assert int(model[1].num_batches_tracked) == 31
    assert float(mse(model, whole).detach()) < 0.7 * before


@for_changes
def test_copies_and_aliases_give_the_same_model_bit_for_bit():
    builds = {
        **MODELS,
        "batch_norm": lambda: nn.Sequential(nn.BatchNorm1d(3, **F64), mlp()),
    }
    # The last of them writes buffers.
    for name in [*builds][::-4] if SIMULATED else builds:
        states = []
        for maker in (central, central_with_copies):
            strategy = maker(3)
            torch.manual_seed(0)
            with strategy.scope():
                model = builds[name]()
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for k in range(3):
                strategy.run(
                    lambda b, m=model, o=optimizer: train(m, o, b),
                    args=(deal(strategy, data(8, seed=k)),),
                )
            states.append(model.state_dict())
        for key, value in states[0].items():
            assert torch.equal(value.cpu(), states[1][key].cpu()), f"{name}: {key}"
