"""What a step may do with gradients: clear them, read them, change them.

It may put hooks on parameters, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchstrategy
from conditions import for_changes, only_in_turns, only_with_copies
from problems import (
    ELSEWHERE,
    assert_close,
    built,
    close,
    compare,
    data,
    deal,
    gradients,
    mlp,
    mse,
    parameters,
    replica_id,
    sgd,
)
from topologies import SIMULATED
from torchstrategy import RunOptions
from torchstrategy._turns.switch import IN_TURNS

# On simulated devices a lone replica does what it does on the CPU.
ALONE_AND_SEVERAL = (3,) if SIMULATED else (1, 3)


# ---- clearing gradients


def _each(model: Any, what: Callable[[Any], None]) -> None:
    for p in model.parameters():
        what(p)


def _set_none(p: Any) -> None:
    p.grad = None


def _zero(p: Any) -> None:
    if p.grad is not None:
        p.grad.zero_()


def _zero_data(p: Any) -> None:
    if p.grad is not None:
        p.grad.data.zero_()


def _detach_and_zero(p: Any) -> None:
    if p.grad is not None:
        p.grad.detach_()
        p.grad.zero_()


def _delete(p: Any) -> None:
    del p.grad


def _put_zeros(p: Any) -> None:
    p.grad = torch.zeros_like(p)


CLEARING: dict[str, Callable[[Any, Any], None]] = {
    "optimizer.zero_grad()": lambda m, o: o.zero_grad(),
    "optimizer.zero_grad(set_to_none=False)": lambda m, o: o.zero_grad(
        set_to_none=False
    ),
    "model.zero_grad()": lambda m, o: m.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda m, o: m.zero_grad(set_to_none=False),
    "p.grad = None": lambda m, o: _each(m, _set_none),
    "p.grad.zero_()": lambda m, o: _each(m, _zero),
    "p.grad.data.zero_()": lambda m, o: _each(m, _zero_data),
    "p.grad.detach_(); p.grad.zero_()": lambda m, o: _each(m, _detach_and_zero),
    "del p.grad": lambda m, o: _each(m, _delete),
    "p.grad = zeros": lambda m, o: _each(m, _put_zeros),
    "one layer only": lambda m, o: m[0].zero_grad(),
    "never": lambda m, o: None,
}


@for_changes
@pytest.mark.parametrize("way", CLEARING)
def test_every_way_of_clearing_gradients_means_what_it_means_in_plain_torch(make, way):
    clear = CLEARING[way]

    def micro(model: Any, batch: Any) -> None:
        mse(model, batch).backward()

    def first(model: Any, optimizer: Any, batch: Any) -> None:
        clear(model, optimizer)
        micro(model, batch)
        micro(model, batch)

    def between(model: Any, optimizer: Any, batch: Any) -> None:
        micro(model, batch)
        clear(model, optimizer)
        micro(model, batch)

    def last(model: Any, optimizer: Any, batch: Any) -> None:
        micro(model, batch)
        micro(model, batch)
        clear(model, optimizer)

    def twice(model: Any, optimizer: Any, batch: Any) -> None:
        clear(model, optimizer)
        clear(model, optimizer)
        micro(model, batch)
        micro(model, batch)

    def update_first(model: Any, optimizer: Any, batch: Any) -> None:
        first(model, optimizer, batch)
        optimizer.step()

    def update_last(model: Any, optimizer: Any, batch: Any) -> None:
        micro(model, batch)
        optimizer.step()
        clear(model, optimizer)
        micro(model, batch)

    def neither(model: Any, optimizer: Any, batch: Any) -> None:
        micro(model, batch)
        micro(model, batch)

    for n in ALONE_AND_SEVERAL:
        for step in (first, between, last, twice, update_first, update_last):
            compare(make, n, step, steps=2, case=f"{step.__name__} inside")
        compare(
            make,
            n,
            neither,
            steps=2,
            before=clear,
            after=lambda m, o: o.step(),
            case="before, outside",
        )
        compare(make, n, neither, steps=2, after=clear, case="after, outside")
        compare(
            make,
            n,
            first,
            steps=2,
            before=clear,
            after=lambda m, o: o.step(),
            case="inside and outside",
        )


@pytest.mark.parametrize(
    "way", [way for way in CLEARING if way not in ("never", "one layer only")]
)
def test_replicas_that_disagree_about_clearing_are_an_error(make, way):
    # In the first step nothing was accumulated before, and what is cleared is only what
    # the step itself has collected.
    clear = CLEARING[way]
    for steps, when in [
        (2, "before backward"),
        (1, "after backward"),
        (2, "after backward"),
    ]:
        for who in (0, 1):
            strategy = make(3)
            (model, optimizer), _ = built(strategy, mlp, sgd)

            def step(
                batch: Any,
                is_last: bool,
                who: int = who,
                model: Any = model,
                o: Any = optimizer,
                when: str = when,
            ):
                if is_last and replica_id() == who and when == "before backward":
                    clear(model, o)
                mse(model, batch).backward()
                if is_last and replica_id() == who and when == "after backward":
                    clear(model, o)

            case = f"only replica {who} cleared, {when}, at step {steps}"
            before = None
            try:
                for k in range(steps):
                    before = gradients(model)
                    strategy.run(step, args=(deal(strategy, data(7)), k == steps - 1))
            except RuntimeError as error:
                assert "disagree" in str(error) or "different number of times" in str(
                    error
                ), case
                # And it has left everything as it was.
                assert_close(gradients(model), before, case)
            else:
                pytest.fail(f"{case}: no error")


def test_clearing_nothing_in_one_replica_changes_nothing_or_is_an_error(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        if replica_id() == 1:
            optimizer.zero_grad()
        mse(model, batch).backward()

    try:
        compare(make, 3, step, steps=1)
    except RuntimeError as error:
        assert "disagree" in str(error)


# ---- reading and changing gradients


def _norm(model: Any, optimizer: Any) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def _value(model: Any, optimizer: Any) -> Any:
    return nn.utils.clip_grad_value_(model.parameters(), 0.01)


def _clamp_data(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad.data.clamp_(-0.01, 0.01)


def _scale_data(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad.data.mul_(3)


def _through_groups(model: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(
        [p for group in optimizer.param_groups for p in group["params"]], 0.05
    )


def _times_two(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = p.grad * 2


def _times_two_in_place(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad *= 2


def _decay(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad.add_(p.detach(), alpha=0.3)


def _decay_by_new(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = p.grad + 0.3 * p.detach()


def _assign_data(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad.data = p.grad.data * 0.5


def _drop_first(model: Any, optimizer: Any) -> None:
    model[0].weight.grad = None


def _last_layer_only(model: Any, optimizer: Any) -> None:
    model[2].weight.grad.mul_(0.5)


def _log_only(model: Any, optimizer: Any) -> None:
    assert sum(float(p.grad.norm()) for p in model.parameters()) > 0


CHANGES = [
    _norm,
    _value,
    _clamp_data,
    _scale_data,
    _through_groups,
    _times_two,
    _times_two_in_place,
    _decay,
    _decay_by_new,
    _assign_data,
    _drop_first,
    _last_layer_only,
    _log_only,
]


@pytest.mark.parametrize(
    "change", CHANGES, ids=[change.__name__.strip("_") for change in CHANGES]
)
def test_what_a_step_does_to_gradients_it_does_to_those_of_the_whole_batch(
    make, change
):
    def each_micro_batch(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        for _ in range(2):
            mse(model, batch).backward()
            change(model, optimizer)
        optimizer.step()

    def at_the_end(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        mse(model, batch).backward()
        change(model, optimizer)

    def of_what_was_accumulated(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()
        change(model, optimizer)

    for n in ALONE_AND_SEVERAL:
        compare(make, n, each_micro_batch, steps=2)
        compare(make, n, at_the_end, steps=2, after=lambda m, o: o.step())
        compare(make, n, of_what_was_accumulated, steps=2)
    compare(make, 3, each_micro_batch, rows=2, case="an empty replica sits out")
    compare(
        make,
        3,
        each_micro_batch,
        rows=2,
        options=RunOptions(run_empty_replicas=True),
        case="an empty replica runs",
    )


@pytest.mark.parametrize(
    "change", CHANGES, ids=[change.__name__.strip("_") for change in CHANGES]
)
def test_what_a_step_does_to_summed_gradients_it_does_to_those_of_the_whole_batch(
    make, change
):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        for _ in range(2):
            (F.mse_loss(model(batch[0]), batch[1], reduction="sum") / 7).backward()
            change(model, optimizer)
        optimizer.step()

    compare(make, 3, step, steps=2, options=RunOptions(gradient_reduction="sum"))


def test_the_norm_that_clipping_returns_is_that_of_the_whole_batch_in_every_replica(
    make,
):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)

    def step(model: Any, batch: Any) -> float:
        mse(model, batch).backward()
        return float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    wanted = step(twin, data(7))
    got = strategy.run(lambda b: step(model, b), args=(deal(strategy, data(7)),))
    assert strategy.experimental_local_results(got) == pytest.approx(
        [wanted] * 3, rel=1e-12
    )


def test_every_replica_reads_the_gradient_of_the_whole_batch_also_that_of_earlier_runs(
    make,
):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    for k in range(3):
        batch = data(7, seed=k)

        def step(b: Any) -> Any:
            before = gradients(model)
            mse(model, b).backward()
            return [before, gradients(model)]

        before = gradients(twin)
        mse(twin, batch).backward()
        results = strategy.run(step, args=(deal(strategy, batch),))
        for r in range(3):
            read = torch.utils._pytree.tree_map(
                lambda leaf, r=r: (
                    leaf.values[r]
                    if isinstance(leaf, torchstrategy.DistributedValues)
                    else leaf
                ),
                results,
            )
            assert_close(read[0], before, f"run {k}, replica {r}, before backward")
            assert_close(
                read[1], gradients(twin), f"run {k}, replica {r}, after backward"
            )


@for_changes
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_that_a_step_adds_up_itself_are_those_of_the_whole_batch(
    make, reduction
):
    def loss(model: Any, batch: Any, rows: int) -> torch.Tensor:
        total = F.mse_loss(model(batch[0]), batch[1], reduction=reduction)
        # The factor makes the gradient of a replica without rows NaN under a mean.
        return (
            total / rows if reduction == "sum" else total * model[0].weight.exp().mean()
        )

    def new_tensor(p: Any, g: Any) -> None:
        p.grad = g if p.grad is None else p.grad + g

    def in_place(p: Any, g: Any) -> None:
        if p.grad is None:
            p.grad = g
        else:
            p.grad += g

    def in_place_method(p: Any, g: Any) -> None:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.add_(g)

    batches = {
        "7 rows": data(7),
        "2 rows": data(2),
    }
    if reduction == "mean":
        # Every replica adds the very same. Under SUM that cannot be told from all of
        # them having scaled, or clipped, the gradient of the whole step, which every
        # replica does alike.
        batches["equal rows"] = tuple(torch.cat([t[:2]] * 3) for t in data(7))
    for add in (new_tensor, in_place, in_place_method):
        for name, batch in batches.items():
            rows = batch[0].shape[0]

            def step(
                model: Any, optimizer: Any, batch: Any, add: Any = add, rows: int = rows
            ) -> None:
                optimizer.zero_grad()
                for _ in range(2):
                    taken = torch.autograd.grad(
                        loss(model, batch, rows), list(model.parameters())
                    )
                    for p, g in zip(model.parameters(), taken, strict=True):
                        add(p, g)
                optimizer.step()

            case = f"{add.__name__}, {name}"
            # As in a worker with one replica: see `_run/own/assigned_gradients`.
            is_refused = IN_TURNS and add is not new_tensor and name != "equal rows"
            for empty in (False, True):
                options = RunOptions(
                    gradient_reduction=reduction, run_empty_replicas=empty
                )
                with (
                    pytest.raises(RuntimeError, match="and then changed it in place")
                    if is_refused
                    else nullcontext()
                ):
                    compare(
                        make,
                        3,
                        step,
                        batches=[batch] * 2,
                        before=(lambda m, o: o.zero_grad()) if IN_TURNS else None,
                        options=options,
                        case=f"{case}, run empty: {empty}",
                    )


@only_in_turns
def test_a_sum_of_gradients_that_a_step_assigns_must_be_cleared_before_the_run(make):
    """Nobody knows whether the earlier gradient is in it."""

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch[0]), batch[1], reduction="sum")
        taken = torch.autograd.grad(loss, list(model.parameters()))
        for p, g in zip(model.parameters(), taken, strict=True):
            p.grad = g

    with pytest.raises(RuntimeError, match=r"had one before.*before strategy\.run"):
        compare(make, 3, step, options=RunOptions(gradient_reduction="sum"))


def test_adding_to_what_earlier_runs_accumulated_is_adding_to_it_once(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        taken = torch.autograd.grad(mse(model, batch), list(model.parameters()))
        for p, g in zip(model.parameters(), taken, strict=True):
            p.grad = g if p.grad is None else p.grad + g

    compare(make, 3, step, steps=4)


# ---- parameters captured outside of the step


def _equals_plain_or_raises(make: Any, step: Any, **kwargs: Any) -> None:
    """A silent difference is the one thing that is never right."""
    try:
        compare(make, 3, step, **kwargs)
    except RuntimeError as error:
        assert "outside of" in str(error) or "scope" in str(error), error


def test_clipping_parameters_that_were_listed_outside_of_the_step_clips_or_raises(make):
    lists: dict[int, list[Any]] = {}

    def remember(model: Any, optimizer: Any) -> None:
        lists[id(model)] = list(model.parameters())

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()
        nn.utils.clip_grad_norm_(lists[id(model)], 0.01)

    _equals_plain_or_raises(make, step, before=remember)


def test_clearing_parameters_that_were_listed_outside_of_the_step_clears_or_raises(
    make,
):
    for name, clear in {"= None": _set_none, ".zero_()": _zero}.items():
        lists: dict[int, list[Any]] = {}

        def remember(model: Any, optimizer: Any, lists: Any = lists) -> None:
            lists[id(model)] = list(model.parameters())

        def step(
            model: Any,
            optimizer: Any,
            batch: Any,
            lists: Any = lists,
            clear: Any = clear,
        ) -> None:
            for p in lists[id(model)]:
                clear(p)
            mse(model, batch).backward()

        _equals_plain_or_raises(make, step, before=remember, case=name)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_an_optimizer_clears_the_gradient_of_a_parameter_that_no_module_has(
    make, n, set_to_none
):
    """Such as one of a layer that was taken out of the model.

    Its momentum was fed the old gradient for ever.
    """
    strategy = make(n)
    with strategy.scope():
        model = mlp()
        left = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*model.parameters(), left], lr=1.0)

    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none)
        mse(model, batch).backward()
        optimizer.step()

    left.grad = torch.ones_like(left)
    strategy.run(step, args=(deal(strategy, data(7)),))
    assert (
        left.grad is None
        if set_to_none
        else torch.equal(left.grad, torch.zeros_like(left))
    )
    assert torch.equal(left.detach(), torch.ones_like(left))


def test_clearing_by_an_optimizer_that_was_made_outside_of_the_scope_clears_or_raises(
    make,
):
    optimizers: dict[int, Any] = {}

    def remember(model: Any, optimizer: Any) -> None:
        optimizers.setdefault(id(model), torch.optim.SGD(model.parameters(), lr=0.1))

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizers[id(model)].zero_grad()
        mse(model, batch).backward()

    _equals_plain_or_raises(
        make,
        step,
        optimizer=None,
        before=remember,
        after=lambda m, o: optimizers[id(m)].step(),
    )


@only_with_copies
def test_a_trainable_tensor_of_no_module_is_named_when_an_optimizer_of_the_step_has_it(
    make,
):
    strategy = make(3)
    with strategy.scope():
        model = mlp()
        log_t = nn.Parameter(torch.zeros(7, dtype=torch.float64))
        optimizer = torch.optim.SGD(
            [{"params": model.parameters()}, {"params": [log_t]}], lr=0.1
        )

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        (mse(model, batch) * log_t.exp().sum()).backward()
        optimizer.step()

    before = parameters(model)
    named = r"(log_t|param_groups\[1\]\['params'\]\[0\], a tensor of shape \(7,\))"
    with pytest.raises(RuntimeError, match=f"{named}|{ELSEWHERE}"):
        strategy.run(step, args=(deal(strategy, data(7)),))
    assert_close(parameters(model), before, "nothing was updated")
    assert log_t.grad is None and not log_t.any()


@only_in_turns
def test_a_trainable_tensor_of_no_module_learns(make):
    strategy = make(3)
    twins = []
    for scope in (strategy.scope(), nullcontext()):
        torch.manual_seed(0)
        with scope:
            model = mlp()
            log_t = torch.zeros(7, dtype=torch.float64, device=model[0].weight.device)
            log_t = nn.Parameter(log_t)
            optimizer = torch.optim.SGD(
                [{"params": model.parameters()}, {"params": [log_t]}], lr=0.1
            )
        twins.append((model, log_t, optimizer))

    def step(model: Any, log_t: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        (mse(model, batch) * log_t.exp().sum()).backward()
        optimizer.step()

    ours, plain = twins
    for k in range(3):
        batch = data(7, seed=k)
        strategy.run(lambda b: step(*ours, b), args=(deal(strategy, batch),))
        step(*plain, batch)
        assert_close(parameters(ours[0]), parameters(plain[0]), f"step {k}")
        close(ours[1], plain[1], rtol=1e-12, atol=0)


@only_with_copies
def test_a_parameter_taken_outside_of_the_step_is_named_when_backward_reaches_it(
    make,
):
    strategy = make(3)
    (model, _), _ = built(strategy, mlp, None)
    weight = model[0].weight
    with pytest.raises(
        RuntimeError, match=rf"Backward in a replica reached .*0\.weight|{ELSEWHERE}"
    ):
        strategy.run(
            lambda b: F.linear(b[0], weight).sum().backward(),
            args=(deal(strategy, data(7)),),
        )
    assert weight.grad is None


@only_in_turns
def test_a_parameter_taken_outside_of_the_step_is_the_models(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, mlp, None)
    weight = model[0].weight
    batch = data(7)
    for _ in range(2):
        strategy.run(
            lambda b: F.linear(b[0], weight).square().mean().backward(),
            args=(deal(strategy, batch),),
        )
        F.linear(batch[0], twin[0].weight).square().mean().backward()
        assert_close(gradients(model), gradients(twin), "the gradients")


WHERE = ["inside", "outside", "inside, in the scope", "outside, in the scope"]


@only_with_copies
@pytest.mark.parametrize("where", WHERE)
def test_a_model_that_no_scope_knows_does_not_silently_collect_all_gradients(
    make, where
):
    strategy = make(3)
    model = mlp()
    if "scope" in where:
        with strategy.scope():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = parameters(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        if where.startswith("inside"):
            optimizer.step()

    with pytest.raises(RuntimeError, match=f"scope|{ELSEWHERE}"):
        strategy.run(step, args=(deal(strategy, data(7)),))
    assert_close(parameters(model), before, "no replica has updated it")


@only_in_turns
@pytest.mark.parametrize("where", WHERE)
def test_a_model_that_no_scope_knows_learns(make, where):
    strategy = make(3)
    device = strategy.extended.parameter_devices[0]
    model, twin = mlp().to(device), mlp()
    twin.load_state_dict(model.state_dict())
    with strategy.scope() if "scope" in where else nullcontext():
        optimizer = sgd(model)
    plain_optimizer = sgd(twin)

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        if where.startswith("inside"):
            optimizer.step()

    for k in range(3):
        batch = data(7, seed=k)
        strategy.run(lambda b: step(model, optimizer, b), args=(deal(strategy, batch),))
        step(twin, plain_optimizer, batch)
        if where.startswith("outside"):
            optimizer.step()
            plain_optimizer.step()
        assert_close(parameters(model), parameters(twin), f"step {k}")
        assert_close(gradients(model), gradients(twin), f"step {k}")


# ---- hooks on the user's parameters


def test_tensor_hooks_on_the_users_parameters_see_the_gradient_of_the_whole_batch_once(
    make,
):
    seen: dict[int, list[torch.Tensor]] = {}

    def build() -> nn.Module:
        model = mlp()
        log = seen.setdefault(id(model), [])
        model[0].weight.register_hook(
            lambda g: (log.append(g.clone()), g.clamp(-0.01, 0.01))[1]
        )
        model[2].bias.register_hook(lambda g: log.append(g.clone()))
        return model

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()

    model, twin = compare(make, 3, step, build=build)
    assert len(seen[id(model)]) == len(seen[id(twin)]) == 6
    # Autograd comes to the last layer first; ours are called in the order of the
    # parameters.
    got, wanted = (
        sorted(seen[id(m)], key=lambda g: (g.dim(), float(g.sum())))
        for m in (model, twin)
    )
    for a, b in zip(got, wanted, strict=True):
        close(a, b)


def test_tensor_hooks_see_the_gradient_of_each_backward_or_the_step_is_refused(make):
    # A clamp of the sum is not the sum of the clamps.
    def build() -> nn.Module:
        model = mlp()
        model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return model

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        for _ in range(2):
            mse(model, batch).backward()

    try:
        compare(make, 3, step, build=build)
    except RuntimeError as error:
        assert "hook" in str(error)


def test_a_hook_that_frees_an_update_from_the_optimizer_step_updates_once(make):
    # The optimizer-in-backward of the PyTorch tutorial.
    def build() -> nn.Module:
        model = mlp()
        for p in model.parameters():
            optimizer = torch.optim.Adam([p], lr=0.01)

            def update(p: Any, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(update)
        return model

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()

    compare(make, 3, step, build=build, optimizer=None)


def test_post_accumulate_hooks_see_what_was_accumulated(make):
    norms: dict[int, list[float]] = {}

    def build() -> nn.Module:
        model = mlp()
        log = norms.setdefault(id(model), [])
        model[0].weight.register_post_accumulate_grad_hook(
            lambda p: log.append(float(p.grad.norm()))
        )
        return model

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        mse(model, batch).backward()

    model, twin = compare(make, 3, step, build=build)
    assert norms[id(model)] == pytest.approx(norms[id(twin)], rel=1e-12)


def test_hooks_that_a_step_removes_or_that_are_removed_between_steps_are_gone(make):
    strategy = make(2)
    (model, _), _ = built(strategy, mlp, None)
    calls: list[int] = []
    handle = model[0].weight.register_hook(lambda g: calls.append(1))
    step = functools.partial(
        strategy.run,
        lambda b: mse(model, b).backward(),
        args=(deal(strategy, data(4)),),
    )
    step()
    handle.remove()
    step()
    assert calls == [1]


# ---- merge functions


def test_an_update_in_a_merge_function_is_that_of_the_whole_batch(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            mse(model, batch).backward()
            torchstrategy.get_replica_context().merge_call(
                lambda strategy: optimizer.step()
            )

    for n in (1, 3):
        compare(make, n, step)


def test_a_merge_function_reads_changes_and_clears_the_gradients_of_the_whole_batch(
    make,
):
    def clip(strategy: Any, model: Any, *_: Any) -> float:
        return float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    def halve(strategy: Any, model: Any, *_: Any) -> None:
        for p in model.parameters():
            p.grad = p.grad * 0.5

    def clear(strategy: Any, model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()

    for change in (clip, halve, clear):

        def step(model: Any, optimizer: Any, batch: Any, change: Any = change) -> None:
            for _ in range(2):
                mse(model, batch).backward()
                torchstrategy.get_replica_context().merge_call(
                    lambda strategy: change(strategy, model, optimizer) and None
                )
            mse(model, batch).backward()

        for n in (1, 3):
            compare(make, n, step, after=lambda m, o: o.step(), case=change.__name__)


def test_what_was_cleared_to_none_is_not_made_of_zeros_by_clearing_it_again(make):
    strategy = make(2)
    (model, optimizer), _ = built(strategy, mlp, sgd)
    strategy.run(
        lambda batch: mse(model, batch).backward(), args=(deal(strategy, data(4)),)
    )

    def step() -> None:
        optimizer.zero_grad()
        optimizer.zero_grad(set_to_none=False)

    strategy.run(step)
    assert all(parameter.grad is None for parameter in model.parameters())
