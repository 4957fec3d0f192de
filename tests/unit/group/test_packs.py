"""Values that are sent in packs are the values that are sent one by one."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstrategy
from problems import close, context, replica_id
from topologies import central
from torchstrategy.experimental import CommunicationOptions

THREE = central(3)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=2), max_size=5),
    st.sampled_from([torch.float32, torch.float64, torch.int64]),
    st.integers(0, 100),
)
def test_packs_change_no_number(
    shapes: list[list[int]], dtype: torch.dtype, size: int
) -> None:
    options = CommunicationOptions(bytes_per_pack=size)

    def step(options: CommunicationOptions | None) -> Any:
        mine = {
            str(i): (torch.arange(torch.Size(shape).numel()) * 0.1 + replica_id()).to(
                torch.get_default_device(), dtype
            )
            for i, shape in enumerate(shapes)
        }
        shaped = {key: tensor.view(shapes[int(key)]) for key, tensor in mine.items()}
        rows = {key: tensor.repeat(replica_id() + 1) for key, tensor in mine.items()}
        summed = context().all_reduce(
            "mean", [shaped, replica_id() + 1], options=options
        )
        return summed, context().all_gather(rows, 0, options=options), shaped

    def everything(options: CommunicationOptions | None) -> list[Any]:
        summed, joined, shaped = THREE.run(step, args=(options,))
        reduced = THREE.extended.reduce_to("mean", shaped, "cpu", options=options)
        pairs = [(shaped, "cpu"), (0, "cpu"), (list(shaped.values()), "cpu")]
        batch = THREE.extended.batch_reduce_to("sum", pairs, options=options)
        per_replica = [
            THREE.experimental_local_results(value) for value in (summed, joined)
        ]
        return [per_replica, reduced, batch]

    close(everything(options), everything(None), rtol=0, atol=0)


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 60), st.sampled_from([None, [3, 1, 1]]))
def test_packs_change_no_gradient(size: int, examples: list[int] | None) -> None:
    def step(options: CommunicationOptions | None) -> list[torch.Tensor | None]:
        leaves = [
            torch.full((n,), replica_id() + 1.0, requires_grad=True) for n in (3, 1, 2)
        ]
        sums = context().all_reduce(
            "sum", [leaf**3 for leaf in leaves], options=options
        )
        joined = context().all_gather(
            [leaf.exp() for leaf in leaves], 0, options=options
        )
        (
            torch.cat(sums).square().sum() * (replica_id() + 1)
            + torch.cat(joined).square().sum()
        ).backward()
        return [leaf.grad for leaf in leaves]

    run_options = torchstrategy.RunOptions(examples=examples)
    packed = THREE.run(
        step, args=(CommunicationOptions(bytes_per_pack=size),), options=run_options
    )
    plain = THREE.run(step, args=(None,), options=run_options)
    assert all(
        torch.equal(a, b)
        for p, q in zip(packed, plain, strict=True)
        for a, b in zip(p.values, q.values, strict=True)
    )


def test_replicas_may_ask_for_packs_of_different_sizes(
    several: torchstrategy.Strategy,
) -> None:
    def step() -> Any:
        options = CommunicationOptions(bytes_per_pack=4 * replica_id())
        return context().all_reduce(
            "sum", [torch.ones(2), torch.ones(1)], options=options
        )

    count = several.num_replicas_in_sync
    for total, size in zip(several.run(step), (2, 1), strict=True):
        assert [c.tolist() for c in total.values] == [[count] * size] * count
