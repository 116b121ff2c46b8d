"""What the records of a run say: the figures of a row, and what changed between two. One function a figure.

Everything is computed from one run (common/record.py). Rows without a time stay, with their reason.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median

from common.record import CATEGORIES, CategoryTime, Profile, Roofs, Row, Run, Timing
from report.kernels import readable

LOSS_WINDOW = 20
LARGEST_PROFILE_OFFSET = 0.03
LONGEST_SOURCE = 400  # lines of a script that are worth comparing
FEWEST_STEPS_OF_DRIFT = 8
LARGEST_OPTIMIZER_RATIO = 1.25  # between rows that run the same optimizer; beyond it something else changed
MOST_OF_CLOCK = 2  # times what a clock does to products on its own; beyond it something else changed
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


def timings(row: Row) -> list[Timing]:
    """The timing of every pass; of a row that ran once its own."""
    return [one.timing for one in row.repetitions or [row]]


def passes_ms(row: Row) -> list[float]:
    """The median of every pass of `--repeat`, in order; empty where the row has fewer than two."""
    medians = [timing.median_ms for timing in timings(row)]
    return medians if len(medians) >= 2 else []


def passes(run: Run) -> int:
    """The most passes of a row; 0 where every row ran once."""
    return max((len(passes_ms(row)) for row in [*run.steps, *run.peers]), default=0)


def extent_ms(row: Row) -> tuple[float, float]:
    """The smallest and the largest median of the passes; the quartiles of a row that ran once."""
    medians = passes_ms(row)
    return (min(medians), max(medians)) if medians else (row.timing.p25_ms, row.timing.p75_ms)


def spread(row: Row) -> float:
    """Distance of the quartiles, as a share of the median."""
    return (row.timing.p75_ms - row.timing.p25_ms) / median_ms(row)


def drift(row: Row) -> float:
    """Median of the second half of the timed steps against the first, as a share: of the pass that drifts most.

    0 where no pass has FEWEST_STEPS_OF_DRIFT steps.
    """
    drifts = [0.0]
    for times in (timing.step_ms for timing in timings(row) if len(timing.step_ms) >= FEWEST_STEPS_OF_DRIFT):
        half = len(times) // 2
        drifts.append(median(times[-half:]) / median(times[:half]) - 1)
    return max(drifts, key=abs)


def mean_loss(row: Row) -> float:
    """Mean of the last LOSS_WINDOW training steps, in nats."""
    return fmean(row.loss[-LOSS_WINDOW:])


def loss_difference(row: Row, reference: Row) -> float | None:
    """Mean loss of a row against that of another, as a share; None where that one is 0."""
    against = mean_loss(reference)
    return mean_loss(row) / against - 1 if against else None


def heldout_difference(row: Row, reference: Row) -> float | None:
    """Held-out loss of a row against that of another, as a share; None where one has none."""
    known = row.heldout_loss is not None and reference.heldout_loss
    return row.heldout_loss / reference.heldout_loss - 1 if known else None


def peak_gib(row: Row) -> float | None:
    """CUDA allocator's peak; on a CPU the peak of the whole process."""
    peak = row.peak_allocated_bytes or row.peak_rss_bytes
    return peak / GIB if peak else None


def speedup(row: Row, reference: Row) -> float:
    """How many times faster a row is than another."""
    return median_ms(reference) / median_ms(row)


def speedup_range(row: Row, reference: Row) -> tuple[float, float] | None:
    """The smallest and the largest ratio pass by pass; None where the rows have not the same passes."""
    after, before = passes_ms(row), passes_ms(reference)
    if not after or len(after) != len(before):
        return None
    ratios = [a / b for a, b in zip(before, after, strict=True)]
    return min(ratios), max(ratios)


