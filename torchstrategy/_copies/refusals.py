"""Refusals of objects of which replicas cannot have copies.

`copy.deepcopy` does not refuse most of them: it makes a copy that would not learn, or
learn otherwise than the user's. So they are refused by name, when the user gives the
module to the strategy or when the first run copies it.
"""

from __future__ import annotations

import types
from collections.abc import Container, Sequence
from itertools import chain

import torch
from torch import nn

from torchstrategy._base.memory import LOST_MEMORY, has_lost_memory, wraps_others
from torchstrategy._base.objects.attribute_contents import (
    things_in,
    variables_in_closure,
)
from torchstrategy._base.objects.module_traversal import (
    HOOK_TABLES,
    computed_by_hooks,
    plain_attributes,
    tensors_with_attributes,
)
from torchstrategy._base.objects.proxies import plain_class
from torchstrategy._base.torch_internals import is_distributed_tensor
from torchstrategy._run.module_tensors import trainable_among
from torchstrategy._run.refusals import data_parallel, lazy
from torchstrategy._variables.variable import is_variable


def refuse_uncopyable(
    roots: Sequence[nn.Module],
    are_all: bool = True,
    further: Sequence[torch.Tensor] = (),
) -> None:
    """Refuses modules of which replicas cannot have copies.

    Args:
        roots: Modules, which are checked with all modules below them.
        are_all: True: there are no other modules, and copies are made now. False:
            copies are made later. A trainable tensor in a plain attribute is not
            refused then, since it may be a parameter of another module. Neither is a
            module that does not know its sizes yet, since it may learn them before the
            first run.
        further: Tensors that are copied besides, and that a module may hold in any way.

    Raises:
        TypeError: Naming what cannot be copied.
    """
    named = [
        pair
        for root in roots
        for pair in root.named_modules(prefix=type(root).__name__)
    ]
    parameters = {
        id(parameter)
        for _, module in named
        for parameter in module.parameters(recurse=False)
    }
    parameters.update(map(id, further))
    for path, module in named:
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{path} is a ScriptModule, which cannot be copied. Use the module it "
                "was made from."
            )
        if isinstance(module, nn.DataParallel):
            raise TypeError(data_parallel(path))
        for name, parameter in module._parameters.items():
            if parameter is not None and nn.parameter.is_lazy(parameter) and are_all:
                raise TypeError(lazy(f"{path}.{name}", type(module).__name__))
            if parameter is not None and not nn.parameter.is_lazy(parameter):
                _refuse_parameter(f"{path}.{name}", parameter)
        if not are_all:
            continue
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            _refuse_without_memory(f"{path}.{name}", tensor)
        # `weight_norm` and pruning keep the weight that they compute in a plain
        # attribute, and compute it again before each forward: of the replica's own
        # parameters.
        computed = computed_by_hooks(module)
        for name, value in {**module._buffers, **plain_attributes(module)}.items():
            if name not in computed and not (
                name in module._buffers and is_variable(value)
            ):
                refuse_trainable(f"{path}.{name}", value, parameters)
        for name, tensor in tensors_with_attributes(module):
            for key, value in vars(tensor).items():
                refuse_trainable(f"{path}.{name}.{key}", value, parameters)
        for hook in chain.from_iterable(
            vars(module)[table].values() for table in HOOK_TABLES
        ):
            refuse_trainable(f"A hook of {path}", hook, parameters)


def refuse_trainable(path: str, value: object, parameters: Container[int]) -> None:
    """Refuses a plain attribute with a trainable tensor or a function over one.

    Such a function closes over the tensor.

    Args:
        path: The path of the attribute.
        value: Its value.
        parameters: The ids of the parameters of modules, which may be held: an LSTM
            keeps a list of its own.

    Raises:
        TypeError: Naming it.
    """
    for where in trainable_among(things_in(path, value), parameters):
        raise TypeError(
            f"{where} is a tensor that requires grad in a plain attribute, so a "
            "replica's copy would not learn. Make it a torch.nn.Parameter(...) or "
            "torch.nn.ParameterList([...]) of the module, or detach it."
        )
    for name in trainable_among(
        variables_in_closure(value) if isinstance(value, types.FunctionType) else (),
        parameters,
    ):
        raise TypeError(
            f"{path} is a function that closes over {name}, a tensor that requires "
            "grad and is no parameter: every replica would add to its one gradient. "
            "Make it a torch.nn.Parameter(...) of the module, or detach it."
        )


def _refuse_without_memory(name: str, tensor: torch.Tensor | None) -> None:
    if tensor is None:
        return
    if has_lost_memory(tensor):
        raise TypeError(LOST_MEMORY.format(name))
    if (
        wraps_others(tensor)
        and tensor.layout is torch.strided
        and not is_variable(tensor)
    ):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, which wraps other tensors: replicas "
            "have copies of tensors with memory of their own only. Use "
            "MultiWorkerMirroredStrategy with one device in each process: it makes no "
            "copies. Or register the tensors that it wraps."
        )


def _refuse_parameter(name: str, parameter: torch.Tensor) -> None:
    if parameter.is_inference():
        raise TypeError(
            f"{name} was made in torch.inference_mode(), where torch does not count "
            "what is written on a tensor, so that copies could not be kept in step. "
            "Make the model outside of that mode."
        )
    if plain_class(type(parameter)) is not nn.Parameter and not is_variable(parameter):
        if is_distributed_tensor(parameter):
            raise TypeError(
                f"{name} is a DTensor, of which each process has a part, and this "
                "strategy makes copies of whole models. Use "
                "MultiWorkerMirroredStrategy with one device in each process: it "
                "trains sharded models."
            )
        kind = type(parameter).__name__
        if plain_class(type(parameter)) is torch.Tensor:
            raise TypeError(
                f"{name} is a plain tensor and no torch.nn.Parameter, as "
                "torch.func.functional_call puts it there for the length of a call. "
                "Replicas have copies of parameters only: call functional_call in the "
                "step that strategy.run runs, and not around it."
            )
        raise TypeError(
            f"{name} is a {kind}. Replicas can have copies of torch.nn.Parameter, not "
            "of its subclasses."
        )
