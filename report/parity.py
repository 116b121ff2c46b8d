"""Do the steps learn the same? Losses of several seeds: differences with their intervals, a verdict by a
margin that was set beforehand, and loss against seconds.

The runs of a parity study are named `LABEL, seed N`. A label is a script's name, or the name of a variant of
it. A seed gives all rows the same weights and batches, so rows are compared seed by seed. A row in FP8 is
compared with the last step before it that is not in FP8, a variant with the script that it changes, and any
other row with the first one.
"""

import functools
import math
import re
from collections.abc import Callable
from statistics import fmean, median, stdev
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from common.record import Row, Study
from report.cells import number
from report.charts import figure, plain_numbers, png

FEWEST_SEEDS = 3  # of an interval
MARGIN = 0.01  # nats: a smaller difference is taken for none. Set before the runs that it judges.
Measure = Callable[[Row], float | None]


def heldout_loss(row: Row) -> float | None:
    """After the last step, on text that is never trained on."""
    return row.heldout[-1][1] if row.heldout else None


def last_quarter(row: Row) -> float | None:
    """Mean training loss of the last quarter of the steps: the measure that the verdict goes by."""
    steps = len(row.loss) // 4
    return fmean(row.loss[-steps:]) if steps else None


class Difference(NamedTuple):
    """Of one label from another: mean over the seeds that both have, and half of its 95 % interval."""

    seeds: int
    mean: float | None = None  # None without a seed that both have
    half: float | None = None  # None of fewer than FEWEST_SEEDS

    @property
    def verdict(self) -> str:
        """`equivalent` where the interval lies within the margin; `different` where it leaves out zero and
        its mean lies beyond the margin; otherwise `undecided`."""
        if self.half is None:
            return "undecided"
        if abs(self.mean) + self.half <= MARGIN:
            return "equivalent"
        return "different" if abs(self.mean) > max(self.half, MARGIN) else "undecided"


def labels(study: Study) -> dict[str, dict[int, Row]]:
    """The rows that ended well by label and seed."""
    rows: dict[str, dict[int, Row]] = {}
    for name, run in study.runs.items():
        parts = re.fullmatch(r"(.+), seed (\d+)", name)
        if parts and run.rows[0].status == "ok":
            rows.setdefault(parts[1], {})[int(parts[2])] = run.rows[0]
    return dict(sorted(rows.items(), key=lambda item: _place(item[0])))


def _place(label: str) -> tuple[float, str]:
    """Steps by their number, then peers and variants."""
    number = label.partition("_")[0]
    return (int(number) if number.isdecimal() else math.inf), label


def shared_seeds(of_labels: dict[str, dict[int, Row]]) -> list[int]:
    """The seeds that all of these labels have."""
    return sorted(set.intersection(*map(set, of_labels.values()))) if of_labels else []


def first_row(rows: dict[int, Row]) -> Row:
    """A row of a label, for what all its seeds have in common."""
    return next(iter(rows.values()))


def compared_with(study: Study) -> dict[str, str | None]:
    """The label that each label is compared with, as the module's docstring tells; None of the first one."""
    every, compared, before = labels(study), {}, None
    first = next((label for label, rows in every.items() if label == first_row(rows).step), None)
    for label, rows in every.items():
        row = first_row(rows)
        if label != row.step:
            compared[label] = row.step
        elif row.settings.fp8_recipe:
            compared[label] = before
        else:
            compared[label] = first
            before = label if label[:1].isdecimal() else before  # peers may begin with other weights
    compared.pop(first, None)
    return {label: compared.get(label) for label in every}


@functools.cache
def t_quantile(p: float, v: int) -> float:
    """The p-quantile of Student's t with v degrees of freedom, whose density at sqrt(v) tan(x) is as
    cos(x)^(v - 1)."""
    x = np.linspace(-np.pi / 2, np.pi / 2, 400_001)
    mass = np.cumsum(np.cos(x) ** (v - 1))
    return math.sqrt(v) * math.tan(np.interp(p, mass / mass[-1], x))


def interval(differences: list[float]) -> tuple[float, float]:
    """The mean of n paired differences d, and half of its 95 % interval. Needs two of them.

    The half is t(0.975, n - 1) s / sqrt(n), with the standard deviation s of d and Student's t (section
    1.3.5.2 of NIST/SEMATECH's e-Handbook of Statistical Methods).
    """
    n = len(differences)
    return fmean(differences), t_quantile(0.975, n - 1) * stdev(differences) / math.sqrt(n)


def difference(study: Study, label: str, other: str | None, measure: Measure) -> Difference:
    """How far a label lies above another one."""

    def apart(row: Row, reference: Row) -> float | None:
        losses = measure(row), measure(reference)
        return None if None in losses else losses[0] - losses[1]

    return paired(study, label, other, apart)


