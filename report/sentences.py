"""What the records of a run say in sentences: its headline, one line a step, and how far the losses are apart."""

from __future__ import annotations

from common.record import Row, Run, describe_shape
from report import analysis
from report.analysis import bound, describe_bound, is_timed, median_ms, peak_gib
from report.doubts import Speedup, busy, compared, is_unsteady, kernels_fit, mark
from report.load import environment_of


def headline(run: Run) -> list[str]:
    """Machine and shape; the last step against the first; what FP8 adds. A busy machine gets its verdict instead."""
    shape = f"{run.workload.preset}: {describe_shape(run.workload)}" if run.workload else "workload unknown"
    machine = f"{environment_of(run).device}, {shape}"
    if verdict := busy(run):
        return [machine, verdict]
    timed = [row for row in run.steps if is_timed(row)]
    if not timed:
        return [machine, "No step has a time."]
    first, last = timed[0], timed[-1]
    outcome = _no_comparison(last, first)
    if first is last:
        outcome = f"Only {first.step} has a time: {_ms(run, first)} ms per training step."
    elif outcome is None:
        faster = f"{last.step} is {compared(last, first, run).words()} than {first.step}"
        outcome = f"{faster}: {_ms(run, first)} ms per training step become {_ms(run, last)} ms."
    return [*dict.fromkeys([machine, outcome, _what_fp8_adds(run)])]


def _what_fp8_adds(run: Run) -> str:
    for before, after in analysis.consecutive(run.steps):
        if is_timed(after) and after.settings.fp8_recipe:
            if before is None:
                return f"{after.step} ran in FP8, but no step before it has a time to compare with."
            faster = f"In FP8 {after.step} is {compared(after, before, run).words()} than {before.step}."
            return _no_comparison(after, before) or faster
    return "No step ran in FP8, so what FP8 adds is not measured here."


def _no_comparison(row: Row, before: Row | None) -> str | None:
    """Why nothing is said of a row, alone or against another; None where their times are steady."""
    unsteady = next((one for one in (row, before) if one and is_unsteady(one)), None)
    if unsteady is None:
        return None
    times = "its times" if unsteady is row else f"the times of {unsteady.step}"
    spread = f"spreads over {100 * analysis.spread(unsteady):.0f} % of the median"
    return f"{row.step} has no comparison: the middle half of {times} {spread}."


def _ms(run: Run, row: Row) -> str:
    return f"{median_ms(row):.1f}{mark(run, row)}"


def sentences(run: Run) -> list[str]:
    """`sentence` of every step that has one."""
    return [*filter(None, (sentence(run, *pair) for pair in analysis.consecutive(run.steps)))]


def sentence(run: Run, before: Row | None, row: Row) -> str:
    """What a step did, in one line, from its row and the row before; nothing of a row that a busy machine timed."""
    if not is_timed(row):
        return f"{row.step} has no time ({analysis.reason_untimed(row)})."
    if busy(run):
        return ""
    if why := _no_comparison(row, before):
        return why
    if before is None:
        bound_by = f", bound by {describe_bound(row)}" if bound(row) else ""
        return f"{row.step} takes {_ms(run, row)} ms per training step{bound_by}."
    parts = [
        f"{row.step} is {compared(row, before, run).words()} than {before.step} "
        f"({_ms(run, before)} to {_ms(run, row)} ms)",
        *_causes(run, before, row),
    ]
    peaks = [f"{peak:.1f}" if peak else None for peak in (peak_gib(before), peak_gib(row))]
    if all(peaks):
        parts.append(f"peak memory {'stays ' if peaks[0] == peaks[1] else f'goes from {peaks[0]} to '}{peaks[1]} GiB")
    if bound(before) and bound(row):
        word = "still" if bound(before)[0] == bound(row)[0] else "now"
        parts.append(f"{word} bound by {describe_bound(row)}, before by {describe_bound(before)}")
    return "; ".join(parts) + "."


def _causes(run: Run, before: Row, row: Row) -> list[str]:
    """What took less and more time, and what the clock did.

    Empty where a profile is so far off that it explains no change of the timed step, where there is a serious doubt,
    and where the optimizer, the same code in both rows, shows that something else changed too.
    """
    if not (kernels_fit(before) and kernels_fit(row)) or analysis.unattributed(before, row) or mark(run, before, row):
        return []
    return [*_largest_changes(before, row), *_at_equal_clock(run, before, row)]


def _largest_changes(before: Row, row: Row) -> list[str]:
    """The categories that lost and gained time, largest first, down to a tenth of all that moved."""
    no_cause = {analysis.GAPS} | ({"optimizer"} if analysis.runs_same_optimizer(before, row) else set())
    changes = [change for change in analysis.changed_categories(before, row) if change.name not in no_cause]
    least = max(0.1 * sum(abs(change.ms) for change in changes), 0.01 * median_ms(before))
    parts = []
    for word, sign in (("less", -1), ("more", 1)):
        moved = [change for change in changes if sign * change.ms > least]
        listed = ", ".join(f"{change.name} ({change.before_ms:.1f} to {change.after_ms:.1f} ms)" for change in moved)
        parts += [f"{word} time in {listed}"] if listed else []
    return parts


def _at_equal_clock(run: Run, before: Row, row: Row) -> list[str]:
    """How the clock and the matrix products that both steps run alike changed together, where they did."""
    alike = analysis.alike_products(before, row)
    if alike is None:
        return []
    fell = alike.after_mhz < alike.before_mhz
    limit = " (power limit)" if fell and "power limit" in analysis.throttle_reasons(row) else ""
    faster = Speedup(alike.speedup, None, mark(run, row, before)).words()
    return [
        f"the matrix products that both steps run alike take {alike.after_ms:.1f} ms instead of "
        f"{alike.before_ms:.1f}, while the clock {'fell' if fell else 'rose'} from {alike.before_mhz:.0f} to "
        f"{alike.after_mhz:.0f} MHz{limit}; at equal clock it would be {faster}"
    ]


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
    ends = max(others, key=lambda other: abs(analysis.mean_loss(other) - analysis.mean_loss(first)))
    difference = analysis.loss_difference(ends, first) or 0.0
    return (
        f"The largest difference to {first.step} at one training step is {gap:.4f} nats ({step}, step {k}). "
        f"Of the mean over the last {analysis.LOSS_WINDOW} steps it is {difference:+.2%} ({ends.step})."
    )
