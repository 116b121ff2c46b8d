"""What the records of a run say in sentences: its headline, what a step changed and why it helped, and the losses."""

from __future__ import annotations

import re

from common.record import Row, Run
from common.text import one_line
from report import analysis
from report.analysis import MOSTLY, bound, is_timed, median_ms
from report.doubts import Speedup, busy, compared, is_unsteady, kernels_fit, mark
from report.load import environment_of

LONGEST_TOLD = 600  # characters
BY_HAND, BOTH = "by hand", "attention and matrix products"
TAKE = {
    BOTH: "Attention and matrix products together take",
    "matrix products": "Matrix products take", "attention": "Attention takes",
    "normalization and pointwise": "Normalization and pointwise kernels take", "optimizer": "The optimizer takes",
    "copies and casts": "Copies and casts take", "loss": "The loss takes",
    "communication": "Communication takes", "other": "Other kernels take",
}  # fmt: skip
MEANS = {
    "compute": "matrix products, and attention where it is fused",
    "memory": "kernels that do little arithmetic, and mostly read and write tensors",
    "launch": "gaps, in which the GPU waits", "communication": "communication beside which nothing else runs",
}  # fmt: skip


def headline(run: Run) -> str:
    """What a run shows, in one line: the last step against the first, and the fastest, where that is another one.

    A busy machine gets its verdict instead, and a serious doubt about any step withholds the claim.
    """
    if verdict := busy(run):
        return verdict
    timed = [row for row in run.steps if is_timed(row)]
    if not timed:
        return "No step has a time"
    first, last, plain = timed[0], timed[-1], analysis.plain_row(run.steps)
    if why := _no_comparison(last, first):
        return why
    if mark(run, *timed):
        return "No headline: a serious doubt stands against these times"
    gpus = f" on {run.workload.gpus} GPUs" if run.workload and run.workload.gpus > 1 else ""
    if first is last:
        return f"One training step of {first.step}{gpus}: {duration(median_ms(first))}"
    whole = first.step.startswith("0_") and len(timed) == len(run.steps)
    between = "" if whole else f" from {first.step} to {last.step}"
    times = f"{duration(median_ms(first))} → {duration(median_ms(last), median_ms(first))}"
    said = f"One training step{gpus}{between}: {times}, {_times(run, last, first)}"
    fastest = min(timed, key=median_ms)
    if fastest not in (first, last) and analysis.tells_apart(fastest, last):
        return f"{said}; the fastest is {fastest.step}, {_times(run, fastest, first)}"
    if plain in (None, first, last) or not analysis.tells_apart(last, plain):
        return said
    ran = plain.settings
    usual = ran.amp_dtype in ("bfloat16", "float16") and ran.attention_kernel not in (None, BY_HAND)
    name = f"AMP + SDPA ({plain.step})" if usual else plain.step
    return f"{said}; {_times(run, last, plain).replace(' faster', '')} over {name}"


def duration(ms: float, beside: float | None = None) -> str:
    """`246.7 ms`, or `3.10 s` where it or a time beside it has a second."""
    return f"{ms / 1e3:.2f} s" if max(ms, beside or 0.0) >= 1000 else f"{ms:.1f} ms"


def _times(run: Run, row: Row, before: Row) -> str:
    """`20 times faster`, with the range of the passes where that is wider than the rounding."""
    if not analysis.tells_apart(row, before):
        return "no change that is larger than the spread of the times"
    speedup = compared(row, before, run)
    slower = speedup.ratio < 1
    ratios = [1 / ratio if slower else ratio for ratio in (speedup.ratio, *sorted(speedup.extent or ()))]
    digits = 0 if ratios[0] >= 10 else 1 if ratios[0] >= 1.25 else 2
    ratio, *extent = (f"{ratio:.{digits}f}" for ratio in ratios)
    within = f" ({' to '.join(sorted(extent, key=float))})" if len({ratio, *extent}) > 1 else ""
    return f"{ratio} times {'slower' if slower else 'faster'}{within}"


def _no_comparison(row: Row, before: Row | None) -> str | None:
    """Why nothing is said of a row, alone or against another; None where their times are steady."""
    unsteady = next((one for one in (row, before) if one and is_unsteady(one)), None)
    if unsteady is None:
        return None
    times = "its times" if unsteady is row else f"the times of {unsteady.step}"
    spread = f"spreads over {100 * analysis.spread(unsteady):.0f} % of the median"
    return f"{row.step} has no comparison: the middle half of {times} {spread}."


