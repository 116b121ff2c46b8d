"""What the records of a run say: figures, changes between two rows, sentences and doubts. One function a figure.

Everything is computed from one run (common/record.py). Rows without a time stay, with their reason.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from common.record import CATEGORIES, CategoryTime, Environment, Profile, Roofs, Row, Run, describe_shape
from report.load import environment_of

LOSS_WINDOW = 20
FEWEST_STEPS = {"cuda": 30, "cpu": 10}
WIDEST_SPREAD = 0.03
LARGEST_PROFILE_OFFSET = 0.03
LONGEST_SOURCE = 400  # lines of a script that are worth comparing
MOST_OF_ROOF = 1.05  # beyond it the roof is wrong, not the row fast
PLAIN_ROW = "2_sdpa"  # where most readers' own training stands: mixed precision and fused attention
GAPS = "gaps"
GIB = 2**30
# Bits of NVML's clock event reasons that hold clocks down; the idle and application-clock bits are no warning.
THROTTLE_REASONS = {
    0x04: "power limit", 0x08: "hardware slowdown", 0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown", 0x80: "power brake",
}  # fmt: skip


# --- one row --------------------------------------------------------------------------------------


def is_timed(row: Row) -> bool:
    return row.status == "ok"


def median_ms(row: Row) -> float:
    return row.timing.median_ms


def quartiles_ms(row: Row) -> tuple[float, float]:
    """25th and 75th percentile; where the record has none, the range of its times."""
    times = row.timing.step_ms or [row.timing.median_ms]
    return row.timing.p25_ms or min(times), row.timing.p75_ms or max(times)


def spread(row: Row) -> float:
    """Distance of the quartiles, as a share of the median."""
    p25, p75 = quartiles_ms(row)
    return (p75 - p25) / median_ms(row)


def mean_loss(row: Row) -> float:
    """Mean of the last LOSS_WINDOW training steps, in nats."""
    window = row.loss[-LOSS_WINDOW:]
    return sum(window) / len(window)


def loss_difference(row: Row, reference: Row) -> float | None:
    """Mean loss of a row against that of another, as a share; None where that one is 0."""
    against = mean_loss(reference)
    return mean_loss(row) / against - 1 if against else None


def peak_gib(row: Row) -> float | None:
    """CUDA allocator's peak; on a CPU the peak of the whole process."""
    peak = row.peak_allocated_bytes or row.peak_rss_bytes
    return peak / GIB if peak else None


def speedup(row: Row, reference: Row) -> float:
    """How many times faster a row is than another."""
    return median_ms(reference) / median_ms(row)


def reference_row(rows: list[Row]) -> Row | None:
    """The row that speedups are against: the first that has a time."""
    return next(filter(is_timed, rows), None)


def plain_row(rows: list[Row]) -> Row | None:
    """The row that stands for most readers' own training, where it has a time."""
    return next((row for row in rows if row.step == PLAIN_ROW and is_timed(row)), None)


def reason_untimed(row: Row) -> str:
    """`skipped: reason` of a row without a time."""
    return f"{row.status}: {row.reason or 'no reason given'}"


def profile_offset(row: Row) -> float:
    """How much longer the profiled step is than the timed median, as a share of it; 0 without a profile."""
    return row.profile.step_ms / median_ms(row) - 1 if row.profile else 0.0


def gaps_ms(row: Row) -> float | None:
    """Milliseconds of a step in which the GPU idles; None where only a GPU could tell.

    Where the profiler made the step longer than it is when timed, some gaps are the profiler's own. What is left of
    the timed median after the kernels then stands for them.
    """
    profile = row.profile
    if profile is None or profile.gpu_idle_ms is None:
        return None
    if profile_offset(row) > LARGEST_PROFILE_OFFSET:
        return max(0.0, min(profile.gpu_idle_ms, median_ms(row) - _kernels_ms(profile)))
    return profile.gpu_idle_ms


def _kernels_ms(profile: Profile) -> float:
    return sum(time.ms for time in profile.categories.values())


