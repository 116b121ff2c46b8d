"""Registers, L1 and occupancy in Triton kernels, for `memory-hierarchy`. The import needs Triton, and a call a GPU."""

from functools import partial

import torch
import triton
import triton.language as tl

from anatomy.experiment import Check, Table, seconds, table, us
from common import hardware

BLOCK, WARPS = 1024, 4  # numbers of one program, and its warps of 32 threads: 8 numbers a thread
PARTS = 8  # L1 holds PARTS x BLOCK numbers, which are 32 KiB
NUMBERS_READ = 3  # by a multiply-add
PROGRAMS = (1, 2, 4, 8, 16)  # on each multiprocessor
L1_BYTES, MULTIPLY_ADDS = 128, 128  # of a multiprocessor in a clock
LOOPS = 2048


@triton.jit
def multiply_adds(out_ptr, a, b, LOOPS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = offsets.to(tl.float32)
    for _ in range(LOOPS):
        x = x * a + b  # no number leaves its register
    tl.store(out_ptr + offsets, x)


@triton.jit
def cached_loads(x_ptr, out_ptr, LOOPS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(LOOPS):
        total += tl.load(x_ptr + (i % PARTS) * BLOCK + lanes)  # the same 32 KiB again and again
    tl.store(out_ptr + tl.program_id(0) * BLOCK + lanes, total)


@triton.jit
def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < n
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, inside), inside)


def read_registers(out: torch.Tensor, loops: int) -> int:
    """Multiply-adds in registers by out.numel() / BLOCK programs. Returns the bytes that they read."""
    grid = (out.numel() // BLOCK,)
    multiply_adds[grid](out, 0.999, 0.001, LOOPS=loops, BLOCK=BLOCK, num_warps=WARPS, num_stages=1)
    return out.numel() * loops * NUMBERS_READ * out.itemsize


def read_l1(x: torch.Tensor, out: torch.Tensor, loops: int) -> int:
    """Loads of PARTS x BLOCK numbers of x by out.numel() / BLOCK programs. Returns the bytes that they read."""
    grid = (out.numel() // BLOCK,)
    cached_loads[grid](x, out, LOOPS=loops, BLOCK=BLOCK, PARTS=PARTS, num_warps=WARPS, num_stages=1)
    return out.numel() * loops * x.itemsize


def copy_with(x: torch.Tensor, y: torch.Tensor, programs: int) -> None:
    """Copy x to y by so many programs, which stay on the GPU until all is done; fewer than 2^31 numbers."""
    copy[(programs,)](x, y, x.numel(), BLOCK=BLOCK, num_warps=WARPS, num_stages=1)


def measure(device: torch.device, copy_rate: float, samples: int) -> dict[str, dict]:
    """`on_chip`: level -> rates; `occupancy`: programs on each multiprocessor -> rates of a copy. Bytes per second."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return {
        "on_chip": levels(device, processors, samples),
        "occupancy": occupancy(device, processors, copy_rate, samples),
    }


def levels(device: torch.device, processors: int, samples: int) -> dict[str, dict]:
    """Level -> its rate, and the prediction by the largest clock, which is None where nothing tells the clock."""
    x, out = torch.ones(2, processors * max(PROGRAMS) * BLOCK, device=device)
    state = hardware.gpu_state(device)
    clock = state and state.max_sm_clock_mhz and state.max_sm_clock_mhz * 1e6
    rates = {}
    for name, read, bytes_a_clock in (
        ("registers", partial(read_registers, out, LOOPS), MULTIPLY_ADDS * NUMBERS_READ * out.itemsize),
        ("L1 or shared memory", partial(read_l1, x, out, LOOPS), L1_BYTES),
    ):
        read_s, predicted = seconds(read, samples), clock and bytes_a_clock * processors * clock
        rates[name] = {"seconds": read_s, "bytes_per_s": read() / read_s, "predicted_bytes_per_s": predicted}
    return rates


def occupancy(device: torch.device, processors: int, copy_rate: float, samples: int) -> dict[str, dict]:
    """Programs on each multiprocessor -> the rate of a copy of 1 GiB, and the prediction by the first of them.

    A byte waits for its latency, whose share k programs hide, and then for its turn: these times add up.
    """
    x, y = torch.ones(2, 2**27, device=device)
    rows = {}
    for programs in PROGRAMS:
        copy_s = seconds(partial(copy_with, x, y, programs * processors), samples)
        rows[str(programs)] = {"seconds": copy_s, "bytes_per_s": 2 * x.nbytes / copy_s}
        first = rows[str(PROGRAMS[0])]["bytes_per_s"]
        latency = max(1 / first - 1 / copy_rate, 0)  # seconds a byte, of one program
        rows[str(programs)]["predicted_bytes_per_s"] = 1 / (1 / copy_rate + latency * PROGRAMS[0] / programs)
    return rows


def tables(on_chip: dict, occupancy: dict) -> list[Table]:
    inside = [{"level": name, "TB/s": f"{row['bytes_per_s'] / 1e12:.1f}", "us": us(row["seconds"])}
              for name, row in on_chip.items()]  # fmt: skip
    copies = [{"warps of 64": f"{int(k) * WARPS}", "GB/s": f"{row['bytes_per_s'] / 1e9:.0f}", "us": us(row["seconds"])}
              for k, row in occupancy.items()]  # fmt: skip
    return [
        table("Inside the multiprocessors, all of them together. Registers: the operands of multiply-adds", inside),
        table("A copy of 1 GiB by fewer warps than fit on a multiprocessor", copies),
    ]


def checks(on_chip: dict, occupancy: dict) -> list[Check]:
    """Of levels whose clock is known, and of every occupancy but the first, which the others are predicted from."""
    copies = {f"copy by {int(k) * WARPS} of 64 warps": row for k, row in occupancy.items() if k != str(PROGRAMS[0])}
    rows = {f"bandwidth of {name}": row for name, row in on_chip.items()} | copies
    return [
        Check(name, row["predicted_bytes_per_s"] / 1e9, row["bytes_per_s"] / 1e9, "GB/s")
        for name, row in rows.items()
        if row["predicted_bytes_per_s"]
    ]
