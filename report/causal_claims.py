"""Every sentence that names a cause, with the figure behind it and its record: docs/causes.md.

A sentence stands here as it stands in its file. Its figure is computed from the records of one machine. Where they
lack it, the page says "not measured".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.record import Roofs, Row, Run
from report import analysis
from report.causes import FOLDER, gain_ms, read_causes
from report.doubts import LEGEND, MARK, Speedup, compared
from report.load import MERGED, ROOFS, convert, read_json, read_run
from report.table import markdown, ms_cell, percent, pipe_table

SLICE = "gpt3-6.7b-slice"
POINTWISE = "normalization and pointwise"


@dataclass
class Evidence:
    figure: str
    record: str  # below the machine's folder
    holds: bool  # whether the figure bears the sentence out


class Records:
    """The runs of one machine's folder by name, and its other records."""

    def __init__(self, machine: Path):
        self.machine = machine
        self.runs = {path.parent.name: read_run(path) for path in sorted(machine.glob(f"*/{MERGED}"))}

    def row(self, name: str, step: str) -> Row | None:
        """A profiled row of a run, or None."""
        rows = self.runs[name].steps if name in self.runs else []
        return next((row for row in rows if row.step == step and row.profile and analysis.is_timed(row)), None)

    def rows(self, *steps: str) -> dict[str, tuple[Row, ...]]:
        """By run, the rows of these steps where it has them all."""
        found = {name: tuple(self.row(name, step) for step in steps) for name in self.runs}
        return {name: rows for name, rows in found.items() if None not in rows}

    def roofs(self) -> Roofs | None:
        path = self.machine / ROOFS
        return convert(read_json(path), Roofs, ROOFS) if path.exists() else None


Measure = Callable[[Records], Evidence | None]


def each(values: dict[str, str]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in values.items())


def of_runs(figures: dict[str, tuple[str, bool]]) -> Evidence | None:
    """One figure a run; the sentence holds where it holds for every run."""
    if not figures:
        return None
    return Evidence(each({name: text for name, (text, _) in figures.items()}), f"*/{MERGED}",
                    all(holds for _, holds in figures.values()))  # fmt: skip


def total(row: Row, *categories: str) -> float:
    return sum(analysis.category_ms(row)[name] for name in categories)


# --- figures --------------------------------------------------------------------------------------


def share_of_products(step: str, least: float, *names: str) -> Measure:
    """The share of matrix products in a step's profile, of which they have to be the largest part."""

    def measure(records: Records) -> Evidence | None:
        figures = {}
        for name, (row,) in records.rows(step).items():
            if name in (names or records.runs):
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

    def measure(records: Records) -> Evidence | None:
        figures = {}
        for name, rows in records.rows(before, after).items():
            if name in (names or records.runs):
                a, b = (total(row, *categories) for row in rows)
                figures[name] = f"{a:.1f} to {b:.1f} ms", least * a < b and (most == math.inf or b < most * a)
        return of_runs(figures)

    return measure


def ceilings(fast: str, slow: str, least: float, most: float) -> Measure:
    """The ceilings of two precisions."""

    def measure(records: Records) -> Evidence | None:
        roofs = records.roofs()
        if roofs is None or not {fast, slow} <= roofs.ceilings.keys():
            return None
        a, b = (roofs.ceilings[name] / 1e12 for name in (fast, slow))
        text = f"{a:,.0f} TFLOP/s in {fast.upper()}, {b:,.0f} in {slow.upper()}: {a / b:.1f} times"
        return Evidence(text, ROOFS, least <= a / b <= most)

    return measure


def attention_bytes(records: Records) -> Evidence | None:
    path = records.machine / "attention-traffic.json"
    if not path.exists():
        return None
    by_hand, fused = (read_json(path)["bytes"][kind]["counters"] for kind in ("by hand", "fused"))
    if not (by_hand and fused):
        return None
    return Evidence(f"{by_hand / 1e9:.1f} GB by hand, {fused / 1e9:.2f} fused", path.name, fused < by_hand / 5)


