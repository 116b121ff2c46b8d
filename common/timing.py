"""How long steps take: one timed region on a GPU after its clock has settled, four parts on a CPU, and
reference work around and between them."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from common import hardware
from common.arguments import Arguments
from common.parallel import across
from common.record import Row
from common.text import progress

SETTLING_S, TIMED_S, TIMED_STEPS = (
    2,
    3,
    10,
)  # at least: seconds of steps on a GPU; steps after a long training
CPU_PARTS = 4
POLL_S, ASK_S = 0.05, 0.5
PARTS, MOST_QUEUED = 9, 400  # of back-to-back work; launches
LAUNCH_PARTS = 25  # about 50 ms in all
REFERENCE_EDGE, REFERENCE_BYTES, REFERENCE_S = {"cuda": 4096, "cpu": 768}, 2**26, 0.2


class Steps:
    """A training step on its batches in turn, and the losses of all steps so far."""

    def __init__(self, train_step: Callable, batches: list):
        self.train_step, self.batches = train_step, itertools.cycle(batches)
        self.losses: list[torch.Tensor] = []

    def run(self, n: int, phase: str) -> Iterator[None]:
        """Train `n` steps, none for n below 1; yields after each. The host never waits here."""
        progress(f"{phase}: {n} steps")
        for _ in range(n):
            self.losses.append(self.train_step(*next(self.batches)).detach())
            yield

    def timed(
        self, n: int, phase: str, device: torch.device
    ) -> tuple[list[float], list[tuple[float, float]]]:
        """Milliseconds of each of `n` steps: on a CPU by the host's clock; on a GPU between CUDA events, with
        MHz and watts while it runs them. Consecutive steps share an event, so a gap in which the GPU waits
        for the host counts.
        """
        if device.type == "cpu":
            times = [time.perf_counter(), *(time.perf_counter() for _ in self.run(n, phase))]
            return [(end - start) * 1e3 for start, end in itertools.pairwise(times)], []
        events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        events[0].record()
        states, asked = [], time.monotonic()
        for event, _ in zip(events[1:], self.run(n, phase), strict=True):
            event.record()
            if time.monotonic() - asked > ASK_S:  # of steps that the host launches while the GPU works
                states, asked = [*states, hardware.clock_and_power(device)], time.monotonic()
        states.append(hardware.clock_and_power(device))
        while not events[-1].query():
            time.sleep(POLL_S)
            states.append(hardware.clock_and_power(device))
        return [start.elapsed_time(end) for start, end in itertools.pairwise(events)], states


def time_steps(steps: Steps, row: Row, args: Arguments) -> float:
    """Put the times of at least `args.steps` steps (few if they trained for held-out losses), reference work,
    clock and power into `row`. A time is the longest of all processes. Returns the seconds of these steps and
    of those before."""
    least = min(args.steps, TIMED_STEPS) if args.heldout_every else args.steps
    time_on = time_on_cpu if args.device.type == "cpu" else time_on_gpu
    steps_ms, references = time_on(steps, least, row, args)
    if all(references):
        row.product_ms = [work.product_ms for work in references]
        row.copy_ms = [work.copy_ms for work in references]
        row.launch_us = [work.launch_us for work in references if work.launch_us]
    return sum(steps_ms) / 1e3


def time_on_cpu(
    steps: Steps, least: int, row: Row, args: Arguments
) -> tuple[list[float], list["Reference | None"]]:
    """Time `least` steps in CPU_PARTS parts, with reference work around and between them: a host is often
    shared."""
    references = [reference_work(args.device)]
    for k in range(CPU_PARTS):
        n = least * (k + 1) // CPU_PARTS - least * k // CPU_PARTS
        if n:
            steps.timed(
                1, "timed", args.device
            )  # brings back to the caches what the reference work drove out
            row.step_ms += across(steps.timed(n, "timed", args.device)[0], "max", args)
            references.append(reference_work(args.device))
    return row.step_ms, references


def time_on_gpu(
    steps: Steps, least: int, row: Row, args: Arguments
) -> tuple[list[float], list["Reference | None"]]:
    """Time at least `least` steps and TIMED_S seconds in one region, right after steps for SETTLING_S
    seconds: in these a GPU's clock falls to what its power limit allows."""
    device, references = args.device, [reference_work(args.device)]
    torch.cuda.reset_peak_memory_stats(device)
    settling = across(steps.timed(1, "settling", device)[0], "max", args)
    while (left_ms := SETTLING_S * 1e3 - sum(settling)) > 0:
        n = math.ceil(left_ms / statistics.median(settling))
        settling += across(steps.timed(n, "settling", device)[0], "max", args)
    n = max(least, math.ceil(TIMED_S * 1e3 / statistics.median(settling)))
    step_ms, states = steps.timed(n, "timed", device)
    row.step_ms = across(step_ms, "max", args)
    row.peak_bytes = max(row.peak_bytes or 0, torch.cuda.max_memory_allocated(device))
    if states := list(filter(None, states)):
        row.clock_mhz, row.power_w = map(statistics.fmean, zip(*states, strict=True))
    return settling + row.step_ms, [*references, reference_work(device)]


