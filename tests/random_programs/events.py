"""What a user does between steps. An event that finds nothing to do does nothing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from . import modules
from .actions import Backward, Clip
from .layers import _HOOKS
from .layers import HOOKS as LAYER_HOOKS
from .marked import Marked, Varied
from .training import Hands, Training
from .writing import WAYS


@dataclass(frozen=True)
class Event:
    """Some lines between two steps."""

    def do(self, training: Training) -> None:
        """Does it."""
        raise NotImplementedError


def _one(found: Sequence[Any], index: int) -> list[Any]:
    return [found[index % len(found)]] if found else []


def _chosen(found: Sequence[Any], index: int | None) -> list[Any]:
    """One of them, or all."""
    return list(found) if index is None else _one(found, index)


@dataclass(frozen=True)
class Write(Event):
    """Writes on parameters."""

    how: str = "data.mul_"
    index: int | None = None

    def do(self, training: Training) -> None:
        has_graph = any(
            hasattr(module, "weight_g") for module in training.model.modules()
        )  # which torch does not swap
        how = "data.copy_" if has_graph and self.how == "swap_tensors" else self.how
        for parameter in _chosen(training.parameters(), self.index):
            WAYS[how](parameter)


@dataclass(frozen=True)
class WriteBuffers(Event):
    how: str = "data.mul_"
    index: int | None = None

    def do(self, training: Training) -> None:
        others = [
            m.buffer
            for m in training.model.modules()
            if isinstance(m, modules.Buffered) and m.shares_memory
        ]
        buffers = [
            b
            for b in training.model.buffers()
            if not any(b is other for other in others)
        ]
        floating = [b for b in buffers if b.is_floating_point() and b.is_contiguous()]
        for buffer in _chosen(floating, self.index):
            if self.how == "vector_to_parameters":
                buffer.data.mul_(0.5)
            else:
                WAYS[self.how](buffer)


@dataclass(frozen=True)
class WriteGradients(Event):
    how: str = "data.mul_"
    index: int | None = None

    def do(self, training: Training) -> None:
        for parameter in _chosen(training.with_gradients(), self.index):
            if parameter.grad.is_sparse or self.how == "vector_to_parameters":
                parameter.grad = parameter.grad * 0.5
            else:
                WAYS[self.how](parameter.grad)


@dataclass(frozen=True)
class GradientReducer(Event):
    """What steps do to gradients, after the run."""

    how: str = "norm"

    def do(self, training: Training) -> None:
        Clip(self.how).do(training, None, 0)


@dataclass(frozen=True)
class AssignGradients(Event):
    """Puts gradients there that no backward made."""

    def do(self, training: Training) -> None:
        for index, parameter in enumerate(training.parameters()):
            parameter.grad = torch.full_like(parameter.detach(), 0.01 * index)


@dataclass(frozen=True)
class WriteState(Event):
    """Writes on what an optimizer knows of its parameters."""

    how: str = "data.mul_"
    optimizer: int = 0

    def do(self, training: Training) -> None:
        for optimizer in _one(training.optimizers, self.optimizer):
            for entry in optimizer.state.values():
                for value in entry.values():
                    if (
                        isinstance(value, torch.Tensor)
                        and value.dim()
                        and value.is_contiguous()
                    ):
                        WAYS[
                            "data.copy_"
                            if self.how == "vector_to_parameters"
                            else self.how
                        ](value)


@dataclass(frozen=True)
class ReplaceState(Event):
    """Exchanges entries of an optimizer's state, or takes them away."""

    how: str = "clone"
    optimizer: int = 0

    def do(self, training: Training) -> None:
        for optimizer in _one(training.optimizers, self.optimizer):
            if self.how == "clear":
                optimizer.state.clear()
                return
            for entry in list(optimizer.state.values()):
                for name, value in entry.items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        entry[name] = value * 0.5
                if self.how == "new entry":
                    entry["note"] = 1.5


@dataclass(frozen=True)
class SaveViews(Event):
    """Keeps views of the weights as they are now, to write through them later."""

    def do(self, training: Training) -> None:
        training.views = [
            p.data.view(-1) if p.is_contiguous() else p.data
            for p in training.parameters()
        ]
        training.views += [
            b.data for b in training.model.buffers() if b.is_floating_point()
        ]


@dataclass(frozen=True)
class WriteViews(Event):
    def do(self, training: Training) -> None:
        for view in training.views:
            view[:1].mul_(0.5) if view.dim() else view.mul_(0.5)


