"""Ranks on a mesh of several dimensions.

What torch keeps by mesh in a process, each rank has for itself.

A tensor of 9 rows on a mesh of 2 x 2 has shards of other sizes in each rank. torch
plans once how a tensor with such shards is put together, and kept the plan by mesh: so
the first rank's plan was that of all. `full_tensor()` mixed up rows in silence, or a
rank was blamed for a collective that another rank's plan had made it call.
"""

from __future__ import annotations

import functools
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing import assert_close

from conditions import for_changes, for_releases
from torchstrategy.testing import RanksStopped, fail_in_rank, run_ranks

# torch says of its own plans that a flattened mesh would be faster, and uses what it
# has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")
Places = Sequence[Any]
SHAPES = [(2, 2), (2, 3), (3, 2), (2, 1, 3)]
ROWS = [10, 9, 8, 7, 3, 1, 0]


def rows(count: int, columns: int = 5) -> torch.Tensor:
    return torch.arange(float(count * columns), dtype=torch.float64).reshape(
        count, columns
    )


def count_of(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def cut(
    whole: torch.Tensor, shape: Sequence[int], places: Places, rank: int
) -> torch.Tensor:
    """The shard of a rank, as `torch.chunk` cuts it.

    Each dimension of the mesh cuts what the one before it has left.
    """
    coordinates = (
        (torch.arange(count_of(shape)).reshape(*shape) == rank).nonzero()[0].tolist()
    )
    for size, coordinate, place in zip(shape, coordinates, places, strict=True):
        if isinstance(place, Shard):
            parts = list(whole.chunk(size, place.dim)) if whole.shape[place.dim] else []
            whole = (
                parts[coordinate]
                if coordinate < len(parts)
                else whole.narrow(place.dim, 0, 0)
            )
    return whole


def all_places(dimensions: int) -> list[Places]:
    kinds = [Shard(0), Shard(1), Replicate()]
    return [list(places) for places in itertools.product(kinds, repeat=dimensions)]


# Shards


@for_releases
@pytest.mark.parametrize(
    "make", [init_device_mesh, None], ids=["init_device_mesh", "DeviceMesh"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_in_uneven_shards_is_put_together_again(
    shape: tuple[int, ...], make: Callable[..., DeviceMesh] | None
) -> None:
    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        ranks = torch.arange(count_of(shape)).reshape(*shape)
        mesh = make("cpu", shape) if make is not None else DeviceMesh("cpu", ranks)
        for count, places in itertools.product(ROWS, all_places(len(shape))):
            shard = distribute_tensor(rows(count), mesh, places)
            assert torch.equal(
                shard.to_local(), cut(rows(count), shape, places, rank)
            ), (count, places)
            assert torch.equal(shard.full_tensor(), rows(count)), (count, places)

    run_ranks(main, count_of(shape))


@for_releases
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_uneven_shards_move_to_any_other_places(shape: tuple[int, ...]) -> None:
    pairs = list(itertools.product(all_places(len(shape)), repeat=2))

    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", shape)
        for count, (before, after) in itertools.product((9, 1), pairs):
            moved = distribute_tensor(rows(count), mesh, before).redistribute(
                mesh, after
            )
            assert torch.equal(
                moved.to_local(), cut(rows(count), shape, after, rank)
            ), (count, before, after)
            assert torch.equal(moved.full_tensor(), rows(count)), (count, before, after)

    run_ranks(main, count_of(shape))


def test_sums_that_are_not_complete_are_added_up_for_each_rank() -> None:
    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 3))
        for after in all_places(2):
            partial = DTensor.from_local(rows(7) + rank, mesh, [Partial(), Partial()])
            assert torch.equal(
                partial.redistribute(mesh, after).to_local(),
                cut(6 * rows(7) + 15, (2, 3), after, rank),
            )

    run_ranks(main, 6)


@for_changes
def test_operators_on_uneven_shards_compute_what_they_compute_on_the_whole() -> None:
    operators: list[Callable[..., torch.Tensor]] = [
        lambda x, w: x @ w,
        lambda x, w: (x * 2 + 1).sum(0),
        lambda x, w: x.mean(1),
        lambda x, w: torch.softmax(x, 1),
        lambda x, w: x.t().contiguous(),
        lambda x, w: x.unsqueeze(1).squeeze(1),
        lambda x, w: x.view(9, 5, 1).flatten(1),
        lambda x, w: x[1:4],
        lambda x, w: x.norm(),
        lambda x, w: torch.cat([x, x]),
        lambda x, w: x.argmax(0),
    ]

    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2))
        x, w = rows(9) / 10, rows(5, 7) / 10
        for operator, places in itertools.product(
            operators, ([Shard(0)] * 2, [Shard(0), Shard(1)], [Shard(1)] * 2)
        ):
            result = operator(
                distribute_tensor(x, mesh, places), distribute_tensor(w, mesh, places)
            )
            assert isinstance(result, DTensor)
            assert_close(result.full_tensor(), operator(x, w))

    run_ranks(main, 4)


