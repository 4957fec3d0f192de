"""A model of a strategy is the user's own: outside of replicas in every way, inside them as that replica's own."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import textwrap
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
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode

import torchstrategy
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
    where_it_is,
)
from processes import python
from topologies import SIMULATED, central, central_in_one_place, central_with_copies
from torchstrategy import RunOptions
from torchstrategy._core.devices import in_use

F64: dict[str, Any] = {"dtype": torch.float64}


class Net(nn.Module):
    """Something of everything that people put into a module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4, **F64), nn.Tanh(), nn.Dropout(0.0))
        self.blocks = nn.ModuleList([nn.Linear(4, 4, **F64) for _ in range(2)])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2, **F64), "b": nn.Linear(4, 2, **F64)})
        self.scale = nn.Parameter(torch.ones(2, **F64))
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(2, **F64))])
        self.register_buffer("offset", torch.zeros(2, **F64))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.head = "a"
        self.calls = 0
        self.forward_fn = self.decode
        self.all_blocks = [block for block in self.blocks]
        self.settings = {"gain": 1.0}

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        h = self.encoder(x)
        for block in self.all_blocks:
            h = h + block(h).tanh()
        return h

    def decode(self, h: torch.Tensor) -> torch.Tensor:
        return self.heads[self.head](h) * self.scale * self.settings["gain"] + self.shifts[0] + self.offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.forward_fn(self.encode(x))


def train(model: Any, optimizer: Any, batch: Any) -> None:
    """The step that most tests train by."""
    optimizer.zero_grad()
    mse(model, batch).backward()
    optimizer.step()


def trained(strategy: torchstrategy.Strategy, build: Callable[[], nn.Module] = Net) -> tuple[Any, Any, Any, Any]:
    """A model that has been run, and its twin that plain PyTorch has trained."""
    (model, optimizer), (twin, plain) = built(strategy, build, sgd)
    for k in range(2):
        strategy.run(lambda b: train(model, optimizer, b), args=(deal(strategy, data(7, seed=k)),))
        train(twin, plain, data(7, seed=k))
    return model, optimizer, twin, plain


def outputs(strategy: torchstrategy.Strategy, fn: Callable[[], Any]) -> list[Any]:
    """What `fn` returns in each replica."""
    return list(strategy.experimental_local_results(strategy.run(fn)))


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
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in twin.named_buffers()]
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
    assert type(copied) is Net and all(type(m).__module__ != "torchstrategy" for m in copied.modules())
    assert all(type(p) is nn.Parameter for p in copied.parameters())
    x = data(7)[0].to(model.scale.device)
    torch.testing.assert_close(copied(x), twin(x))
    assert b"torchstrategy" not in pickle.dumps(model)
    assert type(pickle.loads(pickle.dumps(model))) is Net
    assert b"torchstrategy" not in pickle.dumps(optimizer)

    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    twin.load_state_dict(loaded["model"])
    plain.load_state_dict(loaded["optimizer"])
    torch.testing.assert_close(twin(x), model(x))