@dataclass(frozen=True)
class ReplaceBuffer(Event):
    """Assigns a new tensor to a buffer."""

    mode: str = "assign"
    index: int = 0

    def do(self, training: Training) -> None:
        owners = [
            (module, name)
            for module in training.model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
        ]
        for module, name in _one(owners, self.index):
            if self.mode == "inference_mode":
                with torch.inference_mode():
                    setattr(module, name, getattr(module, name) * 0.5)
            elif self.mode == "registered":
                module.register_buffer(
                    name, getattr(module, name).detach().clone() * 0.5
                )
            elif self.mode == "deleted and registered":
                value = getattr(module, name).detach().clone() * 2
                delattr(module, name)
                module.register_buffer(name, value)
            else:
                setattr(module, name, getattr(module, name) * 0.5)


@dataclass(frozen=True)
class Change(Event):
    """Changes a setting of a layer."""

    value: float = 0.5

    def do(self, training: Training) -> None:
        for module in training.model.modules():
            if isinstance(module, (modules.Settings, Marked)):
                module.change(self.value)


@dataclass(frozen=True)
class Mark(Event):
    """Sets or deletes attributes of tensors."""

    how: str = "parameters"
    value: float = 1.0

    def do(self, training: Training) -> None:
        if self.how == "parameters":
            for parameter in training.parameters():
                parameter.tag = self.value
        elif self.how == "buffers":
            for buffer in training.model.buffers():
                buffer.tag = {"value": self.value}
        elif self.how == "unmark":
            for tensor in (*training.model.parameters(), *training.model.buffers()):
                vars(tensor).pop("tag", None)
        else:
            for module in training.model.modules():
                if isinstance(module, Marked):
                    module.forget()


@dataclass(frozen=True)
class CopyVariables(Event):
    """Goes on with copies of variables."""

    in_scope: bool = False

    def do(self, training: Training) -> None:
        with training.place.scope() if self.in_scope else nullcontext():
            for module in training.model.modules():
                if isinstance(module, Varied):
                    module.copy()


@dataclass(frozen=True)
class Reset(Event):
    """Sets what layers counted back to what it was, or forgets what they keep."""

    def do(self, training: Training) -> None:
        for module in training.model.modules():
            if isinstance(module, (modules.Counts, Marked)):
                module.reset()
            elif isinstance(module, modules.Keeps):
                module.kept_output = None
            elif isinstance(module, modules.WithProperty):
                module.rate = 1.0


@dataclass(frozen=True)
class NewAttribute(Event):
    """Gives modules an attribute that they did not have."""

    kind: str = "number"

    def do(self, training: Training) -> None:
        values = {
            "number": 3,
            "list": [1, [2]],
            "tensor": torch.ones(2),
            "dict": {"a": (1,)},
            "none": None,
        }
        for module in list(training.model.modules())[:2]:
            module.added = values[self.kind]


@dataclass(frozen=True)
class Freeze(Event):
    index: int | None = 0
    trainable: bool = False

    def do(self, training: Training) -> None:
        for parameter in _chosen(training.parameters(), self.index):
            parameter.requires_grad_(self.trainable)


@dataclass(frozen=True)
class Mode(Event):
    training: bool = False
    part: int | None = None

    def do(self, training: Training) -> None:
        if self.part is None:
            training.model.train(self.training)
        else:
            training.model[self.part % len(training.model)].train(self.training)


@dataclass(frozen=True)
class SwapLayer(Event):
    """Puts a new layer in the place of one; new optimizers."""

    index: int = 0

    def do(self, training: Training) -> None:
        training.reads = []  # the hook of which they know may no longer be called
        if not len(training.model):
            return
        linear = [
            i for i, module in enumerate(training.model) if type(module) is nn.Linear
        ]
        for i in _one(linear, self.index):
            width = training.model[i].in_features
            with training.place.scope():
                training.model[i] = modules.filled(nn.Linear(width, width), 7)
            training.renew(training.model)


@dataclass(frozen=True)
class AddLayer(Event):
    """One more layer; its parameters are a new group of the first optimizer."""

    update: bool = False

    def do(self, training: Training) -> None:
        linear = [module for module in training.model if type(module) is nn.Linear]
        if not linear or not training.optimizers:
            return
        with training.place.scope():
            layer = modules.filled(
                nn.Linear(linear[0].in_features, linear[0].in_features), 9
            )
        training.model.append(layer)
        training.optimizers[0].add_param_group({"params": list(layer.parameters())})
        training.schedule()
        if self.update:
            training.optimizers[0].step()


