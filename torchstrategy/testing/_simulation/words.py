"""What messages call devices and files.

A device has the program's name for it. A file of a library comes with its package.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path, PurePath

from torchstrategy.testing._simulation.ordinals import NAME

_DEVICE = re.compile(
    rf"\b{NAME}(?=:)|(?<=['\"]){NAME}(?=['\"])|(?<=\btorch\.){NAME}\b|(?<=device type "
    rf"){NAME}\b"
)
# C++ has no other name for a tensor's type: `simFloatType`.
_TYPE = re.compile(rf"\b{NAME}([A-Z]\w*)Type\b")
_OF_PACKAGES = ("site-packages", "dist-packages")


def in_words_of_cuda(text: str) -> str:
    """A message in which simulated devices have the program's names for them.

    For example, it has `cuda:1` for `sim:1`.
    """
    return _TYPE.sub(r"torch.cuda.\1Tensor", _DEVICE.sub("cuda", text))


def say_cuda(error: BaseException) -> None:
    """Makes the message of an error one in the words of CUDA."""
    if error.args and type(error.args[0]) is str and NAME in error.args[0]:
        error.args = (in_words_of_cuda(error.args[0]), *error.args[1:])


@functools.cache
def name_of_file(file: str) -> str:
    """`train.py`; `timm/data/loader.py` for a file of an installed package."""
    parts = PurePath(file).parts
    for place in range(len(parts) - 2, -1, -1):
        if parts[place] in _OF_PACKAGES:
            return "/".join(parts[place + 1 :])
    return Path(file).name