@pytest.mark.slow
def test_what_was_saved_loads_where_the_library_is_not_installed(tmp_path):
    strategy = central_with_copies(3)
    for name, build in {"plain": mlp, "normalised": lambda: nn.Sequential(mlp(), nn.BatchNorm1d(2, **F64))}.items():
        with strategy.scope():
            model = build()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        strategy.run(lambda b, m=model, o=optimizer: train(m, o, b), args=(deal(strategy, data(8)),))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{name}.state")
        torch.save((model, optimizer), tmp_path / f"{name}.whole")
        torch.save(model(where_it_is(model, data(8))[0]).detach(), tmp_path / f"{name}.output")
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
    """
    done = python("-c", textwrap.dedent(program))
    assert done.stdout.strip() == "loaded", done.stderr


def test_plain_training_goes_on_where_replicas_left_off_and_the_other_way_round(make):
    strategy = make(3)
    model, optimizer, twin, plain = trained(strategy)
    for k in range(3):
        batch = data(7, seed=10 + k)
        if k == 1:
            strategy.run(lambda b: train(model, optimizer, b), args=(deal(strategy, batch),))
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


def test_inside_a_replica_every_way_to_reach_into_a_model_reaches_the_replicas_own(make):
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
            "same": [model.all_blocks[0] is model.blocks[0], next(iter(model.parameters())) is model.scale],
            "printed": repr(model).replace(f" ({model.scale.device})", ""),
            "is": [isinstance(model, Net), isinstance(sequential, nn.Sequential), model.__class__.__name__],
            "attribute": [model.training, model.head, model.settings["gain"]],
            "hasattr": [hasattr(model, "scale"), hasattr(model, "nonsense"), getattr(model, "nonsense", 7)],
            "vector": nn.utils.parameters_to_vector(model.parameters()),
            "dir": sorted(name for name in dir(model) if name in ("scale", "encoder", "offset", "encode", "calls")),
            "functional": torch.func.functional_call(model, {"scale": torch.zeros(2, **F64)}, (x,)),
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
    assert len(own) == (3 if SIMULATED else 1)  # replicas on one device share the parameters


def _same(got: Any, wanted: Any, case: str) -> None:
    if isinstance(wanted[0] if isinstance(wanted, list) and wanted else wanted, torch.Tensor):
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
        made.append((copied, pickle.loads(pickle.dumps(model)), pickle.dumps(model.state_dict())))

    strategy.run(step)
    for copied, pickled, state in made:
        for thing in (copied, pickled):
            assert type(thing) is Net and all(type(p) is nn.Parameter for p in thing.parameters())
            assert [type(m) for m in thing.modules()] == [type(m) for m in twin.modules()]
            close(thing(x.to(thing.scale.device)), twin(x))
        assert copied.scale.grad is not None
        assert b"torchstrategy" not in state
    assert len({id(copied) for copied, _, _ in made}) == 3


def test_a_submodule_that_is_captured_by_itself_is_the_replicas_own(make):
    strategy = make(3)
    for way in ("submodule", "bound method", "list", "model as argument", "model as keyword"):
        (model, _), (twin, _) = built(strategy, Net, None)
        encoder, decode, parts = model.encoder, model.decode, [model.encode, model.decode]

        def step(
            b: Any, m: Any = None, way: str = way, model: Any = model, references_of: Any = (encoder, decode, parts)
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
        first, second = nn.Sequential(trunk, nn.Linear(4, 2, **F64)), nn.Sequential(trunk, nn.Linear(4, 2, **F64))
        tail = nn.Linear(4, 2, **F64)
        tail.weight = first[1].weight  # tied to another model
        parts = [trunk, first[1], second[1], tail]
        optimizer = torch.optim.SGD([p for part in parts for p in part.parameters() if p is not tail.weight], lr=0.1)
    twins = copy.deepcopy(parts)
    plain = torch.optim.SGD([p for part in twins for p in part.parameters() if p is not twins[3].weight], lr=0.1)

    def step(f: Any, s: Any, t: Any, u: Any, o: Any, b: Any) -> None:
        o.zero_grad()
        F.mse_loss(f(b[0]) * s(b[0]) + t(u(b[0])), b[1]).backward()
        o.step()

    twin_first, twin_second = nn.Sequential(twins[0], twins[1]), nn.Sequential(twins[0], twins[2])
    for k in range(3):
        batch = data(7, seed=k)
        strategy.run(lambda b: step(first, second, tail, trunk, optimizer, b), args=(deal(strategy, batch),))
        step(twin_first, twin_second, twins[3], twins[0], plain, where_it_is(trunk, batch))
    for part, twin in zip(parts, twins, strict=True):
        assert_close(parameters(part), parameters(twin), "shared", 1e-10)
    shared: list[Any] = []
    strategy.run(
        lambda: shared.append((first[0] is second[0], first[0].weight is trunk.weight, tail.weight is first[1].weight))
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
            return [*self.parameters(), *(p for part in parts for p in part.parameters())]

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
            optimizer = strategy.distribute_optimizer(torch.optim.SGD(model.everything(), lr=0.1))
        else:
            with strategy.scope():
                model = Hidden()
                optimizer = torch.optim.SGD(model.everything(), lr=0.1)
        plain = torch.optim.SGD(twin.everything(), lr=0.1)
        for k in range(2):
            strategy.run(lambda b, m=model, o=optimizer: train(m, o, b), args=(deal(strategy, data(7, seed=k)),))
            train(twin, plain, data(7, seed=k))
        for got, wanted in zip(model.everything(), twin.everything(), strict=True):
            close(got, wanted, msg=lambda m, given=is_given: f"distribute_module: {given}. {m}")


def test_an_optimizer_that_a_module_has_through_another_object_is_the_users(make):
    """As in PyTorch Lightning, `self.trainer.optimizer`: the replica had a copy, which belonged to no scope."""

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
        strategy.run(lambda b: train(model, optimizer, b), args=(deal(strategy, data(7, seed=k)),))
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


# ---- what is written between steps


def _eval(model: Any) -> None:
    model.eval()


def _dropout(model: Any) -> None:
    model.encoder[2].p = 1.0


def _freeze(model: Any) -> None:
    model.encoder.requires_grad_(False)


def _thaw(model: Any) -> None:
    model.encoder.requires_grad_(True)


def _swap(model: Any) -> None:
    torch.manual_seed(5)
    model.heads["a"] = nn.Linear(4, 2, **F64)


def _swap_by_attribute(model: Any) -> None:
    torch.manual_seed(5)
    model.encoder = nn.Sequential(nn.Linear(3, 4, **F64), nn.ReLU())


def _insert(model: Any) -> None:
    torch.manual_seed(5)
    model.encoder.append(nn.Linear(4, 4, **F64))


def _new_parameter(model: Any) -> None:
    model.scale = nn.Parameter(torch.full((2,), 3.0, **F64))


def _drop_bias(model: Any) -> None:
    model.heads["a"].bias = None


def _load(model: Any) -> None:
    torch.manual_seed(6)
    model.load_state_dict(Net().state_dict())


def _assign(model: Any) -> None:
    torch.manual_seed(6)
    model.load_state_dict(Net().state_dict(), assign=True)


def _initialise(model: Any) -> None:
    torch.manual_seed(7)
    for p in model.parameters():
        nn.init.normal_(p)


def _write_in_place(model: Any) -> None:
    with torch.no_grad():
        model.scale.mul_(3)
        model.heads["a"].weight[0] = 1.0


def _put_data(model: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 2


def _put_data_twice(model: Any) -> None:
    # The second tensor may well get the memory that the first assignment has set free.
    for _ in range(2):
        for p in model.parameters():
            p.data = p.data * 2


def _transpose_data(model: Any) -> None:
    for block in model.blocks:
        block.weight.data = block.weight.data.t()


def _prune_data(model: Any) -> None:
    head = model.heads["a"]
    head.weight.data, head.bias.data = head.weight.data[:1], head.bias.data[:1]


def _halve(model: Any) -> None:
    model.float()


def _there_and_back(model: Any) -> None:
    model.to(torch.bfloat16)
    model.double()


def _write_buffer(model: Any) -> None:
    model.offset.fill_(2.0)


def _put_buffer(model: Any) -> None:
    model.offset = torch.full((2,), 4.0, **F64)


def _put_buffer_data(model: Any) -> None:
    model.offset.data = torch.full((2,), 4.0, **F64)


def _attribute(model: Any) -> None:
    model.head = "b"


def _setting(model: Any) -> None:
    model.settings["gain"] = 5.0


def _new_settings(model: Any) -> None:
    model.settings = {"gain": 5.0}


def _method(model: Any) -> None:
    model.forward_fn = lambda h: model.decode(h) * 2


def _list_of_modules(model: Any) -> None:
    model.all_blocks.reverse()
    model.all_blocks.append(model.blocks[0])


def _hook(model: Any) -> None:
    model.encoder.register_forward_hook(lambda module, args, out: out * 2)


def _pre_hook(model: Any) -> None:
    model.encoder[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _backward_hook(model: Any) -> None:
    model.heads["a"].register_full_backward_hook(lambda module, grad_in, grad_out: (2 * grad_in[0],))


def _hook_that_was_removed(model: Any) -> None:
    handle = model.encoder.register_forward_hook(lambda module, args, out: out * 2)
    handle.remove()


def _weight_norm(model: Any) -> None:
    parametrizations.weight_norm(model.heads["a"])


WRITES = [
    _eval, _dropout, _freeze, _thaw, _swap, _swap_by_attribute, _insert, _new_parameter, _drop_bias, _load, _assign,
    _initialise, _write_in_place, _put_data, _put_data_twice, _transpose_data, _prune_data, _halve, _there_and_back,
    _write_buffer, _put_buffer, _put_buffer_data, _attribute, _setting, _new_settings, _method, _list_of_modules,
    _hook, _pre_hook, _backward_hook, _hook_that_was_removed, _weight_norm,
]  # fmt: skip


def _output(model: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = model(x.to(dtype))
    out.square().mean().backward()
    return out.detach()


@pytest.mark.parametrize("write", WRITES, ids=[write.__name__.strip("_") for write in WRITES])
def test_what_is_written_between_steps_reaches_every_replica(make, write):
    for n in (1, 3):
        strategy = make(n)
        model, _, twin, _ = trained(strategy)
        x = data(6)[0]
        for again in range(2):
            for m in (model, twin):
                m.zero_grad()
                if not again:
                    with in_use(m.scale.device):
                        write(m)
            dtype = next(model.parameters()).dtype

            got = strategy.gather(strategy.run(_output, args=(model, deal(strategy, x), dtype)), axis=0)
            wanted = _output(twin, x, dtype)
            case = f"{write.__name__}, {n} replicas, run {again}"
            tolerance = 1e-10 if dtype == torch.float64 else 2e-6
            assert_close({"output": got}, {"output": wanted}, case, tolerance, tolerance)
            assert_close(gradients(model), gradients(twin), case, tolerance, tolerance)


def test_parameters_that_are_replaced_twice_reach_every_replica_wherever_they_come_to_lie(make):
    strategy = make(2)
    with strategy.scope():
        model = nn.Linear(3, 100_000, **F64)  # large, so that memory that is set free is soon given out again
    x = data(2)[0]

    def output() -> torch.Tensor:
        return model(x.to(model.weight.device)).detach()

    for _ in range(5):
        for p in model.parameters():
            place = p.data_ptr()
            p.data = -p.data
            more = [p.data * 2]
            while more[-1].data_ptr() != place and len(more) < 20:
                more.append(p.data * 2)  # until one gets the memory that was set free, if it was
            p.data = more[-1]
        wanted = output()
        for got in outputs(strategy, output):
            close(got, wanted)


def test_a_hook_that_is_removed_between_steps_is_gone_from_every_replica(make):
    strategy = make(3)
    model, _, _, _ = trained(strategy)
    calls: list[int] = []
    handle = model.encoder.register_forward_hook(lambda module, args, out: calls.append(replica_id()))
    batch = deal(strategy, data(3))
    strategy.run(lambda b: model(b[0]).detach(), args=(batch,))
    assert sorted(calls) == [0, 1, 2]
    handle.remove()
    strategy.run(lambda b: model(b[0]).detach(), args=(batch,))
    assert sorted(calls) == [0, 1, 2]


def test_a_hook_records_every_replica_in_the_users_own_recorder(make):
    class Recorder:
        def __init__(self) -> None:
            self.shapes: list[Any] = []

        def __call__(self, module: Any, args: Any, out: Any) -> None:
            self.shapes.append(tuple(out.shape))

        def method(self, module: Any, args: Any, out: Any) -> None:
            self.shapes.append(tuple(out.shape))

    for way in ("callable", "method"):
        strategy = make(3)
        model, _, _, _ = trained(strategy)
        recorder = Recorder()
        model.encoder.register_forward_hook(recorder if way == "callable" else recorder.method)
        strategy.run(lambda b, model=model: model(b[0]).detach(), args=(deal(strategy, data(7)),))
        assert sorted(recorder.shapes) == [(1, 4), (3, 4), (3, 4)], way


class Configured(nn.Module):
    """Does what a configuration says that several of its modules hold."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(gain=1.0)
        self.layer = nn.Linear(3, 2, **F64)
        self.layer.config = self.config

    def forward(self, x: Any) -> Any:
        return self.layer(x) * self.layer.config.gain


