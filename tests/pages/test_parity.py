"""docs/parity.csv says how each name of tf.distribute is here.

The code agrees, both ways, and so does the page.
"""

from __future__ import annotations

import enum
import functools
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import torchstrategy

PARITY = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "parity.py"))
ROWS: list[Any] = PARITY["rows"]()
NAMES = {row.name: row for row in ROWS if not row.parameter}
IS_HERE = ("same", "differs", "extra")

# What each of the five pages that torchstrategy began with describes: a class, and its
# attributes and methods.
EVERYWHERE = (
    "extended num_replicas_in_sync experimental_distribute_dataset "
    "experimental_local_results reduce run scope"
)
FROM_DATA = (
    "experimental_distribute_datasets_from_function experimental_make_numpy_dataset"
)
VALUES = "experimental_distribute_values_from_function"
LOGICAL = (
    "experimental_assign_to_logical_device experimental_replicate_to_logical_devices "
    "experimental_split_to_logical_devices"
)
TF = "https://www.tensorflow.org/versions"
STRATEGIES = "api_docs/python/tf/distribute"
PAGES = {
    f"{TF}/r2.2/{STRATEGIES}/OneDeviceStrategy": (f"{FROM_DATA} {VALUES} {LOGICAL}"),
    f"{TF}/r2.2/api_docs/python/tf/compat/v1/distribute/OneDeviceStrategy": (
        f"{FROM_DATA} experimental_run make_dataset_iterator make_input_fn_iterator "
        "update_config_proto"
    ),
    f"{TF}/r2.2/{STRATEGIES}/experimental/CentralStorageStrategy": (
        f"{FROM_DATA} {VALUES} {LOGICAL}"
    ),
    f"{TF}/r2.3/{STRATEGIES}/Strategy": (
        f"cluster_resolver {FROM_DATA} {VALUES} {LOGICAL}"
    ),
    f"{TF}/r2.4/{STRATEGIES}/experimental/CentralStorageStrategy": (
        f"cluster_resolver distribute_datasets_from_function {VALUES} gather"
    ),
}
# What a class inherits is listed with its base.
BASES = {
    "tf.distribute.Strategy": r"tf\.distribute\.(experimental\.)?\w+Strategy",
    "tf.compat.v1.distribute.Strategy": (
        r"tf\.compat\.v1\.distribute\.(experimental\.)?\w+Strategy"
    ),
    "tf.distribute.CrossDeviceOps": (
        r"tf\.distribute\.(\w+AllReduce|ReductionToOneDevice)"
    ),
    "tf.distribute.cluster_resolver.ClusterResolver": (
        r"tf\.distribute\.cluster_resolver\.\w+Resolver"
    ),
}


def found(place: str) -> Any:
    """What is at a dotted path that begins with `torchstrategy`."""
    return functools.reduce(getattr, place.split(".")[1:], torchstrategy)


def parameters_of(thing: Any) -> dict[str, inspect.Parameter]:
    """By name, `*args` with its star, and without `self`."""
    all_of_them = inspect.signature(thing).parameters.values()
    return {
        "*" * (p.kind is p.VAR_POSITIONAL) + p.name: p
        for p in all_of_them
        if p.name != "self"
    }


def shown(default: Any) -> str:
    """A default as in the table."""
    if default is inspect.Parameter.empty:
        return ""
    return str(default) if isinstance(default, enum.Enum) else repr(default)


def described(row: Any) -> str:
    return f"{row.name}({row.parameter})" if row.parameter else row.name


# What the table says is so


@pytest.mark.parametrize(
    "row", [row for row in NAMES.values() if row.status in IS_HERE], ids=described
)
def test_a_name_is_where_the_table_says(row: Any) -> None:
    thing = found(row.place)
    if row.kind == "value":
        assert thing.name == row.name.rpartition(".")[2]
    elif row.kind == "property":
        assert not callable(thing)
    elif row.kind == "alias":
        originals = [
            r
            for r in NAMES.values()
            if r.kind != "alias" and r.place.endswith(f".{thing.__name__}")
        ]
        assert any(found(original.place) is thing for original in originals)
    else:
        assert callable(thing)
        assert (
            inspect.isclass(thing) == (row.kind in ("class", "interface"))
            or row.status == "differs"
        )


@pytest.mark.parametrize(
    "name", dict.fromkeys(row.name for row in ROWS if row.parameter)
)
def test_parameters_are_what_the_table_says(name: str) -> None:
    parameters = parameters_of(found(NAMES[name].place))
    rows = [row for row in ROWS if row.name == name and row.parameter]
    assert [row.place for row in rows if row.place not in parameters] == []
    defaults = {row.place: row.default for row in rows if row.status != "differs"}
    assert {place: shown(parameters[place].default) for place in defaults} == defaults