@dataclass(frozen=True)
class NewParameter(Event):
    """Assigns a new parameter to a layer; new optimizers."""

    index: int = 0

    def do(self, training: Training) -> None:
        for module in _one(
            [m for m in training.model.modules() if type(m) is nn.Linear], self.index
        ):
            if module.bias is not None and "bias" in module._parameters:
                with training.place.scope():
                    module.bias = nn.Parameter(module.bias.detach() * 0.5)
        training.renew(training.model)


@dataclass(frozen=True)
class NewOptimizers(Event):
    def do(self, training: Training) -> None:
        training.renew(training.model)


@dataclass(frozen=True)
class Save(Event):
    """Keeps the states of model and optimizers."""

    way: str = "deepcopy"

    def do(self, training: Training) -> None:
        state = training.model.state_dict()
        updates = [optimizer.state_dict() for optimizer in training.optimizers]
        if self.way == "torch.save":
            file = io.BytesIO()
            torch.save((state, updates), file)
            file.seek(0)
            state, updates = torch.load(file, weights_only=True)
        elif self.way == "pickle":
            state, updates = pickle.loads(pickle.dumps((state, updates)))
        elif self.way == "deepcopy":
            state, updates = copy.deepcopy((state, updates))
        else:
            updates = copy.deepcopy(updates)  # the model's is the living one
        training.states.append(dict(state))
        training.optimizer_states.append(updates)


@dataclass(frozen=True)
class Load(Event):
    """Loads what was saved."""

    what: str = "both"
    assign: bool = False

    def do(self, training: Training) -> None:
        if not training.states:
            return
        if self.what in ("both", "model"):
            known = training.model.state_dict()
            state = {
                k: v
                for k, v in training.states[-1].items()
                if k in known and v.shape == known[k].shape
            }
            training.model.load_state_dict(state, strict=False, assign=self.assign)
            if self.assign:
                training.renew(training.model)
        if self.what in ("both", "optimizers"):
            for optimizer, state in zip(
                training.optimizers, training.optimizer_states[-1], strict=True
            ):
                sizes = [len(group["params"]) for group in optimizer.param_groups]
                if sizes == [len(group["params"]) for group in state["param_groups"]]:
                    optimizer.load_state_dict(copy.deepcopy(state))


def _can_be_copied(model: nn.Module, way: str) -> bool:
    """Whether plain PyTorch copies it.

    Torch refuses what was computed, and to pickle parametrizations.
    """
    for module in model.modules():
        if hasattr(module, "weight_g") or any(
            name.endswith("_orig") for name in module._parameters
        ):
            return False
        if isinstance(module, modules.Keeps) and not module.detached:
            return False
        if way == "pickle" and (
            parametrize.is_parametrized(module) or isinstance(module, Varied)
        ):
            return False  # a variable in a pickle is of no strategy
    return True


def _copied(value: Any, way: str) -> Any:
    return (
        copy.deepcopy(value) if way == "deepcopy" else pickle.loads(pickle.dumps(value))
    )


@dataclass(frozen=True)
class Copy(Event):
    """Copies the model; goes on with the copy, or changes the copy and leaves it."""

    way: str = "deepcopy"
    goes_on: bool = False

    def do(self, training: Training) -> None:
        training.reads = []  # the hook of which they know may no longer be called
        if not _can_be_copied(training.model, self.way):
            return
        copied = _copied(training.model, self.way)
        if self.goes_on:
            training.renew(training.place.adopt(copied))
            return
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(0.5)
        training.others.append(copied)


@dataclass(frozen=True)
class CopyBoth(Event):
    """Copies model and optimizers in one go, and goes on with the copies."""

    way: str = "deepcopy"

    def do(self, training: Training) -> None:
        training.reads = []  # the hook of which they know may no longer be called
        around = any("inner" in vars(optimizer) for optimizer in training.optimizers)
        if around or not _can_be_copied(training.model, self.way):
            return
        copied, updates = _copied((training.model, training.optimizers), self.way)
        training.model = training.place.adopt(copied)
        training.forward = training.place.wrapped(training.model)
        training.optimizers = [
            training.place.adopt_optimizer(optimizer) for optimizer in updates
        ]
        training.schedule()