def variant_ms(variant: str) -> Measure:
    """How much longer a variant of the slice takes than its script, beyond the spread of both."""

    def measure(records: Records) -> Evidence | None:
        path = records.machine / FOLDER / f"{SLICE}.json"
        named = [v for v in read_causes(path).variants if v.name == variant] if path.exists() else []
        lost = gain_ms(named[0], named[0].baseline) if named else None
        if lost is None:
            return None
        apart = named[0].timing.p25_ms > named[0].baseline.timing.p75_ms
        return Evidence(f"{variant}: {lost:+.1f} ms", f"{FOLDER}/{path.name}", apart)

    return measure


def removed_by_fused_attention(records: Records) -> Evidence | None:
    """What step 2 takes from attention, casts and pointwise kernels, beside the products of step 1."""
    figures, kinds = {}, ("copies and casts", POINTWISE)
    for name, (before, after) in records.rows("1_cublas", "2_sdpa").items():
        gone = total(before, "attention", *kinds) - total(after, "attention", *kinds)
        products = total(before, "matrix products")
        least, most = {SLICE: (0.75, 1), "wide-8192": (0, 0.5)}.get(name, (1, math.inf))  # as the sentence says
        figures[name] = f"{gone:.1f} ms, products {products:.1f}", least < gone / products < most
    return of_runs(figures)


def largest_part(records: Records) -> Evidence | None:
    """The category that step 3 shrinks most, by run; the sentence holds where it is not the same in all."""
    largest = {}
    for name, (before, after) in records.rows("2_sdpa", "3_compile").items():
        least = min(analysis.changed_categories(before, after), key=lambda change: change.ms)
        largest[name] = f"{least.name} {least.ms:+.1f} ms"
    differ = len({text.rpartition(" ms")[0].rpartition(" ")[0] for text in largest.values()}) > 1
    return Evidence(each(largest), f"*/{MERGED}", differ) if largest else None


def largest_at(*expected: tuple[str, str]) -> Measure:
    """The category that step 3 shrinks most, of some runs."""

    def measure(records: Records) -> Evidence | None:
        figures, rows = {}, records.rows("2_sdpa", "3_compile")
        for name, category in expected:
            if name not in rows:
                return None
            least = min(analysis.changed_categories(*rows[name]), key=lambda change: change.ms)
            figures[name] = f"{least.name} {least.before_ms:.1f} to {least.after_ms:.1f} ms", least.name == category
        return of_runs(figures)

    return measure


def busy_host(records: Records) -> Evidence | None:
    alone, busy = (records.runs.get(f"gpt2-batch-8{end}") for end in ("", "-busy-host"))
    figures = {}
    for row in busy.steps if alone and busy else []:
        other = next((r for r in alone.steps if r.step == row.step), None)
        if other and analysis.is_timed(row) and analysis.is_timed(other):
            a, b = analysis.median_ms(other), analysis.median_ms(row)
            text = f"{ms_cell(other, alone)} ms alone, {ms_cell(row, busy)} beside them"
            figures[row.step] = text, abs(b / a - 1) < 0.03
    found = of_runs(figures)
    return found and Evidence(found.figure, f"gpt2-batch-8*/{MERGED}", found.holds)


def capture_at_gpt2(records: Records) -> Evidence | None:
    """Step 3 of `gpt2` beside the same launched kernel by kernel, and beside the same captured but not compiled."""
    path = records.machine / "gpt2" / "ablations.json"
    named = {variant.name: variant for variant in read_causes(path).variants} if path.exists() else {}
    launched, plain = named.get("launched, step 3"), named.get("captured, not compiled")
    if not (launched and plain and launched.ms and plain.ms and plain.baseline.ms):
        return None
    overlap = launched.timing.p25_ms <= launched.baseline.timing.p75_ms
    longer = plain.ms / plain.baseline.ms
    text = f"{launched.baseline.ms:.1f} ms, launched {launched.ms:.1f}, captured but not compiled {plain.ms:.1f}"
    return Evidence(text, f"gpt2/{path.name}", overlap and 1.28 < longer < 1.38)


def step_4_by_width(records: Records) -> Evidence | None:
    """Speedups of step 4 over step 3, narrowest workload first."""
    rows = sorted(records.rows("3_compile", "4_transformer_engine").items(),
                  key=lambda item: records.runs[item[0]].workload.n_embd)  # fmt: skip
    gains: dict[int, list[Speedup]] = {}
    for name, (before, after) in rows:
        if faster := compared(after, before, records.runs[name]):
            gains.setdefault(records.runs[name].workload.n_embd, []).append(faster)
    text = each({f"{width} channels": ", ".join(one.cell(unit="") for one in of) for width, of in gains.items()})
    widths = [[one.ratio for one in of] for of in gains.values()]
    rises = all(max(a) < min(b) for a, b in itertools.pairwise(widths))
    return Evidence(f"times faster than step 3, {text}", f"*/{MERGED}", rises) if len(gains) > 1 else None


