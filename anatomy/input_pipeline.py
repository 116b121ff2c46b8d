"""When does data loading stall the GPU?

Predict: a batch takes 20 ms to load, and a step 10 ms. How long does a step take with 0, 1, 2 and 3 worker processes?
Does prefetching help if every eighth batch is six times as slow?

Prediction: `load` is the time to make a batch, `step` the GPU's time for a training step, W the number of worker
processes. If the training process loads the batches, a batch takes max(step, load), because the GPU computes what is
queued while the host loads. It takes load + step where each step makes the host wait, as on a CPU. With workers it
takes max(step, load / W), so the GPU stalls while load / W > step.

Pinned memory lets the copy to the GPU run beside the step. It saves bytes / bandwidth of the link, which is 0.2 ms for
4 MB at the 25 GB/s of PCIe 4. Prefetching helps where single batches are slow: W x prefetch batches wait in the queue,
which last for W x prefetch x step milliseconds of a slow batch. It does not help where loading is slow on average.

Change: --load 35. How many workers end the stall? --rows 8192: does a GPU gain from pinned memory for 32 MB?
Source: arithmetic of a pipeline; the documentation of torch.utils.data.DataLoader (workers, prefetch_factor, pinning).
Run:    python -m anatomy input-pipeline [--load MS] [--step MS] [--batches N] [--rows N]
"""

import argparse
import math
import time
import warnings

import torch
from torch.utils.data import DataLoader, Dataset

from anatomy.experiment import Check, Result, Seconds, Table, differ, ms, seconds, size_argument, table
from common.hardware import synchronize

CHANNELS = 1024
STALL = 1.25  # a step stalls if it takes longer than this factor times the step alone
REPEATS = 3  # of a row
SLOW_EVERY, SLOW_TIMES = 8, 6  # irregular loading: every 8th batch takes 6 times as long


class Waiting(Dataset):
    """Batches that take `load_s` each. They imitate slow storage: the worker waits and uses no core."""

    def __init__(self, batches: int, rows: int, load_s: float, irregular: bool = False):
        self.batches, self.rows, self.load_s, self.irregular = batches, rows, load_s, irregular

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> torch.Tensor:
        slow = self.irregular and index % SLOW_EVERY == SLOW_EVERY - 1
        time.sleep(self.load_s * (SLOW_TIMES if slow else 1))
        return torch.full((self.rows, CHANNELS), float(index))


def training_step(step_ms: float, device: torch.device):
    """A function that takes about `step_ms` of the device, and the seconds that it takes alone.

    On a GPU it multiplies matrices. On a CPU it waits, which imitates a device that computes beside the host.
    """
    if device.type == "cpu":
        return lambda batch: time.sleep(step_ms / 1e3), seconds(lambda: time.sleep(step_ms / 1e3), 10)
    weight = torch.randn(4096, 4096, device=device)
    products = max(1, round(step_ms / 1e3 / seconds(lambda: weight @ weight, 50)))

    def step(batch: torch.Tensor) -> None:
        for _ in range(products):
            weight @ weight

    return step, seconds(lambda: step(weight), 20)