def outcome(run: Run, before: Row | None, row: Row) -> str:
    """How fast a step is beside the row before; nothing of a row that a busy machine timed."""
    if not is_timed(row):
        return f"{row.step} has no time ({analysis.reason_untimed(row)})."
    if busy(run):
        return ""
    if why := _no_comparison(row, before):
        return why
    if before is None:
        mostly = f", {bound(row)[1]:.0%} of it in {MOSTLY[bound(row)[0]]}" if bound(row) else ""
        return f"{row.step} takes {median_ms(row):.1f}{mark(run, row)} ms per training step{mostly}."
    times = " to ".join(f"{median_ms(one):.1f}{mark(run, one)}" for one in (before, row))
    if not analysis.tells_apart(row, before):
        return f"{row.step} and {before.step} differ by less than their times spread ({times} ms)."
    return f"{row.step} is {compared(row, before, run).words()} than {before.step} ({times} ms)."


def why(run: Run, before: Row | None, row: Row) -> str:
    """The largest measured cause of a step's gain or loss, in one sentence; or why none is named."""
    if not _comparable(run, before, row):
        return ""
    if not analysis.tells_apart(row, before):
        return "There is no gain to explain."
    if obstacle := _no_cause(run, before, row):
        return f"No cause is named: {obstacle}."
    gained, largest, _ = _causes(before, row)
    if largest is None:
        return "No kind of kernel explains it."
    share = -largest.ms / gained
    if share > 1:
        sides = ((row, largest.after_ms), (before, largest.before_ms))
        rest = (sum(analysis.category_ms(side).values()) - ms for side, ms in sides)  # as profiled, gaps included
        return f"{_took(largest)}, and everything else {' ms instead of '.join(f'{ms:,.1f}' for ms in rest)}."
    return f"{_took(largest)}, which is {share:.0%} of the time {'saved' if gained > 0 else 'lost'}."


def further(run: Run, before: Row | None, row: Row) -> list[str]:
    """What else changed: other kinds of kernels, the clock, and what binds the step."""
    if not _comparable(run, before, row):
        return []
    lines = []
    if analysis.tells_apart(row, before) and not _no_cause(run, before, row):
        gained, largest, others = _causes(before, row)
        alike = analysis.alike_products(before, row)
        others = [change for change in others if not _is_all_of(alike, change)]
        lines += [f"{_took(change)}." for change in others if change.ms * gained < 0]
        against = [change for change in others if change.ms * gained >= 0]
        lines += [
            f"Against this, {_took(change, inside=True)}." if largest else f"{_took(change)}." for change in against
        ]
        lines += _at_equal_clock(run, before, row, alike) if alike else []
    (once, most), (now, share) = (bound(one) or ("", 0) for one in (before, row))
    if once and now and once != now:
        lines.append(f"The largest part of the step's time is now in {MOSTLY[now]}: {share:.0%} of it is {MEANS[now]}.")
        lines.append(f"Before it was in {MOSTLY[once]}: {most:.0%} was {MEANS[once]}.")
    return lines


def _comparable(run: Run, before: Row | None, row: Row) -> bool:
    return before is not None and is_timed(row) and not busy(run) and not _no_comparison(row, before)


def _no_cause(run: Run, before: Row, row: Row) -> str | None:
    """Why profiles explain nothing of what a step changed."""
    if not (before.profile and row.profile):
        return "there is no profile of both steps"
    if analysis.unattributed(before, row):
        return "the optimizer, the same code in both, took another time, so something else changed too"
    if environment_of(run).device_type == "cpu" and before.settings.compiled != row.settings.compiled:
        return "on a CPU a compiled region holds operations of several kinds, so kinds cannot be compared"
    if not (kernels_fit(before) and kernels_fit(row)):
        return "profiling changed the times of the kernels"
    return "there is a serious doubt" if mark(run, before, row) else None


def _causes(before: Row, row: Row) -> tuple[float, analysis.Change | None, list[analysis.Change]]:
    """What a step gained, in ms; the largest change that goes the same way; and the others, largest first.

    A change counts beyond the spread and a tenth of all that moved. Gaps are no cause, because the profiler changes
    them; nor is an optimizer that both rows run alike.
    """
    no_cause = {analysis.GAPS} | ({"optimizer"} if analysis.runs_same_optimizer(before, row) else set())
    changes = [change for change in analysis.changed_categories(before, row) if change.name not in no_cause]
    kernels = {before.settings.attention_kernel, row.settings.attention_kernel}
    if BY_HAND in kernels and len(kernels - {None}) == 2:
        changes = _with_attention_as_one(changes)
    spread_ms = max(one.timing.p75_ms - one.timing.p25_ms for one in (before, row))
    least = max(0.1 * sum(abs(change.ms) for change in changes), 0.01 * median_ms(before), spread_ms)
    moved = [change for change in changes if abs(change.ms) > least]
    gained = median_ms(before) - median_ms(row)
    largest = next((change for change in moved if change.ms * gained < 0), None)
    return gained, largest, [change for change in moved if change is not largest]


