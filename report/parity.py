"""Do the steps learn the same? Losses of several seeds: how many more training steps a row needs to the same
loss, with the interval, a verdict by a margin that was set beforehand, and loss against seconds.

The runs of a parity study are named `LABEL, seed N`. A label is a script's name, or the name of a variant of
it. A seed gives all rows the same weights and batches, so rows are compared seed by seed. A step in FP8 and
its variants are compared with the last step before it that is not in FP8, a variant NAME-fp8 with the variant
NAME, any other variant with the script that it changes, and any other row with the first one.
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
from report.cells import milliseconds, number
from report.charts import figure, plain_numbers, png
from report.derive import derive_study
from report.figures import MARK

FEWEST_SEEDS = 3  # of an interval
FEWEST_TESTS = 3  # of a straight line
BROKEN = ("failed", "oom", "timeout")  # statuses of a row that was trained, and did not end well
MARGIN = 0.01  # of the training steps: a smaller difference is taken for none. Set before the runs it judges.


class Difference(NamedTuple):
    """Of one label from another: mean over the seeds that both have, and half of its 95 % interval."""

    seeds: int
    mean: float | None = None  # None without a seed that both have
    half: float | None = None  # None for fewer than FEWEST_SEEDS, and where a seed is missing

    @property
    def verdict(self) -> str:
        """Of training steps: `equivalent` where the interval lies within the margin; `more` or `fewer` where
        it leaves out zero and its mean lies beyond the margin; otherwise `undecided`."""
        if self.half is None:
            return "undecided"
        if abs(self.mean) + self.half <= MARGIN:
            return "equivalent"
        if abs(self.mean) <= max(self.half, MARGIN):
            return "undecided"
        return "more" if self.mean > 0 else "fewer"


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


def first_row(rows: dict[int, Row]) -> Row:
    """A row of a label, for what all its seeds have in common."""
    return next(iter(rows.values()))


def compared_with(study: Study) -> dict[str, str | None]:
    """The label that each label is compared with, as the module's docstring tells; None for the first one."""
    every, compared, before = labels(study), {}, None
    first = next((label for label, rows in every.items() if label == first_row(rows).step), None)
    in_fp8 = {row.step for rows in every.values() for row in rows.values() if row.settings.fp8_recipe}
    for label, rows in every.items():
        row = first_row(rows)
        twin = label.removesuffix("-fp8")
        if twin != label and twin in every:
            compared[label] = twin
        elif row.step in in_fp8:
            compared[label] = before
        elif label != row.step:
            compared[label] = row.step if row.step in every else first
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


def pair_by_seed(
    study: Study, label: str, other: str | None, apart: Callable[[Row, Row], float | None]
) -> Difference:
    """What `apart` says of a label and another one, seed by seed. It has no interval, and so no verdict,
    where a seed failed, or cannot be compared: what is left would not be a fair sample."""
    own, others = labels(study)[label], labels(study).get(other, {})
    pairs = [apart(row, others[seed]) for seed, row in own.items() if seed in others]
    values = [value for value in pairs if value is not None]
    if len(values) < max(FEWEST_SEEDS, len(pairs) + count_failed_seeds(study, label, other)):
        return Difference(len(values), fmean(values) if values else None)
    return Difference(len(values), *interval(values))


def count_failed_seeds(study: Study, *of_labels: str | None) -> int:
    """How many runs of these labels broke, as where a loss is not finite."""
    broken = (
        name.partition(", seed ")[0] for name, run in study.runs.items() if run.rows[0].status in BROKEN
    )
    return sum(label in of_labels for label in broken)


def more_steps(row: Row, reference: Row) -> float | None:
    """How many more training steps a row takes to the same held-out loss than another, as a share, over the
    second half of the training.

    A line stands for the curve there: over the logarithm of the training step, the reference's loss falls by
    b nats per unit (least squares over its tests). So a row whose mean loss over these tests is d nats higher
    needs exp(d / b) times as many steps. None where the two were tested at other steps, or fewer than three
    times in that half."""
    last = row.heldout[-1][0] if row.heldout else 0
    tests, others = ([test for test in each.heldout if 2 * test[0] >= last] for each in (row, reference))
    steps = [step for step, _ in tests]
    if len(tests) < FEWEST_TESTS or steps != [step for step, _ in others]:
        return None
    losses, expected = ([loss for _, loss in each] for each in (tests, others))
    falls = -np.polyfit(np.log(steps), expected, 1)[0]
    distance = (fmean(losses) - fmean(expected)) / falls if falls > 0 else math.inf
    return math.exp(distance) - 1 if abs(distance) <= 1 else None  # a line so far reaches beyond its tests


def lag(row: Row, reference: Row, first: int, last: int) -> float | None:
    """The same, read off the reference's curve itself, as a mean over the tests from training step `first` to
    `last`: without a line, so also where the curve bends. None where the reference has not reached such a
    loss."""
    trained = [(step, loss) for step, loss in reference.heldout if step > 0]
    steps, losses = (np.array(column, float) for column in zip(*trained, strict=True))
    losses = np.minimum.accumulate(losses)
    tests = [(step, loss) for step, loss in row.heldout if first <= step <= last]
    if not tests or any(not losses[-1] <= loss <= losses[0] for _, loss in tests):
        return None
    reached = (math.exp(np.interp(-loss, -losses, np.log(steps))) for _, loss in tests)
    return fmean(step / other - 1 for (step, _), other in zip(tests, reached, strict=True))


