"""What a machine does with work of all kinds and sizes, from which `python -m predict` foresees a step.

    python -m predict.roofs [--output FILE] ARGUMENT ...     the ARGUMENTs are those of a step

Copies and matrix products are those of ladder/roofs.py. Here are the products of attention by hand, the
kernels between the products, fused attention and launches, at sizes of all kinds.
"""

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import flops, hardware, profile
from common.clock import steady_seconds
from common.options import Arguments, parse_args
from common.record import PRECISIONS, Roofs, write_json
from common.text import progress, run_command, say
from ladder import roofs as bare
from ladder.roofs import multiplies, note_failure, product_rates

KERNEL_S = 0.01
ROUNDS = {"cuda": 3, "cpu": 1}  # the fastest counts: other work on a host was seen to slow some
GRID = {"cuda": (128, 512, 2048, 8192), "cpu": (64, 256, 1024, 2048)}  # of M, of N and of K
SIZES = {"cuda": (2**18, 2**20, 2**22, 2**24, 2**26), "cpu": (2**12, 2**16, 2**20)}  # numbers in a tensor
LENGTHS, HEAD_DIMS = (256, 1024, 4096, 16384), (64, 128)
ATTENTION_NUMBERS = {"cuda": 2**25, "cpu": 2**18}  # in each of q, k and v
VOCABULARY = {"cuda": 2**15, "cpu": 2**8}
WIDTH, HEADS, EDGE = {"cuda": 1024, "cpu": 256}, 16, {"cuda": 512, "cpu": 64}
LAUNCHED_BLOCKS, LAUNCHED_STEPS, LAUNCHED_WARMUP = 8, 60, 10


def measure(args: Arguments) -> Roofs:
    """The roofs of a device at a workload's sizes, and at others. What cannot be measured is left out:
    `notes` tells why."""
    roofs = bare.measure(args)
    measure_products(roofs, args)
    measure_kernels(roofs, args)
    measure_attention(roofs, args)
    if args.device.type == "cuda":
        with note_failure(roofs, "launches"):
            roofs.launch_s = launch_seconds(args.device)
    return roofs


def measure_products(roofs: Roofs, args: Arguments) -> None:
    """The products of attention by hand, and those of all sizes, in bursts."""
    by_hand = dict.fromkeys(batched_products(args.config, args.batch_size), 0)
    measured = {(rate.m, rate.n, rate.k) for rate in roofs.products}
    others = set(itertools.product(GRID[args.device.type], repeat=3)) - measured
    for precision in [name for name in PRECISIONS if multiplies(args.device, name)]:
        if precision != "fp8":  # attention by hand has no FP8
            with note_failure(roofs, precision):
                roofs.products += product_rates(precision, by_hand, args.device, steady=False)
        with note_failure(roofs, precision):
            roofs.products += product_rates(precision, dict.fromkeys(others, 0), args.device, steady=False)


def measure_kernels(roofs: Roofs, args: Arguments) -> None:
    """What lies between the products, at the sizes of the workload's tensors and others; the fastest of some
    rounds."""
    device, of_workload = args.device, sizes(args.config, args.batch_size)
    for size in sorted({*of_workload.values(), *SIZES[device.type]} - {0}):
        with note_failure(roofs, f"kernels over {size:,} numbers"):
            measure_works(roofs, list(kernels(size, device)), size, device)
    for name, make, tensor in (("adamw", adamw, "parameters"), ("loss half", compiled_loss, "logits")):
        for size in sorted({of_workload[tensor], *SIZES[device.type]}):
            with note_failure(roofs, f"{name} over {size:,} numbers"):
                measure_works(roofs, [(name, make(size, device))], size, device)


def measure_works(roofs: Roofs, works: list[tuple[str, Callable]], size: int, device: torch.device) -> None:
    """The fastest round of each of these works over so many numbers, by name."""
    fastest: dict[str, float] = {}
    for _ in range(ROUNDS[device.type]):
        for name, work in works:
            seconds = steady_seconds(work, device, KERNEL_S)
            fastest[name] = min(seconds, fastest.get(name, seconds))
    roofs.kernels += [(name, size, seconds) for name, seconds in fastest.items()]