@pytest.mark.parametrize(
    "name",
    dict.fromkeys(
        row.name for row in ROWS if row.parameter and "distribute." in row.name
    ),
)
def test_arguments_by_position_mean_what_they_mean_in_tensorflow(name: str) -> None:
    positional = [
        p.name
        for p in parameters_of(found(NAMES[name].place)).values()
        if p.kind is not p.KEYWORD_ONLY
    ]
    there = [row for row in ROWS if row.name == name and row.parameter]
    same = {
        i: row.parameter
        for i, row in enumerate(there)
        if row.status == "same" and row.parameter in positional
    }
    assert {i: positional[i] for i in same} == same


@pytest.mark.parametrize(
    "row", [row for row in NAMES.values() if row.status not in IS_HERE], ids=described
)
def test_what_the_table_says_is_not_here_is_not(row: Any) -> None:
    with pytest.raises(AttributeError):
        found(row.place)


@pytest.mark.parametrize("base", BASES)
def test_a_class_inherits_what_is_listed_with_its_base(base: str) -> None:
    derived = [
        row
        for row in NAMES.values()
        if re.fullmatch(BASES[base], row.name) and row.status in IS_HERE
    ]
    assert len(derived) >= 3
    assert [
        row.name
        for row in derived
        if not issubclass(found(row.place), found(NAMES[base].place))
    ] == []


# What is here is in the table


def public_names(module: ModuleType, place: str = "torchstrategy") -> Iterator[str]:
    """Everything that torchstrategy exports, but for its testing tools.

    These are no business of TensorFlow's.
    """
    for name in module.__all__:
        thing = getattr(module, name)
        if not isinstance(thing, ModuleType):
            yield f"{place}.{name}"
        elif thing is not module and thing.__name__ != "torchstrategy.testing":
            yield from public_names(thing, f"{place}.{name}")


PUBLIC = list(public_names(torchstrategy))


@functools.cache
def listed() -> dict[tuple[int, str, str], Any]:
    """The rows of what is here by object, member of the object, and parameter."""
    rows = {}
    for row in ROWS:
        place = NAMES[row.name].place
        if row.status in IS_HERE and is_there(place):
            above = found(place.rpartition(".")[0])
            owner, member = (
                (above, place.rpartition(".")[2])
                if inspect.isclass(above)
                else (found(place), "")
            )
            rows[id(owner), member, row.place if row.parameter else ""] = row
    return rows


def is_there(place: str) -> bool:
    try:
        found(place)
    except AttributeError:
        return False  # another test says so
    return True


def is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torchstrategy"


def members_of(cls: type) -> Iterator[str]:
    """What our classes have that those of others do not."""
    ours = {name for base in cls.__mro__ if is_ours(base) for name in vars(base)}
    others = {name for base in cls.__mro__ if not is_ours(base) for name in vars(base)}
    return (name for name in sorted(ours - others) if not name.startswith("_"))


def parts_of(thing: Any) -> Iterator[tuple[str, str]]:
    """The table's (member, parameter) pairs of a public class or function."""
    if not inspect.isclass(thing):
        yield from (("", parameter) for parameter in parameters_of(thing))
        return
    if any(
        "__init__" in vars(base) or "__new__" in vars(base)
        for base in thing.__mro__
        if is_ours(base)
    ):
        yield from (("", parameter) for parameter in parameters_of(thing))
    for name in members_of(thing):
        yield name, ""
        if callable(member := getattr(thing, name)):
            yield from ((name, parameter) for parameter in parameters_of(member))


def is_listed(thing: Any, member: str, parameter: str) -> bool:
    for owner in inspect.getmro(thing) if inspect.isclass(thing) else [thing]:
        of_owner, of_member = (
            listed().get((id(owner), "", "")),
            listed().get((id(owner), member, "")),
        )
        if (of_owner and of_owner.status == "extra") or (
            of_member and of_member.status == "extra"
        ):
            return True  # all of it is ours
        if of_owner and of_owner.kind == "interface" and not member:
            return True  # users do not construct it
        if (id(owner), member, parameter) in listed() or (
            id(owner),
            "",
            member or parameter,
        ) in listed():
            return True  # the latter: an attribute that the constructor sets
    return False


@pytest.mark.parametrize("place", PUBLIC)
def test_everything_public_is_in_the_table(place: str) -> None:
    assert place in [row.place for row in NAMES.values()]
    thing = found(place)
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        assert [
            name for name in members_of(thing) if not is_listed(thing, name, "")
        ] == []
    else:
        assert [part for part in parts_of(thing) if not is_listed(thing, *part)] == []


