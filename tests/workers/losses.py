"""Losses that are no means over rows: by each `gradient_reduction`.

They run in workers, and in plain PyTorch.
"""

from __future__ import annotations

import functools
import operator
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchstrategy
from known_losses import KNOWN, Loss, Net, Rows, ce, each, masked, rows_of
from torchstrategy import LossWeightWarning, RunOptions
from workers import sharding
from workers.exact_steps import large_from
from workers.sent_messages import counting_messages
from workers.trainings import strategy_of

# Rows of the batches, and the seeds of their numbers. Where 2 or 3 workers have as many
# rows, the later ones are sent as the first one has shown.
BATCHES = ((6, 1), (6, 2), (5, 1), (6, 3), (7, 1), (12, 4))
Gradients = list[torch.Tensor]  # of the parameters, one after the other


def as_batch(rows: Rows) -> tuple[torch.Tensor, ...]:
    return (
        rows.x,
        rows.y,
        rows.mask,
        rows.labels,
        rows.soft,
        rows.shares,
        rows.goal,
        rows.gain,
        rows.before,
    )


def gradients_of(net: nn.Module) -> Gradients:
    return [
        torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else p.grad.clone()
        for p in net.parameters()
    ]


def plainly(loss: Loss, batches: Sequence[Rows]) -> list[Gradients]:
    """What plain PyTorch comes to for each batch."""
    net, found = Net(), []
    for rows in batches:
        net.zero_grad()
        loss(net, rows).backward()
        found.append(gradients_of(net))
    return found


def known_batches() -> list[Rows]:
    return [rows_of(*one) for one in BATCHES]


