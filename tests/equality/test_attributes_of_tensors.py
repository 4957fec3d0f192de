"""Attributes that a program sets on tensors: `weight.is_expert = True`.

Every replica's tensor has them.

A model scaled its layers by `getattr(self.weight, "gain", 1.0)`, and a step left
parameters with `no_decay` out of its penalty. Replicas' tensors had no such attributes,
so that all of them took the default, without a word.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrategy
from conditions import only_in_turns, only_with_copies
from topologies import (
    central,
    central_with_copies,
    compute_devices,
    mirrored,
    mirrored_with_copies,
)
from torchstrategy import ReplicaBufferWarning

F64 = {"dtype": torch.float64}
STRATEGIES: dict[str, Callable[[], torchstrategy.Strategy]] = {
    "central": lambda: central(3),
    "central with copies": lambda: central_with_copies(2),
    "mirrored": lambda: mirrored(3),
    "mirrored with copies": lambda: mirrored_with_copies(2),
    "one device": lambda: torchstrategy.OneDeviceStrategy("cpu"),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> torchstrategy.Strategy:
    return STRATEGIES[request.param]()


class Scale:
    """An object of the user's."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Net(nn.Module):
    """Reads `gain` of a parameter, a buffer, and tensors in plain attributes.

    Each has its own way to count.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.inner = nn.Linear(3, 2, **F64)
        with torch.no_grad():
            for parameter in self.inner.parameters():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator, **F64)
                )
        self.register_buffer("shift", torch.full((2,), 0.25, **F64))
        self.kept = torch.full((2,), 0.5, **F64)
        self.table = {"deep": [torch.full((2,), 0.75, **F64)]}

    def marked(self) -> list[Any]:
        return [
            self.inner.weight,
            self.inner.bias,
            self.shift,
            self.kept,
            self.table["deep"][0],
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        for index, tensor in enumerate(self.marked(), 1):
            gain: Any = getattr(tensor, "gain", 1.0)
            if isinstance(gain, dict):
                gain = gain["deep"][0]
            if isinstance(gain, Scale):
                gain = gain.factor
            if callable(gain):
                gain = gain()
            out = out + tensor.sum() * gain * 0.1 * index
        return out


Step = Callable[[Any, Any, Any], Any]
Change = Callable[[Any, int], None]


def step_of(model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    out = model(batch[0])
    (out - batch[1]).square().mean().backward()
    optimizer.step()
    return out.detach()


def batches(count: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(5, width, generator=generator, **F64) for width in (3, 2))
        for _ in range(count)
    ]


def nothing(model: Any, k: int) -> None:
    pass


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(
    strategy: torchstrategy.Strategy,
    prepare: Callable[[Any], None],
    between: Change = nothing,
    step: Step = step_of,
    build: Callable[[], nn.Module] = Net,
) -> tuple[Any, Any]:
    """Trains in plain PyTorch and under the strategy, which have to agree.

    Returns both models.
    """
    plain = build()
    prepare(plain)
    plain_optimizer = sgd(plain)
    ours = build()
    prepare(ours)
    ours = strategy.distribute_module(ours)
    optimizer = strategy.distribute_optimizer(sgd(ours))
    data = batches()
    for k, (batch, dealt) in enumerate(
        zip(data, strategy.experimental_distribute_dataset(data), strict=True)
    ):
        expected = step(plain, plain_optimizer, batch)
        found = strategy.run(lambda dealt: step(ours, optimizer, dealt), args=(dealt,))
        torch.testing.assert_close(strategy.gather(found, axis=0).cpu(), expected)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name].cpu(), value)
        between(plain, k)
        between(ours, k)
    return ours, plain


# What they are


GAINS: dict[str, Callable[[Any], Any]] = {
    "number": lambda like: 3.0,
    "tensor": lambda like: torch.tensor(3.0, device=like.device, **F64),
    "object": lambda like: Scale(3.0),
    "containers": lambda like: {"deep": [3.0]},
    "containers of tensors": lambda like: {
        "deep": [torch.tensor(3.0, device=like.device, **F64)]
    },
    "function": lambda like: lambda: 3.0,
    "tensor with attributes": lambda like: _with_attribute(
        torch.tensor(3.0, device=like.device, **F64)
    ),
}


def _with_attribute(tensor: Any) -> Any:
    tensor.note = {"why": [tensor]}
    return tensor


@pytest.mark.parametrize("kind", GAINS)
def test_forward_reads_them(strategy: torchstrategy.Strategy, kind: str) -> None:
    def prepare(model: Any) -> None:
        for tensor in model.marked():
            tensor.gain = GAINS[kind](tensor)

    train(strategy, prepare)


@pytest.mark.parametrize("kind", GAINS)
def test_they_are_set_changed_and_deleted_between_runs(
    strategy: torchstrategy.Strategy, kind: str
) -> None:
    """Nobody had set any when the copies were made."""

    def between(model: Any, k: int) -> None:
        for tensor in model.marked():
            if k == 0:
                tensor.gain = GAINS[kind](tensor)
            elif k == 1:
                tensor.gain = (
                    tensor.gain * 2
                    if isinstance(tensor.gain, (float, torch.Tensor))
                    else 0.5
                )
            elif k == 2:
                del tensor.gain

    train(strategy, lambda model: None, between)


def test_what_they_hold_is_written_in_place_between_runs(
    strategy: torchstrategy.Strategy,
) -> None:
    def prepare(model: Any) -> None:
        weight, bias, shift, kept, deep = model.marked()
        weight.gain = torch.ones((), **F64)
        bias.gain = {"deep": [1.0]}
        shift.gain = Scale(1.0)
        kept.gain = torch.ones((), **F64)
        deep.gain = {"deep": [torch.ones((), **F64)]}

    def between(model: Any, k: int) -> None:
        weight, bias, shift, kept, deep = model.marked()
        weight.gain.add_(1)
        bias.gain["deep"][0] += 1.0
        shift.gain.factor *= 2
        kept.gain = kept.gain + 1
        deep.gain["deep"][0].mul_(2)

    train(strategy, prepare, between)


def test_the_names_that_the_library_used_are_the_users(
    strategy: torchstrategy.Strategy,
) -> None:
    """`hasattr(p, "position")` was True in a step.

    An attribute of this name would have replaced the library's.
    """
    names = [
        "run",
        "position",
        "delivers",
        "called",
        "over",
        "call_in_backward",
        "variable",
    ]

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        seen = [name for p in model.parameters() for name in names if hasattr(p, name)]
        assert seen == model.expected, seen
        assert [vars(p) for p in model.parameters()] == [
            dict.fromkeys(model.expected, 7),
            {},
        ]
        return step_of(model, optimizer, batch)

    def prepare(model: Any) -> None:
        model.expected = []

    def between(model: Any, k: int) -> None:
        model.expected = names
        for name in names:
            setattr(model.inner.weight, name, 7)

    train(strategy, prepare, between, step)


def test_a_function_means_the_parts_of_its_replica(
    strategy: torchstrategy.Strategy,
) -> None:
    """A loader is a bound method of the layer; a rule closes over a parameter.

    It is another parameter.
    """

    def prepare(model: Any) -> None:
        model.inner.weight.gain = lambda: model.inner.bias.sum()
        model.inner.bias.gain = model.half

    class Numbered(Net):
        def half(self) -> torch.Tensor:
            return self.inner.weight.sum() * 0.5

    train(strategy, prepare, build=Numbered)


def test_they_name_other_parts_of_the_model(strategy: torchstrategy.Strategy) -> None:
    def prepare(model: Any) -> None:
        model.inner.weight.tied = model.inner.bias
        model.inner.weight.layer = [model.inner]
        model.kept.itself = model.kept

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        weight = model.inner.weight
        assert weight.tied is model.inner.bias
        assert weight.layer[0] is model.inner
        assert model.kept.itself is model.kept
        return step_of(model, optimizer, batch)

    train(strategy, prepare, step=step)


def test_a_module_that_only_an_attribute_of_a_parameter_holds(
    strategy: torchstrategy.Strategy,
) -> None:
    class Adapted(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.inner.weight.adapter(x)

    def prepare(model: Any) -> None:
        model.inner.weight.adapter = nn.Linear(3, 2, **F64).requires_grad_(False)
        nn.init.constant_(model.inner.weight.adapter.weight, 0.3)
        nn.init.constant_(model.inner.weight.adapter.bias, 0.1)

    if compute_devices(1)[0].type == "cpu":  # else the user would move it
        train(strategy, prepare, build=Adapted)


def test_a_buffer_keeps_them_when_distribute_module_moves_it(
    strategy: torchstrategy.Strategy,
) -> None:
    model = Net()
    model.shift = nn.Buffer(torch.ones(2, **F64), persistent=False)
    model.shift.gain = 3.0  # type: ignore[attr-defined]
    strategy.distribute_module(model)
    assert model.shift.gain == 3.0  # type: ignore[attr-defined]
    assert isinstance(model.shift, nn.Buffer)
    assert strategy.experimental_local_results(
        strategy.run(lambda: isinstance(model.shift, nn.Buffer))
    )[-1]


# What a step does with them


def test_a_step_chooses_parameters(strategy: torchstrategy.Strategy) -> None:
    """Of a penalty, of a norm that is clipped, and of what is scaled."""

    def prepare(model: Any) -> None:
        model.inner.weight.is_expert = True
        model.inner.bias.no_decay = True

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        penalty = sum(
            p.square().sum()
            for p in model.parameters()
            if not getattr(p, "no_decay", False)
        )
        out = model(batch[0])
        ((out - batch[1]).square().mean() + 0.1 * penalty).backward()
        experts = [p for p in model.parameters() if hasattr(p, "is_expert")]
        nn.utils.clip_grad_norm_(experts, 0.1)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if getattr(p, "no_decay", False):
                    p.grad.mul_(0.5)
        optimizer.step()
        return out.detach()

    train(strategy, prepare, step=step)


def test_a_step_chooses_from_a_list_that_was_made_before(
    strategy: torchstrategy.Strategy,
) -> None:
    """The list has the user's own parameters.

    What a step sets on one of these is its replica's, as on any other.
    """

    def prepare(model: Any) -> None:
        model.inner.weight.factor = torch.tensor(0.5, **F64)

    plain, ours = Net(), Net()
    for model in (plain, ours):
        prepare(model)
    strategy.distribute_module(ours)
    plain_optimizer, optimizer = sgd(plain), strategy.distribute_optimizer(sgd(ours))
    of_plain, of_ours = list(plain.parameters()), list(ours.parameters())

    def step(model: Any, optimizer: Any, batch: Any, parameters: list[Any]) -> Any:
        optimizer.zero_grad()
        (model(batch[0]) - batch[1]).square().mean().backward()
        for p in parameters:
            p.norm = p.grad.square().sum().sqrt().item()
            assert vars(p)["norm"] == p.norm
            if hasattr(p, "factor"):
                p.grad.mul_(p.factor)
                p.seen = getattr(p, "seen", 0) + 1
                p.passing = 1
                del p.passing
                assert not hasattr(p, "passing")
        optimizer.step()

    data = batches()
    for batch, dealt in zip(
        data, strategy.experimental_distribute_dataset(data), strict=True
    ):
        step(plain, plain_optimizer, batch, of_plain)
        strategy.run(lambda dealt: step(ours, optimizer, dealt, of_ours), args=(dealt,))
        for one, other in zip(of_ours, of_plain, strict=True):
            torch.testing.assert_close(one.detach().cpu(), other.detach())
            assert one.norm == pytest.approx(other.norm)
            assert vars(one).keys() == vars(other).keys()
            assert getattr(one, "seen", 0) == getattr(other, "seen", 0)


def test_a_step_sets_changes_and_deletes_them(strategy: torchstrategy.Strategy) -> None:
    """After the run the user's tensors have what they have in plain PyTorch.

    The next run goes on from there.
    """

    def prepare(model: Any) -> None:
        for tensor in model.marked():
            tensor.gain, tensor.first = 1.0, True
        model.inner.weight.history = []
        model.shift.total = torch.zeros((), **F64)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        for index, tensor in enumerate(model.marked()):
            tensor.gain = tensor.gain + 0.5 * index
            tensor.calls = getattr(tensor, "calls", 0) + 1
            if hasattr(tensor, "first"):
                del tensor.first
        model.inner.weight.history.append(len(model.inner.weight.history))
        model.shift.total.add_(1)
        model.kept.last = torch.full(
            (), 2.0 * model.kept.calls, device=batch[0].device, **F64
        )
        return step_of(model, optimizer, batch)

    ours, plain = train(strategy, prepare, step=step)
    for one, other in zip(ours.marked(), plain.marked(), strict=True):
        assert vars(one).keys() == vars(other).keys()
        assert (one.gain, one.calls) == (other.gain, other.calls)
    assert ours.inner.weight.history == plain.inner.weight.history == [0, 1, 2, 3]
    assert ours.shift.total.item() == plain.shift.total.item() == 4
    assert ours.kept.last.item() == plain.kept.last.item() == 8
    assert ours.kept.last.device == next(ours.parameters()).device


def test_what_a_step_has_set_first_is_deleted_between_runs(
    strategy: torchstrategy.Strategy,
) -> None:
    """No tensor had attributes before the first run.

    What it set was deleted, and the next run went on with it.
    """
    model = strategy.distribute_module(nn.Linear(2, 1))

    def step() -> None:
        model.weight.count = getattr(model.weight, "count", 0) + 1

    strategy.run(step)
    assert model.weight.count == 1
    del model.weight.count
    strategy.run(step)
    assert model.weight.count == 1


@only_with_copies
def test_replicas_set_other_numbers(strategy: torchstrategy.Strategy) -> None:
    """The first replica's are kept, with a warning, as for any plain attribute."""
    model = strategy.distribute_module(Net())

    def step() -> None:
        context = torchstrategy.get_replica_context()
        assert context is not None
        model.inner.weight.rank = context.replica_id_in_sync_group + 5  # type: ignore[assignment]

    if strategy.num_replicas_in_sync == 1:
        strategy.run(step)
    else:
        with pytest.warns(
            ReplicaBufferWarning, match=r"attribute Net\.inner\.weight\.rank"
        ):
            strategy.run(step)
    assert model.inner.weight.rank == 5


