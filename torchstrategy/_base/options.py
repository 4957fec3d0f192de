"""What a person says about one run, one variable or one value function."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Final, Literal, final

import torch

from torchstrategy._base.errors import require_type


@final
class VariableSynchronization(enum.Enum):
    """When the components of a `Variable` become one value.

    `ON_WRITE`: whenever the variable is assigned, so that all replicas have the same
    value. `AUTO` means `ON_WRITE`. `ON_READ`: when the variable is read outside of the
    replicas; until then each replica has a value of its own. `NONE`: never.

    Example:
        >>> torchstrategy.VariableSynchronization.ON_READ
        <VariableSynchronization.ON_READ: 3>

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/VariableSynchronization
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


@final
class VariableAggregation(enum.Enum):
    """How the values of several replicas become the one value of a `Variable`.

    They become one when the variable is assigned or read.

    `NONE`: they cannot become one; assigning the variable in a replica is an error.

    Example:
        >>> torchstrategy.VariableAggregation.SUM
        <VariableAggregation.SUM: 1>

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/VariableAggregation
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


@final
class ReduceOp(enum.Enum):
    """How values of several replicas become one.

    Arguments that take a member take its name, too, in any case: `"sum"`.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> value = strategy.run(lambda: torch.tensor([1.0, 3.0]) * 1)
        >>> strategy.reduce(torchstrategy.ReduceOp.SUM, value, axis=None)
        tensor([2., 6.])
        >>> strategy.reduce("mean", value, axis=0)
        tensor(2.)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/ReduceOp
    """

    # There are these two, and code takes whatever is not one of them for the other.
    # Gradients are reduced by them, too.
    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """The reduction that a `VariableAggregation` stands for.

        Example:
            >>> torchstrategy.ReduceOp.from_variable_aggregation(
            ...     torchstrategy.VariableAggregation.MEAN
            ... )
            <ReduceOp.MEAN: 'MEAN'>

        Raises:
            ValueError: If it is `NONE`, `ONLY_FIRST_REPLICA`, or no aggregation.

        Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/ReduceOp#from_variable_aggregation
        """
        if aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            return ReduceOp(aggregation.name)
        raise ValueError(
            f"{aggregation} is no reduction over replicas; SUM and MEAN are."
        )

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """The member `op`, or the member whose name `op` is.

        Raises:
            ValueError: If it is a string that names none.
            TypeError: If it is neither a member nor a string.
        """
        if isinstance(op, ReduceOp):
            return op
        require_type(
            op,
            str,
            "Expected reduce_op to be a torchstrategy.ReduceOp or its name, 'SUM' or "
            "'MEAN'",
        )
        if op.lower() == LOSS:
            raise ValueError(
                f"{op!r} is a reduction of gradients only: "
                "RunOptions(gradient_reduction='loss'). Values are reduced by 'SUM' or "
                "'MEAN'; the mean of losses by reduce('mean', loss, axis=None, "
                "weights=counts)."
            )
        if op.upper() not in cls.__members__:
            raise ValueError(f"{op!r} is not one of the reductions 'SUM', 'MEAN'.")
        return cls[op.upper()]


LOSS: Final = "loss"
# How gradients become one. "loss": as for `MEAN`, but each replica weighs what its loss
# was divided by.
GradientReduction = ReduceOp | Literal["loss"]


def as_gradient_reduction(said: ReduceOp | str) -> GradientReduction:
    """How gradients become one, as a person said: a `ReduceOp` member, or `"loss"`.

    Raises:
        ValueError: If it is a string that names no reduction.
        TypeError: If it is neither a member nor a string.
    """
    return LOSS if isinstance(said, str) and said.lower() == LOSS else ReduceOp.of(said)


@final
@dataclass(frozen=True)
class RunOptions:
    """Options of one `Strategy.run`.

    Args:
        experimental_enable_dynamic_batch_size: An option of TPUs. Only its default is
            accepted.
        experimental_bucketizing_dynamic_shape: An option of TPUs. Only its default is
            accepted.
        experimental_xla_options: An option of TPUs. Only its default is accepted.
        run_empty_replicas: Whether the step is called also in replicas that got no rows
            of the batch, with tensors of zero rows. By default such replicas take no
            part in the step. The gradient of such a replica is dropped.
        gradient_reduction: `MEAN`: the gradients of the replicas are averaged, each
            weighted by its number of examples, which is right for a loss that is a mean
            over examples. `SUM`: they are added, which is right for a loss that the
            step has divided by the global batch size. `"loss"`: the gradients are
            averaged, each weighted by what the loss of its replica was divided by, such
            as tokens, class weights or a mask: it is read from the graph of the loss
            when backward begins. What cannot be read is weighted as for `MEAN`, and a
            `LossWeightWarning` says so. Every replica runs as many backwards then, in
            all workers. None: the reduction of the strategy.
        examples: How much each replica counts, for `MEAN`. Either one number for each
            replica; or a function that is called for each replica with the arguments
            that the step gets there, before any step begins, and that returns the
            number: an int, a float, a bool, or a tensor with one element on any device,
            which is read. For a loss that is a mean over tokens, the function counts
            tokens. A replica without rows is not asked, and counts 0. The gradient of a
            replica that counts 0 is dropped; if all of them do, rows count. None: what
            the strategy was made with; without that, the numbers of rows that the
            distributed dataset gave to the replicas; without a distributed dataset, the
            same number for each.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(1, 2)
        >>> def step(inputs, targets):
        ...     torch.nn.functional.cross_entropy(
        ...         model(inputs), targets, ignore_index=-100
        ...     ).backward()
        >>> # One replica has two targets, and the other has one.
        >>> def count(inputs, targets):
        ...     return (targets != -100).sum()
        >>> batch = torch.ones(4, 1), torch.tensor([0, 1, -100, 1])
        >>> (batch,) = strategy.experimental_distribute_dataset([batch])
        >>> strategy.run(
        ...     step, args=batch, options=torchstrategy.RunOptions(examples=count)
        ... )
        >>> gradient = model.weight.grad.clone()
        >>> outputs, targets = model(torch.ones(3, 1)), torch.tensor([0, 1, 1])
        >>> torch.nn.functional.cross_entropy(outputs, targets).backward()  # adds
        >>> torch.allclose(model.weight.grad, 2 * gradient)
        True

    Differs from tf.distribute:
        TensorFlow ignores the TPU options on other strategies; here they are refused.
        TensorFlow does not have the last three options.

    Raises:
        ValueError: If a TPU option is set, or an example count is negative.
        TypeError: If `gradient_reduction` is no reduction, or `examples` is neither
            numbers nor a function.

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/RunOptions
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: None = None
    run_empty_replicas: bool = False
    gradient_reduction: ReduceOp | str | None = None
    examples: Sequence[float] | Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for option in fields(self):
            said = getattr(self, option.name)
            if option.name.startswith("experimental_") and said != option.default:
                raise ValueError(
                    f"RunOptions({option.name}={said!r}) is an option of TPUs and has "
                    "no meaning here."
                )
        if self.gradient_reduction is not None:
            object.__setattr__(
                self,
                "gradient_reduction",
                as_gradient_reduction(self.gradient_reduction),
            )
        if self.examples is not None and not callable(self.examples):
            given = self.examples
            is_list = isinstance(given, Iterable) and not isinstance(
                given, (str, dict, set)
            )
            items = given if is_list else ()
            examples = tuple(
                count.item() if isinstance(count, torch.Tensor) else count
                for count in items
            )
            if not is_list or not all(isinstance(count, Real) for count in examples):
                raise TypeError(
                    f"RunOptions(examples={given!r}): it is a list of numbers, one for "
                    "each replica; or a function that is called with the arguments of "
                    "the step, and returns how much a replica counts."
                )
            if not all(0 <= count < float("inf") for count in examples):
                raise ValueError(
                    f"RunOptions(examples={examples}) counts examples: each is a "
                    "number, not negative."
                )
            object.__setattr__(self, "examples", examples)


NO_OPTIONS = RunOptions()


@final
@dataclass(frozen=True)
class ValueContext:
    """Says which replica a value is made for.

    `Strategy.experimental_distribute_values_from_function` passes it to your function.

    Example:
        >>> context = torchstrategy.experimental.ValueContext(1, 4)
        >>> print(context)
        torchstrategy.ValueContext(replica id 1, total replicas in sync: 4)

    Source: https://www.tensorflow.org/versions/r2.4/api_docs/python/tf/distribute/experimental/ValueContext
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        replica, count = self.replica_id_in_sync_group, self.num_replicas_in_sync
        return (
            f"torchstrategy.ValueContext(replica id {replica}, total replicas in sync: "
            f"{count})"
        )
