"""The figures behind sentences that name a cause, each from the records of one machine, for docs/causes.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from common.record import MERGED, Row
from report import analysis, sweep
from report.analysis import is_timed
from report.causes import FOLDER, Causes, Measured, scripts
from report.doubts import Speedup, compared
from report.records import OF_SLICE, SLICE, Records
from report.table import ms_cell, percent

POINTWISE = "normalization and pointwise"


@dataclass
class Evidence:
    figure: str
    record: str  # below the machine's folder
    holds: bool  # whether the figure bears the sentence out


Measure = Callable[[Records], Evidence]  # raises KeyError where a record lacks


def each(values: dict[str, str]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in values.items())


def of_runs(figures: dict[str, tuple[str, bool]], record: str = f"*/{MERGED}") -> Evidence:
    """One figure a run; the sentence holds where it holds for every run."""
    if not figures:
        raise KeyError(record)
    said = each({name: text for name, (text, _) in figures.items()})
    return Evidence(said, record, all(holds for _, holds in figures.values()))


def total(row: Row, *categories: str) -> float:
    return sum(analysis.category_ms(row)[name] for name in categories)


def share_of_products(step: str, least: float, *names: str) -> Measure:
    """The share of matrix products in a step's profile, of which they have to be the largest part."""

    def measure(records: Records) -> Evidence:
        figures = {}
        for name, (row,) in records.rows(step, of=names).items():
            times, share = analysis.category_ms(row), total(row, "matrix products") / row.profile.step_ms
            largest = max(times, key=times.get) == "matrix products"
            figures[name] = f"{share:.0%} of the step", largest and share >= least
        return of_runs(figures)

    return measure


def change(before: str, after: str, *categories: str, names: tuple[str, ...] = (), ratio: tuple = (0, 1)) -> Measure:
    """The times of some categories, added up, in two steps; the second over the first has to lie within `ratio`.

    The end of a ratio that has no upper end is math.inf.
    """
    least, most = ratio

    def measure(records: Records) -> Evidence:
        figures = {}
        for name, rows in records.rows(before, after, of=names).items():
            a, b = (total(row, *categories) for row in rows)
            figures[name] = f"{a:.1f} to {b:.1f} ms", least * a < b and (most == math.inf or b < most * a)
        return of_runs(figures)

    return measure


def ceilings(fast: str, slow: str, least: float, most: float) -> Measure:
    """The ceilings of two precisions."""

    def measure(records: Records) -> Evidence:
        a, b = (records.roofs().ceilings[name] / 1e12 for name in (fast, slow))
        text = f"{a:,.0f} TFLOP/s in {fast.upper()}, {b:,.0f} in {slow.upper()}: {a / b:.1f} times"
        return Evidence(text, OF_SLICE, least <= a / b <= most)

    return measure


def attention_bytes(records: Records) -> Evidence:
    by_hand, fused = records.attention_bytes()
    text = f"{by_hand / 1e9:.1f} GB by hand, {fused / 1e9:.2f} fused"
    return Evidence(text, "attention-traffic.json", fused < by_hand / 5)


def left_by_tensor_cores(records: Records) -> Evidence:
    """What step 1 of the slice spends beside its products, and how much of it step 2 removes."""
    before, after = (analysis.category_ms(row) for row in records.rows("1_cublas", "2_sdpa", of=(SLICE,))[SLICE])
    rest = [sum(ms for name, ms in times.items() if name != "matrix products") for times in (before, after)]
    share = 1 - rest[1] / rest[0]
    text = f"{rest[0]:.0f} ms beside the products, {rest[1]:.0f} in step 2, {share:.0%} less"
    return Evidence(text, OF_SLICE, rest[0] > before["matrix products"] and 0.62 < share < 0.71)


def shrunk_most(records: Records) -> dict[str, analysis.Change]:
    """By run, the category that step 3 shrinks most."""
    pairs = records.rows("2_sdpa", "3_compile").items()
    return {name: min(analysis.changed_categories(*pair), key=lambda change: change.ms) for name, pair in pairs}


def largest_at(expected: dict[str, str]) -> Measure:
    """The category that step 3 shrinks most, beside the expected one of each run."""

    def measure(records: Records) -> Evidence:
        largest, figures = shrunk_most(records), {}
        for name, category in expected.items():
            found = largest[name]
            text = f"{found.name} {found.before_ms:.1f} to {found.after_ms:.1f} ms"
            figures[name] = text, found.name == category
        return of_runs(figures)

    return measure


