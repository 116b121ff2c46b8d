"""What the records of a run say: sentences, changes between two steps, and warnings. Without torch.

Everything here is computed from one envelope (see common/benchmark.py); rows without a time stay, with their reason.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from common.record import describe_shape

LOSS_WINDOW = 20
FEWEST_STEPS = {"cuda": 30, "cpu": 10}
WIDEST_SPREAD = 0.03
LONGEST_SOURCE = 300  # lines of a script worth comparing: difflib takes more than the square of it
WRAP_COLUMN = 52  # of a code line, so that two stand side by side
MOST_PROFILE_OFF = 0.03
PROFILE_OFF = "the profiled step is"
MOST_OF_ROOF = 1.05  # beyond it the roof is wrong, not the row fast
GAPS = "gaps"
PRECISIONS = ("fp32", "tf32", "bf16", "fp8")  # of the roofs
CATEGORIES = (  # in the order of a stack
    "matrix products",
    "attention",
    "normalization and pointwise",
    "optimizer",
    "copies and casts",
    "loss",
    "communication",
    "other",
    GAPS,
)
GIB = 2**30
# Bits of NVML's clocks event reasons that hold clocks down; the idle and application-clock bits are no warning.
THROTTLE_REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


# --- one row --------------------------------------------------------------------------------------


def is_timed(step: dict) -> bool:
    return step["status"] == "ok"


def median_ms(step: dict) -> float:
    return step["timing"]["median_ms"]


def quartiles_ms(step: dict) -> tuple[float, float]:
    """25th and 75th percentile; where the record has none, the range of its times."""
    timing = step["timing"]
    times = timing.get("step_ms") or [timing["median_ms"]]
    return timing.get("p25_ms") or min(times), timing.get("p75_ms") or max(times)


def mean_loss(step: dict) -> float:
    """Mean of the last LOSS_WINDOW training steps, in nats."""
    window = step["loss"][-LOSS_WINDOW:]
    return sum(window) / len(window)


def loss_difference(step: dict, reference: dict) -> str:
    """Mean loss of a row against that of another, in percent; a dash where that one is 0."""
    against = mean_loss(reference)
    return f"{mean_loss(step) / against - 1:+.2%}" if against else "-"


def peak_bytes(step: dict) -> int | None:
    """CUDA allocator's peak; on a CPU the peak of the whole process."""
    return step["peak_allocated_bytes"] or step["peak_rss_bytes"]


def reference_step(steps: list[dict]) -> dict | None:
    """The row that speedups are against: the first that has a time."""
    return next(filter(is_timed, steps), None)


def why_untimed(step: dict) -> str:
    """`skipped: reason` of a row without a time."""
    return f"{step['status']}: {step['reason'] or 'no reason given'}"


def profile_is_off(step: dict) -> float | None:
    """How far the profiled step is off the timed median, as a share, where that is more than MOST_PROFILE_OFF."""
    off = step["profile"]["step_ms"] / median_ms(step) - 1 if step["profile"] else 0.0
    return off if abs(off) > MOST_PROFILE_OFF else None


def describe_profile_off(step: dict) -> str | None:
    """How far the profiled step is off, and which of its times to believe; None where it is not off."""
    if (off := profile_is_off(step)) is None:
        return None
    profile = step["profile"]
    only_gaps = (
        off > 0 and profile.get("gpu_idle_ms") and _kernels_ms(profile) <= (1 + MOST_PROFILE_OFF) * median_ms(step)
    )
    advice = "its kernels' times fit the timed step, its gaps do not" if only_gaps else "read its times as shares"
    return f"{PROFILE_OFF} {off:+.0%} off the timed median: {advice}"


def row_note(step: dict) -> str | None:
    """What qualifies a row, without what older records say of their profile: describe_profile_off says it anew."""
    parts = (step["note"] or "").split("; ")
    return "; ".join(part for part in parts if not part.startswith(PROFILE_OFF)) or None


def gaps_ms(step: dict) -> float | None:
    """Milliseconds of a step in which the GPU idles; None where only a GPU could tell.

    Where the profiler made the step longer than it is when timed, its gaps are its own; what is left of the timed
    median after the kernels stands for them.
    """
    profile = step["profile"]
    if not profile or profile.get("gpu_idle_ms") is None:
        return None
    if (profile_is_off(step) or 0.0) > 0:
        return max(0.0, min(profile["gpu_idle_ms"], median_ms(step) - _kernels_ms(profile)))
    return float(profile["gpu_idle_ms"])


