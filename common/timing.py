"""How long steps take: timed steps, settling before them, energy after them, and the reference work around them."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable

import torch

from common import hardware, parallel, roofs
from common.arguments import Arguments
from common.errors import is_out_of_memory
from common.record import Reference, Row
from common.text import Progress

TrainStep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SETTLED = 0.01  # drift of the median from the first half of a window to its second
SETTLING_WINDOW_S, LONGEST_SETTLING_S = 2, 20
ENERGY_WINDOW_S = 5


def time_slowest(args: Arguments, train_step: TrainStep, progress: Progress, batches: list, phase: str, row=None):
    """Milliseconds that each step took in the slowest process, and this one's losses; a GPU's clocks go to `row`."""
    if args.device.type == "cuda":
        step_ms, losses = time_steps_cuda(train_step, batches, phase, progress, row)
    else:
        step_ms, losses = time_steps_cpu(train_step, batches, phase, progress)
    return parallel.largest(step_ms, args), losses


def time_steps_cuda(train_step: TrainStep, batches: list, phase: str, progress: Progress, row: Row | None = None):
    """Milliseconds of each step between CUDA events, and losses; the clocks go to `row`.

    Consecutive steps share an event, so a gap in which the GPU waits for the host is counted. The host never waits in
    the loop: there is one synchronize, at the end.
    """
    events, losses = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)], []
    events[0].record()
    for k, batch in enumerate(batches):
        progress.show(phase, k, len(batches))
        losses.append(train_step(*batch).detach().clone())
        events[k + 1].record()
    if row is not None and (state := hardware.gpu_state(batches[0][0].device)) is not None:
        state.while_running = not events[-1].query()  # clocks are those of the steps only if steps were still queued
        row.gpu_state = state
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)], losses


def time_steps_cpu(train_step: TrainStep, batches: list, phase: str, progress: Progress):
    """Milliseconds of each step on the host's clock, and losses."""
    times, losses = [time.perf_counter()], []
    for k, batch in enumerate(batches):
        progress.show(phase, k, len(batches))
        losses.append(train_step(*batch).detach().clone())
        times.append(time.perf_counter())
    return [(end - start) * 1e3 for start, end in itertools.pairwise(times)], losses


def repeated(batches: list, seconds: float, step_ms: float, least: int) -> list:
    """Batches in turn, again and again, for about so many seconds of steps; at least `least` of them."""
    return list(itertools.islice(itertools.cycle(batches), max(least, math.ceil(seconds * 1e3 / step_ms))))


def settle(time_steps: Callable, batches: list, step_ms: float) -> float:
    """Train on `batches` until the steps' times no longer drift, or LONGEST_SETTLING_S would pass; the seconds.

    A GPU under load warms up, and its clock falls until power and temperature are in balance.
    """
    window, passed_s = repeated(batches, SETTLING_WINDOW_S, step_ms, least=4), 0.0
    while True:
        times, _ = time_steps(window, "settling")
        passed_s, half = passed_s + sum(times) / 1e3, len(times) // 2
        drift = statistics.median(times[-half:]) / statistics.median(times[:half]) - 1
        if abs(drift) < SETTLED or passed_s + sum(times) / 1e3 > LONGEST_SETTLING_S:
            return passed_s


def measure_energy(time_steps: Callable, batches: list, row: Row, args: Arguments) -> None:
    """Put the energy of a step, tokens per joule, mean clock and mean power into `row`, where NVML has them."""
    with hardware.Meter(args.device) as meter:
        step_ms, _ = time_steps(repeated(batches, ENERGY_WINDOW_S, row.timing.median_ms, least=2), "energy")
    row.clock_mhz, row.power_w = meter.clock_mhz, meter.power_w
    if meter.power_w:
        row.energy_j_per_step = meter.power_w * statistics.fmean(step_ms) / 1e3
        row.tokens_per_joule = args.batch_size * args.config.seq_len / row.energy_j_per_step


def reference_work(device: torch.device) -> tuple[float, float, float | None] | None:
    """`roofs.reference`; None where the row leaves too little memory for it."""
    try:
        return roofs.reference(device)
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise


def around(before: tuple | None, after: tuple | None) -> Reference | None:
    """The record's reference, of two results of `reference_work`; None where one of them is."""
    if before is None or after is None:
        return None
    product_ms, copy_ms, clock_mhz = map(list, zip(before, after, strict=True))
    return Reference(product_ms, copy_ms, clock_mhz if all(clock_mhz) else None)