def power_limit(records: Records) -> Evidence | None:
    figures = {}
    for before, after in (("1_cublas", "2_sdpa"), ("2_sdpa", "3_compile")):
        pair = records.rows(before, after).get(SLICE)
        alike = pair and analysis.alike_products(*pair)
        if alike:
            text = (f"{alike.before_ms:.1f} to {alike.after_ms:.1f} ms, "
                    f"{alike.before_mhz:.0f} to {alike.after_mhz:.0f} MHz")  # fmt: skip
            held = "power limit" in analysis.throttle_reasons(pair[1])
            figures[after] = text + (", power limit" if held else ""), held and alike.after_mhz < alike.before_mhz
    found = of_runs(figures)
    return found and Evidence(found.figure, f"{SLICE}/{MERGED}", found.holds)


def clock_under_load(records: Records) -> Evidence | None:
    roofs = records.roofs()
    at = roofs.conditions.get("bf16") if roofs else None
    if at is None or not (at.clock_mhz and at.ceiling_clock_mhz):
        return None
    text = f"BF16 products: {at.clock_mhz:.0f} MHz at {at.power_w:.0f} W, {at.ceiling_clock_mhz:.0f} MHz in bursts"
    return Evidence(text, ROOFS, at.clock_mhz < at.ceiling_clock_mhz)


def zeros(records: Records) -> Evidence | None:
    roofs = records.roofs()
    if roofs is None or roofs.zeros is None or roofs.square is None or not roofs.zeros.bf16_flops_per_s:
        return None
    a, b = (rates.bf16_flops_per_s / 1e12 for rates in (roofs.zeros, roofs.square))
    return Evidence(f"{a:.0f} TFLOP/s of zeros, {b:.0f} of random numbers, BF16", ROOFS, a > b)


def losses_apart(records: Records) -> Evidence | None:
    """The largest difference of a run's mean loss to its first row."""
    figures = {}
    for name, run in records.runs.items():
        rows = [row for row in run.steps if analysis.is_timed(row)]
        apart = [analysis.loss_difference(row, rows[0]) for row in rows[1:]]
        if apart:
            largest = max(apart, key=abs)
            figures[name] = percent(largest), largest != 0
    return of_runs(figures)


def passes_apart(records: Records) -> Evidence | None:
    """The range of a step's passes on a shared CPU, against what an optimization gains there."""
    run: Run | None = records.runs.get("tiny")
    rows = {row.step: row for row in run.steps if analysis.is_timed(row)} if run else {}
    gain = (
        compared(rows.get("3_compile"), rows.get("2_sdpa"), run) if {"0_baseline", "3_compile"} <= rows.keys() else None
    )
    if gain is None:
        return None
    least, most = analysis.extent_ms(rows["0_baseline"])
    passes = f"0_baseline {least:.0f} to {most:.0f} ms from pass to pass, {most / least:.2f} times"
    return Evidence(f"{passes}; step 3 gains {gain.ratio:.2f}{gain.mark}", f"tiny/{MERGED}", most / least > gain.ratio)


# --- the claims -----------------------------------------------------------------------------------

MARKED = f"{LEGEND} in [performance](performance.md)."
CONSISTENT = "consistent, not shown"
PAGE, README, METHOD, GPU, CPU = "docs/performance.md", "README.md", "docs/method.md", "h200", "epyc-2-cores"


@dataclass(frozen=True)
class Claim:
    where: str
    sentence: str
    measure: Measure
    machine: str = GPU
    shown: bool = True  # False: the figure agrees with the sentence, but another cause would give it as well