def busy_host(records: Records) -> Evidence:
    alone, busy = (records.runs[f"gpt2-batch-8{end}"] for end in ("", "-busy-host"))
    rows, figures = {row.step: row for row in alone.steps if is_timed(row)}, {}
    for row in filter(is_timed, busy.steps):
        if other := rows.get(row.step):
            text = f"{ms_cell(other, alone)} ms alone, {ms_cell(row, busy)} beside them"
            figures[row.step] = text, abs(analysis.median_ms(row) / analysis.median_ms(other) - 1) < 0.03
    return of_runs(figures, f"gpt2-batch-8*/{MERGED}")


def step_4_by_width(records: Records) -> Evidence:
    """Speedups of step 4 over step 3, narrowest workload first: they have to rise with the width, and to be below 1 at
    320 channels alone."""
    gains: dict[int, list[Speedup]] = {}
    for name, rows in records.rows("3_compile", "4_transformer_engine").items():
        if faster := compared(*reversed(rows), records.runs[name]):
            gains.setdefault(records.runs[name].workload.n_embd, []).append(faster)
    if len(gains) < 2:
        raise KeyError("several widths")
    gains = dict(sorted(gains.items()))
    text = each({f"{width} channels": ", ".join(one.cell(unit="") for one in of) for width, of in gains.items()})
    widths = [[one.ratio for one in of] for of in gains.values()]
    rises = all(max(a) < min(b) for a, b in itertools.pairwise(widths))
    slower = [width for width, of in gains.items() if min(one.ratio for one in of) < 1]
    return Evidence(f"times faster than 3_compile, {text}", f"*/{MERGED}", rises and slower == [320])


def in_sweep(before: str, after: str, along: str, rises: bool = True, ends: tuple[int, int] | None = None) -> Measure:
    """Speedups of a step over the one before in the sweep. They have to rise, or fall, with the width (`along` n_embd)
    at each number of tokens and length, or with the length (seq_len) at each width. `ends`: a width at which all are
    below 1, and one from which on all are above 1; between them they rise with the tokens of a training step."""

    def measure(records: Records) -> Evidence:
        lines = sweep.ratios(records.sweep(), before, after, along)
        sizes = sorted({size for line in lines for size in line})
        at = {size: [value for line in lines for value in line.get(size, [])] for size in sizes}
        holds = sweep.trend(lines) == (1 if rises else -1)
        if ends:
            below, above = ends
            between = [value for size in sizes if below < size < above for value in at[size]]
            wide = [value for size in sizes if size >= above for value in at[size]]
            holds = holds and max(at[below]) < 1 < min(wide) and between == sorted(between)
        unit = {"n_embd": "{} channels", "seq_len": "T {}"}[along]
        text = each({unit.format(size): f"{min(of):.2f} to {max(of):.2f}" for size, of in at.items()})
        return Evidence(f"times faster than {before}, {text}", sweep.SWEEP, holds)

    return measure


def power_limit(records: Records) -> Evidence:
    figures = {}
    for before, after in (("1_cublas", "2_sdpa"), ("2_sdpa", "3_compile")):
        pair = records.rows(before, after, of=(SLICE,))[SLICE]
        if alike := analysis.alike_products(*pair):
            text = (f"{alike.before_ms:.1f} to {alike.after_ms:.1f} ms, "
                    f"{alike.before_mhz:.0f} to {alike.after_mhz:.0f} MHz")  # fmt: skip
            held = "power limit" in analysis.throttle_reasons(pair[1])
            figures[after] = text + (", power limit" if held else ""), held and alike.after_mhz < alike.before_mhz
    return of_runs(figures, OF_SLICE)


def clock_under_load(records: Records) -> Evidence:
    at = records.roofs().conditions["bf16"]
    if not (at.clock_mhz and at.ceiling_clock_mhz):
        raise KeyError("clock")
    text = f"BF16 products: {at.clock_mhz:.0f} MHz at {at.power_w:.0f} W, {at.ceiling_clock_mhz:.0f} MHz in bursts"
    return Evidence(text, OF_SLICE, at.clock_mhz < at.ceiling_clock_mhz)


