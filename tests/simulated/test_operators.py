"""Some of torch's own operators, on a simulated device as on the CPU.

All of them are in `python tests/sweep`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conditions import for_changes
from sweep import exceptions, mixing, operators
from sweep.agreement import Trial, Verdict, judge
from sweep.mixing import Answer

HERE, ELSEWHERE = torch.device("sim:1"), torch.device("sim:2")
SAMPLED = [name for name in operators.names()[::18] if name not in exceptions.OPERATORS]
OPTIONS = {
    "complex64": "cumprod",
    "bfloat16": "nn_functional_layer_norm",
    "bool": "cat",
    "float64": "matmul",
}


@pytest.mark.parametrize("name", SAMPLED)
def test_an_operator_agrees_with_the_cpu(name: str) -> None:
    outcomes = [judge(trial, HERE) for trial in operators.trials(name, 2)]
    assert [
        outcome for outcome in outcomes if outcome.verdict is Verdict.DIFFERENT
    ] == []
    assert {outcome.verdict for outcome in outcomes} & {Verdict.EQUAL, Verdict.CLOSE}


@pytest.mark.parametrize(("dtype", "name"), OPTIONS.items())
def test_an_operator_agrees_with_the_cpu_in_another_dtype(
    dtype: str, name: str
) -> None:
    outcomes = [
        judge(trial, HERE) for trial in operators.trials(name, 2, getattr(torch, dtype))
    ]
    assert [
        outcome for outcome in outcomes if outcome.verdict is Verdict.DIFFERENT
    ] == []
    assert {outcome.verdict for outcome in outcomes} & {Verdict.EQUAL, Verdict.CLOSE}


@for_changes
def test_an_operator_takes_tensors_of_one_device_or_says_which_ones_it_was_given() -> (
    None
):
    answers = {
        name: [m.answer for m in mixing.mixtures(name, 2, HERE, ELSEWHERE)]
        for name in SAMPLED
    }
    taken = {name for name, given in answers.items() if Answer.TAKEN in given}
    assert taken <= exceptions.MIXED.keys()
    assert not any(
        Answer.WRONG in given or Answer.REFUSED in given for given in answers.values()
    )
    assert sum(given.count(Answer.NAMED) for given in answers.values()) > 30


def test_every_exception_is_an_operator_of_the_database_with_a_reason() -> None:
    for listed in (exceptions.OPERATORS, exceptions.MIXED):
        assert listed.keys() <= set(operators.names())
        assert all(listed.values())


@pytest.mark.parametrize(
    ("run", "difference"),
    [
        (
            lambda device: torch.ones(2, device=device) + (device.type == "sim"),
            "not close",
        ),
        (lambda device: torch.ones(2), "is on cpu"),
        (lambda device: torch.ones(2 + (device.type == "sim"), device=device), "sizes"),
        (
            lambda device: torch.ones(
                2, device=device, requires_grad=device.type == "sim"
            ),
            "requires_grad",
        ),
        (
            lambda device: (
                torch.ones(2, 2, device=device).t()
                if device.type == "sim"
                else torch.ones(2, 2)
            ),
            "strides",
        ),
        (
            lambda device: (
                [torch.ones(2, device=device)] * (1 + (device.type == "sim"))
            ),
            "instead of",
        ),
        (lambda device: {}["key"] if device.type == "sim" else 1, "KeyError"),
        (
            lambda device: {}["key"] if device.type == "cpu" else 1,
            "only the CPU raises",
        ),
        (lambda device: device.type == "sim", "True, not False"),
    ],
)
def test_a_trial_that_differs_is_found_out(
    run: Callable[[torch.device], object], difference: str
) -> None:
    outcome = judge(Trial("by hand", run), HERE)
    assert outcome.verdict is Verdict.DIFFERENT
    assert difference in outcome.difference


# What the sweep found.

OVERLAPPING = {
    "added": lambda x: x[1:].add_(x[:-1]),
    "copied": lambda x: x[1:].copy_(x[:-1]),
    "transposed": lambda x: x.view(3, 3).copy_(x.view(3, 3).t()),
    "out": lambda x: torch.cumsum(x[:-1], 0, out=x[1:]),
    "indexed": lambda x: x.index_copy_(0, torch.arange(8, device=x.device), x[1:]),
    "on lists": lambda x: torch._foreach_add_([x[1:]], [x[:-1]]),
}


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
@pytest.mark.parametrize("write", OVERLAPPING.values(), ids=OVERLAPPING)
def test_what_would_overwrite_what_it_reads_is_refused(
    device: str, write: Callable[[torch.Tensor], object]
) -> None:
    x = torch.arange(9.0, device=device)
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        write(x)
    assert torch.equal(x.cpu(), torch.arange(9.0))


def test_a_tensor_may_be_written_with_itself_and_with_what_it_does_not_overlap() -> (
    None
):
    x = torch.arange(8.0, device="sim:1")
    x.add_(x)
    x[:4].add_(x[4:])
    assert x.tolist() == [8, 12, 16, 20, 8, 10, 12, 14]


def test_an_out_that_is_a_part_of_a_tensor_and_too_small_is_refused() -> None:
    x = torch.zeros(4, device="sim:1")
    with pytest.raises(NotImplementedError, match=r"let `out` grow, of size \(2,\)"):
        torch.cumsum(torch.ones(3, device="sim:1"), 0, out=x[:2])
    assert x.tolist() == [0, 0, 0, 0]


def test_an_out_without_elements_that_is_read_is_refused() -> None:
    x = torch.zeros(0, device="sim:1")
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        torch.cat([torch.ones(2, device="sim:1"), x], out=x)


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_outs_in_a_list_are_resized(device: str) -> None:
    x = torch.arange(6.0, device=device).view(2, 3)
    outs = [torch.empty(0, device=device), torch.empty(0, device=device)]
    torch.unbind_copy(x, out=outs)
    assert [out.tolist() for out in outs] == [[0, 1, 2], [3, 4, 5]]
    assert {out.device for out in outs} == {x.device}


def test_an_out_that_the_cpu_leaves_to_be_conjugated_is_conjugated() -> None:
    matrix, wanted = (
        torch.randn(3, 3, dtype=torch.complex64),
        torch.randn(2, 3, dtype=torch.complex64),
    )
    factors, pivots = torch.linalg.lu_factor(matrix.to("sim:1"))
    solution = torch.empty(2, 3, dtype=torch.complex64, device="sim:1")
    torch.linalg.lu_solve(factors, pivots, wanted.to("sim:1"), left=False, out=solution)
    torch.testing.assert_close(solution.cpu() @ matrix, wanted)


def test_numbers_are_conjugated_in_place() -> None:
    assert torch.tensor([1 + 2j], device="sim:1").conj_physical_().tolist() == [1 - 2j]


def test_a_mode_is_written_to_an_out() -> None:
    values, indices = (
        torch.empty(0, device="sim:1"),
        torch.empty(0, dtype=torch.int64, device="sim:1"),
    )
    torch.mode(torch.tensor([1.0, 2.0, 2.0], device="sim:1"), out=(values, indices))
    assert (values.item(), indices.item()) == (2, 2)


def test_integers_are_counted_as_on_gpus() -> None:
    """The CPU's kernel takes floating-point numbers only.

    Layers of experts count the rows of each expert by it.
    """
    experts = torch.tensor([0, 2, 2, 1, 2], dtype=torch.int32, device="sim:0")
    counts = torch.histc(experts, bins=4, min=0, max=3)
    assert counts.dtype == torch.int32 and counts.tolist() == [1, 1, 3, 0]
    assert torch.histc(experts.float(), bins=4, min=0, max=3).tolist() == [1, 1, 3, 0]