def category_ms(row: Row) -> dict[str, float] | None:
    """Milliseconds of a step by kernel category, gaps included; None without a profile."""
    return {name: time.ms for name, time in _categories(row).items()} if row.profile else None


def _categories(row: Row) -> dict[str, CategoryTime]:
    times = {name: row.profile.categories.get(name, CategoryTime()) for name in CATEGORIES}
    return times | {GAPS: CategoryTime(gaps_ms(row) or 0.0, None)}


def bound(row: Row) -> tuple[str, float] | None:
    """What binds a row, and the share of the step behind it; None where that is not known."""
    by = row.profile and row.profile.bound_by
    return (by, (row.profile.shares or {}).get(by, 0.0)) if by else None


def roof(row: Row, roofs: Roofs | None) -> tuple[str, float] | None:
    """The precision whose roof a row is held against, and the roof's FLOP/s; None where it was not measured."""
    if roofs is None:
        return None
    if row.settings.fp8_recipe:
        precision = "fp8"
    elif row.settings.amp_dtype in ("bfloat16", "float16"):
        precision = "bf16"
    else:
        exact = row.settings.float32_matmul_precision == "highest" or roofs.tf32_flops_per_s is None
        precision = "fp32" if exact else "tf32"
    rate = getattr(roofs, f"{precision}_flops_per_s")
    return (precision, rate) if rate else None


def share_of_roof(row: Row, roofs: Roofs | None) -> tuple[str, float] | None:
    """A precision, and a row's model FLOP/s as a share of its roof; None where that was not measured."""
    measured = roof(row, roofs)
    return (measured[0], row.model_flops_per_s / measured[1]) if measured else None


def throttle_reasons(row: Row) -> list[str]:
    """What held the GPU's clocks down when the last timed step had been launched, as the driver reports it."""
    try:
        bits = int(row.gpu_state.throttle_reasons or "0", 16) if row.gpu_state else 0
    except ValueError:
        return []
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]


# --- two rows -------------------------------------------------------------------------------------


@dataclass
class Change:
    """A category or a kernel before and after: milliseconds and launches per step."""

    name: str
    before_ms: float
    after_ms: float
    before_launches: float | None  # None for gaps
    after_launches: float | None

    @property
    def ms(self) -> float:
        return self.after_ms - self.before_ms

    @property
    def kind(self) -> str:
        if self.before_launches and self.after_launches:
            return "shrank" if self.ms < 0 else "grew"
        return "vanished" if self.before_launches else "appeared"


def consecutive(rows: list[Row]) -> Iterator[tuple[Row | None, Row]]:
    """Each row with the nearest one before it that has a time."""
    before = None
    for row in rows:
        yield before, row
        before = row if is_timed(row) else before


def changed_categories(before: Row, after: Row) -> list[Change]:
    """The categories of two rows, largest change first. Empty without both profiles."""
    if not (before.profile and after.profile):
        return []
    changes = _changes(_categories(before), _categories(after))
    return [change for change in changes if change.before_ms or change.after_ms]


def changed_kernels(before: Row, after: Row) -> list[Change]:
    """Kernels by name, largest change first."""
    return _changes(_kernels(before), _kernels(after))


def _kernels(row: Row) -> dict[str, CategoryTime]:
    """Kernels by name; what a record lists twice is added up."""
    kernels: dict[str, CategoryTime] = {}
    for kernel in row.profile.kernels if row.profile else []:
        total = kernels.setdefault(kernel.name, CategoryTime())
        total.ms += kernel.ms
        total.launches += kernel.launches
    return kernels


def _changes(old: dict[str, CategoryTime], new: dict[str, CategoryTime]) -> list[Change]:
    pairs = [(name, old.get(name, CategoryTime()), new.get(name, CategoryTime())) for name in old | new]
    changes = [Change(name, a.ms, b.ms, a.launches, b.launches) for name, a, b in pairs]
    return sorted(changes, key=lambda change: -abs(change.ms))


