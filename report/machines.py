"""README's table of what each step does on which machine, and what of it has been recorded."""

from __future__ import annotations

from pathlib import Path

from common.record import Run
from report.analysis import is_timed, peak_gib
from report.load import MERGED, environment_of, read_run
from report.table import markdown, pipe_table

BF16, FP16 = "TF32; BF16", "FP16, its loss scaled"
WIDE_CPU, CPU = "CPU with BF16 instructions", "other CPU, Apple"
# By machine: compute capabilities, and what steps 1, 3 and 4 do there. Tests hold the formats against common/.
MACHINES = {
    "Turing": (["7.5"], FP16, "compiled, not captured", "Transformer Engine in FP16"),
    "Ampere": (["8.0", "8.6"], BF16, "compiled, captured", "Transformer Engine in BF16"),
    "Ada": (["8.9"], BF16, "compiled, captured", "FP8, delayed scaling"),
    "Hopper": (["9.0"], BF16, "compiled, captured", "FP8, delayed scaling"),
    "Blackwell": (["10.0", "12.0"], BF16, "compiled, captured", "MXFP8 (10.0); FP8, current scaling (12.0)"),
    WIDE_CPU: ([], "BF16", "compiled", "skipped"),
    CPU: ([], "FP32", "compiled", "skipped"),
}


def machine_of(run: Run) -> str | None:
    """The row of the table that a run belongs to; None of a GPU that it lacks."""
    environment = environment_of(run)
    if environment.device_type == "cpu":
        return WIDE_CPU if any(row.settings.amp_dtype == "bfloat16" for row in run.steps) else CPU
    named = (name for name, (capabilities, *_) in MACHINES.items() if environment.compute_capability in capabilities)
    return next(named, None)


def machines_table(results: Path) -> str:
    """What each step does by machine, which devices were recorded; and the memory of each preset."""
    runs = [read_run(path) for path in sorted(results.glob(f"*/*/{MERGED}"))]
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
        if work and work.preset != "custom" and work.gpus == 1 and environment_of(run).device_type == "cuda":
            found = [peak_gib(row) for row in run.steps if is_timed(row) and row.peak_allocated_bytes]
            peaks.setdefault((work.flops_per_step, f"`{work.preset}` with batch {work.batch_size}"), []).extend(found)
    said = [f"{name}, {min(gib):.0f} to {max(gib):.0f} GiB" for (_, name), gib in sorted(peaks.items()) if gib]
    return "; ".join(said) or "nothing is recorded"
