"""Programs of a few lines that gave other numbers than plain PyTorch.

Somebody who looked for such programs found them.

Each was silent: no error, no warning. The name of a test says what had gone wrong.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from tests.support.problems import close, deal

X = torch.arange(15, dtype=torch.float64).reshape(5, 3).sin()

Change = Callable[[Any, Any], Any]


def nothing(model: Any, optimizer: Any) -> None:
    pass


def trained(
    strategy: torchstrategy.Strategy | None,
    build: Callable[[], nn.Module],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    before: Change = nothing,
    between: Change = nothing,
    steps: int = 4,
    **settings: Any,
) -> torch.Tensor:
    """The parameters after some steps on one batch."""
    torch.manual_seed(0)
    model = build().double()
    if strategy is not None:
        model = strategy.distribute_module(model)
    before(model, None)
    made = optimizer(model.parameters(), lr=0.1, **settings)
    if strategy is not None:
        strategy.distribute_optimizer(made)

    def step(x: torch.Tensor) -> None:
        made.zero_grad()
        (model(x) - 1).square().mean().backward()
        made.step()

    for index in range(steps):
        if strategy is None:
            step(X)
        else:
            strategy.run(step, args=(deal(strategy, X),))
        if index == 1:
            between(model, made)
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


def linear() -> nn.Module:
    return nn.Linear(3, 3)


def test_an_optimizer_that_writes_on_gradients(several: torchstrategy.Strategy) -> None:
    # On accelerators, SGD with nesterov momentum adds the momentum to the gradients in
    # place. Mirrored replicas took the step of their own optimizers on gradients that
    # had the momentum already.
    settings = {"momentum": 0.5, "nesterov": True, "foreach": True}
    close(trained(several, linear, **settings), trained(None, linear, **settings))


class Views(nn.Module):
    """Buffers, and an attribute, over the memory of one parameter."""

    def __init__(self, attribute: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.attribute = attribute
        self.rest: Any = None

    def share(self) -> None:
        self.register_buffer("one", self.w.data)
        if self.attribute:
            self.rest = self.w.data[1:]
        else:
            self.register_buffer("other", self.w.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x * self.w * self.one * (self.rest.sum() if self.attribute else self.other)
        )


@pytest.mark.parametrize("attribute", [False, True])
def test_two_views_of_a_parameter(
    several: torchstrategy.Strategy, attribute: bool
) -> None:
    # The copies of the two share memory, so to bring one counted as a write of the step
    # on the other. After the run, the old value was written over the update.
    def share(model: Any, _: Any) -> None:
        model.share()

    ours = trained(several, lambda: Views(attribute), before=share)
    close(ours, trained(None, lambda: Views(attribute), before=share))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_parameters_that_share_memory(
    several: torchstrategy.Strategy, frozen: bool, later: bool
) -> None:
    # Each copy had memory of its own, so an update of one did not reach the other.
    def tie(model: Any, _: Any) -> None:
        model[1].weight.requires_grad_(not frozen)
        model[1].weight.data = model[0].weight.data.t()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))

    changes = {"between": tie} if later else {"before": tie}
    close(trained(several, build, **changes), trained(None, build, **changes))


class Factor(nn.Module):
    """The input times what a function makes of the module."""

    def __init__(
        self, prepare: Callable[[Any], None], factor: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        prepare(self)
        self._factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._factor(self)


class Named:
    """A hook that has a name, as the hooks of weight normalisation have."""

    name = "alpha"

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        pass


def complex_buffer(m: Any) -> None:
    m.register_buffer("z", torch.tensor([1 + 2j], dtype=torch.complex128))


def beside_a_sparse_one(m: Any) -> None:
    complex_buffer(m)
    m.register_buffer("adjacency", torch.eye(2, dtype=torch.float64).to_sparse())


def conjugate(m: Any) -> None:
    m.z.data = m.z.data.conj()


def real_buffer(m: Any) -> None:
    m.register_buffer("b", torch.ones(1, dtype=torch.float64))


def negate(m: Any) -> None:
    m.b.data = torch._neg_view(m.b.data)


def under_a_named_hook(m: Any) -> None:
    m.alpha = 1.0
    m.register_forward_pre_hook(Named())


def set_alpha(m: Any) -> None:
    m.alpha = 5.0


def table_with_a_number(m: Any) -> None:
    m.table = {1: "a"}


def true_in_the_place_of_one(m: Any) -> None:
    m.table[True] = m.table.pop(1)


def rows_as_long_as_the_checksums(m: Any) -> None:
    m.register_buffer(
        "b", torch.arange(20, dtype=torch.float64)[:, None].repeat(1, 1021)
    )


def exchange_rows(m: Any) -> None:
    if m.b.is_cpu:
        m.b.numpy()[:] = m.b.numpy()[::-1].copy()  # torch does not count this write
    else:
        m.b.copy_(m.b.flip(0))


def hooked_dict(m: Any) -> None:
    m.__dict__ = {
        **m.__dict__,
        "_forward_hooks": OrderedDict({0: lambda module, inputs, out: out * 7}),
    }


UNSEEN: dict[
    str, tuple[Callable[[Any], None], Callable[[Any], Any], Callable[[Any], None]]
] = {
    "a tensor became conjugate": (complex_buffer, lambda m: m.z.imag, conjugate),
    "beside a sparse one": (beside_a_sparse_one, lambda m: m.z.imag, conjugate),
    "a tensor became negative": (real_buffer, lambda m: m.b, negate),
    "an attribute with the name of a hook": (
        under_a_named_hook,
        lambda m: m.alpha,
        set_alpha,
    ),
    "a key became an equal one": (
        table_with_a_number,
        lambda m: 2 if True is next(iter(m.table)) else 1,
        true_in_the_place_of_one,
    ),
    "rows changed places": (
        rows_as_long_as_the_checksums,
        lambda m: m.b[0, :1],
        exchange_rows,
    ),
    "another __dict__": (real_buffer, lambda m: m.b, hooked_dict),
}


@pytest.mark.parametrize("what", UNSEEN)
def test_changes_between_runs_that_replicas_did_not_see(
    several: torchstrategy.Strategy, what: str
) -> None:
    prepare, factor, change = UNSEEN[what]
    if (
        change in (conjugate, negate)
        and several.extended.parameter_devices[0].type != "cpu"
    ):
        pytest.skip(
            "simulated devices take no conjugate view in the place of the data of a "
            "tensor"
        )
    plain = Factor(prepare, factor)
    ours = several.distribute_module(Factor(prepare, factor))
    for index in range(4):
        if index == 2:
            change(plain)
            change(ours)
        close(
            several.gather(
                several.run(lambda x: ours(x).detach(), args=(deal(several, X),)),
                axis=0,
            ),
            plain(X),
        )


def test_a_write_on_the_state_of_an_optimizer_is_refused(
    several: torchstrategy.Strategy,
) -> None:
    # Each replica made it, and they share the optimizer.
    model = several.distribute_module(nn.Linear(3, 3).double())
    optimizer = several.distribute_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )

    def step(x: torch.Tensor, halve: bool) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        for state in optimizer.state.values():
            assert "momentum_buffer" in state
            if halve:
                state["momentum_buffer"].mul_(0.5)

    several.run(step, args=(deal(several, X), False))
    with pytest.raises(RuntimeError, match="wrote on the state of SGD"):
        several.run(step, args=(deal(several, X), True))


def test_a_step_that_runs_later_is_refused(several: torchstrategy.Strategy) -> None:
    def generator(x: torch.Tensor) -> Any:
        yield x

    async def coroutine(x: torch.Tensor) -> torch.Tensor:
        return x

    for step in (generator, coroutine):
        with pytest.raises(TypeError, match="with yield, or an async one"):
            several.run(step, args=(deal(several, X),))


class Range(nn.Module):
    """Keeps a maximum under a name that begins as those of batch normalisation do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_max", torch.tensor(-9.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running_max.copy_(torch.maximum(self.running_max, x.max()))
        return x


