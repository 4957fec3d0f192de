"""Variables, metrics, trainers and values of several workers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torchmetrics
from torch import nn

import torchstrategy
from token_losses import logged_over_tokens, tokens_of
from torchstrategy import VariableAggregation, VariableSynchronization
from workers.trainings import Net, batches, cross_entropy, strategy_of

ON_READ = VariableSynchronization.ON_READ


def of_values(replicas: int) -> dict[str, Any]:
    strategy = strategy_of(replicas)
    extended = strategy.extended
    ids = strategy.experimental_distribute_values_from_function(
        lambda context: torch.tensor(
            float(context.replica_id_in_sync_group + 10 * context.num_replicas_in_sync)
        )
    )

    def step(own: torch.Tensor) -> Any:
        context = torchstrategy.get_replica_context()
        mirrored = context.merge_call(
            lambda strategy, v: strategy.extended.reduce_to("sum", v, "cpu:0"),
            args=(own,),
        )
        return {
            "id": torch.tensor(context.replica_id_in_sync_group),
            "in sync": context.num_replicas_in_sync,
            "merged": mirrored * 1,
            "none": None,
            "own": own * 2,
        }

    returned = strategy.run(step, args=(ids,))
    return {
        "in sync": strategy.num_replicas_in_sync,
        "saves": (extended.should_checkpoint, extended.should_save_summary),
        "local": [value.tolist() for value in strategy.experimental_local_results(ids)],
        "returned": [
            list(r.values())[:3] for r in strategy.experimental_local_results(returned)
        ],
        "none": returned["none"],
        "ids": strategy.gather(
            strategy.run(lambda v: v["id"].reshape(1), args=(returned,)), axis=0
        ).tolist(),
        "sum": strategy.reduce("sum", returned["own"], axis=None).item(),
        "mean": strategy.reduce("mean", returned["own"], axis=None).item(),
    }


def weighted_means_of(strategy: torchstrategy.Strategy) -> list[Any]:
    """Losses that are scalars, of uneven batches, and which replica printed.

    The last has rows for one replica only.
    """
    found: list[Any] = []
    numbers = [
        torch.arange(float(rows), dtype=torch.float64) ** 2 for rows in (11, 6, 5, 1)
    ]
    # A worker without rows is lent several numbers.
    everything = [row.reshape(-1, 1).repeat(1, 3) for row in numbers]

    def step(rows: torch.Tensor) -> torch.Tensor:
        context = torchstrategy.get_replica_context()
        if context.is_first_replica:
            found.append(context.replica_id_in_sync_group)
        return rows.mean()

    for batch in strategy.experimental_distribute_dataset(everything):
        means = strategy.run(step, args=(batch,))
        found.append(strategy.reduce("mean", means, axis=None, weights=batch).item())
        found.append(
            strategy.reduce(
                "mean", means, axis=None, weights=strategy.run(len, args=(batch,))
            ).item()
        )
    return found


def of_weighted_means(replicas: int) -> list[Any]:
    return weighted_means_of(strategy_of(replicas))


def of_losses_over_tokens(replicas: int) -> list[float]:
    return logged_over_tokens(
        strategy_of(replicas), options=torchstrategy.RunOptions(examples=tokens_of)
    )


def variables_of(strategy: torchstrategy.Strategy) -> dict[str, torch.Tensor]:
    """What variables of every kind come to.

    The last batches have no rows for some workers.
    """
    found: dict[str, torch.Tensor] = {}
    with strategy.scope():
        made = {
            f"{kind.name} {aggregation.name}": torchstrategy.Variable(
                torch.zeros((), dtype=torch.float64),
                trainable=False,
                synchronization=kind,
                aggregation=aggregation,
            )
            for kind in (VariableSynchronization.ON_WRITE, ON_READ)
            for aggregation in VariableAggregation
            if aggregation is not VariableAggregation.NONE
        }
        trained = torchstrategy.Variable(torch.ones(4, dtype=torch.float64))
        optimizer = torch.optim.SGD([trained], lr=0.1)

    def step(batch: Any) -> None:
        x, _ = batch
        optimizer.zero_grad()
        (x @ trained).tanh().mean().backward()
        optimizer.step()
        for variable in made.values():
            variable.assign_add(x.sum())

    for batch in strategy.experimental_distribute_dataset(batches((8, 5, 1))):
        strategy.run(step, args=(batch,))
    found = {name: variable.read_value() for name, variable in made.items()}
    made["ON_READ SUM"].assign(torch.tensor(6.0, dtype=torch.float64))
    return {
        **found,
        "assigned": made["ON_READ SUM"].read_value(),
        "trained": trained.read_value(),
    }


def of_variables_that_begin(replicas: int) -> list[tuple[list[float], float]]:
    """What variables with values for each replica hold.

    Each worker makes them with another value.
    """
    strategy = strategy_of(replicas)
    rank = strategy.extended._workers.index

    def made(value: float) -> torchstrategy.Variable:
        with strategy.scope():
            return torchstrategy.Variable(
                torch.tensor(value),
                synchronization=ON_READ,
                aggregation=VariableAggregation.MEAN,
                trainable=False,
            )

    first, assigned = made(2.0 + rank), made(5.0)
    assigned.assign(torch.tensor(3.0 + rank))
    strategy.run(
        lambda: first.assign_add(
            float(torchstrategy.get_replica_context().replica_id_in_sync_group)
        )
    )
    late = made(7.0 + rank)
    strategy.run(lambda: None)
    return [
        (
            [part.item() for part in strategy.experimental_local_results(one)],
            one.read_value().item(),
        )
        for one in (first, assigned, late)
    ]


def of_an_expanded_buffer(replicas: int) -> torch.Tensor:
    """A buffer that repeats one row, which each worker makes with other numbers."""
    strategy = strategy_of(replicas)
    with strategy.scope():
        net = torch.nn.Linear(3, 1)
        row = torch.arange(3.0) + strategy.extended._workers.index
        net.register_buffer("mask", row.expand(2, 4, 3))
    strategy.run(lambda: net.mask.sum())
    return net.mask[:, ::3].clone()


def of_variables(replicas: int) -> dict[str, torch.Tensor]:
    return variables_of(strategy_of(replicas))


def metrics_of(strategy: torchstrategy.Strategy) -> dict[str, float]:
    """Metrics of every kind of state, computed in the step and after it."""
    with strategy.scope():
        metrics = nn.ModuleDict(
            {
                "mean": torchmetrics.MeanMetric(),
                "max": torchmetrics.MaxMetric(),
                "cat": torchmetrics.CatMetric(),
                "accuracy": torchmetrics.classification.MulticlassAccuracy(
                    3, average="micro"
                ),
                "auroc": torchmetrics.classification.MulticlassAUROC(3),
            }
        )
        model = Net()

    def step(batch: Any) -> Any:
        x, y = batch
        scores = model(x).softmax(1)
        for name in ("mean", "max", "cat"):
            metrics[name].update(x.sum(1))
        metrics["auroc"].update(scores, y)
        metrics["accuracy"].update(scores, y)
        return metrics["accuracy"].compute().double()

    shown = []
    for batch in strategy.experimental_distribute_dataset(batches((8, 6, 2, 1))):
        shown.append(
            strategy.reduce("mean", strategy.run(step, args=(batch,)), axis=None).item()
        )
    values = {
        name: metric.compute().double().sum().item() for name, metric in metrics.items()
    }
    metrics["mean"].reset()
    return {
        **values,
        "rows": float(len(metrics["cat"].compute())),
        **{f"shown {i}": s for i, s in enumerate(shown)},
    }


def of_metrics(replicas: int) -> dict[str, float]:
    return metrics_of(strategy_of(replicas))


class Trainer:
    """Keeps its last loss, and counts its steps."""

    def __init__(self) -> None:
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.steps = 0
        self.loss: Any = None

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model, *batch)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()
        self.steps += 1


def of_trainers(replicas: int) -> tuple[int, int, dict[str, torch.Tensor]]:
    strategy = strategy_of(replicas)
    with strategy.scope():
        trainer = Trainer()
    for batch in strategy.experimental_distribute_dataset(batches()):
        strategy.run(trainer.step, args=(batch,))
    return (
        trainer.steps,
        len(strategy.experimental_local_results(trainer.loss)),
        trainer.model.state_dict(),
    )


def of_different_models(what: str) -> None:
    strategy = strategy_of(1)
    rank = strategy.extended._workers.index
    with strategy.scope():
        model = nn.Linear(3, 2 + (rank if what == "shape" else 0))
        more = [nn.Linear(1, 1) for _ in range(rank if what == "number" else 0)]
    strategy.run(lambda: model(torch.ones(1, 3)).sum().backward())
    del more


def of_equal_settings() -> float:
    """A setting that the workers have alike, with entries in different orders.

    Each has put them in another order.
    """
    strategy = strategy_of(1)
    entries = [("a", 1), ("b", 2)]
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["extra"] = dict(
        entries if strategy.extended._workers.index else entries[::-1]
    )

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    strategy.run(step)
    return float(model.weight.sum())


def of_different(what: str, replicas: int) -> None:
    """Steps of which each worker does something else to what all share."""
    strategy = strategy_of(replicas)
    rank = strategy.extended._workers.index
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    if what == "a mode" and rank:
        model.eval()

    num_runs = 0

    def step() -> None:
        nonlocal num_runs
        num_runs += 1
        optimizer.zero_grad()
        if what == "an idle reader" and rank == 1 and num_runs <= replicas:
            assert model.bias.grad is None
        else:
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
        if what == "a setting":
            optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
        elif what == "an argument":
            plateau.step(rank + 1.0)
        elif what == "a cleared gradient":
            assert model.weight.grad is not None
            if rank:
                model.weight.grad = None
        elif what == "a frozen parameter" and rank:
            model.weight.requires_grad_(False)
        optimizer.step()

    if what == "a setting between runs":
        strategy.run(step)
        optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
        before = model.weight.tolist()
        try:
            strategy.run(step)
        finally:
            assert model.weight.tolist() == before
    strategy.run(step)
    # What one replica has done is heard of at the next exchange.
    strategy.run(step if replicas == 1 else lambda: None)


def of_attributes(replicas: int) -> list[str]:
    """What a run warns of, whose forward keeps an average and a count in attributes.

    It is a moving average; these are plain attributes.
    """

    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.average, self.calls = 0.0, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.average = 0.9 * self.average + 0.1 * float(x.mean())
            return x * self.weight

    strategy = strategy_of(replicas)
    model = strategy.distribute_module(Averaging())
    (batch,) = strategy.experimental_distribute_dataset(
        [torch.arange(4.0).unsqueeze(1)]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", torchstrategy.ReplicaBufferWarning)
        for _ in range(2):
            strategy.run(lambda x: model(x).detach(), args=(batch,))
    return [
        str(one.message)
        for one in caught
        if one.category is torchstrategy.ReplicaBufferWarning
    ]


@dataclass
class Evaluation:
    """What a step of an evaluation returns."""

    loss: torch.Tensor
    scores: torch.Tensor


def of_dataclasses(replicas: int) -> list[Any]:
    strategy = strategy_of(replicas)
    found = []
    for batch in strategy.experimental_distribute_dataset(
        [torch.arange(9.0), torch.arange(1.0)]
    ):
        results = strategy.run(
            lambda rows: Evaluation(rows.sum().reshape(1), rows * 2), args=(batch,)
        )
        gathered = strategy.gather(results, axis=0)
        found.append(
            (
                gathered.scores.tolist(),
                strategy.reduce("sum", results, axis=0).loss.item(),
            )
        )
    return found


def of_objects(replicas: int) -> list[list[Any]]:
    """Texts, ids and dicts of the rows of uneven batches; some workers have none."""
    strategy = strategy_of(replicas)
    names = ["cat", "dog"]

    def step(rows: torch.Tensor) -> Any:
        ids = [int(row) for row in rows]
        texts = [names[i % 2] for i in ids]
        dicts = [
            {"text": text, "id": i, "more": [None] * (i % 3)}
            for text, i in zip(texts, ids, strict=True)
        ]
        return {
            "texts": texts,
            "ids": ids,
            "dicts": dicts,
            "none": [None] * len(ids),
            "few": [i for i in ids if not i],
        }

    found = []
    for size in (9, 1, 4):
        for batch in strategy.experimental_distribute_dataset([torch.arange(size)]):
            gathered = strategy.gather(strategy.run(step, args=(batch,)), axis=0)
            found.append(
                [gathered[name] for name in ("texts", "ids", "dicts", "none", "few")]
            )
    return found


def of_loaded_texts(replicas: int) -> list[list[str]]:
    strategy = strategy_of(replicas)
    loader = torch.utils.data.DataLoader(
        [(i, f"row {i}") for i in range(7)], batch_size=3
    )
    return [
        strategy.gather(batch[1], axis=0)
        for batch in strategy.experimental_distribute_dataset(loader)
    ]


class Unsendable:
    pass


def of_unsendable_objects(one_only: bool) -> tuple[str, str, float]:
    """Objects of a class, and another axis; then whether the strategy can be used."""
    strategy = strategy_of(1)
    is_bad = not one_only or strategy.extended._workers.index == 1
    told = []
    for made, axis in (
        ([Unsendable()] if is_bad else ["text"], 0),
        (["text"], 1 if is_bad else 0),
    ):
        try:
            strategy.gather(strategy.run(lambda made=made: list(made)), axis=axis)
            told.append("nothing")
        except (TypeError, ValueError) as error:
            told.append(f"{type(error).__name__}: {error}")
    total = strategy.reduce("sum", strategy.run(lambda: torch.ones(()) * 1), axis=None)
    return told[0], told[1], total.item()
