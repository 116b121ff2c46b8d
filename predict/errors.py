"""How far predictions, and the gains of the nearest recorded shape, lie from recorded times. docs/predict.md
shows the table."""

import math
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from common.model import GPTConfig
from common.record import Roofs, Row, Run, Workload
from predict.__main__ import predict
from predict.step_kernels import STEPS


class Predicted(NamedTuple):
    """A step of a record: milliseconds, as measured and as predicted."""

    step: str
    measured: float
    predicted: float


def measured_ms(row: Row) -> float:
    return median(median(each.step_ms) for each in row.passes or [row])


def predicted_steps(run: Run, roofs: Roofs) -> list[Predicted | None]:
    """The steps of a run in order; None stands for one without a time or a prediction."""
    work, steps = run.workload, []
    for row in run.rows:
        steps.append(None)
        if row.status == "ok" and row.step_ms and row.step in STEPS:
            shape = GPTConfig(**{name: getattr(work, name) for name in GPTConfig.__dataclass_fields__})
            predicted = predict(row.step, shape, work.batch_size, roofs).ms
            steps[-1] = Predicted(row.step, measured_ms(row), predicted)
    return steps


def gains(run: Run, roofs: Roofs) -> Iterable[tuple[str, float, float]]:
    """The gain of every step over the step before it, as measured and as predicted."""
    for before, step in pairwise(predicted_steps(run, roofs)):
        if before and step:
            yield step.step, before.measured / step.measured, before.predicted / step.predicted


def nearest(work: Workload, others: list[Run]) -> Run:
    """The run whose width, depth, length and tokens differ by the least factors in all."""

    def distance(run: Run) -> float:
        names = ("n_embd", "n_layer", "seq_len", "tokens_per_step")
        return sum(abs(math.log(getattr(run.workload, name) / getattr(work, name))) for name in names)

    return min(others, key=distance)


def error_cells(runs: list[Run], roofs: Roofs, others: list[Run]) -> dict[str, str]:
    """How far predicted times, and predicted gains over the step before, lie from what was measured; and how
    far the gains of the nearest shape of `others` do."""
    steps = [step for run in runs for step in predicted_steps(run, roofs) if step]
    times = [step.predicted / step.measured - 1 for step in steps]
    of_gains, of_nearest = [], []
    for run in runs:
        near = gains(nearest(run.workload, others), roofs) if others else ()
        known = {name: measured for name, measured, _ in near}
        for name, measured, predicted in gains(run, roofs):
            of_gains.append(predicted / measured - 1)
            of_nearest += [known[name] / measured - 1] if name in known else []
    cells = {"predicted times": str(len(times))}
    kinds = {"error": times, "error of gains": of_gains, "error of the nearest shape's gains": of_nearest}
    for name, errors in kinds.items():
        sizes = list(map(abs, errors))
        cells[f"median {name}"] = f"{median(sizes):.0%}".replace("%", " %") if sizes else "-"
        cells[f"largest {name}"] = f"{max(sizes):.0%}".replace("%", " %") if sizes else "-"
    return cells
