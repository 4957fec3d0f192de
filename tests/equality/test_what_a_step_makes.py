"""What a step makes, replaces or hides works as in plain PyTorch, or is refused.

It is refused by name and nothing is done.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import torchstrategy
from conditions import only_in_turns, only_with_copies
from features.schedulers import SCHEDULERS
from problems import (
    assert_close,
    built,
    data,
    deal,
    gradients,
    mlp,
    mse,
    parameters,
    replica_id,
    sgd,
)
from torchstrategy._turns.switch import IN_TURNS

# ---- schedulers and scalers of the scope, wherever the step has them from


def plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


class Trainer:
    """Has the trained objects two attributes away from what a step names."""

    def __init__(self, scheduler: Callable[[Any], Any] | None = None) -> None:
        model = mlp()
        optimizer = sgd(model)
        self.inside = types.SimpleNamespace(
            model=model,
            optimizer=optimizer,
            scaler=torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2),
            scheduler=None if scheduler is None else scheduler(optimizer),
        )


def trained(
    trainer: Trainer, run: Callable[[Callable[[Any], None], Any], object]
) -> list[Any]:
    """The settings of its optimizer and its scale after each of four steps.

    Its weights at the end are there, too.
    """
    inside, states = trainer.inside, []
    args = (
        (1.0,) if isinstance(inside.scheduler, lr_scheduler.ReduceLROnPlateau) else ()
    )

    def step(batch: Any) -> None:
        trainer.inside.optimizer.zero_grad()
        trainer.inside.scaler.scale(mse(trainer.inside.model, batch)).backward()
        trainer.inside.scaler.step(trainer.inside.optimizer)
        trainer.inside.scaler.update()
        if trainer.inside.scheduler is not None:
            trainer.inside.scheduler.step(*args)

    for k in range(4):
        run(step, data(7, seed=k))
        group = inside.optimizer.param_groups[0]
        states.append([group["lr"], group["momentum"], inside.scaler.get_scale()])
    return [
        states,
        *(parameter.detach().cpu() for parameter in inside.model.parameters()),
    ]


# One for each constructor that schedulers end up in, and some that do more than others
# in it.
KINDS = [
    "step",
    "lambda",
    "one_cycle",
    "sequential",
    "chained",
    "swa",
    "plateau",
    "none",
]


@pytest.mark.parametrize("name", KINDS)
def test_what_was_created_in_the_scope_counts_each_step_once_however_deep_it_is(
    make: Callable[[int], torchstrategy.Strategy], name: str
) -> None:
    scheduler = {**SCHEDULERS, "plateau": plateau, "none": None}[name]
    torch.manual_seed(0)
    plain = Trainer(scheduler)
    strategy = make(3)
    torch.manual_seed(0)
    with strategy.scope():
        ours = Trainer(scheduler)
    expected, *weights = trained(plain, lambda step, batch: step(batch))
    states, *others = trained(
        ours, lambda step, batch: strategy.run(step, args=(deal(strategy, batch),))
    )
    assert states == expected
    torch.testing.assert_close(others, weights, rtol=1e-10, atol=1e-10)


def test_a_scheduler_without_torchs_constructor_is_refused_where_a_run_misses_it(
    make: Callable[[int], torchstrategy.Strategy],
) -> None:
    class Halved(lr_scheduler.LRScheduler):
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self, epoch: Any = None) -> None:
            for group in self.optimizer.param_groups:
                group["lr"] /= 2

    strategy = make(2)
    with strategy.scope():
        trainer = Trainer(Halved)
    with pytest.raises(
        RuntimeError,
        match=r"Halved was stepped in a replica.*Create it in the scope, or name it",
    ):
        hidden = weakref.ref(trainer.inside.scheduler)
        strategy.run(lambda: hidden().step())
    scheduler = trainer.inside.scheduler
    strategy.run(lambda: scheduler.step())
    assert trainer.inside.optimizer.param_groups[0]["lr"] == 0.05


def test_a_scaler_that_is_copied_in_the_scope_is_known_and_one_that_is_dropped_is_freed(
    make: Callable[[int], torchstrategy.Strategy],
) -> None:
    strategy = make(2)
    with strategy.scope():
        trainer = Trainer()
        first = weakref.ref(trainer.inside.scaler)
        trainer.inside.scaler = copy.deepcopy(trainer.inside.scaler)
    strategy.run(lambda: trainer.inside.scaler.update(32.0))
    gc.collect()
    assert first() is None and trainer.inside.scaler.get_scale() == 32.0


def test_constructors_are_torchs_own_again_when_the_scope_is_closed() -> None:
    kinds = (
        *{type(new(sgd(mlp()))) for new in (*SCHEDULERS.values(), plateau)},
        torch.amp.GradScaler,
    )
    before = [(kind.__init__, kind.__dict__.get("__setstate__")) for kind in kinds]
    with torchstrategy.CentralStorageStrategy(["cpu"] * 2).scope():
        assert torch.amp.GradScaler.__init__ is not before[-1][0]
    assert [
        (kind.__init__, kind.__dict__.get("__setstate__")) for kind in kinds
    ] == before


# ---- parameters, layers and hooks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.Tanh())
        self.head = nn.Linear(4, 2, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.body(x))


def another(layer: nn.Linear) -> nn.Linear:
    return nn.Linear(
        layer.in_features,
        layer.out_features,
        dtype=torch.float64,
        device=layer.weight.device,
    )


class Recorder:
    """A hook that holds a model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        raise AssertionError("it was left by a step that was refused")


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a layer": (
        lambda m: setattr(m, "head", another(m.head)),
        r"Net\.head was replaced in a replica",
    ),
    "a layer by one that it has": (
        lambda m: setattr(m, "head", m.body[0]),
        r"Net\.head was replaced in a replica",
    ),
    "a layer, made": (
        lambda m: m.add_module("more", nn.ReLU()),
        r"Net\.more was made in a replica",
    ),
    "a layer, appended": (
        lambda m: m.body.append(nn.ReLU()),
        r"Net\.body\.2 was made in a replica",
    ),
    "a layer, deleted": (
        lambda m: delattr(m, "head"),
        r"Net\.head was taken away in a replica",
    ),
    "a parameter": (
        lambda m: setattr(
            m.head, "weight", nn.Parameter(m.head.weight.detach().clone())
        ),
        r"Net\.head\.weight was replaced in a replica",
    ),
    "a parameter, made": (
        lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(()))),
        r"Net\.scale was made in a replica",
    ),
    "a parameter, by None": (
        lambda m: setattr(m.head, "bias", None),
        r"Net\.head\.bias was replaced in a replica",
    ),
    "a parameter, deleted": (
        lambda m: delattr(m.head, "bias"),
        r"Net\.head\.bias was taken away in a replica",
    ),
    "parameters, loaded": (
        lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
        r"Net\.body\.0\.weight was replaced in a replica",
    ),
    "a reparametrized layer": (
        lambda m: nn.utils.spectral_norm(m.head),
        r"Net\.head\.weight was taken away in a replica",
    ),
    "a hook that is an object": (
        lambda m: m.head.register_forward_hook(Recorder(m)),
        (
            r"A step registered a hook on Net\.head in a replica, and left it there: "
            r"an object of the class Recorder"
        ),
    ),
}


