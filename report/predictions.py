"""How far recorded steps lie from what was predicted for them: docs/performance.md's section on ladder.predict."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from common.record import Row, Run
from common.text import aligned
from report.analysis import category_ms, is_timed, median_ms
from report.doubts import mark
from report.load import PREDICTIONS, convert, read_json

FAR = 0.25  # an error that is counted as far
MOST_NAMED = 5
OTHER_ROOFS = "the predicted times are from the roofs of another run, on a machine of the same kind"
OWN_ROOFS = "the predicted times are from this run's roofs, by the model of the present code"
HOW = (
    "`python -m ladder.predict` predicts a row from the machine's roofs alone. The roofs were measured once, with one "
    "of these runs; another run may be of another card of the same kind. None of the times below was used. An error of "
    "-7% means that the prediction is 7% shorter than the measured time. The last column names what was missed most, "
    "predicted of measured: a kind of kernels, or the host's launches where they were predicted to take longest."
)


@dataclass
class Predicted:
    """What was predicted for a row, in milliseconds: of each kind of kernels, of the host that launches them, and the
    step's time."""

    step: str
    category_ms: dict[str, float]
    host_ms: float
    ms: float


def recorded(machine: Path) -> dict[str, dict[str, Predicted]]:
    """What was predicted for the runs in a machine's folder, by run and step; empty without a record. Raises
    RecordError."""
    path = machine / PREDICTIONS
    runs = convert(read_json(path), dict[str, list[Predicted]], path.name) if path.exists() else {}
    return {name: {one.step: one for one in rows} for name, rows in runs.items()}


def section(machine: Path, runs: list[tuple[Path, Run]]) -> list[str]:
    """A summary, and a table with a line per recorded step. Nothing where no predictions of these are recorded."""
    by_run = recorded(machine)
    known = [(path.name, by_run[path.name], run) for path, run in runs if path.name in by_run]
    cells = [cell for name, predicted, run in known for cell in _cells(predicted, name, run)]
    if not cells:
        return []
    pairs = [pair for _, predicted, run in known for pair in _pairs(predicted, run)]
    said = " ".join([summary([cell["error"] for cell in cells]), *directions(pairs)])
    rows = [cell | {"error": f"{cell['error']:+.0%}"} for cell in cells]
    return [f"### Predicted without training: {machine.name}", HOW, said, aligned(rows, "pipe", n_left=2)]


def add_later(run: Run, folder: Path) -> Run:
    """The run, with the times that were predicted for its folder last. Raises RecordError."""
    later = recorded(folder.resolve().parent).get(folder.resolve().name, {})
    filled = [row for row in run.steps if row.step in later]
    for row in filled:
        row.predicted_ms = later[row.step].ms
    if filled:
        run.problems.append(OWN_ROOFS if run.roofs and run.roofs.grid else OTHER_ROOFS)
    return run


def off(run: Run) -> str:
    """How far the predictions of a run lie from its times, as a clause; empty without any."""
    errors = [row.predicted_ms / median_ms(row) - 1 for row in run.steps if is_timed(row) and row.predicted_ms]
    if not errors:
        return ""
    worst = max(errors, key=abs)
    return f"off by {median(map(abs, errors)):.0%} in the median, and by {worst:+.0%} at most"


def summary(errors: list[float]) -> str:
    """How many errors there are, their median, the worst, and how many are far: one sentence."""
    sizes = [abs(error) for error in errors]
    far, short = sum(size > FAR for size in sizes), sum(error < 0 for error in errors)
    return (
        f"{len(sizes)} rows: the median error is {median(sizes):.0%}, the largest {max(sizes):.0%}, and "
        f"{far or 'none'} {'is' if far == 1 else 'are'} beyond {FAR:.0%}. {short} predicted times are too short."
    )


def directions(pairs: list[tuple[str, float, float]]) -> list[str]:
    """Whether each step was predicted faster or slower than the one before, as it was: of (what, predicted, measured)
    times faster. Nothing without pairs."""
    wrong = [f"{what} (predicted {predicted:.2f} times faster, measured {measured:.2f})"
             for what, predicted, measured in pairs if (predicted > 1) != (measured > 1)]  # fmt: skip
    if not pairs:
        return []
    slower = [(predicted, measured) for _, predicted, measured in pairs if measured < 1]
    seen = sum(predicted < 1 for predicted, _ in slower)
    faster, right = len(pairs) - len(slower), len(pairs) - len(wrong) - seen
    said = f"Steps that are faster than the one before: {faster}, of which {right} were predicted so"
    said += f"; slower: {len(slower)}, of which {seen} were" * bool(slower)
    named = f" Wrong for {'; '.join(wrong)}." if 0 < len(wrong) <= MOST_NAMED else ""
    return [f"{said}.{named}"]


def _pairs(predicted: dict[str, Predicted], run: Run) -> list[tuple[str, float, float]]:
    """Each timed step of a run over the one before it: its name, and the speedups that were predicted and measured."""
    found = []
    for before, row in itertools.pairwise(run.steps):
        if {before.step, row.step} <= predicted.keys() and is_timed(before) and is_timed(row):
            name = f"{row.step} at {run.workload.n_embd} channels"
            ratios = predicted[before.step].ms / predicted[row.step].ms, median_ms(before) / median_ms(row)
            found.append((name, *ratios))
    return found


def _cells(predicted: dict[str, Predicted], name: str, run: Run) -> list[dict]:
    cells = []
    for row in run.steps:
        if (one := predicted.get(row.step)) and is_timed(row):
            cell = {"workload": name, "step": row.step, "predicted ms": f"{one.ms:.1f}"}
            cell |= {
                "measured ms": f"{median_ms(row):.1f}{mark(run, row)}",
                "error": one.ms / median_ms(row) - 1,
                "furthest off": _worst(one, row),
            }
            cells.append(cell)
    return cells


def _worst(predicted: Predicted, row: Row) -> str:
    """`copies and casts, 3.1 of 4.8 ms`: the category with the largest difference, predicted and profiled; or the
    launches, where the prediction is the host's time."""
    if not row.profile:
        return "-"
    if predicted.host_ms == predicted.ms:
        return f"launches, {predicted.host_ms:.1f} of {median_ms(row):.1f} ms"
    profiled = category_ms(row)
    gaps = {name: abs(ms - profiled.get(name, 0.0)) for name, ms in predicted.category_ms.items()}
    name = max(gaps, key=gaps.get)
    return f"{name}, {predicted.category_ms[name]:.1f} of {profiled.get(name, 0.0):.1f} ms"
