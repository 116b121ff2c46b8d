"""What this machine can do: the rate of copies, and of matrix products at the shapes of a workload and of all sizes.

python -m common.roofs [--output FILE] ARGUMENT ...     the ARGUMENTs are those of a step

Each product has two rates. Back to back is what a machine keeps up: under load a GPU lowers its clock until its power
is within the limit. The ceiling is the fastest of short bursts after pauses in which the clock recovers; a product
inside a training step, where other kernels need less power, lies between the two.
"""

from __future__ import annotations

if __name__ == "__main__":
    from common.errors import needs

    needs("torch", "numpy")

import datetime
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from common import arguments, flops, hardware, passes
from common.errors import run_command
from common.record import PRECISIONS, Conditions, ProductRate, Rates, Roofs, write_json
from common.text import one_line, portable_command, say

COPY_BYTES = 2**30
BUSY_PERCENT = 20
STEADY_S, PARTS = {"cuda": 0.2, "cpu": 0.05}, 9  # of back-to-back work
BURSTS, BURST_S = 4, 0.002
GRID_BURSTS = {"cuda": BURSTS, "cpu": 2}
PAUSE_S = {"cuda": 0.02, "cpu": 0.0}  # in which a GPU's clock recovers
MOST_QUEUED = 400  # launches
PASS_S = 0.02  # of one kernel that passes over memory
GRID = {"cuda": (128, 512, 2048, 8192), "cpu": (64, 256, 1024, 2048)}  # of M, of N and of K
REFERENCE_EDGE, REFERENCE_BYTES, REFERENCE_S = {"cuda": 4096, "cpu": 768}, 2**26, 0.25


def measure(products: dict[tuple[int, int, int], int], device: torch.device, grid: bool = False) -> Roofs:
    """The roofs of a device at `products`, {(M, N, K): how often a step runs it}, and at one large square product.

    With `grid` also what predicts a step of any shape: products of all sizes, see `product_seconds`, and what lies
    between them, see `passes`. A rate is null where the device lacks the precision or the
    memory; `notes` says which and why.
    """
    notes: list[str] = []
    utilization = hardware.nvml_value(device, "UtilizationRates")
    if utilization is not None and utilization.gpu > BUSY_PERCENT:
        notes.append(f"the GPU was {utilization.gpu} % busy before the roofs were measured: they may be too low")
    edge = 8192 if device.type == "cuda" else 1024
    shapes = [ProductRate(m=m, n=n, k=k, count=count) for (m, n, k), count in products.items()]
    roofs = Roofs(shapes=shapes, square=ProductRate(m=edge, n=edge, k=edge), zeros=Rates())
    roofs.copy_bytes_per_s = _measured(partial(copy_rate, device), "copy", notes)
    axis = GRID[device.type] if grid else ()
    roofs.grid = [ProductRate(m=m, n=n, k=k) for m, n, k in itertools.product(axis, repeat=3)]
    for precision in PRECISIONS:
        if reason := unavailable(precision, device):
            notes.append(f"{precision} not measured: {reason}")
        else:
            _measure_precision(roofs, precision, device, notes)
    if grid:
        timer = partial(steady_seconds, device=device, for_s=PASS_S)
        roofs.passes = _measured(partial(passes.pass_times, device, timer), "passes over memory", notes) or []
        roofs.attention = _measured(partial(passes.attention_rates, device, timer), "fused attention", notes) or []
        roofs.launch_s = _measured(partial(passes.launch_seconds, device), "launches", notes)
    roofs.notes = list(dict.fromkeys(notes))
    return roofs