@dataclass(frozen=True)
class Regroup(Event):
    """Takes a parameter out of a group, or reorders parameters or groups."""

    how: str = "remove"
    optimizer: int = 0

    def do(self, training: Training) -> None:
        for optimizer in _one(training.optimizers, self.optimizer):
            groups = optimizer.param_groups
            if self.how == "remove" and len(groups[0]["params"]) > 1:
                groups[0]["params"].pop()
            elif self.how == "reverse":
                groups[0]["params"].reverse()
            elif self.how == "reverse groups":
                groups.reverse()
            elif self.how == "new list":
                groups[0]["params"] = list(groups[0]["params"])
            elif self.how == "split" and len(groups[0]["params"]) > 1:
                groups.append(
                    {**groups[0], "params": [groups[0]["params"].pop()], "lr": 0.02}
                )


@dataclass(frozen=True)
class Rate(Event):
    """Writes on the groups of an optimizer."""

    name: str = "lr"
    value: float = 0.02

    def do(self, training: Training) -> None:
        for optimizer in training.optimizers:
            for group in optimizer.param_groups:
                if self.name in group:
                    if isinstance(group[self.name], torch.Tensor):
                        group[self.name].fill_(self.value)
                    else:
                        group[self.name] = self.value


@dataclass(frozen=True)
class ScheduleOutside(Event):
    def do(self, training: Training) -> None:
        for scheduler in training.schedulers:
            scheduler.step()


@dataclass(frozen=True)
class ClearOutside(Event):
    set_to_none: bool = True

    def do(self, training: Training) -> None:
        training.model.zero_grad(self.set_to_none)


@dataclass(frozen=True)
class UpdateOutside(Event):
    """An update of an optimizer between runs, with whatever gradients there are."""

    index: int = 0

    def do(self, training: Training) -> None:
        for optimizer in _one(training.optimizers, self.index):
            optimizer.step()


@dataclass(frozen=True)
class TrainOutside(Event):
    """A whole step of plain PyTorch between runs."""

    def do(self, training: Training) -> None:
        linear = [m for m in training.model.modules() if hasattr(m, "in_features")]
        if not linear:
            return
        device, width = training.device(), linear[0].in_features
        # As many rows as no batch has: what a hook has kept of them is no part of a
        # batch.
        batch = tuple(modules.numbers((9, width), start).to(device) for start in (3, 5))
        Backward().do(Hands(training.model, [], []), (batch[0], batch[1]), 0)


@dataclass(frozen=True)
class Evaluate(Event):
    """Outputs for some rows: in replicas, or outside of them."""

    rows: int = 4
    mode: str = "no_grad"
    outside: bool = False
    evaluating: bool = True

    def do(self, training: Training) -> None:
        width = training.results_width
        inputs = modules.numbers((self.rows, width), 2).to(torch.device("cpu"))
        was = [module.training for module in training.model.modules()]
        if self.evaluating:
            training.model.eval()
        if self.outside:
            with modes(self.mode):
                output = training.model(inputs.to(training.device())).detach()
        else:
            forward, mode = training.forward, self.mode

            def look(batch: Any) -> Any:
                with modes(mode):
                    return forward(batch[0]).detach()

            batch = training.place.deal((inputs, inputs))
            output = training.place.gathered(training.place.run(look, batch))
        for module, mode in zip(training.model.modules(), was, strict=True):
            module.training = mode
        training.results.append(output.cpu().clone())


def modes(name: str) -> Any:
    """Whether gradients are wanted."""
    return {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "grad": torch.enable_grad,
    }[name]()


@dataclass(frozen=True)
class Teach(Event):
    """Brings a teacher, or an average, nearer to the model."""

    how: str = "data"

    def do(self, training: Training) -> None:
        if training.teacher is None:
            return
        pairs = list(
            zip(
                training.teacher.parameters(), training.model.parameters(), strict=False
            )
        )
        pairs = [(t, p) for t, p in pairs if t.shape == p.shape]
        if self.how == "data":
            for t, p in pairs:
                t.data.mul_(0.9).add_(p.data, alpha=0.1)
        elif self.how == "copy":
            for t, p in pairs:
                t.data.copy_(p.data)
        elif self.how == "no_grad":
            with torch.no_grad():
                for t, p in pairs:
                    t.lerp_(p, 0.1)
        else:
            with torch.no_grad():
                torch._foreach_lerp_(
                    [t.data for t, _ in pairs], [p.data for _, p in pairs], 0.1
                )


