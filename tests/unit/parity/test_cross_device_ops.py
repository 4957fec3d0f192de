"""How values that are on several devices become one, and get back to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from problems import close
from topologies import SIMULATED, compute_devices
from torchstrategy import (
    CrossDeviceOps,
    DistributedValues,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReduceOp,
    ReductionToOneDevice,
)
from torchstrategy._base.distributed_values import ABSENT, Mirrored, PerReplica
from torchstrategy._group.transfer import (
    exchange_in_buckets,
    why_not_nccl,
)
from torchstrategy._parity.cross_device_ops import default_for
from torchstrategy.experimental import CommunicationOptions

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
ELSEWHERE = SIMULATED[4] if SIMULATED else torch.device("cpu")
OPS: dict[str, Callable[[], CrossDeviceOps]] = {
    "one device": ReductionToOneDevice,
    "one device, elsewhere": lambda: ReductionToOneDevice(ELSEWHERE),
    "one device, by a function": lambda: ReductionToOneDevice(
        accumulation_fn=lambda values: torch.stack(values).sum(0)
    ),
    "hierarchical, no packs": lambda: HierarchicalCopyAllReduce(0),
    "hierarchical": HierarchicalCopyAllReduce,
    "hierarchical, 3 packs": lambda: HierarchicalCopyAllReduce(3),
}
SHAPES = st.lists(st.integers(0, 3), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.complex64])


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> CrossDeviceOps:
    """Every way of reducing that works everywhere."""
    return OPS[request.param]()


def on_replicas(tensors: Sequence[torch.Tensor]) -> PerReplica:
    """Each of the tensors where a replica is."""
    return PerReplica(
        [
            t.to(device)
            for t, device in zip(tensors, compute_devices(len(tensors)), strict=True)
        ]
    )


def numbers(
    replicas: int,
    shape: Sequence[int] = (2,),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> PerReplica:
    """Values that are the same in no two replicas.

    They are whole numbers, so that any order of addition gives the same sum.
    """
    generator = torch.Generator().manual_seed(seed)
    whole = [
        torch.randint(-9, 9, tuple(shape), generator=generator) for _ in range(replicas)
    ]
    return on_replicas([tensor.to(dtype) for tensor in whole])


def total(value: DistributedValues) -> torch.Tensor:
    """The sum, by torch, on the CPU."""
    return torch.stack([component.cpu() for component in value.values]).sum(0)


def average(value: DistributedValues) -> torch.Tensor:
    """The mean, as decided for integers, too."""
    count = len(value.values)
    return total(value) / count if count > 1 else value.values[0]


def copies(value: DistributedValues) -> list[torch.Tensor]:
    return [component.clone() for component in value.values]


# What all of them do


@settings(deadline=None, max_examples=25)
@given(
    name=st.sampled_from(sorted(OPS)),
    replicas=st.integers(1, 5),
    kinds=st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=5),
    op=st.sampled_from([SUM, MEAN]),
    bytes_per_pack=st.sampled_from([0, 8, 64, 10**6]),
)
def test_many_values_are_reduced_to_where_they_are(
    name: str,
    replicas: int,
    kinds: list[tuple[list[int], torch.dtype]],
    op: ReduceOp,
    bytes_per_pack: int,
) -> None:
    values = [
        numbers(replicas, shape, dtype, seed)
        for seed, (shape, dtype) in enumerate(kinds)
    ]
    before = [copies(value) for value in values]
    options = (
        None
        if "function" in name
        else CommunicationOptions(bytes_per_pack=bytes_per_pack)
    )
    results = OPS[name]().batch_reduce(
        op, [(value, value) for value in values], options
    )
    for result, value, kept in zip(results, values, before, strict=True):
        expected = total(value) if op is SUM else average(value)
        components = result.values if replicas > 1 else (result,)
        assert [c.device for c in components] == [c.device for c in value.values]
        for component in components:
            close(component, expected.to(component.device), rtol=0, atol=0)
        close(value.values, tuple(kept))
    memory = [
        t.untyped_storage().data_ptr()
        for r in results
        for t in ((r,) if replicas == 1 else r.values)
        if t.numel()
    ]
    given = [
        t.untyped_storage().data_ptr()
        for value in values
        for t in value.values
        if t.numel()
    ]
    assert len({*memory, *given}) == len(memory) + len(given), (
        "a result shares memory with another or with a value"
    )


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_a_value_is_reduced_to_a_device(ops: CrossDeviceOps, replicas: int) -> None:
    value = numbers(replicas)
    there = torch.zeros(1, device=ELSEWHERE)
    for destination in (
        str(ELSEWHERE),
        ELSEWHERE,
        there,
        torch.nn.Parameter(there),
        PerReplica([there]),
    ):
        result = ops.reduce(SUM, value, destination)
        assert result.device == ELSEWHERE
        close(result.cpu(), total(value))
    assert there.tolist() == [0]


def test_a_value_is_reduced_to_what_is_on_several_devices(ops: CrossDeviceOps) -> None:
    value, where = numbers(2), numbers(4, (1,))
    result = ops.reduce(MEAN, value, where)
    assert isinstance(result, Mirrored)
    assert [c.device for c in result.values] == [c.device for c in where.values]
    for component in result.values:
        close(component.cpu(), average(value))
    assert len({c.data_ptr() for c in result.values}) == 4


def test_replicas_that_sat_the_step_out_have_no_part(ops: CrossDeviceOps) -> None:
    first, _, third = numbers(3).values
    value = PerReplica([first, ABSENT, third])
    for op, expected in (
        (SUM, first.cpu() + third.cpu()),
        (MEAN, (first.cpu() + third.cpu()) / 2),
    ):
        result = ops.reduce(op, value, value)
        assert result._components[1] is ABSENT
        for component in result.values:
            close(component.cpu(), expected)


def test_pairs_may_have_destinations_of_all_kinds(ops: CrossDeviceOps) -> None:
    several, alone, ints = (
        numbers(3),
        numbers(1)._components[0],
        numbers(3, (2, 2), torch.int64),
    )
    pairs = [
        (several, several),
        (alone, ELSEWHERE),
        (ints, ELSEWHERE),
        (alone, alone),
        (several, numbers(2)),
        (ints, ints),
    ]
    results = ops.batch_reduce(SUM, pairs)
    expected = [
        total(several),
        alone.cpu(),
        total(ints),
        alone.cpu(),
        total(several),
        total(ints),
    ]
    for result, number in zip(results, expected, strict=True):
        close(result.values[-1] if isinstance(result, Mirrored) else result, number)
    assert [isinstance(result, Mirrored) for result in results] == [
        True,
        False,
        False,
        False,
        True,
        True,
    ]


def test_no_pairs_have_no_results(ops: CrossDeviceOps) -> None:
    assert ops.batch_reduce(SUM, []) == []


@pytest.mark.parametrize("where", [ELSEWHERE, compute_devices(1)[0]])
@pytest.mark.parametrize("op", [SUM, MEAN])
def test_a_single_value_is_its_own_sum_and_mean(
    ops: CrossDeviceOps, op: ReduceOp, where: torch.device
) -> None:
    value = torch.tensor([3, 4], device=compute_devices(1)[0])
    result = ops.reduce(op, value, where)
    assert (result.tolist(), result.dtype, result.device) == (
        [3, 4],
        torch.int64,
        where,
    )
    result += 1
    assert value.tolist() == [3, 4]


def test_the_mean_of_integers_is_of_the_default_dtype(ops: CrossDeviceOps) -> None:
    value = on_replicas([torch.tensor(1), torch.tensor(2)])
    assert [c.item() for c in ops.reduce(MEAN, value, value).values] == [1.5, 1.5]
    assert ops.reduce(MEAN, value, value).values[0].dtype == torch.float32


def test_numbers_in_a_value_are_tensors(ops: CrossDeviceOps) -> None:
    assert ops.reduce(SUM, PerReplica([1.5, 2.5]), "cpu").item() == 4


def test_a_broadcast_makes_copies(ops: CrossDeviceOps) -> None:
    tensor, where = torch.ones(2, device=ELSEWHERE), numbers(3)
    one, several = ops.broadcast(tensor, ELSEWHERE), ops.broadcast(tensor, where)
    assert one.device == ELSEWHERE and isinstance(several, Mirrored)
    assert [c.device for c in several.values] == [c.device for c in where.values]
    assert len({t.data_ptr() for t in (tensor, one, *several.values)}) == 5
    close([one, *several.values], [torch.ones(2)] * 4)


def test_gradients_flow_through_a_reduction(ops: CrossDeviceOps) -> None:
    leaves = [
        torch.ones(2, device=device, requires_grad=True)
        for device in compute_devices(3)
    ]
    results = ops.batch_reduce(
        MEAN,
        [(PerReplica(leaves), PerReplica(leaves)), (PerReplica(leaves), ELSEWHERE)],
    )
    (results[0].values[1].cpu() * 6 + results[1].cpu() * 3).sum().backward()
    assert [leaf.grad.tolist() for leaf in leaves if leaf.grad is not None] == [
        [3, 3]
    ] * 3


@pytest.mark.parametrize("name", sorted(OPS.keys() - {"one device, by a function"}))
def test_sparse_values_are_reduced(name: str) -> None:
    dense = numbers(3)
    sparse = PerReplica(
        [
            torch.eye(2, dtype=torch.float64, device=d).to_sparse()
            for d in compute_devices(3)
        ]
    )
    first, second = OPS[name]().batch_reduce(MEAN, [(sparse, sparse), (dense, dense)])
    assert [c.to_dense().tolist() for c in first.values] == [[[1, 0], [0, 1]]] * 3
    close(second.values[0].cpu(), average(dense))


# What is refused

WRONG: dict[str, tuple[Callable[[CrossDeviceOps], Any], str]] = {
    "an operation by its name": (
        lambda o: o.reduce("sum", numbers(2), "cpu"),
        r"reduce takes a .*ReduceOp, .*got 'sum'",
    ),
    "no operation": (
        lambda o: o.reduce(None, numbers(2), "cpu"),
        r"reduce takes a .*ReduceOp, .*got None",
    ),
    "an operation for many": (
        lambda o: o.batch_reduce("SUM", [(numbers(2), "cpu")]),
        r"batch_reduce takes a .*ReduceOp, .*got 'SUM'",
    ),
    "a list of values": (
        lambda o: o.reduce(SUM, [torch.ones(1)], "cpu"),
        r"What is reduced is a distributed value or a tensor; got \[tensor",
    ),
    "a number": (
        lambda o: o.reduce(SUM, 1.0, "cpu"),
        r"What is reduced is a distributed value or a tensor; got 1\.0",
    ),
    "no value": (
        lambda o: o.reduce(SUM, None, "cpu"),
        "What is reduced is a distributed value or a tensor; got None",
    ),
    "no destination": (
        lambda o: o.reduce(SUM, numbers(2), None),
        "destinations says where the result goes",
    ),
    "an empty destination": (
        lambda o: o.reduce(SUM, numbers(2), ""),
        "destinations says where the result goes",
    ),
    "an index": (
        lambda o: o.reduce(SUM, numbers(2), 0),
        "destinations says where the result goes",
    ),
    "a list of destinations": (
        lambda o: o.reduce(SUM, numbers(2), ["cpu"]),
        "destinations says where the result goes",
    ),
    "a destination that is none": (
        lambda o: o.reduce(SUM, numbers(2), "foo"),
        "'foo' is not a device",
    ),
    "a destination elsewhere": (
        lambda o: o.reduce(SUM, numbers(2), "xpu:7"),
        "The device 'xpu:7' is not on this machine",
    ),
    "a destination of numbers": (
        lambda o: o.reduce(SUM, numbers(2), PerReplica([1, 2])),
        "destinations has a component 1, which is no tensor and on no device",
    ),
    "a pair that is a list": (
        lambda o: o.batch_reduce(SUM, [[numbers(2), "cpu"]]),
        "batch_reduce takes .* pairs; got",
    ),
    "a pair of three": (
        lambda o: o.batch_reduce(SUM, [(numbers(2), "cpu", 1)]),
        "batch_reduce takes .* pairs; got",
    ),
    "one pair": (
        lambda o: o.batch_reduce(SUM, (numbers(2), "cpu")),
        "batch_reduce takes .* pairs; got",
    ),
    "a pair without a destination": (
        lambda o: o.batch_reduce(SUM, [(numbers(2), numbers(2)), (numbers(2), "")]),
        "destinations says where the result goes",
    ),
    "what is no option": (
        lambda o: o.reduce(SUM, numbers(2), "cpu", 3),
        r"reduce\(options=3\): options are ",
    ),
    "an option of clusters": (
        lambda o: o.batch_reduce(
            SUM, [(numbers(2), "cpu")], CommunicationOptions(timeout_seconds=1)
        ),
        (
            r"batch_reduce\(options=CommunicationOptions\(timeout_seconds=1\)\): the "
            r"replicas are in one process"
        ),
    ),
    "a broadcast of no tensor": (
        lambda o: o.broadcast(1.0, "cpu"),
        r"broadcast takes a tensor; got 1\.0",
    ),
    "a broadcast to nowhere": (
        lambda o: o.broadcast(torch.ones(1), ""),
        "destinations says where the result goes",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_reduced_is_refused(ops: CrossDeviceOps, case: str) -> None:
    call, sentence = WRONG[case]
    with pytest.raises(ValueError, match=f"^(?:{sentence})"):
        call(ops)


@pytest.mark.parametrize("name", sorted(OPS.keys() - {"one device, by a function"}))
@pytest.mark.parametrize("other", [torch.ones(2), torch.ones((), dtype=torch.int64)])
def test_values_that_differ_in_shape_or_dtype_are_not_reduced(
    name: str, other: torch.Tensor
) -> None:
    value = on_replicas([torch.ones(()), other])
    for destinations in (value, "cpu"):
        with pytest.raises(
            ValueError,
            match=r"^The replicas' values cannot be added: \(\) torch\.float32 and ",
        ):
            OPS[name]().batch_reduce(SUM, [(value, destinations)])


@pytest.mark.parametrize("kind", [NcclAllReduce, HierarchicalCopyAllReduce])
def test_a_number_of_packs_is_0_or_more(kind: Callable[[Any], CrossDeviceOps]) -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"^num_packs is a number of packs, or 0 to send each value by itself; got "
            r"-1\."
        ),
    ):
        kind(-1)
    with pytest.raises(
        TypeError, match=r"^num_packs is a whole number of packs; got 1\.5\."
    ):
        kind(1.5)


# Reduction on one device


def test_a_function_is_given_all_values_on_the_device() -> None:
    seen: list[torch.Tensor] = []

    def largest(values: list[torch.Tensor]) -> torch.Tensor:
        seen.extend(values)
        return torch.stack(values).amax(0)

    value = on_replicas([torch.tensor([1.0, 8.0]), torch.tensor([4.0, 2.0])])
    ops = ReductionToOneDevice(ELSEWHERE, largest)
    assert ops.reduce(SUM, value, "cpu").tolist() == [4, 8]
    assert [t.tolist() for t in seen] == [[1, 8], [4, 2]] and {
        t.device for t in seen
    } == {ELSEWHERE}
    assert ops.reduce(MEAN, value, "cpu").tolist() == [2, 4]


def test_a_function_that_returns_what_it_was_given_does_not_give_it_away() -> None:
    value = numbers(2)
    result = ReductionToOneDevice(accumulation_fn=lambda values: values[0]).reduce(
        SUM, value, value.values[0]
    )
    assert result.data_ptr() != value.values[0].data_ptr()


def test_a_function_that_returns_no_tensor_is_an_error() -> None:
    with pytest.raises(
        TypeError, match=r"^accumulation_fn has to return a tensor; got 3, an int\."
    ):
        ReductionToOneDevice(accumulation_fn=lambda values: 3).reduce(
            SUM, numbers(2), "cpu"
        )  # type: ignore[arg-type, return-value]


def test_a_function_gets_no_packs() -> None:
    ops = ReductionToOneDevice(accumulation_fn=sum)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"^CommunicationOptions\(bytes_per_pack=8\) and an accumulation_fn, ",
    ):
        ops.reduce(SUM, numbers(2), "cpu", CommunicationOptions(bytes_per_pack=8))


def test_what_is_no_device_or_no_function_is_refused() -> None:
    with pytest.raises(ValueError, match="'foo' is not a device"):
        ReductionToOneDevice("foo")
    with pytest.raises(
        TypeError, match=r"^accumulation_fn is a function .*; got 'add_n', a str"
    ):
        ReductionToOneDevice(accumulation_fn="add_n")  # type: ignore[arg-type]


# NCCL


@pytest.mark.skipif(
    why_not_nccl([torch.device("cuda", 0)]) is None,
    reason="tests a machine without NCCL, and this one has it: hide its CUDA devices",
)
def test_where_there_is_no_nccl_an_all_reduce_is_refused() -> None:
    value = numbers(2)
    with pytest.raises(
        ValueError,
        match=(
            r"^NcclAllReduce fails here: NCCL joins CUDA "
            r"devices only, and these are "
        ),
    ):
        NcclAllReduce().batch_reduce(SUM, [(value, value)])


def test_nccl_joins_different_cuda_devices_only() -> None:
    cuda = torch.device("cuda", 0)
    assert "CUDA devices only, and these are cuda:0, cpu" in (
        why_not_nccl([cuda, torch.device("cpu")]) or ""
    )
    assert "all different, and these are cuda:0, cuda:0" in (
        why_not_nccl([cuda, cuda]) or ""
    )


def test_what_is_no_all_reduce_needs_no_nccl() -> None:
    value = on_replicas([torch.ones(2), torch.ones(2)])
    assert NcclAllReduce().reduce(SUM, value, "cpu").tolist() == [2, 2]
    host = PerReplica([torch.ones(1), torch.ones(1)])
    assert [c.item() for c in NcclAllReduce().reduce(MEAN, host, host).values] == [1, 1]
    assert NcclAllReduce().reduce(SUM, torch.ones(1), "cpu").tolist() == [1]


def test_packs_go_by_nccl_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[torch.Tensor]] = []

    def all_reduce(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        sent.append(inputs)
        for output in outputs:
            output.copy_(sum(tensor.cpu() for tensor in inputs))  # type: ignore[arg-type]

    monkeypatch.setattr(
        "torchstrategy._parity.cross_device_ops.why_not_nccl", lambda devices: None
    )
    monkeypatch.setattr("torch.cuda.nccl.all_reduce", all_reduce)
    values = [
        numbers(3, shape, seed=seed) for seed, shape in enumerate([(2, 3), (), (5,)])
    ]
    results = NcclAllReduce(num_packs=2).batch_reduce(
        MEAN, [(value, value) for value in values]
    )
    assert [[tensor.numel() for tensor in pack] for pack in sent] == [[6] * 3] * 2
    assert all(tensor.is_contiguous() for pack in sent for tensor in pack)
    for result, value in zip(results, values, strict=True):
        for component, original in zip(result.values, value.values, strict=True):
            assert component.device == original.device
            close(component.cpu(), average(value))
    assert isinstance(default_for([c.device for c in values[0].values]), NcclAllReduce)


def test_where_there_is_no_nccl_values_are_reduced_on_one_device() -> None:
    assert isinstance(default_for(compute_devices(2)), ReductionToOneDevice)
    for ops in (ReductionToOneDevice(), HierarchicalCopyAllReduce(), Largest()):
        ops._check_devices(compute_devices(2))
    with pytest.raises(ValueError, match=r"^NcclAllReduce fails here: "):
        NcclAllReduce()._check_devices(compute_devices(2))


# One's own


def test_the_base_does_not_say_how_to_reduce() -> None:
    for call in (
        lambda: CrossDeviceOps().reduce(SUM, numbers(2), "cpu"),
        lambda: CrossDeviceOps().batch_reduce(SUM, [(numbers(2), "cpu")]),
    ):
        with pytest.raises(
            NotImplementedError,
            match=r"^CrossDeviceOps does not say how to reduce: override ",
        ):
            call()
    assert CrossDeviceOps().broadcast(torch.ones(2), "cpu").tolist() == [1, 1]


class Largest(CrossDeviceOps):
    """One of the user's own, which says how to reduce one value."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        self.given.append((reduce_op, options))
        return self.broadcast(
            torch.stack([v.cpu() for v in per_replica_value.values]).amax(0),
            destinations,
        )


