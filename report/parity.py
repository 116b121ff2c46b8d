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
# Nats. 2.5 and 1.9 are about what tables of two and of three bytes reach on the default text, see
# anatomy/context.py.
TARGETS = (2.5, 2.2, 1.9, 1.5, 1.2)

Measure = Callable[[Row], float | None]
Until = Callable[[Row, float], float | None]  # steps or seconds until a held-out loss


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
    own, others = labels(study)[label], labels(study).get(other, {})
    pairs = [(measure(row), measure(others[seed])) for seed, row in own.items() if seed in others]
    apart = [loss - reference for loss, reference in pairs if None not in (loss, reference)]
    if len(apart) < FEWEST_SEEDS:
        return Difference(len(apart), fmean(apart) if apart else None)
    return Difference(len(apart), *interval(apart))


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
        row |= {"seeds": str(learnt.seeds) if other else "-", "difference": number(learnt.mean, "+.4f")}
        row |= {"95 % interval": interval_text(learnt), "verdict": learnt.verdict if other else "-"}
        heldout = difference(study, label, other, heldout_loss)
        row |= {"held-out: difference": number(heldout.mean, "+.4f")}
        row |= {"held-out: 95 % interval": interval_text(heldout)}
        rows.append(row)
    return rows


def interval_text(of: Difference, digits: str = ".4f") -> str:
    return "-" if of.half is None else f"{of.mean - of.half:+{digits}} to {of.mean + of.half:+{digits}}"


def tables(study: Study) -> dict[str, list[dict]]:
    title = f"Mean training loss of the last quarter of the steps, nats. Equivalent: within {MARGIN}:"
    return {title: difference_rows(study), "Seconds of training until a held-out loss:": seconds_rows(study)}


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


def seconds_until(row: Row, target: float) -> float | None:
    """The seconds of these steps; None where the target is not reached."""
    steps = steps_until(row, target)
    return None if steps is None else steps * median(row.step_ms) / 1e3


def until_cell(rows: list[Row], targets: list[float], until: Until, digits: str) -> str:
    """The mean over seeds, or how many of these do not reach their target."""
    reached = [until(row, target) for row, target in zip(rows, targets, strict=True)]
    missed = reached.count(None)
    if missed:
        return f"not reached: {missed} of {len(reached)}"
    return number(fmean(reached) if reached else None, digits)


def reached_targets(every: dict[str, dict[int, Row]]) -> list[float]:
    """The targets that at least one row reaches."""
    rows = [row for of_seeds in every.values() for row in of_seeds.values()]
    return [target for target in TARGETS if is_reached(rows, target)]


def is_reached(rows: list[Row], target: float) -> bool:
    return any(seconds_until(row, target) is not None for row in rows)


def until_rows(study: Study, until: Until, digits: str) -> list[dict]:
    """A line a script: seconds or training steps until each of the targets that a row reaches, and until the
    last loss of the first script with the same seed; numbers as the format `digits` writes them."""
    every = tested(study)
    targets = reached_targets(every)
    last = {seed: heldout_loss(row) for seed, row in next(iter(every.values()), {}).items()}
    rows = []
    for label, of_seeds in every.items():
        row = {"step": label, "seeds": str(len(of_seeds))}
        for target in targets:
            row[f"{target} nats"] = until_cell([*of_seeds.values()], [target] * len(of_seeds), until, digits)
        paired = [seed for seed in of_seeds if seed in last]
        of_paired, last_losses = [of_seeds[seed] for seed in paired], [last[seed] for seed in paired]
        row[f"last loss of {next(iter(every))}"] = until_cell(of_paired, last_losses, until, digits)
        rows.append(row)
    return rows


def seconds_rows(study: Study) -> list[dict]:
    """A line a script: seconds until each target, and its longest warm-up."""
    lines = until_rows(study, seconds_until, ",.1f")
    for line, of_seeds in zip(lines, tested(study).values(), strict=True):
        warmups = [row.warmup_s for row in of_seeds.values() if row.warmup_s is not None]
        line["warm-up s"] = number(max(warmups, default=None))
    return lines


def progress_rows(study: Study, label: str, other: str, parts: int = 5) -> list[dict]:
    """A line for each of `parts` equal parts of the training: how far the held-out loss of a label lies above
    another's after as many training steps, and after as many seconds of them, at the pace of the label's
    fastest seed. A dash stands where seeds were not tested so early, or have ended."""
    of_label = tested(study)[label].values()
    last = max(step for row in of_label for step, _ in row.heldout)
    step_s = min(median(row.step_ms) for row in of_label) / 1e3
    rows = []
    for step in np.linspace(last / parts, last, parts):
        by_steps = difference(study, label, other, functools.partial(loss_after_steps, steps=step))
        by_time = difference(
            study, label, other, functools.partial(loss_after_seconds, seconds=step * step_s)
        )
        row = {"training steps": f"{step:,.0f}", "difference": number(by_steps.mean, "+.3f")}
        row |= {"95 % interval": interval_text(by_steps, ".3f"), "seconds": number(step * step_s)}
        if by_time.seeds < by_steps.seeds:
            by_time = Difference(by_time.seeds)
        row |= {"after as many seconds": number(by_time.mean, "+.3f")}
        rows.append(row | {"its 95 % interval": interval_text(by_time, ".3f")})
    return rows


def loss_after_steps(row: Row, steps: float) -> float | None:
    """The held-out loss, on straight lines between the tests; None before the first and after the last."""
    tests, losses = np.array(row.heldout).T
    return float(np.interp(steps, tests, losses)) if tests[0] <= steps <= tests[-1] else None


def loss_after_seconds(row: Row, seconds: float) -> float | None:
    return loss_after_steps(row, seconds * 1e3 / median(row.step_ms))


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
