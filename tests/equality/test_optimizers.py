"""Optimizers, schedulers and scalers do in several replicas what they do plainly.

They do it in the step; plainly is in plain PyTorch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchstrategy
from conditions import only_in_turns, only_with_copies
from problems import (
    adam,
    assert_close,
    built,
    close,
    compare,
    data,
    deal,
    mlp,
    mse,
    parameters,
    sgd,
)
from topologies import central_with_copies


def test_the_two_optimizers_of_a_gan_do_what_they_do_in_plain_torch(make):
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = nn.Linear(2, 3, dtype=torch.float64), mlp()

    def optimizers(model: Any) -> Any:
        return (
            torch.optim.Adam(model.generator.parameters(), lr=0.01),
            torch.optim.SGD(model.critic.parameters(), lr=0.1, momentum=0.5),
        )

    def step(model: Any, pair: Any, batch: Any) -> None:
        of_generator, of_critic = pair
        real, noise = batch
        fake = model.generator(noise)
        of_critic.zero_grad()
        (
            F.softplus(-model.critic(real)).mean()
            + F.softplus(model.critic(fake.detach())).mean()
        ).backward()
        of_critic.step()
        of_generator.zero_grad()
        # Leaves a gradient in the critic too.
        F.softplus(-model.critic(fake)).mean().backward()
        of_generator.step()

    for n in (1, 3):
        compare(make, n, step, build=Gan, optimizer=optimizers, steps=4)


EVERY_OPTIMIZER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    **{
        f"{name}, {kind}": lambda m, name=name, kind=kind: getattr(torch.optim, name)(
            m.parameters(), lr=0.01, **{kind: True}
        )
        for name in ("SGD", "Adam", "AdamW", "Adagrad")
        for kind in ("foreach", "fused")
    },
    **{
        name: lambda m, name=name: getattr(torch.optim, name)(m.parameters(), lr=0.01)
        for name in (
            "Adadelta",
            "Adamax",
            "ASGD",
            "NAdam",
            "RAdam",
            "RMSprop",
            "Rprop",
            "Adafactor",
        )
    },
}


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_every_optimizer_of_torch_updates_what_the_replicas_see(make, name):
    # The fused ones write parameters without counting it in their versions.
    def inside(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        mse(model, batch).backward()

    def outside(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()

    same: dict[str, Any] = dict(optimizer=EVERY_OPTIMIZER[name], steps=2, relative=1e-8)
    for n in (1, 3):
        compare(make, n, inside, case=f"{name}, inside", **same)
        compare(
            make,
            n,
            outside,
            after=lambda m, o: o.step(),
            case=f"{name}, outside",
            **same,
        )


def test_an_update_in_the_step_keeps_its_state_where_plain_torch_keeps_it(make):
    # A lone replica made its update in the replica's own default device, where Adam
    # then put its count of steps.
    for n in (1, 3):
        if n == 1 and make is not central_with_copies:
            # One replica on the user's own objects is plain, in its own default device.
            continue
        strategy = make(n)
        (model, optimizer), _ = built(
            strategy, mlp, lambda m: torch.optim.Adam(m.parameters())
        )

        def step(batch: Any, model: Any = model, optimizer: Any = optimizer) -> None:
            mse(model, batch).backward()
            optimizer.step()

        strategy.run(step, args=(deal(strategy, data(7)),))
        owner = model[0].weight.device
        for state in optimizer.state.values():
            places = {name: tensor.device for name, tensor in state.items()}
            assert places == {
                "step": torch.device("cpu"),
                "exp_avg": owner,
                "exp_avg_sq": owner,
            }, n


def test_an_update_in_the_step_is_seen_by_the_forward_after_it(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()

    for n in (1, 3):
        compare(make, n, step)


def test_gradients_after_an_update_in_the_step_are_still_there(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()
        optimizer.step()
        mse(model, batch).backward()
        optimizer.step()

    compare(make, 3, step)


def test_a_learning_rate_that_the_step_writes_holds_from_the_next_update_on(make):
    def before(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        optimizer.step()

    def after(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            group["momentum"] = 0.1

    def twice(model: Any, optimizer: Any, batch: Any) -> None:
        before(model, optimizer, batch)
        after(model, optimizer, batch)

    for n in (1, 3):
        for step in (before, after, twice):
            lrs: dict[int, float] = {}
            model, twin = compare(
                make,
                n,
                step,
                after=lambda m, o, lrs=lrs: lrs.update(
                    {id(m): o.param_groups[0]["lr"]}
                ),
            )
            assert lrs[id(model)] == lrs[id(twin)] < 0.1


def test_a_learning_rate_tensor_written_in_place_is_written_once_or_refused(
    make,
):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        for group in optimizer.param_groups:
            group["lr"].mul_(0.5)
        optimizer.step()

    def optimizer(model: Any) -> Any:
        return torch.optim.Adam(
            model.parameters(), lr=torch.tensor(0.1, dtype=torch.float64)
        )

    try:
        compare(make, 3, step, optimizer=optimizer)
    except RuntimeError as error:
        assert "lr" in str(error)


def test_groups_of_an_optimizer_show_the_replicas_own_parameters_and_their_state(make):
    strategy = make(3)
    (model, optimizer), _ = built(strategy, mlp, adam)

    def step(batch: Any) -> tuple[bool, int, int]:
        mse(model, batch).backward()
        optimizer.step()
        mine = {id(p) for p in model.parameters()}
        same = {
            id(p) for group in optimizer.param_groups for p in group["params"]
        } == mine
        return (
            same,
            len(mine & {id(p) for p in optimizer.state}),
            int(optimizer.state[model[0].weight]["step"]),
        )

    found = strategy.experimental_local_results(
        strategy.run(step, args=(deal(strategy, data(7)),))
    )
    assert found == ((True, 4, 1),) * 3
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in model.parameters()
    ]


SCHEDULERS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "step": (lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5), ()),
    "lambda": (
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
        (),
    ),
    "cycle": (
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=10),
        (),
    ),
    "plateau": (
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
        (1.0,),
    ),
    "sequential": (
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.ConstantLR(o),
                torch.optim.lr_scheduler.StepLR(o, 1),
            ],
            [2],
        ),
        (),
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(
    "in_scope", [True, False], ids=["made_in_scope", "made_outside"]
)
def test_a_scheduler_counts_each_step_once_inside_of_the_step_and_outside(
    make, name, in_scope
):
    new, args = SCHEDULERS[name]
    batch = data(7)
    for n, inside in ((1, True), (3, True), (3, False)):
        strategy = make(n)
        (model, optimizer), (twin, plain) = built(strategy, mlp, sgd)
        theirs = new(plain)
        if in_scope:
            with strategy.scope():
                ours = new(optimizer)
        else:
            ours = new(optimizer)

        def step(b: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
            optimizer.zero_grad()
            mse(model, b).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step(*args)

        for _ in range(4):
            strategy.run(
                step,
                args=(
                    deal(strategy, batch),
                    model,
                    optimizer,
                    ours if inside else None,
                ),
            )
            step(batch, twin, plain, theirs)
            if not inside:
                ours.step(*args)
            assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
            assert (
                ours.last_epoch == theirs.last_epoch
                and ours.get_last_lr() == theirs.get_last_lr()
            )
        assert_close(parameters(model), parameters(twin), f"{n} replicas", 1e-10)


def test_a_scheduler_whose_method_is_the_step_is_refused_and_has_not_counted(make):
    strategy = make(3)
    (model, optimizer), _ = built(strategy, mlp, sgd)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    strategy.run(
        lambda b: (mse(model, b).backward(), optimizer.step())[1],
        args=(deal(strategy, data(7)),),
    )
    with pytest.raises(
        RuntimeError,
        match=r"The step holds StepLR\.step, a method that was taken from its object",
    ):
        strategy.run(scheduler.step)
    assert optimizer.param_groups[0]["lr"] == 0.1 and scheduler.last_epoch == 0


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_grad_scaler_makes_one_decision_for_all_replicas_in_the_step_and_outside(
    make, where
):
    batch = data(7)
    for n in (1, 3):
        strategy = make(n)
        (model, optimizer), (twin, plain) = built(strategy, mlp, sgd)
        ours, theirs = (
            torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
            for _ in range(2)
        )

        def backward(b: Any, model: Any, optimizer: Any, scaler: Any) -> None:
            optimizer.zero_grad()
            scaler.scale(mse(model, b)).backward()

        def update(model: Any, optimizer: Any, scaler: Any) -> None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()

        def step(
            b: Any, *parts: Any, backward: Any = backward, update: Any = update
        ) -> None:
            backward(b, *parts)
            update(*parts)

        for k in range(4):
            rows = (batch[0], batch[1].clone())
            if k == 2:
                # In the last replica: an update that is skipped in all of them.
                rows[1][6, 0] = float("inf")
            dealt = deal(strategy, rows)
            step(rows, twin, plain, theirs)
            if where == "inside":
                strategy.run(step, args=(dealt, model, optimizer, ours))
            else:
                strategy.run(backward, args=(dealt, model, optimizer, ours))
                update(model, optimizer, ours)
            assert ours.state_dict() == theirs.state_dict()
            assert_close(
                parameters(model), parameters(twin), f"{n} replicas, step {k}", 1e-10
            )


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_closure_gives_an_optimizer_the_loss_and_the_gradient_of_the_whole_batch(
    make, where
):
    batch = data(7)
    for new in (sgd, lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3)):
        strategy = make(3)
        (model, optimizer), (twin, plain) = built(strategy, mlp, new)
        dealt = deal(strategy, batch)

        def losses(b: Any, model: Any, optimizer: Any) -> Any:
            optimizer.zero_grad()
            losses = F.mse_loss(model(b[0]), b[1], reduction="none").mean(1)
            losses.mean().backward()
            return losses.detach()

        def step(b: Any, model: Any, optimizer: Any, losses: Any = losses) -> Any:
            return float(optimizer.step(lambda: losses(b, model, optimizer).mean()))

        def outside(
            s: Any = strategy,
            losses: Any = losses,
            args: Any = (dealt, model, optimizer),
        ) -> Any:
            return s.reduce("mean", s.run(losses, args=args), axis=0)

        expected = step(batch, twin, plain)
        if where == "inside":
            found = strategy.experimental_local_results(
                strategy.run(step, args=(dealt, model, optimizer))
            )
        else:
            found = (float(optimizer.step(outside)),)
        assert found == pytest.approx([expected] * len(found))
        assert_close(parameters(model), parameters(twin), where, 1e-9)


@only_with_copies
def test_an_optimizer_made_outside_of_the_scope_is_refused_at_its_step_in_a_replica(
    make,
):
    for n in (1, 3):
        strategy = make(n)
        (model, _), _ = built(strategy, mlp, None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if n == 1 and make is not central_with_copies:
            continue  # one replica on the user's own objects is plain
        before = parameters(model)

        def step(batch: Any, model: Any = model, optimizer: Any = optimizer) -> None:
            mse(model, batch).backward()
            optimizer.step()

        with pytest.raises(
            RuntimeError,
            match=(
                r"SGD\.step\(\) was called in a "
                r"replica.*distribute_optimizer\(optimizer\)"
            ),
        ):
            strategy.run(step, args=(deal(strategy, data(7)),))
        assert_close(parameters(model), before, "refused")
        strategy.distribute_optimizer(optimizer)
        strategy.run(step, args=(deal(strategy, data(7)),))
        assert not torch.equal(parameters(model)["0.weight"], before["0.weight"])


@only_in_turns
def test_an_optimizer_made_outside_of_the_scope_is_found(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    optimizer, plain = (
        torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, twin)
    )

    def step(batch: Any, model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    for k in range(3):
        batch = data(7, seed=k)
        strategy.run(lambda b: step(b, model, optimizer), args=(deal(strategy, batch),))
        step(batch, twin, plain)
        assert_close(parameters(model), parameters(twin), f"step {k}", 1e-10)


def test_an_optimizer_that_steps_in_a_replica_sees_parameters_of_the_very_class(make):
    """Of another class, torch's optimizers update one by one, not in few kernels."""
    seen: set[type] = set()

    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.update(type(p) for group in self.param_groups for p in group["params"])
            super().step(closure)

    strategy = make(3)
    (model, _), _ = built(strategy, mlp, None)
    with strategy.scope():
        optimizer = Looking(model.parameters(), lr=0.1)
    outside = [*model.parameters()]

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        # A list from outside shows the replica's gradients again.
        assert outside[0].grad is not None

    strategy.run(step, args=(deal(strategy, data(7)),))
    assert seen == {nn.Parameter}


