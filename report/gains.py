"""README's table of what each step gains over the one before, by the width of the model."""

from __future__ import annotations

import itertools
from pathlib import Path

from common.record import MERGED, Row, Run
from report.analysis import is_timed
from report.doubts import LEGEND, MARK, compared
from report.load import environment_of, read_run
from report.records import CPU, GPU
from report.table import pipe_table

FEWEST = 4  # steps with a time: fewer do not show where to stop


def gains_table(results: Path) -> str:
    """A row per recorded run of one process in which most steps have a time, GPU first, narrow models first."""
    runs = [(path, read_run(path)) for name in (GPU, CPU) for path in sorted(results.glob(f"{name}/*/{MERGED}"))]
    shown = [(path, run) for path, run in runs if run.workload and sum(map(is_timed, run.steps)) >= FEWEST]
    shown.sort(key=lambda one: (environment_of(one[1]).device_type == "cpu", one[1].workload.n_embd))
    numbers = sorted({row.step[0] for _, run in shown for row in run.steps})
    cells = []
    for path, run in shown:
        rows = {row.step[0]: row for row in run.steps}
        gains = (_gain(rows, *pair, run) for pair in itertools.pairwise(numbers))
        work = run.workload
        shape = (work.n_embd, work.n_layer, work.seq_len, f"{work.tokens_per_step:,}")
        link = f"[{path.parent.name}]({(path.parent / 'report.md').relative_to(results.parents[1])})"
        cells.append((link, environment_of(run).device, *shape, *gains))
    steps = (f"step {number}" for number in numbers[1:])
    headers = (
        "times faster than the step before",
        "on",
        "channels",
        "layers",
        "sequence length",
        "tokens a step",
        *steps,
    )
    table = pipe_table(headers, cells, n_left=2)
    return f"{table}\n\n{LEGEND} in the report of that run." if MARK in table else table


def _gain(rows: dict[str, Row], before: str, after: str, run: Run) -> str:
    if not {before, after} <= rows.keys():
        return "-"
    speedup = compared(rows[after], rows[before], run)
    return f"{speedup.ratio:.2f}{speedup.mark}" if speedup else rows[after].status