@only_in_turns
def test_replicas_set_other_numbers_and_go_on_with_them(
    strategy: torchstrategy.Strategy,
) -> None:
    model: Any = strategy.distribute_module(Net())

    def step() -> int:
        model.inner.weight.rank = getattr(model.inner.weight, "rank", _number()) + 5
        return model.inner.weight.rank

    strategy.run(step)
    count = strategy.num_replicas_in_sync
    kept = strategy.experimental_local_results(model.inner.weight.rank)
    assert kept == tuple(range(5, 5 + count))
    seen = strategy.experimental_local_results(strategy.run(step))
    assert seen == tuple(range(10, 10 + count))


@only_with_copies
@pytest.mark.filterwarnings("ignore::torchstrategy.ReplicaBufferWarning")
def test_what_only_another_replica_sets_is_gone_in_the_next_run(
    strategy: torchstrategy.Strategy,
) -> None:
    """The user's tensor has what the first replica's has.

    That is nothing here, and then no replica has it.
    """
    model: Any = strategy.distribute_module(Net())

    def step(sets: bool) -> bool:
        had = hasattr(model.inner.weight, "mark")
        if sets and _number() == 1:
            model.inner.weight.mark = 3
        return had

    for sets in (False, True, False):
        assert not any(
            strategy.experimental_local_results(strategy.run(step, args=(sets,)))
        )
        assert not vars(model.inner.weight)