def test_what_is_written_on_a_configuration_reaches_every_replica(make):
    strategy = make(2)
    with strategy.scope():
        model = Configured()
    x = data(4)[0]
    for gain in (1.0, 3.0, 3.0, 5.0):
        model.config.gain = gain
        got = strategy.gather(strategy.run(lambda rows: model(rows).detach(), args=(deal(strategy, x),)), axis=0)
        close(got, gain * model.layer(x.to(model.layer.weight.device)))


class HookedByItself(nn.Module):
    """Puts a hook on its layer in the first forward, and notes that it has."""

    def __init__(self, **notes: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, **F64)
        vars(self).update(notes)

    def forward(self, x: Any) -> Any:
        if not getattr(self, "is_hooked", False):
            self.layer.register_forward_hook(lambda module, args, out: out + 1)
            self.is_hooked = True
        return self.layer(x)


@pytest.mark.parametrize("notes", [{}, {"is_hooked": False}], ids=["first_noted_in_forward", "noted_from_the_start"])
def test_hooks_that_a_forward_puts_are_there_in_every_replica_and_outside(make, notes):
    strategy = make(2)
    with strategy.scope():
        model = HookedByItself(**notes)
    weight, bias = model.layer.weight, model.layer.bias + 1
    for rows in (1, 4, 1, 4):  # of the first batch, replica 1 gets no row
        x = data(rows)[0]
        got = strategy.gather(strategy.run(lambda rows: model(rows).detach(), args=(deal(strategy, x),)), axis=0)
        close(got, F.linear(x.to(weight.device), weight, bias))
    close(model(x.to(weight.device)), F.linear(x.to(weight.device), weight, bias))