def code_diff(before: Row, after: Row) -> list[tuple[str, str, str]] | None:
    """The two scripts side by side, two unchanged lines around each change: (kind, left, right) a line.

    `kind` is same, changed, removed, added, or skip for lines left out. None without sources, or for long ones.
    """
    if not before.source or not after.source:
        return None
    old, new = before.source.splitlines(), after.source.splitlines()
    if max(len(old), len(new)) > LONGEST_SOURCE or max(map(len, [*old, *new])) > 1000:
        return None
    lines: list[tuple[str, str, str]] = []
    for group in difflib.SequenceMatcher(None, old, new).get_grouped_opcodes(2):
        lines += [("skip", "", "")] if lines else []
        for what, a, b, c, d in group:
            kind = {"equal": "same", "replace": "changed", "delete": "removed", "insert": "added"}[what]
            lines += [(kind, *pair) for pair in itertools.zip_longest(old[a:b], new[c:d], fillvalue="")]
    return lines


# --- sentences ------------------------------------------------------------------------------------


def times_faster(ratio: float) -> str:
    """`2.00x faster`, or `1.25x slower` of a ratio below 1."""
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def headline(run: Run) -> list[str]:
    """Machine and shape; the last step against the first; what FP8 adds."""
    shape = f"{run.workload.preset}: {describe_shape(run.workload)}" if run.workload else "workload unknown"
    lines = [f"{environment_of(run).device}, {shape}"]
    timed = [row for row in run.steps if is_timed(row)]
    if not timed:
        return [*lines, "No step has a time."]
    first, last = timed[0], timed[-1]
    took = f"{median_ms(first):.1f} ms per training step"
    faster = f"{last.step} is {times_faster(speedup(last, first))} than {first.step}"
    only = f"Only {first.step} has a time: {took}."
    outcome = only if first is last else f"{faster}: {took} become {median_ms(last):.1f} ms."
    return [*lines, outcome, _what_fp8_adds(run.steps)]


def _what_fp8_adds(rows: list[Row]) -> str:
    for before, after in consecutive(rows):
        if is_timed(after) and after.settings.fp8_recipe:
            if before is None:
                return f"{after.step} ran in FP8, but no step before it has a time to compare with."
            return f"In FP8 {after.step} is {times_faster(speedup(after, before))} than {before.step}."
    return "No step ran in FP8, so what FP8 adds is not measured here."


def sentence(before: Row | None, row: Row) -> str:
    """What a step did, in one line, from its row and the row before."""
    if not is_timed(row):
        return f"{row.step} has no time ({reason_untimed(row)})."
    if before is None:
        bound_by = f", bound by {describe_bound(row)}" if bound(row) else ""
        return f"{row.step} takes {median_ms(row):.1f} ms per training step{bound_by}."
    parts = [
        f"{row.step} is {times_faster(speedup(row, before))} than {before.step} "
        f"({median_ms(before):.1f} to {median_ms(row):.1f} ms)",
        *_largest_changes(before, row),
    ]
    peaks = [f"{peak:.1f}" if peak else None for peak in (peak_gib(before), peak_gib(row))]
    if all(peaks):
        parts.append(f"peak memory {'stays ' if peaks[0] == peaks[1] else f'goes from {peaks[0]} to '}{peaks[1]} GiB")
    if bound(before) and bound(row):
        word = "still" if bound(before)[0] == bound(row)[0] else "now"
        parts.append(f"{word} bound by {describe_bound(row)}, before by {describe_bound(before)}")
    return "; ".join(parts) + "."


def describe_bound(row: Row) -> str:
    """`compute 93%`, or a dash."""
    return "{} {:.0%}".format(*bound(row)) if bound(row) else "-"