def _measure_precision(roofs: Roofs, precision: str, device: torch.device, notes: list[str]) -> None:
    """Put the rates of one precision, and the clock and power meanwhile, into `roofs`."""
    name, steady_s, shapes = f"{precision}_flops_per_s", STEADY_S[device.type], [*roofs.shapes, roofs.square]

    def rates_of(for_s: float, bursts: int, zeros: bool = False) -> Callable:
        return lambda shape: _measured(
            partial(product_rates, shape, precision, device, for_s, bursts, zeros), precision, notes
        )

    for shape in roofs.grid:
        if found := rates_of(0, GRID_BURSTS[device.type])(shape):
            shape.ceilings[precision] = found[1]
    rates_of(steady_s, 0)(roofs.square)  # a clock falls for some tenths of a second before it settles
    with hardware.Meter(device) as steady:
        found = [*map(rates_of(steady_s, 0), shapes)]
    with hardware.Meter(device) as bursts:
        ceilings = [*map(rates_of(0, BURSTS), shapes)]
    for shape, rate, ceiling in zip(shapes, found, ceilings, strict=True):
        _put(shape, precision, rate and ceiling and (rate[0], max(rate[0], ceiling[1])))
    roofs.conditions[precision] = Conditions(steady.clock_mhz, steady.power_w, bursts.clock_mhz, bursts.power_w)
    _put(roofs.zeros, precision, rates_of(steady_s, BURSTS, zeros=True)(roofs.square))
    if roofs.shapes and all(
        getattr(shape, name) for shape in roofs.shapes
    ):  # the mean rate, each shape as often as it runs
        _put(roofs, precision, tuple(_mean_rate(roofs.shapes, rate_of) for rate_of in (
            lambda shape: getattr(shape, name), lambda shape: shape.ceilings[precision])))  # fmt: skip


def _put(rates: Rates, precision: str, found: tuple[float, float] | None) -> None:
    """Set the rate and the ceiling of a precision."""
    if found:
        setattr(rates, f"{precision}_flops_per_s", found[0])
        rates.ceilings[precision] = found[1]


def _mean_rate(shapes: list[ProductRate], rate_of: Callable[[ProductRate], float]) -> float:
    """FLOP/s over all shapes, each as often as it runs."""
    work = [2 * s.m * s.n * s.k * s.count for s in shapes]
    return sum(work) / sum(w / rate_of(s) for w, s in zip(work, shapes, strict=True))


def unavailable(precision: str, device: torch.device) -> str | None:
    """Why a device has no matrix products in `precision` (one of PRECISIONS); None where it has them."""
    capability = hardware.compute_capability(device)
    if precision == "tf32" and capability < (8, 0):
        return "needs an Ampere GPU or newer"
    if precision == "bf16" and not hardware.has_bf16_matrix_instructions(device):
        return "no BF16 matrix instructions"
    if precision == "fp8" and capability < (8, 9):
        return "needs an Ada or Hopper GPU or newer"
    return None


def _measured(measure: Callable[[], object], what: str, notes: list[str]):
    try:
        return measure()
    except (RuntimeError, ValueError) as error:  # too little memory, a shape that a format cannot take, a broken trace
        notes.append(f"{what} not measured: {one_line(error, 150)}")
        return None


