"""Do all steps learn the same? Losses of several seeds: differences with their intervals, and loss against
seconds.

The runs of a parity study are named `LABEL, seed N`. A label is a script's name, or the name of a variant of
it. A seed gives all rows the same weights and batches, so rows are compared seed by seed.
"""

import functools
import math
import re
from collections.abc import Callable
from statistics import fmean, median, stdev

import numpy as np
from matplotlib.figure import Figure

from common.record import Row, Study
from report.cells import number
from report.charts import figure, plain_numbers, png

FEWEST_SEEDS = 3  # of an interval
FIRST_STEPS = 50  # of the training losses: later, rows that round otherwise drift apart

Measure = Callable[[Row], float | None]


def heldout_loss(row: Row) -> float | None:
    """After the last step, on text that is never trained on."""
    return row.heldout[-1][1] if row.heldout else None


def first_losses(row: Row) -> float | None:
    """Mean of the first FIRST_STEPS training losses."""
    return fmean(row.loss[:FIRST_STEPS]) if len(row.loss) >= FIRST_STEPS else None


MEASURES: dict[str, Measure] = {"held-out": heldout_loss, "first losses": first_losses}


def labels(study: Study) -> dict[str, dict[int, Row]]:
    """The rows that ended well by label and seed."""
    rows: dict[str, dict[int, Row]] = {}
    for name, run in study.runs.items():
        parts = re.fullmatch(r"(.+), seed (\d+)", name)
        if parts and run.rows[0].status == "ok":
            rows.setdefault(parts[1], {})[int(parts[2])] = run.rows[0]
    return dict(sorted(rows.items()))


def losses(rows: dict[int, Row], measure: Measure) -> dict[int, float]:
    """A measure of every row that has it, by seed."""
    measured = {seed: measure(row) for seed, row in rows.items()}
    return {seed: loss for seed, loss in measured.items() if loss is not None}


def reference(study: Study) -> str:
    """What the others are compared with: the first label of those with the most seeds."""
    seeds = {label: len(losses(rows, heldout_loss)) for label, rows in labels(study).items()}
    return max(seeds, key=seeds.get, default="")


def script(rows: dict[int, Row]) -> str:
    """The script that the rows of a label train: of a variant, the one that it changes."""
    return next(iter(rows.values())).step


@functools.cache
def t_quantile(p: float, v: int) -> float:
    """The p-quantile of Student's t with v degrees of freedom, whose density at sqrt(v) tan(x) is as
    cos(x)^(v - 1)."""
    x = np.linspace(-np.pi / 2, np.pi / 2, 400_001)
    mass = np.cumsum(np.cos(x) ** (v - 1))
    return math.sqrt(v) * math.tan(np.interp(p, mass / mass[-1], x))


def interval(differences: list[float]) -> tuple[float, float, float]:
    """The mean of n paired differences d, half of its 95 % interval, and the smallest difference that such a
    study sees in 8 of 10 cases. Needs two of them.

    The half is t(0.975, n - 1) s / sqrt(n), with the standard deviation s of d and Student's t (section
    1.3.5.2 of NIST/SEMATECH's e-Handbook of Statistical Methods). The smallest is (t(0.975, n - 1) + t(0.8, n
    - 1)) s / sqrt(n): section 7.2.2.2, solved for the difference. Where none is seen, this could have been
    there.
    """
    n = len(differences)
    error, t = stdev(differences) / math.sqrt(n), t_quantile(0.975, n - 1)
    return fmean(differences), t * error, (t + t_quantile(0.8, n - 1)) * error


def difference(study: Study, label: str, against: str, measure: Measure) -> tuple[float | None, ...]:
    """How far a label lies above another one, as `interval` tells of the seeds that both have: all None for
    no seeds, and only the mean for fewer than three."""
    own, other = (losses(labels(study).get(name, {}), measure) for name in (label, against))
    apart = [loss - other[seed] for seed, loss in own.items() if seed in other]
    if len(apart) < FEWEST_SEEDS:
        return (fmean(apart) if apart else None), None, None
    return interval(apart)