def _with_attention_as_one(changes: list[analysis.Change]) -> list[analysis.Change]:
    """Attention and matrix products as one change, largest first: the products of attention by hand are among the
    others, and those of fused attention are not."""
    of_both = [change for change in changes if change.name in ("attention", "matrix products")]
    before_ms, after_ms = (sum(getattr(change, ms) for change in of_both) for ms in ("before_ms", "after_ms"))
    rest = [change for change in changes if change not in of_both]
    return sorted([*rest, analysis.Change(BOTH, before_ms, after_ms, None, None)], key=lambda change: -abs(change.ms))


def _took(change: analysis.Change, inside: bool = False) -> str:
    """`Copies and casts take 5.0 ms instead of 21.2`; `inside` a sentence with a small letter."""
    digits = 0 if max(change.before_ms, change.after_ms) >= 1000 else 1
    take = TAKE[change.name][0].lower() + TAKE[change.name][1:] if inside else TAKE[change.name]
    return f"{take} {change.after_ms:,.{digits}f} ms instead of {change.before_ms:,.{digits}f}"


def _is_all_of(alike: analysis.AlikeProducts | None, change: analysis.Change) -> bool:
    """Whether the products that both steps run alike are all matrix products: one sentence then says both."""
    return bool(alike) and change.name == "matrix products" and abs(alike.before_ms - change.before_ms) < 0.05


def _at_equal_clock(run: Run, before: Row, row: Row, alike: analysis.AlikeProducts) -> list[str]:
    """How the clock and the matrix products that both steps run alike changed together."""
    fell = alike.after_mhz < alike.before_mhz
    limited = fell and "power limit" in analysis.throttle_reasons(row)
    clock = f"the clock {'fell' if fell else 'rose'} from {alike.before_mhz:.0f} to {alike.after_mhz:.0f} MHz"
    clock += ": the GPU lowers it to stay within its power limit" * limited
    faster = Speedup(alike.speedup, None, mark(run, row, before)).words()
    every = analysis.category_ms(before)["matrix products"]
    part = f", of {every:.1f} in all" if every - alike.before_ms >= 0.05 else ""
    return [
        f"The matrix products that both steps run alike take {alike.before_ms:.1f} ms in {before.step}{part}.",
        f"In {row.step} the same products take {alike.after_ms:.1f} ms, while {clock}.",
        f"If they had taken as long as in {before.step}, {row.step} would be {faster} than {before.step}.",
    ]


def title(row: Row) -> str:
    """`Step 2: fused attention` of a script that says so in its first line, otherwise its name."""
    first = one_line(analysis.docstring(row), 100).rstrip(".")
    return first if first.startswith("Step ") else row.step


def told(row: Row, what: str) -> str:
    """What a script says in its docstring after `Change:` or `Why:`; nothing where it does not say."""
    said = re.search(rf"^{what}:(.*?)(?:^\w+:|\Z)", analysis.docstring(row), re.DOTALL | re.MULTILINE)
    text = " ".join(said[1].split()) if said else ""
    if re.match(r"[a-z]+[ ,]", text):  # a word, no name of a function
        text = text[0].upper() + text[1:]
    return one_line(text, LONGEST_TOLD)


def rising_loss(rows: list[Row]) -> str:
    """A sentence about losses that rise at the start; empty where none does by a tenth."""
    first = analysis.reference_row(rows)
    start = first.loss[: analysis.LOSS_WINDOW // 2] if first else []
    k = max(range(len(start)), key=start.__getitem__, default=0)
    if not start or start[k] < 1.1 * start[0]:
        return ""
    return (
        f"The loss first rises, from {start[0]:.2f} to {start[k]:.2f} nats in training step {k}. The "
        "likely reason: AdamW's first updates move every weight by about the whole learning rate, whatever its "
        "gradient. That rate does not start small here, as it would with a schedule."
    )


def largest_loss_difference(rows: list[Row]) -> str:
    """How far the loss curves of a run are apart, against the first step that has one."""
    first, *others = [row for row in rows if is_timed(row)] or [None]
    if not others:
        return "There is no second curve to compare."
    every = [
        (b - a, other.step, k) for other in others for k, (a, b) in enumerate(zip(first.loss, other.loss, strict=False))
    ]
    gap, step, k = max(every, key=lambda one: abs(one[0]))
    ends = max(others, key=lambda other: abs(analysis.mean_loss(other) - analysis.mean_loss(first)))
    difference = analysis.loss_difference(ends, first) or 0.0
    count = min(len(first.loss), analysis.LOSS_WINDOW)
    over = f"the last {count}" if count < len(first.loss) else f"all {count}"
    at_the_end = ends.loss[-1] - first.loss[-1]
    return (
        f"The largest difference to {first.step} is {gap:+.4f} nats, in {step} at training step {k}. "
        f"Averaged over {over} training steps, the loss of {ends.step} differs from that of {first.step} by "
        f"{difference:+.2%}, more than that of any other row. At the end the two differ by {at_the_end:+.4f} nats."
    )
