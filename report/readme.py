"""README's three tables: what each step gives, what it gains by the width of the model, and where it was recorded."""

from __future__ import annotations

import itertools
from pathlib import Path

from common.record import MERGED, Row, Run
from report import analysis, table
from report.analysis import is_timed, peak_gib
from report.doubts import LEGEND, MARK, SERIOUS, compared
from report.load import environment_of, read_run
from report.records import CPU, GPU, SLICE, recorded_runs
from report.table import commit_of, gib, levels, markdown, ms_or_status, pipe_table, tflops

SHOWN = f"{GPU}/{SLICE}"
FEWEST = 4  # steps with a time: fewer do not show where to stop
BF16, FP16 = "TF32; BF16", "FP16, its loss scaled"
WIDE_CPU, OTHER_CPU = "CPU with BF16 instructions", "other CPU, Apple"
# By machine: compute capabilities, and what steps 1, 3 and 4 do there. Tests hold the formats against common/.
MACHINES = {
    "Turing": (["7.5"], FP16, "compiled, not captured", "Transformer Engine in FP16"),
    "Ampere": (["8.0", "8.6"], BF16, "compiled, captured", "Transformer Engine in BF16"),
    "Ada": (["8.9"], BF16, "compiled, captured", "FP8, delayed scaling"),
    "Hopper": (["9.0"], BF16, "compiled, captured", "FP8, delayed scaling"),
    "Blackwell": (["10.0", "12.0"], BF16, "compiled, captured", "MXFP8 (10.0); FP8, current scaling (12.0)"),
    WIDE_CPU: ([], "BF16", "compiled", "skipped"),
    OTHER_CPU: ([], "FP32", "compiled", "skipped"),
}


def readme_table(results: Path) -> str:
    """Five rows of one workload, a line about it, and links to the others."""
    folder = results / SHOWN
    run = read_run(folder / MERGED)
    baseline, plain = analysis.reference_row(run.steps), analysis.plain_row(run.steps)
    names = (f"times faster than {name}" for name in ("the step before", baseline.step, plain.step))
    headers, cells = ("step", "ms per step", *names, "TFLOP/s", "peak GiB"), []
    for before, row in zip([None, *run.steps], run.steps, strict=False):
        speedups = (_faster_cell(row, other, digits, run) for other, digits in ((before, 2), (baseline, 1), (plain, 1)))
        cells.append((row.step, ms_or_status(row, run), *speedups, tflops(row.model_flops_per_s), gib(row)))
    at, base = f"docs/results/{SHOWN}", results.parent.parent
    others = [path for path, _ in recorded_runs(folder.parent, "*") if path != folder]
    links = ", ".join(f"[{path.name}]({path.relative_to(base)}/report.md)" for path in others)
    about = (
        f"{table.describe_device(run.environment)}; {run.workload.preset}, batch {run.workload.batch_size}, "
        f"commit {commit_of(run, 7)}: [report]({at}/report.md), [record]({at}/{MERGED}). "
        f"{', '.join([table.describe_steps(run.workload), *table.describe_passes(run)])}. Other workloads: {links}. "
        "TFLOP/s are model FLOPs by the causal convention: attention counts half of the (T, T) square."
    )
    picture = f'<img src="{at}/speedup.png" width="560" alt="Times faster than the baseline, by step">'
    doubts = "\n".join(f"- {markdown(text)}" for text in levels(run).get(SERIOUS, []))
    return "\n\n".join(filter(None, [picture, pipe_table(headers, cells), *table.legend(run), doubts, about]))


def _faster_cell(row: Row, other: Row | None, digits: int, run: Run) -> str:
    """How many times faster a row is than another; a dash where it is slower."""
    speedup = compared(row, other, run)
    return speedup.cell(digits, unit="") if speedup and speedup.ratio >= 1 else "-"


def gains_table(results: Path) -> str:
    """A row per recorded run of one process in which most steps have a time, GPU first, narrow models first."""
    runs = [one for name in (GPU, CPU) for one in recorded_runs(results / name, "*")]
    shown = [(path, run) for path, run in runs if sum(map(is_timed, run.steps)) >= FEWEST]
    shown.sort(key=lambda one: (environment_of(one[1]).device_type == "cpu", one[1].workload.n_embd, one[0]))
    numbers = sorted({row.step[0] for _, run in shown for row in run.steps})
    cells = []
    for path, run in shown:
        rows = {row.step[0]: row for row in run.steps}
        gains = (_gain(rows, *pair, run) for pair in itertools.pairwise(numbers))
        work = run.workload
        shape = (work.n_embd, work.n_layer, work.seq_len, f"{work.tokens_per_step:,}")
        link = f"[{path.name}]({(path / 'report.md').relative_to(results.parents[1])})"
        cells.append((link, environment_of(run).device, *shape, *gains))
    headers = ("times faster than the step before", "on", "channels", "layers", "sequence length", "tokens a step",
               *(f"step {number}" for number in numbers[1:]))  # fmt: skip
    text = pipe_table(headers, cells, n_left=2)
    return f"{text}\n\n{LEGEND} in the report of that run." if MARK in text else text


def _gain(rows: dict[str, Row], before: str, after: str, run: Run) -> str:
    if not {before, after} <= rows.keys():
        return "-"
    speedup = compared(rows[after], rows[before], run)
    return f"{speedup.ratio:.2f}{speedup.mark}" if speedup else rows[after].status


def machine_of(run: Run) -> str | None:
    """The row of the table that a run belongs to; None of a GPU that it lacks."""
    environment = environment_of(run)
    if environment.device_type == "cpu":
        return WIDE_CPU if any(row.settings.amp_dtype == "bfloat16" for row in run.steps) else OTHER_CPU
    named = (name for name, (capabilities, *_) in MACHINES.items() if environment.compute_capability in capabilities)
    return next(named, None)


def machines_table(results: Path) -> str:
    """What each step does by machine, which devices were recorded; and the memory of each preset."""
    runs = [run for _, run in recorded_runs(results)]
    cells = []
    for name, (capabilities, *does) in MACHINES.items():
        devices = dict.fromkeys(environment_of(run).device for run in runs if machine_of(run) == name)
        generation = f"{name} ({', '.join(capabilities)})" if capabilities else name
        cells.append((generation, *does, markdown(", ".join(devices)) or "not run"))
    headers = ("machine (compute capability)", "1: products", "3: graph", "4: FP8", "recorded here")
    memory = (
        "The least and the most peak memory of any step, in the recorded runs of the presets on one GPU: "
        f"{memory_of_presets(runs)}."
    )
    return "\n\n".join([pipe_table(headers, cells, n_left=5), memory])


def memory_of_presets(runs: list[Run]) -> str:
    """`gpt2` with batch 8, 4.9 to 15.1 GiB of every preset and batch that has a record of a GPU."""
    peaks: dict[tuple[float, str], list[float]] = {}
    for run in runs:
        work = run.workload
        if work.preset != "custom" and work.gpus == 1 and environment_of(run).device_type == "cuda":
            found = [peak_gib(row) for row in run.steps if is_timed(row) and row.peak_allocated_bytes]
            peaks.setdefault((work.flops_per_step, f"`{work.preset}` with batch {work.batch_size}"), []).extend(found)
    said = [f"{name}, {min(gib):.0f} to {max(gib):.0f} GiB" for (_, name), gib in sorted(peaks.items()) if gib]
    return "; ".join(said) or "nothing is recorded"