@only_in_turns
def test_what_only_another_replica_sets_all_have_in_the_next_run(
    strategy: torchstrategy.Strategy,
) -> None:
    model: Any = strategy.distribute_module(Net())

    def step() -> Any:
        had = getattr(model.inner.weight, "mark", 0)
        if _number() == 1:
            model.inner.weight.mark = 3
        return had

    left = 3 if strategy.num_replicas_in_sync > 1 else 0
    for expected in (0, left):
        found = strategy.run(step)
        assert set(strategy.experimental_local_results(found)) == {expected}
        assert vars(model.inner.weight) == ({"mark": 3} if left else {})


def _number() -> int:
    context = torchstrategy.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def test_an_output_is_one_for_each_replica(strategy: torchstrategy.Strategy) -> None:
    model = strategy.distribute_module(Net())
    data = batches(1)
    (dealt,) = strategy.experimental_distribute_dataset(data)

    def keep(batch: Any) -> None:
        model.inner.weight.output = model(batch[0]).detach()  # type: ignore[assignment]

    def kept() -> Any:
        return model.inner.weight.output

    strategy.run(keep, args=(dealt,))
    found = strategy.experimental_local_results(strategy.run(kept))
    torch.testing.assert_close(
        torch.cat([one.cpu() for one in found]), Net()(data[0][0]).detach()
    )