class Reference(NamedTuple):
    """What fixed work took: the same work whatever is trained. Where it takes longer, something else ran
    here."""

    product_ms: float
    copy_ms: float
    launch_us: float | None  # the host's time for one tiny kernel; of a GPU alone


def reference_work(device: torch.device) -> Reference | None:
    """Time a fixed matmul, a fixed copy and fixed launches; None where the row leaves too little memory for
    them."""
    edge, dtype = REFERENCE_EDGE[device.type], torch.float16 if device.type == "cuda" else torch.float32
    try:  # its memory is no part of the row's peak, see `time_on_gpu`
        a, b, out = (torch.full((edge, edge), 0.5, device=device, dtype=dtype) for _ in range(3))
        source, target = (torch.ones(REFERENCE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        product_s = steady_seconds(lambda: torch.matmul(a, b, out=out), device, REFERENCE_S)
        copy_s = steady_seconds(lambda: target.copy_(source), device, REFERENCE_S)
        return Reference(product_s * 1e3, copy_s * 1e3, launch_us(device) if device.type == "cuda" else None)
    except RuntimeError:  # of CUDA's allocator, a CPU's, or cuBLAS's
        return None


def launch_us(device: torch.device) -> float:
    """Microseconds in which the host launches one tiny kernel: the median of LAUNCH_PARTS bursts.

    The driver's queue holds a whole burst, so the host never waits for the GPU.
    """
    number, times = torch.zeros((), device=device), []
    for _ in range(LAUNCH_PARTS):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(MOST_QUEUED):
            number.add_(1)
        times.append((time.perf_counter() - started) / MOST_QUEUED * 1e6)
    torch.cuda.synchronize(device)
    return statistics.median(times)


def seconds(work: Callable[[], object], n: int, device: torch.device, launches: int = 1) -> float:
    """Mean time of `n` calls, one right after the other; on a GPU its own time, of about `launches` kernels
    each."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(n):
            work()
        return (time.perf_counter() - started) / n
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Cycles in which the host gets ahead: small work would wait for its launches. The driver's queue holds
    # about 1000.
    torch.cuda._sleep(500_000 + 20_000 * n * launches)
    begin.record()
    for _ in range(n):
        work()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3 / n


def steady_seconds(work: Callable[[], object], device: torch.device, for_s: float) -> float:
    """Time of one call, back to back for about `for_s` seconds: the median of at most PARTS parts."""
    work()
    once = seconds(work, 1, device)
    parts = min(PARTS, int(for_s / once))
    n = min(math.ceil(for_s / PARTS / once), MOST_QUEUED)
    return statistics.median(seconds(work, n, device) for _ in range(parts)) if parts else once