class ReplicaSet(TorchDispatchMode):
    """Counts the tensors that are copied on one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.tensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if threading.get_ident() == self.thread:
            if name in ("copy_", "_to_copy", "clone"):
                self.tensors += 1
            elif name == "_foreach_copy_":
                self.tensors += len(args[0])
        return func(*args, **(kwargs or {}))


def copied_by(fn: Callable[[], Any]) -> int:
    with ReplicaSet() as copies:
        fn()
    return copies.tensors


def test_evaluation_and_accumulation_copy_nothing_and_a_written_parameter_is_copied_alone():
    strategy = central_with_copies(3)
    model, optimizer, _, _ = trained(strategy)
    batch = deal(strategy, data(7))
    total = len(list(model.parameters()))
    # Between devices, the parameters of a replica go together, and so do its gradients.
    moved = 3 if SIMULATED else 0
    brought = 3 * total + moved

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            strategy.run(lambda b: model(b[0]), args=(batch,))

    def accumulate() -> None:
        strategy.run(lambda b: mse(model, b).backward(), args=(batch,))

    def write_one() -> None:
        with torch.no_grad():
            model.scale.add_(1.0)
        strategy.run(lambda b: model(b[0]).detach(), args=(batch,))

    evaluate()  # brings what the last update has written
    assert [copied_by(evaluate) for _ in range(3)] == [0, 0, 0]
    accumulate()
    assert [copied_by(accumulate) for _ in range(3)] == [moved] * 3
    assert copied_by(write_one) == 3
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0)
    assert copied_by(evaluate) == brought
    model.train()
    assert (
        copied_by(lambda: strategy.run(lambda b: train(model, optimizer, b), args=(batch,))) == brought - 3 * 2 + moved
    ), "all that the optimizer wrote, which is not the head that was not used"


def test_parameters_on_the_parameter_device_are_never_copied():
    strategy = central_in_one_place(3)
    model, optimizer, _, _ = trained(strategy)
    batch = deal(strategy, data(7))
    assert copied_by(lambda: strategy.run(lambda b: train(model, optimizer, b), args=(batch,))) == 0


# ---- what a step writes


def test_what_a_step_writes_on_plain_attributes_reaches_the_original_once(make):
    strategy = make(3)
    model, _, twin, _ = trained(strategy)
    assert model.calls == twin.calls == 2
    x = data(2)[0]

    def step(m: Any) -> None:
        m.train(False)
        m.head = "b"
        m.encoder[2].p = 0.25
        m.note = "new"
        for _ in range(3):
            m(x.to(m.scale.device))

    strategy.run(lambda: step(model))
    step(twin)
    assert (
        (model.calls, model.head, model.note, model.encoder[2].p)
        == (5, "b", "new", 0.25)
        == (
            twin.calls,
            twin.head,
            twin.note,
            twin.encoder[2].p,
        )
    )
    assert [m.training for m in model.modules()] == [m.training for m in twin.modules()]
    assert outputs(strategy, lambda: f"{model.calls} {model.training} {model.encoder[2].p}") in (
        ["5 False 0.25"],
        ["5 False 0.25"] * 3,
    )


def test_a_counter_in_a_module_without_parameters_counts_a_run_once(make):
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return F.mse_loss(a, b)

    strategy = make(3)
    with strategy.scope():
        criterion, model = Loss(), mlp()
    for _ in range(2):
        strategy.run(lambda b: criterion(model(b[0]), b[1]).backward(), args=(deal(strategy, data(7)),))
    assert criterion.calls == 2


class Ema(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = mlp()
        self.average = copy.deepcopy(self.model).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def _plain_or_refused(make: Any, step: Any, **kwargs: Any) -> None:
    """A step's own writes on parameters do what they do in plain PyTorch, or raise. Never is anything else silent."""
    try:
        compare(make, 3, step, **kwargs)
    except RuntimeError as error:
        assert "parameter" in str(error), error