def test_one_of_the_users_own_reduces_one_by_one() -> None:
    ops = Largest()
    value = on_replicas([torch.tensor([1.0, 8.0]), torch.tensor([4.0, 2.0])])
    first, second = ops.batch_reduce(
        MEAN, [(value, value), (value, "cpu")], CommunicationOptions(bytes_per_pack=8)
    )
    assert [c.tolist() for c in first.values] == [[4, 8]] * 2 and second.tolist() == [
        4,
        8,
    ]
    assert ops.given == [(MEAN, CommunicationOptions(bytes_per_pack=8))] * 2


def test_one_of_the_users_own_need_not_think_of_what_was_not_said() -> None:
    ops = Largest()
    ops.reduce(SUM, PerReplica([1.0, 2.0]), "cpu")
    assert ops.given == [(SUM, CommunicationOptions())]


# The sums of gradients


@pytest.mark.parametrize("name", [*OPS, "the user's own"])
def test_weighted_sums_are_equal_in_all_replicas(name: str) -> None:
    ops = OPS[name]() if name in OPS else ByBroadcast()
    generator = torch.Generator().manual_seed(0)
    gradients = [
        [
            torch.randn(shape, generator=generator).to(device)
            for shape in [(3, 2), (), (5,)]
        ]
        for device in compute_devices(3)
    ]
    weights = [0.5, 0.25, 0.25]
    sums = ops._weighted_sums(gradients, weights, gradients)
    for i in range(3):
        expected = sum(w * g[i].cpu() for w, g in zip(weights, gradients, strict=True))
        for r in range(3):
            mine = sums[r][i]
            assert mine is not None and mine.device == gradients[r][i].device
            close(mine.cpu(), expected)
            assert torch.equal(mine.cpu(), sums[0][i].cpu())  # type: ignore[union-attr]