def seconds(work: Callable[[], object], n: int, device: torch.device) -> float:
    """Mean time of `n` calls, one right after the other; on a GPU, of the GPU's own time."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(n):
            work()
        return (time.perf_counter() - started) / n
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Cycles in which the host gets ahead: small work would wait for its launches. The driver's queue holds about 1000.
    torch.cuda._sleep(500_000 + 20_000 * n)
    begin.record()
    for _ in range(n):
        work()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3 / n


def steady_seconds(work: Callable[[], object], device: torch.device, for_s: float) -> float:
    """Time of one call, back to back for about `for_s` seconds: the median of PARTS parts."""
    work()
    once = seconds(work, 1, device)
    n = min(math.ceil(for_s / PARTS / once), MOST_QUEUED)
    return statistics.median(seconds(work, n, device) for _ in range(PARTS)) if for_s > once else once


def burst_seconds(work: Callable[[], object], device: torch.device, each_s: float, bursts: int) -> float:
    """Time of one call in the fastest of `bursts` short bursts, each after a pause."""

    def burst() -> float:
        time.sleep(PAUSE_S[device.type])
        return seconds(work, max(1, round(BURST_S / each_s)), device)

    return min(burst() for _ in range(bursts))


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of copying at most 1 GiB within a device's memory. Raises RuntimeError."""
    size = min(COPY_BYTES, hardware.free_memory_bytes(device) // 4) if device.type == "cuda" else COPY_BYTES // 4
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * size / steady_seconds(lambda: target.copy_(source), device, STEADY_S[device.type])


def product_rates(
    shape: ProductRate, precision: str, device: torch.device, for_s: float, bursts: int, zeros: bool = False
) -> tuple[float, float]:
    """FLOP/s of (M, K) x (K, N) back to back for about `for_s` seconds, and the most of it and of `bursts` bursts.

    Operands are random: zeros draw less power and run faster. Raises RuntimeError for too little memory or a shape
    that `precision` cannot take.
    """
    dtype = torch.bfloat16 if precision in ("bf16", "fp8") else torch.float32
    fill = torch.zeros if zeros else torch.randn
    a = fill(shape.m, shape.k, device=device, dtype=dtype)
    b = fill(shape.n, shape.k, device=device, dtype=dtype).t()
    product = partial(torch.matmul, a, b)
    if precision == "fp8":
        a, b, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
        # Not public, but the only FP8 product that PyTorch 2.10 has.
        product = partial(torch._scaled_mm, a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        steady_s = steady_seconds(product, device, for_s)
        least_s = min(steady_s, burst_seconds(product, device, steady_s, bursts)) if bursts else steady_s
    finally:
        torch.set_float32_matmul_precision(before)
    work = 2 * shape.m * shape.n * shape.k
    return work / steady_s, work / least_s


def product_seconds(grid: list[ProductRate], precision: str, m: int, n: int, k: int) -> float:
    """The time of a product of any shape at its ceiling: linear in M, N and K between its neighbours in a grid.

    What a product costs is a launch, bytes that grow with two dimensions at a time, and FLOPs that grow with all
    three, so the time is linear in each dimension. Outside the grid its last two sizes are continued, to no less than
    half the time of the least size. Raises KeyError where the grid lacks a neighbour or the precision.
    """
    seconds = {(s.m, s.n, s.k): 2 * s.m * s.n * s.k / s.ceilings[precision] for s in grid}
    corners = []  # of each dimension: (size in the grid, weight) twice
    for size, axis in zip((m, n, k), (sorted({shape[d] for shape in seconds}) for d in range(3)), strict=True):
        size = max(size, axis[0] / 2)
        upper = next((i for i, edge in enumerate(axis[1:-1], 1) if edge >= size), len(axis) - 1)
        low, high = axis[upper - 1], axis[upper]
        share = (size - low) / (high - low)
        corners.append(((low, 1 - share), (high, share)))
    total = 0.0
    for corner in itertools.product(*corners):
        total += float(np.prod([weight for _, weight in corner])) * seconds[tuple(edge for edge, _ in corner)]
    return total


def reference(device: torch.device) -> tuple[float, float, float | None]:
    """Milliseconds of a fixed matrix product and of a fixed copy, and the clock in MHz during the product.

    The work is the same whatever is trained: where it takes longer, something else ran on this machine. The clock is
    None on a CPU and without NVML.
    """
    edge, dtype = REFERENCE_EDGE[device.type], torch.float16 if device.type == "cuda" else torch.float32
    a, b = (torch.full((edge, edge), 0.5, device=device, dtype=dtype) for _ in range(2))
    source = torch.ones(REFERENCE_BYTES, dtype=torch.uint8, device=device)
    out, target = torch.empty_like(a), torch.empty_like(source)
    multiply, copy = partial(torch.matmul, a, b, out=out), partial(target.copy_, source)
    steady_seconds(multiply, device, REFERENCE_S / 2)
    with hardware.Meter(device) as meter:
        product_s = steady_seconds(multiply, device, REFERENCE_S)
    return product_s * 1e3, steady_seconds(copy, device, REFERENCE_S / 2) * 1e3, meter.clock_mhz


def main() -> None:
    args = arguments.parse_args(Path("common/roofs.py"), __doc__)
    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    products = flops.matrix_products(args.config, args.micro_batch_size * args.config.seq_len)
    roofs = measure(products, args.device, grid=True)
    lines = [f"copy {roofs.copy_bytes_per_s / 1e9:,.0f} GB/s"] if roofs.copy_bytes_per_s else []
    for precision in PRECISIONS:
        if rate := getattr(roofs, f"{precision}_flops_per_s"):
            ceiling = roofs.ceilings[precision]
            rates = f"{rate / 1e12:,.3g} TFLOP/s back to back, at most {ceiling / 1e12:,.3g}"
            lines.append(f"{precision.upper()} {rates}")
    say("\n".join([*lines, *roofs.notes]))
    of_it = {"command": portable_command(["python", "-m", "common.roofs", *sys.argv[1:]]), "started_at": started_at}
    write_json(args.output, asdict(roofs) | of_it | {"environment": asdict(hardware.describe(args.device))})
    say(f"written to {args.output}")


if __name__ == "__main__":
    run_command(main, "python -m common.roofs")
