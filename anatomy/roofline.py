"""When is an operation compute-bound, and when memory-bound?

Predict: how many FLOPs can this machine do while it moves one byte? From which edge n on is a product of two (n, n)
matrices limited by arithmetic? What limits it at n = 1024, where the roofline says "compute"?

Prediction. An operation of F FLOPs that moves Q bytes takes at least F / peak and at least Q / bandwidth seconds. So it
can reach min(peak, F / Q x bandwidth), which is the roof. Its two parts meet at the ridge, where F / Q is peak /
bandwidth. With 700 TFLOP/s in BF16 and 4.2 TB/s the ridge is 167 FLOP per byte. The intensity F / Q of an operation,
for numbers of b bytes, if it reads its input and writes its output once:

- ReLU 1 / 2b, softmax 5 / 2b and LayerNorm 8 / 2b are 0.25 to 2 in BF16, far left of the ridge.
- A product of (n, n) matrices is 2 n^3 / 3 n^2 b = 2n / 3b, so in BF16 it crosses 167 at n = 500.
- Causal attention, fused, is 2 B H T^2 D / 4 B H T D b = T / 2b, so it crosses 167 at T = 670.

So more FLOPs need not take longer. A product of n = 1024 has 2.1 GFLOP and 6 MB, and by its roof needs 3 us. ReLU on
2^26 numbers has 0.07 GFLOP and 268 MB, and needs 64 us. There is a third bound, which a roofline does not draw: the
host has to launch the operation. That takes as long as the same operation on the smallest input, which this program
measures first. A GPU works while the host launches, so the prediction is the longest of the three times. On a CPU the
call comes first.

The ceilings are those of a large copy and of large products. Where a kernel stays below the roof, the same operation
compiled (on a GPU) tells whether the memory or only this kernel is slow.

Change: --edges 384 512 768 1024 1536 and find the edge where the launch stops being the limit. --dtype float16 or
--dtype float32 moves the ridge: which operations change sides?
Source: Williams, Waterman, Patterson, Roofline (CACM 2009).
Run:    python -m anatomy roofline --numbers 67108864 --edges 256 1024 4096 --length 2048
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F

from anatomy.attention_forms import attention_fused, cause_by_exponentials, cause_by_mask
from anatomy.experiment import (
    NEAR,
    Check,
    Refused,
    Result,
    Table,
    default_size,
    differ,
    expected,
    seconds,
    size_argument,
    table,
    us,
)  # fmt: skip
from anatomy.misses import cause_of_miss
from common import hardware, roofs
from common.record import PRECISIONS, Roofs

CHANNELS, HEAD_DIM = 1024, 64
BOUNDS = {"launch": "its launch", "memory": "memory", "compute": "arithmetic"}
PRECISION = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}  # FP16 runs at BF16's rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    numbers = "numbers that ReLU, softmax and LayerNorm take (default: 2^26 on a GPU, 2^23 on a CPU)"
    size_argument(parser, "--numbers N", f"{numbers}, a multiple of {CHANNELS}")
    edges = "edges of square products (default: 256 to 8192 on a GPU, 32 to 1024 on a CPU)"
    size_argument(parser, "--edges N", edges, nargs="+")
    size_argument(parser, "--length T", "tokens of attention, B 1, H 16, D 64 (default: 4096 on a GPU, 1024 on a CPU)")


def operations(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, tuple]:
    """Name -> function, its inputs, the smallest inputs, FLOPs, and the least bytes that it moves."""
    rand = partial(torch.randn, device=args.device, dtype=dtype)
    N, size = args.numbers or default_size(args, 2**22, 2**23, 2**26), dtype.itemsize
    if N % CHANNELS:
        raise Refused(f"--numbers {N} is not a multiple of {CHANNELS}, the length of a row")
    x, row, small = rand(N // CHANNELS, CHANNELS), rand(1, CHANNELS), rand(2, 16, 16)
    weight, bias = rand(CHANNELS), rand(CHANNELS)
    operations = {
        "ReLU": (torch.relu, (x,), (row,), N, 2 * N * size),
        # max, subtract, exp, sum, divide
        "softmax": (partial(torch.softmax, dim=-1), (x,), (row,), 5 * N, 2 * N * size),
        "LayerNorm": (lambda x: F.layer_norm(x, (CHANNELS,), weight, bias), (x,), (row,), 8 * N, 2 * N * size),
    }
    default = [2**i for i in range(8, 14)] if args.device.type == "cuda" else [32, 128, 512, 1024]
    for n in sorted(set(args.edges or default[: 3 if args.quick and args.device.type == "cpu" else None])):
        operations[f"product n {n}"] = (torch.matmul, rand(2, n, n).unbind(), small, 2 * n**3, 3 * n * n * size)
    H, D, T = 16, HEAD_DIM, args.length or default_size(args, 512, 1024, 4096)
    qkv, shortest = rand(3, 1, H, T, D), rand(3, 1, 1, 16, D)
    operations[f"attention T {T}"] = (attention_fused, qkv, shortest, 2 * H * T * T * D, 4 * H * T * D * size)
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
    results, rows, checks = {}, [], []
    for name, (function, inputs, smallest, flops, n_bytes) in todo.items():
        row = time_operation(partial(function, *inputs), partial(function, *smallest), flops / peak,
                             n_bytes / bandwidth, args)  # fmt: skip
        results[name] = row | {"flops": flops, "bytes": n_bytes, "intensity": flops / n_bytes}
        slow = partial(why, function, inputs, row, args)
        moved = n_bytes if row["bound"] == "memory" else 0
        find = partial(cause_of_miss, call=partial(function, *inputs), device=args.device, n_bytes=moved,
                       slow_kernels=slow)  # fmt: skip
        checks.append(Check(f"time of {name}", row["predicted_s"], row["seconds"], "us", find_cause=find))
        rows.append({
            "operation": name, "GFLOP": f"{flops / 1e9:.3g}", "MB": f"{n_bytes / 1e6:.3g}",
            "FLOP/byte": f"{flops / n_bytes:.3g}", "bound by": row["bound"], "smallest input us": us(row["launch_s"]),
            "roof us": us(row["roof_s"]), "measured us": us(row["seconds"]),
            "GFLOP/s": f"{flops / row['seconds'] / 1e9:.4g}", "of roof": f"{row['of_roof']:.0%}",
        })  # fmt: skip
    tables = [ceiling_table(measured, ceilings), table(f"Operations in {dtype}", rows)]
    figures = {"copy_bytes_per_s": bandwidth, "ceilings": ceilings, "ridge": peak / bandwidth, "operations": results}
    result = Result(tables, sentences(results, peak / bandwidth), figures, checks)
    return result.with_plot("roofline.svg", partial(draw, results, bandwidth, ceilings))


def time_operation(call, smallest_call, compute_s: float, move_s: float, args: argparse.Namespace) -> dict:
    """What bounds a call: arithmetic, memory, or its launch; the predicted and the measured time."""
    measured_s, launch_s = seconds(call, args.iters), seconds(smallest_call, args.iters)
    roof_s = max(compute_s, move_s)
    bound = "launch" if launch_s > roof_s else "memory" if move_s > compute_s else "compute"
    predicted_s = expected(launch_s, roof_s, args.device)
    row = {"seconds": measured_s, "launch_s": launch_s, "roof_s": roof_s, "predicted_s": predicted_s}
    return row | {"bound": bound, "of_roof": roof_s / measured_s}


def why(function, inputs, row: dict, args: argparse.Namespace) -> str | None:
    """Why a call is slower than its roof: of attention by the form without a mask or by its exponentials, of softmax
    on a CPU by its exponentials, of a memory-bound operation by its compiled form; None where that is not why."""
    if function is attention_fused:
        full_s = seconds(partial(function, *inputs, causal=False), args.iters)
        masked = cause_by_mask(row["predicted_s"], row["seconds"], full_s)
        return masked or cause_by_exponentials(inputs[0], row["roof_s"])
    if args.device.type == "cpu" and getattr(function, "func", None) is torch.softmax:
        exp_s = seconds(partial(torch.exp, *inputs), args.iters)
        slow = exp_s > NEAR * row["roof_s"] and exp_s * NEAR >= row["seconds"]
        return f"exp of as many numbers takes {us(exp_s)} us: arithmetic that counts as 1 FLOP each" if slow else None
    if args.device.type == "cpu" or row["bound"] != "memory" or not hardware.package_version("triton"):
        return None
    compiled_s = seconds(partial(torch.compile(function, dynamic=False), *inputs), args.iters)
    if compiled_s * NEAR < row["seconds"]:
        return f"compiled, the same bytes take {us(compiled_s)} us: PyTorch's own kernel is slow, not the memory"
    return f"compiled it takes {us(compiled_s)} us, which is no faster"


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
    by_bound = {bound: [n for n, row in results.items() if row["bound"] == bound] for bound in BOUNDS}
    high = [name for name, row in results.items() if row["of_roof"] > 1.1]
    pairs = [
        (a["flops"] / b["flops"], more, less) for more, a in results.items() for less, b in results.items()
        if a["flops"] > b["flops"] and a["seconds"] < b["seconds"] and differ(a["seconds"], b["seconds"])
    ]  # fmt: skip
    lines = [
        f"The ridge is at {ridge:.1f} FLOP per byte.",
        *(f"Bound by {BOUNDS[bound]}: {', '.join(names)}." for bound, names in by_bound.items() if names),
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
