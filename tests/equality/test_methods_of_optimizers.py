"""Optimizers of other people.

Around another one, without `super().__init__`, with more methods than `step`.

Whatever method a step calls, it acts once, on the user's own optimizer and with the
gradients of the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torchstrategy
from problems import assert_close, built, compare, data, deal, mlp, mse, parameters, sgd
from topologies import central
from torchstrategy.testing import assert_replicas_agree


class Lookahead(Optimizer):
    """As packages of optimizers write it: around an optimizer, with its groups.

    It goes without `super().__init__`.
    """

    def __init__(self, inner: Any) -> None:
        self.inner, self.count = inner, 0
        self.param_groups, self.state, self.defaults = (
            inner.param_groups,
            inner.state,
            inner.defaults,
        )
        self.slow = [p.detach().clone() for p in self._parameters()]

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in zip(self._parameters(), self.slow, strict=True):
                slow.add_(p.detach() - slow, alpha=0.5)
                p.data.copy_(slow)
        return loss


class ComputesGroups(Lookahead):
    """As libraries of training loops wrap optimizers: with properties.

    Its groups and state are properties.
    """

    def __init__(self, inner: Any) -> None:
        self.inner, self.count = inner, 0
        self.slow = [p.detach().clone() for p in self._parameters()]

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state


class InList(ComputesGroups):
    """It has what it is around in a list."""

    def __init__(self, inner: Any) -> None:
        self.all = [inner]
        super().__init__(inner)
        del self.inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            return self.all[0]
        raise AttributeError(name)


class Alone(Optimizer):
    """Around nothing, and without `super().__init__`."""

    def __init__(self, params: Any) -> None:
        self.param_groups: list[Any] = [{"params": list(params), "lr": 0.1}]
        self.state, self.defaults = {}, {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.sub_(self.param_groups[0]["lr"] * p.grad)


class SAM(Optimizer):
    """Sharpness-aware minimization, as its best-known port to PyTorch does it."""

    def __init__(
        self, params: Any, base: Any, rho: float = 0.5, **settings: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> torch.Tensor:
        norm = torch.stack(
            [p.grad.norm() for group in self.param_groups for p in group["params"]]
        ).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()
        return norm

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()

    def descend(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.step()

    def scaled(self, by: Any) -> None:
        for group in self.param_groups:
            group["rho"] *= float(by)


AROUND: dict[str, Callable[[nn.Module], Any]] = {
    "with its groups": lambda model: Lookahead(sgd(model)),
    "which it computes": lambda model: ComputesGroups(sgd(model)),
    "in a list": lambda model: InList(sgd(model)),
    "around one that is around one": lambda model: Lookahead(Lookahead(sgd(model))),
    "around nothing": lambda model: Alone(model.parameters()),
    "around one of its own": lambda model: SAM(
        model.parameters(), SGD, lr=0.1, momentum=0.9
    ),
}


def plain_step(model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = mse(model, batch)
    loss.backward()
    if isinstance(optimizer, SAM):
        optimizer.first_step(zero_grad=True)
        mse(model, batch).backward()
        optimizer.second_step()
    else:
        optimizer.step()
    return loss.detach()


def step_with_closure(model: Any, optimizer: Any, batch: Any) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)


@pytest.mark.parametrize("around", AROUND)
def test_it_trains_in_a_step_as_in_plain_torch(make: Any, around: str) -> None:
    """Each replica did what followed the inner step; SAM ended in a bare KeyError."""
    compare(make, 3, plain_step, optimizer=AROUND[around])


@pytest.mark.parametrize(
    "around", ["with its groups", "which it computes", "around one of its own"]
)
def test_it_may_ask_for_the_loss_itself(make: Any, around: str) -> None:
    compare(make, 3, step_with_closure, optimizer=AROUND[around])


@pytest.mark.parametrize("around", AROUND)
def test_one_that_was_made_outside_of_the_scope_is_followed_once_it_is_given(
    make: Any, around: str
) -> None:
    strategy = make(3)
    torch.manual_seed(0)
    twin = mlp()
    with strategy.scope():
        torch.manual_seed(0)
        model = mlp()
    ours, plain = AROUND[around](model), AROUND[around](twin)
    assert strategy.distribute_optimizer(ours) is ours
    for seed in range(3):
        strategy.run(
            lambda batch: plain_step(model, ours, batch) and None,
            args=(deal(strategy, data(7, seed=seed)),),
        )
        plain_step(twin, plain, data(7, seed=seed))
    assert_close(parameters(model), parameters(twin), around, 1e-10, 1e-10)


def test_a_method_gives_each_replica_the_numbers_of_the_whole_batch(make: Any) -> None:
    strategy = make(2)
    (model, ours), (twin, plain) = built(strategy, mlp, AROUND["around one of its own"])

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        mse(model, batch).backward()
        norm = optimizer.first_step()
        optimizer.second_step(zero_grad=True)
        return norm

    expected = step(twin, plain, data(7))
    norms = strategy.run(
        lambda batch: step(model, ours, batch), args=(deal(strategy, data(7)),)
    )
    for norm in strategy.experimental_local_results(norms):
        torch.testing.assert_close(norm.cpu(), expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_method_that_is_given_a_graph_is_refused(
    several: torchstrategy.Strategy,
) -> None:
    """It would run backward for the first replica's rows alone."""
    (model, optimizer), _ = built(several, mlp, AROUND["around one of its own"])
    with pytest.raises(
        RuntimeError,
        match=r"SAM\.descend\(\) acts once for all replicas.*requires grad",
    ):
        several.run(
            lambda batch: optimizer.descend(mse(model, batch)),
            args=(deal(several, data(7)),),
        )


