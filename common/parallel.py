"""How a training step is divided: over processes that torchrun started, one a GPU, and over micro-batches in each; and
whether blocks are recomputed, so that more fits in a process.

A script asks for it in lines that are the same in every step: `distribute`, and the loop over `micro_batches`. Every
process trains sequences of its own, and gradients are averaged, so N processes of batch B train as one of batch N x B.
Alone, nothing here does anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint as recompute

from common.arguments import Arguments
from common.errors import Skip
from common.text import one_line

TIMEOUT = timedelta(minutes=30)  # of one exchange: another process may be compiling
PARENT_DIES = 1  # PR_SET_PDEATHSIG
NOTICED_S = 5  # in which torchrun sees that a process ended


def compile_units(model: torch.nn.Module, args: Arguments) -> list[torch.nn.Module]:
    """The modules that are compiled one by one: the whole model, or what is gathered or recomputed one by one."""
    return [*model.blocks, model.head] if args.parallel == "fsdp" or args.checkpoint else [model]


def distribute(model: torch.nn.Module, args: Arguments, checkpoint: Callable = recompute) -> torch.nn.Module:
    """The model as it trains in several processes; alone, it is the model itself.

    DDP keeps all weights in every process, FSDP2 a share of each. With `--checkpoint`, each block runs through
    `checkpoint`: it keeps no more than its input, and runs again in backward.
    """
    model.checkpoint, model.divided = checkpoint if args.checkpoint else None, True
    if args.parallel == "ddp":
        return replicate(model)
    if args.parallel == "fsdp":
        shard(model, args)
    return model


def replicate(model: torch.nn.Module) -> torch.nn.Module:
    """The model in DDP, which averages gradients in buckets. They are views of these: nothing is copied back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames broadcast_buffers
        ddp = torch.nn.parallel.DistributedDataParallel
        return ddp(model, broadcast_buffers=False, gradient_as_bucket_view=True)


def shard(model: torch.nn.Module, args: Arguments) -> None:
    """Divide the model by FSDP2, block by block; the embedding and the head that is tied to it belong to the whole.

    Weights are gathered in the dtype of the residual stream. In BF16, gradients are summed over processes in BF16 too;
    FP16 could overflow, and of many micro-batches BF16 would lose small ones. Weights and optimizer are FP32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    in_bf16 = model.residual_dtype is torch.bfloat16 and args.accumulate == 1
    summed = torch.bfloat16 if in_bf16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=model.residual_dtype, reduce_dtype=summed)
    mesh, last = dist.init_device_mesh(args.device.type, (args.world.size,)), model.blocks[-2:]
    for block in model.blocks:  # backward begins with the last ones: they stay gathered
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=block not in last)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def require_distributed(model: torch.nn.Module, args: Arguments) -> None:
    """Raises Skip for a model that did not pass through `distribute` where that matters."""
    divided = hasattr(getattr(model, "module", model), "divided")
    if args.parallel and not divided:
        raise Skip("this script does not divide its work over processes: run it without torchrun")
    if args.accumulate > 1 and not divided:
        raise Skip("this script does not divide its batch: leave out --accumulate")
    if args.checkpoint and not is_checkpointed(model):
        raise Skip("this script does not recompute its blocks: leave out --checkpoint")


def is_checkpointed(model: torch.nn.Module) -> bool:
    """Whether the blocks of a model, as `distribute` returns it, are recomputed in backward."""
    return getattr(getattr(model, "module", model), "checkpoint", None) is not None


def micro_batches(
    tokens: torch.Tensor, targets: torch.Tensor, model: torch.nn.Module, args: Arguments
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`args.accumulate` equal parts of a batch, each (B / accumulate, T) of `tokens` and of `targets`, both (B, T).

    Their gradients add up to those of the whole batch where each part's loss is divided by `args.accumulate`. Processes
    exchange them in the last part alone.
    """
    parts = zip(tokens.chunk(args.accumulate), targets.chunk(args.accumulate), strict=True)
    for k, part in enumerate(parts, 1):
        if args.parallel == "ddp":
            model.require_backward_grad_sync = k == args.accumulate
        elif args.parallel == "fsdp":
            model.set_requires_gradient_sync(k == args.accumulate)
        yield part


# --- the processes of a run -----------------------------------------------------------------------


def start(args: Arguments) -> None:
    """Meet the other processes. Raises ValueError where they were given different work, and what torch raises."""
    if args.world.size == 1:
        return
    with contextlib.suppress(OSError, AttributeError):  # torchrun's processes outlive a torchrun that was killed
        ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
    on_gpu = args.device.type == "cuda"
    if on_gpu:  # DDP works on the stream on which it was built, and the default stream cannot be captured
        torch.cuda.set_stream(torch.cuda.Stream(args.device))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT, device_id=args.device if on_gpu else None)
    works: list = [None] * args.world.size
    dist.all_gather_object(works, asdict(args.workload()))
    if any(work != works[0] for work in works):
        raise ValueError("the processes were given different work: name --preset, --batch-size and --data-tokens")


def largest(values: list[float], args: Arguments) -> list[float]:
    """The elementwise maximum over all processes of as many numbers in each."""
    return _reduced(values, dist.ReduceOp.MAX, args)


def mean(values: list[float], args: Arguments) -> list[float]:
    """The elementwise mean over all processes of as many numbers in each."""
    return [value / args.world.size for value in _reduced(values, dist.ReduceOp.SUM, args)]


def _reduced(values: list[float], how: dist.ReduceOp, args: Arguments) -> list[float]:
    if args.world.size == 1:
        return values
    numbers = torch.tensor(values, dtype=torch.float64, device=args.device)
    dist.all_reduce(numbers, how)
    return numbers.tolist()


def is_loss_of_others(error: Exception) -> bool:
    """Whether an error says no more than that another process ended."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def leave(code: int, args: Arguments, error: Exception | None = None) -> None:
    """End this process of several with an exit code; a failed one at once, because its threads may wait for others.

    One that lost the others says so, and first lets torchrun see who ended: that is the cause.
    """
    if error is not None:
        sys.stderr.write(f"{args.step}: failed: rank {args.world.rank} lost the others: {one_line(error)}\n")
        time.sleep(NOTICED_S)
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