def batch_seconds(step, dataset: Waiting, device: torch.device, skip: int, **loader) -> float:
    """Seconds a batch. The first `skip` batches do not count: they start the workers and fill the queue."""
    pinned = loader["pin_memory"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores
        batches = iter(DataLoader(dataset, batch_size=None, **loader))
    for _ in range(skip):
        step(next(batches).to(device))
    synchronize(device)
    started = time.perf_counter()
    for batch in batches:
        step(batch.to(device, non_blocking=pinned))
    synchronize(device)
    return (time.perf_counter() - started) / (len(dataset) - skip)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size_argument(parser, "--load MS", "milliseconds to load a batch (20)", default=20)
    size_argument(parser, "--step MS", "milliseconds of a step alone (10)", default=10)
    size_argument(parser, "--batches N", "batches timed (default 100, quick 24)")
    size_argument(parser, "--rows N", "rows of 4096 bytes in a batch (1024, on a CPU 64)")


def run(args: argparse.Namespace) -> Result:
    gpu, load = args.device.type == "cuda", args.load / 1e3
    timed = args.batches or (24 if args.quick else 100)
    rows = args.rows or (1024 if gpu else 64)  # few, because the queue is in /dev/shm, which is small in containers
    step, alone = training_step(args.step, args.device)

    def cell(workers: int, pinned: bool, predicted: float, prefetch: int = 2, irregular: bool = False) -> dict:
        skip = workers * prefetch + 1
        batch_rows, batch_s = (max(1, rows // 16), load / 2) if irregular else (rows, load)
        dataset = Waiting(timed + skip, batch_rows, batch_s, irregular)
        how = {"num_workers": workers, "pin_memory": pinned, "prefetch_factor": prefetch if workers else None}
        measured = Seconds.of([batch_seconds(step, dataset, args.device, skip, **how) for _ in range(REPEATS)])
        return {"workers": workers, "pinned": pinned, "prefetch": prefetch if workers else 0,
                "predicted_s": predicted, "measured_s": measured, "stalls": measured > STALL * alone}  # fmt: skip

    enough = math.ceil(load / alone) + 1  # one more worker than keeps up with the step
    pageable = [cell(0, False, max(alone, load) if gpu else load + alone)]
    pageable += [cell(workers, False, max(alone, load / workers)) for workers in sorted({1, 2, enough})]
    pinned = [cell(workers, True, max(alone, load / max(workers, 1))) for workers in (0, enough)] if gpu else []
    slow, mean = load / 2 * SLOW_TIMES, load / 2 * (SLOW_EVERY - 1 + SLOW_TIMES) / SLOW_EVERY
    fast = math.ceil(1.5 * mean / alone)  # workers that are fast enough on average
    irregular = [
        cell(fast, False, alone + max(0.0, slow - fast * prefetch * alone) / SLOW_EVERY, prefetch, irregular=True)
        for prefetch in (1, 2, 8)
    ]
    title = f"Every batch takes {ms(load)} ms to load, a step alone takes {ms(alone)} ms"
    irregular_title = f"Loading takes {ms(mean)} ms on average, every {SLOW_EVERY}th batch {ms(slow)}"
    tables = [waits(title, pageable + pinned, alone), waits(irregular_title, irregular, alone)]
    figures = {"step_alone_s": alone, "load_s": load, "batches": timed, "rows": rows}
    figures |= {"regular": pageable + pinned, "irregular": irregular}
    checks = [Check(f"{c['workers']} workers, {'pinned' if c['pinned'] else 'pageable'}, prefetch {c['prefetch']}"
                    f"{', irregular' * (c in irregular)}", c["predicted_s"], c["measured_s"], "ms")
              for c in [*pageable, *pinned, *irregular]]  # fmt: skip
    return Result(tables, sentences(pageable, pinned, irregular, alone), figures, checks)


def sentences(pageable: list[dict], pinned: list[dict], irregular: list[dict], alone: float) -> list[str]:
    flowing = [c["workers"] for c in pageable if not c["stalls"]]
    cured = [c["prefetch"] for c in irregular if not c["stalls"]]
    enough, fast = pageable[-1]["workers"], irregular[0]["workers"]
    lines = [
        f"Where the training process loads, a step takes {ms(pageable[0]['measured_s'] - alone)} ms more, "
        f"predicted {ms(pageable[0]['predicted_s'] - alone)}.",
        f"Workers that keep the stall below {STALL - 1:.0%} of a step: {flowing[0]}."
        if flowing
        else f"No number of workers here ends the stall: {enough} leave it above {STALL - 1:.0%} of a step.",
        f"Irregular loading needs a prefetch of {cured[0]}. Workers: {fast}."
        if cured
        else f"No prefetch here ends the stall of irregular loading. Workers: {fast}.",
    ]
    if not pinned:
        return [*lines, "On a CPU the step only waits, as the host of a GPU does. Only a GPU can use pinned memory."]
    for cell, plain, where in zip(pinned, (pageable[0], pageable[-1]), ("without", f"with {enough}"), strict=True):
        changed = f"changes a step by {(cell['measured_s'] - plain['measured_s']) * 1e3:+.1f} ms"
        seen = changed if differ(cell["measured_s"], plain["measured_s"]) else "changes nothing beyond the spread"
        lines.append(f"Pinned memory {seen}, {where} workers.")
    return lines


def waits(title: str, cells: list[dict], alone: float) -> Table:
    return table(title, [{
        "workers": cell["workers"], "memory": "pinned" if cell["pinned"] else "pageable", "prefetch": cell["prefetch"],
        "predicted, ms a step": ms(cell["predicted_s"]), "measured": ms(cell["measured_s"]),
        "stall, ms": f"{(cell['measured_s'] - alone) * 1e3:.1f}", "stalled": f"{1 - alone / cell['measured_s']:.0%}",
    } for cell in cells])  # fmt: skip