def test_a_method_that_is_given_different_arguments_is_refused(
    several: torchstrategy.Strategy,
) -> None:
    (model, optimizer), _ = built(several, mlp, AROUND["around one of its own"])
    with pytest.raises(ValueError, match=r"SAM\.scaled\(\) acts once.*all_reduce"):
        several.run(
            lambda batch: optimizer.scaled(mse(model, batch).detach()),
            args=(deal(several, data(7)),),
        )
    several.run(lambda: optimizer.scaled(2.0))
    assert optimizer.param_groups[0]["rho"] == 1.0


def test_what_is_no_optimizer_to_torch_cannot_be_given() -> None:
    class Empty(Optimizer):
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError, match=r"Empty.*param_groups"):
        central(2).distribute_optimizer(Empty())


def test_a_group_that_was_added_between_runs_may_be_updated_before_the_next(
    make: Any,
) -> None:
    """Copies of the optimizer, with fewer groups, met it in a bare ValueError."""
    strategy = make(2)

    def build() -> nn.Module:
        return nn.ModuleList(
            [nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float64)]
        )

    (model, ours), (twin, plain) = built(
        strategy, build, lambda m: SGD(m[0].parameters(), lr=0.1, momentum=0.9)
    )

    def gradients(model: Any, batch: Any) -> None:
        model.zero_grad()
        mse(nn.Sequential(*model), batch).backward()

    for seed in range(3):
        strategy.run(
            lambda batch: gradients(model, batch),
            args=(deal(strategy, data(7, seed=seed)),),
        )
        gradients(twin, data(7, seed=seed))
        for m, optimizer in ((model, ours), (twin, plain)):
            if seed == 0:
                optimizer.add_param_group(
                    {"params": list(m[1].parameters()), "lr": 0.2}
                )
            optimizer.step()
        assert_close(parameters(model), parameters(twin), f"step {seed}", 1e-10, 1e-10)
        assert_replicas_agree(strategy, model, ours)


def test_parameters_that_took_the_place_of_others_in_a_group_are_updated(
    make: Any,
) -> None:
    """As many as before: it went unnoticed.

    The step of the run ended in an error that named nothing.
    """
    strategy = make(2)

    def build() -> nn.Module:
        return nn.ModuleList(
            [nn.Linear(3, 2, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float64)]
        )

    (model, ours), (twin, plain) = built(
        strategy, build, lambda m: SGD(m[0].parameters(), lr=0.1, momentum=0.9)
    )

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        (mse(model[0], batch) + mse(model[1], batch)).backward()
        optimizer.step()

    for seed in range(4):
        for m, optimizer in ((model, ours), (twin, plain)):
            if seed == 2:
                optimizer.param_groups[0]["params"] = list(m[1].parameters())
        strategy.run(
            lambda batch: step(model, ours, batch),
            args=(deal(strategy, data(7, seed=seed)),),
        )
        step(twin, plain, data(7, seed=seed))
        assert_close(parameters(model), parameters(twin), f"step {seed}", 1e-10, 1e-10)
        assert_replicas_agree(strategy, model, ours)


@pytest.mark.parametrize("name", ["step", "second_step", "zero_grad"])
def test_a_method_that_was_taken_from_an_optimizer_before_the_run_is_refused(
    several: torchstrategy.Strategy, name: str
) -> None:
    """Each replica called that of the user's own optimizer.

    Clearing gradients is for each to do.
    """
    (model, optimizer), _ = built(several, mlp, AROUND["around one of its own"])
    method = getattr(optimizer, name)

    def step(batch: Any) -> None:
        mse(model, batch).backward()
        method()

    if name == "zero_grad":
        several.run(step, args=(deal(several, data(7)),))
        assert all(parameter.grad is None for parameter in model.parameters())
        return
    with pytest.raises(
        RuntimeError, match=rf"SAM\.{name}, a method that was taken from its object"
    ):
        several.run(step, args=(deal(several, data(7)),))