def test_an_optimizer_that_is_made_in_the_step_for_the_replicas_parameters_is_refused(
    make,
):
    strategy = make(3)
    (model, _), _ = built(strategy, mlp, None)

    def step(batch: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mse(model, batch).backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"SGD\.step\(\) was called in a replica"):
        strategy.run(step, args=(deal(strategy, data(7)),))


def test_an_optimizer_given_to_the_strategy_does_what_it_does_in_plain_torch(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    for n in (1, 3):
        strategy = make(n)
        _, (twin, plain) = built(strategy, mlp, sgd)
        model = strategy.distribute_module(copy.deepcopy(twin))
        optimizer = strategy.distribute_optimizer(sgd(model))
        for k in range(3):
            batch = data(7, seed=k)
            strategy.run(
                functools.partial(step, model, optimizer), args=(deal(strategy, batch),)
            )
            step(twin, plain, batch)
        assert_close(parameters(model), parameters(twin), f"{n} replicas", 1e-10)


def test_a_group_that_is_added_between_runs_is_trained(make):
    def new(model: Any) -> Any:
        return torch.optim.SGD(model[0].parameters(), lr=0.1)

    def grow(model: Any, optimizer: Any) -> None:
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group(
                {"params": list(model[2].parameters()), "lr": 0.01}
            )

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    compare(make, 3, step, optimizer=new, after=grow)


def test_an_optimizer_over_tensors_of_the_steps_own_is_the_steps_own(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)

    def fit(model: Any, x: torch.Tensor) -> torch.Tensor:
        w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        inner = torch.optim.SGD([w], lr=0.1)
        for _ in range(3):
            inner.zero_grad()
            (x.sum(0) - w).square().sum().backward()
            inner.step()
        head = copy.deepcopy(model)  # fast weights, as in meta-learning
        fast = torch.optim.Adam(head.parameters(), lr=0.01)
        for _ in range(2):
            fast.zero_grad()
            head(x).square().mean().backward()
            fast.step()
        return torch.cat([w.detach(), head(x).detach().sum(0)])

    x = data(7)[0]
    results = strategy.run(lambda x: fit(model, x), args=(deal(strategy, x),))
    for got, piece in zip(results.values, (x[:3], x[3:6], x[6:]), strict=True):
        close(got, fit(twin, piece))
    assert all(p.grad is None for p in model.parameters())
    assert_close(parameters(model), parameters(twin), "the model itself is as it was")


def test_hooks_of_an_optimizer_are_called_once_a_step_and_see_the_whole_gradient(make):
    calls: dict[int, list[float]] = {}

    def new(model: Any) -> Any:
        optimizer = sgd(model)
        log = calls.setdefault(id(model), [])
        optimizer.register_step_pre_hook(
            lambda o, a, k: log.append(float(model[0].weight.grad.norm()))
        )
        optimizer.register_step_post_hook(lambda o, a, k: log.append(-1.0))
        return optimizer

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    model, twin = compare(make, 3, step, optimizer=new)
    assert calls[id(model)] == pytest.approx(calls[id(twin)], rel=1e-12)
    assert len(calls[id(model)]) == 6


@pytest.mark.parametrize(
    "losses", [(2, 3), (2 + 1j, 3 + 3j)], ids=["integers", "complex"]
)
def test_the_loss_of_a_closure_is_the_mean_of_losses_of_any_dtype(make, losses):
    """Of a complex loss the imaginary part was dropped.

    The mean of integers was an integer.
    """
    strategy, seen = make(2), []
    model = strategy.distribute_module(nn.Linear(2, 1))

    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.append(closure())
            super().step()

    optimizer = strategy.distribute_optimizer(Looking(model.parameters(), lr=0.1))

    def step() -> None:
        loss = torch.tensor(
            losses[torchstrategy.get_replica_context().replica_id_in_sync_group]
        )
        optimizer.step(lambda: loss)

    strategy.run(step)
    assert seen[0] == sum(losses) / 2
