"""How far recorded steps lie from what was predicted for them: docs/performance.md's section on ladder.predict."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from common.record import Row, Run
from common.text import aligned
from report.analysis import category_ms, is_timed, median_ms
from report.load import PREDICTIONS, read_json

FAR = 0.25  # an error beyond which the section names what is wrong
HOW = (
    "`python -m ladder.predict` predicts each step from the machine's roofs and from experiments of `anatomy/`, before "
    "anything is trained. None of the times below was used. An error of -7% means that the prediction is 7% shorter "
    "than the measured time. The last column names the kind of kernels that was missed most, predicted of measured."
)


def section(machine: Path, runs: list[tuple[Path, Run]]) -> list[str]:
    """A summary, and a table with a line per recorded step. Nothing where no predictions of these are recorded."""
    recorded = read_json(machine / PREDICTIONS) if (machine / PREDICTIONS).exists() else {}
    cells = [cell for path, run in runs for cell in _cells(recorded.get(path.name, []), path.name, run)]
    if not cells:
        return []
    said = summary([cell["error"] for cell in cells])
    rows = [cell | {"error": f"{cell['error']:+.0%}"} for cell in cells]
    return [f"### Predicted without training: {machine.name}", HOW, said, aligned(rows, "pipe", n_left=2)]


def summary(errors: list[float]) -> str:
    """How many errors there are, their median, the worst, and how many are far: one sentence."""
    sizes = [abs(error) for error in errors]
    far = sum(size > FAR for size in sizes)
    return (
        f"{len(sizes)} steps: the median error is {median(sizes):.0%}, the largest {max(sizes):.0%}, and "
        f"{far or 'none'} {'is' if far == 1 else 'are'} beyond {FAR:.0%}."
    )


def _cells(recorded: list[dict], name: str, run: Run) -> list[dict]:
    predicted = {one["step"]: one for one in recorded}
    cells = []
    for row in run.steps:
        if (one := predicted.get(row.step)) and is_timed(row):
            error = one["ms"] / median_ms(row) - 1
            cell = {"workload": name, "step": row.step, "predicted ms": f"{one['ms']:.1f}"}
            cell |= {"measured ms": f"{median_ms(row):.1f}", "error": error, "furthest off": _worst(one, row)}
            cells.append(cell)
    return cells


def _worst(predicted: dict, row: Row) -> str:
    """`copies and casts, 3.1 of 4.8 ms`: the category with the largest difference, predicted and profiled."""
    if not row.profile:
        return "-"
    profiled = category_ms(row)
    gaps = {name: abs(ms - profiled.get(name, 0.0)) for name, ms in predicted["category_ms"].items()}
    name = max(gaps, key=gaps.get)
    return f"{name}, {predicted['category_ms'][name]:.1f} of {profiled.get(name, 0.0):.1f} ms"