def test_a_moving_average_of_parameters_that_the_step_keeps_is_updated_once_or_refused(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, p in zip(model.average.parameters(), model.model.parameters(), strict=True):
                kept.mul_(0.9).add_(p, alpha=0.1)

    _plain_or_refused(make, step, build=Ema, optimizer=lambda m: torch.optim.SGD(m.model.parameters(), lr=0.1))


def test_clipping_weights_in_the_step_clips_the_users_weights_or_is_refused(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)

    _plain_or_refused(make, step)


def test_clipping_the_data_of_weights_in_the_step_clips_the_users_weights_or_is_refused(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        for p in model.parameters():  # as in the paper on Wasserstein GANs
            p.data.clamp_(-0.2, 0.2)

    _plain_or_refused(make, step)


def test_an_update_by_hand_in_the_step_is_made_once_or_refused(make):
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        model.zero_grad()
        mse(model, batch).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad

    _plain_or_refused(make, step, optimizer=None)


def test_loading_a_state_in_the_step_changes_the_users_model_or_is_refused(make):
    torch.manual_seed(3)
    state = mlp().state_dict()

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        model.load_state_dict(state)
        mse(model, batch).backward()

    _plain_or_refused(make, step)


def test_an_embedding_with_a_largest_norm_keeps_it_or_is_refused(make):
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 2, max_norm=0.3, **F64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x)

    batches = [(torch.tensor([0, 1, 2, 3, 3, 8, 1]), data(7)[1]), (torch.tensor([5, 5, 5, 0, 2, 2, 7]), data(7)[1])]
    _plain_or_refused(make, train, build=Table, batches=batches)


# ---- buffers


def test_batch_norm_averages_statistics_by_share_and_applies_its_momentum_once(make):
    for momentum in (0.1, 0.5, None):
        for rows, pieces in [(8, [3, 3, 2]), (9, [3, 3, 3]), (5, [2, 2, 1])]:
            x = data(rows)[0]
            if pieces[-1] == 1:
                x = x.unsqueeze(-1).expand(-1, -1, 2).cumsum(-1)  # (rows, 3, 2): statistics of one row are enough
            for reduction in ("mean", "sum"):
                strategy = make(3)
                with strategy.scope():
                    layer = nn.BatchNorm1d(3, momentum=momentum, **F64)
                wanted = copy.deepcopy(layer).cpu()
                options = RunOptions(gradient_reduction=reduction)
                for _ in range(2):
                    strategy.run(lambda b, m=layer: m(b).detach(), args=(deal(strategy, x),), options=options)
                    parts = []
                    for piece in x.split(pieces):
                        part = copy.deepcopy(wanted)
                        part(piece)
                        parts.append(part)
                    for name in ("running_mean", "running_var"):
                        mean = sum(getattr(p, name) * k / rows for p, k in zip(parts, pieces, strict=True))
                        getattr(wanted, name).copy_(mean)
                    wanted.num_batches_tracked += 1
                case = f"momentum {momentum}, {rows} rows, {reduction}"
                assert_close(dict(layer.named_buffers()), dict(wanted.named_buffers()), case)
                assert int(layer.num_batches_tracked) == 2, case
                seen: list[Any] = []
                strategy.run(lambda m=layer, x=x, seen=seen: seen.append(m.eval()(x.to(m.weight.device))))
                for got in seen:
                    close(got, copy.deepcopy(wanted).eval()(x))


def test_batch_norm_counts_each_forward_of_a_step_and_a_model_in_evaluation_counts_none(make):
    strategy = make(3)
    with strategy.scope():
        layer = nn.BatchNorm1d(3, **F64)
    x = deal(strategy, data(9)[0])
    strategy.run(lambda b: [layer(b) for _ in range(3)] and None, args=(x,))
    assert int(layer.num_batches_tracked) == 3
    layer.eval()
    before = copy.deepcopy(dict(layer.named_buffers()))
    strategy.run(lambda b: layer(b).detach(), args=(x,))
    assert_close(dict(layer.named_buffers()), before, "evaluation")


def test_statistics_that_plain_training_has_written_reach_every_replica(make):
    layers: dict[str, Any] = {
        "batch_norm": (nn.BatchNorm1d(3, **F64), data(6)[0]),
        "instance_norm": (nn.InstanceNorm1d(3, track_running_stats=True, **F64), data(12)[0].view(6, 2, 3).mT),
    }
    for name, (layer, x) in layers.items():
        strategy = make(3)
        twin = nn.Sequential(layer)
        model = strategy.distribute_module(copy.deepcopy(twin))

        def normalised(m: nn.Module, x: torch.Tensor = x) -> torch.Tensor:
            return m(x.to(next(m.buffers()).device)).detach()

        strategy.run(lambda m=model: normalised(m.eval()))
        for _ in range(2):
            for m in (model, twin):
                normalised(m.train())  # outside of replicas
                m.eval()
            seen: list[torch.Tensor] = []
            strategy.run(lambda m=model, seen=seen: seen.append(normalised(m)))
            for got in seen:
                close(got, normalised(twin), msg=lambda text, name=name: f"{name}: {text}")


def test_batch_norm_ignores_a_replica_that_ran_without_rows_and_one_that_sat_out(make):
    x = torch.stack([data(4)[0], -data(4)[0]], -1)  # four rows on three replicas: 2, 2, 0
    for empty in (False, True):
        strategy = make(3)
        with strategy.scope():
            layer = nn.BatchNorm1d(3, **F64)
        parts = [copy.deepcopy(layer).cpu() for _ in range(2)]

        def step(b: torch.Tensor, layer: Any = layer) -> None:
            if len(b):
                layer(b)

        strategy.run(step, args=(deal(strategy, x),), options=RunOptions(run_empty_replicas=empty))
        for part, piece in zip(parts, x.split(2), strict=True):
            part(piece)
        for name in ("running_mean", "running_var"):
            close(getattr(layer, name), (getattr(parts[0], name) + getattr(parts[1], name)) / 2)
        assert int(layer.num_batches_tracked) == 1


@pytest.mark.filterwarnings("ignore::torchstrategy.ReplicaBufferWarning")
def test_a_buffer_that_is_no_running_statistic_is_that_of_the_first_replica(make):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("rows", torch.zeros(1))
            self.register_buffer("last", torch.zeros(1))
            self.register_buffer("later", None)

        def forward(self, x: torch.Tensor) -> None:
            self.rows += len(x)
            self.last = torch.full((1,), float(len(x)))
            self.later = torch.full((2,), float(len(x)))

    strategy = make(3)
    with strategy.scope():
        model = Counting()
    kept = model.rows
    for k in (1, 2):
        strategy.run(lambda b: model(b), args=(deal(strategy, torch.ones(7)),))
        assert (float(model.rows), float(model.last)) == (3.0 * k, 3.0)
    assert model.rows is kept
    assert model.later is not None and model.later.tolist() == [3.0, 3.0], (
        "a buffer that was None until the step set it"
    )


# ---- models


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **kwargs: Any) -> None:
        super().__init__()
        self.rnn = kind(3, 4, num_layers=2, batch_first=True, **F64, **kwargs)
        self.head = nn.Linear(4 * (2 if kwargs.get("bidirectional") else 1), 2, **F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(_sequences(x))[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 3, batch_first=True, **F64)
        self.head = nn.Linear(3, 2, **F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = _sequences(x)
        return self.head(self.attention(h, h, h)[0].mean(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, **F64)
        self.stem, self.head = nn.Linear(3, 4, **F64), nn.Linear(4, 2, **F64)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.stem(_sequences(x))).mean(1))


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, **F64)
        self.middle = nn.Linear(4, 4, **F64)
        self.out = nn.Linear(4, 5, bias=False, **F64)
        self.out.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.abs() * 10).long().remainder(5)
        return self.out(self.middle(self.table(words)).tanh()).mean(1)[:, :2]


