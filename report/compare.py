"""Two runs beside each other: two machines, two versions, or two shapes."""

from __future__ import annotations

from pathlib import Path

from common.record import Row, Run, differing_fields
from common.text import aligned
from report.analysis import extent_ms, is_timed, reason_untimed
from report.doubts import SERIOUS, compared
from report.load import RecordError, environment_of, load_run
from report.table import commit_of, describe_passes, grid, legend, levels, ms_cell, speedup_cell, tflops

SHAPE_FIELDS = (
    "preset", "n_layer", "n_head", "n_embd", "seq_len", "vocab_size", "batch_size", "parameters", "tokens_per_step",
    "flops_per_step", "lr", "gpus", "parallel", "accumulate", "checkpoint",
)  # fmt: skip
# What may differ while a median still means the same: how many steps were timed, and where the text came from.
HARMLESS_FIELDS = ("warmup", "steps", "data")


def compare_folders(a: Path, b: Path) -> str:
    """What two run folders say of each other. Raises RecordError where they cannot be compared."""
    runs, (x, y) = (load_run(a), load_run(b)), (a.resolve(), b.resolve())
    names = (x.name, y.name) if x.name != y.name else (f"{x.parent.name}/{x.name}", f"{y.parent.name}/{y.name}")
    return compare(*runs, names)


def compare(a: Run, b: Run, names: tuple[str, str]) -> str:
    """Text of the ratios of two runs, step by step.

    The same workload: times, with the ratio that quartiles or passes allow at least and at most. Two shapes: speedups
    over the first row that both have, because times of different work say nothing about each other. Raises
    RecordError where neither can be compared.
    """
    if a.workload is None or b.workload is None:
        raise RecordError("a run whose workload is unknown cannot be compared")
    differing = differing_fields(a.workload, b.workload)
    serious = [name for name in differing if name not in HARMLESS_FIELDS]
    if other := [name for name in serious if name not in SHAPE_FIELDS]:
        raise RecordError(f"{names[0]} and {names[1]} ran different workloads: {', '.join(other)} differ")
    pairs = _pairs(a, b)
    if not any(map(_both_timed, pairs)):
        raise RecordError(f"{names[0]} and {names[1]} have no step in common that has a time in both")
    lines, doubted = [], legend(a, b)
    for letter, run, name in (("A", a, names[0]), ("B", b, names[1])):
        lines.append(f"{letter}: {', '.join([_describe(run, name), *describe_passes(run)])}")
        doubted += [f"{letter}, serious: {text}" for text in levels(run).get(SERIOUS, [])]
    if serious:
        lines += [f"The shapes differ ({', '.join(serious)}): speedups are compared, times are not.", ""]
        return "\n".join([*lines, _speedup_table(pairs, a, b), *doubted])
    if differing:
        lines.append(f"A step is the same work in both, but {', '.join(differing)} differ.")
    table = aligned([_time_cells(*pair, a, b) for pair in pairs])
    meaning = "A / B above 1 means that B is faster. The range divides the quartiles by each other, or the passes."
    return "\n".join([*lines, "", table, *doubted, "", meaning])


def _pairs(a: Run, b: Run) -> list[tuple[Row, Row]]:
    """The rows of both runs by name; a row that only one has gets a counterpart that says so."""
    rows_a, rows_b = ({row.step: row for row in [*run.steps, *run.peers]} for run in (a, b))
    absent_a, absent_b = ({"status": "absent", "reason": f"not in {letter}"} for letter in "AB")
    return [
        (rows_a.get(name) or Row(name, **absent_a), rows_b.get(name) or Row(name, **absent_b))
        for name in sorted(rows_a | rows_b)
    ]


def _both_timed(pair: tuple[Row, Row]) -> bool:
    return all(map(is_timed, pair))


def _describe(run: Run, name: str) -> str:
    environment = environment_of(run)
    return f"{name}: {environment.device}, torch {environment.torch}, commit {commit_of(run)}"


def _time_cells(a: Row, b: Row, run_a: Run, run_b: Run) -> dict[str, str]:
    ms = [ms_cell(row, run) if is_timed(row) else reason_untimed(row) for row, run in ((a, run_a), (b, run_b))]
    ratio = extent = "-"
    if speedup := compared(b, a, run_a, run_b):
        (low_a, high_a), (low_b, high_b) = extent_ms(a), extent_ms(b)
        ratio, extent = f"{speedup.ratio:.3f}{speedup.mark}", f"{low_a / high_b:.3f} to {high_a / low_b:.3f}"
    return {"step": a.step, "A ms": ms[0], "B ms": ms[1], "A / B": ratio, "range": extent}


def _speedup_table(pairs: list[tuple[Row, Row]], a: Run, b: Run) -> str:
    """A speedup is within one run; but where either was busy, none is compared with another."""
    firsts = next(filter(_both_timed, pairs))
    cells = []
    for pair in pairs:
        speedups = [compared(row, first, a, b) for row, first in zip(pair, firsts, strict=True)]
        words = [
            speedup_cell(row, first, a, b) if is_timed(row) else reason_untimed(row)
            for row, first in zip(pair, firsts, strict=True)
        ]
        rates = [tflops(row.model_flops_per_s) if is_timed(row) else "-" for row in pair]
        ratio = f"{speedups[1].ratio / speedups[0].ratio:.3f}{max(s.mark for s in speedups)}" if all(speedups) else "-"
        cells.append((pair[0].step, *words, ratio, *rates))
    rows = grid(("step", "A speedup", "B speedup", "B / A", "A TFLOP/s", "B TFLOP/s"), cells)
    return f"Speedups are over {firsts[0].step}, the first row that has a time in both.\n\n{aligned(rows)}"