class ByBroadcast(CrossDeviceOps):
    """One of the user's own that is right."""

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        return self.broadcast(total(per_replica_value), destinations)


def test_what_has_no_weight_is_dropped_and_what_nobody_has_is_not_summed(
    ops: CrossDeviceOps,
) -> None:
    here, there, third = compute_devices(3)
    one, nan = torch.ones(2), torch.full((2,), torch.nan)
    by_replica = [
        [one.to(here), None, None],
        [None, None, one.to(there)],
        [nan.to(third), nan.to(third), None],
    ]
    places = [[torch.zeros(1, device=device)] * 3 for device in (here, there, third)]
    sums = ops._weighted_sums(by_replica, [0.5, 1, 0], places)
    for r, device in enumerate((here, there, third)):
        first, second, last = sums[r]
        assert first is not None and second is None and last is not None
        assert (first.tolist(), last.tolist()) == ([0.5, 0.5], [1, 1])
        assert first.device == last.device == device


def test_a_reduction_of_the_users_own_that_leaves_replicas_out_is_an_error() -> None:
    class Forgetful(CrossDeviceOps):
        def reduce_implementation(
            self,
            reduce_op: Any,
            per_replica_value: Any,
            destinations: Any,
            options: Any,
        ) -> Any:
            return total(per_replica_value)

    gradients = [[component] for component in numbers(2).values]
    with pytest.raises(
        ValueError,
        match=(
            r"^Forgetful reduced to tensor.*, for destinations of 2 components: it has "
            r"to "
        ),
    ):
        Forgetful()._weighted_sums(gradients, [1, 1], gradients)