def paired(
    study: Study, label: str, other: str | None, apart: Callable[[Row, Row], float | None]
) -> Difference:
    """What `apart` says of a label and another one, seed by seed."""
    own, others = labels(study)[label], labels(study).get(other, {})
    pairs = [apart(row, others[seed]) for seed, row in own.items() if seed in others]
    values = [value for value in pairs if value is not None]
    if len(values) < FEWEST_SEEDS:
        return Difference(len(values), fmean(values) if values else None)
    return Difference(len(values), *interval(values))


def more_steps(row: Row, reference: Row) -> float | None:
    """How many more training steps a row takes to a held-out loss than another, as a share: to the loss at
    which the worse of the two ends. It says what nats are worth, however steep the curve is."""
    if not (len(row.heldout) > 1 and len(reference.heldout) > 1):
        return None
    target = max(heldout_loss(row), heldout_loss(reference))
    steps, others = steps_until(row, target), steps_until(reference, target)
    return steps / others - 1 if steps and others else None


def more_seconds(row: Row, reference: Row) -> float | None:
    """The same of the seconds of these steps."""
    steps = more_steps(row, reference)
    if steps is None:
        return None
    return (1 + steps) * median(row.step_ms) / median(reference.step_ms) - 1


def difference_rows(study: Study) -> list[dict]:
    """A line a label: its mean loss over the seeds that all labels have, and how far its losses lie above
    those that they are compared with."""
    rows, shared = [], shared_seeds(labels(study))
    for label, other in compared_with(study).items():
        of_label = labels(study)[label]
        losses = [last_quarter(of_label[seed]) for seed in shared]
        row = {"row": label, "loss": number(fmean(losses) if losses and None not in losses else None, ".3f")}
        row["less that of"] = other or "-"
        learnt = difference(study, label, other, last_quarter)
        row |= {"seeds": str(learnt.seeds) if other else "-", "difference": written(learnt, "+.4f")}
        row["verdict"] = learnt.verdict if other else "-"
        for name, apart in (("more steps", more_steps), ("more seconds", more_seconds)):
            row[name] = written(paired(study, label, other, apart), "+.1%")
        rows.append(row)
    return rows


def written(of: Difference, digits: str) -> str:
    """`+1.8% ± 1.0%`: a mean, and half of its interval."""
    if of.half is None:
        return number(of.mean, digits)
    return f"{number(of.mean, digits)} ± {of.half:{digits.lstrip('+')}}"


def tables(study: Study) -> dict[str, list[dict]]:
    title = (
        "Mean training loss of the last quarter of the steps, nats, and the difference with half of its 95 % "
        f"interval; equivalent: within {MARGIN}. More steps and seconds: to the same held-out loss:"
    )
    return {title: difference_rows(study)}


# --- held-out loss against time -------------------------------------------------------------------


def tested(study: Study) -> dict[str, dict[int, Row]]:
    """The rows of every script whose held-out loss was measured on the way."""
    tested = {}
    for label, rows in labels(study).items():
        if label == first_row(rows).step and all(len(row.heldout) > 1 for row in rows.values()):
            tested[label] = rows
    return tested


def steps_until(row: Row, target: float) -> float | None:
    """Training steps until the held-out loss has fallen to a target, on straight lines between its tests;
    None where it has not."""
    steps, losses = np.array(row.heldout).T
    reached = np.flatnonzero(losses <= target)
    if not len(reached):
        return None
    end = reached[0]
    begin = max(0, end - 1)
    return float(np.interp(-target, -losses[[begin, end]], steps[[begin, end]]))


def curves(study: Study) -> dict[str, list[tuple[float, float]]]:
    """(seconds of steps, held-out loss) of every script tested on the way, means over the seeds that all
    have."""
    curves, every = {}, tested(study)
    seeds = shared_seeds(every)
    for label, of_seeds in every.items() if seeds else ():
        rows = [of_seeds[seed] for seed in seeds]
        step_s = fmean(median(row.step_ms) for row in rows) / 1e3
        curves[label] = []
        for tests in zip(*(row.heldout for row in rows), strict=False):  # one of each seed
            (steps, _), losses = tests[0], [loss for _, loss in tests]
            curves[label].append((steps * step_s, fmean(losses)))
    return curves


def picture(study: Study) -> bytes | None:
    """Held-out loss against seconds, as a PNG; None of a study that measured it once."""
    return png(curves_figure(study)) if curves(study) else None


def curves_figure(study: Study) -> Figure:
    """Held-out loss against seconds, from the second test on."""
    with figure(3.4) as drawn:
        axes = drawn.subplots()
        for label, points in curves(study).items():
            axes.plot(*zip(*points[1:], strict=True), label=label, marker=".")
        axes.set(xlabel="seconds of training steps", ylabel="held-out loss, nats", xscale="log")
        plain_numbers(axes.xaxis, (1, 2, 5))
        axes.legend(fontsize=8, handlelength=4)  # long enough to show how a line is dashed
    return drawn
