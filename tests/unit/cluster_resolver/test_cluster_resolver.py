"""Who is in a cluster, and which of them this process is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrategy
from conditions import for_changes
from torchstrategy.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)
from torchstrategy.testing import simulated_devices

TWO = ClusterSpec({"worker": ["a:1", "b:2"], "ps": ["c:3"]})
ADDRESSES = st.text("abc", min_size=1, max_size=3)
TASKS = st.lists(ADDRESSES, max_size=4) | st.dictionaries(
    st.integers(0, 9), ADDRESSES, max_size=4
)
CLUSTERS = st.dictionaries(st.sampled_from(["chief", "worker", "ps"]), TASKS)


class Elsewhere(ClusterResolver):
    """A resolver of the user's own, which does not call our constructor."""

    def __init__(self) -> None:
        pass

    def cluster_spec(self) -> ClusterSpec:
        return TWO

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        return "elsewhere"


@pytest.fixture
def tf_config(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Sets TF_CONFIG; to None, not at all."""

    def set_to(config: Any) -> None:
        if config is None:
            monkeypatch.delenv("TF_CONFIG", raising=False)
        else:
            monkeypatch.setenv(
                "TF_CONFIG", config if isinstance(config, str) else json.dumps(config)
            )

    set_to(None)
    return set_to


# ClusterSpec


@for_changes
@settings(deadline=None, max_examples=40)
@given(CLUSTERS)
def test_a_cluster_says_what_it_was_told(cluster: dict[str, Any]) -> None:
    spec = ClusterSpec(cluster)
    by_index = {
        job: tasks if isinstance(tasks, dict) else dict(enumerate(tasks))
        for job, tasks in cluster.items()
    }
    assert spec.jobs == list(cluster)
    assert bool(spec) == bool(cluster)
    for job, tasks in by_index.items():
        assert spec.num_tasks(job) == len(tasks)
        assert spec.task_indices(job) == sorted(tasks)
        assert {
            i: a for i, a in enumerate(spec.job_tasks(job)) if a is not None
        } == tasks
        assert {i: spec.task_address(job, i) for i in tasks} == tasks


@settings(deadline=None, max_examples=40)
@given(CLUSTERS)
def test_a_cluster_can_be_made_of_another_one_of_its_dict_and_of_json(
    cluster: dict[str, Any],
) -> None:
    spec = ClusterSpec(cluster)
    for same in (
        ClusterSpec(spec),
        ClusterSpec(spec.as_dict()),
        ClusterSpec(json.loads(json.dumps(cluster))),
    ):
        assert same == spec and hash(same) == hash(spec)


def test_a_cluster_is_a_list_where_all_tasks_are_known_and_else_a_dict() -> None:
    spec = ClusterSpec(
        {"worker": {"1": "b", "0": "a"}, "ps": {4: "c"}, "chief": ("d",)}
    )
    assert spec.as_dict() == {"worker": ["a", "b"], "ps": {4: "c"}, "chief": ["d"]}
    assert (
        repr(spec)
        == "ClusterSpec({'worker': ['a', 'b'], 'ps': {4: 'c'}, 'chief': ['d']})"
    )
    assert spec.job_tasks("ps") == [None, None, None, None, "c"]


def test_clusters_are_equal_that_have_the_same_tasks_in_any_order() -> None:
    assert ClusterSpec({"a": ["x"], "b": {1: "z", 0: "y"}}) == ClusterSpec(
        {"b": ["y", "z"], "a": {0: "x"}}
    )
    assert ClusterSpec({"a": ["x"]}) != ClusterSpec({"a": ["y"]})
    assert ClusterSpec({"a": ["x"]}) != {"a": ["x"]}


def test_a_cluster_does_not_change_with_what_it_was_made_of_or_gave() -> None:
    tasks = ["a"]
    spec = ClusterSpec({"worker": tasks})
    tasks.append("b")
    spec.as_dict()["worker"].append("c")
    spec.jobs.append("ps")
    assert spec == ClusterSpec({"worker": ["a"]})


NO_CLUSTERS: dict[str, tuple[Any, type[Exception], str]] = {
    "a list": (["a:1"], TypeError, "A cluster is a dict"),
    "None": (None, TypeError, "A cluster is a dict"),
    "an address for a job": (
        {"worker": "a:1"},
        TypeError,
        "The tasks of the job 'worker' are a list or a dict",
    ),
    "a set of addresses": (
        {"worker": {"a:1"}},
        TypeError,
        "The tasks of the job 'worker' are a list or a dict",
    ),
    "a number for an address": (
        {"worker": [1]},
        TypeError,
        "The address of a task of the job 'worker' is a string",
    ),
    "None for an address": (
        {"worker": {0: None}},
        TypeError,
        "The address of a task of the job 'worker' is a string",
    ),
    "a number for a job": (
        {1: ["a:1"]},
        TypeError,
        "The name of a job is a string; got 1",
    ),
    "a name for an index": (
        {"worker": {"first": "a:1"}},
        ValueError,
        "The index of a task is an integer; got 'first'",
    ),
    "half an index": (
        {"worker": {0.5: "a:1"}},
        TypeError,
        r"The index of a task is an integer; got 0\.5, a float",
    ),
    "a negative index": (
        {"worker": {-1: "a:1"}},
        ValueError,
        "The index of a task is 0 or more; got -1",
    ),
    "an index twice": (
        {"worker": {0: "a:1", "0": "b:1"}},
        ValueError,
        "The job 'worker' has two tasks of one index",
    ),
}


@pytest.mark.parametrize("case", NO_CLUSTERS)
def test_what_is_no_cluster_is_refused(case: str) -> None:
    cluster, error, sentence = NO_CLUSTERS[case]
    with pytest.raises(error, match=r"^" + sentence):
        ClusterSpec(cluster)


@pytest.mark.parametrize(
    "ask", [ClusterSpec.num_tasks, ClusterSpec.task_indices, ClusterSpec.job_tasks]
)
def test_a_job_that_is_not_there_is_an_error(
    ask: Callable[[ClusterSpec, str], Any],
) -> None:
    with pytest.raises(
        ValueError,
        match=r"^There is no job 'chief' in the cluster, only \['worker', 'ps'\]\.",
    ):
        ask(TWO, "chief")


def test_a_task_that_is_not_there_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"^The job 'worker' has no task 2, only \[0, 1\]\."
    ):
        TWO.task_address("worker", 2)
    with pytest.raises(ValueError, match=r"^There is no job 'chief'"):
        TWO.task_address("chief", 0)


# SimpleClusterResolver


def test_a_simple_resolver_says_what_it_was_told() -> None:
    resolver = SimpleClusterResolver(
        TWO, "m:0", "worker", 1, "here", {"GPU": 8}, "grpc"
    )
    assert resolver.cluster_spec() is TWO
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.environment, resolver.rpc_layer) == ("here", "grpc")
    assert (
        resolver.num_accelerators() == resolver.num_accelerators("ps", 0) == {"GPU": 8}
    )


def test_a_simple_resolver_that_was_told_nothing_knows_nothing() -> None:
    resolver = SimpleClusterResolver(ClusterSpec({}))
    assert (resolver.master(), resolver.environment, resolver.num_accelerators()) == (
        "",
        "",
        {},
    )
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (
        None,
        None,
        None,
    )


def test_the_master_is_what_was_said_or_the_task_that_is_named() -> None:
    resolver = SimpleClusterResolver(TWO, master="m:0")
    assert (
        resolver.master()
        == resolver.master("worker")
        == resolver.master(task_id=1)
        == "m:0"
    )
    assert resolver.master("worker", 0) == "a:1"
    assert resolver.master("ps", 0, "rpc") == "rpc://c:3"
    resolver.rpc_layer = "grpc"
    assert resolver.master() == "grpc://m:0"
    assert resolver.master("worker", 1, "rpc") == "rpc://b:2"
    with pytest.raises(ValueError, match=r"^There is no job 'chief'"):
        resolver.master("chief", 0)
    with pytest.raises(ValueError, match=r"^The job 'ps' has no task 1"):
        resolver.master("ps", 1)


def test_what_a_simple_resolver_hands_out_is_not_its_own() -> None:
    given = {"GPU": 2}
    resolver = SimpleClusterResolver(TWO, num_accelerators=given)
    given["GPU"] = 3
    resolver.num_accelerators()["GPU"] = 4
    assert resolver.num_accelerators() == {"GPU": 2}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"cluster_spec": {"worker": ["a:1"]}},
            "cluster_spec is a ClusterSpec, .*; got {'worker'",
        ),
        ({"cluster_spec": None}, "cluster_spec is a ClusterSpec, .*; got None"),
        ({"master": 1}, "master is an address, a string; got 1"),
        (
            {"num_accelerators": 8},
            "num_accelerators is a dict of numbers by kind, {'GPU': 8}; got 8",
        ),
        ({"task_id": 0.5}, "The index of a task is an integer"),
    ],
)
def test_what_no_resolver_can_be_made_of_is_refused(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TypeError, match=r"^" + sentence):
        SimpleClusterResolver(**{"cluster_spec": TWO, **options})


# What all resolvers have


@pytest.mark.parametrize(
    "resolver",
    [
        lambda: SimpleClusterResolver(TWO),
        TFConfigClusterResolver,
        lambda: UnionResolver(Elsewhere()),
        Elsewhere,
    ],
    ids=["simple", "tf_config", "union", "elsewhere"],
)
def test_which_task_this_is_can_be_set(
    resolver: Callable[[], ClusterResolver], tf_config: Any
) -> None:
    this = resolver()
    assert (this.task_type, this.task_id, this.rpc_layer) == (None, None, None)
    this.task_type, this.task_id, this.rpc_layer = "ps", 0, "grpc"
    assert (this.task_type, this.task_id, this.rpc_layer) == ("ps", 0, "grpc")
    with pytest.raises(ValueError, match=r"^The index of a task is 0 or more; got -1"):
        this.task_id = -1
    this.task_type = this.task_id = None
    assert (this.task_type, this.task_id) == (None, None)


def test_the_base_cannot_be_made_without_what_it_is_to_know() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()  # type: ignore[abstract]


def test_a_resolver_of_the_users_own_counts_the_accelerators_of_this_machine() -> None:
    resolver, here = (
        Elsewhere(),
        len(simulated_devices()) or torch.accelerator.device_count(),
    )
    assert resolver.num_accelerators() == ({"GPU": here} if here else {})
    assert resolver.num_accelerators()["TPU"] == 0
    assert resolver.environment == ""
    resolver.task_type, resolver.task_id = "worker", 1
    assert (
        resolver.num_accelerators("worker", 1)
        == resolver.num_accelerators("worker")
        == resolver.num_accelerators()
    )
    with pytest.raises(
        ValueError,
        match=(
            r"^num_accelerators was asked about worker 0, and this process, worker 1, "
            r"sees"
        ),
    ):
        resolver.num_accelerators("worker", 0)


@pytest.mark.parametrize(
    "resolver", [Elsewhere(), SimpleClusterResolver(TWO), UnionResolver(Elsewhere())]
)
def test_the_configuration_of_a_session_is_refused(resolver: ClusterResolver) -> None:
    with pytest.raises(
        ValueError,
        match=r"^config_proto=3 configures a session, and there are none here\.",
    ):
        resolver.num_accelerators(config_proto=3)  # type: ignore[arg-type]


# TFConfigClusterResolver


def test_without_tf_config_nothing_is_known(tf_config: Any) -> None:
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec({})
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (
        None,
        None,
        None,
    )
    assert (resolver.master(), resolver.environment) == ("", None)


def test_tf_config_is_read_whenever_something_is_asked(tf_config: Any) -> None:
    resolver = TFConfigClusterResolver()
    for index in ("1", 0):
        cluster = {"worker": ["a:1", "b:2"], "ps": {"5": "c:3"}}
        tf_config(
            {
                "cluster": cluster,
                "task": {"type": "worker", "index": index},
                "rpc_layer": "grpc",
            }
        )
        assert resolver.cluster_spec() == ClusterSpec(
            {"worker": ["a:1", "b:2"], "ps": {5: "c:3"}}
        )
        assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (
            "worker",
            int(index),
            "grpc",
        )
        assert resolver.master() == f"grpc://{'ab'[int(index)]}:{int(index) + 1}"
        assert resolver.master("ps", 5, "") == "c:3"


def test_what_is_given_wins_over_tf_config(tf_config: Any) -> None:
    tf_config(
        {
            "cluster": TWO.as_dict(),
            "task": {"type": "worker", "index": 1},
            "rpc_layer": "grpc",
        }
    )
    resolver = TFConfigClusterResolver("ps", 0, "rpc", "there")
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (
        "ps",
        0,
        "rpc",
    )
    assert (resolver.master(), resolver.environment) == ("rpc://c:3", "there")
    resolver.task_type = resolver.task_id = resolver.rpc_layer = None
    assert resolver.master() == "grpc://b:2"


def test_a_session_master_is_the_master(tf_config: Any) -> None:
    tf_config({"cluster": TWO.as_dict(), "session_master": "m:0", "rpc_layer": "grpc"})
    assert TFConfigClusterResolver().master() == "m:0"


def test_a_cluster_of_one_task_has_no_master(tf_config: Any) -> None:
    tf_config({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    assert TFConfigClusterResolver().master() == ""


@pytest.mark.parametrize("task", [{}, {"type": "worker"}, {"index": 0}])
def test_which_task_this_is_has_to_be_known_for_its_address(
    tf_config: Any, task: dict[str, Any]
) -> None:
    tf_config({"cluster": TWO.as_dict(), "task": task})
    resolver = TFConfigClusterResolver()
    with pytest.raises(
        ValueError,
        match=(
            r"^TF_CONFIG has a cluster of the jobs "
            r"\['worker', 'ps'\], and does not say"
        ),
    ):
        resolver.master()
    assert resolver.master("worker", 1) == "b:2"


def test_a_task_that_is_not_in_tf_config_has_no_address(tf_config: Any) -> None:
    tf_config({"cluster": TWO.as_dict(), "task": {"type": "worker", "index": 2}})
    with pytest.raises(ValueError, match=r"^The job 'worker' has no task 2"):
        TFConfigClusterResolver().master()


@pytest.mark.parametrize("text", ["", "{", "{'cluster': {}}"])
def test_tf_config_that_is_not_json_is_an_error_when_it_is_read(
    tf_config: Any, text: str
) -> None:
    tf_config(text)
    resolver = TFConfigClusterResolver()
    for ask in (resolver.cluster_spec, resolver.master, lambda: resolver.task_id):
        with pytest.raises(
            json.JSONDecodeError,
            match=r"^The environment variable TF_CONFIG is not JSON: ",
        ):
            ask()


@pytest.mark.parametrize(
    ("config", "error", "sentence"),
    [
        (
            "[]",
            ValueError,
            (
                r"The environment variable TF_CONFIG is no object such as "
                r"\{\"cluster\": \.\.\.\}: \[\]"
            ),
        ),
        (
            {"task": "worker"},
            ValueError,
            '"task" in TF_CONFIG is an object with a "type" and an "index"',
        ),
        (
            {"task": {"index": "first"}},
            ValueError,
            "The index of a task is an integer; got 'first'",
        ),
    ],
)
def test_tf_config_of_another_form_is_an_error(
    tf_config: Any, config: Any, error: type, sentence: str
) -> None:
    tf_config(config)
    with pytest.raises(error, match=r"^" + sentence):
        _ = TFConfigClusterResolver().task_id


def _task(**task: Any) -> dict[str, Any]:
    return {"cluster": TWO.as_dict(), "task": {"type": "worker", "index": 0, **task}}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            "[" * 100_000,
            (
                "TF_CONFIG is no description of a cluster: its brackets are nested too "
                "deeply"
            ),
        ),
        (
            '{"cluster":' * 5000 + "{}" + "}" * 5000,
            "its brackets are nested too deeply",
        ),
        ("true", "TF_CONFIG is no object"),
        (
            _task(index=10**20),
            "index of a task is less than 1000000; got 10000.*TF_CONFIG",
        ),
        (_task(index="9" * 5000), "index of a task is an integer; got '999.*TF_CONFIG"),
        (
            json.dumps(_task()).replace('"index": 0', '"index": ' + "9" * 5000),
            "TF_CONFIG",
        ),
        (
            _task(index=True),
            "index of a task is an integer; got True, a bool.*TF_CONFIG",
        ),
        (
            _task(index=[0]),
            r"index of a task is an integer; got \[0\], a list.*TF_CONFIG",
        ),
        (
            _task(type=["worker"]),
            (
                r'"type" in the environment variable TF_CONFIG is a string; it is '
                r"\[\'worker\'\]"
            ),
        ),
        (
            _task(type=True),
            '"type" in the environment variable TF_CONFIG is a string; it is True',
        ),
        (
            {**_task(), "rpc_layer": 3},
            '"rpc_layer" in the environment variable TF_CONFIG is a string; it is 3',
        ),
        (
            {**_task(), "session_master": [1]},
            '"session_master" in the environment variable TF_CONFIG is a string',
        ),
        ({"cluster": True}, "A cluster is a dict.*got True.*TF_CONFIG"),
        (
            {"cluster": {"worker": {"10000000000": "a:1"}}},
            "index of a task is less than 1000000.*TF_CONFIG",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_nonsense_in_tf_config_is_a_value_error_that_names_it(
    tf_config: Any, config: Any, sentence: str
) -> None:
    """It was a RecursionError or a TypeError, or was taken, or used up the memory."""
    tf_config(config)
    resolver = TFConfigClusterResolver()
    with pytest.raises(ValueError, match=sentence) as caught:
        _ = resolver.task_type, resolver.cluster_spec(), resolver.master()
    assert len(str(caught.value)) < 300


def test_strategies_of_one_machine_ignore_tf_config(tf_config: Any) -> None:
    tf_config({"cluster": TWO.as_dict(), "task": {"type": "worker", "index": 0}})
    for strategy in (
        torchstrategy.OneDeviceStrategy("cpu"),
        torchstrategy.CentralStorageStrategy(["cpu"] * 2),
    ):
        assert strategy.cluster_resolver is None
        assert {device.type for device in strategy.extended.worker_devices} == {"cpu"}


# UnionResolver


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abc"), st.lists(ADDRESSES, min_size=1, max_size=3)
        ),
        min_size=1,
    )
)
def test_lists_of_tasks_follow_one_another(
    clusters: list[dict[str, list[str]]],
) -> None:
    union = UnionResolver(
        *(SimpleClusterResolver(ClusterSpec(cluster)) for cluster in clusters)
    )
    expected: dict[str, list[str]] = {}
    for cluster in clusters:
        for job, tasks in cluster.items():
            expected[job] = expected.get(job, []) + tasks
    assert union.cluster_spec().as_dict() == expected


@settings(deadline=None, max_examples=40)
@given(st.permutations(range(6)), st.integers(0, 6))
def test_tasks_with_indices_are_merged_by_them(indices: list[int], cut: int) -> None:
    tasks = {9: "w9", **{index: f"w{index}" for index in indices}}
    parts = [
        {9: "w9", **{i: tasks[i] for i in indices[:cut]}},
        {i: tasks[i] for i in indices[cut:]},
    ]
    union = UnionResolver(
        *(SimpleClusterResolver(ClusterSpec({"worker": part})) for part in parts)
    )
    assert union.cluster_spec() == ClusterSpec({"worker": tasks})


def test_a_list_that_meets_a_dict_counts_from_zero() -> None:
    listed = SimpleClusterResolver(ClusterSpec({"worker": ["a", "b"]}))
    assert UnionResolver(
        listed, SimpleClusterResolver(ClusterSpec({"worker": {3: "d"}}))
    ).cluster_spec().as_dict() == {"worker": {0: "a", 1: "b", 3: "d"}}
    with pytest.raises(
        KeyError, match="The clusters to unite both have a task 1 of the job 'worker'"
    ):
        UnionResolver(
            SimpleClusterResolver(ClusterSpec({"worker": {1: "c"}})), listed
        ).cluster_spec()


def test_what_is_not_the_sum_of_all_comes_from_the_first() -> None:
    first = SimpleClusterResolver(
        ClusterSpec({"worker": ["a:1"]}), "m:0", "worker", 1, "here", {"GPU": 2}, "grpc"
    )
    union = UnionResolver(
        first, SimpleClusterResolver(TWO, "n:0", "ps", 0, "there", {"GPU": 4}, "rpc")
    )
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 1, "grpc")
    assert (union.environment, union.num_accelerators()) == ("here", {"GPU": 2})
    assert union.master() == "grpc://m:0"
    assert union.master("worker", 2) == "grpc://b:2"
    assert union.master("ps", 0, "rpc") == "rpc://c:3"


def test_what_is_given_to_a_union_wins_over_the_first() -> None:
    first = SimpleClusterResolver(TWO, "m:0", "worker", 1)
    union = UnionResolver(first, task_type="ps", task_id=0, rpc_layer="rpc")
    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 0, "rpc")
    assert union.master() == "rpc://m:0"


def test_a_union_knows_what_its_parts_know_now(tf_config: Any) -> None:
    union = UnionResolver(SimpleClusterResolver(TWO), TFConfigClusterResolver())
    tf_config({"cluster": {"chief": ["d:4"]}})
    assert union.cluster_spec().jobs == ["worker", "ps", "chief"]


def test_a_union_of_nothing_or_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^UnionResolver\(\) has nothing to unite"):
        UnionResolver()
    with pytest.raises(
        TypeError, match=r"^UnionResolver unites ClusterResolvers; got ClusterSpec"
    ):
        UnionResolver(Elsewhere(), TWO)  # type: ignore[arg-type]