def _largest_changes(before: Row, row: Row) -> list[str]:
    """The categories that lost and gained time, largest first, down to a tenth of all that moved."""
    if any(abs(profile_offset(profiled)) > 0.1 for profiled in (before, row)):
        return []  # a profile so far off explains no change of the timed step
    changes = [change for change in changed_categories(before, row) if change.name != GAPS]
    least = max(0.1 * sum(abs(change.ms) for change in changes), 0.01 * median_ms(before))
    parts = []
    for word, sign in (("less", -1), ("more", 1)):
        moved = [change for change in changes if sign * change.ms > least]
        listed = ", ".join(f"{change.name} ({change.before_ms:.1f} to {change.after_ms:.1f} ms)" for change in moved)
        parts += [f"{word} time in {listed}"] if listed else []
    return parts


def largest_loss_difference(rows: list[Row]) -> str:
    """How far the loss curves of a run are apart, against the first step that has one."""
    first, *others = [row for row in rows if is_timed(row)] or [None]
    if not others:
        return "There is no second curve to compare."
    gap, step, k = max(
        (abs(b - a), other.step, k)
        for other in others
        for k, (a, b) in enumerate(zip(first.loss, other.loss, strict=False))
    )
    ends = max(others, key=lambda other: abs(mean_loss(other) - mean_loss(first)))
    return (
        f"The largest difference to {first.step} at one training step is {gap:.4f} nats ({step}, step {k}). "
        f"Of the mean over the last {LOSS_WINDOW} steps it is {mean_loss(ends) / mean_loss(first) - 1:+.2%} "
        f"({ends.step})."
    )


# --- doubts ---------------------------------------------------------------------------------------


def describe_profile_offset(row: Row) -> str | None:
    """How far the profiled step is off the timed one, and which of its times to trust; None where it is not off."""
    offset = profile_offset(row)
    if abs(offset) <= LARGEST_PROFILE_OFFSET:
        return None
    kernels_fit = _kernels_ms(row.profile) <= (1 + LARGEST_PROFILE_OFFSET) * median_ms(row)
    only_gaps = offset > 0 and row.profile.gpu_idle_ms and kernels_fit
    trust = "the times of its kernels, not its gaps" if only_gaps else "the percentages, not the milliseconds"
    return f"Profiling ran {abs(offset):.0%} {'slower' if offset > 0 else 'faster'} than timing. Trust {trust}."


def doubts(run: Run) -> list[str]:
    """Where a rule of a fair benchmark was broken. What the merge left out is among them."""
    environment = environment_of(run)
    lines = list(run.problems)
    if environment.dirty:
        lines.append("the working copy had uncommitted changes: the commit does not hold the code that ran")
    if run.environment and environment.commit is None:
        lines.append(f"the commit is unknown: {environment.commit_reason or 'not recorded'}")
    if environment.nvml_reason:
        lines.append(f"clocks and power are unknown: {environment.nvml_reason}")
    rows_of: dict[str, list[str]] = {}
    for row in [*run.steps, *run.peers]:
        for doubt in _row_doubts(row, environment, run.roofs) if is_timed(row) else []:
            rows_of.setdefault(doubt, []).append(row.step)
    return list(dict.fromkeys([*lines, *(f"{', '.join(names)}: {doubt}" for doubt, names in rows_of.items())]))


def _row_doubts(row: Row, environment: Environment, roofs: Roofs | None) -> list[str]:
    least = FEWEST_STEPS.get(environment.device_type, FEWEST_STEPS["cuda"])
    timed, share, throttled = len(row.timing.step_ms), share_of_roof(row, roofs), ", ".join(throttle_reasons(row))
    doubts = (
        timed < least and f"{timed} timed steps, fewer than {least}",
        spread(row) > WIDEST_SPREAD and f"the middle half of its times spreads over {spread(row):.1%} of the median",
        throttled and f"the driver reported clocks held down by: {throttled}",
        describe_profile_offset(row),
        row.gpu_state
        and row.gpu_state.while_running is False
        and "the GPU was done before its clocks had been read: they may not be those of its steps",
        share
        and share[1] > MOST_OF_ROOF
        and f"faster than the {share[0]} roof, which was measured on a busy machine or with too small products",
    )
    return [doubt for doubt in doubts if doubt]