def test_the_state_is_read_in_a_step_and_not_written(make: Any) -> None:
    """Of a parameter without state it was a bare KeyError.

    What one replica wrote, the next one wrote over.
    """
    strategy = make(2)
    (model, optimizer), _ = built(strategy, mlp, sgd)

    def reads(batch: Any) -> bool:
        before = [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
        plain_step(model, optimizer, batch)
        saved = copy.deepcopy(optimizer.state_dict())
        return before == [None] * 4 and all(
            type(saved["state"][i]) is dict for i in range(4)
        )

    assert strategy.run(reads, args=(deal(strategy, data(7)),)) is True

    def writes() -> None:
        for p in model.parameters():
            optimizer.state[p]["old"] = p.detach().clone()

    with pytest.raises(
        RuntimeError, match=r"wrote on the state of SGD in a replica.*merge_call"
    ):
        strategy.run(writes)


def _of_one_layer(
    make: Any,
) -> tuple[torchstrategy.Strategy, torch.nn.Module, torch.optim.Optimizer]:
    strategy = make(2)
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.Linear(3, 2, dtype=torch.float64)
        return strategy, model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("what", ["another list", "a shorter list", "another group"])
def test_a_step_may_not_change_which_parameters_are_updated(
    make: Any, what: str
) -> None:
    """A step took parameters out of a group, and the run updated them all the same."""
    strategy, model, optimizer = _of_one_layer(make)
    before = copy.deepcopy(model.state_dict())

    def step() -> None:
        groups = optimizer.param_groups
        if what == "another list":
            groups[0]["params"] = groups[0]["params"][:1]
        elif what == "a shorter list":
            groups[0]["params"].pop()
        else:
            groups.append({**groups[0], "params": []})
        model(
            torch.ones(2, 3, dtype=torch.float64, device=model.weight.device)
        ).sum().backward()
        optimizer.step()

    with pytest.raises(
        RuntimeError,
        match=r"changed the parameters of SGD\.param_groups, or the groups themselves",
    ):
        strategy.run(step)
    torch.testing.assert_close(model.state_dict(), before)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]


@pytest.mark.parametrize("in_the_step", [True, False])
def test_a_setting_that_replicas_compute_from_their_rows_is_refused(
    make: Any, in_the_step: bool
) -> None:
    """A step set the learning rate from its loss.

    All replicas were updated with the rate of the first one.
    """
    strategy, model, optimizer = _of_one_layer(make)

    def step() -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * (
            1 + torchstrategy.get_replica_context().replica_id_in_sync_group
        )
        model(
            torch.ones(2, 3, dtype=torch.float64, device=model.weight.device)
        ).sum().backward()
        if in_the_step:
            optimizer.step()

    expected = (
        r"set SGD\.param_groups\[0\]\['lr'\] to different values: 0\.1 in replica 0 "
        r"and 0\.2 in replica 1"
    )
    with pytest.raises(RuntimeError, match=expected):
        strategy.run(step)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert model.weight.grad is None


def test_a_setting_that_only_another_replica_sets_is_refused(make: Any) -> None:
    """It was lost: the replicas share the settings of the first one."""
    strategy, _, optimizer = _of_one_layer(make)

    def step() -> None:
        if torchstrategy.get_replica_context().replica_id_in_sync_group == 1:
            optimizer.param_groups[0]["lr"] = 0.3

    with pytest.raises(
        RuntimeError,
        match=r"to different values: 0\.1 in replica 0 and 0\.3 in replica 1",
    ):
        strategy.run(step)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_setting_that_only_another_replica_makes_is_refused(make: Any) -> None:
    """It was lost, too, since the first replica has none to compare it with."""
    strategy, _, optimizer = _of_one_layer(make)

    def step() -> None:
        if torchstrategy.get_replica_context().replica_id_in_sync_group == 1:
            optimizer.param_groups[0]["scale"] = 0.3

    with pytest.raises(
        RuntimeError,
        match=r"to different values: None in replica 0 and 0\.3 in replica 1",
    ):
        strategy.run(step)
    assert "scale" not in optimizer.param_groups[0]


def test_a_setting_that_a_step_deletes_is_gone(make: Any) -> None:
    """It came back in the next run."""
    strategy, _, optimizer = _of_one_layer(make)
    optimizer.param_groups[0]["note"] = 1
    strategy.run(lambda: optimizer.param_groups[0].pop("note", None))
    assert "note" not in optimizer.param_groups[0]


def test_a_global_hook_of_optimizers_is_called_once_for_all_replicas(make: Any) -> None:
    """Where replicas have optimizers of their own, torch called it for each.

    They halved gradients once more.
    """
    strategy, model, optimizer = _of_one_layer(make)
    twin = copy.deepcopy(model).cpu()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    called: list[object] = []

    def halve(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        called.append(stepped)
        for parameter in stepped.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    def step(m: Any, o: torch.optim.Optimizer) -> torch.Tensor:
        o.zero_grad()
        m(
            torch.ones(2, 3, dtype=torch.float64, device=m.weight.device)
        ).square().mean().backward()
        o.step()
        return m.weight.detach().cpu()

    handle = register_optimizer_step_pre_hook(halve)
    try:
        for _ in range(3):
            called.clear()
            weights = strategy.run(step, args=(model, optimizer)).values
            assert len(called) == 1
            expected = step(twin, plain)
            for weight in weights:
                torch.testing.assert_close(weight, expected)
    finally:
        handle.remove()