def zeros(records: Records) -> Evidence:
    roofs = records.roofs()
    if not (roofs.zeros and roofs.square and roofs.zeros.bf16_flops_per_s):
        raise KeyError("zeros")
    a, b = (rates.bf16_flops_per_s / 1e12 for rates in (roofs.zeros, roofs.square))
    return Evidence(f"{a:.0f} TFLOP/s of zeros, {b:.0f} of random numbers, BF16", OF_SLICE, a > b)


def losses_apart(records: Records) -> Evidence:
    """The largest difference of a run's mean loss to its first row."""
    figures = {}
    for name, run in records.runs.items():
        rows = [*filter(is_timed, run.steps)]
        if rows[1:]:
            largest = max((analysis.loss_difference(row, rows[0]) for row in rows[1:]), key=abs)
            figures[name] = percent(largest), largest != 0
    return of_runs(figures)


def passes_apart(records: Records) -> Evidence:
    """The range of a step's passes on a shared CPU, against what an optimization gains there."""
    run = records.runs["tiny"]
    rows = {row.step: row for row in filter(is_timed, run.steps)}
    gain = compared(rows["3_compile"], rows["2_sdpa"], run)
    if gain is None:
        raise KeyError("3_compile")
    least, most = analysis.extent_ms(rows["0_baseline"])
    passes = f"0_baseline {least:.0f} to {most:.0f} ms from pass to pass, {most / least:.2f} times"
    return Evidence(f"{passes}; step 3 gains {gain.cell(unit='')}", f"tiny/{MERGED}", most / least > gain.ratio)


# --- figures of causes ----------------------------------------------------------------------------

AT = (SLICE, "gpt2")  # the workloads of which all steps were taken apart


def of_causes(figure: Callable[[Causes, str], tuple[str, bool]], names: tuple[str, ...] = AT) -> Measure:
    """A figure of the causes of each workload, made of these and its name."""

    def measure(records: Records) -> Evidence:
        return of_runs({name: figure(records.causes(name), name) for name in names}, f"{FOLDER}/*.json")

    return measure


def measured(causes: Causes, name: str) -> Measured:
    """A script or a variant by its name. Raises KeyError where it has no time."""
    found = scripts(causes).get(name) or {variant.name: variant for variant in causes.variants}[name]
    if found.ms is None:
        raise KeyError(name)
    return found


def saved_ms(causes: Causes, before: str, after: str) -> float:
    """Milliseconds that the second of two scripts or variants takes less than the first."""
    return measured(causes, before).ms - measured(causes, after).ms


def tf32_and_bf16(causes: Causes, name: str) -> tuple[str, bool]:
    """What BF16 alone and TF32 alone save of what step 1 saves, and how long a step in TF32 takes beside BF16's."""
    whole = saved_ms(causes, "0_baseline", "1_cublas")
    bf16, tf32 = (saved_ms(causes, "0_baseline", one) / whole for one in ("BF16 alone", "TF32 alone"))
    times = measured(causes, "TF32 alone").ms / measured(causes, "BF16 alone").ms
    text = f"BF16 alone saves {bf16:.0%} of it, TF32 alone {tf32:.0%}; TF32 takes {times:.2f} times as long as BF16"
    as_said = 0.85 < tf32 < 0.95 and f"{times:.1f}" == {SLICE: "1.6", "gpt2": "1.2"}[name]
    return text, abs(1 - bf16) < 0.01 and as_said


def casts_of_autocast(causes: Causes, _: str) -> tuple[str, bool]:
    before, after = (analysis.category_ms(measured(causes, step).row)["copies and casts"]
                     for step in ("0_baseline", "1_cublas"))  # fmt: skip
    return f"copies and casts {before:.1f} to {after:.1f} ms", f"{after - before:.0f}" in ("60", "61")


def masked_half(causes: Causes, _: str) -> tuple[str, bool]:
    """What the masked half costs in step 2, where it is computed and then masked."""
    whole = saved_ms(causes, "1_cublas", "2_sdpa")
    variants = ("attention without its mask", "FlashAttention's kernel")
    mask, kernel = (saved_ms(causes, one, "2_sdpa") for one in variants)
    text = f"of {whole:.1f} ms the masked half {mask:.1f}, cuDNN's kernel instead of FlashAttention's {kernel:.1f}"
    return text, all(0 < part < 0.1 * whole for part in (mask, kernel))