def measure_attention(roofs: Roofs, args: Arguments) -> None:
    """Fused attention at the workload's shape, and at other lengths and head dimensions."""
    config, device = args.config, args.device
    shapes = [(config.seq_len, config.n_embd // config.n_head, args.batch_size * config.n_head)]
    for T, D in itertools.product(LENGTHS, HEAD_DIMS):
        shapes.append((T, D, ATTENTION_NUMBERS[device.type] // (T * D)))
    for T, D, heads in shapes:
        with note_failure(roofs, f"attention over {T} tokens"):
            seconds = steady_seconds(attention(T, D, heads, device), device, KERNEL_S)
            roofs.attention.append((T, D, flops.attention_flops(heads, T, D) / seconds))


def sizes(config, batch_size: int) -> dict[str, int]:
    """Numbers in each tensor that a step passes over, of a GPTConfig or a Workload."""
    C, tokens = config.n_embd, batch_size * config.seq_len
    return {
        "stream": tokens * C,
        "qkv": 3 * tokens * C,
        "hidden": 4 * tokens * C,
        "width": 9 * tokens * C // 4,  # the mean of a block's four outputs: 3 C, C, 4 C and C
        "scores": batch_size * config.n_head * config.seq_len**2,
        "logits": tokens * config.vocab_size,
        "weight": 3 * C * C,  # the mean of a block's four
        "embedding": config.vocab_size * C,
        "parameters": flops.parameters(config),
        "vector": 0,  # a bias, or less: what it costs is the launch
    }


def batched_products(config, batch_size: int) -> dict[tuple[int, int, int], int]:
    """The products of attention by hand, of all heads as one tall product, and how often a block runs
    each."""
    rows, T, D = batch_size * config.n_head * config.seq_len, config.seq_len, config.n_embd // config.n_head
    return {(rows, T, D): 2, (rows, D, T): 4 if T != D else 6}  # scores and their gradient; the other four


def kernels(numbers: int, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Kernels over a tensor of about so many numbers, by name: a copy, and those that take longer than a copy
    of their bytes. All others a prediction takes for copies: measuring them as well was seen to change
    nothing."""
    edge = min(EDGE[device.type], math.isqrt(numbers))
    width = min(WIDTH[device.type], numbers)
    x, gradient, out = (torch.randn(numbers // width, width, device=device) for _ in range(3))
    weight, mean_rstd = torch.ones(width, device=device), torch.ones(2, len(x), 1, device=device)
    low, mask = x.to(torch.bfloat16), torch.ones(edge, edge, dtype=torch.bool, device=device).triu(1)
    scores = low.flatten()[: x.numel() // edge**2 * edge**2].view(-1, edge, edge)
    norm = (gradient, x, [width], *mean_rstd, weight, weight, [True, True, True])
    yield "copy fp32", partial(torch.neg, x, out=out)  # of copy_ a GPU's copy engines would be a part
    yield "layer norm backward fp32", partial(torch.ops.aten.native_layer_norm_backward, *norm)
    yield "to fp32", partial(low.to, torch.float32)
    yield "mask half", partial(scores.masked_fill_, mask, 0.0)
    yield "gelu half", partial(F.gelu, low, approximate="tanh")
    yield "sum over tokens half", partial(low.sum, 0)
    yield "heads half", low.view(1, len(x), HEADS, -1).transpose(1, 2).contiguous  # (B, H, T, D)


def adamw(numbers: int, device: torch.device) -> Callable[[], object]:
    """Fused AdamW over so many weights."""
    weight = nn.Parameter(torch.randn(numbers, device=device))
    weight.grad = torch.randn_like(weight)
    return torch.optim.AdamW([weight], fused=True).step


def compiled_loss(numbers: int, device: torch.device) -> Callable[[], object]:
    """Cross entropy of so many logits, compiled as in step 3, forward and backward. Its exponentials take
    longer than its bytes."""
    vocabulary = min(VOCABULARY[device.type], numbers)
    logits = torch.randn(numbers // vocabulary, vocabulary, device=device, dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, logits.shape[:1], device=device)
    torch._dynamo.reset()  # each size is compiled for itself
    loss, logits = torch.compile(F.cross_entropy, dynamic=False), logits.requires_grad_()
    return lambda: torch.autograd.grad(loss(logits, targets), logits)


def attention(length: int, head_dim: int, heads: int, device: torch.device) -> Callable[[], object]:
    """Fused causal attention of so many heads, forward and backward."""
    shape = (1, max(1, heads), length, head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def attend() -> None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, (q, k, v), y)

    return attend


def launch_seconds(device: torch.device) -> float:
    """Host seconds of a kernel that Python launches, in the median of tiny training steps in mixed precision.
    Raises RuntimeError where the profiler shows no kernels."""
    model = nn.Sequential()
    for _ in range(LAUNCHED_BLOCKS):
        model.extend((nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()))
    model.to(device)
    optimizer, x, times = torch.optim.AdamW(model.parameters()), torch.ones(64, 64, device=device), []

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(LAUNCHED_WARMUP + LAUNCHED_STEPS):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize(device)
    if not (launches := profile.launches_of(profiler, on_gpu=True)):
        raise RuntimeError("the profiler shows no kernels")
    return statistics.median(times[LAUNCHED_WARMUP:]) / len(launches)


def main() -> None:
    args = parse_args(hardware.ROOT / "predict" / "roofs.py", __doc__, sys.argv[1:])
    roofs = measure(args)
    progress("")
    bare.tell(roofs)
    write_json(args.output, roofs)
    say(f"written to {args.output}")


if __name__ == "__main__":
    run_command(main, "python -m predict.roofs")