def more_nats(row: Row, reference: Row) -> float | None:
    """By which the mean training loss of the last quarter of the steps is higher."""
    ends = [each.loss[-(len(each.loss) // 4) :] for each in (row, reference) if len(each.loss) >= 4]
    return fmean(ends[0]) - fmean(ends[1]) if len(ends) == 2 else None


def more_seconds(row: Row, reference: Row) -> float | None:
    """The same of the seconds of these training steps."""
    steps = more_steps(row, reference)
    if steps is None:
        return None
    return (1 + steps) * median(row.step_ms) / median(reference.step_ms) - 1


def difference_rows(study: Study) -> list[dict]:
    """A line a label: the time of a step, how many more training steps and seconds it needs to the same loss
    as the label that it is compared with, and how far its training loss lies above that one's."""
    rows, marks = [], marks_of(study)
    for label, other in compared_with(study).items():
        of_label = labels(study)[label].values()
        ms = milliseconds(fmean(median(each.step_ms) for each in of_label))
        row = {"row": label, "ms": ms + marks[label]}
        steps = pair_by_seed(study, label, other, more_steps)
        row |= {"compared with": other or "-", "seeds": str(steps.seeds) if other else "-"}
        row |= {"more steps": with_interval(steps, "+.1%"), "verdict": steps.verdict if other else "-"}
        row["more seconds"] = more(study, label, other, more_seconds)
        row["nats"] = with_interval(pair_by_seed(study, label, other, more_nats), "+.4f")
        rows.append(row)
    return rows


def marks_of(study: Study) -> dict[str, str]:
    """MARK for each label of which a row's time may be wrong."""
    marks: dict[str, str] = {}
    for name, figures in derive_study(study).items():
        label = name.partition(", seed ")[0]
        marks[label] = max([marks.get(label, ""), *(line.mark for line in figures.lines)])
    return marks


def on_two_cards(study: Study, label: str, other: str) -> bool:
    """Whether the rows of a seed ran on different cards, which differ in speed."""
    environments = {name: run.environment for name, run in study.runs.items()}
    cards = {name: each.gpu_uuid for name, each in environments.items() if each}
    seeds = set(labels(study)[label]) & set(labels(study)[other])
    return any(cards.get(f"{label}, seed {seed}") != cards.get(f"{other}, seed {seed}") for seed in seeds)


def more(study: Study, label: str, other: str | None, apart: Callable[[Row, Row], float | None]) -> str:
    """What a label needs more than another one, as a share with its interval; seconds with MARK where they
    may be wrong."""
    text = with_interval(pair_by_seed(study, label, other, apart), "+.1%")
    if apart is not more_seconds or other is None:
        return text
    marks = marks_of(study)
    return text + max(marks[label], marks[other], MARK if on_two_cards(study, label, other) else "")


def with_interval(of: Difference, digits: str) -> str:
    """`+1.8% ± 1.0%`: a mean, and half of its interval."""
    if of.half is None:
        return number(of.mean, digits)
    return f"{number(of.mean, digits)} ± {of.half:{digits.lstrip('+')}}"


def tables(study: Study) -> dict[str, list[dict]]:
    title = (
        "Training steps and seconds to the same held-out loss, more than the row that each is compared with, "
        f"with half of the 95 % interval; equivalent: within {MARGIN:.0%} of the steps. Nats: difference of "
        "the mean training loss of the last quarter"
    )
    pairs = [(label, other) for label, other in compared_with(study).items() if other]
    if any(on_two_cards(study, *pair) for pair in pairs):
        title += f". Where only the seconds have a {MARK}, the two rows ran on different cards for some seed"
    return {f"{title}:": difference_rows(study)}


# --- held-out loss against time -------------------------------------------------------------------


def curves(study: Study) -> dict[str, list[tuple[float, float]]]:
    """(seconds of steps, held-out loss) of every script tested on the way, means over the seeds that all
    have."""
    tested = {
        label: rows
        for label, rows in labels(study).items()
        if label == first_row(rows).step and all(len(row.heldout) > 1 for row in rows.values())
    }
    seeds, curves = sorted(set.intersection(*map(set, tested.values()))) if tested else [], {}
    for label, of_seeds in tested.items() if seeds else ():
        rows = [of_seeds[seed] for seed in seeds]
        step_s = fmean(median(row.step_ms) for row in rows) / 1e3
        curves[label] = []
        tests = [dict(row.heldout) for row in rows]
        for steps in (steps for steps in tests[0] if all(steps in of_seed for of_seed in tests)):
            curves[label].append((steps * step_s, fmean(of_seed[steps] for of_seed in tests)))
    return curves


def picture(study: Study) -> bytes | None:
    """Held-out loss against seconds, as a PNG; None for a study that measured it once."""
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