def tells_apart(row: Row, other: Row) -> bool:
    """Whether all of one row's middle times, or of its passes, lie on one side of all of the other's."""
    (low, high), (other_low, other_high) = extent_ms(row), extent_ms(other)
    return high < other_low or low > other_high


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
        return max(0.0, min(profile.gpu_idle_ms, median_ms(row) - kernels_ms(profile)))
    return profile.gpu_idle_ms


def kernels_ms(profile: Profile) -> float:
    return sum(time.ms for time in profile.categories.values())


def category_ms(row: Row) -> dict[str, float] | None:
    """Milliseconds of a step by kernel category, gaps included; None without a profile."""
    return {name: time.ms for name, time in _categories(row).items()} if row.profile else None


def _categories(row: Row) -> dict[str, CategoryTime]:
    times = {name: row.profile.categories.get(name, CategoryTime()) for name in CATEGORIES}
    return times | {GAPS: CategoryTime(gaps_ms(row) or 0.0, None)}


# What has the largest share of a step, by the record's word for it. That other kernels are limited by memory is likely,
# but only counters show it.
MOSTLY = {"compute": "compute", "memory": "other kernels", "launch": "gaps", "communication": "communication"}


def bound(row: Row) -> tuple[str, float] | None:
    """What has the largest share of a step, in the record's word, and that share; None where that is not known."""
    by = row.profile and row.profile.bound_by
    return (by, (row.profile.shares or {}).get(by, 0.0)) if by in MOSTLY else None


def describe_bound(row: Row) -> str:
    """`compute 93%`, or a dash."""
    by, share = bound(row) or (None, 0)
    return f"{MOSTLY[by]} {share:.0%}" if by else "-"


def roof(row: Row, roofs: Roofs | None) -> tuple[str, float] | None:
    """The precision whose ceiling a row is held against, and that ceiling; None where it was not measured."""
    ceilings = roofs.ceilings if roofs else {}
    if row.settings.fp8_recipe:
        precision = "fp8"
    elif row.settings.amp_dtype in ("bfloat16", "float16"):
        precision = "bf16"
    else:
        exact = row.settings.float32_matmul_precision == "highest" or "tf32" not in ceilings
        precision = "fp32" if exact else "tf32"
    return (precision, ceilings[precision]) if ceilings.get(precision) else None


def products_rate(row: Row, run: Run) -> float | None:
    """FLOP/s of the weights' matrix products while they run, in the profiled step.

    None without a profile, and where attention is by hand: its products stand among the others.
    """
    ms = row.profile.categories.get("matrix products", CategoryTime()).ms if row.profile else 0.0
    if not ms or run.workload is None or row.settings.attention_kernel in (None, "by hand"):
        return None
    work = run.workload
    attention = 6 * work.n_layer * work.seq_len * work.n_embd * work.tokens_per_step
    return (work.flops_per_step - attention) / ms * 1e3


def products_share(row: Row, run: Run) -> float | None:
    """`products_rate` as a share of the ceiling in the row's precision; None where one of them is not known."""
    rate, measured = products_rate(row, run), roof(row, run.roofs)
    return rate / measured[1] if rate and measured else None


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


def changed_kernels(before: Row, after: Row) -> list[tuple[Change, list[str]]]:
    """Kernels of two profiled rows in plain words, largest change first, each with the names behind it."""
    names: dict[str, dict[str, None]] = {}
    sums = []
    for row in (before, after):
        total: dict[str, CategoryTime] = {}
        for kernel in row.profile.kernels:
            name = readable(kernel.name)
            names.setdefault(name, {})[kernel.name] = None
            own = total.setdefault(name, CategoryTime())
            own.ms, own.launches = own.ms + kernel.ms, own.launches + kernel.launches
        sums.append(total)
    return [(change, [*names[change.name]]) for change in _changes(*sums)]


def _changes(old: dict[str, CategoryTime], new: dict[str, CategoryTime]) -> list[Change]:
    pairs = [(name, old.get(name, CategoryTime()), new.get(name, CategoryTime())) for name in old | new]
    changes = [Change(name, a.ms, b.ms, a.launches, b.launches) for name, a, b in pairs]
    return sorted(changes, key=lambda change: -abs(change.ms))


