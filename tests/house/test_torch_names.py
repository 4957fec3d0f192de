"""Each promised version of torch has the private names that the package uses.

`torch_names.py` writes the record of these names, which the tests here read.
"""

from __future__ import annotations

import ast

import pytest

from conditions import for_changes
from house import torch_names
from house.rooms import listed, package

# Programs, each with the private names of torch in it.
PROGRAMS = {
    "import torch\ntorch._foreach_add": {"torch._foreach_add"},
    "from torch import _guards": {"torch._guards"},
    "from torch.utils import _pytree\n_pytree.TreeSpec": {
        "torch.utils._pytree",
        "torch.utils._pytree.TreeSpec",
    },
    "import torch.distributed as dist\nc10d = dist.x\nc10d._y(1)._z": {
        "torch.distributed.x._y",
        "._z",
    },
    "import torch\nget = torch.Tensor._version.__get__": {"torch.Tensor._version"},
    "import torch\nhasattr(torch._C, '_nccl')": {"torch._C._nccl"},
    "import torch\nfunctools.partial(getattr, torch.x, '_y')": {"torch.x._y"},
    "Variable('torch._x', 'Class.name', dict)": {"torch._x.Class.name"},
    "getattr(state, '_group', None)": {"._group"},
    "class A:\n    __slots__ = ('_mine',)\n    def f(self):\n        self._mine": set(),
    "import torch\ntorch.add(torch.__version__)": set(),
}


def test_private_names_are_found() -> None:
    for program, names in PROGRAMS.items():
        found = torch_names.names_in(ast.parse(program)) - {"torch._C"}
        assert found == names, f"in this program:\n{program}"


def test_the_record_has_the_names_that_the_package_uses() -> None:
    used = torch_names.used_names(package())
    recorded = torch_names.read_record().keys()
    new, gone = sorted(used - recorded), sorted(recorded - used)
    assert not new and not gone, (
        "torch_names.txt has other names than the package. Run "
        "`python tests/house/torch_names.py`, and `tests/versions.sh PYTHON TORCH "
        f"names` for each other version.\nnew:{listed(new)}\ngone:{listed(gone)}"
    )


def test_each_name_was_looked_for_in_each_version() -> None:
    record = torch_names.read_record()
    versions = {version for found in record.values() for version in found}
    unknown = [
        f"{name}: {sorted(versions - found.keys())}"
        for name, found in record.items()
        if versions - found.keys()
    ]
    assert not unknown, (
        "run `tests/versions.sh PYTHON TORCH names` for each version that is missing "
        f"here:{listed(unknown)}"
    )


def test_the_package_does_without_the_names_that_a_version_lacks() -> None:
    record = torch_names.read_record()
    lacking = {name for name, found in record.items() if not all(found.values())}
    reasons = torch_names.MAY_BE_MISSING.keys()
    assert lacking == reasons, (
        "MAY_BE_MISSING in torch_names.py must say why the package does without:"
        f"{listed(sorted(lacking - reasons))}\n"
        f"and need not speak of:{listed(sorted(reasons - lacking))}"
    )


@for_changes
@pytest.mark.slow
def test_the_record_is_true_of_the_torch_that_is_installed() -> None:
    version = torch_names.installed()
    wrong = []
    for name, versions in torch_names.read_record().items():
        is_of_cuda = torch_names.MAY_BE_MISSING.get(name) == torch_names.OF_CUDA
        if version in versions and not is_of_cuda:
            is_there = torch_names.has(name)
            if is_there != versions[version]:
                wrong.append(f"{name} is {'there' if is_there else 'missing'}")
    assert not wrong, (
        f"torch_names.txt is wrong about torch {version}. Run "
        f"`python tests/house/torch_names.py`:{listed(wrong)}"
    )
