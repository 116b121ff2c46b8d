"""How fast is each level of the memory?

Predict: how many times faster than DRAM is the L2 cache (on a CPU, L3), and how much faster are registers and the
memory inside a multiprocessor? How full of warps must the GPU be, before DRAM gives its full bandwidth?

Prediction. A kernel copies n bytes from one buffer to another, many times. The working set is both buffers, 2 n bytes.
If it fits in a level of cache, the bytes come from there, and if not, from the next larger level. So the bandwidth
falls in steps at the sizes of the levels. No arithmetic gives the rate of a level, so each is measured first: that of
DRAM with a large copy, that of a cache with a copy that fills a third of it. Then a copy of S bytes is predicted as an
empty kernel, which is measured as well, plus S over the rate of the smallest level that holds it. A copy that takes
less than two empty kernels shows no rate, so a cache so small is left out. On a CPU a single core copies.

Registers and the memory inside a multiprocessor (L1 and shared memory are one on an NVIDIA GPU) show only in a loop
inside a kernel, which on_chip.py has in Triton. A multiprocessor reads 128 bytes of L1 a clock, so all of them read 128
x their number x the clock. It does 128 multiply-adds a clock; their operands, 1536 bytes, count as read from registers.

To read DRAM at full speed, enough bytes must be on their way. A copy by one program of 4 warps on each multiprocessor,
which has room for 64, is measured first. What it takes beyond bytes over bandwidth is latency. k programs have k times
the bytes on their way, so they wait 1/k of the latency, and as long as before for the bandwidth.

Change: --smallest 64 --largest 16. At which size does the launch stop being what you measure?
Source: NVIDIA, CUDA C++ Programming Guide (arithmetic throughput, shared memory); Little's law; the sizes of caches as
the device or the operating system states them.
Run:    python -m anatomy memory-hierarchy --smallest 1 --largest 1024
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from anatomy.experiment import (
    Check,
    Refused,
    Result,
    Seconds,
    default_size,
    near,
    on_one_thread,
    one_thread,
    size_argument,
    table,
    us,
)
from anatomy.misses import changed_cause
from common import hardware, roofs

CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
OVERHEAD = 3  # a copy predicted shorter than this many empty calls measures the call, not the memory
PART, SHOWN = 3, 2  # a cache's rate is that of a copy which fills so small a part of it, and takes so many empty calls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size_argument(parser, "--smallest KIB", "smallest working set, KiB (default: 1024 on a GPU, 64 on a CPU)")
    size_argument(parser, "--largest MIB", "largest working set, MiB (default: 4096 on a GPU, 256 on a CPU)")


def run(args: argparse.Namespace) -> Result:
    device, dtype = args.device, args.dtype or torch.float32
    smallest = (args.smallest or default_size(args, 64, 64, 1024)) * 2**10
    largest = (args.largest or default_size(args, 256, 256, 4096)) * 2**20
    if smallest > largest:
        raise Refused(f"--smallest {smallest // 2**10} KiB is larger than --largest {largest // 2**20} MiB")
    levels = caches(device)
    copies = Copies(device, dtype, largest, levels, args.iters)
    with one_thread():
        rates = copies.rates() | {"DRAM": roofs.copy_rate(device)}
    sets, rows, checks = [], [], []
    for size in working_sets(smallest, largest, 4 if args.quick and device.type == "cpu" else 2):
        copy_s = copies.seconds(size)
        level = next((name for name in rates if size <= levels.get(name, size)), "DRAM")
        predicted_s = copies.predicted_s(size, rates[level])
        call_bound = predicted_s < OVERHEAD * copies.empty_s
        sets.append({"bytes": size, "seconds": copy_s, "level": level, "bytes_per_s": size / copy_s})
        sets[-1] |= {"call_bound": call_bound, "predicted_s": predicted_s}
        what = f"copy within {mib(size)} MiB, from {level}"
        cause = partial(copies.cause_of_miss, size=size, level=level, rate=rates[level])
        checks += [] if call_bound else [Check(what, predicted_s, copy_s, "us", find_cause=cause)]
        rows.append({"working set MiB": mib(size), "predicted from": level, "us": us(copy_s)})
        rows[-1] |= {"GB/s": f"{size / copy_s / 1e9:.1f}", "measures": "the call, not the memory" * call_bound}
    sizes = ", ".join(f"{name} {mib(capacity)} MiB" for name, capacity in levels.items()) or "sizes unknown"
    title = f"Copies within a working set (source and target); caches: {sizes}; an empty call: {us(copies.empty_s)} us"
    figures = {"caches": levels, "empty_s": copies.empty_s, "working_sets": sets, "copy_bytes_per_s": rates["DRAM"]}
    tables, lines = [table(title, rows)], sentences(sets, levels)
    if copies.in_graph:
        from anatomy import on_chip  # the import needs Triton

        found = on_chip.measure(device, rates["DRAM"], args.iters)
        figures, tables, checks = figures | found, tables + on_chip.tables(**found), checks + on_chip.checks(**found)
    else:
        lines.append("Registers, L1 and occupancy were not measured: they need a GPU and Triton.")
    result = Result(tables, lines, figures, checks)
    return result.with_plot("memory-hierarchy.svg", partial(draw, sets, levels))


class Copies:
    """Copies between two buffers of `largest` bytes or more together, on a CPU by one thread, beside caches of these
    `levels`. They are negations: in a CUDA graph copy_ uses the copy engines, which are slower than a kernel."""

    def __init__(self, device: torch.device, dtype: torch.dtype, largest: int, levels: dict[str, int], iters: int):
        largest = max([largest, *(capacity // PART for capacity in levels.values())])
        self.levels, self.buffers = levels, torch.ones(2, largest // 2 // dtype.itemsize, device=device, dtype=dtype)
        self.iters = iters
        self.in_graph = device.type == "cuda" and bool(hardware.package_version("triton"))
        self.empty_s = self.seconds(2 * dtype.itemsize)

    def seconds(self, size: int, cold: bool = False) -> Seconds:
        """The time of a copy of `size` bytes, read and written: the same ones, or `cold`, always the next ones."""
        numbers = size // 2 // self.buffers.itemsize
        parts = self.buffers.shape[1] // numbers if cold else 1
        pairs = (self.buffers[:, k * numbers :][:, :numbers] for k in range(parts))
        calls = [partial(torch.neg, source, out=target) for source, target in pairs]
        turns = itertools.cycle(calls)
        call = (lambda: next(turns)()) if cold else calls[0]
        return captured_seconds(call, self.iters) if self.in_graph else on_one_thread(call, self.iters)

    def rates(self) -> dict[str, float]:
        """Bytes per second of each cache that these copies show, smallest first."""
        times = {name: (part := capacity // PART, self.seconds(part)) for name, capacity in self.levels.items()}
        shown = {name: pair for name, pair in times.items() if pair[1] >= SHOWN * self.empty_s}
        return {name: part / (copy_s - self.empty_s) for name, (part, copy_s) in shown.items()}

    def predicted_s(self, size: int, rate: float) -> float:
        return self.empty_s + size / rate

    def cause_of_miss(self, check: Check, size: int, level: str, rate: float) -> str | None:
        """Why it is longer, if half as many bytes are not; or shorter, if bytes that no cache holds are not."""
        longer, cached = check.measured > check.predicted, level in self.levels
        half_s = longer and cached and size > self.levels[level] // PART and self.seconds(size // 2)
        if half_s and near(half_s, self.predicted_s(size // 2, rate)):
            return f"half as many bytes take {us(half_s)} us, as predicted: {level} does not hold this working set"
        uncached = level == "DRAM" and self.buffers.nbytes > 2 * max(self.levels.values(), default=0)
        if not longer and uncached and near(cold_s := self.seconds(size, cold=True), check.predicted):
            return f"it takes {us(cold_s)} us with bytes that were not touched lately: a cache held a part of them"
        return changed_cause(check, self.seconds(size))


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
    """Level -> bytes of the caches for data that a GPU or a CPU's core has, smallest first."""
    if device.type == "cuda":
        return {"L2": torch.cuda.get_device_properties(device).L2_cache_size}
    levels = {}
    for index in sorted(CPU_CACHES.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            levels[f"L{level}"] = int(size[:-1]) * 2**10
    return dict(sorted(levels.items(), key=lambda item: item[1]))


def captured_seconds(function: Callable[[], object], samples: int) -> Seconds:
    """Seconds of one call among many in a CUDA graph: the host launches nothing, and L2 keeps what it holds."""
    from triton.testing import do_bench_cudagraph

    return Seconds.of([s / 1e3 for s in do_bench_cudagraph(function, rep=max(1, samples // 2), return_mode="all")])


def draw(sets: list[dict], levels: dict[str, int], axes) -> None:
    axes.plot([row["bytes"] / 2**20 for row in sets], [row["bytes_per_s"] / 1e9 for row in sets], "o-")
    for name, capacity in levels.items():
        axes.axvline(capacity / 2**20, linestyle="--", color="gray")
        axes.annotate(name, (capacity / 2**20, 0), textcoords="offset points", xytext=(3, 3))
    axes.set(xscale="log", xlabel="working set, MiB", ylabel="GB/s, read and written", title="Bandwidth of a copy")
    axes.set_ylim(bottom=0)


def sentences(sets: list[dict], levels: dict[str, int]) -> list[str]:
    kept = [row for row in sets if not row["call_bound"]]
    if not kept:
        return ["Every copy took about as long as an empty call, so the figures show nothing about the memory."]
    best = {}
    for row in kept:  # of DRAM the last, of which caches hold least
        fastest = best.get(row["level"], 0) if row["level"] in levels else 0
        best[row["level"]] = max(fastest, row["bytes_per_s"])
    named = ", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in best.items())
    lines = [f"The fastest copies from caches, and the largest from DRAM: {named}."]
    rates = list(best.values())
    if len(rates) > 1:
        falls = all(upper > lower for upper, lower in itertools.pairwise(rates))
        lines.append(
            f"Each level is faster than the next larger one; the first is {rates[0] / rates[-1]:.1f} times the last. "
            "These copies include the call, which the predictions add to the time of the bytes."
            if falls
            else "Not every level is faster than the next larger one."
        )
    steps = [(a["bytes_per_s"] / b["bytes_per_s"], a["bytes"], b["bytes"]) for a, b in itertools.pairwise(kept)]
    drop, small, large = max(steps, default=(0, 0, 0))
    if drop <= 1.1:
        return [*lines, "The bandwidth falls by more than a tenth between no working set and the next."]
    inside = [name for name, size in levels.items() if small <= size <= large]
    where = f"where {' and '.join(inside)} ends" if inside else "where no cache ends according to its stated size"
    return [*lines, f"The largest step, {drop:.1f}x, lies between {mib(small)} and {mib(large)} MiB, {where}."]