def test_a_buffer_or_attribute_that_the_step_replaces(
    strategy: torchstrategy.Strategy,
) -> None:
    """The new tensor has what the step has set on it, and nothing of the old one."""

    class Anew(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = self.shift, self.kept
            self.shift, self.kept = self.shift * 1.1, self.kept * 0.9
            for old, new in zip(before, (self.shift, self.kept), strict=True):
                assert not vars(new)
                new.gain = getattr(old, "gain", 1.0) + 1.0  # type: ignore[attr-defined]
                new.parts = [len(getattr(old, "parts", []))]  # type: ignore[attr-defined]
            return super().forward(x)

    def prepare(model: Any) -> None:
        model.shift.gain = model.shift.only_old = 2.0
        model.kept.gain = model.kept.only_old = 2.0

    def between(model: Any, k: int) -> None:
        model.shift.gain *= 2

    ours, plain = train(strategy, prepare, between, build=Anew)
    assert vars(ours.shift) == vars(plain.shift)
    assert vars(ours.kept) == vars(plain.kept)


def test_a_buffer_that_a_step_replaces_now_and_then(
    strategy: torchstrategy.Strategy,
) -> None:
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        if model.turn % 2:
            model.shift = model.shift + 0.125
        model.shift.turn = model.turn
        model.turn += 1
        return step_of(model, optimizer, batch)

    def prepare(model: Any) -> None:
        model.turn = 0
        model.shift.gain = 4.0

    def between(model: Any, k: int) -> None:
        model.shift.gain = 1.5 + k

    ours, plain = train(strategy, prepare, between, step)
    assert vars(ours.shift) == vars(plain.shift)


# What the user does with the tensors


def test_the_user_replaces_and_moves_tensors(strategy: torchstrategy.Strategy) -> None:
    def between(model: Any, k: int) -> None:
        if k == 0:
            model.shift = _marked(model.shift + 1, 2.0)
            model.kept = _marked(model.kept + 1, 0.5)
        elif k == 1:
            weight = model.inner.weight
            weight.data = weight.data.clone()
            weight.gain = 5.0
        else:
            model.inner.bias.gain = 2.5
            model.load_state_dict(
                {name: value * 0.5 for name, value in model.state_dict().items()}
            )

    train(strategy, lambda model: None, between)


def _marked(tensor: Any, gain: float) -> Any:
    tensor.gain = gain
    return tensor


def test_two_parameters_are_swapped(strategy: torchstrategy.Strategy) -> None:
    """torch exchanges their attributes, too."""

    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Parameter(torch.full((2, 3), 0.3, **F64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x @ self.other.t() * getattr(
                self.other, "gain", 1.0
            )

    def between(model: Any, k: int) -> None:
        fresh = nn.Parameter(
            torch.full((2, 3), 0.1 * k, dtype=torch.float64, device=model.other.device)
        )
        fresh.gain = 7.0 + k  # type: ignore[attr-defined]
        torch.utils.swap_tensors(model.other, fresh)

    train(strategy, lambda model: setattr(model.other, "gain", 2.0), between, build=Two)


def test_copies_and_pickles_in_a_step_are_those_of_plain_pytorch(
    strategy: torchstrategy.Strategy,
) -> None:
    """`copy.deepcopy` keeps attributes of tensors but not of parameters.

    A pickle keeps both.
    """

    def prepare(model: Any) -> None:
        for tensor in model.marked():
            tensor.gain = 3.0

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        copied = copy.deepcopy(model)
        assert [hasattr(tensor, "gain") for tensor in copied.marked()] == [
            False,
            False,
            True,
            True,
            True,
        ]
        pickled = pickle.loads(pickle.dumps(model.inner.weight))
        assert type(pickled) is nn.Parameter
        assert vars(pickled) == {"gain": 3.0}
        made = type(model.inner.weight)(torch.zeros(2))
        assert type(made) is nn.Parameter
        assert made.grad is None
        return step_of(model, optimizer, batch)

    ours, _ = train(strategy, prepare, step=step)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert [tensor.gain for tensor in loaded.marked()] == [3.0] * 5


@only_with_copies
def test_what_cannot_learn_is_refused() -> None:
    strategy = central(2)
    for place in (0, 2, 3):
        model = Net()
        model.marked()[place].extra = torch.ones(2, requires_grad=True)
        strategy = central(2)
        with pytest.raises(
            TypeError,
            match=r"\.extra is a tensor that requires grad in a plain attribute",
        ):
            strategy.distribute_module(model)
            strategy.run(lambda model=model: model.inner.weight.sum().item())


@only_in_turns
@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_tensor_that_requires_grad_learns(
    strategy: torchstrategy.Strategy, place: int
) -> None:
    """On a parameter, a buffer, and a tensor in a plain attribute."""

    def made(model: Any) -> tuple[Any, Any, Any]:
        holder = model.marked()[place]
        holder.extra = torch.ones(
            2, requires_grad=True, device=model.inner.weight.device, **F64
        )
        optimizer = torch.optim.SGD([*model.parameters(), holder.extra], lr=0.05)
        return model, optimizer, holder

    def step(model: Any, optimizer: Any, holder: Any, batch: Any) -> None:
        optimizer.zero_grad()
        (model(batch[0]) * holder.extra - batch[1]).square().mean().backward()
        optimizer.step()

    plain, ours = made(Net()), made(strategy.distribute_module(Net()))
    strategy.distribute_optimizer(ours[1])
    data = batches()
    for batch, dealt in zip(
        data, strategy.experimental_distribute_dataset(data), strict=True
    ):
        step(*plain, batch)
        strategy.run(lambda dealt: step(*ours, dealt), args=(dealt,))
        one, other = ours[2].extra, plain[2].extra
        torch.testing.assert_close(one.detach().cpu(), other.detach())
        torch.testing.assert_close(one.grad.cpu(), other.grad)


def test_a_failed_run_takes_them_back() -> None:
    strategy = mirrored(2)
    model = strategy.distribute_module(Net())
    model.inner.weight.gain = 2.0  # type: ignore[assignment]

    def fails() -> None:
        model.inner.weight.gain = 3.0  # type: ignore[assignment]
        model.shift.note = "new"
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        strategy.run(fails)
    assert model.inner.weight.gain == 2.0  # type: ignore[comparison-overlap]
    assert not vars(model.shift)
    assert (
        strategy.experimental_local_results(
            strategy.run(lambda: model.inner.weight.gain)
        )[-1]
        == 2.0
    )


# DataParallel


@pytest.mark.parametrize("with_gradients", [True, False])
def test_data_parallel(with_gradients: bool) -> None:
    plain, ours = Net(), Net()
    for model in (plain, ours):
        for index, tensor in enumerate(model.marked()):
            tensor.gain = index + 2.0
    devices = compute_devices(3)
    ours.to(devices[0])
    _gain_again(ours)
    parallel = torchstrategy.DataParallel(ours, devices)
    for batch in batches(3):
        with torch.set_grad_enabled(with_gradients):
            torch.testing.assert_close(
                parallel(batch[0].to(devices[0])).cpu(), plain(batch[0])
            )
        for model in (plain, ours):
            for tensor in model.marked():
                tensor.gain += 0.5


def _gain_again(model: Any) -> None:
    model.shift.gain = 4.0


# Variables


@pytest.mark.parametrize("synchronization", ["AUTO", "ON_READ"])
def test_attributes_of_variables(
    strategy: torchstrategy.Strategy, synchronization: str
) -> None:
    """In a module, and by itself."""
    with strategy.scope():
        variable: Any = torchstrategy.Variable(
            torch.ones(2, **F64),
            synchronization=torchstrategy.VariableSynchronization[synchronization],
            aggregation=torchstrategy.VariableAggregation.MEAN,
            trainable=False,
        )
        model: Any = nn.Module()
        model.held = variable

    def read() -> Any:
        return (
            getattr(model.held, "gain", None),
            getattr(variable, "gain", None),
            vars(model.held).get("gain"),
        )

    def seen() -> Any:
        return strategy.experimental_local_results(strategy.run(read))[-1]

    variable.gain = 3.0
    assert seen() == (3.0, 3.0, 3.0)
    variable.gain = 4.0
    assert seen() == (4.0, 4.0, 4.0)
    del variable.gain
    assert seen() == (None, None, None)
    assert not vars(variable)
