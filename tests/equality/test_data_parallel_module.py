"""What a torchstrategy.DataParallel is: a module with replicas.

The caller's state holds in it.
"""

from __future__ import annotations

import contextvars
import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune, rnn
from torch.overrides import TorchFunctionMode

from conditions import only_with_copies
from data_parallel import (
    F64,
    FIRST,
    ROWS,
    Calls,
    alike,
    here,
    parallel,
    returning,
    same_gradients,
)
from problems import (
    assert_close,
    close,
    data,
    gradients,
    mlp,
    parameters,
    replica_id,
    sgd,
)
from topologies import compute_devices
from torchstrategy._copies.modules.replicated_modules import ReplicatedModules
from torchstrategy._turns.switch import IN_TURNS

# What the module is


def test_its_parameters_are_the_users_own_and_its_module_is_the_users_own() -> None:
    module = mlp().to(FIRST)
    model = parallel(module)
    model(here(data(5)[0]))
    assert model.module is module and type(module) is nn.Sequential
    assert [id(p) for p in model.parameters()] == [id(p) for p in module.parameters()]
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert [name for name, _ in model.named_parameters()] == [
        f"module.{name}" for name, _ in module.named_parameters()
    ]


@only_with_copies
def test_its_replicas_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    make = ReplicatedModules.__init__
    monkeypatch.setattr(
        ReplicatedModules,
        "__init__",
        lambda self, *args: (built.append(1), make(self, *args))[1],
    )
    model = parallel(mlp(), 3)
    optimizer = sgd(model)
    for step in range(3):
        for mode in (model.train, model.eval):
            mode()
            model(here(data(5, seed=step)[0])).sum().backward()
            optimizer.step()
    assert built == [1]


def test_it_may_be_made_anew_for_the_same_module_at_any_time(
    no_collector: None,
) -> None:
    module, x = mlp().to(FIRST), here(data(5)[0])
    models = [parallel(module) for _ in range(2)]
    outputs = [model(x) for model in models]
    for _ in range(2):
        model = parallel(module)
        outputs.append(model(x))
    del model, models
    outputs += [parallel(module, 3)(x), parallel(module, 2)(x), parallel(module, 1)(x)]
    for output in outputs:
        close(output, module(x))


def test_parts_of_a_model_may_be_in_own_data_parallels_and_share_parameters() -> None:
    encoder, decoder = (
        nn.Linear(3, 3, **F64).to(FIRST),
        nn.Linear(3, 3, **F64).to(FIRST),
    )
    decoder.weight = encoder.weight
    plain = copy.deepcopy(nn.Sequential(encoder, nn.Tanh(), decoder))
    model = nn.Sequential(parallel(encoder), nn.Tanh(), parallel(decoder))
    assert list(model.state_dict()) == list(plain.state_dict())
    x = here(data(5)[0])
    for forward in (model, plain):
        forward(x).square().sum().backward()
    ours = [p.grad for p in model.parameters()]
    close(ours, [p.grad for p in plain.parameters()])


def test_train_and_eval_reach_the_replicas() -> None:
    model = parallel(nn.Dropout(0.5))
    x = torch.ones(4, 64, device=FIRST)
    assert torch.equal(model.eval()(x), x)
    assert not torch.equal(model.train()(x), x)


def test_what_is_written_on_the_module_reaches_the_replicas() -> None:
    model, plain = alike()
    x = here(data(5)[0])
    model(x)
    changes: list[Callable[[nn.Module], object]] = [
        lambda m: m.load_state_dict(
            {name: value * 2 for name, value in m.state_dict().items()}
        ),
        lambda m: m.float().double(),
        lambda m: setattr(m[0], "bias", None),
        lambda m: m.__setitem__(
            2, nn.Linear(4, 5, **F64).requires_grad_(False).to(FIRST)
        ),
        lambda m: m.half(),
    ]
    for change in changes:
        torch.manual_seed(1)
        change(model.module)
        torch.manual_seed(1)
        change(plain)
        x = x.to(plain[0].weight.dtype)
        close(model(x), plain(x))
    model.module = other = mlp().to(FIRST)
    x = x.double()
    close(model(x), other(x))


def test_hooks_of_the_module_run_in_each_replica_and_those_of_the_wrapper_once() -> (
    None
):
    rows: list[int] = []
    model = parallel(nn.Linear(2, 2), 4)
    model.module.register_forward_hook(
        lambda module, args, output: rows.append(len(output))
    )
    model.module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.register_forward_hook(lambda module, args, output: output + 1)
    output = model(here(ROWS))
    # In each replica: copies have an item for all.
    assert rows == ([1] * 4 if IN_TURNS else [1])
    close(output, F.linear(here(ROWS) * 2, model.module.weight, model.module.bias) + 1)
    backward: list[int] = []
    model.module.register_full_backward_hook(
        lambda module, before, after: backward.append(len(after[0]))
    )
    model(here(ROWS).requires_grad_()).sum().backward()
    assert backward == [1] * 4  # outside of replicas, where the list is the user's own


