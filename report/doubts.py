"""How far a run is to be trusted: doubts in two levels, the verdict on a busy machine, and what both do to figures.

A speedup is shown only through `compared`, and a figure with a serious doubt carries `mark`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import mul
from statistics import fmean

from common.record import Row, Run
from report import analysis
from report.analysis import LARGEST_PROFILE_OFFSET, is_timed, kernels_ms, median_ms, profile_offset, spread
from report.load import DIFFER, LEFT_OUT, environment_of

SERIOUS, NOTICE = "serious", "notice"
# Largest over smallest time of the reference work beside all rows: above what the ladders in docs/method.md showed.
BUSY = {"cpu": {"product": 1.6, "copy": 1.8}, "cuda": {"product": 1.06, "copy": 1.06}}
FEWEST_STEPS = {"cuda": 30, "cpu": 10}
NOTICED_SPREAD, WIDEST_SPREAD = 0.03, 0.20
NOTICED_DRIFT, LARGEST_DRIFT = 0.01, 0.05
MOST_OF_CEILING = 1.02  # beyond it the ceiling is wrong, not the products fast
MARK, LEGEND = "?", "? : see the serious doubts"
TIME, ROOF = "time", "roof"  # what a doubt is about


@dataclass(frozen=True)
class Doubt:
    level: str  # serious: a figure may be wrong; notice: a rule of a fair benchmark was broken
    text: str
    rows: tuple[str, ...] = ()  # whose figures it is about
    about: str = TIME


@dataclass(frozen=True)
class Speedup:
    """How many times faster a row is than another."""

    ratio: float
    extent: tuple[float, float] | None  # over the passes
    mark: str

    def cell(self, digits: int = 2, unit: str = "x") -> str:
        """`1.57x (1.55-1.58)`, without a range that has one figure alone."""
        ends = dict.fromkeys(f"{end:.{digits}f}" for end in self.extent or ())
        extent = f" ({'-'.join(ends)})" if len(ends) > 1 else ""
        return f"{self.ratio:.{digits}f}{unit}{self.mark}{extent}"

    def words(self) -> str:
        """`2.00x faster`, or `1.25x slower` of a ratio below 1."""
        slower = self.ratio < 1
        return f"{1 / self.ratio if slower else self.ratio:.2f}x{self.mark} {'slower' if slower else 'faster'}"


def compared(row: Row, reference: Row | None, *runs: Run) -> Speedup | None:
    """The speedup of a row over another; None where one has no time, and where a run they are of was busy."""
    if reference is None or not (is_timed(row) and is_timed(reference)) or any(map(busy, runs)):
        return None
    marks = max(mark(run, row, reference) for run in runs)
    return Speedup(analysis.speedup(row, reference), analysis.speedup_range(row, reference), marks)


def mark(run: Run, *rows: Row, about: str = TIME) -> str:
    """`?` where there is a serious doubt about one of the rows that are this run's, otherwise nothing."""
    doubted = {name for doubt in doubts(run) if (doubt.level, doubt.about) == (SERIOUS, about) for name in doubt.rows}
    own = {row.step for row in rows if any(row is one for one in [*run.steps, *run.peers])}
    return MARK if doubted & own else ""


def busy(run: Run) -> str | None:
    """The verdict on a machine that did other work meanwhile, in one line; None where nothing speaks for that."""
    for kind, most in BUSY.get(environment_of(run).device_type, {}).items():
        (least, least_said, beside), (longest, longest_said, beside_longest) = reference_extremes(run, kind)
        if longest > most * least:
            work = "matrix product" if kind == "product" else "copy"
            other = "it in another pass" if beside == beside_longest else beside_longest
            took = f"the same {work} took {least_said} beside {beside} and {longest_said} beside {other}"
            return f"machine busy: rows are not comparable ({took})"
    return None


def reference_extremes(run: Run, kind: str) -> tuple[tuple[float, str, str], tuple[float, str, str]]:
    """The least and the largest reference time of a kind in a run: what should be equal, in words, beside which row."""
    rows, device = filter(is_timed, [*run.steps, *run.peers]), environment_of(run).device_type
    measured = [(*time, row.step) for row in rows for time in _reference_times(row, kind, device)] or [(0.0, "", "")]
    return min(measured), max(measured)


def _reference_times(row: Row, kind: str, device: str) -> Iterator[tuple[float, str]]:
    """What should be equal beside all rows, and the time in words: of a product on a GPU cycles, otherwise ms.

    Each pass of a row gives one: the mean of before and after, because a blip may hit one of them.
    """
    for reference in filter(None, (one.reference_ms for one in row.repetitions or [row])):
        times = reference.product_ms if kind == "product" else reference.copy_ms
        ms = fmean(times)
        said = f"{ms:.1f} ms" if ms >= 10 else f"{ms:.3g} ms"
        if kind == "copy" or device != "cuda":
            yield ms, said
        elif reference.clock_mhz:
            yield fmean(map(mul, times, reference.clock_mhz)), f"{said} at {fmean(reference.clock_mhz):.0f} MHz"


def furthest_around_a_row(run: Run) -> float:
    """The largest over the smallest time of the copies before and after one row, of the row where they differ most."""
    rows = [one for row in filter(is_timed, [*run.steps, *run.peers]) for one in (row.repetitions or [row])]
    return max(max(one.reference_ms.copy_ms) / min(one.reference_ms.copy_ms) for one in rows if one.reference_ms)


def is_unsteady(row: Row) -> bool:
    """Whether its times spread so far that nothing can be said of the row."""
    return spread(row) > WIDEST_SPREAD


