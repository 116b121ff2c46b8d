"""What this machine can do: copies, matrix products, and the kernels between them, at a workload's sizes.

    python -m ladder.roofs [--grid] [--output FILE] ARGUMENT ...     the ARGUMENTs are those of a step

With --grid also at sizes of all kinds, from which ladder.predict foresees any other workload. Each product
has two rates. Back to back is what a machine keeps up: under load a GPU lowers its clock until its power is
within the limit. The other is the fastest of short bursts, between which the clock recovers; a product inside
a training step, where other kernels need less power, lies between the two.
"""

import contextlib
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
from common.arguments import Arguments, parse_args
from common.record import PRECISIONS, ProductRate, Roofs, write_json
from common.text import one_line, progress, run_command, say
from common.timing import mean_seconds, steady_seconds

COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
STEADY_S, KERNEL_S, BURST_S, PAUSE_S, BURSTS = 0.05, 0.01, 0.002, 0.02, 3
ROUNDS = {"cuda": 3, "cpu": 1}  # the fastest counts: other work on a host was seen to slow some
HOT_S = 0.3  # of products, after which a GPU's clock has fallen to what its power limit allows
SQUARE = {"cuda": 8192, "cpu": 1024}
GRID = {"cuda": (128, 512, 2048, 8192), "cpu": (64, 256, 1024, 2048)}  # of M, of N and of K
SIZES = {"cuda": (2**18, 2**20, 2**22, 2**24, 2**26), "cpu": (2**12, 2**16, 2**20)}  # numbers in a tensor
LENGTHS, HEAD_DIMS = (256, 1024, 4096, 16384), (64, 128)
ATTENTION_NUMBERS = {"cuda": 2**25, "cpu": 2**18}  # in each of q, k and v
VOCABULARY = {"cuda": 2**15, "cpu": 2**8}
WIDTH, HEADS, EDGE = {"cuda": 1024, "cpu": 256}, 16, {"cuda": 512, "cpu": 64}
LAUNCHED_BLOCKS, LAUNCHED_STEPS, LAUNCHED_WARMUP = 8, 60, 10


def measure(args: Arguments, grid: bool) -> Roofs:
    """The roofs of a device at a workload's sizes, with `grid` at others too. What cannot be measured is left
    out: `notes` tells why."""
    device, roofs = args.device, Roofs()
    with skipping(roofs, "copy"):
        roofs.copy_bytes_per_s = copy_rate(device)
    measure_products(roofs, args, grid)
    measure_kernels(roofs, args, grid)
    measure_attention(roofs, args, grid)
    if device.type == "cuda":
        with skipping(roofs, "launches"):
            roofs.launch_s = launch_seconds(device)
    return roofs


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    return 2 * len(source) / steady_seconds(copy, device, STEADY_S)


def measure_products(roofs: Roofs, args: Arguments, grid: bool) -> None:
    """The workload's matrix products and a large one, back to back and in bursts; those of attention by hand,
    and the grid's, in bursts alone."""
    device, edge = args.device, SQUARE[args.device.type]
    counted = {(edge, edge, edge): 0}
    counted |= flops.matrix_products(args.config, args.batch_size * args.config.seq_len)
    by_hand = dict.fromkeys(batched_products(args.config, args.batch_size), 0)
    others = set(itertools.product(GRID[device.type], repeat=3)) - counted.keys() if grid else ()
    for precision in PRECISIONS:
        if not multiplies(device, precision):
            roofs.notes.append(f"{precision} not measured: this device does not multiply it")
            continue
        with skipping(roofs, precision):
            roofs.products += product_rates(precision, counted, device, steady=True)
        if precision != "fp8":  # attention by hand has no FP8
            with skipping(roofs, precision):
                roofs.products += product_rates(precision, by_hand, device, steady=False)
        with skipping(roofs, precision):
            roofs.products += product_rates(precision, dict.fromkeys(others, 0), device, steady=False)


def measure_kernels(roofs: Roofs, args: Arguments, grid: bool) -> None:
    """What lies between the products, at the sizes of the workload's tensors; the fastest of some rounds."""
    device, of_workload = args.device, sizes(args.config, args.batch_size)
    # The smallest size always: the kernel of a bias costs a launch.
    more = SIZES[device.type] if grid else SIZES[device.type][:1]
    for size in sorted({*of_workload.values(), *more} - {0}):
        with skipping(roofs, f"kernels over {size:,} numbers"):
            measure_works(roofs, list(kernels(size, device)), size, device)
    for name, make, tensor in (("adamw", adamw, "parameters"), ("loss half", compiled_loss, "logits")):
        for size in sorted({of_workload[tensor], *more}):
            with skipping(roofs, f"{name} over {size:,} numbers"):
                measure_works(roofs, [(name, make(size, device))], size, device)


