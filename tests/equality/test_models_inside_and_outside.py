"""A model is the user's own outside of replicas and the replica's own inside.

Both are freed when they go.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import textwrap
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conditions import without_simulated_devices
from nets import F64, Net, outputs, train, trained
from problems import (
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
    sgd,
    where_it_is,
)
from processes import python
from topologies import SIMULATED, central_with_copies
from torchstrategy._turns.switch import IN_TURNS

# ---- outside of replicas


@pytest.mark.parametrize("was_run", [False, True], ids=["new", "was_run"])
def test_outside_of_replicas_a_model_is_the_users_own(make, was_run):
    strategy = make(3)
    if was_run:
        model, optimizer, twin, plain = trained(strategy)
    else:
        (model, optimizer), (twin, plain) = built(strategy, Net, sgd)
    assert type(model) is Net and isinstance(model, Net)
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]
    assert all(type(p) is nn.Parameter and p.is_leaf for p in model.parameters())
    assert type(optimizer) is torch.optim.SGD
    assert list(model.state_dict()) == list(twin.state_dict())
    assert [name for name, _ in model.named_buffers()] == [
        name for name, _ in twin.named_buffers()
    ]
    twin.to(model.scale.device)  # where parameters print that they are there
    assert repr(model) == repr(twin) and str(optimizer) == str(plain)
    assert vars(model).keys() == vars(twin).keys()
    assert vars(optimizer).keys() == vars(plain).keys()
    assert model.calls == twin.calls
    assert model.forward_fn.__self__ is model
    assert model.all_blocks[0] is model.blocks[0]
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    assert_close(parameters(model), parameters(twin), "parameters", 1e-10)

    copied = copy.deepcopy(model)
    assert type(copied) is Net and all(
        type(m).__module__ != "torchstrategy" for m in copied.modules()
    )
    assert all(type(p) is nn.Parameter for p in copied.parameters())
    x = data(7)[0].to(model.scale.device)
    torch.testing.assert_close(copied(x), twin(x))
    assert b"torchstrategy" not in pickle.dumps(model)
    assert type(pickle.loads(pickle.dumps(model))) is Net
    assert b"torchstrategy" not in pickle.dumps(optimizer)

    buffer = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer
    )
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    twin.load_state_dict(loaded["model"])
    plain.load_state_dict(loaded["optimizer"])
    torch.testing.assert_close(twin(x), model(x))


@pytest.mark.slow
@without_simulated_devices
def test_what_was_saved_loads_where_the_library_is_not_installed(tmp_path):
    strategy = central_with_copies(3)
    for name, build in {
        "plain": mlp,
        "normalised": lambda: nn.Sequential(mlp(), nn.BatchNorm1d(2, **F64)),
    }.items():
        with strategy.scope():
            model = build()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        strategy.run(
            lambda b, m=model, o=optimizer: train(m, o, b),
            args=(deal(strategy, data(8)),),
        )
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            tmp_path / f"{name}.state",
        )
        torch.save((model, optimizer), tmp_path / f"{name}.whole")
        torch.save(
            model(where_it_is(model, data(8))[0]).detach(), tmp_path / f"{name}.output"
        )
    program = f"""
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "torchstrategy":
                    raise ImportError("torchstrategy must not be needed")

        sys.meta_path.insert(0, Blocked())
        import torch
        from torch import nn

        for name in ("plain", "normalised"):
            start = {str(tmp_path)!r} + "/" + name
            state = torch.load(start + ".state", weights_only=True, map_location="cpu")
            model, optimizer = torch.load(start + ".whole", weights_only=False, map_location="cpu")
            assert type(model) is nn.Sequential and type(optimizer) is torch.optim.Adam, (model, optimizer)
            assert [id(p) for p in model.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            generator = torch.Generator().manual_seed(1008)
            x = torch.randn(8, 3, generator=generator, dtype=torch.float64) + torch.arange(8).unsqueeze(1) * 0.1
            torch.testing.assert_close(model(x), torch.load(start + ".output", map_location="cpu"))
            model(x).sum().backward()
            optimizer.step()
        assert "torchstrategy" not in sys.modules
        print("loaded")
    """  # noqa: E501
    done = python("-c", textwrap.dedent(program))
    assert done.stdout.strip() == "loaded", done.stderr


def test_plain_training_goes_on_where_replicas_left_off_and_the_other_way_round(make):
    strategy = make(3)
    model, optimizer, twin, plain = trained(strategy)
    for k in range(3):
        batch = data(7, seed=10 + k)
        if k == 1:
            strategy.run(
                lambda b: train(model, optimizer, b), args=(deal(strategy, batch),)
            )
        else:
            train(model, optimizer, where_it_is(model, batch))
        train(twin, plain, batch)
    assert_close(parameters(model), parameters(twin), "mixed training", 1e-10)


def test_nothing_of_a_failed_step_stays_in_the_model(make):
    strategy = make(3)
    model, optimizer, _, _ = trained(strategy)

    def fails() -> None:
        model.train(False)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        strategy.run(fails)
    assert type(model) is Net and type(optimizer) is torch.optim.SGD
    assert all(type(m).__qualname__ == type(m).__name__ for m in model.modules())
    assert model.training
    assert outputs(strategy, lambda: str(model.training)) in (["True"] * 3, ["True"])


# ---- inside a replica


def test_inside_a_replica_every_way_to_reach_into_a_model_reaches_the_replicas_own(
    make,
):
    strategy = make(3)
    model, _, twin, _ = trained(strategy)
    inputs = data(5)[0]

    def facts(model: Any) -> dict[str, Any]:
        x = inputs.to(model.scale.device)
        sequential, blocks, heads = model.encoder, model.blocks, model.heads
        return {
            "call": model(x),
            "method": model.encode(x),
            "stored method": model.forward_fn(model.encode(x)),
            "parameter": model.scale,
            "buffer": model.offset,
            "names": [name for name, _ in model.named_parameters()],
            "modules": [name for name, _ in model.named_modules()],
            "children": [name for name, _ in model.named_children()],
            "keys": list(model.state_dict()),
            "lengths": [len(sequential), len(blocks), len(heads), len(model.shifts)],
            "index": sequential[0](x),
            "last": blocks[-1].weight,
            "slice": sequential[:2](x),
            "key": heads["a"].weight,
            "contains": ["a" in heads, "c" in heads],
            "iterated": [block.weight for block in blocks],
            "dict items": [key for key, _ in heads.items()],
            "get_submodule": model.get_submodule("encoder.0").weight,
            "get_parameter": model.get_parameter("encoder.0.weight"),
            "plain list": [block.weight for block in model.all_blocks],
            "same": [
                model.all_blocks[0] is model.blocks[0],
                next(iter(model.parameters())) is model.scale,
            ],
            "printed": repr(model).replace(f" ({model.scale.device})", ""),
            "is": [
                isinstance(model, Net),
                isinstance(sequential, nn.Sequential),
                model.__class__.__name__,
            ],
            "attribute": [model.training, model.head, model.settings["gain"]],
            "hasattr": [
                hasattr(model, "scale"),
                hasattr(model, "nonsense"),
                getattr(model, "nonsense", 7),
            ],
            "vector": nn.utils.parameters_to_vector(model.parameters()),
            "dir": sorted(
                name
                for name in dir(model)
                if name in ("scale", "encoder", "offset", "encode", "calls")
            ),
            "functional": torch.func.functional_call(
                model, {"scale": torch.zeros(2, **F64)}, (x,)
            ),
        }

    def step() -> None:
        with torch.no_grad():
            results.append((facts(model), [p.data_ptr() for p in model.parameters()]))

    results: list[Any] = []
    with torch.no_grad():
        wanted = facts(twin)
    strategy.run(step)
    assert len(results) == 3
    for r, (got, _) in enumerate(results):
        for name, value in wanted.items():
            _same(got[name], value, f"replica {r}, {name}")
    own = {tuple(addresses) for _, addresses in results}
    # Replicas on one device share the parameters.
    assert len(own) == (3 if SIMULATED else 1)


def _same(got: Any, wanted: Any, case: str) -> None:
    if isinstance(
        wanted[0] if isinstance(wanted, list) and wanted else wanted, torch.Tensor
    ):
        close(got, wanted, msg=lambda m: f"{case}: {m}")
    else:
        assert got == wanted, case


def test_a_deep_copy_or_a_pickle_that_is_made_in_a_replica_is_plain(make):
    strategy = make(3)
    model, _, twin, _ = trained(strategy)
    x = data(3)[0]
    made: list[Any] = []

    def step() -> None:
        copied = copy.deepcopy(model)
        copied(x.to(copied.scale.device)).sum().backward()
        made.append(
            (
                copied,
                pickle.loads(pickle.dumps(model)),
                pickle.dumps(model.state_dict()),
            )
        )

    strategy.run(step)
    for copied, pickled, state in made:
        for thing in (copied, pickled):
            assert type(thing) is Net and all(
                type(p) is nn.Parameter for p in thing.parameters()
            )
            assert [type(m) for m in thing.modules()] == [
                type(m) for m in twin.modules()
            ]
            close(thing(x.to(thing.scale.device)), twin(x))
        assert copied.scale.grad is not None
        assert b"torchstrategy" not in state
    assert len({id(copied) for copied, _, _ in made}) == 3


def test_a_submodule_that_is_captured_by_itself_is_the_replicas_own(make):
    strategy = make(3)
    for way in (
        "submodule",
        "bound method",
        "list",
        "model as argument",
        "model as keyword",
    ):
        (model, _), (twin, _) = built(strategy, Net, None)
        encoder, decode, parts = (
            model.encoder,
            model.decode,
            [model.encode, model.decode],
        )

        def step(
            b: Any,
            m: Any = None,
            way: str = way,
            model: Any = model,
            references_of: Any = (encoder, decode, parts),
        ) -> None:
            encoder, decode, parts = references_of
            if way == "submodule":
                h = encoder(b[0])
                for block in model.blocks:
                    h = h + block(h).tanh()
                out = decode(h)
            elif way in ("bound method", "list"):
                out = parts[1](parts[0](b[0]))
            else:
                out = m(b[0])
            F.mse_loss(out, b[1]).backward()

        batch = data(7)
        if way == "model as argument":
            strategy.run(step, args=(deal(strategy, batch), model))
        elif way == "model as keyword":
            strategy.run(step, args=(deal(strategy, batch),), kwargs={"m": model})
        else:
            strategy.run(step, args=(deal(strategy, batch),))
        mse(twin, batch).backward()
        assert_close(gradients(model), gradients(twin), way)


def test_modules_that_share_parts_share_them_in_a_replica(make):
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(3, 4, **F64)
            self.first = nn.Sequential(self.trunk, nn.Linear(4, 2, **F64))
            self.second = nn.Sequential(self.trunk, nn.Linear(4, 2, **F64))
            self.second[1].weight = self.first[1].weight  # tied

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) * self.second(x)

    for n in (1, 3):
        compare(make, n, train, build=Shared)


def test_two_models_that_share_a_submodule_share_it_in_a_replica(make):
    strategy = make(3)
    torch.manual_seed(0)
    with strategy.scope():
        trunk = nn.Linear(3, 4, **F64)
        first, second = (
            nn.Sequential(trunk, nn.Linear(4, 2, **F64)),
            nn.Sequential(trunk, nn.Linear(4, 2, **F64)),
        )
        tail = nn.Linear(4, 2, **F64)
        tail.weight = first[1].weight  # tied to another model
        parts = [trunk, first[1], second[1], tail]
        optimizer = torch.optim.SGD(
            [p for part in parts for p in part.parameters() if p is not tail.weight],
            lr=0.1,
        )
    twins = copy.deepcopy(parts)
    plain = torch.optim.SGD(
        [p for part in twins for p in part.parameters() if p is not twins[3].weight],
        lr=0.1,
    )

    def step(f: Any, s: Any, t: Any, u: Any, o: Any, b: Any) -> None:
        o.zero_grad()
        F.mse_loss(f(b[0]) * s(b[0]) + t(u(b[0])), b[1]).backward()
        o.step()

    twin_first, twin_second = (
        nn.Sequential(twins[0], twins[1]),
        nn.Sequential(twins[0], twins[2]),
    )
    for k in range(3):
        batch = data(7, seed=k)
        strategy.run(
            lambda b: step(first, second, tail, trunk, optimizer, b),
            args=(deal(strategy, batch),),
        )
        step(
            twin_first,
            twin_second,
            twins[3],
            twins[0],
            plain,
            where_it_is(trunk, batch),
        )
    for part, twin in zip(parts, twins, strict=True):
        assert_close(parameters(part), parameters(twin), "shared", 1e-10)
    shared: list[Any] = []
    strategy.run(
        lambda: shared.append(
            (
                first[0] is second[0],
                first[0].weight is trunk.weight,
                tail.weight is first[1].weight,
            )
        )
    )
    assert shared == [(True, True, True)] * 3


def test_modules_in_plain_lists_dicts_and_closures_are_the_replicas_own(make):
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(3, 4, **F64)
            self.branches = [nn.Linear(4, 2, **F64), nn.Linear(4, 2, **F64)]
            self.table = {"gate": (nn.Linear(4, 2, **F64),)}
            self.closure = lambda x: self.stem(x).tanh()

        def everything(self) -> list[Any]:
            parts = [*self.branches, *self.table["gate"]]
            return [
                *self.parameters(),
                *(p for part in parts for p in part.parameters()),
            ]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.closure(x)
            return sum(branch(h) for branch in self.branches) * self.table["gate"][0](h)

    strategy = make(3)
    for is_given in (False, True):
        torch.manual_seed(0)
        twin = Hidden()
        torch.manual_seed(0)
        if is_given:
            model = strategy.distribute_module(Hidden())
            optimizer = strategy.distribute_optimizer(
                torch.optim.SGD(model.everything(), lr=0.1)
            )
        else:
            with strategy.scope():
                model = Hidden()
                optimizer = torch.optim.SGD(model.everything(), lr=0.1)
        plain = torch.optim.SGD(twin.everything(), lr=0.1)
        for k in range(2):
            strategy.run(
                lambda b, m=model, o=optimizer: train(m, o, b),
                args=(deal(strategy, data(7, seed=k)),),
            )
            train(twin, plain, data(7, seed=k))
        for got, wanted in zip(model.everything(), twin.everything(), strict=True):
            close(
                got,
                wanted,
                msg=lambda m, given=is_given: f"distribute_module: {given}. {m}",
            )


def test_a_module_that_an_object_of_the_users_holds_is_trained(make):
    """`distribute_module` did not find it.

    Each replica had a copy that nobody updated, and nobody was told.
    """

    class Holder:
        def __init__(self) -> None:
            self.layers = [nn.Linear(3, 3, **F64)]

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3, 2, **F64)
            self.holder = Holder()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.holder.layers[0](x).tanh())

    strategy, twin = make(3), Around()
    model = strategy.distribute_module(copy.deepcopy(twin))
    ours, plain = (
        [*m.parameters(), *m.holder.layers[0].parameters()] for m in (model, twin)
    )
    optimizer = strategy.distribute_optimizer(torch.optim.SGD(ours, lr=0.1))
    for k in range(2):
        strategy.run(
            lambda b: train(model, optimizer, b),
            args=(deal(strategy, data(7, seed=k)),),
        )
        train(twin, torch.optim.SGD(plain, lr=0.1), data(7, seed=k))
    for got, wanted in zip(ours, plain, strict=True):
        close(got, wanted)


def test_an_optimizer_that_a_module_has_through_another_object_is_the_users(make):
    """As in PyTorch Lightning, `self.trainer.optimizer`.

    The replica had a copy, which belonged to no scope.
    """

    class Holder:
        optimizer: Any = None

    strategy = make(3)
    with strategy.scope():
        model = mlp()
        model.trainer = Holder()
        model.trainer.optimizer = sgd(model)
    before = model[0].weight.detach().clone()

    def step(batch: Any) -> None:
        mse(model, batch).backward()
        model.trainer.optimizer.step()

    strategy.run(step, args=(deal(strategy, data(7)),))
    assert not torch.equal(model[0].weight, before)


def test_a_deep_copy_that_is_made_in_the_scope_belongs_to_the_strategy(make):
    # Target networks, ensembles and averaged models are made so.
    strategy = make(3)
    torch.manual_seed(0)
    with strategy.scope():
        base = mlp()
        model = copy.deepcopy(base)
        optimizer = sgd(model)
    twin = copy.deepcopy(base)
    plain = sgd(twin)
    for k in range(2):
        strategy.run(
            lambda b: train(model, optimizer, b),
            args=(deal(strategy, data(7, seed=k)),),
        )
        train(twin, plain, where_it_is(twin, data(7, seed=k)))
    assert_close(parameters(model), parameters(twin), "a deep copy", 1e-10)


def test_activation_checkpointing_gives_the_gradient_of_the_whole_batch(make):
    from torch.utils.checkpoint import checkpoint

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        h = checkpoint(model.encode, batch[0], use_reentrant=False)
        F.mse_loss(checkpoint(model.decode, h, use_reentrant=True), batch[1]).backward()
        optimizer.step()

    compare(make, 3, step, build=Net)


# ---- memory


@pytest.mark.parametrize("build", [mlp], ids=["sequential"])
@pytest.mark.parametrize("first", ["model", "strategy", "together"])
def test_a_model_and_a_strategy_that_are_dropped_are_freed(make, first, build):
    strategy = make(3)
    model, optimizer, twin, plain = trained(strategy, build)
    results = strategy.run(
        lambda b: model(b[0]).square().sum(1), args=(deal(strategy, data(7)),)
    )
    strategy.reduce("mean", results, axis=0).backward()
    of_replicas: list[Any] = []
    strategy.run(lambda: of_replicas.append(weakref.ref(next(model.parameters()))))
    watched = {
        "model": weakref.ref(model),
        "submodule": weakref.ref(
            next(m for m in model.modules() if isinstance(m, nn.Linear))
        ),
        "parameter": weakref.ref(next(model.parameters())),
        "optimizer": weakref.ref(optimizer),
        "strategy": weakref.ref(strategy),
        "extended": weakref.ref(strategy.extended),
    }
    del results, twin, plain
    if first == "model":
        del model, optimizer
        gc.collect()
        alive = [
            name
            for name in ("model", "submodule", "parameter", "optimizer")
            if watched[name]() is not None
        ]
        assert not alive, f"the strategy keeps {alive}"
        assert all(p() is None for p in of_replicas), (
            "the strategy keeps the replicas' parameters"
        )
        strategy.run(lambda: None)
        del strategy
    elif first == "strategy":
        del strategy
        gc.collect()
        assert watched["strategy"]() is None and watched["extended"]() is None
        assert IN_TURNS or all(p() is None for p in of_replicas)
        train(model, optimizer, where_it_is(model, data(7)))  # which is plain
        del model, optimizer
    else:
        del model, optimizer, strategy
    gc.collect()
    alive = [name for name, reference in watched.items() if reference() is not None]
    assert not alive and all(p() is None for p in of_replicas), f"still alive: {alive}"


def test_models_that_come_and_go_leave_nothing_behind(make):
    strategy = make(2)
    gone = []
    for _ in range(5):
        with strategy.scope():
            model = mlp()
            optimizer = sgd(model)
        strategy.run(
            lambda b, m=model, o=optimizer: train(m, o, b),
            args=(deal(strategy, data(4)),),
        )
        gone.append(weakref.ref(model))
        del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None] * 5


def test_a_tensor_that_comes_to_lie_where_an_earlier_one_lay_is_not_taken_for_it(make):
    strategy = make(2)
    with strategy.scope():
        model = nn.Linear(1, 1)
        model.table = torch.zeros(2)
    found = []
    strategy.run(lambda: None)
    former, model.table = id(model.table), None
    strategy.run(lambda: None)
    others = []
    while len(others) < 1000 and id(table := torch.ones(2)) != former:
        others.append(table)
    model.table = [table]
    strategy.run(lambda: found.append(model.table[0].tolist()))
    assert found == [[1.0, 1.0]] * strategy.num_replicas_in_sync