def describe_profile_offset(row: Row) -> str | None:
    """How far the profiled step is off the timed one, and which of its times to trust; None where it is not off."""
    offset = profile_offset(row)
    if abs(offset) <= LARGEST_PROFILE_OFFSET:
        return None
    trust = "Its kernels may have taken another time too, so only their shares hold"
    if kernels_fit(row):
        trust = "Its kernels alone fit into the timed step, so their times hold, and its gaps do not"
    longer = f"{abs(offset):.0%} {'longer' if offset > 0 else 'shorter'}"
    return f"The profiled step was {longer} than the timed one. {trust}."


def kernels_fit(row: Row) -> bool:
    """Whether the times of a row's kernels are to be trusted: what the profile adds to the step is gaps alone."""
    if row.profile is None or abs(profile_offset(row)) <= LARGEST_PROFILE_OFFSET:
        return True
    within = kernels_ms(row.profile) <= (1 + LARGEST_PROFILE_OFFSET) * median_ms(row)
    return bool(profile_offset(row) > 0 and row.profile.gpu_idle_ms and within)


def doubts(run: Run) -> list[Doubt]:
    """What speaks against a run, serious doubts first, each once. What the merge left out is among them."""
    found = dict.fromkeys([*_doubts_of_run(run), *_doubts_of_rows(run)])
    return sorted(found, key=lambda doubt: doubt.level != SERIOUS)


def _doubts_of_run(run: Run) -> Iterator[Doubt]:
    environment, every = environment_of(run), tuple(row.step for row in [*run.steps, *run.peers])
    if verdict := busy(run):
        yield Doubt(SERIOUS, verdict, every)
    for problem in run.problems:
        differ, text = problem.startswith(DIFFER), _without_serials(problem)
        yield Doubt(SERIOUS if differ or problem.startswith(LEFT_OUT) else NOTICE, text, every if differ else ())
    if environment.dirty:
        yield Doubt(NOTICE, "the working copy had uncommitted changes: the commit does not hold the code that ran")
    if run.environment and environment.commit is None:
        yield Doubt(NOTICE, f"the commit is unknown: {environment.commit_reason or 'not recorded'}")
    if environment.nvml_reason:
        yield Doubt(NOTICE, f"clocks and power are unknown: {environment.nvml_reason}")
    for before, after in analysis.consecutive(run.steps):
        if before and is_timed(after) and (times := analysis.unattributed(before, after)):
            names = (before.step, after.step)
            took = "AdamW, the same code in {} and {}, took {:.1f} and {:.1f} ms".format(*names, *times)
            yield Doubt(NOTICE, f"{took}: what else changed between these two rows is not attributed", names)


def _without_serials(problem: str) -> str:
    """`rows ran on different GPUs: 0_a, 1_b on one; 2_c on another` of rows that differ in gpu_uuid."""
    of, _, listed = problem.partition(": ")
    if of != f"{DIFFER} gpu_uuid":
        return problem
    rows = [group.partition(" in ")[2] for group in listed.split("; ")]
    places = ["one", *["another"] * (len(rows) - 1)]
    return f"rows ran on different GPUs: {'; '.join(map('{} on {}'.format, rows, places))}"


def _doubts_of_rows(run: Run) -> Iterator[Doubt]:
    """Rows with the same doubt share one line."""
    rows_of: dict[Doubt, list[str]] = {}
    for row in filter(is_timed, [*run.steps, *run.peers]):
        for doubt in _doubts_of_row(row, run):
            rows_of.setdefault(doubt, []).append(row.step)
    for doubt, names in rows_of.items():
        yield replace(doubt, text=f"{', '.join(names)}: {doubt.text}", rows=tuple(names))


def _doubts_of_row(row: Row, run: Run) -> Iterator[Doubt]:
    """The doubts of a row, without its name."""
    device = environment_of(run).device_type
    least = FEWEST_STEPS.get(device, FEWEST_STEPS["cuda"])
    if row.reference_ms is None:
        yield Doubt(NOTICE, "no reference work was timed beside it: whether the machine was busy is not known")
    timed = sum(len(timing.step_ms) for timing in analysis.timings(row))
    if timed < least:
        yield Doubt(NOTICE, f"{timed} timed steps, fewer than {least}")
    if spread(row) > NOTICED_SPREAD:
        text = f"the middle half of its times spreads over {spread(row):.1%} of the median"
        yield Doubt(SERIOUS if is_unsteady(row) else NOTICE, text)
    drift = analysis.drift(row)
    if device != "cpu" and abs(drift) > NOTICED_DRIFT:  # a CPU has no clock that settles; its spread says the rest
        more = f"{abs(drift):.1%} {'more' if drift > 0 else 'less'}"
        text = f"the second half of its timed steps took {more} than the first"
        yield Doubt(SERIOUS if abs(drift) > LARGEST_DRIFT else NOTICE, text)
    if throttled := ", ".join(analysis.throttle_reasons(row)):
        yield Doubt(NOTICE, f"the driver reported clocks held down by: {throttled}")
    if offset := describe_profile_offset(row):
        yield Doubt(NOTICE, offset)
    if row.gpu_state and row.gpu_state.while_running is False:
        yield Doubt(NOTICE, "the GPU was done before its clocks had been read: they may not be those of its steps")
    if (share := analysis.products_share(row, run) or 0) > MOST_OF_CEILING:
        text = f"its matrix products reach {100 * share:.0f} % of their ceiling: the ceiling is wrong"
        yield Doubt(SERIOUS, text, about=ROOF)
