"""The torch versions that are promised have the private names that the package uses: see torch_names.py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from house import torch_names
from house.picture import package

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("import torch\ntorch._foreach_add", {"torch._foreach_add"}),
        ("from torch import _guards", {"torch._guards"}),
        (
            "from torch.utils import _pytree\n_pytree.TreeSpec",
            {"torch.utils._pytree", "torch.utils._pytree.TreeSpec"},
        ),
        (
            "import torch.distributed as dist\nc10d = dist.x\nc10d._y(1)._z",
            {"torch.distributed.x._y", "._z"},
        ),
        (
            "import torch\nget = torch.Tensor._version.__get__",
            {"torch.Tensor._version"},
        ),
        ("import torch\nhasattr(torch._C, '_nccl')", {"torch._C", "torch._C._nccl"}),
        ("import torch\nfunctools.partial(getattr, torch.x, '_y')", {"torch.x._y"}),
        ("Variable('torch._x', 'Class.name', dict)", {"torch._x.Class.name"}),
        ("getattr(state, '_group', None)", {"._group"}),
        (
            "class A:\n    __slots__ = ('_mine',)\n    def f(self):\n        return self._mine",
            set(),
        ),
        ("import torch\ntorch.add(torch.__version__)", set()),
    ],
)
def test_private_names_are_found(line: str, names: set[str]) -> None:
    assert torch_names.names_in(ast.parse(line)) - {"torch._C"} == names - {"torch._C"}


def test_the_record_has_the_names_that_the_package_uses() -> None:
    used, recorded = torch_names.used_names(package()), torch_names.read_record().keys()
    new, gone = sorted(used - recorded), sorted(recorded - used)
    assert not new and not gone, (
        f"new: {new}; gone: {gone}. Write the record again: python tests/house/torch_names.py"
    )


def test_each_name_was_looked_for_in_each_version() -> None:
    record = torch_names.read_record()
    versions = {version for found in record.values() for version in found}
    unknown = {
        name: sorted(versions - found.keys())
        for name, found in record.items()
        if versions - found.keys()
    }
    assert not unknown, (
        f"{unknown}: tests/versions.sh PYTHON TORCH names, for each of these versions"
    )


def test_the_package_does_without_the_names_that_a_version_lacks() -> None:
    record = torch_names.read_record()
    lacking = {name for name, versions in record.items() if not all(versions.values())}
    assert lacking == torch_names.MAY_BE_MISSING.keys(), (
        "say in MAY_BE_MISSING why the package does without it"
    )


@pytest.mark.slow
def test_the_record_is_true_of_the_torch_that_is_installed() -> None:
    found = {
        name: (versions[torch_names.installed()], torch_names.has(name))
        for name, versions in torch_names.read_record().items()
        if torch_names.installed() in versions
        and torch_names.MAY_BE_MISSING.get(name) != torch_names.OF_CUDA
    }
    assert {
        name for name, (recorded, is_there) in found.items() if recorded != is_there
    } == set()