def test_a_maximum_is_not_averaged(several: torchstrategy.Strategy) -> None:
    model = several.distribute_module(Range())
    with pytest.warns(torchstrategy.ReplicaBufferWarning, match="Range.running_max"):
        several.run(lambda x: model(x), args=(deal(several, X),))
    first = several.experimental_local_results(deal(several, X))[0]
    close(model.running_max, first.max())


@pytest.mark.parametrize("rows", [6, 7])
def test_a_penalty_on_the_gradient_of_rows_that_meet(
    several: torchstrategy.Strategy, rows: int
) -> None:
    # The gradient of a sum is right only where all replicas have as many rows:
    # docs/features.md says to take a mean.
    x = torch.arange(rows * 3, dtype=torch.float64).reshape(rows, 3).sin()
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)
    ).double()
    ours = torchstrategy.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    several.distribute_module(ours)

    def penalty(model: nn.Module, x: torch.Tensor) -> None:
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).mean(0).sum(), x, create_graph=True)
        ((gradient * len(x)).norm(dim=1) - 1).square().mean().backward()

    several.run(lambda x: penalty(ours, x), args=(deal(several, x),))
    penalty(plain, x)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        close(one.grad, other.grad)


def test_a_hook_of_a_parameter_that_only_the_step_trains(
    several: torchstrategy.Strategy,
) -> None:
    # A random program found it: what the step thaws and freezes again is frozen when
    # the next run begins, and its hook was not called any more.
    def run(strategy: torchstrategy.Strategy | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3).double()
        if strategy is not None:
            model = strategy.distribute_module(model)
        model.weight.register_hook(lambda gradient: gradient / 2)
        gradients = []

        def step(x: torch.Tensor) -> None:
            model.requires_grad_(True)
            model(x).square().mean().backward()
            model.requires_grad_(False)

        for _ in range(3):
            if strategy is None:
                step(X)
            else:
                strategy.run(step, args=(deal(strategy, X),))
            assert model.weight.grad is not None
            gradients.append(model.weight.grad.clone())
        return gradients

    for ours, plain in zip(run(several), run(None), strict=True):
        close(ours, plain)
