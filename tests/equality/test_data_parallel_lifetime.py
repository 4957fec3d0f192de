"""How a torchstrategy.DataParallel is made, saved, copied and let go.

It also says where it may be called.
"""

from __future__ import annotations

import copy
import gc
import io
import queue
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import torchstrategy
from conditions import only_in_turns, only_with_copies, without_simulated_devices
from data_parallel import FIRST, ROWS, Calls, alike, here, outputs_of, parallel
from problems import close, data, mlp
from topologies import SIMULATED, central, compute_devices
from torchstrategy import DataParallel

# State dicts, copies and pickles


class StepReferences(nn.Module):
    """Its state has a version, buffers, and something else."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.modules_ = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.versions: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.modules_(x))

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, *rest: Any
    ) -> None:
        self.versions.append(metadata.get("version"))
        super()._load_from_state_dict(state, prefix, metadata, *rest)

    def get_extra_state(self) -> int:
        return 5

    def set_extra_state(self, state: int) -> None:
        assert state == 5


class Inner(nn.Module):
    """Has nothing but a part that is called as the prefix is."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "named": StepReferences,
    "inner": Inner,
    "mlp": mlp,
}


@pytest.mark.parametrize("name", BUILDS)
def test_its_state_dict_is_that_of_the_module(name: str) -> None:
    module = BUILDS[name]()
    model = DataParallel(module, ["cpu", "cpu"])
    assert list(model.state_dict()) == list(module.state_dict())
    assert list(model.state_dict(prefix="net.")) == list(
        module.state_dict(prefix="net.")
    )
    assert {f"0.{key}" for key in module.state_dict()} == set(
        nn.Sequential(model).state_dict()
    )
    assert model.state_dict()._metadata.items() >= module.state_dict()._metadata.items()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    BUILDS[name]().load_state_dict(torch.load(buffer))


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("saved_by", ["the module", "torchstrategy", "torch"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_it_loads_what_was_saved_with_a_data_parallel_or_without(
    name: str, saved_by: str, is_nested: bool
) -> None:
    source, target = BUILDS[name](), BUILDS[name]()
    savers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "the module": lambda module: module,
        "torchstrategy": lambda module: DataParallel(module, ["cpu", "cpu"]),
        "torch": nn.DataParallel,
    }
    saver = savers[saved_by](source)
    model: nn.Module = DataParallel(target, ["cpu", "cpu"])
    state = nn.Sequential(saver).state_dict() if is_nested else saver.state_dict()
    before = dict(state)
    if is_nested:
        model = nn.Sequential(model)
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert dict(state).keys() == before.keys()
    for key, value in source.state_dict().items():
        assert torch.equal(
            torch.as_tensor(target.state_dict()[key]), torch.as_tensor(value)
        ), key
    if isinstance(target, StepReferences) and not (
        is_nested and saved_by == "the module"
    ):
        assert target.versions == [3]


def test_loading_is_as_strict_as_in_torch() -> None:
    model, state = DataParallel(mlp(), ["cpu", "cpu"]), mlp().state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*module\.0\.weight"):
        model.load_state_dict(
            {key: value for key, value in state.items() if key != "0.weight"}
        )
    with pytest.raises(RuntimeError, match=r"Unexpected key.*module\.extra"):
        model.load_state_dict({**state, "extra": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"size mismatch for module\.0\.weight"):
        model.load_state_dict({**state, "0.weight": torch.ones(1)})
    result = model.load_state_dict(
        {"module.0.weight": state["0.weight"], "other": torch.ones(1)}, strict=False
    )
    assert len(result.missing_keys) == len(state) - 1 and result.unexpected_keys == [
        "other"
    ]
    assert torch.equal(model.module[0].weight, state["0.weight"])


def test_state_can_be_assigned_in_place_of_the_parameters() -> None:
    model, x = parallel(mlp()), here(data(5)[0])
    model(x)
    state = {
        name: value.clone() for name, value in mlp().to(FIRST).state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    assert model.module[0].weight.data_ptr() == state["0.weight"].data_ptr()
    close(model(x), model.module(x))


def test_a_copy_is_a_data_parallel_of_a_copy() -> None:
    model, x = parallel(mlp()), here(data(5)[0])
    model(x).sum().backward()
    copied = copy.deepcopy(model)
    assert copied.module is not model.module and copied.device_ids == model.device_ids
    copied.zero_grad()
    copied(x).sum().backward()
    close([p.grad for p in copied.parameters()], [p.grad for p in model.parameters()])
    with torch.no_grad():
        copied.module[0].weight.zero_()
    assert not torch.equal(model(x), copied(x))
    assert list(copied.state_dict()) == list(model.state_dict())


def test_it_can_be_saved_whole() -> None:
    model, x = parallel(mlp(), output_device="cpu"), here(data(5)[0])
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert type(loaded) is DataParallel
    close(loaded(x), expected)
    loaded.load_state_dict(model.state_dict())


def test_an_average_of_its_parameters_can_be_kept() -> None:
    model, x = parallel(mlp()), here(data(5)[0])
    average = AveragedModel(model)
    for _ in range(2):
        average.update_parameters(model)
    close(average(x), model(x))


# How it is made


@pytest.mark.parametrize(
    ("device_ids", "error", "match"),
    [
        ([], ValueError, r"device_ids=\[\] names no device"),
        ("cpu", TypeError, r"write \['cpu'\]"),
        (0, TypeError, r"write \[0\]"),
        (torch.device("cpu"), TypeError, r"write \[device\(type='cpu'\)\]"),
        (3.5, TypeError, r"device_ids is a list of devices"),
        ([True], TypeError, r"got True, a bool"),
        (["cpu", "gpux"], ValueError, r"'gpux' is not a device"),
        (["meta"], ValueError, r"meta tensors hold no numbers"),
        ([77, 78], ValueError, r"77' is not on this machine"),
        ([-1], ValueError, r"an index is 0 or more"),
    ],
)
def test_device_ids_that_are_none_are_refused(
    device_ids: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        DataParallel(mlp(), device_ids)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"output_device": 77}, ValueError, "is not on this machine"),
        ({"output_device": 1.5}, TypeError, "A device is a string"),
        ({"dim": None}, TypeError, "dim is the index of a dimension; got None"),
        ({"dim": "0"}, TypeError, "got '0', a str"),
    ],
)
def test_options_that_are_none_are_refused(
    options: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        DataParallel(mlp(), ["cpu", "cpu"], **options)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"runs a torch\.nn\.Module; got .*, a function"
    ):
        DataParallel(data, ["cpu"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is a DataParallel already"):
        DataParallel(DataParallel(mlp(), ["cpu"]), ["cpu", "cpu"])


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_script_module_is_refused_where_there_would_be_copies_of_it() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"Sequential\.0 is a ScriptModule"):
        DataParallel(nn.Sequential(scripted), ["cpu", "cpu"])
    assert DataParallel(scripted, ["cpu"])(ROWS).shape == (4, 2)


def test_it_has_the_attributes_that_scripts_ask_for() -> None:
    devices = compute_devices(2)
    model = parallel(mlp(), output_device=devices[1], dim=1)
    names = (
        [device.index for device in devices]
        if SIMULATED
        else [torch.device("cpu", 0)] * 2
    )
    assert (
        model.device_ids == names and model.output_device == names[1] and model.dim == 1
    )


def test_a_device_may_be_listed_twice_and_named_in_any_way() -> None:
    x = here(data(5)[0])
    for device_ids in (
        ["cpu", torch.device("cpu"), "/cpu:0"],
        ("cpu:0", "cpu:1"),
        (device for device in ["cpu"] * 2),
    ):
        model = DataParallel(mlp().cpu(), device_ids)  # type: ignore[arg-type]
        close(model(x), model.module(x.cpu()))


def test_a_buffer_counts_each_batch_once_on_a_device_that_is_listed_twice() -> None:
    def count(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.batches += 1
        return x + 0

    module = Calls(count)
    module.register_buffer("batches", torch.zeros(1))
    DataParallel(module, ["cpu", "cpu"])(ROWS)
    assert module.batches.item() == 1


@without_simulated_devices
def test_without_accelerators_the_module_is_called_as_it_is() -> None:
    module = Calls(
        lambda module, *args, **kwargs: (module, args, kwargs, threading.get_ident())
    )
    model = DataParallel(module)
    assert model.device_ids == [] and model.output_device is None
    assert model(ROWS, 3, mask="x") == (
        module,
        (ROWS, 3),
        {"mask": "x"},
        threading.get_ident(),
    )
    assert list(model.state_dict()) == ["weight"]
    assert DataParallel(mlp(), output_device="cpu").output_device == torch.device(
        "cpu", 0
    )


def test_with_one_device_the_module_is_called_on_the_callers_thread() -> None:
    module = Calls(lambda module, x: (x, module, threading.get_ident()))
    model = parallel(module, 1)
    x, called, thread = model(ROWS)
    assert called is module and x.device == FIRST and thread == threading.get_ident()


@only_with_copies
def test_what_a_module_holds_that_cannot_be_copied_is_one_for_all_replicas() -> None:
    """A lock, an open file, a generator or a module in an attribute was refused."""
    with tempfile.TemporaryFile() as file:
        held = [
            threading.Lock(),
            (i for i in range(9)),
            gc,
            {"deep": [threading.RLock()]},
            queue.SimpleQueue(),
            file,
        ]
        model, plain = alike(
            lambda: Calls(
                lambda module, x: x * module.weight * next(module.held[1]).bit_length()
            )
        )
        for one in (model.module, plain):
            one.held = list(held)
        next(held[1])  # type: ignore[call-overload]
        # Replicas on several devices run at once.
        assert sorted(model(torch.ones(3, 1)).flatten().tolist()) == [1, 2, 2]
        assert model.module.held[0] is held[0]


@only_in_turns
def test_what_a_module_holds_is_used_in_all_replicas_and_an_iterator_is_refused() -> (
    None
):
    """Each replica would take another item."""

    def forward(module: Any, x: torch.Tensor, takes: bool) -> torch.Tensor:
        with module.held[0], module.held[3]["deep"][0]:
            module.held[4].put(len(x))
            factor = next(module.held[1]) if takes else 1
            return x * module.weight * module.held[2].isenabled() * factor

    with tempfile.TemporaryFile() as file:
        model = parallel(Calls(forward))
        queued: queue.SimpleQueue[int] = queue.SimpleQueue()
        deep = {"deep": [threading.RLock()]}
        held = [threading.Lock(), (i for i in range(9)), gc, deep, queued, file]
        model.module.held = held
        close(model(here(ROWS), False), here(ROWS) * model.module.weight)
        assert sum(queued.get() for _ in range(queued.qsize())) == len(ROWS)
        assert model.module.held is held
        with pytest.raises(RuntimeError, match=r"held\[1\], which gives out each item"):
            model(here(ROWS), True)


# Where it is called


def test_it_cannot_be_called_in_a_replica() -> None:
    model, strategy = parallel(nn.Linear(2, 2)), central(2)
    with pytest.raises(RuntimeError, match="A DataParallel was called in a replica"):
        strategy.run(lambda: model(ROWS))
    with pytest.raises(RuntimeError, match="A DataParallel was called in a replica"):
        parallel(nn.Sequential(DataParallel(nn.Linear(2, 2).to(FIRST), [FIRST])))(ROWS)
    assert torchstrategy.get_strategy().run(lambda: model(ROWS)).shape == (4, 2)


def test_a_module_of_a_strategy_is_refused() -> None:
    with central(2).scope() as strategy:
        module = nn.Linear(2, 2).to(FIRST)
    with pytest.raises(RuntimeError, match="already belongs to another strategy"):
        parallel(module)(ROWS)
    assert strategy.extended.variable_created_in_scope(module)


def test_its_module_can_be_given_to_a_strategy_when_it_is_gone(
    no_collector: None,
) -> None:
    module = nn.Linear(2, 2).to(FIRST)
    model = parallel(module)
    expected = model(ROWS)
    del model
    strategy = central(2)
    strategy.distribute_module(module)
    close(
        torch.cat([output.to(FIRST) for output in outputs_of(strategy, module, ROWS)]),
        expected,
    )


def test_a_lazy_module_is_refused_until_it_has_seen_a_batch() -> None:
    model = parallel(nn.Sequential(nn.LazyLinear(2), nn.ReLU()))
    with pytest.raises(TypeError, match="has no shape yet"):
        model(ROWS)
    model.module(here(ROWS))
    close(model(ROWS), model.module(here(ROWS)))


def test_a_layer_that_is_made_in_forward_is_refused_until_it_is_there() -> None:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(module, "late"):
            module.late = nn.Linear(2, 2, device=x.device)
        return module.late(x)

    model = parallel(Calls(forward))
    for _ in range(2):
        with pytest.raises(
            RuntimeError,
            match=r"Calls\.late was made in a replica.*DataParallel is model\.module",
        ):
            model(ROWS)
    model.module(here(ROWS))
    close(model(ROWS), model.module(here(ROWS)))


def test_a_parameter_that_forward_writes_in_place_is_refused() -> None:
    def clamp(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.weight.data.clamp_(-0.5, 0.5)
        return module.weight * x

    model = parallel(Calls(clamp))
    with pytest.raises(
        RuntimeError, match=r"Calls\.weight was written in place in a replica"
    ):
        model(ROWS)


def test_forwards_of_several_threads_do_not_disturb_each_other() -> None:
    model, x = parallel(mlp()), here(data(5)[0])
    expected = model(x).tolist()
    outputs: list[Any] = []
    threads = [
        threading.Thread(target=lambda: outputs.append(model(x).tolist()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == [expected] * 4


def test_nothing_of_it_is_left_when_it_is_gone(no_thread_left: None) -> None:
    model = parallel(mlp())
    model(here(data(5)[0])).sum().backward()
    del model