@dataclass(frozen=True)
class Average(Event):
    """torch's own average of the weights."""

    def do(self, training: Training) -> None:
        if training.averaged is None and not _can_be_copied(training.model, "deepcopy"):
            return
        if training.averaged is None:
            training.averaged = torch.optim.swa_utils.AveragedModel(training.model)
            training.others.append(training.averaged)
        training.averaged.update_parameters(training.model)


@dataclass(frozen=True)
class Hook(Event):
    """Registers a hook on a layer, or takes the last one away."""

    kind: str = "after forward"
    index: int = 0

    def do(self, training: Training) -> None:
        if self.kind == "remove":
            for handle in training.hooks[-1:]:
                handle.remove()
            del training.hooks[-1:]
            return
        for module in _one(
            [m for m in training.model.modules() if type(m) is nn.Linear], self.index
        ):
            made = _HOOKS[self.kind](module)
            training.hooks += made if isinstance(made, list) else [made]


HOOKS = [*LAYER_HOOKS, "remove", "remove"]


@dataclass(frozen=True)
class Parametrize(Event):
    """Registers a parametrization, or takes one away; new optimizers."""

    remove: bool = False
    index: int = 0

    def do(self, training: Training) -> None:
        every = list(training.model.modules())
        if self.remove:
            for module in _one(
                [m for m in every if parametrize.is_parametrized(m, "weight")],
                self.index,
            ):
                parametrize.remove_parametrizations(module, "weight")
        else:
            plain = [
                m
                for m in every
                if type(m) is nn.Linear
                and isinstance(m._parameters.get("weight"), nn.Parameter)
            ]
            with training.place.scope():
                for module in _one(plain, self.index):
                    parametrize.register_parametrization(
                        module, "weight", modules.Half()
                    )
        training.renew(training.model)


@dataclass(frozen=True)
class Prune(Event):
    """Prunes further, or makes it permanent; new optimizers."""

    remove: bool = False

    def do(self, training: Training) -> None:
        pruned = [m for m in training.model.modules() if hasattr(m, "weight_mask")]
        with training.place.scope():
            for module in pruned:
                if self.remove:
                    prune.remove(module, "weight")
                else:
                    prune.l1_unstructured(module, "weight", 0.3)
        training.renew(training.model)


@dataclass(frozen=True)
class RemoveWeightNorm(Event):
    def do(self, training: Training) -> None:
        for module in training.model.modules():
            if hasattr(module, "weight_g"):
                nn.utils.remove_weight_norm(module)
        training.renew(training.model)


@dataclass(frozen=True)
class Move(Event):
    """Calls that leave everything where it is, and may make new tensors."""

    how: str = "to"

    def do(self, training: Training) -> None:
        model = training.model
        if self.how == "to":
            model.to(training.device())
        elif self.how == "double":
            model.double()
        elif self.how == "there and back":
            # A sparse gradient is rounded entry by entry. One device has an entry for
            # each use of a row, and replicas have their sums: so the rounding is
            # another.
            if not any(
                p.grad is not None and p.grad.is_sparse for p in model.parameters()
            ):
                model.float()
                model.double()
        else:
            model.apply(lambda module: None)
            model.requires_grad_(True)


@dataclass(frozen=True)
class Failing(Event):
    """A step that raises, and is caught, in all replicas or in one.

    It raises before anything, or after its update.
    """

    late: bool = False
    everywhere: bool = True

    def do(self, training: Training) -> None:
        training.fail(self.late, self.everywhere)


def _clamp_data(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.clamp_(-0.3, 0.3)


def _clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.3, 0.3)


def _scale_gradients(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def _count_steps(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer.count = getattr(optimizer, "count", 0) + 1


_UPDATE_HOOKS: dict[str, Any] = {
    "clamp data after": lambda o: o.register_step_post_hook(_clamp_data),
    "clamp after": lambda o: o.register_step_post_hook(_clamp),
    "scale before": lambda o: o.register_step_pre_hook(_scale_gradients),
    "count": lambda o: o.register_step_post_hook(_count_steps),
}
UPDATE_HOOKS = list(_UPDATE_HOOKS)


@dataclass(frozen=True)
class UpdateHook(Event):
    """Registers a hook on an optimizer."""

    kind: str = "count"
    optimizer: int = 0

    def do(self, training: Training) -> None:
        for optimizer in _one(training.optimizers, self.optimizer):
            if "defaults" in vars(optimizer) and "_optimizer_step_post_hooks" in vars(
                optimizer
            ):
                _UPDATE_HOOKS[self.kind](optimizer)
