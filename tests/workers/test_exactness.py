"""Workers times replicas compute the numbers of one device, to 1e-12 in float64."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch

import torchstrategy
from conditions import for_releases, some_of
from workers.cluster import cluster
from workers.trainings import (
    COMPILED,
    EXACT,
    LIKE_ONE_PROCESS,
    compiled_by_inductor,
    difference,
    lbfgs,
    table,
    trained,
)

pytestmark = pytest.mark.slow

SHAPES = [(2, 1), (3, 1), (2, 2), (4, 1)]


@functools.cache
def of_one_device(make: object) -> dict[str, torch.Tensor]:
    return trained(torchstrategy.get_strategy(), make)


@pytest.mark.parametrize(("workers", "replicas"), SHAPES)
def test_workers_compute_the_numbers_of_one_device(workers: int, replicas: int) -> None:
    exact, like_one_process = some_of(EXACT), some_of(LIKE_ONE_PROCESS)
    found = cluster(workers).run(table, replicas, [*exact, *like_one_process])
    assert all(
        torch.isfinite(value).all()
        for of_one in found[0].values()
        for value in of_one.values()
    )
    differences = {
        make.__name__: max(
            difference(of_worker[make.__name__], of_one_device(make))
            for of_worker in found
        )
        for make in exact
    }
    assert {
        name: d
        for name, d in differences.items()
        if not d < (1e-9 if name == lbfgs.__name__ else 1e-12)
    } == {}
    for make in like_one_process:
        mirrored = trained(
            torchstrategy.MirroredStrategy(["cpu"] * workers * replicas), make
        )
        assert (
            max(difference(of_worker[make.__name__], mirrored) for of_worker in found)
            < 1e-12
        )
    for of_worker in found[1:]:
        for name in of_worker:
            assert all(
                torch.equal(found[0][name][key], value)
                for key, value in of_worker[name].items()
            ), name


@for_releases
@pytest.mark.filterwarnings(
    "default"
)  # torch warns of a compiled step with an update, in plain PyTorch too
@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (2, 2)])
def test_compiled_steps_compute_the_numbers_of_one_device(
    workers: int, replicas: int
) -> None:
    for of_worker in cluster(workers).run(table, replicas, COMPILED):
        for make in COMPILED:
            assert difference(of_worker[make.__name__], of_one_device(make)) < 1e-12


@for_releases
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="the compiler needs one for C++"
)
@pytest.mark.filterwarnings("default")
def test_a_model_that_inductor_compiles_has_the_numbers_of_one_device() -> None:
    for of_worker in cluster(2).run(table, 1, [compiled_by_inductor]):
        assert (
            difference(
                of_worker["compiled_by_inductor"], of_one_device(compiled_by_inductor)
            )
            < 1e-12
        )
