"""What InputOptions, InputContext and InputReplicationMode hold and refuse."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from problems import shown
from torchstrategy._data.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
)

quickly = settings(max_examples=60, deadline=None, derandomize=True, database=None)
MAY_BE_LEFT_OPEN = [
    "experimental_fetch_to_device",
    "experimental_prefetch_to_device",
    "load_ahead",
]
FLAGS = [*MAY_BE_LEFT_OPEN, "experimental_place_dataset_on_device"]


def said(name: str, value: object) -> str:
    """How the message about an option begins."""
    return "^" + re.escape(f"InputOptions({name}={value!r}): ")


# InputReplicationMode


def test_the_modes_are_tensorflows_and_their_values_are_their_names() -> None:
    assert [(mode.name, mode.value) for mode in InputReplicationMode] == [
        ("PER_WORKER", "PER_WORKER"),
        ("PER_REPLICA", "PER_REPLICA"),
    ]


# InputContext


def test_a_context_is_by_default_the_one_of_a_single_replica() -> None:
    context = InputContext()
    assert (
        context.num_input_pipelines,
        context.input_pipeline_id,
        context.num_replicas_in_sync,
    ) == (1, 0, 1)


def test_a_context_takes_its_arguments_in_tensorflows_order() -> None:
    context = InputContext(2, 1, 4)
    assert (
        context.num_input_pipelines,
        context.input_pipeline_id,
        context.num_replicas_in_sync,
    ) == (2, 1, 4)
    assert str(context) == "torchstrategy.InputContext(input pipeline id 1, total: 2)"


@pytest.mark.parametrize(
    "name", ["num_input_pipelines", "input_pipeline_id", "num_replicas_in_sync"]
)
def test_what_a_context_says_cannot_be_changed(name: str) -> None:
    context = InputContext(2, 1, 4)
    with pytest.raises(AttributeError):
        setattr(context, name, 3)
    with pytest.raises(AttributeError):
        delattr(context, name)
    assert context == InputContext(2, 1, 4)


def test_a_context_does_not_judge_what_it_is_told() -> None:
    assert InputContext(0, 7, -1).input_pipeline_id == 7


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda context: pickle.loads(pickle.dumps(context))],
)
def test_a_context_can_be_sent_to_a_worker_process(copied: Any) -> None:
    assert copied(InputContext(2, 1, 4)) == InputContext(2, 1, 4)


@quickly
@given(st.integers(1, 64), st.integers(0, 64))
def test_the_batch_of_a_replica_is_its_part_of_the_global_one(
    replicas: int, size: int
) -> None:
    assert (
        InputContext(num_replicas_in_sync=replicas).get_per_replica_batch_size(
            size * replicas
        )
        == size
    )


@pytest.mark.parametrize(
    ("size", "replicas", "above"), [(7, 2, 8), (8, 3, 9), (1, 4, 4), (-3, 2, -2)]
)
def test_a_batch_that_cannot_be_divided_evenly_is_refused_with_one_that_can(
    size: int, replicas: int, above: int
) -> None:
    sentence = (
        rf"^A global batch size of {size} does not divide into {replicas} replicas\. "
        rf"The next size that does is {above};"
    )
    context = InputContext(num_replicas_in_sync=replicas)
    with pytest.raises(ValueError, match=sentence):
        context.get_per_replica_batch_size(size)
    assert context.get_per_replica_batch_size(above) * replicas == above


# InputOptions


def test_the_options_are_tensorflows_in_its_order_and_then_ours() -> None:
    assert dataclasses.asdict(InputOptions()) == {
        "experimental_fetch_to_device": True,
        "experimental_replication_mode": InputReplicationMode.PER_WORKER,
        "experimental_place_dataset_on_device": False,
        "experimental_per_replica_buffer_size": 2,
        "experimental_prefetch_to_device": None,
        "load_ahead": None,
        "row_shares": None,
        "lists_are_rows": None,
        "experimental_auto_shard_policy": AutoShardPolicy.AUTO,
    }
    assert list(dataclasses.asdict(InputOptions())) == [
        field.name for field in dataclasses.fields(InputOptions)
    ]


def test_every_option_is_kept() -> None:
    mode, policy = InputReplicationMode.PER_REPLICA, AutoShardPolicy.OFF
    options = InputOptions(False, mode, False, 5, False, True, [1, 2], True, policy)
    said = (False, mode, False, 5, False, True, (1.0, 2.0), True, policy)
    assert dataclasses.astuple(options) == said


def test_options_can_be_compared_hashed_and_sent_to_a_worker_process() -> None:
    options = InputOptions(row_shares=[3, 1], load_ahead=True)
    assert (
        options
        == InputOptions(row_shares=(3.0, 1.0), load_ahead=True)
        != InputOptions()
    )
    assert hash(options) == hash(InputOptions(row_shares=(3.0, 1.0), load_ahead=True))
    assert pickle.loads(pickle.dumps(options)) == options


def test_options_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        InputOptions().load_ahead = True  # type: ignore[misc]


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "yes", 1.0, np.bool_(True), []], ids=shown)
def test_what_is_true_or_false_takes_nothing_else(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=said(name, value) + "it is (True or )?False"):
        InputOptions(**{name: value})


def test_a_dataset_cannot_be_left_undecided_between_the_host_and_a_device() -> None:
    with pytest.raises(
        TypeError, match=said("experimental_place_dataset_on_device", None)
    ):
        InputOptions(experimental_place_dataset_on_device=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["PER_REPLICA", "per_worker", 0, None], ids=shown)
def test_a_replication_mode_is_a_member_and_not_its_name(mode: Any) -> None:
    sentence = (
        said("experimental_replication_mode", mode)
        + r"it is a torchstrategy\.InputReplicationMode\.$"
    )
    with pytest.raises(TypeError, match=sentence):
        InputOptions(experimental_replication_mode=mode)


@pytest.mark.parametrize("policy", ["OFF", -1, None], ids=shown)
def test_a_shard_policy_is_a_member_and_not_its_name(policy: Any) -> None:
    sentence = (
        said("experimental_auto_shard_policy", policy)
        + r"it is a torchstrategy\.experimental\.AutoShardPolicy"
    )
    with pytest.raises(TypeError, match=sentence):
        InputOptions(experimental_auto_shard_policy=policy)


def test_files_are_not_dealt_out() -> None:
    sentence = (
        said("experimental_auto_shard_policy", AutoShardPolicy.FILE)
        + ".*distribute_datasets_from_function"
    )
    with pytest.raises(ValueError, match=sentence):
        InputOptions(experimental_auto_shard_policy=AutoShardPolicy.FILE)


def test_a_dataset_on_a_device_is_refused_with_what_to_do() -> None:
    sentence = (
        said("experimental_place_dataset_on_device", True)
        + r"a loader runs in host memory\. Leave the option"
    )
    with pytest.raises(ValueError, match=sentence):
        InputOptions(experimental_place_dataset_on_device=True)


@pytest.mark.parametrize("size", [True, False, 2.0, "2", None], ids=shown)
def test_a_buffer_size_is_a_whole_number(size: Any) -> None:
    with pytest.raises(
        TypeError,
        match=said("experimental_per_replica_buffer_size", size)
        + "it is a whole number",
    ):
        InputOptions(experimental_per_replica_buffer_size=size)


@pytest.mark.parametrize("size", [0, -1])
def test_a_buffer_holds_at_least_a_batch(size: int) -> None:
    sentence = (
        said("experimental_per_replica_buffer_size", size)
        + r"it is at least 1 batch\. .* load_ahead=False\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        InputOptions(experimental_per_replica_buffer_size=size)


# The two names of experimental_fetch_to_device


@pytest.mark.parametrize("value", [True, False])
def test_the_older_name_is_the_same_option(value: bool) -> None:
    options = InputOptions(experimental_prefetch_to_device=value)
    assert options.experimental_fetch_to_device is value
    assert options == InputOptions(experimental_fetch_to_device=value)
    assert hash(options) == hash(InputOptions(experimental_fetch_to_device=value))
    assert options == InputOptions(
        experimental_fetch_to_device=value, experimental_prefetch_to_device=value
    )


@pytest.mark.parametrize("fetch", [True, False])
def test_two_names_that_contradict_each_other_are_refused(fetch: bool) -> None:
    sentence = re.escape(
        f"InputOptions(experimental_fetch_to_device={fetch}, "
        f"experimental_prefetch_to_device={not fetch}): these are two names of one "
        "option, and contradict each other."
    )
    with pytest.raises(ValueError, match=f"^{sentence}"):
        InputOptions(
            experimental_fetch_to_device=fetch,
            experimental_prefetch_to_device=not fetch,
        )


def test_replaced_options_are_those_that_were_asked_for_or_none() -> None:
    options = InputOptions(load_ahead=True)
    assert dataclasses.replace(
        options, experimental_fetch_to_device=False
    ) == InputOptions(False, load_ahead=True)
    assert dataclasses.replace(options, experimental_fetch_to_device=True) == options
    with pytest.raises(ValueError, match="two names of one option"):
        dataclasses.replace(
            InputOptions(experimental_prefetch_to_device=False),
            experimental_fetch_to_device=True,
        )


# row_shares


@quickly
@given(
    st.lists(
        st.floats(0, 1e6) | st.integers(0, 100) | st.fractions(0, 9),
        min_size=1,
        max_size=8,
    )
)
def test_shares_become_a_tuple_of_floats_in_the_same_proportion(
    shares: list[float],
) -> None:
    shares[0] += 1
    kept = InputOptions(row_shares=shares).row_shares
    assert kept == tuple(map(float, shares))
    assert all(type(share) is float for share in kept)


@pytest.mark.parametrize(
    "shares",
    [(3, 1), range(1, 3), list(np.array([3, 1])), [Fraction(1, 3), np.float32(0.5), 0]],
)
def test_shares_are_any_sequence_of_numbers(shares: Any) -> None:
    assert InputOptions(row_shares=shares).row_shares == tuple(
        float(share) for share in shares
    )


@pytest.mark.parametrize(
    "shares",
    [
        *([], [0], [0, 0.0], [-1, 3], [3, -1e-9]),
        *(
            [math.nan],
            [math.nan, 1],
            [1, math.nan],
            [math.inf, 1],
            [1, -math.inf],
            [1e308, 1e308],
        ),
        [np.uint8(200), -1],
    ],
    ids=shown,
)
def test_shares_that_say_nothing_are_refused_with_what_to_give(
    shares: list[float],
) -> None:
    sentence = (
        said("row_shares", shares)
        + r"it says in which proportion .* Give one finite number for each replica"
    )
    with pytest.raises(ValueError, match=sentence):
        InputOptions(row_shares=shares)


def test_shares_of_small_integer_types_do_not_wrap_around() -> None:
    assert InputOptions(row_shares=list(np.array([128, 128], np.uint8))).row_shares == (
        128.0,
        128.0,
    )


@pytest.mark.parametrize(
    "shares",
    ["31", ["3", "1"], [1, None], [1j, 1], 3, {3: 1}, {3, 1}, [[3, 1]]],
    ids=shown,
)
def test_shares_that_are_no_numbers_are_refused(shares: Any) -> None:
    with pytest.raises(
        TypeError,
        match=said("row_shares", shares)
        + "it is a list of numbers, one for each replica",
    ):
        InputOptions(row_shares=shares)