@pytest.mark.parametrize("page", PAGES)
def test_what_the_pages_describe_is_in_the_table(page: str) -> None:
    name = page.partition("/python/")[2].replace("/", ".")
    base = next(
        base
        for base, pattern in BASES.items()
        if name == base or re.fullmatch(pattern, name)
    )
    assert name in NAMES
    described_there = [
        f"{base}.{member}" for member in f"{EVERYWHERE} {PAGES[page]}".split()
    ]
    assert [
        member for member in described_there if NAMES[member].status not in IS_HERE
    ] == []


# The public classes, functions and enumerations of tf.distribute in TensorFlow 2.21
RELEASE_2_21 = {
    "tf.distribute.": (
        "CrossDeviceOps DistributedDataset DistributedDataset.reduce "
        "DistributedIterator DistributedValues HierarchicalCopyAllReduce InputContext "
        "InputOptions InputReplicationMode MirroredStrategy "
        "MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy "
        "ParameterServerStrategy ReduceOp ReductionToOneDevice ReplicaContext "
        "RunOptions Server Strategy StrategyExtended TPUStrategy "
        "experimental_set_strategy get_replica_context get_strategy has_strategy "
        "in_cross_replica_context"
    ),
    "tf.distribute.cluster_resolver.": (
        "ClusterResolver GCEClusterResolver KubernetesClusterResolver "
        "KubernetesExecutableLocation SimpleClusterResolver SlurmClusterResolver "
        "SlurmClusterResolver.get_task_info TFConfigClusterResolver TPUClusterResolver "
        "UnionResolver"
    ),
    "tf.distribute.coordinator.": (
        "ClusterCoordinator PerWorkerValue RemoteValue "
        "experimental_get_current_worker_index"
    ),
    "tf.distribute.experimental.": (
        "CentralStorageStrategy CollectiveCommunication CollectiveHints "
        "CommunicationImplementation CommunicationOptions MultiWorkerMirroredStrategy "
        "ParameterServerStrategy PreemptionCheckpointHandler PreemptionWatcher "
        "TPUStrategy TerminationConfig ValueContext"
    ),
    "tf.distribute.experimental.coordinator.": (
        "ClusterCoordinator PerWorkerValues RemoteValue"
    ),
    "tf.distribute.experimental.partitioners.": (
        "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner"
    ),
    "tf.distribute.experimental.rpc.": "Client Server",
    "tf.types.experimental.distributed.": "Mirrored PerReplica",
}


@pytest.mark.parametrize("section", RELEASE_2_21)
def test_every_name_of_tensorflow_2_21_has_a_row(section: str) -> None:
    ours = {
        row.name.replace("torchstrategy.", "tf.distribute.")
        for row in NAMES.values()
        if row.status == "extra"
    }
    names = [section + name for name in RELEASE_2_21[section].split()]
    assert [name for name in names if name not in NAMES and name not in ours] == []


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name.startswith("tf.Variable.scatter_")]
)
def test_what_the_table_says_to_write_for_scattering_does_it(name: str) -> None:
    code = re.search(r"`(variable\.assign\(.*?\))` does", NAMES[name].why)
    assert code is not None
    variable = torchstrategy.Variable(torch.tensor([8.0, 6.0, 4.0]))
    indices, updates = torch.tensor([0, 2]), torch.tensor([2.0, 8.0])
    eval(
        code[1],
        {"torch": torch, "variable": variable, "indices": indices, "updates": updates},
    )
    expected = {
        "add": (10, 12),
        "sub": (6, -4),
        "update": (2, 8),
        "min": (2, 4),
        "max": (8, 8),
    }
    expected |= {"mul": (16, 32), "div": (4, 0.5)}
    first, last = expected[name.rpartition("_")[2]]
    assert variable.tolist() == [first, 6.0, last]


# The table is well made


def test_every_row_is_complete() -> None:
    assert len({described(row) for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.status in PARITY["STATUSES"], described(row)
        assert (
            re.fullmatch(r"2\.[234](-2\.([34]|21))?|2\.21|pages", row.releases)
            or row.status == "extra"
        ), described(row)
        assert re.fullmatch(r"[A-Z`].*\.", row.why) or (
            row.status == "same" and not row.why
        ), described(row)
        assert row.status != "absent" or re.search("TPU|session|Estimator", row.why), (
            described(row)
        )
        assert not row.parameter or (row.kind == "parameter" and row.name in NAMES), (
            described(row)
        )


def test_the_page_is_made_from_the_table() -> None:
    made = PARITY["page"](ROWS)
    assert PARITY["PAGE"].read_text(encoding="utf-8") == made, (
        "docs/parity.md is older than its table: run docs/parity.py"
    )