def casts_and_pointwise_of_step_2(causes: Causes, _: str) -> tuple[str, bool]:
    """The share of step 2's profiled gain that casts and pointwise kernels have."""
    before, after = (analysis.category_ms(measured(causes, step).row) for step in ("1_cublas", "2_sdpa"))
    saved = {name: before[name] - after[name] for name in before}
    share = (saved["copies and casts"] + saved[POINTWISE]) / sum(saved.values())
    return f"{share:.0%} of what it saves", 0.75 < share < 0.9


def parts_of_step_3(causes: Causes, name: str) -> tuple[str, bool]:
    """What AdamW and the compiled model each save where the other is there already, all launched kernel by kernel."""
    adamw = saved_ms(causes, "compiled model, step 2", "launched, step 3")
    model = saved_ms(causes, "fused AdamW, step 2", "launched, step 3")
    fine = 0.9 < adamw / model < 1.1 if name == SLICE else 0 < adamw < 0.1 * model
    return f"AdamW saves {adamw:.1f} ms, the compiled model {model:.1f}", fine


def capture_alone(causes: Causes, _: str) -> tuple[str, bool]:
    """Step 3 launched and captured: whether their times overlap."""
    launched, captured = rows = [measured(causes, name).row for name in ("launched, step 3", "3_compile")]
    gaps = [row.profile and row.profile.gpu_idle_ms for row in rows]
    if None in gaps:
        raise KeyError("gaps")
    gain = analysis.median_ms(launched) - analysis.median_ms(captured)
    text = f"the graph saves {gain:.1f} ms, gaps of {gaps[0]:.2f} ms become {gaps[1]:.2f}"
    return text, not analysis.tells_apart(launched, captured) and gaps[1] < gaps[0]


def kernels_of_capture(causes: Causes, _: str) -> tuple[str, bool]:
    """Kernels of a step with the compiled model and PyTorch's own AdamW: launched, and captured."""
    rows = (measured(causes, name).profile for name in ("compiled model, step 2", "compile without its optimizer"))
    launched, captured = (profile.kernels_per_step if profile else 0 for profile in rows)
    if not (launched and captured):
        raise KeyError("kernels")
    return f"{launched:.0f} kernels launched, {captured:.0f} captured", captured > launched


def alone_in_step_3(causes: Causes, name: str) -> tuple[str, bool]:
    """The shares of step 3's gain that the compiled model and PyTorch's fused AdamW give alone."""
    whole = saved_ms(causes, "2_sdpa", "3_compile")
    variants = ("compiled model, step 2", "fused AdamW, step 2")
    model, adamw = (saved_ms(causes, "2_sdpa", one) / whole for one in variants)
    as_said = 0.45 < min(model, adamw) <= max(model, adamw) < 0.55 if name == SLICE else model > 0.88 and adamw < 0.1
    return f"the compiled model alone {model:.0%} of the gain, fused AdamW alone {adamw:.0%}", as_said


def bf16_in_step_4(causes: Causes, _: str) -> tuple[str, bool]:
    """Step 4 without FP8 beside step 3: no faster, unless by less than the spread."""
    gain = saved_ms(causes, "3_compile", "BF16 instead of FP8")
    whole = saved_ms(causes, "3_compile", "4_transformer_engine")
    text = f"in BF16 it saves {gain:.1f} ms of step 3's time, in FP8 {whole:.1f}"
    rows = (measured(causes, name).row for name in ("3_compile", "BF16 instead of FP8"))
    return text, gain <= 0 or not analysis.tells_apart(*rows)


def head_in_fp8(causes: Causes, name: str) -> tuple[str, bool]:
    """The share of what FP8 saves in step 4 that its head saves."""
    whole = saved_ms(causes, "BF16 instead of FP8", "4_transformer_engine")
    head = saved_ms(causes, "BF16 head", "4_transformer_engine")
    least, most = {SLICE: (1 / 8, 1 / 6), "gpt2": (0.22, 0.29), "gpt3-xl": (1 / 14, 1 / 11)}[name]  # as is said
    return f"{head:.1f} of {whole:.1f} ms", least < head / whole < most
