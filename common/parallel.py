"""How a training step is divided over the processes that torchrun started, one a GPU.

Every process trains sequences of its own, and gradients are averaged: N processes of batch B train as one of
N x B.
"""

import os
import sys

import torch
import torch.distributed as dist


def wait_passively(device: torch.device) -> None:
    """Start the script again with threads that sleep while they wait, as run_all.sh starts it on a CPU:
    OpenMP reads this once, when torch is imported. On a shared host, threads that spin were seen to make a
    step several times slower."""
    if device.type == "cpu" and "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def start(args) -> None:
    """Choose the stream of a GPU on which all of a row runs, and meet the other processes. Raises what torch
    raises.

    It is a stream of its own, because the default stream cannot be captured, and DDP works on the stream on
    which it was built. `with torch.cuda.graph(graph):` captures on this stream too.
    """
    on_gpu = args.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(args.device)  # libraries that ask for "cuda" get this one
        torch.cuda.set_stream(torch.cuda.Stream(args.device))
        torch.cuda.graph.default_capture_stream = torch.cuda.current_stream()
    if args.processes > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=args.device if on_gpu else None)


def distribute(model: torch.nn.Module, args) -> torch.nn.Module:
    """The model as it trains in several processes; alone, it is the model itself.

    DDP keeps all weights in every process, FSDP2 a share of each, block by block: the embedding and the head
    that is tied to it belong to the whole. Weights are gathered in the dtype of the residual stream;
    gradients are summed over processes in FP32 by both.
    """
    if args.parallel == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.broadcast_buffers = False  # a mask never changes
    if args.parallel == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=model.residual_dtype, reduce_dtype=torch.float32)
        mesh = dist.init_device_mesh(args.device.type, (args.processes,))
        for block in model.blocks:  # backward begins with the last ones: they stay gathered
            fully_shard(
                block, mesh=mesh, mp_policy=policy, reshard_after_forward=block not in model.blocks[-2:]
            )
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def across(values: list[float], how: str) -> list[float]:
    """The elementwise `max` or `avg` over all processes of as many numbers in each."""
    if not dist.is_initialized():
        return values
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
    return (numbers / (1 if how == "max" else dist.get_world_size())).tolist()
