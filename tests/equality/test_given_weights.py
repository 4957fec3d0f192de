"""`torch.func.functional_call` of a DataParallel: weights given for one forward.

MAML computes fast weights in an inner step, a hypernetwork makes weights, an evaluation
takes those of a moving average. All of them call the model with these weights, and
differentiate through them. Such a call was refused: "weight is a Tensor. Replicas can
have copies of torch.nn.Parameter, not of its subclasses". And transforms such as `vmap`
failed within torch, without a word of the DataParallel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import torchstrategy
from conditions import only_in_turns, only_with_copies
from data_parallel import F64, FIRST, alike, parallel
from topologies import compute_devices

# torch compiles some formulas of forward-mode derivatives by its own deprecated
# compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


class Net(nn.Module):
    """Two layers with one weight, a layer with statistics, and a buffer to read.

    Forward reads it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.last = nn.Linear(3, 2)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = torch.tanh(
            self.second(torch.tanh(self.first(x))) + self.shift
        )
        result: torch.Tensor = self.last(hidden)
        return result


def net() -> nn.Module:
    return Net().double()


def rows(count: int, width: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator, **F64).to(FIRST)


def leaves(plain: nn.Module, scale: float = 2.0) -> dict[str, torch.Tensor]:
    return {
        name: (p.detach() * scale).requires_grad_()
        for name, p in plain.named_parameters()
    }


def under(prefix: str, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in given.items()}


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


def same_state(model: nn.Module, plain: nn.Module) -> None:
    """Whether a plain forward and its backward are those of plain PyTorch.

    They have to be after all that happened.
    """
    for one in (model, plain):
        one.zero_grad()
        one(rows(5)).square().sum().backward()
    same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    same(list(model.state_dict().values()), list(plain.state_dict().values()))


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_outputs_and_gradients_are_those_of_the_given_weights(count: int) -> None:
    model, plain = alike(net)
    parameters = list(model.parameters())
    given, x = leaves(plain), rows(count)
    actual = functional_call(model, under("module.", given), (x,))
    expected = functional_call(plain, given, (x,))
    same(actual, expected)
    same(
        *(
            torch.autograd.grad(out.square().sum(), list(given.values()))
            for out in (actual, expected)
        )
    )
    assert all(
        one is other for one, other in zip(model.parameters(), parameters, strict=True)
    )
    assert all(parameter.grad is None for parameter in parameters)
    same_state(model, plain)


def test_backward_adds_to_the_given_weights() -> None:
    model, plain = alike(net)
    given, x = leaves(plain), rows(5)
    for _ in range(2):
        functional_call(model, under("module.", given), (x,)).square().sum().backward()
    (
        2 * functional_call(plain, others := leaves(plain), (x,)).square().sum()
    ).backward()
    same([p.grad for p in given.values()], [p.grad for p in others.values()])
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("first_order", [False, True])
def test_maml_is_that_of_plain_pytorch(first_order: bool) -> None:
    """Two inner steps make fast weights of the parameters.

    The outer step differentiates through all of it.
    """
    model, plain = alike(net)

    def train(network: nn.Module, prefix: str) -> list[torch.Tensor]:
        outer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for task in range(3):
            fast: dict[str, torch.Tensor] = {
                name: p
                for name, p in network.named_parameters()
                if name.startswith(prefix)
            }
            for inner in range(2):
                out = functional_call(network, fast, (rows(5, seed=10 * task + inner),))
                slopes = torch.autograd.grad(
                    out.square().mean(),
                    list(fast.values()),
                    create_graph=not first_order,
                )
                fast = {
                    name: p - 0.1 * slope
                    for (name, p), slope in zip(fast.items(), slopes, strict=True)
                }
            outer.zero_grad()
            loss = (
                functional_call(network, fast, (rows(7, seed=10 * task + 5),))
                .square()
                .mean()
            )
            loss.backward()
            outer.step()
            losses.append(loss.detach())
        return losses

    same(train(model, "module."), train(plain, ""))
    same_state(model, plain)


def test_a_hypernetwork_that_makes_some_of_the_weights_is_trained() -> None:
    model, plain = alike(net)
    maker = nn.Linear(2, 6).double().to(FIRST)
    twin = copy.deepcopy(maker)
    for network, own, prefix in ((model, maker, "module."), (plain, twin, "")):
        weight = own(rows(1, 2)).view(2, 3)
        functional_call(
            network, {f"{prefix}last.weight": weight}, (rows(5),)
        ).square().sum().backward()
    same([p.grad for p in maker.parameters()], [p.grad for p in twin.parameters()])
    names = [name for name, _ in plain.named_parameters()]
    of_model, of_plain = ([p.grad for p in one.parameters()] for one in (model, plain))
    assert of_plain[names.index("last.weight")] is None
    same(of_model, of_plain)
    model.zero_grad()
    same_state(model, plain)