def in_strategy(
    strategy: Any,
    net: Net,
    name: str,
    loss: Loss,
    batches: Sequence[Rows],
    options: RunOptions | None,
) -> tuple[list[Gradients], list[str]]:
    """The same for this worker, and the warnings."""
    found, whole = [], batches[0]

    def step(batch: Any) -> None:
        loss(net, Rows(*batch, whole=whole)).backward()

    # What a strategy knows of a step, it knows by its code.
    step.__code__, step.__name__ = step.__code__.replace(co_name=name), name
    loader = strategy.experimental_distribute_dataset(
        [as_batch(rows) for rows in batches]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows, batch in zip(batches, loader, strict=True):
            whole = rows
            net.zero_grad()
            strategy.run(step, args=(batch,), options=options)
            found.append(gradients_of(net))
    return found, [
        str(one.message) for one in caught if one.category is LossWeightWarning
    ]


Of = tuple[list[Gradients], list[str]]
MINE = ("loss", "mean", None)  # reductions that are compared


def of_known(replicas: int, names: Sequence[str]) -> dict[str, list[Of]]:
    """What this worker comes to by each reduction."""
    found: dict[str, list[Of]] = {}
    for k, name in enumerate(names):
        if k % 50 == 0:  # a strategy looks at the losses of so many steps
            strategy = strategy_of(replicas)
            with strategy.scope():
                net = Net()
        found[name] = [
            in_strategy(
                strategy, net, name, KNOWN[name].loss, known_batches(), reduced_by(by)
            )
            for by in MINE
        ]
    return found


def reduced_by(by: Any) -> RunOptions | None:
    return None if by is None else RunOptions(gradient_reduction=by)


# Random programs with counts


def weights_of_classes(net: Net, rows: Rows) -> torch.Tensor:
    return ce(net, rows, weight=torch.arange(1.0, 6, dtype=torch.float64))


COUNTED: list[Loss] = [
    ce,
    weights_of_classes,
    lambda n, r: ce(n, r, label_smoothing=0.1),
    lambda n, r: ce(n, r, reduction="sum") / (r.labels != -100).sum(),
    lambda n, r: ce(n, r, reduction="sum") / (r.labels != -100).sum().item(),
    lambda n, r: masked(each(n, r), r.mask) / r.mask.sum(),
    lambda n, r: masked(each(n, r), r.soft) / r.soft.sum(),
    lambda n, r: each(n, r)[r.mask].mean(),
    lambda n, r: F.mse_loss(n(r.x)[r.mask], r.goal[r.mask]),
]
BY_ROWS: list[Loss] = [
    lambda n, r: F.mse_loss(n(r.x), r.goal),
    lambda n, r: n.body.weight.square().mean(),
    lambda n, r: ((each(n, r) * r.mask).sum(1) / r.mask.sum(1).clamp(min=1)).mean(),
]
AROUND: list[Callable[[torch.Tensor, Net], torch.Tensor]] = [
    lambda loss, net: loss * 0.3,
    lambda loss, net: loss / 16,
    lambda loss, net: 3 - (-loss),
    lambda loss, net: loss * torch.tensor(8.0),
    lambda loss, net: loss.view(()).clone(),
]
LEARNED: list[Callable[[torch.Tensor, Net], torch.Tensor]] = [
    *AROUND,
    lambda loss, net: loss * net.scale.exp(),
]


def random_loss(seed: int) -> tuple[Loss, list[Rows]]:
    """A loss with counts, and batches for it; in some a worker has no valid token."""
    draw = random.Random(seed)
    parts = []
    for losses in (COUNTED, COUNTED + BY_ROWS)[: 1 + (draw.random() < 0.6)]:
        one = draw.choice(losses)
        # Two terms that parameters multiply together are not read.
        parts.append(
            (
                one,
                draw.choices(
                    AROUND if one is COUNTED[2] else LEARNED, k=draw.randrange(3)
                ),
            )
        )
    around = draw.choices(AROUND, k=draw.randrange(2))

    def wrapped(loss: torch.Tensor, net: Net, wrappings: Any) -> torch.Tensor:
        for wrapping in wrappings:
            loss = wrapping(loss, net)
        return loss

    def loss(net: Net, rows: Rows) -> torch.Tensor:
        # Not `sum`, which begins at 0: in a replica with a single row, that may be a
        # loop over its rows.
        terms = [wrapped(term(net, rows), net, wrappings) for term, wrappings in parts]
        return wrapped(functools.reduce(operator.add, terms), net, around)

    # From the graph, a loss of two terms may be a loop over two rows, and times 8 may
    # be by 8 rows. None has these.
    sizes = draw.choices((9, 12, 12, 12, 15, 14, 18), k=3)
    batches = [rows_of(size, draw.randrange(1000)) for size in sizes]
    # What is divided by a Python number that is zero is not read.
    if draw.random() < 0.3 and COUNTED[4] not in [one for one, _ in parts]:
        cut = len(batches[1]) // 2
        batches[1].mask[:cut], batches[1].labels[:cut] = False, -100
    return loss, batches


def of_random(
    replicas: int, seeds: Sequence[int], size: float
) -> list[list[Gradients]]:
    strategy = strategy_of(replicas)
    with strategy.scope():
        net = Net()
    with large_from(size):
        return [
            in_strategy(
                strategy, net, f"step_{seed}", *random_loss(seed), reduced_by("loss")
            )[0]
            for seed in seeds
        ]


# Trainings

TOKENS = 5
# By batch, the valid tokens of each row. In some, a worker has fewer rows, no row, or
# no token.
VALID = (
    (5, 1, 2, 4, 1, 3),
    (3, 5, 4, 1, 2, 1),
    (2, 1, 4, 0, 0, 0),
    (4, 1, 2, 2, 3),
    (5, 5, 1, 1, 2, 4),
    (4,),
    (1,) * 6,
)


def token_batches() -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for valid in VALID * 2:
        x = torch.randn(len(valid), TOKENS, 3, generator=generator, dtype=torch.float64)
        labels = torch.randint(4, (len(valid), TOKENS), generator=generator)
        labels[torch.arange(TOKENS) >= torch.tensor(valid)[:, None]] = -100
        made.append((x, labels))
    return made


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 4)
        self.table, self.other = nn.Embedding(4, 6, sparse=True), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def of_tokens(model: Any, batch: Any, **options: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), **options)


Step = Callable[[Any, int], Any]  # a batch, and the number of the run
Program = Callable[[Any, Any], Step]


def ordinary(model: Any, optimizer: Any) -> Step:
    def step(batch: Any, k: int) -> None:
        optimizer.zero_grad()
        of_tokens(model, batch).backward()
        optimizer.step()

    return step


