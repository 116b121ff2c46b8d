"""How long steps take: one timed region on a GPU after its clock has settled, four parts on a CPU.

Before and after these steps, and between the parts, reference work is timed: the same work whatever is
trained. Where it takes longer than in other rows, something else ran on the machine, and the row's time may
be wrong.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from common import hardware
from common.arguments import Measurement
from common.parallel import across
from common.record import Row
from common.text import progress

SETTLING_S = 2  # seconds of untimed steps on a GPU, at least
TIMED_S = 3  # seconds of timed steps on a GPU, at least
TIMED_AFTER_TRAINING = 10  # steps to time of a row that was trained for its held-out losses
CPU_PARTS = 4
POLL_S = 0.05  # between questions whether a GPU has finished
STATE_S = 0.5  # between readings of clock and power while the host launches
REFERENCE_EDGE = {"cuda": 4096, "cpu": 768}  # of the square matrices of the reference matmul
REFERENCE_BYTES = 2**26  # of the reference copy
REFERENCE_S = 0.2  # for each kind of reference work
BURSTS = 25  # of launches: about 50 ms in all
REPEATS = 9  # of `steady_seconds`
MOST_QUEUED = 400  # kernels; the driver's queue holds about 1000

State = tuple[float, float] | None  # a GPU's MHz and watts, where they can be read


class Steps:
    """A training step on its batches in turn, and the losses of all steps so far."""

    def __init__(self, train_step: Callable, batches: list):
        self.train_step, self.batches = train_step, itertools.cycle(batches)
        self.losses: list[torch.Tensor] = []

    def run(self, n: int, phase: str) -> Iterator[None]:
        """Train `n` steps, one in each round of the caller's loop; none for n below 1. The host never waits
        here."""
        progress(f"{phase}: {n} steps")
        for _ in range(n):
            self.losses.append(self.train_step(*next(self.batches)).detach())
            yield

    def timed_on_cpu(self, n: int) -> list[float]:
        """Milliseconds of each of `n` steps, by the host's clock."""
        times = [time.perf_counter()]
        for _ in self.run(n, "timed"):
            times.append(time.perf_counter())
        return [(end - start) * 1e3 for start, end in itertools.pairwise(times)]

    def timed_on_gpu(self, n: int, phase: str, device: torch.device) -> tuple[list[float], list[State]]:
        """Milliseconds of each of `n` steps between CUDA events, and the GPU's states while it runs them.

        Consecutive steps share an event, so a gap in which the GPU waits for the host counts.
        """
        events = [torch.cuda.Event(enable_timing=True)]
        events[0].record()
        states, read_at = [], time.monotonic()
        for _ in self.run(n, phase):
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
            if time.monotonic() - read_at > STATE_S:
                states.append(hardware.clock_and_power(device))
                read_at = time.monotonic()
        states.append(hardware.clock_and_power(device))
        while not events[-1].query():
            time.sleep(POLL_S)
            states.append(hardware.clock_and_power(device))
        return [start.elapsed_time(end) for start, end in itertools.pairwise(events)], states


class Reference(NamedTuple):
    """What the reference work took."""

    product_ms: float
    copy_ms: float
    launch_us: float | None  # the host's time for one tiny kernel; of a GPU alone


def time_steps(steps: Steps, row: Row, args: Measurement) -> float:
    """Time at least `args.steps` steps: times, reference work, peak memory, clock and power go into `row`.

    A time is the longest of all processes. Returns the seconds of all steps that were trained here. A row
    with held-out losses has trained its steps already: of it at least TIMED_AFTER_TRAINING are timed.
    """
    n = min(args.steps, TIMED_AFTER_TRAINING) if args.heldout_every else args.steps
    time_them = time_on_cpu if args.device.type == "cpu" else time_on_gpu
    untimed_ms, references = time_them(steps, n, row, args)
    if all(reference is not None for reference in references):
        row.product_ms = [reference.product_ms for reference in references]
        row.copy_ms = [reference.copy_ms for reference in references]
        row.launch_us = [reference.launch_us for reference in references if reference.launch_us is not None]
    return (sum(untimed_ms) + sum(row.step_ms)) / 1e3


def time_on_cpu(
    steps: Steps, n: int, row: Row, args: Measurement
) -> tuple[list[float], list[Reference | None]]:
    """Time `n` steps in CPU_PARTS parts, with reference work around each: a CPU's host is often shared, and
    other work on it may come and go.

    Returns the milliseconds of steps that do not count, and the reference work.
    """
    uncounted_ms, references = [], [reference_work(args.device)]
    ends = [n * part // CPU_PARTS for part in range(CPU_PARTS + 1)]
    for begin, end in itertools.pairwise(ends):
        if end > begin:
            # One step brings back to the caches what the reference work drove out.
            uncounted_ms += steps.timed_on_cpu(1)
            row.step_ms += across(steps.timed_on_cpu(end - begin), "max", args)
            references.append(reference_work(args.device))
    return uncounted_ms, references


def time_on_gpu(
    steps: Steps, n: int, row: Row, args: Measurement
) -> tuple[list[float], list[Reference | None]]:
    """Time at least `n` steps and TIMED_S seconds in one region, right after steps for SETTLING_S seconds: in
    these a GPU's clock falls to what its power limit allows.

    Returns the milliseconds of steps that do not count, and the reference work.
    """
    device, before = args.device, reference_work(args.device)
    torch.cuda.reset_peak_memory_stats(device)  # the reference work's memory is not the row's
    settling_ms = across(steps.timed_on_gpu(1, "settling", device)[0], "max", args)
    while sum(settling_ms) < SETTLING_S * 1e3:
        left_ms = SETTLING_S * 1e3 - sum(settling_ms)
        more = math.ceil(left_ms / statistics.median(settling_ms))
        settling_ms += across(steps.timed_on_gpu(more, "settling", device)[0], "max", args)
    enough = math.ceil(TIMED_S * 1e3 / statistics.median(settling_ms))
    step_ms, states = steps.timed_on_gpu(max(n, enough), "timed", device)
    row.step_ms = across(step_ms, "max", args)
    row.peak_bytes = max(row.peak_bytes or 0, torch.cuda.max_memory_allocated(device))
    states = [state for state in states if state]
    if states:
        row.clock_mhz = statistics.fmean(mhz for mhz, _ in states)
        row.power_w = statistics.fmean(watts for _, watts in states)
    return settling_ms, [before, reference_work(device)]


def reference_work(device: torch.device) -> Reference | None:
    """Time a fixed matmul, a fixed copy and, on a GPU, launches; None where the row leaves too little
    memory."""
    edge, on_gpu = REFERENCE_EDGE[device.type], device.type == "cuda"
    dtype = torch.float16 if on_gpu else torch.float32
    try:
        a, b, out = (torch.full((edge, edge), 0.5, device=device, dtype=dtype) for _ in range(3))
        source, target = (torch.ones(REFERENCE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        product_s = steady_seconds(lambda: torch.matmul(a, b, out=out), device, REFERENCE_S)
        copy_s = steady_seconds(lambda: target.copy_(source), device, REFERENCE_S)
        return Reference(product_s * 1e3, copy_s * 1e3, launch_us(device) if on_gpu else None)
    except RuntimeError:  # CUDA's allocator, a CPU's and cuBLAS have no common class for too little memory
        return None


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