@pytest.mark.parametrize(
    "kind", ["plain", "leaf", "history", "parameter", "frozen parameter", "other dtype"]
)
def test_a_given_weight_may_be_of_any_kind(kind: str) -> None:
    model, plain = alike(net)
    base = torch.arange(6.0, **F64).view(2, 3).to(FIRST)
    make: dict[str, Callable[[], torch.Tensor]] = {
        "plain": base.clone,
        "leaf": lambda: base.clone().requires_grad_(),
        "history": lambda: base.clone().requires_grad_() * 2,
        "parameter": lambda: nn.Parameter(base.clone()),
        "frozen parameter": lambda: nn.Parameter(base.clone(), requires_grad=False),
        "other dtype": lambda: base.float(),
    }
    weight, x = make[kind](), rows(5)
    model(x)
    for _ in range(2):
        if kind == "other dtype":
            given = {"last.weight": weight, "last.bias": torch.ones(2, device=FIRST)}
            for network, prefix in ((model, "module."), (plain, "")):
                with pytest.raises(RuntimeError, match="dtype"):
                    functional_call(network, under(prefix, given), (x,))
            continue
        actual = functional_call(model, {"module.last.weight": weight}, (x,))
        expected = functional_call(plain, {"last.weight": weight}, (x,))
        same(actual, expected)
        if weight.requires_grad:
            same(
                *(
                    torch.autograd.grad(out.square().sum(), [weight])
                    for out in (actual, expected)
                )
            )
    same_state(model, plain)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_tied_weights_are_given_as_in_plain_pytorch(tie_weights: bool) -> None:
    model, plain = alike(net)
    tied, x = rows(3).requires_grad_(), rows(5)
    results = []
    for network, prefix in ((model, "module."), (plain, "")):
        given = {f"{prefix}first.weight": tied}
        out = functional_call(network, given, (x,), tie_weights=tie_weights)
        results.append(
            (
                out,
                *torch.autograd.grad(
                    out.square().sum(), [tied, *network.parameters()], allow_unused=True
                ),
            )
        )
    same(*results)


def test_names_are_checked_as_in_plain_pytorch() -> None:
    model, plain = alike(net)
    with pytest.raises(RuntimeError, match="Missing key"):
        functional_call(model, {"module.last.weight": rows(2)}, (rows(5),), strict=True)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        functional_call(model, {"module.other": rows(2)}, (rows(5),), strict=True)
    same_state(model, plain)


@pytest.mark.parametrize("learns", [False, True])
def test_buffers_are_given_too(learns: bool) -> None:
    model, plain = alike(net)
    shift, x = rows(3)[0].requires_grad_(learns), rows(5)
    for _ in range(2):
        actual = functional_call(model, {"module.shift": shift}, (x,))
        expected = functional_call(plain, {"shift": shift}, (x,))
        same(actual, expected)
        if learns:
            same(
                *(
                    torch.autograd.grad(out.square().sum(), [shift])
                    for out in (actual, expected)
                )
            )
    same_state(model, plain)