@for_changes
def test_slices_of_a_mesh_and_flattened_ones_tell_ranks_apart_too() -> None:
    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh(
            "cpu", (2, 2, 2), mesh_dim_names=("pipeline", "data", "tensor")
        )
        flat = mesh["data", "tensor"]._flatten("both")
        for count, part, shape in itertools.product(
            (7, 3), (mesh["data", "tensor"], flat), ((2, 2), (4,))
        ):
            if part.ndim == len(shape):
                place = [Shard(0)] * len(shape)
                shard = distribute_tensor(rows(count) + rank // 4, part, place)
                assert torch.equal(
                    shard.to_local(),
                    cut(rows(count) + rank // 4, shape, place, rank % 4),
                )
                assert torch.equal(shard.full_tensor(), rows(count) + rank // 4)

    run_ranks(main, 8)


# Runs


@for_releases
def test_a_run_knows_nothing_of_the_meshes_of_the_run_before() -> None:
    """The same mesh, other orders of ranks.

    What rank 3 had planned was at hand for another rank of the next run.
    """

    def main(rank: int, shape: tuple[int, ...]) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", shape)
        for count, places in itertools.product((9, 3), all_places(len(shape))):
            assert torch.equal(
                distribute_tensor(rows(count), mesh, places).full_tensor(), rows(count)
            )

    for shape in [(2, 2), (4,), (2, 3), (2, 2), (1, 4)]:
        n = count_of(shape)
        run_ranks(main, n, args=(shape,))
        run_ranks(main, n, args=(shape,), order=list(reversed(range(n))))


@for_changes
def test_what_runs_have_exchanged_does_not_pile_up() -> None:
    """torch's caches by mesh held the meshes, and these their process groups.

    These held all that the ranks had sent.
    """
    groups: list[weakref.ref[Any]] = []

    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        groups.append(weakref.ref(dist.group.WORLD))
        mesh = init_device_mesh("cpu", (2, 2))
        distribute_tensor(rows(9), mesh, [Shard(0), Shard(0)]).full_tensor()

    for _ in range(3):
        run_ranks(main, 4)
        gc.collect()
    # torch holds the groups of the last run until the next one.
    assert [group() for group in groups[:8]] == [None] * 8


@pytest.mark.parametrize("fails", range(4))
def test_the_rank_that_failed_is_the_one_that_is_named(fails: int) -> None:
    stopped: list[int] = []

    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2))
        try:
            for count in ROWS:
                shard = distribute_tensor(rows(count), mesh, [Shard(0), Shard(0)])
                assert torch.equal(shard.full_tensor(), rows(count))
        except RanksStopped as error:
            assert f"rank {fails} has failed: OverflowError" in str(error)
            stopped.append(rank)
            raise

    with (
        fail_in_rank(fails, at="all_gather", skip=3, error=OverflowError),
        pytest.raises(OverflowError) as error,
    ):
        run_ranks(main, 4)
    where, waited = error.value.__notes__
    assert where == f"raised in rank {fails} of 4" and waited.startswith(
        "Others waited then, and could not go on:\n"
    )
    assert fails not in stopped and stopped


# Training


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch_of(step: int, part: int) -> torch.Tensor:
    return torch.randn(
        3,
        5,
        generator=torch.Generator().manual_seed(10 * step + part),
        dtype=torch.float64,
    )


def fit_plainly(parts: int) -> list[torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(
            torch.cat([batch_of(step, part) for part in range(parts)])
        ).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@for_releases
@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 2)], ids=str)
def test_sharded_data_over_tensor_parallel_layers_train_as_plain_pytorch(
    shape: tuple[int, int],
) -> None:
    """Layers of 7 and 3 features: no number of shards divides them."""

    def main(rank: int) -> list[torch.Tensor]:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        model = make_model()
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        for layer in model[0], model[2], model:
            fully_shard(layer, mesh=mesh["data"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(
                batch_of(step, mesh.get_local_rank("data"))
            ).square().mean().backward()
            optimizer.step()
        return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]

    expected = fit_plainly(shape[0])
    for parameters in run_ranks(main, count_of(shape))[0]:
        assert_close(parameters, expected, rtol=1e-10, atol=1e-12)


def test_a_loss_over_sharded_classes_is_that_of_all_classes() -> None:
    """A rank that left `loss_parallel` took its operators from those still in it."""
    target = torch.tensor([1, 0, 6, 3])

    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        scores = rows(4, 7).sin()
        sharded = distribute_tensor(scores, mesh, [Shard(1)]).requires_grad_()
        for _ in range(2):
            with loss_parallel():
                loss = nn.functional.cross_entropy(sharded, target)
                loss.backward()
        plain = scores.clone().requires_grad_()
        expected = nn.functional.cross_entropy(plain, target)
        expected.backward()
        assert (
            isinstance(loss, DTensor)
            and isinstance(sharded.grad, DTensor)
            and plain.grad is not None
        )
        assert_close(loss.full_tensor(), expected)
        assert_close(sharded.grad.full_tensor(), 2 * plain.grad)

    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    run_ranks(main, 2)
    assert handlers == DTensor._op_dispatcher._custom_op_handlers


@for_changes
def test_plans_of_checkpoints_that_are_kept_are_those_of_the_rank(
    tmp_path: Path,
) -> None:
    """All ranks kept their plan under the name of its class.

    Ranks wrote what one of them had planned.
    """

    def main(rank: int, run: int) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2))
        places = [Shard(0), Shard(0)]
        for save in range(3):
            folder, whole = tmp_path / f"{run}-{save}", rows(7) + save
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(
                {"weight": distribute_tensor(whole, mesh, places)},
                checkpoint_id=folder,
                planner=planner,
            )
            loaded = distribute_tensor(torch.zeros_like(whole), mesh, places)
            dcp.load({"weight": loaded}, checkpoint_id=folder)
            assert torch.equal(loaded.full_tensor(), whole)

    for run in range(2):
        run_ranks(main, 4, args=(run,))