def test_batch_statistics_are_those_of_all_replicas_in_one_momentum_step() -> None:
    rows = torch.arange(32.0, device=FIRST).view(16, 2)
    model = parallel(nn.BatchNorm1d(2), 4)
    model(rows)
    close(model.module.running_mean, 0.1 * rows.mean(0))
    assert model.module.num_batches_tracked.item() == 1
    model.eval()(rows)
    assert model.module.num_batches_tracked.item() == 1
    one_row = model(rows[:1])
    close(one_row, model.module(rows[:1]))


def test_what_a_forward_writes_on_the_module_is_kept() -> None:
    misses: list[int] = []

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.calls += 1
        if module.cache is None:
            misses.append(replica_id())
            module.cache = {"scale": 2}
        return x * module.cache["scale"]

    module: Any = Calls(forward)
    module.calls, module.cache = 0, None
    model = parallel(module)
    for _ in range(3):
        model(ROWS)
    assert module.calls == 3
    assert sorted(misses) == [0, 1]


def test_a_replica_has_parameters_and_a_state_of_its_own() -> None:
    seen: list[list[str]] = []
    parallel(
        Calls(
            lambda module, x: seen.append(
                [*dict(module.named_parameters()), *module.state_dict()]
            )
        )
    )(ROWS)
    assert seen == [["weight", "weight"]] * 2


@pytest.mark.parametrize("way", ["bound method", "list", "forward"])
def test_a_replica_reaches_its_own_layer_by_a(way: str) -> None:
    model, plain = alike(lambda: Indirect(way))
    for forward in (model, plain):
        forward(here(data(5)[0])).sum().backward()
    same_gradients(model, plain)


class Indirect(nn.Module):
    """Calls its layer by one of the ways that people have to get at it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, **F64)
        self.layers = [self.layer]
        self.method = self.decode
        self.way = way
        if way == "forward":
            self.layer.forward = self.layer.forward  # type: ignore[method-assign]

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return {
            "bound method": self.method,
            "list": self.layers[0],
            "forward": self.layer,
        }[self.way](x)


# Which the compiler hides.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_module_trains_and_is_compiled_once() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = mlp().to(FIRST)
    plain = copy.deepcopy(module)
    model = parallel(torch.compile(module, backend=backend, dynamic=False))
    counts = []
    for step in range(4):
        for forward, stepper in ((model, sgd(module)), (plain, sgd(plain))):
            stepper.zero_grad()
            forward(here(data(4, seed=step)[0])).square().sum().backward()
            stepper.step()
        counts.append(len(graphs))
    assert counts[0] >= 1 and counts[1:] == [counts[1]] * 3
    assert_close(parameters(module), parameters(plain), "compiled", 1e-12)


def test_a_compiler_runs_a_data_parallel_as_it_is() -> None:
    graphs: list[Any] = []
    model, plain = alike()
    compiled = torch.compile(
        model, backend=lambda graph, inputs: (graphs.append(graph), graph.forward)[-1]
    )
    for forward in (compiled, plain):
        forward(here(data(5)[0])).square().sum().backward()
    same_gradients(model, plain)
    assert graphs == []


class Tied(nn.Module):
    """Tokens in and out through one table."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4, **F64)
        self.mix = nn.GRU(4, 4, batch_first=True, **F64)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True, **F64)
        self.scales = nn.ParameterList([torch.ones(4, **F64)])
        self.out = nn.Linear(4, 7, **F64)
        self.out.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.mix(self.tokens((x * 100).long() % 7))
        attended, _ = self.attend(hidden, hidden, hidden)
        return self.out(attended * self.scales[0])


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4, **F64)), nn.Tanh())


def pruned() -> nn.Module:
    layer = nn.Linear(3, 4, **F64)
    prune.random_unstructured(layer, "weight", amount=4)
    return nn.Sequential(layer, nn.Tanh())


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "sparse": lambda: nn.Sequential(
        _Discrete(), nn.Embedding(7, 4, sparse=True, **F64)
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2, **F64), nn.GroupNorm(2, 4, **F64)
    ),
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)),
        nn.Linear(1, 4, **F64),
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, **F64), 2
        ),
    ),
    "weight_norm": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4, **F64)), nn.Tanh()
    ),
    "orthogonal": lambda: nn.Sequential(
        parametrizations.orthogonal(nn.Linear(3, 3, **F64)), nn.Tanh()
    ),
    "old weight_norm": old_weight_norm,
    "pruned": pruned,
    "complex": lambda: nn.Sequential(
        _Complex(), nn.Linear(3, 4, dtype=torch.complex128), _Modulus()
    ),
}


