"""How fast is each level of the memory?

Predict: how many times faster than DRAM is the L2 cache (on a CPU, L3), and how much faster are registers and the
memory inside a multiprocessor? How full of warps must the GPU be, before DRAM gives its full bandwidth?

Prediction. A kernel copies n bytes from one buffer to another, many times. The working set is both buffers, 2 n bytes.
If it fits in a level of cache, the bytes come from there, and if not, from the next larger level. So the bandwidth
falls in steps at the sizes of the levels. On an H200 the L2 cache holds 60 MB and DRAM gives about 4.2 TB/s. A copy of
a few MB is over before its bandwidth counts: it takes as long as an empty kernel, which is measured first. So a copy of
S bytes is predicted as the empty kernel plus S over the rate of its level, and the rate of L2 as twice that of DRAM.

Registers and the memory inside a multiprocessor (L1 and shared memory are one on an NVIDIA GPU) show only in a loop
inside a kernel, which on_chip.py has in Triton. A multiprocessor reads 128 bytes of L1 a clock, so all of them read 128
x their number x the clock. From registers it does 128 multiply-adds a clock, of three numbers each: 1536 bytes.

To read DRAM at full speed, enough bytes must be on their way. A copy by one program of 4 warps on each multiprocessor,
which has room for 64, is measured first. k programs have k times the bytes on their way, so they copy k times as fast,
until DRAM gives no more.

Change: --smallest 64 --largest 16. At which size does the launch stop being what you measure?
Source: NVIDIA, CUDA C++ Programming Guide (arithmetic throughput, shared memory); Little's law; the sizes of caches as
the device or the operating system states them.
Run:    python -m anatomy memory-hierarchy --smallest 1 --largest 1024
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from anatomy.experiment import (
    Check,
    Refused,
    Result,
    Seconds,
    cause_of_miss,
    default_size,
    seconds,
    size_argument,
    table,
    us,
)
from common import hardware, roofs

CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
OVERHEAD = 3  # a copy shorter than this many empty calls measures the call, not the memory
FASTER = 2  # how many times faster than the next larger level a level is predicted to be


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size_argument(parser, "--smallest KIB", "smallest working set, KiB (default: 1024 on a GPU, 64 on a CPU)")
    size_argument(parser, "--largest MIB", "largest working set, MiB (default: 4096 on a GPU, 256 on a CPU)")


def run(args: argparse.Namespace) -> Result:
    device, dtype = args.device, args.dtype or torch.float32
    smallest = (args.smallest or default_size(args, 64, 64, 1024)) * 2**10
    largest = (args.largest or default_size(args, 256, 256, 4096)) * 2**20
    if smallest > largest:
        raise Refused(f"--smallest {smallest // 2**10} KiB is larger than --largest {largest // 2**20} MiB")
    levels, rate = caches(device), roofs.copy_rate(device)
    rates = {name: rate * FASTER**k for k, name in enumerate(["DRAM", *reversed(levels)])}
    in_graph = device.type == "cuda" and hardware.package_version("triton")
    time_copy = captured_seconds if in_graph else seconds
    buffers = torch.ones(2, largest // 2 // dtype.itemsize, device=device, dtype=dtype)
    # The copies are negations: in a CUDA graph copy_ uses the copy engines, which are slower than a kernel.
    empty_s = time_copy(partial(torch.neg, buffers[0, :1], out=buffers[1, :1]), args.iters)
    copies, rows, checks = [], [], []
    for size in working_sets(smallest, largest, 4 if args.quick and device.type == "cpu" else 2):
        source, target = buffers[:, : size // 2 // dtype.itemsize]
        copy_s = time_copy(copy := partial(torch.neg, source, out=target), args.iters)
        level = next((name for name, capacity in levels.items() if size <= capacity), "DRAM")
        call_bound, predicted_s = copy_s < OVERHEAD * empty_s, empty_s + size / rates[level]
        copies.append({"bytes": size, "seconds": copy_s, "level": level, "bytes_per_s": size / copy_s})
        copies[-1] |= {"call_bound": call_bound, "predicted_s": predicted_s}
        checks.append(check := Check(f"copy within {mib(size)} MiB, from {level}", predicted_s, copy_s, "us"))
        if call_bound and not check.hit:
            check.cause = "an empty call is a large part of it"
        elif not check.hit and (in_graph or copy_s < predicted_s):
            found, modelled = f"{size / copy_s / rate:.1f}", f"{rates[level] / rate:g}"
            check.cause = f"{found} times the rate of a large copy, and not {modelled}, as the model has it"
        else:
            check.find_cause = partial(cause_of_miss, call=copy, device=device)
        rows.append({"working set MiB": mib(size), "predicted to fit in": level, "us": us(copy_s)})
        rows[-1] |= {"GB/s": f"{size / copy_s / 1e9:.1f}", "measures": "the call, not the memory" * call_bound}
    sizes = ", ".join(f"{name} {mib(capacity)} MiB" for name, capacity in levels.items()) or "sizes unknown"
    title = f"Copies within a working set (source and target); caches: {sizes}; an empty call: {us(empty_s)} us"
    figures = {"caches": levels, "empty_s": empty_s, "copy_bytes_per_s": rate, "working_sets": copies}
    tables, lines = [table(title, rows)], sentences(copies, levels)
    if in_graph:
        from anatomy import on_chip  # the import needs Triton

        found = on_chip.measure(device, rate, args.iters)
        figures, tables, checks = figures | found, tables + on_chip.tables(**found), checks + on_chip.checks(**found)
    else:
        lines.append("Registers, L1 and occupancy were not measured: they need a GPU and Triton.")
    result = Result(tables, lines, figures, checks)
    return result.with_plot("memory-hierarchy.svg", partial(draw, copies, levels))


def working_sets(smallest: int, largest: int, factor: int) -> list[int]:
    """Sizes in bytes, ascending. Each is `factor` times the one before, and `largest` is one of them."""
    sizes = []
    while largest >= smallest:
        sizes.append(largest)
        largest //= factor
    return sizes[::-1]


def mib(size: float) -> str:
    return f"{size / 2**20:.4g}"


def caches(device: torch.device) -> dict[str, int]:
    """Level -> bytes, smallest first. The private caches of all CPU cores add up, as every core copies a part."""
    if device.type == "cuda":
        return {"L2": torch.cuda.get_device_properties(device).L2_cache_size}
    levels = {}
    for index in sorted(CPU_CACHES.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            private = not set((index / "shared_cpu_list").read_text().strip()) & set(",-")
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            levels[f"L{level}"] = int(size[:-1]) * 2**10 * (torch.get_num_threads() if private else 1)
    return dict(sorted(levels.items(), key=lambda item: item[1]))


def captured_seconds(function: Callable[[], object], samples: int) -> Seconds:
    """Seconds of one call among many in a CUDA graph: the host launches nothing, and L2 keeps what it holds."""
    from triton.testing import do_bench_cudagraph

    return Seconds.of([s / 1e3 for s in do_bench_cudagraph(function, rep=max(1, samples // 2), return_mode="all")])


def draw(copies: list[dict], levels: dict[str, int], axes) -> None:
    axes.plot([row["bytes"] / 2**20 for row in copies], [row["bytes_per_s"] / 1e9 for row in copies], "o-")
    for name, capacity in levels.items():
        axes.axvline(capacity / 2**20, linestyle="--", color="gray")
        axes.annotate(name, (capacity / 2**20, 0), textcoords="offset points", xytext=(3, 3))
    axes.set(xscale="log", xlabel="working set, MiB", ylabel="GB/s, read and written", title="Bandwidth of a copy")
    axes.set_ylim(bottom=0)


def sentences(copies: list[dict], levels: dict[str, int]) -> list[str]:
    kept = [row for row in copies if not row["call_bound"]]
    if not kept:
        return ["Every copy took about as long as an empty call, so the figures show nothing about the memory."]
    best = {}
    for row in kept:
        best[row["level"]] = max(best.get(row["level"], 0), row["bytes_per_s"])
    lines = [f"The fastest copy by level: {', '.join(f'{name} {rate / 1e9:.0f} GB/s' for name, rate in best.items())}."]
    rates = list(best.values())
    if len(rates) > 1:
        falls = all(upper > lower for upper, lower in pairwise(rates))
        lines.append(
            f"Each level is faster than the next larger one; the first is {rates[0] / rates[-1]:.1f} times the last. "
            "These copies include the call, which the predictions add to the time of the bytes."
            if falls
            else "Not every level is faster than the next larger one."
        )
    steps = [(near["bytes_per_s"] / far["bytes_per_s"], near["bytes"], far["bytes"]) for near, far in pairwise(kept)]
    drop, near, far = max(steps, default=(0, 0, 0))
    if drop <= 1.1:
        return [*lines, "The bandwidth falls by more than a tenth between no working set and the next."]
    inside = [name for name, size in levels.items() if near <= size <= far]
    where = f"where {' and '.join(inside)} ends" if inside else "where no cache ends according to its stated size"
    return [*lines, f"The largest step, {drop:.1f}x, lies between {mib(near)} and {mib(far)} MiB, {where}."]
