"""A model of real size in virtual time, beside published figures.

Constants were fitted to these, so it is no proof.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conditions import for_releases
from torchstrategy.testing import VirtualTrace, virtual_time

pytestmark = for_releases

# GPT-2 124M, 16 rows of 1,024 tokens, attention taken apart, AdamW, PyTorch without
# compiler, on an A100 80 GB: "Let's reproduce GPT-2 (124M)" by Andrej Karpathy (2024),
# as the lecture's public notes give it.
PUBLISHED = {"float32": 1.0, "TF32": 0.333, "bfloat16": 0.300}  # seconds
ROWS, TOKENS, VOCABULARY, WIDTH, HEADS, LAYERS = 16, 1024, 50257, 768, 12, 12


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS).tril())
        self.is_fused = is_fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.norms[0](x)).split(WIDTH, 2)
        query, key, value = (
            part.view(ROWS, TOKENS, HEADS, -1).transpose(1, 2) for part in parts
        )
        if self.is_fused:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = (query @ key.transpose(-2, -1)) * key.size(-1) ** -0.5
            mixed = (
                scores.masked_fill(self.mask == 0, float("-inf")).softmax(-1) @ value
            )
        x = x + self.projection(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 124M."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.words, self.places = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(TOKENS, WIDTH),
        )
        self.blocks = nn.Sequential(*[Block(is_fused) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(TOKENS, device=tokens.device))
        return F.linear(self.norm(self.blocks(x)), self.words.weight)


def step_of(
    precision: str, profile: str = "A100-SXM-80GB", is_fused: bool = False
) -> VirtualTrace:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    try:
        with virtual_time(profile, shapes_only=True) as trace:
            with torch.device("sim:0"):
                model = GPT2(is_fused)
                tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):  # the first step makes the state of the optimizer
                trace.mark()
                optimizer.zero_grad()
                with (
                    torch.autocast("sim", torch.bfloat16)
                    if precision == "bfloat16"
                    else nullcontext()
                ):
                    loss = F.cross_entropy(
                        model(tokens).flatten(0, 1), tokens.flatten()
                    )
                loss.backward()
                optimizer.step()
                torch.accelerator.synchronize()
    finally:
        torch.set_float32_matmul_precision(before)
    return trace.step(1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PUBLISHED)
def test_a_step_of_gpt2_takes_about_as_long_as_published(precision: str) -> None:
    assert step_of(precision).seconds == pytest.approx(PUBLISHED[precision], rel=0.15)


@pytest.mark.slow
def test_fused_attention_saves_time_and_memory_and_h100_is_faster() -> None:
    apart, fused = step_of("bfloat16"), step_of("bfloat16", is_fused=True)
    assert fused.seconds < 0.6 * apart.seconds
    assert fused.device(0).peak_bytes < 0.6 * apart.device(0).peak_bytes
    assert step_of("bfloat16", "H100-SXM", is_fused=True).seconds < 0.7 * fused.seconds


@pytest.mark.slow
def test_what_does_not_fit_is_refused_at_real_size() -> None:
    with pytest.raises(
        torch.OutOfMemoryError, match=r"and V100-SXM-16GB has 16\.00 GiB"
    ):
        step_of("float32", "V100-SXM-16GB")
