"""Networks whose times are published, as their authors define them.

They follow the authors as far as it matters for what a GPU has to do.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """Two convolutions of ResNet-18, or three of ResNet-50 and 101."""

    def __init__(self, before: int, width: int, stride: int, is_deep: bool) -> None:
        super().__init__()
        after = width * (4 if is_deep else 1)
        # Kernels and strides as in version 1.5: the stride stands in the convolution of
        # 3x3.
        plan = [(before, width, 1, 1), (width, width, 3, stride), (width, after, 1, 1)]
        plan = plan if is_deep else [(before, width, 3, stride), (width, width, 3, 1)]
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        for i, o, kernel, step in plan:
            self.convolutions.append(
                nn.Conv2d(i, o, kernel, step, kernel // 2, bias=False)
            )
            self.norms.append(nn.BatchNorm2d(o))
        self.shortcut = nn.Sequential()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for i, (convolution, norm) in enumerate(
            zip(self.convolutions, self.norms, strict=True)
        ):
            y = norm(convolution(y))
            if i + 1 < len(self.convolutions):
                y = F.relu(y, inplace=True)
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


def resnet(layers: int) -> nn.Module:
    """ResNet-18, 50 or 101."""
    counts = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}[layers]
    is_deep = layers > 34
    parts: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
    ]
    parts.append(nn.MaxPool2d(3, 2, 1))
    before = 64
    for stage, count in enumerate(counts):
        for i in range(count):
            width = 64 * 2**stage
            parts.append(
                ResidualBlock(before, width, 2 if stage and not i else 1, is_deep)
            )
            before = width * (4 if is_deep else 1)
    return nn.Sequential(
        *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000)
    )


class TransformerBlock(nn.Module):
    """A layer of GPT-2 or of a vision transformer."""

    def __init__(
        self,
        width: int,
        heads: int,
        is_causal: bool,
        is_fused: bool,
        by_hand: bool = False,
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.projection = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.wide, self.narrow = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.heads, self.is_causal, self.is_fused, self.by_hand = (
            heads,
            is_causal,
            is_fused,
            by_hand,
        )

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, tokens, width = x.shape
        parts = self.attention(self.norms[0](x)).split(width, 2)
        query, key, value = (
            part.view(rows, tokens, self.heads, -1).transpose(1, 2) for part in parts
        )
        if self.is_fused:
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=self.is_causal
            )
        else:
            scores = (query @ key.transpose(-2, -1)) * key.size(-1) ** -0.5
            if mask is not None:
                scores = scores.masked_fill(mask, float("-inf"))
            mixed = scores.softmax(-1) @ value
        x = x + self.projection(mixed.transpose(1, 2).reshape(x.shape))
        hidden = self.wide(self.norms[1](x))
        if self.by_hand:
            hidden = (
                0.5
                * hidden
                * (
                    1
                    + torch.tanh(
                        math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden.pow(3))
                    )
                )
            )
        else:
            hidden = F.gelu(hidden, approximate="tanh" if self.is_causal else "none")
        return x + self.narrow(hidden)


class GPT2(nn.Module):
    """GPT-2 124M, or another width and number of layers, for up to 1,024 tokens.

    Early versions of nanoGPT computed its activation `by_hand`.
    """

    def __init__(
        self,
        by_hand: bool = False,
        is_fused: bool = False,
        width: int = 768,
        layers: int = 12,
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50257, width), nn.Embedding(1024, width)
        heads = width // 64
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, True, is_fused, by_hand)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", torch.ones(1024, 1024, dtype=torch.bool).triu(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        count = tokens.shape[1]
        x = self.words(tokens) + self.places(torch.arange(count, device=tokens.device))
        for block in self.blocks:
            x = block(x, self.mask[:count, :count])
        return F.linear(self.norm(x), self.words.weight)


class VisionTransformer(nn.Module):
    """ViT-S, B or L, of patches of 16 in images of 224 pixels."""

    def __init__(self, width: int, layers: int, is_fused: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first, self.places = (
            nn.Parameter(torch.zeros(1, 1, width)),
            nn.Parameter(torch.zeros(1, 197, width)),
        )
        self.blocks = nn.Sequential(
            *[
                TransformerBlock(width, width // 64, False, is_fused)
                for _ in range(layers)
            ]
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])