class _Complex(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(x, x + 1)


class _Modulus(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs()


class _Discrete(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 100).long() % 7


@pytest.mark.parametrize("name", FAMILIES)
def test_modules_of_every_kind_have_the_gradients_of_plain_pytorch(name: str) -> None:
    model, plain = alike(FAMILIES[name])
    for step in range(2):
        for forward in (model, plain):
            forward.zero_grad()
            forward(here(data(5, seed=step)[0])).square().sum().backward()
            torch.optim.SGD(forward.parameters(), lr=0.1).step()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            close(ours.grad.to_dense(), theirs.grad.to_dense(), rtol=1e-10, atol=1e-12)


def test_a_recurrent_network_trains() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(2, 4, num_layers=2, batch_first=True, **F64)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = rnn.pack_padded_sequence(
                x, lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            output, _ = rnn.pad_packed_sequence(
                self.rnn(packed)[0], batch_first=True, total_length=x.shape[1]
            )
            return output

    model, plain = alike(Recurrent)
    x, lengths = here(torch.randn(5, 6, 2, **F64), torch.tensor([1, 2, 4, 6, 3]))
    for forward in (model, plain):
        forward(x, lengths).square().sum().backward()
    same_gradients(model, plain)


# What of the caller's state a replica has


tenant = contextvars.ContextVar("tenant", default="nobody")


def test_no_grad_and_inference_mode_hold_in_the_replicas() -> None:
    modes = returning(
        lambda x: [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    )
    model, x = parallel(mlp()), here(data(5)[0])
    with torch.no_grad():
        assert modes(ROWS) == [[False, False], [False, False]]
        assert not model(x).requires_grad
    with torch.inference_mode():
        assert modes(ROWS) == [[False, False], [True, True]]
        assert model(x).is_inference()
    assert model(x).requires_grad


def test_autocast_reaches_the_replicas_with_its_dtype() -> None:
    model = parallel(nn.Linear(2, 2))
    with torch.autocast(FIRST.type, torch.bfloat16):
        assert model(here(ROWS)).dtype == torch.bfloat16
    assert model(here(ROWS)).dtype == torch.float32


def test_context_variables_modes_and_saved_tensor_hooks_reach_the_replicas() -> None:
    threads: dict[str, set[int]] = {"mode": set(), "packed": set()}

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            threads["mode"].add(threading.get_ident())
            return func(*args, **(kwargs or {}))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        threads["packed"].add(threading.get_ident())
        return tensor

    def forward(module: Any, x: torch.Tensor) -> Any:
        return (module.weight * x).exp(), tenant.get(), threading.get_ident()

    model = parallel(Calls(forward))
    token = tenant.set("somebody")
    with Mode(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, tenants, here_ = model(ROWS)
    tenant.reset(token)
    assert tenants == ["somebody"] * 2
    assert set(here_) <= threads["mode"] and set(here_) <= threads["packed"]


def test_tensors_that_name_no_device_are_where_they_are_in_the_callers_script() -> None:
    where = returning(lambda x: str(torch.zeros(1).device))
    assert where(ROWS) == ["cpu", "cpu"]
    with torch.device("meta"):
        assert where(ROWS) == ["meta", "meta"]
    with torch.device(FIRST):
        assert where(ROWS) == [str(device) for device in compute_devices(2)]


def test_each_replica_draws_other_numbers_and_a_seed_gives_the_same_again() -> None:
    model, x = parallel(nn.Dropout(0.5), 4), torch.ones(4, 64, device=FIRST)
    outputs = []
    for _ in range(2):
        torch.manual_seed(1)
        outputs.append(model(x))
    assert torch.equal(*outputs)
    assert len({tuple(row.tolist()) for row in outputs[0]}) == 4


# What becomes of an exception


class RefusedError(Exception):
    """An exception with two arguments, as those of many libraries."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("label"),
        RefusedError("batch", "labels"),
        SystemExit(3),
        KeyboardInterrupt(),
    ],
)
def test_the_very_exception_of_a_replica_is_raised_and_says_where(
    error: BaseException,
) -> None:
    model, plain = alike(
        lambda: Calls(
            lambda module, x, fails: _fail(error, fails) or module.weight * x
        ),
        2,
    )
    x = here(ROWS)
    with pytest.raises(type(error)) as raised:
        model(x, True)
    assert raised.value is error
    assert any("raised by replica 1 of 2" in note for note in error.__notes__)
    for forward in (model, plain):  # and nothing has come of it
        forward(x, False).sum().backward()
    assert_close(gradients(model.module), gradients(plain), "after a failure")


def _fail(error: BaseException, fails: bool) -> None:
    if fails and replica_id() == 1:
        raise error