def runs_same_optimizer(before: Row, after: Row) -> bool:
    """Whether two profiled rows were observed to run the same optimizer: its time then is no effect of a step."""
    observed = before.settings.optimizer
    return bool(before.profile and after.profile and observed and observed == after.settings.optimizer)


def unattributed(before: Row, after: Row) -> tuple[float, float] | None:
    """The times of an optimizer that both rows run alike, where they are far apart; None where nothing is odd."""
    if not runs_same_optimizer(before, after):
        return None
    a, b = (row.profile.categories.get("optimizer", CategoryTime()).ms for row in (before, after))
    apart = max(a, b) > LARGEST_OPTIMIZER_RATIO * min(a, b) and abs(a - b) >= 0.01 * median_ms(before)
    return (a, b) if apart else None


@dataclass
class AlikeProducts:
    """The matrix products that two steps run alike, at two clocks; and the speedup had they taken the same time."""

    before_ms: float
    after_ms: float
    before_mhz: float
    after_mhz: float
    speedup: float


def alike_products(before: Row, after: Row) -> AlikeProducts | None:
    """Where the same matrix products took another time because of the clock; None where that is not known."""
    if not (before.profile and after.profile):
        return None
    old, new = ({kernel.name: kernel for kernel in row.profile.kernels if kernel.category == "matrix products"}
                for row in (before, after))  # fmt: skip
    alike = [name for name in old if name in new and old[name].launches == new[name].launches]
    a, b = (sum(products[name].ms for name in alike) for products in (old, new))
    if not (a and b >= 0.1 * median_ms(after) and abs(b / a - 1) > 0.03 and before.clock_mhz and after.clock_mhz):
        return None
    change, by_clock = math.log(b / a), math.log(before.clock_mhz / after.clock_mhz)
    rest = median_ms(after) - (b - a)
    if change * by_clock <= 0 or abs(change) > MOST_OF_CLOCK * abs(by_clock) or rest <= 0:
        return None
    return AlikeProducts(a, b, before.clock_mhz, after.clock_mhz, median_ms(before) / rest)


def code_diff(before: Row, after: Row) -> list[tuple[str, str]] | None:
    """The code of two scripts as unified lines (sign, text), one unchanged line around each change, no docstring
    and no empty lines.

    A sign is `+`, `-`, a space, or `@` for lines left out, with the class or function that follows. None without
    sources, or for long ones.
    """
    if not before.source or not after.source:
        return None
    old, new = (_code(row.source) for row in (before, after))
    if max(len(old), len(new)) > LONGEST_SOURCE or max(map(len, [*old, *new, ""])) > 1000:
        return None
    lines: list[tuple[str, str]] = []
    place = ""
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(1):
        start, end = group[0][3], group[-1][4]
        above, within = _last_definition(new[:start]), _last_definition(new[start:end])
        if start:
            lines.append(("@", "" if within or above == place else above))
        place = within or above
        for what, a, b, c, d in group:
            lines += [(" " if what == "equal" else "-", line) for line in old[a:b] if line]
            lines += [("+", line) for line in new[c:d] if line and what != "equal"]
    return lines


def _last_definition(lines: list[str]) -> str:
    """The last class or function that begins in lines of code; empty without one."""
    return next((line.rstrip(":") for line in reversed(lines) if re.match(r"class |def ", line)), "")


def docstring(row: Row) -> str:
    """What a script says of itself in its first lines; empty without a source that can be read."""
    try:
        return ast.get_docstring(ast.parse(row.source or "")) or ""
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""


def _code(source: str) -> list[str]:
    """The lines of a script behind its docstring."""
    return re.sub(r'^\s*"""(.*?)"""\s*', "", source, count=1, flags=re.DOTALL).splitlines()
