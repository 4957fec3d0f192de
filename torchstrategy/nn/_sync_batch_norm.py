"""Batch normalisation over the whole batch, however many replicas share its rows.

For each channel, each replica brings the number of its values, their mean, and the sums
of their differences from that mean and of the squares of these. From these, every
replica computes the mean and the variance of the whole batch, as exactly as two passes
over it would. That is one synchronization point in the forward, and another one in the
backward, where gradients flow back through it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchstrategy._base.errors import require_type
from torchstrategy._base.objects.module_traversal import held_plainly
from torchstrategy._base.torch_internals import hide_from_compiler
from torchstrategy._group.group import ReplicaGroup, group_here

# The base class of all batch normalisation layers, reached without its private name.
_BATCH_NORM: Any = nn.BatchNorm1d.__mro__[1]
_TORCHS_OWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch normalisation over the rows of all replicas, as one device would do it.

    It takes the mean and the variance over these rows.

    Forward, backward and running statistics are those of `torch.nn.BatchNorm1d`, `2d`
    or `3d` on the whole batch, on any device. Rows of replicas whose gradient is
    dropped do not count. With a single replica, and outside of replicas, it is plain
    batch normalisation. Parameters, buffers and the names in `state_dict()` are those
    of `torch.nn.BatchNorm2d`.

    In training, the forward of each layer is a synchronization point, and so is its
    backward: every replica has to come to the same layers in the same order, and call
    backward in the step.

    Args:
        num_features: C, of inputs of shape (N, C, ...).
        eps: What is added to the variance, for numerical stability.
        momentum: How much each batch counts in the running statistics; None: all
            batches count the same.
        affine: Whether there are a weight and a bias to learn.
        track_running_stats: Whether there are running statistics, for evaluation.
            Without, a batch is normalised by its own also in evaluation, over all
            replicas.
        device: Where its tensors are made.
        dtype: Of which type they are.

    Example:
        >>> strategy = torchstrategy.CentralStorageStrategy(["cpu", "cpu"])
        >>> with strategy.scope():
        ...     norm = torchstrategy.nn.SyncBatchNorm(1, affine=False)
        >>> loader = torch.utils.data.DataLoader(
        ...     torch.arange(3.0).unsqueeze(1), batch_size=3
        ... )
        >>> for batch in strategy.experimental_distribute_dataset(loader):
        ...     strategy.gather(strategy.run(norm, args=(batch,)), axis=0)
        tensor([[-1.2247],
                [ 0.0000],
                [ 1.2247]])

    Differs from torch.nn:
        `torch.nn.SyncBatchNorm` is for processes, each with an accelerator; this one is
        for the replicas of a strategy, and has no `process_group`. It synchronises in
        evaluation, too, where there are no running statistics.

    Raises:
        ValueError: From `run`, if an input has no channel dimension or not
            `num_features` channels, or if the whole batch has a single value of each
            channel, whose variance is not known.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
    """

    process_group: None = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device=device,
            dtype=dtype,
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises a batch, of which each replica has some rows."""
        uses_batch = self.training or (
            self.running_mean is None and self.running_var is None
        )
        group = group_here("SyncBatchNorm") if uses_batch else None
        if group is not None and group.participants.count > 1:
            return self._synchronise(input, group)
        return nn.BatchNorm1d.forward(self, input)

    @classmethod
    # The method of torch also has a parameter `process_group`.
    def convert_sync_batchnorm(cls, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Puts a `SyncBatchNorm` in the place of each batch normalisation of a model.

        The new layers have the very parameters, buffers, hooks and attributes of the
        old ones, so that an optimizer that was made before goes on training them.
        Everything else about the model stays as it is.

        Args:
            module: The model, made in a strategy's scope or anywhere. It is changed.

        Returns:
            The model; for a layer of batch normalisation itself, what takes its place.

        Example:
            >>> model = torch.nn.Sequential(
            ...     torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)
            ... )
            >>> model = torchstrategy.nn.SyncBatchNorm.convert_sync_batchnorm(model)
            >>> [type(layer).__name__ for layer in model]
            ['Linear', 'SyncBatchNorm']

        Differs from torch.nn:
            Hooks are kept. A layer that is used twice stays one layer. A layer that
            does something of its own is refused, where torch would convert it and drop
            that.

        Raises:
            TypeError: If a layer cannot be converted; then none is.
        """
        require_type(module, nn.Module, "convert_sync_batchnorm takes a module")
        root = type(module).__name__
        olds = {
            path: part
            for path, part in module.named_modules(prefix=root)
            if _is_to_convert(part)
        }
        for path, part in olds.items():
            _refuse_own_ways(path, part)
        for path, parent in module.named_modules(prefix=root):
            for where, held in held_plainly(parent):
                if _is_to_convert(held):
                    raise TypeError(
                        f"{path}{where} is a {type(held).__name__} in a plain "
                        "attribute, where nothing can take its place. Keep layers in "
                        "torch.nn.ModuleList or torch.nn.ModuleDict."
                    )
        news: dict[int, nn.Module] = {}
        for old in olds.values():
            # The new layer has the very tables of the old one: its parameters, buffers
            # and hooks, not copies of them.
            news[id(old)] = new = cls.__new__(cls)
            nn.Module.__setstate__(new, vars(old))
        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                if id(child) in news:
                    parent.register_module(name, news[id(child)])
        return news.get(id(module), module)

    def _synchronise(self, input: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) was given an input of shape "
                f"{tuple(input.shape)}, which has {input.shape[1]} channels in "
                "dimension 1."
            )
        dims = [0, *range(2, input.dim())]
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        # Squares of differences from a point near the mean lose no digits when they are
        # added up. The statistics do not depend on the point that is chosen, so no
        # gradient has to flow through the choice.
        count = input.numel() // self.num_features
        point = values.detach().sum(dims) / max(count, 1)
        centred = values - _view_by_channel(point, input)
        brought = torch.stack(
            [
                torch.full_like(point, count),
                point,
                centred.sum(dims),
                centred.square().sum(dims),
            ]
        )
        if not group.weight:
            # Zeros, whatever is there, but with the graph of it: without,
            # `backward(inputs=...)` would not come to the backward of this layer here,
            # where the other replicas wait. The sum of no elements is 0, and autograd
            # saves nothing of it: the user's hooks for saved tensors may be made for
            # floating-point numbers only.
            brought = torch.zeros_like(brought) + brought[:0].sum()
        gathered = group.all_gather(
            [brought.unsqueeze(0)], axis=0, name="SyncBatchNorm"
        )[0]
        total, reference, offset, variance = _combine(gathered)
        # The total is on the device, and to read it is to wait for the device. A
        # replica with two values knows without that there are enough.
        known = int(total[0]) if count <= 1 else count
        if known == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training: the whole batch "
                f"has 1, of which this replica has an input of size {input.shape}."
            )
        if self.training and self.track_running_stats:
            self._track(known > 0, reference + offset, variance * (total / (total - 1)))
        scale = (variance + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        shift = (point - reference - offset) * scale
        if self.bias is not None:
            shift = shift + self.bias
        return torch.addcmul(
            _view_by_channel(shift, input), centred, _view_by_channel(scale, input)
        ).to(input.dtype)

    @torch.no_grad()
    def _track(
        self, has_values: bool, mean: torch.Tensor, variance: torch.Tensor
    ) -> None:
        """Counts the batch in the running statistics, in every replica alike."""
        factor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None and has_values:
                running.copy_((1 - factor) * running.to(value.dtype) + factor * value)


# A compiler would break its graph at the look-up of the replica and at the
# synchronization point, and make a graph of the few lines between them.
hide_from_compiler(SyncBatchNorm.forward)


def _combine(
    gathered: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many values all replicas have of each channel, and their mean and variance.

    The mean is relative to a reference point, which is returned, too.

    Args:
        gathered: For each replica the number of its values, its point, and the sums of
            differences from the point and of their squares, by channel.
    """
    counts, points, sums, squares = gathered.unbind(1)
    total, reference = counts.sum(0), points[0]
    known = counts.clamp(min=1)
    offsets = points - reference + sums / known
    offset = (counts * offsets).sum(0) / total.clamp(min=1)
    about_own_means = squares - sums.square() / known
    variance = (about_own_means + counts * (offsets - offset).square()).sum(
        0
    ) / total.clamp(min=1)
    return total, reference, offset, variance


def _view_by_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor with one value for each channel, shaped to broadcast over an input."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _is_to_convert(module: object) -> bool:
    return isinstance(module, _BATCH_NORM) and not isinstance(module, SyncBatchNorm)


def _refuse_own_ways(path: str, layer: nn.Module) -> None:
    """Refuses a layer with attributes or methods of its own.

    The `SyncBatchNorm` in its place would not have them.
    """
    if getattr(layer, "process_group", None) is not None:
        raise TypeError(
            f"{path} is a SyncBatchNorm with a process_group, and replicas are no "
            "processes: leave it out."
        )
    classes = type(layer).__mro__
    base = next((cls for cls in _TORCHS_OWN if cls in classes), None)
    added = classes[: classes.index(base)] if base else classes[:1]
    own = sorted(
        name for cls in added for name in vars(cls) if not name.startswith("__")
    )
    if base is None or own:
        what = (
            f"with {', '.join(own)} of its own"
            if own
            else "which is not one of torch.nn's own layers"
        )
        raise TypeError(
            f"{path} is a {type(layer).__name__}, {what}, which a SyncBatchNorm in its "
            "place would not have. Derive the class from "
            "torchstrategy.nn.SyncBatchNorm; a lazy layer becomes a plain one when it "
            "sees a batch."
        )
