"""FSDP2 with mixed precision, gradient clipping, and a sharded checkpoint.

It is one by torch.distributed.checkpoint.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main(args):
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{rank}")
    torch.cuda.set_device(device)
    dist.init_process_group(backend="nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)),
        nn.Linear(16, 4),
    ).to(device)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    for step in range(args.steps):
        loss = model(torch.randn(8, 16, device=device)).float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average = loss.detach().clone()
        dist.all_reduce(average, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step}: {average.item():.4f}")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=args.folder
    )
    before = model[0][0].weight.full_tensor().clone()
    with torch.no_grad():
        model[0][0].weight.zero_()
    dcp.load(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=args.folder
    )
    set_state_dict(
        model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    assert torch.equal(model[0][0].weight.full_tensor(), before)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--folder", required=True)
    main(parser.parse_args())
