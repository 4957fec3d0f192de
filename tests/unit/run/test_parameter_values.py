"""The mark of parameters' values, by which workers see uncounted writes.

Torch does not count these.
"""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from torchstrategy._group.workers import LONE
from torchstrategy._run.own.parameter_values import ValuesOfParameters
from torchstrategy._run.own.trained_tensors import TrainedTensors

SIZES = [3000, 5, 1024]


def marks_of(num_marks: int, edited: int | None = None, element: int = 0) -> list[int]:
    """The marks of so many backwards.

    Before them, NumPy writes an element of a parameter, or all (-1).
    """
    torch.manual_seed(0)
    module = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in SIZES])
    if edited is not None:
        where = slice(None) if element < 0 else element
        module[edited].detach().numpy()[where] += 1.0
    values = ValuesOfParameters(LONE)
    values.take(TrainedTensors([module], [], averages_buffers=True))
    return [values.mark() for _ in range(num_marks)]


@pytest.mark.parametrize("edited", range(3))
def test_a_write_on_all_of_a_tensor_shows_in_the_first_round(edited: int) -> None:
    before, after = marks_of(3), marks_of(3, edited, element=-1)
    assert [i for i in range(3) if before[i] != after[i]] == [edited]


@pytest.mark.parametrize(
    ("edited", "element"), [(0, 0), (0, 1023), (0, 1024), (0, 2999), (1, 4), (2, 1023)]
)
def test_a_write_on_any_element_shows_once_all_slices_had_their_turn(
    edited: int, element: int
) -> None:
    before, after = marks_of(9), marks_of(9, edited, element)
    assert before != after


def marks_with(parameter: torch.Tensor, num_marks: int = 4) -> list[int]:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(parameter))
    values = ValuesOfParameters(LONE)
    values.take(TrainedTensors([module], [], averages_buffers=True))
    return [values.mark() for _ in range(num_marks)]


def test_what_a_tensor_wraps_is_read_in_its_place() -> None:
    """It has no memory of its own.

    To read at its address ended the process, which is not always 0.
    """

    def marks(first: torch.Tensor, second: torch.Tensor) -> list[int]:
        return marks_with(TwoTensor(first[1000:], second[1000:]))

    known = marks(torch.ones(2000), torch.ones(2000))
    assert marks(torch.ones(2000), torch.ones(2000)) == known
    for parts in (
        (torch.ones(2000), torch.zeros(2000)),
        (torch.zeros(2000), torch.ones(2000)),
    ):
        assert marks(*parts) != known


def test_convolutions_with_their_channels_last_are_compared() -> None:
    """A worker wrote on its own weights, and nobody said so.

    No piece of them was ever read.
    """
    weight = torch.randn(8, 8, 3, 3)
    known = marks_with(weight)
    assert marks_with(weight.to(memory_format=torch.channels_last)) == known
    other = weight.to(memory_format=torch.channels_last)
    other.numpy()[7, 7, 2, 2] += 1
    assert marks_with(other) != known


def test_parameters_may_lose_their_memory_and_get_it_again() -> None:
    memory = torch.ones(3000)
    module = nn.ParameterList([nn.Parameter(memory[1000:], requires_grad=False)])
    values = ValuesOfParameters(LONE)
    values.take(TrainedTensors([module], [], averages_buffers=True))
    before = [values.mark() for _ in range(2)]
    memory.untyped_storage().resize_(0)
    assert len({values.mark() for _ in range(2)}) == 1
    memory.untyped_storage().resize_(12000)
    memory.numpy()[:] = 1
    assert [values.mark() for _ in range(2)] == before


def test_tensors_without_elements_and_no_tensors_have_marks() -> None:
    for parameters in ([], [nn.Parameter(torch.empty(0))]):
        values = ValuesOfParameters(LONE)
        values.take(
            TrainedTensors([nn.ParameterList(parameters)], [], averages_buffers=True)
        )
        assert values.mark() == values.mark()