def clipped(model: Any, optimizer: Any) -> Step:
    def step(batch: Any, k: int) -> None:
        optimizer.zero_grad()
        of_tokens(model, batch, label_smoothing=0.1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return step


def several_backwards(model: Any, optimizer: Any) -> Step:
    def step(batch: Any, k: int) -> None:
        optimizer.zero_grad()
        of_tokens(model, batch).backward()
        model(batch[0]).square().mean().backward()
        (of_tokens(model, batch, label_smoothing=0.2) * 0.3).backward()
        optimizer.step()

    return step


def same_graph_twice(model: Any, optimizer: Any) -> Step:
    def step(batch: Any, k: int) -> None:
        optimizer.zero_grad()
        loss = of_tokens(model, batch)
        loss.backward(retain_graph=True)
        (loss * 3).backward()
        optimizer.step()

    return step


def over_runs(model: Any, optimizer: Any) -> Step:
    """The gradients of three runs are added up."""

    def step(batch: Any, k: int) -> None:
        (of_tokens(model, batch) / 16).backward()
        if k % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step


def other_terms_later(model: Any, optimizer: Any) -> Step:
    """All workers make another loss in some runs."""

    def step(batch: Any, k: int) -> None:
        optimizer.zero_grad()
        loss = of_tokens(model, batch)
        if k in (2, 5, 6, 9):
            loss = loss + 0.1 * of_tokens(model, batch, label_smoothing=0.3)
        loss.backward()
        optimizer.step()

    return step


def zero_where_nothing_is_valid(model: Any, optimizer: Any) -> Step:
    """Workers without tokens run a backward of zero; in one batch one has none."""

    def step(batch: Any, k: int) -> None:
        optimizer.zero_grad()
        outputs = model(batch[0])
        if (batch[1] != -100).any():
            loss = F.cross_entropy(
                outputs.flatten(0, 1), batch[1].flatten(), label_smoothing=0.1
            )
        else:
            loss = outputs.sum() * 0
        loss.backward()
        optimizer.step()

    return step


def zero_of_one_term(model: Any, optimizer: Any) -> Step:
    def step(batch: Any, k: int) -> None:
        optimizer.zero_grad()
        outputs, is_valid = model(batch[0]), batch[1] != -100
        if is_valid.any():
            losses = F.cross_entropy(
                outputs.transpose(1, 2), batch[1], reduction="none"
            )
            ((losses * is_valid).sum() / is_valid.sum().clamp(min=1)).backward()
        else:
            (outputs.sum() * 0).backward()
        optimizer.step()

    return step


def scaled(model: Any, optimizer: Any) -> Step:
    """In one run some tokens overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(batch: Any, k: int) -> None:
        optimizer.zero_grad()
        x = batch[0]
        if k == 5:
            x = torch.where(x > 1, torch.inf, x)
        scaler.scale(of_tokens(model, (x, batch[1]))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return step


def hooked(model: Any, optimizer: Any) -> Step:
    """Hooks see gradients of the whole batch."""
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def step(batch: Any, k: int) -> None:
        optimizer.zero_grad()
        loss = of_tokens(model, batch)
        loss.register_hook(lambda gradient: gradient * 2)
        loss.backward()
        optimizer.step()

    return step


def sparse(model: Any, optimizer: Any) -> Step:
    def step(batch: Any, k: int) -> None:
        optimizer.zero_grad()
        rows = (batch[0].abs() * 2).long().sum(-1) % 4
        F.cross_entropy(
            model.head(model.table(rows)).flatten(0, 1), batch[1].flatten()
        ).backward()
        optimizer.step()

    return step


def by_turns(model: Any, optimizer: Any) -> Step:
    """Other parameters have gradients in each run."""

    def step(batch: Any, k: int) -> None:
        optimizer.zero_grad()
        head = model.head if k % 2 else model.other
        F.cross_entropy(
            head(model.body(batch[0])).flatten(0, 1), batch[1].flatten()
        ).backward()
        optimizer.step()

    return step


def in_checkpoints(model: Any, optimizer: Any) -> Step:
    """In some runs gradients come in two parts."""

    def step(batch: Any, k: int) -> None:
        optimizer.zero_grad()
        x = batch[0].clone().requires_grad_()
        hidden = sum(
            checkpoint(model.body, x * part, use_reentrant=True)
            for part in range(1, 2 + k % 2)
        )
        F.cross_entropy(model.head(hidden).flatten(0, 1), batch[1].flatten()).backward()
        optimizer.step()

    return step


def used_by_some(model: Any, optimizer: Any) -> Step:
    """In some workers no row uses some of the parameters."""

    def step(batch: Any, k: int) -> None:
        optimizer.zero_grad()
        hidden, uses = model.body(batch[0]), batch[0][:, 0, :1] > 0.8
        outputs = model.head(hidden)
        if uses.any():
            outputs = outputs + model.other(hidden) * uses[:, None]
        F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten()).backward()
        optimizer.step()

    return step


def line_search(model: Any, optimizer: Any) -> Step:
    search = torch.optim.LBFGS(
        list(model.head.parameters()), lr=0.1, max_iter=3, history_size=2
    )

    def step(batch: Any, k: int) -> None:
        def closure() -> torch.Tensor:
            search.zero_grad()
            loss = of_tokens(model, batch)
            loss.backward()
            return loss

        search.step(closure)

    return step


PROGRAMS: list[Program] = [
    ordinary,
    clipped,
    several_backwards,
    same_graph_twice,
    over_runs,
    other_terms_later,
]
PROGRAMS += [
    zero_where_nothing_is_valid,
    zero_of_one_term,
    scaled,
    hooked,
    sparse,
    by_turns,
    line_search,
]
PROGRAMS += [in_checkpoints, used_by_some]


def trained(strategy: Any, program: Program, by: str | None) -> list[torch.Tensor]:
    """Parameters and gradients after each run."""
    torch.manual_seed(0)
    with strategy.scope():
        model = Tagger().double()
        dense = [
            p
            for name, p in model.named_parameters()
            if program is sparse or not name.startswith("table")
        ]
        optimizer = torch.optim.SGD(
            dense, lr=0.1, momentum=0.0 if program is sparse else 0.9
        )
        step = program(model, optimizer)
    found = []
    for k, batch in enumerate(
        strategy.experimental_distribute_dataset(token_batches()), 1
    ):
        strategy.run(step, args=(batch, k), options=reduced_by(by))
        found += [p.detach().clone() for p in model.parameters()]
        found += [
            torch.zeros(()) if p.grad is None else p.grad.to_dense().clone()
            for p in model.parameters()
        ]
    return found


def of_programs(
    replicas: int, programs: Sequence[Program], size: float
) -> dict[str, list[torch.Tensor]]:
    with large_from(size):
        return {
            program.__name__: trained(strategy_of(replicas), program, "loss")
            for program in programs
        }


def messages(
    replicas: int, loss: Loss, sizes: Sequence[int], by: str = "loss"
) -> list[int]:
    """How many messages each run sends."""
    with counting_messages() as sent:
        strategy = strategy_of(replicas, gradient_reduction=by)
        with strategy.scope():
            net = Net()

        def step(batch: Any) -> None:
            net.zero_grad()
            loss(net, Rows(*batch)).backward()

        found = []
        loader = strategy.experimental_distribute_dataset(
            [as_batch(rows_of(n, k)) for k, n in enumerate(sizes)]
        )
        for batch in loader:
            before = sent[0]
            strategy.run(step, args=(batch,))
            found.append(sent[0] - before)
    return found


def of_terms_in_closures(replicas: int) -> str:
    """What is said of a closure whose loss has terms with counts of their own."""
    strategy = strategy_of(replicas, gradient_reduction="loss")
    with strategy.scope():
        model = Tagger().double()
        search = torch.optim.LBFGS(list(model.head.parameters()), lr=0.1, max_iter=2)

    def step(batch: Any) -> None:
        def closure() -> torch.Tensor:
            search.zero_grad()
            loss = of_tokens(model, batch) + model(batch[0]).square().mean()
            loss.backward()
            return loss

        search.step(closure)

    (batch,) = strategy.experimental_distribute_dataset(token_batches()[1:2])
    try:
        strategy.run(step, args=(batch,))
    except RuntimeError as error:
        return str(error)
    return ""


def warned_of(
    replicas: int, counts: Sequence[Sequence[int]], **options: Any
) -> list[list[str]]:
    """The warnings of each run, where the rows of a batch have so many valid tokens."""
    strategy = strategy_of(replicas, **options)
    with strategy.scope():
        model = Tagger().double()
    found = []

    def step(batch: Any) -> None:
        of_tokens(model, batch).backward()

    batches = []
    for valid in counts:
        labels = torch.ones(len(valid), TOKENS, dtype=torch.long)
        labels[torch.arange(TOKENS) >= torch.tensor(valid)[:, None]] = -100
        batches.append((torch.ones(len(valid), TOKENS, 3, dtype=torch.float64), labels))
    for batch in strategy.experimental_distribute_dataset(batches):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.run(step, args=(batch,))
        found.append(
            [str(one.message) for one in caught if one.category is LossWeightWarning]
        )
    return found


def sharded(train: Any, by: str) -> list[torch.Tensor]:
    """What this worker comes to with a model that is sharded."""
    strategy = strategy_of(1)
    with strategy.scope():
        model = sharding.shard(sharding.Net())
        optimizer = sharding.sgd(model)
    return sharded_training(strategy, model, optimizer, train, by)


def sharded_training(
    strategy: Any, model: Any, optimizer: Any, train: Any, by: str | None
) -> list[torch.Tensor]:
    step = train(model, optimizer)
    for batch in strategy.experimental_distribute_dataset(row_batches()):
        strategy.run(step, args=(batch,), options=reduced_by(by))
    return sharding.numbers_of(model, train)


def row_batches() -> list[Any]:
    """Rows with a target each, of which many are to be ignored.

    In some batches all of a worker are.
    """
    generator = torch.Generator().manual_seed(3)
    made = []
    for n, ignored in ((8, 5), (8, 4), (6, 3), (7, 2), (1, 0), (8, 2)):
        y = torch.randint(3, (n,), generator=generator)
        y[:ignored] = -100
        made.append((torch.randn(n, 4, generator=generator, dtype=torch.float64), y))
    return made


def plain_strategy() -> Any:
    return torchstrategy.get_strategy()
