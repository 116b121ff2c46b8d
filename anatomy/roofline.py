"""When is an operation compute-bound, and when memory-bound?

Prediction. An operation of F FLOPs that moves Q bytes takes at least F / peak and at least Q / bandwidth seconds. So it
can reach min(peak, F / Q x bandwidth), which is the roof. Its two parts meet at the ridge, where F / Q is peak /
bandwidth. With 700 TFLOP/s in BF16 and 4.2 TB/s the ridge is 167 FLOP per byte. The intensity F / Q of an operation,
for numbers of b bytes, if it reads its input and writes its output once:

- ReLU 1 / 2b, softmax 5 / 2b and LayerNorm 8 / 2b are 0.25 to 2 in BF16, far left of the ridge.
- A product of (n, n) matrices is 2 n^3 / 3 n^2 b = 2n / 3b, so in BF16 it crosses 167 at n = 500.
- Causal attention, fused, is 2 B H T^2 D / 4 B H T D b = T / 2b, so it crosses 167 at T = 670.

So more FLOPs need not take longer. A product of n = 1024 has 2.1 GFLOP and 6 MB, and takes 3 us. ReLU on 2^26 numbers
has 0.07 GFLOP and 268 MB, and takes 64 us. This program measures the ceilings with a large copy and large products.

Source: Williams, Waterman, Patterson, Roofline (CACM 2009).
Run:    python -m anatomy roofline --numbers 67108864 --edges 256 1024 4096 --length 2048
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F

from anatomy.experiment import Refused, Result, Table, default_size, seconds, size_argument, table, us
from common import hardware, roofs
from common.record import PRECISIONS, Roofs

CHANNELS, HEAD_DIM = 1024, 64
PRECISION = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}  # FP16 runs at BF16's rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    numbers = "numbers that ReLU, softmax and LayerNorm take (default: 2^26 on a GPU, 2^23 on a CPU)"
    size_argument(parser, "--numbers N", f"{numbers}, a multiple of {CHANNELS}")
    edges = "edges of square products (default: 256 to 8192 on a GPU, 32 to 1024 on a CPU)"
    size_argument(parser, "--edges N", edges, nargs="+")
    size_argument(parser, "--length T", "tokens of attention, B 1, H 16, D 64 (default: 4096 on a GPU, 1024 on a CPU)")


def operations(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, tuple]:
    """Name -> function, FLOPs, and the least bytes that it moves."""
    rand = partial(torch.randn, device=args.device, dtype=dtype)
    N, size = args.numbers or default_size(args, 2**22, 2**23, 2**26), dtype.itemsize
    if N % CHANNELS:
        raise Refused(f"--numbers {N} is not a multiple of {CHANNELS}, the length of a row")
    x = rand(N // CHANNELS, CHANNELS)
    weight, bias = rand(CHANNELS), rand(CHANNELS)
    operations = {
        "ReLU": (lambda: torch.relu(x), N, 2 * N * size),
        "softmax": (lambda: x.softmax(-1), 5 * N, 2 * N * size),  # max, subtract, exp, sum, divide
        "LayerNorm": (lambda: F.layer_norm(x, (CHANNELS,), weight, bias), 8 * N, 2 * N * size),
    }
    default = [2**i for i in range(8, 14)] if args.device.type == "cuda" else [32, 128, 512, 1024]
    for n in sorted(set(args.edges or default[: 3 if args.quick and args.device.type == "cpu" else None])):
        a, b = rand(n, n), rand(n, n)
        operations[f"product n {n}"] = (partial(torch.matmul, a, b), 2 * n**3, 3 * n * n * size)
    H, D, T = 16, HEAD_DIM, args.length or default_size(args, 512, 1024, 4096)
    q, k, v = rand(3, 1, H, T, D)
    attention = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    operations[f"attention T {T}"] = (attention, 2 * H * T * T * D, 4 * H * T * D * size)
    return operations


def run(args: argparse.Namespace) -> Result:
    fast = args.device.type == "cuda" and hardware.has_bf16_matrix_instructions(args.device)
    dtype = args.dtype or (torch.bfloat16 if fast else torch.float32)
    if dtype not in PRECISION:
        raise Refused(f"--dtype {str(dtype)[6:]} has no measured ceiling: float32, bfloat16 or float16")
    todo = operations(args, dtype)
    measured = roofs.measure({}, args.device)
    bandwidth = measured.copy_bytes_per_s
    ceilings = {precision: measured.square.ceilings.get(precision) for precision in PRECISIONS}
    peak = ceilings[PRECISION[dtype]]
    if not (bandwidth and peak):
        raise Refused(f"no ceiling for {dtype}: {'; '.join(measured.notes)}")
    ridge = peak / bandwidth
    results, rows = {}, []
    for name, (function, flops, n_bytes) in todo.items():
        intensity, measured_s = flops / n_bytes, seconds(function, args.iters)
        bound, predicted_s = ("memory" if intensity < ridge else "compute"), max(flops / peak, n_bytes / bandwidth)
        results[name] = {"flops": flops, "bytes": n_bytes, "intensity": intensity, "seconds": measured_s}
        results[name] |= {"bound": bound, "predicted_s": predicted_s, "of_roof": predicted_s / measured_s}
        rows.append({
            "operation": name, "GFLOP": f"{flops / 1e9:.3g}", "MB": f"{n_bytes / 1e6:.3g}",
            "FLOP/byte": f"{intensity:.3g}", "bound by": bound, "least us": us(predicted_s),
            "measured us": us(measured_s), "GFLOP/s": f"{flops / measured_s / 1e9:.4g}",
            "of roof": f"{predicted_s / measured_s:.0%}",
        })  # fmt: skip
    tables = [ceiling_table(measured, ceilings), table(f"Operations in {dtype}", rows)]
    figures = {"copy_bytes_per_s": bandwidth, "ceilings": ceilings, "ridge": ridge, "operations": results}
    result = Result(tables, sentences(results, ridge), figures)
    return result.with_plot("roofline.svg", partial(draw, results, bandwidth, ceilings))


def ceiling_table(measured: Roofs, ceilings: dict[str, float | None]) -> Table:
    rows, bandwidth = [], measured.copy_bytes_per_s
    for precision, rate in ceilings.items():
        reason = next((note.partition(": ")[2] for note in measured.notes if note.startswith(precision)), "")
        rows.append({"precision": precision, "TFLOP/s": f"{rate / 1e12:.3g}" if rate else reason})
        rows[-1]["ridge FLOP/byte"] = f"{rate / bandwidth:.1f}" if rate else "-"
    return table(f"Ceilings: copy {bandwidth / 1e9:.1f} GB/s, and products of edge {measured.square.m}", rows)


def draw(results: dict, bandwidth: float, ceilings: dict, axes) -> None:
    intensities = [row["intensity"] for row in results.values()]
    ends = [min(intensities) / 2, max(*intensities, *(2 * rate / bandwidth for rate in ceilings.values() if rate)) * 2]
    for precision, rate in ceilings.items():
        if rate:  # the roof rises to the ridge and is level from there
            roof = [ends[0], rate / bandwidth, ends[1]], [ends[0] * bandwidth, rate, rate]
            axes.plot(*roof, label=f"{precision} roof")
    for name, row in results.items():
        point = (row["intensity"], row["flops"] / row["seconds"])
        axes.plot(*point, "ko")
        axes.annotate(name, point, textcoords="offset points", xytext=(5, -9), fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP/s", title="Roofline, measured")
    axes.legend()


def sentences(results: dict, ridge: float) -> list[str]:
    compute = [name for name, row in results.items() if row["bound"] == "compute"]
    low = [f"{name} ({row['of_roof']:.0%})" for name, row in results.items() if row["of_roof"] < 0.5]
    high = [name for name, row in results.items() if row["of_roof"] > 1.1]
    pairs = [
        (a["flops"] / b["flops"], more, less) for more, a in results.items() for less, b in results.items()
        if a["flops"] > b["flops"] and a["seconds"] < b["seconds"]
    ]  # fmt: skip
    lines = [
        f"The ridge is at {ridge:.1f} FLOP per byte. Right of it, compute-bound: {', '.join(compute) or 'none'}.",
        f"These operations reach less than half of the roof: {', '.join(low) or 'none'}."
        + (" A roofline does not show the reason, which can be their launches." if low else ""),
    ]
    if high:
        lines.append(
            f"These are above the roof: {', '.join(high)}. A cache held their bytes, or the clock was higher than in "
            "the longer run that measured the ceiling."
        )
    if not pairs:
        return [*lines, "Here no operation with more FLOPs was faster than one with fewer."]
    ratio, more, less = max(pairs)
    time = results[more]["seconds"] / results[less]["seconds"]
    lines.append(f"{more} has {ratio:.0f} times the FLOPs of {less}, but takes only {time:.2f} of its time.")
    return lines