def step_of(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    mse(model, batch).backward()
    optimizer.step()


def built_and_trained(
    strategy: torchstrategy.Strategy,
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """A model with its optimizer and an equal plain one, both after one step.

    The plain one is of plain PyTorch.
    """
    (model, ours), (twin, plain) = built(strategy, Net, sgd)
    strategy.run(
        lambda batch: step_of(model, ours, batch), args=(deal(strategy, data(7)),)
    )
    step_of(twin, plain, data(7))
    return (model, ours), (twin, plain)


def assert_same(model: Any, twin: Any, case: str) -> None:
    assert [name for name, _ in model.named_modules()] == [
        name for name, _ in twin.named_modules()
    ]
    assert_close(parameters(model), parameters(twin), case, 1e-10)
    assert_close(gradients(model), gradients(twin), case, 1e-10)
    assert_close(dict(model.named_buffers()), dict(twin.named_buffers()), case, 1e-10)


CASES = [
    *((name, "before the update") for name in REFUSED),
    *itertools.product(
        ("a layer", "a parameter"), ("without an update", "in one replica")
    ),
]


@pytest.mark.parametrize(("name", "when"), CASES)
def test_a_step_that_makes_or_replaces_a_part_is_refused_by_name_with_nothing_done(
    make: Callable[[int], torchstrategy.Strategy], name: str, when: str
) -> None:
    strategy = make(3)
    (model, ours), (twin, plain) = built_and_trained(strategy)
    change, match = REFUSED[name]

    def step(batch: Any) -> None:
        if when != "without an update":
            ours.zero_grad()
        mse(model, batch).backward()
        if when != "in one replica" or replica_id() == 1:
            change(model)
        if when == "before the update":
            ours.step()

    before = list(vars(model).items())
    # A second time, too: the copies that were changed are not used again.
    for _ in range(2):
        with pytest.raises(RuntimeError, match=match):
            strategy.run(step, args=(deal(strategy, data(7, seed=1)),))
    assert list(vars(model).items()) == before
    assert_same(model, twin, "after the refusal")
    strategy.run(
        lambda batch: step_of(model, ours, batch),
        args=(deal(strategy, data(7, seed=2)),),
    )
    step_of(twin, plain, data(7, seed=2))
    assert_same(model, twin, "after a good step")


def swapped_for_a_while(m: Any, use: Callable[[], None]) -> None:
    head, m.head = m.head, another(m.head)
    m.head.requires_grad_(False)
    m(torch.zeros(1, 3, dtype=torch.float64, device=m.head.weight.device))
    m.head = head
    use()


def parameter_out_and_in(m: Any, use: Callable[[], None]) -> None:
    """It comes back behind the others."""
    weight = m.head.weight
    del m.head.weight
    m.head.weight = weight.detach() * 2
    del m.head.weight
    m.head.weight = weight
    use()


def hook_for_a_while(m: Any, use: Callable[[], None]) -> None:
    handle = m.head.register_forward_hook(lambda module, inputs, output: 2 * output)
    use()
    handle.remove()


ALLOWED = {
    "a layer is swapped for a while": swapped_for_a_while,
    "a parameter is taken out and put back": parameter_out_and_in,
    "a hook holds for a while": hook_for_a_while,
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_step_puts_back_does_in_it_what_it_does_in_plain_torch(
    make: Callable[[int], torchstrategy.Strategy], name: str
) -> None:
    strategy = make(3)
    (model, ours), (twin, plain) = built_and_trained(strategy)
    for k in range(2):
        batch = data(7, seed=k)
        strategy.run(
            lambda b: ALLOWED[name](model, lambda: step_of(model, ours, b)),
            args=(deal(strategy, batch),),
        )
        ALLOWED[name](twin, functools.partial(step_of, twin, plain, batch))
        assert_close(
            parameters(model),
            {n: parameters(twin)[n] for n in parameters(model)},
            name,
            1e-10,
        )


def test_a_step_of_one_replica_on_the_users_own_model_may_replace_anything() -> None:
    strategy = torchstrategy.OneDeviceStrategy("cpu")
    with strategy.scope():
        model = Net()
    for change, _ in REFUSED.values():
        with strategy.scope():
            model = Net()
        strategy.run(change, args=(model,))


def hooked_once(m: Any) -> None:
    """As a forward does that notes what it has done."""
    if getattr(m, "is_hooked", False):
        return
    m.is_hooked = True
    m.head.register_forward_hook(
        lambda module, inputs, output: output + m.body[0].bias.sum()
    )
    m.head.register_forward_pre_hook(
        lambda module, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True
    )
    m.head.register_full_backward_hook(functools.partial(_scaled, m.body[0]))


def _scaled(layer: nn.Module, module: nn.Module, into: Any, out: Any) -> Any:
    return tuple(
        None if g is None else g * layer.bias.detach().exp().sum() for g in into
    )


def hooked_and_unhooked(m: Any) -> None:
    if m.head._forward_hooks:
        m.head._forward_hooks.clear()
    else:
        m.head.register_forward_hook(lambda module, inputs, output: output * 2)


HOOKS = {
    "hooked once": hooked_once,
    "hooked and unhooked": hooked_and_unhooked,
    "one more in each step": lambda m: m.head.register_forward_hook(
        lambda module, inputs, output: output * 1.5
    ),
}


@pytest.mark.parametrize("first", [7, 1])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_a_step_leaves_are_hooks_of_the_model(
    make: Callable[[int], torchstrategy.Strategy], name: str, first: int
) -> None:
    """In every replica, also in those without rows in the first batch, and outside."""
    strategy, hook = make(3), HOOKS[name]
    (model, ours), (twin, plain) = built(strategy, Net, sgd)

    def step(m: Any, optimizer: Any, batch: Any) -> None:
        hook(m)
        step_of(m, optimizer, batch)

    for k in range(4):
        batch = data(7 if k else first, seed=k)
        strategy.run(lambda b: step(model, ours, b), args=(deal(strategy, batch),))
        step(twin, plain, batch)
        assert_same(model, twin, f"step {k}")
        x = batch[0]
        outside = model(x.to(model.head.weight.device)).detach().cpu()
        torch.testing.assert_close(outside, twin(x).detach(), rtol=1e-10, atol=1e-10)


# ---- buffers


def make_a_mask(m: Any) -> None:
    if not hasattr(m, "mask"):
        m.register_buffer(
            "mask",
            torch.full((2,), 3.0, dtype=torch.float64, device=m.head.weight.device),
        )


def make_a_scratch(m: Any) -> None:
    m.body.register_buffer(
        "scratch", torch.ones(1, device=m.head.weight.device), persistent=False
    )


def fill(m: Any) -> None:
    m.empty = m.head.bias.detach() * 0 + 5


def toggle(m: Any) -> None:
    fill(m) if m.empty is None else setattr(m, "empty", None)


BUFFERS: dict[str, Callable[[Any], None]] = {
    "made": make_a_mask,
    "made, and not saved": make_a_scratch,
    "made from nothing": fill,
    "set to None": lambda m: (
        setattr(m, "calls", None) if m.calls is not None and m.calls > 1 else None
    ),
    "toggled": toggle,
    "deleted": lambda m: delattr(m, "empty") if hasattr(m, "empty") else None,
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_a_step_makes_or_takes_away_is_made_or_taken_away_in_the_model(
    make: Callable[[int], torchstrategy.Strategy], name: str
) -> None:
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, Net, None)
    change, seen = BUFFERS[name], []

    def step(m: Any, batch: Any) -> None:
        if m.calls is not None:
            mse(m, batch).backward()
        change(m)
        seen.append(sorted(m.state_dict()))

    for k in range(4):
        seen.clear()
        strategy.run(
            lambda batch: step(model, batch), args=(deal(strategy, data(7, seed=k)),)
        )
        step(twin, data(7, seed=k))
        assert all(keys == seen[-1] for keys in seen)
        assert list(model.state_dict()) == list(twin.state_dict())
        assert [name for name, _ in model.named_buffers()] == [
            name for name, _ in twin.named_buffers()
        ]
        assert {b.device for b in model.buffers()} <= {model.head.weight.device}
        assert_same(model, twin, f"step {k}")


def test_a_buffer_that_only_a_later_replica_makes_is_none_of_the_models(
    make: Callable[[int], torchstrategy.Strategy],
) -> None:
    """Buffers are those of the first replica."""
    strategy = make(3)
    with strategy.scope():
        model = Net()
    strategy.run(lambda: make_a_mask(model) if replica_id() else None)
    seen = [hasattr(model, "mask")]
    strategy.run(lambda: seen.append(hasattr(model, "mask")))
    # In turns, what only some have is there for all.
    assert seen == [IN_TURNS] * 4


# ---- functions that close over the model they are in


def by_a_lambda(m: Any) -> None:
    m.forward = lambda x: m.head(m.body(x))


def by_a_wrapper(m: Any) -> None:
    forward = m.forward

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return 2 * forward(*args, **kwargs)

    m.forward = wrapper


def by_wrappers_of_wrappers(m: Any) -> None:
    for _ in range(3):
        by_a_wrapper(m)


def by_a_method(m: Any) -> None:
    m.forward = types.MethodType(lambda self, x: self.head(self.body(x).tanh()), m)


def by_a_partial(m: Any) -> None:
    m.forward = functools.partial(
        lambda m, f, x: f(m.body(x)), m, lambda h: m.head(h) * 2
    )


def by_defaults(m: Any) -> None:
    def forward(
        x: torch.Tensor, body: Any = m.body, *, head: Any = m.head
    ) -> torch.Tensor:
        return head(body(x))

    m.forward = forward


def by_a_function_that_is_held_deep(m: Any) -> None:
    m.stages = {"all": [(lambda x: m.body(x), lambda h: m.head(h))]}
    m.forward = types.MethodType(
        lambda self, x: self.stages["all"][0][1](self.stages["all"][0][0](x)), m
    )


def by_a_parameter(m: Any) -> None:
    weight, bias = m.head.weight, m.head.bias
    m.forward = lambda x: F.linear(m.body(x), weight * 2, bias)


def by_a_checkpoint(m: Any) -> None:
    m.forward = lambda x: m.head(
        checkpoint(lambda x: m.body(x).tanh(), x, use_reentrant=False)
    )


def by_a_forward_hook(m: Any) -> None:
    m.body.register_forward_hook(
        lambda module, inputs, output: output + m.head.weight.sum()
    )


def by_a_backward_hook(m: Any) -> None:
    m.head.register_full_backward_hook(
        lambda module, into, out: (into[0] * m.body[0].bias.detach().exp().sum(),)
    )


def by_a_loop(m: Any) -> None:
    # In a list, they are not the copy's own, and lead there on a replica's thread.
    layers = [m.body, m.head]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    m.forward = forward


def by_itself(m: Any) -> None:
    def forward(x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return forward(x * 2, depth - 1) if depth else m.head(m.body(x))

    m.forward = forward


def by_a_compiled_function(m: Any) -> None:
    m.forward = torch.compile(lambda x: m.head(m.body(x)), backend="eager")


BY = [
    by_a_lambda,
    by_a_wrapper,
    by_wrappers_of_wrappers,
    by_a_method,
    by_a_partial,
    by_defaults,
    by_a_function_that_is_held_deep,
    by_a_parameter,
    by_a_checkpoint,
    by_a_forward_hook,
    by_a_backward_hook,
    by_a_loop,
    by_itself,
    by_a_compiled_function,
]


BETWEEN = [
    by_a_lambda,
    by_wrappers_of_wrappers,
    by_a_function_that_is_held_deep,
    by_a_forward_hook,
]


@pytest.mark.parametrize(
    ("patch", "when"),
    [*((patch, "before") for patch in BY), *((patch, "between") for patch in BETWEEN)],
)
def test_a_function_that_closes_over_the_model_it_is_in_reaches_the_replicas_own(
    make: Callable[[int], torchstrategy.Strategy],
    patch: Callable[[Any], None],
    when: str,
) -> None:
    strategy = make(3)
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    if when == "before":
        patch(model)
    strategy.distribute_module(model)
    ours, plain = strategy.distribute_optimizer(sgd(model)), sgd(twin)
    if when == "between":
        strategy.run(lambda: None)
        patch(model)
    patch(twin)
    for k in range(2):
        strategy.run(
            lambda batch: step_of(model, ours, batch),
            args=(deal(strategy, data(7, seed=k)),),
        )
        step_of(twin, plain, data(7, seed=k))
        assert_close(parameters(model), parameters(twin), f"step {k}", 1e-10)


def reaching(m: Any) -> dict[str, Callable[[], Any]]:
    """Functions that find the head of `m`."""

    def inner() -> Any:
        return m.head

    class Finder(nn.Module):
        def find(self) -> Any:
            return self.found

    finder = Finder()
    finder.found = m.head
    return {
        "a lambda": lambda: m.head,
        "a function in a function": lambda: inner(),
        "a partial": functools.partial(getattr, m, "head"),
        "a default": lambda head=m.head: head,
        "a keyword default": lambda *, head=m.head: head,
        "a method": types.MethodType(lambda self: self.head, m),
        "a method in a lambda": (lambda find: lambda: find())(
            types.MethodType(lambda self: self.head, m)
        ),
    }


def test_they_do_so_on_every_thread(
    make: Callable[[int], torchstrategy.Strategy],
) -> None:
    """Autograd has its own threads on accelerators, which know nothing of replicas."""
    strategy = make(3)
    with strategy.scope():
        model = Net()
    model.ways = reaching(model)
    model.head.register_forward_hook(model.ways["a lambda"])
    found: list[tuple[int, dict[str, bool]]] = []

    def step() -> None:
        ways = {**model.ways, "a hook": next(iter(model.head._forward_hooks.values()))}
        head, heads = model.get_submodule("head"), {}
        thread = threading.Thread(
            target=lambda: heads.update({name: way() for name, way in ways.items()})
        )
        thread.start()
        thread.join()
        found.append((id(head), {name: got is head for name, got in heads.items()}))

    strategy.run(step)
    assert all(all(same.values()) and len(same) == 8 for _, same in found), found
    heads = {head for head, _ in found} | {id(model.head)}
    assert len(heads) == (1 if IN_TURNS else 4)
    assert model.ways["a lambda"]() is model.head


def test_what_such_a_function_counts_and_notes_each_replica_has_for_itself(
    make: Callable[[int], torchstrategy.Strategy],
) -> None:
    strategy, seen, count = make(3), [], 0
    with strategy.scope():
        model = Net()

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal count
        with lock:
            count += 1
            seen.append(model.head is module)
            hook.calls += 1

    lock = threading.Lock()
    hook.calls = 0
    model.head.register_forward_hook(hook)
    strategy.run(
        lambda batch: model(batch[0]).sum().backward(), args=(deal(strategy, data(7)),)
    )
    # In turns, the list has the items of all replicas.
    assert (count, seen, hook.calls) == (1, [True] * (3 if IN_TURNS else 1), 1)


def test_a_hook_may_keep_what_it_saw_in_the_last_step(
    make: Callable[[int], torchstrategy.Strategy],
) -> None:
    strategy, last = make(2), None
    with strategy.scope():
        model = Net()

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal last
        last = output

    model.head.register_forward_hook(hook)
    for _ in range(2):
        strategy.run(
            lambda batch: mse(model, batch).backward(), args=(deal(strategy, data(7)),)
        )
        assert all(
            part.requires_grad for part in strategy.experimental_local_results(last)
        )
        model.body.append(nn.Tanh())  # there have to be new copies


def closing_over(**tensors: Any) -> Callable[[Any], None]:
    """Gives a model a function that closes over a tensor."""
    (tensor,) = tensors.values()

    def patch(m: Any) -> None:
        log_t = tensor
        m.scaled = lambda x: m.head(x) * log_t

    return patch


def scripted(m: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m.inner = nn.ModuleList([torch.jit.script(nn.Linear(2, 2))])


def lazy(m: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m.body.append(nn.LazyLinear(4))


def with_a_hook(m: Any) -> None:
    scale = torch.ones((), requires_grad=True)
    m.head.register_forward_hook(lambda module, inputs, output: output * scale)


NOT_COPIED: dict[str, tuple[Callable[[Any], None], str]] = {
    "a DataParallel of torch": (
        lambda m: m.add_module("wrapped", nn.DataParallel(nn.Linear(2, 2))),
        (
            r"Net\.wrapped is a torch\.nn\.DataParallel.*Use the module that it wraps, "
            r"`\.module`"
        ),
    ),
    "a ScriptModule": (
        scripted,
        r"Net\.inner\.0 is a ScriptModule.*Use the module it was made from",
    ),
    "a lazy layer": (
        lazy,
        (
            r"Net\.body\.2\.weight has no shape yet: LazyLinear is lazy\. Run one "
            r"batch through"
        ),
    ),
    "a function over a tensor that learns": (
        closing_over(log_t=torch.ones((), requires_grad=True)),
        (
            r"Net\.scaled is a function that closes over log_t, a tensor that requires "
            r"grad.*torch\.nn\.Parameter"
        ),
    ),
    "a hook over a tensor that learns": (
        with_a_hook,
        (
            r"A hook of Net\.head is a function that closes over scale, a tensor that "
            r"requires grad"
        ),
    ),
}
NOT_REFUSED_IN_TURNS = (
    "a ScriptModule",
    "a function over a tensor that learns",
    "a hook over a tensor that learns",
)
# Others may become something that can be used.
AT_ONCE = ("a DataParallel of torch", "a ScriptModule")


@only_in_turns
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_tensor_that_learns_and_that_a_hook_closes_over_gets_its_gradient(
    make: Callable[[int], torchstrategy.Strategy], when: str
) -> None:
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, Net, None)
    scales = [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(2)]
    if when == "between":
        strategy.run(lambda: None)

    def hook(scale: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda module, inputs, output: output * scale.to(output.device)

    for m, scale in zip((model, twin), scales, strict=True):
        m.head.register_forward_hook(hook(scale))
    for k in range(2):
        batch = data(7, seed=k)
        strategy.run(lambda b: mse(model, b).backward(), args=(deal(strategy, batch),))
        mse(twin, batch).backward()
        assert_close(gradients(model), gradients(twin), f"step {k}", 1e-10)
        torch.testing.assert_close(scales[0].grad, scales[1].grad)


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=only_with_copies if name in NOT_REFUSED_IN_TURNS else ()
        )
        for name in NOT_COPIED
    ],
)
def test_what_cannot_be_distributed_is_refused_by_its_path_with_what_to_do(
    make: Callable[[int], torchstrategy.Strategy], name: str, when: str
) -> None:
    strategy, (patch, match) = make(3), NOT_COPIED[name]
    model = Net()
    if when == "before":
        patch(model)
    if when == "before" and name in AT_ONCE:
        with pytest.raises(TypeError, match=match):
            strategy.distribute_module(model)
        assert not strategy.extended.variable_created_in_scope(model)
        return
    strategy.distribute_module(model)
    if when == "between":
        strategy.run(lambda: None)
        patch(model)
    for _ in range(2):
        with pytest.raises(TypeError, match=match):
            strategy.run(lambda: model.head.weight.sum().backward())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_device_takes_whatever_plain_torch_takes() -> None:
    for patch, _ in NOT_COPIED.values():
        strategy, model = torchstrategy.OneDeviceStrategy("cpu"), Net()
        patch(model)
        strategy.run(
            lambda m: m.head.weight.sum().backward(),
            args=(strategy.distribute_module(model),),
        )
        assert model.head.weight.grad is not None