class Upsampling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(1, 4, 3, stride=2, **F64)
        self.norm = nn.GroupNorm(2, 4, **F64)
        self.instance = nn.InstanceNorm1d(4, affine=True, **F64)
        self.down = nn.Conv1d(4, 2, 3, padding=1, **F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.instance(self.norm(self.up(x.unsqueeze(1)))).tanh()).square().mean(-1)


def _sequences(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x.sin(), x.cos()], 1)


def _parametrized(parametrize: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = mlp()
        parametrize(model[0])
        parametrize(model[2])
        return model

    return build


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "lstm": lambda: Recurrent(nn.LSTM),
    "lstm, bidirectional, projected": lambda: Recurrent(nn.LSTM, bidirectional=True, proj_size=0),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": Attending,
    "transformer": Transformer,
    "tied": TiedLanguageModel,
    "conv_transpose, group_norm, instance_norm": Upsampling,
    "weight_norm": _parametrized(parametrizations.weight_norm),
    "spectral_norm": _parametrized(parametrizations.spectral_norm),
    "orthogonal": _parametrized(parametrizations.orthogonal),
    "prelu, layer_norm": lambda: nn.Sequential(mlp(), nn.LayerNorm(2, **F64), nn.PReLU(**F64)),
    "batch_norm in evaluation": lambda: nn.Sequential(nn.BatchNorm1d(3, **F64).eval(), mlp()),
    "batch_norm without statistics, frozen": lambda: nn.Sequential(
        nn.BatchNorm1d(3, **F64).eval().requires_grad_(False), mlp()
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_on_replicas_as_it_does_in_plain_torch(make, name):
    for n in (1, 3):
        model, twin = compare(make, n, train, build=MODELS[name], case=name, relative=1e-9)
        assert_close(dict(model.named_buffers()), dict(twin.named_buffers()), f"{name}, buffers", 1e-9)
        assert list(model.state_dict()) == list(twin.state_dict())
        model.eval()
        twin.eval()
        close(*(m(where_it_is(m, data(5))[0]) for m in (model, twin)))


def test_a_recurrent_model_that_changes_its_dtype_between_steps_trains_on(make):
    strategy = make(3)
    (model, _), (twin, _) = built(strategy, lambda: Recurrent(nn.LSTM), None)
    for dtype in (torch.float64, torch.float32, torch.float64):
        for m in (model, twin):
            m.zero_grad()
            m.to(dtype)
        batch = data(7, dtype)
        strategy.run(lambda b: mse(model, b).backward(), args=(deal(strategy, batch),))
        mse(twin, batch).backward()
        assert_close(gradients(model), gradients(twin), f"{dtype}", 1e-6)


def test_batch_norm_models_train_on_replicas(make):
    strategy = make(3)
    build = lambda: nn.Sequential(nn.Linear(3, 4, **F64), nn.BatchNorm1d(4, **F64), nn.ReLU(), nn.Linear(4, 2, **F64))  # noqa: E731
    (model, optimizer), _ = built(strategy, build, sgd)
    batch = data(12)
    whole = where_it_is(model, batch)
    before = float(mse(model, whole).detach())
    model.train()
    for _ in range(30):
        strategy.run(lambda b: train(model, optimizer, b), args=(deal(strategy, batch),))
    assert int(model[1].num_batches_tracked) == 31
    assert float(mse(model, whole).detach()) < 0.7 * before


def test_copies_and_aliases_give_the_same_model_bit_for_bit():
    for name, build in {**MODELS, "batch_norm": lambda: nn.Sequential(nn.BatchNorm1d(3, **F64), mlp())}.items():
        states = []
        for maker in (central, central_with_copies):
            strategy = maker(3)
            torch.manual_seed(0)
            with strategy.scope():
                model = build()
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for k in range(3):
                strategy.run(lambda b, m=model, o=optimizer: train(m, o, b), args=(deal(strategy, data(8, seed=k)),))
            states.append(model.state_dict())
        for key, value in states[0].items():
            assert torch.equal(value.cpu(), states[1][key].cpu()), f"{name}: {key}"


# ---- what is refused


def refused(make: Any, build: Callable[[], nn.Module], match: str) -> None:
    """The model is refused at its first run, and is afterwards what it was."""
    strategy = make(3)
    with strategy.scope():
        model = build()
    with pytest.raises(TypeError, match=match):
        strategy.run(lambda: model(torch.ones(1, 3)))


def test_a_script_module_is_refused(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(3, 2))

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = scripted

    refused(make, Holder, r"Holder\.inner is a ScriptModule, of which replicas cannot have copies")


def test_a_module_made_in_inference_mode_is_refused_and_one_that_runs_in_it_is_not(make):
    strategy = make(3)
    with torch.inference_mode(), strategy.scope():
        model = mlp()
    with pytest.raises(TypeError, match=r"^Sequential\.0\.weight was made in torch\.inference_mode\(\)"):
        strategy.run(lambda b: model(b[0]), args=(deal(strategy, data(7)),))
    with strategy.scope():
        model = mlp()
    with torch.inference_mode():
        result = strategy.run(lambda b: model(b[0]), args=(deal(strategy, data(7)),))
    assert sum(len(rows) for rows in strategy.experimental_local_results(result)) == 7


def test_a_lazy_module_is_refused_until_it_has_seen_a_batch(make):
    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return nn.Sequential(nn.LazyLinear(2))

    refused(
        make,
        build,
        r"Sequential\.0\.weight has no shape yet: LazyLinear is lazy\. Run one batch through the module, outside",
    )
    strategy = make(3)
    with strategy.scope():
        model = build()
    with pytest.raises(TypeError, match="has no shape yet"):
        strategy.run(lambda: model(torch.ones(1, 3)))
    model(torch.ones(1, 3, device=model[0].weight.device))
    batch = data(7, torch.float32)
    strategy.run(lambda b: mse(model, b).backward(), args=(deal(strategy, batch),))
    twin = copy.deepcopy(model)
    mse(twin, where_it_is(twin, batch)).backward()
    assert_close(gradients(model), gradients(twin), "after the first batch")


class Attribute(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_a_tensor_that_requires_grad_in_a_plain_attribute_is_refused(make):
    refused(
        make,
        lambda: Attribute(log_t=torch.zeros(1, requires_grad=True)),
        r"Attribute\.log_t is a tensor that requires grad in a plain attribute, so a replica's copy would not learn\.",
    )


def test_a_tensor_that_requires_grad_is_refused_also_when_it_was_put_there_between_runs(make):
    strategy = make(3)
    with strategy.scope():
        model = Attribute()
    strategy.run(lambda: model(torch.ones(1, 3)).detach())
    model.kept = torch.zeros(1, requires_grad=True)
    with pytest.raises(TypeError, match=r"Attribute\.kept is a tensor that requires grad"):
        strategy.run(lambda: model(torch.ones(1, 3)).detach())


@pytest.mark.parametrize("container", ["list", "dict"])
def test_parameters_in_a_plain_container_learn_or_are_refused(make, container):
    def build() -> nn.Module:
        model = Attribute()
        parameter = nn.Parameter(torch.ones(2))
        model.extra = [parameter] if container == "list" else {"x": parameter}
        model.forward = None
        return model

    strategy = make(3)
    torch.manual_seed(0)
    with strategy.scope():
        model = build()
        extra = model.extra[0] if container == "list" else model.extra["x"]
        optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    start = extra.detach().clone()

    def step(b: Any) -> None:
        mine = model.extra[0] if container == "list" else model.extra["x"]
        optimizer.zero_grad()
        F.mse_loss(model.layer(b[0]) * mine, b[1]).backward()
        optimizer.step()

    try:
        strategy.run(step, args=(deal(strategy, data(7, torch.float32)),))
    except (TypeError, RuntimeError) as error:
        assert "extra" in str(error) or "param_groups" in str(error)
    else:
        assert not torch.equal(extra, start), "the tensor was given to the optimizer, was used, and has not learnt"


def test_a_subclass_of_parameter_is_refused(make):
    class Special(nn.Parameter):
        pass

    def build() -> nn.Module:
        model = nn.Linear(3, 2)
        model.weight = Special(model.weight.data)
        return model

    refused(
        make,
        build,
        r"Linear\.weight is a Special\. Replicas can have copies of torch\.nn\.Parameter itself, and not of its",
    )


class Meter:
    """What people keep in a model: it counts, with a lock, and writes a log."""

    def __init__(self, stream):
        self.count, self.lock, self.stream, self.nested = 0, threading.Lock(), stream, [(i for i in range(3)), math]


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.meter = nn.Linear(3, 2), None

    def forward(self, x):
        with self.meter.lock:
            self.meter.count += 1
            self.meter.stream.write("x")
        return self.inner(x)


@pytest.mark.parametrize("when", ["from the start", "between runs"])
def test_what_cannot_be_copied_is_one_for_all_replicas(make, when):
    """A lock, a generator, a Python module or an open file in an attribute, or in an object there, was refused."""
    strategy = make(3)
    with strategy.scope():
        model = Counts()
    stream = OneStream()
    if when == "between runs":
        model.meter = Meter(OneStream())
        strategy.run(lambda: model(torch.ones(1, 3)).detach())
    model.meter = Meter(stream)
    for count in (1, 2):
        strategy.run(lambda: model(torch.ones(1, 3)).detach())
        assert (model.meter.count, stream.written) == (count, 3 * count)
    assert type(model.meter.lock) is type(threading.Lock()) and model.meter.nested[1] is math


class OneStream:
    def __init__(self):
        self.written = 0

    def write(self, text):
        self.written += 1

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot pickle a stream")


def test_a_module_that_cannot_be_copied_is_refused(make):
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("there is one")

    refused(
        make, lambda: nn.Sequential(Stubborn(3, 2)), r"Sequential cannot be copied for the replicas: .*there is one"
    )


def test_one_model_in_two_strategies_is_refused(make):
    first, second = make(2), make(2)
    with first.scope():
        model = mlp()
    match = r"already belongs to another strategy"
    with pytest.raises(RuntimeError, match=match):
        second.distribute_module(model)
    with pytest.raises(RuntimeError, match=match):
        second.distribute_module(nn.Sequential(model[0]))
    own = second.distribute_module(copy.deepcopy(model))
    assert first.extended.variable_created_in_scope(model) and second.extended.variable_created_in_scope(own)
    assert not second.extended.variable_created_in_scope(model)
    first.run(lambda b: mse(model, b).backward(), args=(deal(first, data(4)),))
    second.run(lambda b: mse(own, b).backward(), args=(deal(second, data(4)),))
    assert_close(gradients(own), gradients(model), "each in its own strategy")


def test_a_part_of_a_model_of_another_strategy_is_refused_in_a_new_model_or_at_its_first_run(make):
    first, second = make(2), make(2)
    with first.scope():
        model = mlp()
    with pytest.raises(RuntimeError, match=r"already belongs to another strategy"):
        with second.scope():
            other = nn.Sequential(model[2], nn.Tanh())
        second.run(lambda: other(torch.ones(1, 4, **F64)).detach())


def test_a_model_that_is_refused_leaves_none_of_its_parts_claimed(make):
    """The parts before the one of another strategy belonged to the strategy that had refused them, for ever."""
    first, second, third = make(2), make(2), make(2)
    with first.scope():
        theirs = mlp()
    new = nn.Linear(3, 3, **F64)
    with pytest.raises(RuntimeError, match=r"already belongs to another strategy"):
        second.distribute_module(nn.Sequential(new, theirs))
    assert third.extended.variable_created_in_scope(third.distribute_module(new))


def test_a_model_of_another_strategy_in_a_step_is_refused(make):
    first, second = make(2), make(2)
    with first.scope():
        model = mlp()
    with pytest.raises(RuntimeError, match=f"scope|strategy|{ELSEWHERE}"):
        second.run(lambda b: mse(model, b).backward(), args=(deal(second, data(4)),))
    assert all(p.grad is None for p in model.parameters())


COMPUTED: dict[str, Callable[[nn.Linear], Any]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=3),
    "pruned twice": lambda layer: [prune.random_unstructured(layer, n, amount=1) for n in ("weight", "bias", "weight")],
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.filterwarnings("ignore:.*is deprecated in favor of:FutureWarning")
def test_a_layer_whose_weight_is_computed_by_a_hook_trains_as_in_plain_torch(make, how, where):
    # They keep a tensor with a history where the weight was, and compute it anew before each forward.
    def build() -> nn.Module:
        layer = nn.Linear(3, 4, **F64)
        COMPUTED[how](layer)
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 2, **F64))

    def backward(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()

    def update(model: Any, optimizer: Any) -> None:
        optimizer.step()

    for n in (1, 3):
        if where == "inside":
            compare(make, n, train, build=build, case=how)
        else:
            compare(make, n, backward, build=build, after=update, case=how)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_weights_that_come_to_be_pruned_between_steps_are_pruned_in_every_replica(make, where):
    steps = iter([])

    def before(model: Any, optimizer: Any) -> None:
        k = next(steps)
        if k == 1:
            prune.l1_unstructured(model[0], "weight", amount=3)
        elif k == 2:
            prune.l1_unstructured(model[0], "weight", amount=2)
        elif k == 3:
            prune.remove(model[0], "weight")

    def backward(model: Any, optimizer: Any, batch: Any) -> None:
        model.zero_grad()
        mse(model, batch).backward()

    def update(model: Any, optimizer: Any) -> None:
        optimizer.step()

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        backward(model, optimizer, batch)
        optimizer.step()

    for n in (1, 3):
        steps = iter([k for k in range(4) for _ in ("ours", "plain")])
        if where == "inside":
            compare(make, n, step, before=before, steps=4)
        else:
            compare(make, n, backward, before=before, after=update, steps=4)


def test_a_buffer_of_another_shape_is_refused_by_name(make):
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("queue", torch.zeros(2))

        def forward(self) -> None:
            self.queue = torch.cat([self.queue, torch.ones(1)])

    strategy = make(2)
    with strategy.scope():
        model = Growing()
    with pytest.raises(
        RuntimeError, match=r"A replica replaced the buffer Growing\.queue, of shape \(2,\) and torch\.float32, by"
    ):
        strategy.run(lambda: model())
    assert model.queue.tolist() == [0.0, 0.0]


# ---- memory


@pytest.mark.parametrize("build", [mlp], ids=["sequential"])
@pytest.mark.parametrize("first", ["model", "strategy", "together"])
def test_a_model_and_a_strategy_that_are_dropped_are_freed(make, first, build):
    strategy = make(3)
    model, optimizer, twin, plain = trained(strategy, build)
    results = strategy.run(lambda b: model(b[0]).square().sum(1), args=(deal(strategy, data(7)),))
    strategy.reduce("mean", results, axis=0).backward()
    of_replicas: list[Any] = []
    strategy.run(lambda: of_replicas.append(weakref.ref(next(model.parameters()))))
    watched = {
        "model": weakref.ref(model),
        "submodule": weakref.ref(next(m for m in model.modules() if isinstance(m, nn.Linear))),
        "parameter": weakref.ref(next(model.parameters())),
        "optimizer": weakref.ref(optimizer),
        "strategy": weakref.ref(strategy),
        "extended": weakref.ref(strategy.extended),
    }
    del results, twin, plain
    if first == "model":
        del model, optimizer
        gc.collect()
        alive = [name for name in ("model", "submodule", "parameter", "optimizer") if watched[name]() is not None]
        assert not alive, f"the strategy keeps {alive}"
        assert all(p() is None for p in of_replicas), "the strategy keeps the replicas' parameters"
        strategy.run(lambda: None)
        del strategy
    elif first == "strategy":
        del strategy
        gc.collect()
        assert watched["strategy"]() is None and watched["extended"]() is None
        assert all(p() is None for p in of_replicas)
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
        strategy.run(lambda b, m=model, o=optimizer: train(m, o, b), args=(deal(strategy, data(4)),))
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


def test_hooks_that_are_copied_from_table_to_table_reach_the_replicas(make):
    strategy = make(2)
    with strategy.scope():
        model = nn.Linear(1, 1)
    strategy.run(lambda: None)
    other = nn.Linear(1, 1)
    other.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    strategy.run(lambda: None)
    model._forward_hooks.update(other._forward_hooks)
    results = strategy.run(lambda: model(torch.ones(1)).item())
    assert strategy.experimental_local_results(results) in ((0.0, 0.0), (0.0,))


def test_what_has_another_name_has_it_in_replicas_too(make):
    strategy = make(2)
    with strategy.scope():
        model = nn.Linear(1, 1)
        model.former = True
        model.config = types.SimpleNamespace(former=True)
    strategy.run(lambda: None)
    del model.former, model.config.former
    model.latter = model.config.latter = True
    found = []
    strategy.run(lambda: found.append((hasattr(model, "former"), vars(model.config), model.latter)))
    assert found == [(False, {"latter": True}, True)] * strategy.num_replicas_in_sync


def test_a_merge_function_may_replace_the_data_of_a_parameter(make):
    strategy = make(2)
    with strategy.scope():
        model = nn.Linear(2, 2, bias=False)
    expected = model.weight.detach().t().tolist()

    def transpose(strategy: torchstrategy.Strategy) -> None:
        model.weight.data = model.weight.data.t()

    def step() -> Any:
        torchstrategy.get_replica_context().merge_call(transpose)
        return model.weight.tolist()

    found = strategy.experimental_local_results(strategy.run(step))
    assert list(found) == [expected] * len(found)