# Meshes as keys


def test_results_that_a_program_keeps_by_mesh_are_those_of_the_rank() -> None:
    @functools.cache
    def place_in(mesh: DeviceMesh) -> Any:
        return mesh.get_coordinate()

    def main(rank: int) -> list[int]:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        assert mesh == init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("data", "tensor")
        )
        dist.barrier()
        return list(place_in(mesh)) + list(place_in(mesh["tensor"]))

    assert run_ranks(main, 4)[0] == [[0, 0, 0], [0, 1, 1], [1, 0, 0], [1, 1, 1]]


def test_a_mesh_that_another_rank_has_sent_is_ones_own() -> None:
    def main(rank: int) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2))
        assert hash(mesh) == hash(pickle.loads(pickle.dumps(mesh)))
        sent = [mesh if rank == 3 else None]
        dist.broadcast_object_list(sent, src=3)
        assert sent[0] == mesh and hash(sent[0]) == hash(mesh)

    run_ranks(main, 4)


def test_meshes_outside_of_a_run_have_no_mark() -> None:
    # torch 2.10 has none.
    init, setstate = DeviceMesh.__init__, getattr(DeviceMesh, "__setstate__", None)

    def main(rank: int) -> DeviceMesh:
        dist.init_process_group("gloo")
        return init_device_mesh("cpu", (2,))

    first, second = run_ranks(main, 2)[0]
    assert first != second
    assert (
        DeviceMesh.__init__ is init
        and getattr(DeviceMesh, "__setstate__", None) is setstate
    )
