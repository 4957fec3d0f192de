"""Steps that do something special with gradients, in workers with one replica.

They are the same in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchstrategy
from torchstrategy._run.own import gradient_plans, own_gradients
from workers.sent_messages import counting_messages
from workers.trainings import Net, batches, cross_entropy, strategy_of

Run = Callable[..., Any]
Program = Callable[[Any], tuple[nn.Module, Callable[[Run, Any], Any]]]

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **SGD)


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


# Several backwards


def same_graph_twice(_: Any) -> Any:
    model = Net()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model, *batch)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


def accumulated_over_runs(_: Any) -> Any:
    """Every third run updates. Adam would hide a factor."""
    model = Net()
    optimizer = sgd(model)
    count = [0]

    def train(run: Run, batch: Any) -> None:
        count[0] += 1
        is_last = count[0] % 3 == 0

        def step(batch: Any) -> None:
            cross_entropy(model, *batch).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

        run(step, batch)

    return model, train


def cleared_here_and_there(_: Any) -> Any:
    model = Net()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        cross_entropy(model, *batch).backward()
        optimizer.zero_grad(set_to_none=False)
        squared(model, batch[0]).backward()
        optimizer.step()
        model.body.zero_grad()
        model.head.weight.grad = None

    return model, lambda run, batch: run(step, batch)


def only_some_inputs(_: Any) -> Any:
    """A backward for the head alone, after one for all."""
    model = Net()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        squared(model, batch[0]).backward(inputs=list(model.head.parameters()))
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


def two_losses_at_once(_: Any) -> Any:
    model = Net()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(
            [cross_entropy(model, *batch), squared(model, batch[0])]
        )
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


# What the step does with gradients


def assign_gradients(model: nn.Module, batch: Any) -> None:
    """Puts the gradients of a worker's own rows into `.grad`, without a backward."""
    gradients = torch.autograd.grad(
        cross_entropy(model, *batch), list(model.parameters())
    )
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def assigned(_: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        assign_gradients(model, batch)
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


def assigned_and_updated_by_the_program(_: Any) -> Any:
    """The gradients stayed those of each worker's rows.

    Only an update in the run looked at them.
    """
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        assign_gradients(model, batch)

    def train(run: Run, batch: Any) -> None:
        run(step, batch)
        optimizer.step()

    return model, train


def assigned_before_a_backward(_: Any) -> Any:
    """Backward adds to a gradient of the worker's own rows: the sum was of neither."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        assign_gradients(model, batch)
        squared(model, batch[0]).backward()
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


def added_in_place(_: Any) -> Any:
    """No backward of the step made the gradients, so nobody compared anything.

    The workers drifted apart.
    """
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        gradients = torch.autograd.grad(
            cross_entropy(model, *batch), list(model.parameters())
        )
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


def given_between_runs(_: Any) -> Any:
    """What the program puts into `.grad` outside of runs counts as it is.

    A backward adds to it.
    """
    model = Net()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        cross_entropy(model, *batch).backward()
        optimizer.step()

    def train(run: Run, batch: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        run(step, batch)

    return model, train


def assigned_from_the_batch(_: Any) -> Any:
    """What all workers computed alike from the batch's gradients stays unsummed.

    It is not added up again.
    """
    model = Net()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.sign() * 0.1
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


def written_in_place(_: Any) -> Any:
    model = Net()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5).add_(0.01)
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


def kept_by_the_user(_: Any) -> Any:
    """Gradients that the program keeps stay what they were."""
    model = Net()
    model.register_buffer(
        "kept", torch.zeros(200, dtype=torch.float64), persistent=True
    )
    optimizer = sgd(model)
    gradients: list[torch.Tensor] = []

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        gradients.append(model.head.weight.grad)
        gradients.append(model.head.bias.grad)
        optimizer.step()

    def train(run: Run, batch: Any) -> None:
        run(step, batch)
        values = torch.cat([gradient.flatten() for gradient in gradients])
        model.kept[: len(values)] = values

    return model, train


def scaled_by_hand(_: Any) -> Any:
    model = Net()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        (8 * cross_entropy(model, *batch)).backward()
        torch._foreach_div_(
            [p.grad for p in model.parameters() if p.grad is not None], 8.0
        )
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


# Which parameters have gradients


class Routed(nn.Module):
    """Each row goes through one of two layers: some workers do not use one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
        self.never = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_left = x[:, 0] > 0.3
        result = x.new_zeros(len(x), 3)
        if is_left.any():
            result = result.index_put((is_left.nonzero()[:, 0],), self.left(x[is_left]))
        if not is_left.all():
            result = result.index_put(
                ((~is_left).nonzero()[:, 0],), self.right(x[~is_left])
            )
        return result


def unused_by_some(_: Any) -> Any:
    model = Routed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


def alternating(_: Any) -> Any:
    model = nn.ModuleList([nn.Linear(4, 3).double() for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    turns = iter([0, 0, 1, 0, 2, 2, 1] * 9)

    def train(run: Run, batch: Any) -> None:
        turn = next(turns)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            cross_entropy(model[turn], *batch).backward()
            optimizer.step()

        run(step, batch)

    return model, train


def frozen_for_a_while(_: Any) -> Any:
    model = Net()
    optimizer = sgd(model)
    count = [0]

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        optimizer.step()

    def train(run: Run, batch: Any) -> None:
        count[0] += 1
        model.body.requires_grad_(count[0] not in (3, 4))
        run(step, batch)

    return model, train


class Table(nn.Module):
    """A table whose gradient is sparse, and in some steps dense."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 3, sparse=True).double()
        self.head = nn.Linear(3, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table((x * 2).long().abs() % 6).sum(1))


def sparse_and_dense(_: Any) -> Any:
    model = Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = [0]

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model, *batch)
        if count[0] in (3, 4):
            loss = loss + model.table.weight.square().sum() * 0.01
        loss.backward()
        optimizer.step()

    def train(run: Run, batch: Any) -> None:
        count[0] += 1
        run(step, batch)

    return model, train


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker = nn.Linear(4, 4).double()
        self.judge = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def adversaries(_: Any) -> Any:
    """Two updates in a step.

    The second backward adds to gradients of the first model, too.
    """
    model = Pair()
    of_maker = torch.optim.Adam(model.maker.parameters(), lr=0.02)
    of_judge = torch.optim.Adam(model.judge.parameters(), lr=0.02)

    def step(batch: Any) -> None:
        x, _ = batch
        made = model.maker(x)
        of_judge.zero_grad()
        loss = (
            nn.functional.softplus(-model.judge(x)).mean()
            + nn.functional.softplus(model.judge(made.detach())).mean()
        )
        loss.backward()
        of_judge.step()
        of_maker.zero_grad()
        nn.functional.softplus(-model.judge(model.maker(x))).mean().backward()
        of_maker.step()

    return model, lambda run, batch: run(step, batch)


def adversaries_in_runs(_: Any) -> Any:
    model = Pair()
    of_maker = torch.optim.Adam(model.maker.parameters(), lr=0.02)
    of_judge = torch.optim.Adam(model.judge.parameters(), lr=0.02)

    def judged(batch: Any) -> None:
        model.zero_grad()
        squared(model.judge, model.maker(batch[0]).detach()).backward()
        of_judge.step()

    def made(batch: Any) -> None:
        model.zero_grad()
        model.judge(model.maker(batch[0])).mean().backward()
        of_maker.step()

    def train(run: Run, batch: Any) -> None:
        run(judged, batch)
        run(made, batch)

    return model, train


# Graphs


def penalty_on_inputs(_: Any) -> Any:
    model = Net()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        x = batch[0].clone().requires_grad_()
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        (cross_entropy(model, x, batch[1]) + slope.square().sum(1).mean()).backward()
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


def _tied(use_reentrant: bool) -> Any:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)]).double()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        x, y = batch
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        # Each weight gets its gradient in two parts.
        for layer in (model[0], model[1], model[0], model[1]):
            x = checkpoint(
                lambda h, layer=layer: torch.tanh(layer(h)),
                x,
                use_reentrant=use_reentrant,
            )
        nn.functional.cross_entropy(model[2](x), y).backward()
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


def checkpointed_reentrant(_: Any) -> Any:
    return _tied(True)


def checkpointed(_: Any) -> Any:
    return _tied(False)


def graph_of_gradients(_: Any) -> Any:
    """A graph of gradients is made, and not used."""
    model = Net()
    optimizer = sgd(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()

    return model, lambda run, batch: run(step, batch)


# Hooks


def hooks_of_parameters(_: Any) -> Any:
    """Hooks that double and bound a gradient, and one that only looks at it."""
    model = Net()
    model.register_buffer("seen", torch.zeros((), dtype=torch.float64))
    optimizer = sgd(model)
    model.body[0].weight.register_hook(lambda gradient: 2 * gradient)
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))

    def look(gradient: torch.Tensor) -> None:
        model.seen = model.seen + gradient.abs().sum()

    model.head.bias.register_hook(look)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


def updated_by_hooks(_: Any) -> Any:
    """Each parameter is updated, and its gradient cleared, once backward has it."""
    model = Net()

    def update(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad.clamp(-0.05, 0.05))
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return model, lambda run, batch: run(
        lambda batch: cross_entropy(model, *batch).backward(), batch
    )


# Optimizers


def line_search(_: Any) -> Any:
    model = Net()
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=4, line_search_fn="strong_wolfe"
    )

    def step(batch: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model, *batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    return model, lambda run, batch: run(step, batch)


def fused(_: Any) -> Any:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


def group_added_later(scope: Any) -> Any:
    """A layer and its parameter group come after some runs.

    The layer's bias is another object after some more.
    """
    model = nn.Sequential(nn.Linear(4, 3)).double()
    optimizer = sgd(model)
    count = [0]

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model, *batch).backward()
        optimizer.step()

    def train(run: Run, batch: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            with scope():
                model.append(nn.Linear(3, 3).double())
            optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.05})
        elif count[0] == 5:
            model[1].bias = nn.Parameter(torch.zeros_like(model[1].bias))
            optimizer.add_param_group({"params": [model[1].bias]})
        run(step, batch)

    return model, train


def complex_numbers(_: Any) -> Any:
    model = nn.Sequential(
        nn.Linear(4, 5, dtype=torch.complex128), nn.Linear(5, 3, dtype=torch.complex128)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            model(batch[0].to(torch.complex128)).abs(), batch[1]
        ).backward()
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


def channels_last(_: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, (1, 2)), nn.Conv2d(4, 3, (1, 1))).double()
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        scores = model(batch[0].view(-1, 2, 1, 2)).flatten(1)
        nn.functional.cross_entropy(scores, batch[1]).backward()
        optimizer.step()

    return model, lambda run, batch: run(step, batch)


def two_models(scope: Any) -> Any:
    """The second one and its optimizer are made after some runs.

    The first one is trained no longer then.
    """
    models = nn.ModuleList([Net()])
    optimizers = [sgd(models[0])]
    count = [0]

    def step(batch: Any) -> None:
        optimizers[-1].zero_grad()
        cross_entropy(models[-1], *batch).backward()
        optimizers[-1].step()

    def train(run: Run, batch: Any) -> None:
        count[0] += 1
        if count[0] == 4:
            with scope():
                models.append(Net(seed=1))
                optimizers.append(sgd(models[1]))
        run(step, batch)

    return models, train


PROGRAMS: Sequence[Program] = [
    same_graph_twice,
    accumulated_over_runs,
    cleared_here_and_there,
    only_some_inputs,
    two_losses_at_once,
    assigned,
    assigned_and_updated_by_the_program,
    assigned_before_a_backward,
    added_in_place,
    given_between_runs,
    assigned_from_the_batch,
    written_in_place,
    kept_by_the_user,
    scaled_by_hand,
    unused_by_some,
    alternating,
    frozen_for_a_while,
    sparse_and_dense,
    adversaries,
    adversaries_in_runs,
    penalty_on_inputs,
    checkpointed_reentrant,
    checkpointed,
    graph_of_gradients,
    hooks_of_parameters,
    updated_by_hooks,
    line_search,
    fused,
    group_added_later,
    complex_numbers,
    channels_last,
    two_models,
]
# What it keeps is put together from all replicas: it has other shapes.
NOT_IN_COPIES = [kept_by_the_user]
# Then rounding grows beyond all bounds, in plain PyTorch too.
FIRST_BATCHES = {"line_search": 4}
LOOSE = {"line_search": 1e-10}


@contextmanager
def large_from(size: float) -> Iterator[None]:
    """A block in which gradients of so many bytes are sent by themselves, and early."""
    before = gradient_plans.LARGE
    gradient_plans.LARGE = own_gradients.LARGE = size  # type: ignore[assignment,attr-defined]
    try:
        yield
    finally:
        gradient_plans.LARGE = own_gradients.LARGE = before  # type: ignore[attr-defined]


def come_to(strategy: torchstrategy.Strategy, program: Program) -> list[torch.Tensor]:
    """Parameters, buffers and gradients after each run of a program."""
    torch.manual_seed(0)
    with strategy.scope():
        model, train = program(strategy.scope)
    found: list[torch.Tensor] = []
    data = batches()[: FIRST_BATCHES.get(program.__name__)]
    for batch in strategy.experimental_distribute_dataset(data):
        train(lambda step, batch: strategy.run(step, args=(batch,)), batch)
        found += [value.detach().clone() for value in model.state_dict().values()]
        for parameter in model.parameters():
            gradient = parameter.grad
            # Where there is none: NaN, which is equal to nothing else.
            found.append(
                torch.full_like(parameter, torch.nan)
                if gradient is None
                else gradient.detach().to_dense().clone()
            )
    return found


def of_workers(
    size: float, programs: Sequence[Program] = PROGRAMS
) -> dict[str, list[torch.Tensor]]:
    with large_from(size):
        return {
            program.__name__: come_to(strategy_of(1), program) for program in programs
        }


def of_copies(programs: Sequence[Program]) -> dict[str, list[torch.Tensor]]:
    """What a worker with two replicas comes to."""
    return {
        program.__name__: come_to(strategy_of(2), program)
        for program in programs
        if program not in NOT_IN_COPIES
    }


def differ(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """How much numbers differ; infinity where only one has a gradient."""
    assert len(one) == len(other)
    largest = 0.0
    for a, b in zip(one, other, strict=True):
        if not torch.equal(a.isnan(), b.isnan()):
            return float("inf")
        largest = max(
            largest, (a - b).abs().nan_to_num().max().item() if a.numel() else 0.0
        )
    return largest


def of_a_part(program: Program) -> list[torch.Tensor] | None:
    """What the first two of three processes come to by themselves."""
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return None
    return come_to(
        torchstrategy.MultiWorkerMirroredStrategy(devices=["cpu"], process_group=group),
        program,
    )


def messages_of_a_training(set_to_none: bool) -> list[int]:
    """How many messages this worker sends before a training, and in each run of it.

    Its batches are of unlike sizes.
    """
    with counting_messages() as sent:
        strategy = strategy_of(1)
        with strategy.scope():
            model = Net(nn.BatchNorm1d(8), dropout=0.5)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

        def step(batch: Any) -> torch.Tensor:
            optimizer.zero_grad(set_to_none)
            loss = cross_entropy(model, *batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            return loss.detach()

        loader = strategy.experimental_distribute_dataset(batches((8, 6, 7, 4) * 5))
        found = []
        before = 0
        for batch in loader:
            found.append(sent[0] - before)
            before = sent[0]
            strategy.run(step, args=(batch,))
        found.append(sent[0] - before)
    return found
