"""What this machine can do: the rate of copies, and of matrix products at the shapes of a workload.

python -m common.roofs [--output FILE] ARGUMENT ...     the ARGUMENTs are those of a step
"""

from __future__ import annotations

if __name__ == "__main__":
    from common.errors import needs

    needs("torch", "numpy")

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from common import arguments, flops, hardware
from common.errors import run_command
from common.record import PRECISIONS, ProductRate, Roofs, write_json
from common.text import one_line, say

COPY_BYTES = 2**30
BUSY_PERCENT = 20


def measure(products: dict[tuple[int, int, int], int], device: torch.device) -> Roofs:
    """The roofs of a device at `products`, {(M, N, K): how often a step runs it}, and at one large square product.

    A rate is null where the device lacks the precision or the memory; `notes` says which and why.
    """
    notes: list[str] = []
    utilization = hardware.nvml_value(device, "UtilizationRates")
    if utilization is not None and utilization.gpu > BUSY_PERCENT:
        notes.append(f"the GPU was {utilization.gpu} % busy before the roofs were measured: they may be too low")
    edge = 8192 if device.type == "cuda" else 1024
    shapes = [ProductRate(m, n, k, count) for (m, n, k), count in products.items()]
    roofs = Roofs(shapes=shapes, square=ProductRate(edge, edge, edge))
    roofs.copy_bytes_per_s = _measured(partial(copy_rate, device), "copy", notes)
    for precision in PRECISIONS:
        name = f"{precision}_flops_per_s"
        if reason := unavailable(precision, device):
            notes.append(f"{precision} not measured: {reason}")
            continue
        for shape in [*shapes, roofs.square]:
            setattr(shape, name, _measured(partial(product_rate, shape, precision, device), precision, notes))
        if shapes and all(getattr(shape, name) for shape in shapes):  # the mean rate, each shape as often as it runs
            work = [2 * s.m * s.n * s.k * s.count for s in shapes]
            seconds_each = [w / getattr(s, name) for w, s in zip(work, shapes, strict=True)]
            setattr(roofs, name, sum(work) / sum(seconds_each))
    roofs.notes = list(dict.fromkeys(notes))
    return roofs


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


def _measured(measure: Callable[[], float], what: str, notes: list[str]) -> float | None:
    try:
        return measure()
    except RuntimeError as error:  # too little memory, or a shape that the format cannot take
        notes.append(f"{what} not measured: {one_line(error, 150)}")
        return None


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median time of one call, back to back."""
    work()
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())  # its default is one thread
    return timer.blocked_autorange(min_run_time=0.1 if device.type == "cuda" else 0.02).median


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of copying at most 1 GiB within a device's memory. Raises RuntimeError."""
    size = min(COPY_BYTES, hardware.free_memory_bytes(device) // 4) if device.type == "cuda" else COPY_BYTES // 4
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def product_rate(shape: ProductRate, precision: str, device: torch.device) -> float:
    """FLOP/s of (M, K) x (K, N), both random: zeros draw less power and run faster.

    Raises RuntimeError for too little memory or a shape that `precision` cannot take.
    """
    dtype = torch.bfloat16 if precision in ("bf16", "fp8") else torch.float32
    a = torch.randn(shape.m, shape.k, device=device, dtype=dtype)
    b = torch.randn(shape.n, shape.k, device=device, dtype=dtype).t()
    product = partial(torch.matmul, a, b)
    if precision == "fp8":
        a, b, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
        # Not public, but the only FP8 product that PyTorch 2.10 has.
        product = partial(torch._scaled_mm, a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        return 2 * shape.m * shape.n * shape.k / seconds(product, device)
    finally:
        torch.set_float32_matmul_precision(before)


def main() -> None:
    args = arguments.parse_args(Path("common/roofs.py"), __doc__)
    products = flops.matrix_products(args.config, args.batch_size * args.config.seq_len)
    roofs = measure(products, args.device)
    rates = [f"copy {roofs.copy_bytes_per_s / 1e9:,.0f} GB/s"] if roofs.copy_bytes_per_s else []
    measured = [(precision, getattr(roofs, f"{precision}_flops_per_s")) for precision in PRECISIONS]
    rates += [f"{precision.upper()} {rate / 1e12:,.3g} TFLOP/s" for precision, rate in measured if rate]
    say("\n".join([", ".join(rates), *roofs.notes]))
    write_json(args.output, asdict(roofs))
    say(f"written to {args.output}")


if __name__ == "__main__":
    run_command(main, "python -m common.roofs")