def _kernels_ms(profile: dict) -> float:
    return sum(entry["ms"] for entry in profile["categories"].values())


def category_ms(step: dict) -> dict[str, float] | None:
    """Milliseconds of a step by kernel category, gaps included; None without a profile."""
    profile = step["profile"]
    if not (profile and profile["categories"]):
        return None
    times: dict[str, float] = {}
    for name, entry in profile["categories"].items():
        known = name if name in CATEGORIES else "other"
        times[known] = times.get(known, 0.0) + float(entry["ms"])
    return times | {GAPS: gaps_ms(step) or 0.0}


def bound_by(step: dict) -> str:
    """`compute 93%`: what binds a row, and the share of the step behind it; a dash where that is not known."""
    profile = step["profile"]
    if not (profile and profile.get("bound_by")):
        return "-"
    return f"{profile['bound_by']} {profile['shares'][profile['bound_by']]:.0%}"


def of_roof(step: dict, roofs: dict) -> str:
    """`74% of fp8`: a row's model FLOP/s against the roof of its precision; a dash where that was not measured."""
    precision, roof = roof_of(step, roofs)
    return f"{step['model_flops_per_s'] / roof:.0%} of {precision}" if roof else "-"


def roof_of(step: dict, roofs: dict) -> tuple[str, float | None]:
    """The precision a row's matrix products are held against, and its measured FLOP/s."""
    settings = step["settings"]
    dtype, highest = settings.get("amp_dtype"), settings.get("float32_matmul_precision") == "highest"
    if settings.get("fp8_recipe"):
        precision = "fp8"
    elif dtype in ("bfloat16", "float16"):
        precision = "bf16"
    else:
        precision = "fp32" if highest or roofs.get("tf32_flops_per_s") is None else "tf32"
    return precision, roofs.get(f"{precision}_flops_per_s")


def tflops(flops_per_s: float) -> str:
    """In TFLOP/s, without a unit: whole numbers from 10 on, below with three digits that count."""
    rate = flops_per_s / 1e12
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.3g}"


def times_faster(ratio: float) -> str:
    """`2.00x faster`, or `1.25x slower` of a ratio below 1."""
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


# --- sentences ------------------------------------------------------------------------------------


def headline(run: dict) -> list[str]:
    """Machine and shape; the last step against the first; what FP8 adds."""
    device, workload = run["environment"].get("device") or "unknown machine", run["workload"]
    lines = [f"{device}, {workload.get('preset')}: {describe_shape(workload)}"]
    timed = [step for step in run["steps"] if is_timed(step)]
    if not timed:
        return [*lines, "No step has a time."]
    first, last = timed[0], timed[-1]
    if first is last:
        lines.append(f"Only {first['step']} has a time: {median_ms(first):.1f} ms per training step.")
    else:
        ratio = median_ms(first) / median_ms(last)
        lines.append(
            f"{last['step']} is {times_faster(ratio)} than {first['step']}: "
            f"{median_ms(first):.1f} ms per training step become {median_ms(last):.1f} ms."
        )
    return [*lines, _what_fp8_adds(run["steps"])]


def _what_fp8_adds(steps: list[dict]) -> str:
    for before, after in consecutive(steps):
        if is_timed(after) and after["settings"].get("fp8_recipe"):
            if before is None:
                return f"{after['step']} ran in FP8, but no step before it has a time to hold it against."
            ratio = median_ms(before) / median_ms(after)
            return f"In FP8 {after['step']} is {times_faster(ratio)} than {before['step']}."
    return "No step ran in FP8, so what FP8 adds is not measured here."


def consecutive(steps: list[dict]) -> Iterator[tuple[dict | None, dict]]:
    """Each step with the nearest one before it that has a time."""
    before = None
    for step in steps:
        yield before, step
        before = step if is_timed(step) else before