def difference_rows(study: Study, shown: list[str], against: str | None = None) -> list[dict]:
    """A line a label: its losses, and its differences from `against`, or without one from the script that it
    changes. An interval in bold leaves out zero."""
    every, rows = labels(study), []
    seeds = sorted({seed for of_label in every.values() for seed in of_label})
    for label in shown:
        own, other = losses(every[label], heldout_loss), against or script(every[label])
        row = {"row": label} if against else {"row": label, "changes": other}
        row |= {f"seed {seed}": number(own.get(seed), ".4f") for seed in seeds}
        for name, measure in MEASURES.items():
            cells = _difference_cells(study, label, other, name, measure)
            row |= dict.fromkeys(cells, "") if label == other else cells
        rows.append(row)
    return rows


def _difference_cells(study: Study, label: str, other: str, name: str, measure: Measure) -> dict[str, str]:
    mean, reach, smallest = difference(study, label, other, measure)
    between = "-"
    if reach is not None:
        between = f"{mean - reach:+.4f} to {mean + reach:+.4f}"
        between = f"**{between}**" if abs(mean) > reach else between
    cells = {f"{name}: difference": number(mean, "+.4f"), f"{name}: 95 % interval": between}
    return cells | ({"would be seen": number(smallest, ".3f")} if measure is heldout_loss else {})


def tables(study: Study) -> dict[str, list[dict]]:
    first, every = reference(study), labels(study)
    plain = [label for label, rows in every.items() if label == script(rows)]
    variants = [label for label in every if label not in plain]
    return {
        f"Differences from {first}, nats:": difference_rows(study, plain, first),
        "Variants, and their differences from the script that they change:": difference_rows(study, variants),
        "Seconds of training steps until the held-out loss is reached:": seconds_rows(study),
    }


# --- held-out loss against time -------------------------------------------------------------------


def tested(study: Study) -> dict[str, dict[int, Row]]:
    """The rows of every script that was tested on the way, of the seeds that all of these have."""
    tested = {}
    for label, rows in labels(study).items():
        if label == script(rows) and all(len(row.heldout) > 1 for row in rows.values()):
            tested[label] = rows
    seeds = set.intersection(*map(set, tested.values())) if tested else set()
    if not seeds:
        return {}
    for label, rows in tested.items():
        tested[label] = {seed: rows[seed] for seed in sorted(seeds)}
    return tested


def curves(study: Study) -> dict[str, list[tuple[float, float]]]:
    """(seconds of steps, held-out loss) of every script tested on the way, means over the seeds that all
    have."""
    curves = {}
    for label, rows in tested(study).items():
        step_s = fmean(median(row.step_ms) for row in rows.values()) / 1e3
        curves[label] = []
        for tests in zip(*(row.heldout for row in rows.values()), strict=False):  # one of each seed
            (steps, _), losses = tests[0], [loss for _, loss in tests]
            curves[label].append((steps * step_s, fmean(losses)))
    return curves


def seconds_rows(study: Study) -> list[dict]:
    """A line a script: its longest warm-up, and the seconds in which its held-out loss falls to a target, on
    straight lines between two tests. All reach the targets, which lie between the second test and the last
    one."""
    every, rows_of = curves(study), tested(study)
    first = max((points[1][1] for points in every.values()), default=0.0)
    last = max((points[-1][1] for points in every.values()), default=0.0)
    targets = [math.ceil(100 * (last + part * (first - last))) / 100 for part in (1 / 2, 1 / 4, 0)]
    rows = []
    for label, points in every.items():
        seconds, losses = np.array(points[::-1]).T
        reached = np.interp(targets, np.maximum.accumulate(losses), seconds)
        row = {"step": label}
        row |= {f"{target:.2f} nats": f"{at:,.1f}" for target, at in zip(targets, reached, strict=True)}
        warmup_s = max(row.warmup_s for row in rows_of[label].values())
        rows.append(row | {"warm-up s": number(warmup_s)})
    return rows


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
