"""How fast is each level of the memory: registers, shared memory, L2, DRAM?

Prediction. A kernel copies n bytes from one buffer to another, again and again: a working set of 2 n bytes.
If it fits a cache, the bytes come from there, else from the next larger level, so the bandwidth falls in
steps at their sizes. No arithmetic gives a level's rate: that of a cache is measured with a copy that fills a
third of it, that of DRAM with the largest. S bytes take as long as none, plus S over the rate of the smallest
level that holds them. A CPU uses one core.

Registers and L1, which is also shared memory, show only in a loop inside a kernel. A multiprocessor does 128
multiply-adds a clock, whose operands are 1536 bytes, and reads 128 bytes of L1.

Change: --smallest 16. At which size does the call stop being what you measure?
Source: NVIDIA, CUDA C++ Programming Guide, arithmetic throughput and shared memory.
"""

from functools import partial
from pathlib import Path

import torch

from anatomy.lab import tl, triton
from common.hardware import clock_and_power

# Numbers of a program of 4 warps; its loops; programs on a multiprocessor.
BLOCK, LOOPS, PROGRAMS = (1024, 2048, 16)

if triton:

    @triton.jit
    def registers(x_ptr, out_ptr, LOOPS: tl.constexpr, BLOCK: tl.constexpr):
        x = tl.arange(0, BLOCK).to(tl.float32)
        for _ in range(LOOPS):
            x = x * 0.999 + 0.001  # no number leaves its register
        tl.store(out_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), x)

    @triton.jit
    def shared(x_ptr, out_ptr, LOOPS: tl.constexpr, BLOCK: tl.constexpr):
        total = tl.zeros((BLOCK,), tl.float32)
        for i in range(LOOPS):
            total += tl.load(x_ptr + (i % 8) * BLOCK + tl.arange(0, BLOCK))  # the same 32 KiB again and again
        tl.store(out_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


def caches(device):
    """Level -> bytes of the caches for data, smallest first."""
    if device.type == "cuda":
        return {"L2": torch.cuda.get_device_properties(device).L2_cache_size}
    levels = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            levels[f"L{level}"] = int(size.removesuffix("K")) * 2**10
    return levels


def inside_the_multiprocessors(lab):
    """Rows of the bytes a second that registers and shared memory give all multiprocessors together."""
    processors = torch.cuda.get_device_properties(lab.device).multi_processor_count
    x, out = torch.ones(2, processors * PROGRAMS * BLOCK, device=lab.device)
    lab.title = f"Inside {processors} multiprocessors, all together"
    for kernel, bytes_a_number, bytes_a_clock in ((registers, 12, 1536), (shared, 4, 128)):
        loop = partial(
            kernel[(processors * PROGRAMS,)], x, out, LOOPS=LOOPS, BLOCK=BLOCK, num_warps=4, num_stages=1
        )
        reached = out.numel() * LOOPS * bytes_a_number / lab.device_seconds(loop)
        loop()  # a busy GPU, while its clock is read
        clock_mhz, _ = clock_and_power(lab.device) or (0, 0)  # no prediction without NVML
        lab.row(kernel.__name__, reached, bytes_a_clock * processors * clock_mhz * 1e6 or None, "B/s")


def run(lab, smallest=None, largest=None):
    kib, mib = smallest or lab.pick(64, 64, 1024), largest or lab.pick(256, 256, 4096)
    least, most = kib * 2**10, mib * 2**20
    if least > most:
        raise ValueError(f"--smallest {kib} (KiB) is above --largest {mib} (MiB)")
    levels, threads = caches(lab.device), torch.get_num_threads()
    buffers = torch.ones(2, most // 8, device=lab.device)

    def copy_seconds(size):
        source, target = buffers[:, : max(1, size // 8)]
        return lab.device_seconds(partial(torch.neg, source, out=target))

    torch.set_num_threads(1)
    empty_s, held = copy_seconds(8), {**levels, "DRAM": 3 * most}
    rates = {}
    for name, n in held.items():
        if n <= 3 * most:
            rates[name] = n / 3 / max(copy_seconds(n // 3) - empty_s, 1e-9)
    lab.title = "A copy; " + ", ".join(f"{name} {n / 2**20:g} MiB" for name, n in levels.items())
    sizes = [most // 4**k for k in range(16)]
    for size in sorted(size for size in sizes if size >= least):
        level, rate = next((name, rate) for name, rate in rates.items() if size <= held[name])
        reached = size / copy_seconds(size)
        curve = "".ljust(round(20 * reached / max(rates.values())), "#")
        lab.row(f"{size / 2**20:g} MiB, {level}", reached, size / (empty_s + size / rate), "B/s", curve=curve)
    torch.set_num_threads(threads)
    fastest = max(row["measured"] for row in lab.rows)
    if lab.gpu and triton:
        inside_the_multiprocessors(lab)
    else:
        lab.row("registers, shared memory", "needs a GPU and Triton", curve="")
    return f"The fastest copy has {fastest / rates['DRAM']:.1f} times the bandwidth of DRAM."