def sentence(before: dict | None, step: dict) -> str:
    """What a step did, in one line, from its record and that of the step before."""
    if not is_timed(step):
        return f"{step['step']} has no time ({why_untimed(step)})."
    if before is None:
        bound = "" if bound_by(step) == "-" else f", bound by {bound_by(step)}"
        return f"{step['step']} takes {median_ms(step):.1f} ms per training step{bound}."
    said = [
        f"{step['step']} is {times_faster(median_ms(before) / median_ms(step))} than {before['step']} "
        f"({median_ms(before):.1f} to {median_ms(step):.1f} ms)",
        *_largest_changes(before, step),
    ]
    peaks = [f"{peak / GIB:.1f}" if peak else None for peak in (peak_bytes(before), peak_bytes(step))]
    if all(peaks):
        said.append(f"peak memory {'stays ' if peaks[0] == peaks[1] else f'goes from {peaks[0]} to '}{peaks[1]} GiB")
    if "-" not in (bound_by(before), bound_by(step)):
        same = before["profile"]["bound_by"] == step["profile"]["bound_by"]
        said.append(f"{'still' if same else 'now'} bound by {bound_by(step)}, before by {bound_by(before)}")
    return "; ".join(said) + "."


def _largest_changes(before: dict, step: dict) -> list[str]:
    """The categories that lost and gained time, largest first, down to a tenth of all that moved."""
    old, new = category_ms(before), category_ms(step)
    if old is None or new is None or any(abs(profile_is_off(row) or 0.0) > 0.1 for row in (before, step)):
        return []  # a profile so far off explains no change of the timed step
    change = {name: new.get(name, 0.0) - old.get(name, 0.0) for name in old | new if name != GAPS}
    least = max(0.1 * sum(map(abs, change.values())), 0.01 * median_ms(before))
    large = sorted((name for name in change if abs(change[name]) > least), key=lambda name: -abs(change[name]))
    said = []
    for word, names in (("less", [n for n in large if change[n] < 0]), ("more", [n for n in large if change[n] > 0])):
        if names:
            listed = (f"{name} ({old.get(name, 0.0):.1f} to {new.get(name, 0.0):.1f} ms)" for name in names)
            said.append(f"{word} time in {', '.join(listed)}")
    return said


def largest_loss_difference(steps: list[dict]) -> str:
    """How far the loss curves of a run are apart, against the first step that has one."""
    timed = [step for step in steps if is_timed(step)]
    if len(timed) < 2:
        return "There is no second curve to compare."
    first, *others = timed
    gap, step, k = max(
        (abs(b - a), other["step"], k)
        for other in others
        for k, (a, b) in enumerate(zip(first["loss"], other["loss"], strict=False))
    )
    ends = max(others, key=lambda other: abs(mean_loss(other) - mean_loss(first)))
    return (
        f"The largest difference to {first['step']} at one training step is {gap:.4f} nats ({step}, step {k}); "
        f"of the mean over the last {LOSS_WINDOW}, {loss_difference(ends, first)} ({ends['step']})."
    )


# --- two steps ------------------------------------------------------------------------------------


def changed_categories(before: dict, step: dict) -> list[dict]:
    """Of each category: ms and launches before and after, largest change first. Empty without both profiles."""
    old, new = category_ms(before), category_ms(step)
    if old is None or new is None:
        return []
    rows = [
        {"name": name, "before_ms": old.get(name, 0.0), "after_ms": new.get(name, 0.0)}
        | {"before_launches": _launches(before, name), "after_launches": _launches(step, name)}
        for name in old | new
        if old.get(name) or new.get(name)
    ]
    return sorted(rows, key=_change, reverse=True)


def _launches(step: dict, category: str) -> float | None:
    entry = step["profile"]["categories"].get(category)
    return entry.get("launches") if entry else (None if category == GAPS else 0)


def _change(row: dict) -> float:
    return abs(row["after_ms"] - row["before_ms"])


def changed_kernels(before: dict, step: dict, at_most: int = 10) -> list[dict]:
    """Kernels by name that vanished, appeared, shrank or grew, largest change first."""
    old, new = _kernels(before), _kernels(step)
    rows = []
    for name in old | new:
        a, b = old.get(name), new.get(name)
        row = {"name": name, "what": _what_happened(a, b)}
        row |= {"before_ms": a["ms"] if a else 0.0, "after_ms": b["ms"] if b else 0.0}
        row |= {"before_launches": a["launches"] if a else 0, "after_launches": b["launches"] if b else 0}
        rows.append(row)
    return sorted(rows, key=_change, reverse=True)[:at_most]


