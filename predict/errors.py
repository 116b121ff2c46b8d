"""How far predictions lie from recorded times. docs/predict.md shows the table; nothing here imports
torch."""

from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from common.record import Run


class Predicted(NamedTuple):
    """A step of a record: milliseconds, as measured and as predicted."""

    step: str
    measured: float
    predicted: float


def predicted_steps(run: Run) -> list[Predicted | None]:
    """The steps of a run in order; None stands for one without a time or a prediction."""
    steps = []
    for row in run.rows:
        is_known = row.status == "ok" and row.step_ms and row.predicted_ms
        medians = [median(each.step_ms) for each in row.passes or [row] if is_known]
        steps.append(Predicted(row.step, median(medians), row.predicted_ms) if is_known else None)
    return steps


def gains(run: Run) -> Iterable[tuple[str, float, float]]:
    """The gain of every predicted step over the predicted step before it, as measured and as predicted."""
    for before, step in pairwise(predicted_steps(run)):
        if before and step:
            yield step.step, before.measured / step.measured, before.predicted / step.predicted


def constant_guess(runs: Iterable[Run]) -> dict[str, float]:
    """For each step the median of its measured gains: what one would guess without knowing the shape. None
    of a step with one gain, whose guess would be the answer."""
    by_step: dict[str, list[float]] = {}
    for run in runs:
        for name, measured, _ in gains(run):
            by_step.setdefault(name, []).append(measured)
    return {name: median(every) for name, every in by_step.items() if len(every) > 1}


def error_cells(runs: list[Run], guess: dict[str, float]) -> dict[str, str]:
    """How far predicted times, and predicted gains over the step before, lie from what was measured, and how
    far a constant gain for each step, `guess`, lies from it; empty without predictions."""
    times = [step.predicted / step.measured - 1 for run in runs for step in predicted_steps(run) if step]
    every = [gain for run in runs for gain in gains(run)]
    if not every:
        return {}
    of_gains = [predicted / measured - 1 for _, measured, predicted in every]
    guessed = [guess[name] / measured - 1 for name, measured, _ in every if name in guess]
    predictors = {run.roofs.predictor or "-" for run in runs if run.roofs} or {"-"}
    cells = {"predicted times": str(len(times))}
    for name, errors in (("error", times), ("error of gains", of_gains), ("error of guessed gains", guessed)):
        sizes = list(map(abs, errors))
        cells[f"median {name}"] = f"{median(sizes):.0%}".replace("%", " %") if sizes else "-"
        cells[f"largest {name}"] = f"{max(sizes):.0%}".replace("%", " %") if sizes else "-"
    return cells | {"predictor": ", ".join(sorted(predictors))}
