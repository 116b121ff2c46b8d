"""When does data loading stall the GPU?

Prediction. `load` is the time to make a batch, `step` that of a training step, W the number of worker
processes. If the training process loads, a batch takes max(step, load), because the GPU computes what is
queued meanwhile; load + step where each step makes the host wait, as on a CPU. With workers it takes
max(step, load / W).

Pinned memory lets the copy to the GPU run beside the step. It saves bytes over the link's bandwidth: 0.2 ms
for 4 MB at the 25 GB/s of PCIe 4. Prefetching helps where single batches are slow: W x prefetch batches wait
in the queue, which last for W x prefetch x step of a slow batch. Here every 8th takes 6 times as long, and
stalls for the rest.

Change: --load 35. How many workers end the stall?
Source: the documentation of torch.utils.data.DataLoader; a pipeline's arithmetic.
"""

import math
import time
import warnings
from functools import partial

import torch
from torch.utils.data import DataLoader

CHANNELS, SLOW_EVERY, SLOW_TIMES = 1024, 8, 6


def make_batch(rows, load_s, irregular, index):
    """Imitates slow storage: the process that loads waits and uses no core."""
    slow = irregular and index % SLOW_EVERY == SLOW_EVERY - 1
    time.sleep(load_s * (SLOW_TIMES if slow else 1))
    return torch.full((rows, CHANNELS), float(index))


def training_step(lab, step_s):
    """A function that takes about `step_s`: products on a GPU; on a CPU a wait, which imitates a device
    beside it."""
    if not lab.gpu:
        return lambda: time.sleep(step_s)
    weight = torch.randn(4096, 4096, device=lab.device)
    products = max(1, round(step_s / lab.seconds(lambda: weight @ weight)))
    return lambda: [weight @ weight for _ in range(products)][-1]


def batch_seconds(device, step, make, timed, workers, prefetch, pinned):
    """Seconds a batch. The first ones do not count: they start the workers and fill the queue."""
    skip, began = workers * prefetch + 1, 0.0
    how = {"num_workers": workers, "prefetch_factor": prefetch if workers else None, "pin_memory": pinned}
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores
    for k, batch in enumerate(DataLoader(range(timed + skip), batch_size=None, collate_fn=make, **how)):
        if k == skip:
            torch.get_device_module(device).synchronize()
            began = time.perf_counter()
        batch.to(device, non_blocking=pinned)
        step()
    torch.get_device_module(device).synchronize()
    return (time.perf_counter() - began) / timed


def run(lab, load=None, step=None):
    load_s, timed, rows = (load or 20) / 1e3, 16 if lab.quick else 64, lab.pick(64, 64, 1024)
    work = training_step(lab, (step or 10) / 1e3)
    step_s = lab.seconds(work)

    def row(what, predicted, workers, prefetch=2, pinned=False, irregular=False):
        make = partial(make_batch, rows // 16 if irregular else rows, load_s / (1 + irregular), irregular)
        measured = batch_seconds(lab.device, work, make, timed, workers, prefetch, pinned)
        lab.row(what, measured, predicted, stalled=f"{max(0, 1 - step_s / measured):.0%}")
        return measured

    lab.title = f"Each batch takes {load_s * 1e3:.0f} ms to load; a step alone {step_s * 1e3:.1f} ms"
    alone_s = row("no worker", max(step_s, load_s) if lab.gpu else load_s + step_s, 0)
    enough = math.ceil(load_s / step_s) + 1
    for workers in sorted({1, 2, enough}):
        fed_s = row(f"{workers} workers", max(step_s, load_s / workers), workers)
    if lab.gpu:
        row(f"{enough} workers, pinned", max(step_s, load_s / enough), enough, pinned=True)
    mean_s, slow_s = load_s / 2 * (SLOW_EVERY - 1 + SLOW_TIMES) / SLOW_EVERY, load_s / 2 * SLOW_TIMES
    workers = math.ceil(1.5 * mean_s / step_s)
    lab.title = (
        f"Loading takes {mean_s * 1e3:.0f} ms on average, every {SLOW_EVERY}th batch {slow_s * 1e3:.0f}"
    )
    for prefetch in (1, 2, 8):
        predicted = step_s + max(0.0, slow_s - workers * prefetch * step_s) / SLOW_EVERY
        row(f"{workers} workers, prefetch {prefetch}", predicted, workers, prefetch, irregular=True)
    faster = alone_s / fed_s
    return f"{enough} workers make a step {faster:.1f} times as fast as loading in the training process."
