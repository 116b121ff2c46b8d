"""How long a piece of work takes when it runs again and again: roofs, experiments and reference work use
this."""

import math
import statistics
import time
from collections.abc import Callable

import torch

REPEATS = 9  # parts whose median counts
MOST_QUEUED = 400  # kernels; the driver's queue holds about 1000
REFERENCE_EDGE, REFERENCE_BYTES = 4096, 2**26  # of the square matrices, of the copy
REFERENCE_S = 0.2  # for each of the two
BURSTS = 25  # of launches: about 50 ms in all


def mean_seconds(work: Callable[[], object], n: int, device: torch.device, launches: int = 1) -> float:
    """Mean time of `n` calls of `work`, one right after the other.

    On a GPU it is the GPU's own time. `launches` is about how many kernels one call launches.
    """
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(n):
            work()
        return (time.perf_counter() - started) / n
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The GPU sleeps for some 10 us a launch while the host gets ahead: otherwise it would wait between small
    # works.
    torch.cuda._sleep(500_000 + 20_000 * n * launches)  # clock cycles
    begin.record()
    for _ in range(n):
        work()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3 / n


def steady_seconds(work: Callable[[], object], device: torch.device, total_s: float) -> float:
    """Time of one call of `work`, back to back for about `total_s` seconds: the median of up to REPEATS parts
    of these, or a single call where it takes longer than all."""
    work()
    once_s = mean_seconds(work, 1, device)
    repeats = min(REPEATS, int(total_s / once_s))
    if not repeats:
        return once_s
    calls = min(math.ceil(total_s / REPEATS / once_s), MOST_QUEUED)
    return statistics.median(mean_seconds(work, calls, device) for _ in range(repeats))


def reference_work(device: torch.device) -> tuple[float, float, float] | None:
    """The time on a GPU of work that is the same for all rows: milliseconds of a matmul and of a copy, and
    microseconds in which the host launches a tiny kernel. Where it takes longer than beside other rows,
    something else ran on the machine. None where the row leaves too little memory."""
    try:
        a, b, out = torch.full((3, REFERENCE_EDGE, REFERENCE_EDGE), 0.5, device=device, dtype=torch.float16)
        source, target = torch.ones(2, REFERENCE_BYTES, dtype=torch.uint8, device=device)
        product_s = steady_seconds(lambda: torch.matmul(a, b, out=out), device, REFERENCE_S)
        copy_s = steady_seconds(lambda: target.copy_(source), device, REFERENCE_S)
    except RuntimeError:  # CUDA's allocator and cuBLAS have no common class for too little memory
        return None
    return product_s * 1e3, copy_s * 1e3, launch_us(device)


def launch_us(device: torch.device) -> float:
    """Microseconds in which the host launches one tiny kernel: the median of BURSTS bursts.

    The driver's queue holds a whole burst, so the host never waits for the GPU.
    """
    number, times = torch.zeros((), device=device), []
    for _ in range(BURSTS):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(MOST_QUEUED):
            number.add_(1)
        times.append((time.perf_counter() - started) / MOST_QUEUED * 1e6)
    torch.cuda.synchronize(device)
    return statistics.median(times)
