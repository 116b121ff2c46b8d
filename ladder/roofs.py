"""What this machine reaches when it does nothing else: a large copy, and the workload's matrix products.

Each product has two rates. Back to back is what a machine keeps up: under load a GPU lowers its clock until
its power is within the limit. The other is the fastest of short bursts, between which the clock recovers; a
product inside a training step, where other kernels need less power, lies between the two. All of it takes
about five seconds. predict/roofs.py measures more.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from common import fingerprint, flops, hardware
from common.clock import mean_seconds, steady_seconds
from common.options import Arguments
from common.record import PRECISIONS, ProductRate, Roofs
from common.text import one_line, progress, say

COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
STEADY_S, BURST_S, PAUSE_S, BURSTS = 0.02, 0.002, 0.01, 2
LONG_S = 0.02  # of a product: no burst is shorter, and the clock falls within it
HOT_S = 0.3  # of products, after which a GPU's clock has fallen to what its power limit allows
SQUARE = {"cuda": 8192, "cpu": 1024}


def measure(args: Arguments) -> Roofs:
    """The roofs of a device at a workload's sizes. What cannot be measured is left out: `notes` tells why."""
    roofs = Roofs(environment=hardware.describe(args.device))
    roofs.code_sha256 = fingerprint.row_sha256("", hardware.ROOT, fingerprint.CLOCKS)
    with note_failure(roofs, "copy"):
        roofs.copy_bytes_per_s = copy_rate(args.device)
    edge = SQUARE[args.device.type]
    counted = {(edge, edge, edge): 0}
    counted |= flops.matrix_products(args.config, args.batch_size * args.config.seq_len)
    for precision in PRECISIONS:
        if not multiplies(args.device, precision):
            roofs.notes.append(f"{precision} not measured: this device does not multiply it")
            continue
        with note_failure(roofs, precision):
            roofs.products += product_rates(precision, counted, args.device, steady=True)
    add_limits(roofs, args)
    return roofs


def add_limits(roofs: Roofs, args: Arguments) -> None:
    """What the machine allows, by precision, into the roofs: milliseconds of a training step in which nothing
    is lost. Products run at the rate of their bursts, attention at that of the products in 16 bits, and every
    tensor is moved once, at the speed of a copy."""
    config, tokens = args.config, args.batch_size * args.config.seq_len
    rates = {name: roofs.rate(name, burst=True) for name in ("bf16", "fp8")}
    if not (rates["bf16"] and roofs.copy_bytes_per_s):
        return
    products = 6 * flops.matmul_parameters(config) * tokens
    attention = flops.flops_per_step(config, args.batch_size) - products
    # Bytes: in each block the residual stream, read and written by both halves, forward and backward; the
    # logits read once, and their gradient written; weights, gradients and moments read, all but the gradients
    # written.
    moved = 16 * tokens * config.n_embd * config.n_layer
    moved += 4 * tokens * config.vocab_size + 28 * flops.parameters(config)
    others_s = attention / rates["bf16"] + moved / roofs.copy_bytes_per_s
    roofs.allows_ms = {name: 1e3 * (products / rate + others_s) for name, rate in rates.items() if rate}


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    return 2 * len(source) / steady_seconds(copy, device, STEADY_S)


@contextlib.contextmanager
def note_failure(roofs: Roofs, what: str) -> Iterator[None]:
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
            flop = 2 * rate.m * rate.n * rate.k
            if flop / rate.burst_flops_per_s > LONG_S:
                continue
            work = product(precision, rate.m, rate.n, rate.k, device)
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
    return partial(hardware.multiply_fp8, a, b, scale, scale)


def tell(roofs: Roofs) -> None:
    """Print the main rates, and what was not measured."""
    for precision in PRECISIONS:
        steady, burst = roofs.rate(precision), roofs.rate(precision, burst=True)
        if steady:
            rates = f"{steady / 1e12:,.3g} TFLOP/s back to back, {burst / 1e12:,.3g} in bursts"
            say(f"{precision.upper()} {rates}")
    if roofs.copy_bytes_per_s:
        say(f"copy {roofs.copy_bytes_per_s / 1e9:,.0f} GB/s")
    for note in roofs.notes:
        say(note)