def test_given_statistics_are_written_as_in_plain_pytorch() -> None:
    """With two replicas of equal rows the mean of the statistics is all rows'."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=0.5)).double()

    model, plain = alike(build, replicas=2)
    x = rows(4)
    given = {
        "1.running_mean": torch.zeros(3, **F64).to(FIRST),
        "1.running_var": torch.ones(3, **F64).to(FIRST),
    }
    placed = under("module.", {name: tensor.clone() for name, tensor in given.items()})
    functional_call(model, placed, (x,))
    functional_call(plain, given, (x,))
    same(placed["module.1.running_mean"], given["1.running_mean"])
    same(model.state_dict()["1.running_mean"], plain.state_dict()["1.running_mean"])


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_given_tensor_that_forward_writes_is_refused_by_name(how: str) -> None:
    class Writes(nn.Module):
        total: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(1, **F64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if how == "in place":
                with torch.no_grad():
                    self.total += 1
            else:
                self.total = self.total + x.sum()
            return x * self.total

    model = parallel(Writes())
    with pytest.raises(
        RuntimeError,
        match=r"forward wrote on total, .* torch\.func\.functional_call gave",
    ):
        functional_call(
            model,
            {"module.total": torch.ones(1, **F64).to(FIRST).requires_grad_()},
            (rows(4),),
        )
    assert "total" in model.state_dict() and not model.module.total.requires_grad


def test_a_model_that_contains_one_is_called_with_weights() -> None:
    class Outer(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body, self.head = body, nn.Linear(2, 1).double().to(FIRST)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(self.body(x))
            return result

    body, plain_body = alike(net)
    torch.manual_seed(1)
    model = Outer(body)
    torch.manual_seed(1)
    plain = Outer(plain_body)
    given = leaves(plain)
    placed = {
        name.replace("body.", "body.module."): tensor for name, tensor in given.items()
    }
    out, expected = (
        functional_call(model, placed, (rows(5),)),
        functional_call(plain, given, (rows(5),)),
    )
    same(out, expected)
    same(
        *(
            torch.autograd.grad(one.sum(), list(given.values()))
            for one in (out, expected)
        )
    )
    same_state(model, plain)


def test_the_function_data_parallel_takes_given_weights() -> None:
    devices = compute_devices(3)

    class Splits(nn.Module):
        def __init__(self, is_split: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.is_split = net().to(FIRST), is_split

        def forward(self, x: torch.Tensor) -> Any:
            return (
                torchstrategy.data_parallel(self.body, x, devices)
                if self.is_split
                else self.body(x)
            )

    model, plain = Splits(True), Splits(False)
    given = leaves(plain)
    for _ in range(2):
        out, expected = (
            functional_call(one, given, (rows(5),)) for one in (model, plain)
        )
        same(out, expected)
        same(
            *(
                torch.autograd.grad(one.sum(), list(given.values()))
                for one in (out, expected)
            )
        )
    same_state(model, plain)


def test_the_older_function_of_torch_gives_weights_too() -> None:
    model, plain = alike(net)
    given = leaves(plain)
    with pytest.warns(FutureWarning):
        out = nn.utils.stateless.functional_call(
            model, under("module.", given), (rows(5),)
        )
    same(out, functional_call(plain, given, (rows(5),)))


def test_without_gradients_weights_are_given_too() -> None:
    model, plain = alike(net)
    average = {name: p.detach() + 1 for name, p in plain.named_parameters()}
    for block in (torch.no_grad(), torch.inference_mode()):
        with block:
            same(
                functional_call(model, under("module.", average), (rows(5),)),
                functional_call(plain, average, (rows(5),)),
            )
    same_state(model, plain)


def test_parameters_of_another_model_may_be_given() -> None:
    """A moving average keeps its own model, which may be in a DataParallel, too."""
    model, plain = alike(net)
    other = parallel(copy.deepcopy(plain), 3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 1
    other(rows(5))
    for _ in range(2):
        out = functional_call(model, dict(other.named_parameters()), (rows(5),))
        same(out, other.module(rows(5)))
        out.sum().backward()
    other.zero_grad()
    same_state(model, plain)


def test_a_skeleton_on_the_meta_device_is_called_with_weights() -> None:
    plain = (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        .double()
        .to(FIRST)
        .eval()
    )
    skeleton = torchstrategy.DataParallel(
        copy.deepcopy(plain).to("meta"), compute_devices(2)
    )
    given = {**leaves(plain), **dict(plain.named_buffers())}
    for _ in range(2):
        same(
            functional_call(skeleton, under("module.", given), (rows(5),)),
            functional_call(plain, given, (rows(5),)),
        )


@pytest.mark.parametrize("is_cached", [False, True])
def test_parametrizations_are_computed_from_given_weights(is_cached: bool) -> None:
    def build() -> nn.Module:
        layers = [
            parametrizations.weight_norm(nn.Linear(3, 3)),
            nn.Tanh(),
            parametrizations.weight_norm(nn.Linear(3, 2)),
        ]
        return nn.Sequential(*layers).double()

    model, plain = alike(build)
    x = rows(5)
    for given in ({}, leaves(plain)):
        results = []
        for network, prefix in ((model, "module."), (plain, "")):
            with parametrize.cached() if is_cached else torch.enable_grad():
                out = functional_call(network, under(prefix, given), (x,))
            learns = list(given.values()) or list(network.parameters())
            results.append((out, *torch.autograd.grad(out.square().sum(), learns)))
        same(*results)
    same_state(model, plain)


def test_a_parametrized_module_of_its_own_computes_its_weight_in_each_replica() -> None:
    """torch's cache knows modules by their ids.

    The module that a replica calls by its name has the user's.
    """
    model, plain = alike(lambda: parametrizations.weight_norm(nn.Linear(3, 2)).double())
    results = []
    for network in (model, plain):
        with parametrize.cached():
            out = network(rows(5)) + network(rows(5, seed=1))
            results.append(
                (
                    out,
                    *torch.autograd.grad(
                        out.square().sum(), list(network.parameters())
                    ),
                )
            )
    same(*results)


@pytest.mark.parametrize("count", [2, 3])
def test_a_step_in_a_block_of_cached_parametrizations_is_that_of_plain_pytorch(
    count: int,
) -> None:
    """torch's cache gave one replica the weight of another.

    That one is on another device and in another graph.
    """
    torch.manual_seed(0)
    plain = (
        nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2))
        .double()
        .to(FIRST)
    )
    strategy = torchstrategy.CentralStorageStrategy(compute_devices(count), FIRST)
    model = strategy.distribute_module(copy.deepcopy(plain))

    def step(network: Any, x: torch.Tensor) -> None:
        network.zero_grad()
        network[1](network[0](network[0](x).tanh())).square().sum(1).mean().backward()

    x = rows(5).cpu()
    (batch,) = strategy.experimental_distribute_dataset([x])
    with parametrize.cached():
        strategy.run(lambda part: step(model, part), args=(batch,))
    with parametrize.cached():
        step(plain, x.to(FIRST))
        first = plain[0].weight
        assert plain[0].weight is first  # the cache is on outside of the run
    same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_an_error_in_forward_leaves_the_module_as_it_was() -> None:
    model, plain = alike(net)
    with pytest.raises(RuntimeError, match="shape"):
        functional_call(model, under("module.", leaves(plain)), (rows(5, 4),))
    same_state(model, plain)


def test_what_was_replaced_for_good_is_used_afterwards() -> None:
    """The module remembers what was in the place of given weights.

    What came there later is what counts.
    """
    model, plain = alike(net)
    model(rows(5))
    for network in (model.module, plain):
        torch.manual_seed(3)
        network.last = nn.Linear(3, 2).double().to(FIRST)
    given = leaves(plain)
    same(
        functional_call(model, under("module.", given), (rows(5),)),
        functional_call(plain, given, (rows(5),)),
    )
    same_state(model, plain)


# Transforms

TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "vjp": lambda f, x: torch.func.vjp(f, x)[0],
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x.expand(4, 5, 3)),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_refused_by_name(name: str) -> None:
    model, plain = alike(net)
    with pytest.raises(
        RuntimeError,
        match=r"A DataParallel .* transform of torch\.func(.|\n)*model\.module",
    ):
        TRANSFORMS[name](model, rows(5))
    TRANSFORMS[name](model.module, rows(5))
    same_state(model, plain)


def test_an_ensemble_of_stacked_weights_is_refused_by_name() -> None:
    models, x = [parallel(net()) for _ in range(2)], rows(5)
    parameters, buffers = torch.func.stack_module_state(models)
    with pytest.raises(RuntimeError, match="A DataParallel"):
        torch.func.vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(
            parameters, buffers
        )


def test_a_transform_of_the_gradient_of_given_weights_is_refused_by_name() -> None:
    model, plain = alike(net)
    given = {name: p.detach() for name, p in plain.named_parameters()}
    x = rows(5)
    with pytest.raises(RuntimeError, match="A DataParallel"):
        torch.func.grad(lambda w: functional_call(model, w, (x,)).sum())(
            under("module.", given)
        )
    same_state(model, plain)


def test_with_one_device_transforms_are_those_of_the_module() -> None:
    model = parallel(net(), 1)
    same(torch.func.jacrev(model)(rows(5)), torch.func.jacrev(model.module)(rows(5)))


def test_forward_mode_derivatives_of_inputs_and_weights_are_right() -> None:
    model, plain = alike(net)
    x, along = rows(5), rows(5, seed=1)
    given = {name: p.detach() for name, p in plain.named_parameters()}
    results = []
    for network, prefix in ((model, "module."), (plain, "")):
        with forward_ad.dual_level():
            weights = {
                k: forward_ad.make_dual(p, torch.ones_like(p)) for k, p in given.items()
            }
            inputs = forward_ad.make_dual(x, along)
            out = functional_call(network, under(prefix, weights), (inputs,))
            results.append(tuple(forward_ad.unpack_dual(out)))
    same(*results)


# In a step of a strategy


@pytest.mark.parametrize("sizes", [(5, 4), (1, 7)])
def test_weights_that_a_step_gives_to_its_replicas_model_are_right(
    sizes: tuple[int, ...],
) -> None:
    """MAML within a step: each replica computes fast weights of its own rows.

    It differentiates through them.
    """
    torch.manual_seed(0)
    plain = net().to(FIRST)
    strategy = torchstrategy.CentralStorageStrategy(compute_devices(3), FIRST)
    model = strategy.distribute_module(copy.deepcopy(plain))
    optimizer = strategy.distribute_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)

    def step(network: Any, own: torch.optim.Optimizer, x: torch.Tensor) -> None:
        own.zero_grad()
        fast = {name: p * 0.9 + p.square() for name, p in network.named_parameters()}
        out = functional_call(network, fast, (x,))
        penalty = torch.autograd.grad(out.sum(), list(fast.values()), create_graph=True)
        # A mean over rows of what each row has, so that the mean over replicas is that
        # over the batch.
        loss = (
            functional_call(network, {"last.bias": fast["last.bias"] * 2}, (x,))
            .square()
            .sum(1)
            .mean()
        )
        (
            loss
            + 0.1 * sum(slope.mean() for slope in penalty) / len(x)
            + F.mse_loss(out, out.detach() + 1)
        ).backward()
        own.step()

    def given(batch: torch.Tensor) -> None:
        step(model, optimizer, batch)

    data = [rows(size, seed=size).cpu() for size in sizes]
    for batch, x in zip(
        strategy.experimental_distribute_dataset(data), data, strict=True
    ):
        strategy.run(given, args=(batch,))
        step(plain, other, x.to(FIRST))
        same(
            [p.detach().to(FIRST) for p in model.parameters()],
            [p.detach() for p in plain.parameters()],
        )


@only_with_copies
def test_weights_that_are_given_around_a_run_are_refused_by_name() -> None:
    strategy = torchstrategy.CentralStorageStrategy(compute_devices(2), FIRST)

    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = strategy.distribute_module(nn.Linear(3, 2))

        def forward(self) -> None:
            strategy.run(lambda: self.layer(torch.ones(2, 3)))

    model = Runs()
    with pytest.raises(
        TypeError,
        match=r"layer\.weight is a plain tensor .* functional_call in the step",
    ):
        functional_call(model, {"layer.weight": torch.ones(2, 3, device=FIRST)}, ())
    model()


GIVEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a leaf": lambda base: base,
    "a parameter": nn.Parameter,
    "made of a leaf": torch.square,
    "a constant": lambda base: base.detach(),
}


@only_in_turns
@pytest.mark.parametrize("kind", GIVEN)
def test_weights_that_are_given_around_a_run_are_those_of_all_replicas(
    several: torchstrategy.Strategy, kind: str
) -> None:
    class Runs(nn.Module):
        def __init__(self, strategy: torchstrategy.Strategy | None) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 2, **F64)
            self.strategy = strategy
            if strategy is not None:
                strategy.distribute_module(self.layer)

        def forward(self, x: torch.Tensor) -> Any:
            def loss(x: torch.Tensor) -> torch.Tensor:
                return self.layer(x).square().mean()

            if self.strategy is None:
                return loss(x)
            (batch,) = self.strategy.experimental_distribute_dataset([x])
            return self.strategy.reduce(
                "mean", self.strategy.run(loss, args=(batch,)), None
            )

    found = []
    for model in (Runs(None), Runs(several)):
        base = torch.full(
            (2, 3), 0.3, requires_grad=True, device=model.layer.bias.device, **F64
        )
        weight = GIVEN[kind](base)
        result = functional_call(model, {"layer.weight": weight}, (rows(12),))
        result.backward()
        gradient = weight.grad if weight.is_leaf else base.grad
        bias = model.layer.bias.grad
        found.append([result.detach(), bias, gradient])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14, check_device=False)


class Gained(nn.Linear):
    """Reads an attribute of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * getattr(self.weight, "gain", 1.0)


def test_attributes_of_given_weights_come_to_all_replicas() -> None:
    """Only the rows of the first replica were scaled.

    The weights of the others had lost the attribute.
    """
    model = Gained(3, 2).double().to(FIRST)
    given = {name: value.detach().clone() for name, value in model.named_parameters()}
    given["weight"].gain = 5.0  # type: ignore[attr-defined]
    x = torch.randn(7, 3, **F64, device=FIRST)
    expected = functional_call(model, given, (x,))
    actual = functional_call(
        parallel(model),
        {f"module.{name}": value for name, value in given.items()},
        (x,),
    )
    assert torch.allclose(actual.to(expected.device), expected, rtol=1e-12, atol=0)