def count_changes(before: dict, step: dict) -> dict[str, int]:
    """How many kernel names vanished, appeared, and stayed."""
    old, new = _kernels(before).keys(), _kernels(step).keys()
    return {"vanished": len(old - new), "appeared": len(new - old), "stayed": len(old & new)}


def _kernels(step: dict) -> dict[str, dict]:
    """Kernels by name; what a record lists twice is added up."""
    found: dict[str, dict] = {}
    for kernel in (step["profile"] or {}).get("kernels") or []:
        row = found.setdefault(kernel["name"], kernel | {"ms": 0.0, "launches": 0})
        row["ms"] += kernel["ms"]
        row["launches"] += kernel["launches"]
    return found


def _what_happened(before: dict | None, after: dict | None) -> str:
    if before is None:
        return "appeared"
    if after is None:
        return "vanished"
    return "shrank" if after["ms"] < before["ms"] else "grew"


def code_diff(before: dict, step: dict) -> str | None:
    """The two scripts side by side as an HTML table, escaped, changes marked inside lines; None without sources."""
    old, new = before["source"], step["source"]
    if not (isinstance(old, str) and isinstance(new, str)):
        return None
    lines = old.splitlines(), new.splitlines()
    if max(map(len, lines)) > LONGEST_SOURCE or max(len(old), len(new)) > 100 * LONGEST_SOURCE:
        return None
    drawn = difflib.HtmlDiff(tabsize=4, wrapcolumn=WRAP_COLUMN).make_table(*lines, context=True, numlines=2)
    # difflib numbers its anchors through the whole process, and the page does not use them.
    drawn = re.sub(r'<td class="diff_next"[^>]*>.*?</td>', "", drawn)
    return re.sub(r' id="[^"]*"| nowrap="nowrap"|<colgroup></colgroup>', "", drawn)


# --- warnings -------------------------------------------------------------------------------------


def warnings(run: dict) -> list[str]:
    """Where a rule of a fair benchmark was broken; what the merge found is among them."""
    environment = run["environment"]
    found = list(run.get("problems") or [])
    if environment.get("dirty"):
        found.append("the working copy had uncommitted changes: the commit does not hold the code that ran")
    if environment.get("commit") is None and run["steps"]:
        found.append(f"the commit is unknown: {environment.get('commit_reason') or 'not recorded'}")
    device_type, roofs = environment.get("device_type"), run.get("roofs") or {}
    rows_of: dict[str, list[str]] = {}
    for step in [*run["steps"], *run.get("peers", [])]:
        for said in _row_warnings(step, device_type, roofs) if is_timed(step) else []:
            rows_of.setdefault(said, []).append(step["step"])
    return list(dict.fromkeys([*found, *(f"{', '.join(names)}: {said}" for said, names in rows_of.items())]))


def _row_warnings(step: dict, device_type: str | None, roofs: dict) -> list[str]:
    found = []
    times, least = step["timing"].get("step_ms") or [], FEWEST_STEPS.get(device_type, FEWEST_STEPS["cuda"])
    if len(times) < least:
        found.append(f"{len(times)} timed steps, fewer than {least}")
    p25, p75 = quartiles_ms(step)
    if (p75 - p25) / median_ms(step) > WIDEST_SPREAD:
        found.append(f"the middle half of its times spreads over {(p75 - p25) / median_ms(step):.1%} of the median")
    if reasons := throttle_reasons(step):
        found.append(f"the driver reported clocks held down by: {', '.join(reasons)}")
    if said := describe_profile_off(step):
        found.append(said)
    if (step.get("gpu_state") or {}).get("while_running") is False:
        found.append("the GPU was done before its clocks had been read: they may not be those of its steps")
    precision, roof = roof_of(step, roofs)
    if roof and step["model_flops_per_s"] > MOST_OF_ROOF * roof:
        found.append(
            f"faster than the {precision} roof, which was measured on a busy machine or with too small products"
        )
    return found


def throttle_reasons(step: dict) -> list[str]:
    """What the driver said held the GPU's clocks down when the last timed step had been launched."""
    mask = (step.get("gpu_state") or {}).get("throttle_reasons")
    try:
        bits = mask if isinstance(mask, int) else int(str(mask), 16)
    except ValueError:
        return []
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
