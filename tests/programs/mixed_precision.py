"""A language model with AMP.

GradScaler, gradient accumulation, clipping, checkpointing, fused AdamW.
"""

import argparse

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x):
        y = self.norms[0](x)
        mask = torch.ones(x.shape[1], x.shape[1], device="cuda", dtype=torch.bool).triu(
            1
        )
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, vocabulary=64, width=16, layers=2, length=8):
        super().__init__()
        self.tokens, self.places = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(length, width),
        )
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places(
            torch.arange(ids.shape[1], device=ids.device)
        )
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    args = parser.parse_args()
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = "cuda"
    device_type = "cuda" if "cuda" in device else "cpu"
    context = torch.amp.autocast(
        device_type=device_type, dtype=getattr(torch, args.dtype)
    )
    scaler = torch.cuda.amp.GradScaler(enabled=args.dtype == "float16")
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), fused=device_type == "cuda"
    )
    data = torch.randint(64, (4, 9)).pin_memory()
    x, y = (
        data[:, :-1].to(device, non_blocking=True),
        data[:, 1:].to(device, non_blocking=True),
    )
    losses = []
    for step in range(args.steps):
        torch.cuda.nvtx.range_push(f"step {step}")
        for _ in range(2):
            with context:
                loss = (
                    nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2
                )
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.nvtx.range_pop()
        losses.append(loss.item())
    torch.cuda.synchronize()
    print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
        f"{torch.cuda.max_memory_allocated() / 1e6:.2f} MB"
    )
    assert losses[-1] < losses[0] and next(model.parameters()).is_cuda


if __name__ == "__main__":
    main()