CLAIMS = [
    Claim("1_cublas.py", "FP32 arithmetic bounds the baseline.", share_of_products("0_baseline", 0.5), shown=False),
    Claim("1_cublas.py", "Tensor cores multiply many times faster.", ceilings("bf16", "fp32", 5, 100)),
    Claim("2_sdpa.py", "attention by hand wrote the (T, T) scores to DRAM and read them several times.",
          attention_bytes),
    Claim("2_sdpa.py", "Fused, they stay on the chip,", attention_bytes),
    Claim("2_sdpa.py", "and the half that the mask hid is not computed.",
          variant_ms("attention without its mask")),
    Claim("3_compile.py", "AdamW and these operations read and wrote the same tensors several times.",
          change("2_sdpa", "3_compile", "optimizer", "copies and casts", POINTWISE), shown=False),
    Claim("3_compile.py", "The host launched every kernel; with a captured graph it launches once a step.",
          variant_ms("launched, step 3")),
    Claim("3_compile.py", "Which of the three gains most depends on the model and the host", largest_part, shown=False),
    Claim("4_transformer_engine.py", "BF16 products are the largest part of the compiled step.",
          share_of_products("3_compile", 0)),
    Claim("4_transformer_engine.py", "FP8 tensor cores are nearly twice as fast.", ceilings("fp8", "bf16", 1.7, 2)),
    Claim(README, "attention as one fused kernel: the (T, T) scores stay on the chip", attention_bytes),
    Claim(README, "so few steps learn little, and another rounding alone can change their mean loss.", losses_apart,
          shown=False),
    Claim(PAGE, "seven tenths of its time, or more, are matrix products.", share_of_products("0_baseline", 0.7)),
    Claim(PAGE, "What step 2 then takes away from attention, casts and pointwise kernels is nearly as much time as the "
          "products take at gpt3-6.7b-slice (the slice, the workload of README's table), less than half as much at "
          "wide-8192, and more at the other workloads of h200.", removed_by_fused_attention),
    Claim(PAGE, "At the slice, two thirds of the step are then matrix products.",
          share_of_products("2_sdpa", 0.63, SLICE)),
    Claim(PAGE, "At the slice AdamW is the largest part of what it gains, at gpt2-batch-8 the copies and casts are.",
          largest_at((SLICE, "optimizer"), ("gpt2-batch-8", "copies and casts"))),
    Claim(PAGE, "At gpt2 with batch 32 the capture of the compiled step gives nothing beyond the spread, and without "
          "compilation the captured step takes a third longer", capture_at_gpt2),
    Claim(PAGE, "steps 3 and 4 take the time that they take alone.", busy_host),
    Claim(PAGE, "Step 4 halves the time of the slice's matrix products",
          change("3_compile", "4_transformer_engine", "matrix products", names=(SLICE,), ratio=(0.45, 0.55))),
    Claim(PAGE, "and adds casts.",
          change("3_compile", "4_transformer_engine", "copies and casts", ratio=(1, math.inf))),
    Claim(PAGE, "The wider the model, the more step 4 gains.", step_4_by_width),
    Claim(PAGE, "the casts cost more than the products save: step 4 is slower than step 3.",
          change("3_compile", "4_transformer_engine", "matrix products", "copies and casts", names=("narrow-320",),
                 ratio=(1, math.inf))),
    Claim(PAGE, "The same products take longer in steps 2 and 3 of the slice than in step 1, at a lower clock that the "
          "power limit holds down.", power_limit),
    Claim(METHOD, "because a GPU lowers its clock until its power is within the limit", clock_under_load, shown=False),
    Claim(METHOD, "it runs faster at the same power limit.", zeros),
    Claim(METHOD, "On a shared machine a row can change by more from pass to pass than an optimization changes it.",
          passes_apart, CPU),
]  # fmt: skip


def claims_table(results: Path) -> str:
    """A row per claim: where it stands, its figure, the record, and whether the figure bears it out."""
    machines = {name: Records(results / name) for name in (GPU, CPU)}
    cells = []
    for claim in CLAIMS:
        found = claim.measure(machines[claim.machine])
        figure, record = (found.figure, f"{claim.machine}/{found.record}") if found else ("not measured", "-")
        agrees = "yes" if claim.shown else CONSISTENT
        verdict = "-" if found is None else agrees if found.holds else "no"
        cells.append((claim.sentence, claim.where, markdown(figure), markdown(record), verdict))
    table = pipe_table(("sentence", "stands in", "measured", "record", "holds"), cells, n_left=5)
    return f"{table}\n\n{MARKED}" if any(MARK in figure for _, _, figure, *_ in cells) else table