# Packs

COLUMNS = st.lists(st.tuples(SHAPES, DTYPES), max_size=6)


def packs_of(
    columns: Sequence[Sequence[torch.Tensor]], limit: float, count: int = 1
) -> list[list[torch.Tensor]]:
    """The packs in which columns are sent, each with a tensor for each replica."""
    packs: list[list[torch.Tensor]] = []

    def note(pack: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        packs.append(list(pack))
        return packs[-1]

    exchange_in_buckets(columns, limit, note, count)
    return packs


def columns_of(
    kinds: list[tuple[list[int], torch.dtype]], replicas: int = 2
) -> list[tuple[torch.Tensor, ...]]:
    return [
        numbers(replicas, shape, dtype, seed).values
        for seed, (shape, dtype) in enumerate(kinds)
    ]


@settings(deadline=None, max_examples=60)
@given(COLUMNS, st.integers(1, 200))
def test_packs_have_so_many_bytes_at_most_unless_one_tensor_has_more(
    kinds: list[Any], limit: int
) -> None:
    columns = columns_of(kinds)
    sizes = [
        pack[0].numel() * pack[0].element_size() for pack in packs_of(columns, limit)
    ]
    alone = [column[0].numel() * column[0].element_size() for column in columns]
    assert all(size <= limit or size in alone for size in sizes)
    assert len(sizes) <= len(columns)