def measure_works(roofs: Roofs, works: list[tuple[str, Callable]], size: int, device: torch.device) -> None:
    """The fastest round of each of these works over so many numbers, by name."""
    fastest: dict[str, float] = {}
    for _ in range(ROUNDS[device.type]):
        for name, work in works:
            seconds = steady_seconds(work, device, KERNEL_S)
            fastest[name] = min(seconds, fastest.get(name, seconds))
    roofs.kernels += [(name, size, seconds) for name, seconds in fastest.items()]


def measure_attention(roofs: Roofs, args: Arguments, grid: bool) -> None:
    """Fused attention at the workload's shape, with `grid` at other lengths and head dimensions."""
    config, device = args.config, args.device
    shapes = [(config.seq_len, config.n_embd // config.n_head, args.batch_size * config.n_head)]
    for T, D in itertools.product(LENGTHS, HEAD_DIMS) if grid else ():
        shapes.append((T, D, ATTENTION_NUMBERS[device.type] // (T * D)))
    for T, D, heads in shapes:
        with skipping(roofs, f"attention over {T} tokens"):
            seconds = steady_seconds(attention(T, D, heads, device), device, KERNEL_S)
            roofs.attention.append((T, D, flops.attention_flops(heads, T, D) / seconds))


@contextlib.contextmanager
def skipping(roofs: Roofs, what: str) -> Iterator[None]:
    """Errors of too little memory, or of a shape that a format cannot take, become a note."""
    progress(f"measuring {what}")
    try:
        yield
    except (RuntimeError, ValueError) as error:
        roofs.notes.append(f"{what} not measured: {one_line(error, 150)}")


def multiplies(device: torch.device, precision: str) -> bool:
    """Whether a device has matrix products in `precision` (one of PRECISIONS) in hardware."""
    if precision == "bf16":
        return hardware.has_bf16_matrix_instructions(device)
    least = {"fp32": (0, 0), "tf32": (8, 0), "fp8": hardware.FP8_CAPABILITY}
    return hardware.compute_capability(device) >= least[precision]


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


def product_rates(precision: str, counted: dict, device: torch.device, steady: bool) -> list[ProductRate]:
    """FLOP/s of products {(M, N, K): count} of random numbers, in bursts and, with `steady`, back to back.

    Raises RuntimeError for too little memory or a shape that `precision` cannot take.
    """
    before, on_gpu = torch.get_float32_matmul_precision(), device.type == "cuda"
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    rates = []
    try:
        if steady:  # the clock falls to what it keeps up
            edge = SQUARE[device.type]
            steady_seconds(product(precision, edge, edge, edge, device), device, HOT_S)
        for (m, n, k), count in counted.items():
            seconds = steady_seconds(product(precision, m, n, k, device), device, STEADY_S if steady else 0)
            rate = 2 * m * n * k / seconds
            rates.append(ProductRate(precision, m, n, k, count, rate, rate if steady else None))
        for rate in rates:
            work, flop = product(precision, rate.m, rate.n, rate.k, device), 2 * rate.m * rate.n * rate.k
            times = max(1, round(BURST_S * rate.burst_flops_per_s / flop))
            for _ in range(BURSTS):
                time.sleep(PAUSE_S if on_gpu else 0)
                burst = flop / mean_seconds(work, times, device)
                rate.burst_flops_per_s = max(rate.burst_flops_per_s, burst)
    finally:
        torch.set_float32_matmul_precision(before)
    return rates


def product(precision: str, m: int, n: int, k: int, device: torch.device) -> Callable[[], object]:
    """(M, K) x (K, N) of random numbers: zeros draw less power and run faster."""
    dtype = torch.bfloat16 if precision in ("bf16", "fp8") else torch.float32
    a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype).t()
    if precision != "fp8":
        return partial(torch.matmul, a, b)
    a, b, scale = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
    # Not public, but the only FP8 product that PyTorch 2.10 has.
    return partial(torch._scaled_mm, a, b, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)


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


def measure_and_tell(args: Arguments, grid: bool) -> Roofs:
    """Measure the roofs, and print the main ones."""
    roofs = measure(args, grid)
    progress("")
    roofs.environment = hardware.describe(args.device)
    for precision in PRECISIONS:
        steady, burst = roofs.rate(precision), roofs.rate(precision, burst=True)
        if steady:
            rates = f"{steady / 1e12:,.3g} TFLOP/s back to back, {burst / 1e12:,.3g} in bursts"
            say(f"{precision.upper()} {rates}")
    say(f"copy {(roofs.copy_bytes_per_s or 0) / 1e9:,.0f} GB/s")
    say("\n".join(roofs.notes), end="\n" if roofs.notes else "")
    return roofs


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--grid"]
    args = parse_args(hardware.ROOT / "ladder" / "roofs.py", __doc__, words)
    write_json(args.output, measure_and_tell(args, "--grid" in sys.argv))
    say(f"written to {args.output}")


if __name__ == "__main__":
    run_command(main, "python -m ladder.roofs")
