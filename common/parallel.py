"""How a training step is divided over the processes that torchrun started, one a GPU.

Every process trains sequences of its own, and gradients are averaged, so N processes of batch B train as one of batch
N x B. Alone, nothing here does anything.
"""

import os
import sys
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from common.text import say

TIMEOUT = timedelta(minutes=10)  # of one exchange: another process may be compiling


@dataclass(frozen=True)
class World:
    """Which of the processes that torchrun started this is; alone without torchrun."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine


def find_world() -> World:
    """From torchrun's environment variables. Raises ValueError where they are no numbers."""
    return World(*(int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))))


def start(args) -> None:
    """Meet the other processes. Raises what torch raises."""
    if args.world.size == 1:
        return
    on_gpu = args.device.type == "cuda"
    if on_gpu:  # DDP works on the stream on which it was built, and the default stream cannot be captured
        torch.cuda.set_stream(torch.cuda.Stream(args.device))
    if args.world.local_rank == 0:
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        say(f"meeting {args.world.size} processes at {where}, for at most {TIMEOUT}", sys.stderr)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT, device_id=args.device if on_gpu else None)


def distribute(model: torch.nn.Module, args) -> torch.nn.Module:
    """The model as it trains in several processes; alone, it is the model itself.

    DDP keeps all weights in every process, FSDP2 a share of each, block by block: the embedding and the head that is
    tied to it belong to the whole. Weights are gathered in the dtype of the residual stream; gradients are summed over
    processes in FP32 by both.
    """
    if args.parallel == "ddp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames broadcast_buffers
            ddp = torch.nn.parallel.DistributedDataParallel
            return ddp(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    if args.parallel == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=model.residual_dtype, reduce_dtype=torch.float32)
        mesh = dist.init_device_mesh(args.device.type, (args.world.size,))
        for block in model.blocks:  # backward begins with the last ones: they stay gathered
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=block not in model.blocks[-2:])
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def across(values: list[float], how: str, args) -> list[float]:
    """The elementwise `max` or `avg` over all processes of as many numbers in each."""
    if args.world.size == 1:
        return values
    numbers = torch.tensor(values, dtype=torch.float64, device=args.device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
    return (numbers / (1 if how == "max" else args.world.size)).tolist()
