"""Evaluates lines that programs for CUDA say, one by one; prints what fails.

says_cuda.py FILE
"""

import io
import sys

import torch
import torch.nn.attention.flex_attention
from torch import nn


def saved():
    file = io.BytesIO()
    torch.save(nn.Linear(2, 2).state_dict(), file)
    file.seek(0)
    return file


with open(sys.argv[1]) as file:
    lines = file.readlines()
for line in lines:
    try:
        if not eval(line):
            print(f"{line.strip()} is false")
    except Exception as error:
        print(f"{line.strip()} raises {type(error).__name__}")
