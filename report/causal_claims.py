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
from statistics import fmean

from common.record import MERGED, Row
from report import analysis, parity
from report.analysis import is_timed
from report.causes import FOLDER, gain_ms
from report.doubts import LEGEND, MARK, Speedup, compared
from report.records import CPU, GPU, OF_SLICE, SLICE, Records
from report.table import markdown, ms_cell, percent, pipe_table

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


# --- figures --------------------------------------------------------------------------------------


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


def variant_ms(name: str) -> Measure:
    """How much longer a variant of the slice takes than its script, beyond the spread of both."""

    def measure(records: Records) -> Evidence:
        record = f"{FOLDER}/{SLICE}.json"
        variant = records.variants(record)[name]
        lost = gain_ms(variant, variant.baseline)
        if lost is None:
            raise KeyError(name)
        return Evidence(f"{name}: {lost:+.1f} ms", record, variant.timing.p25_ms > variant.baseline.timing.p75_ms)

    return measure


def removed_by_fused_attention(records: Records) -> Evidence:
    """What step 2 takes from attention, casts and pointwise kernels, beside the products of step 1."""
    figures, kinds = {}, ("attention", "copies and casts", POINTWISE)
    for name, (before, after) in records.rows("1_cublas", "2_sdpa").items():
        gone, products = total(before, *kinds) - total(after, *kinds), total(before, "matrix products")
        least, most = {SLICE: (0.75, 1), "wide-8192": (0, 0.5)}.get(name, (1, math.inf))  # as the sentence says
        figures[name] = f"{gone:.1f} ms, products {products:.1f}", least < gone / products < most
    return of_runs(figures)


def shrunk_most(records: Records) -> dict[str, analysis.Change]:
    """By run, the category that step 3 shrinks most."""
    pairs = records.rows("2_sdpa", "3_compile").items()
    return {name: min(analysis.changed_categories(*pair), key=lambda change: change.ms) for name, pair in pairs}


def largest_part(records: Records) -> Evidence:
    """The category that step 3 shrinks most, by run; the sentence holds where it is not the same in all."""
    largest = shrunk_most(records)
    said = each({name: f"{change.name} {change.ms:+.1f} ms" for name, change in largest.items()})
    return Evidence(said, f"*/{MERGED}", len({change.name for change in largest.values()}) > 1)


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


def capture_at_gpt2(records: Records) -> Evidence:
    """Step 3 of `gpt2` beside the same launched kernel by kernel, and beside the same captured but not compiled."""
    record = "gpt2/ablations.json"
    launched, plain = (records.variants(record)[name] for name in ("launched, step 3", "captured, not compiled"))
    if not (launched.ms and plain.ms and plain.baseline.ms):
        raise KeyError(record)
    overlap = launched.timing.p25_ms <= launched.baseline.timing.p75_ms
    longer = plain.ms / plain.baseline.ms
    text = f"{launched.baseline.ms:.1f} ms, launched {launched.ms:.1f}, captured but not compiled {plain.ms:.1f}"
    return Evidence(text, record, overlap and 1.28 < longer < 1.38)


def step_4_by_width(records: Records) -> Evidence:
    """Speedups of step 4 over step 3, narrowest workload first."""
    rows = sorted(records.rows("3_compile", "4_transformer_engine").items(),
                  key=lambda item: records.runs[item[0]].workload.n_embd)  # fmt: skip
    gains: dict[int, list[Speedup]] = {}
    for name, (before, after) in rows:
        if faster := compared(after, before, records.runs[name]):
            gains.setdefault(records.runs[name].workload.n_embd, []).append(faster)
    if len(gains) < 2:
        raise KeyError("several widths")
    text = each({f"{width} channels": ", ".join(one.cell(unit="") for one in of) for width, of in gains.items()})
    widths = [[one.ratio for one in of] for of in gains.values()]
    rises = all(max(a) < min(b) for a, b in itertools.pairwise(widths))
    return Evidence(f"times faster than step 3, {text}", f"*/{MERGED}", rises)


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


# --- figures of losses ----------------------------------------------------------------------------


def losses_of(records: Records, *names: str) -> list[list[float]]:
    """The training losses of some rows of the early run that has the peers."""
    run = records.runs["gpt2"]
    rows = {row.step: row.loss for row in (*run.steps, *run.peers)}
    return [rows[name] for name in names]


def peers_ended_higher(records: Records) -> Evidence:
    baseline, *peers = losses_of(records, "0_baseline", *PEERS)
    ends = [fmean(losses[-20:]) / fmean(baseline[-20:]) - 1 for losses in peers]
    text = each({name: percent(end) for name, end in zip(PEERS, ends, strict=True)})
    return Evidence(text, f"gpt2/{MERGED}", min(ends) > 0)


def at_105(records: Records, *rows: str) -> list[parity.Losses]:
    """The loss of rows of the study around step 105, where the early run ended, by seed."""
    found = [parity.by_seed(records.study(), row, parity.losses_until(105)) for row in rows]
    if any(len(losses) < parity.FEWEST_SEEDS for losses in found):
        raise KeyError("seeds")
    return found


STUDIED = f"parity/{parity.STUDY}"
IN_FP8, WITHOUT = ("4_transformer_engine", "peers/te_layer", "peers/torchao_float8"), "BF16 instead of FP8"


def fused_adamw(records: Records) -> Evidence:
    shares = parity.relative(*at_105(records, "fused AdamW, step 3", "3_compile"))
    return Evidence(
        f"by seed {', '.join(map(percent, shares.values()))}", STUDIED, max(map(abs, shares.values())) < 1e-3
    )


def range_of_seeds(records: Records) -> Evidence:
    (losses,) = at_105(records, "3_compile")
    least, most = min(losses.values()), max(losses.values())
    return Evidence(f"{least:.3f} to {most:.3f} nats, {percent(most / least - 1)}", STUDIED, most / least > 1.03)


def fp8_by_seed(records: Records) -> Evidence:
    """How far rows in FP8 are from step 3; of each, one seed has to be above it and one below."""
    shares = {row: parity.relative(*at_105(records, row, "3_compile")).values() for row in IN_FP8}
    text = each({row: ", ".join(map(percent, of)) for row, of in shares.items()})
    return Evidence(f"by seed, {text}", STUDIED, all(min(of) < -0.01 and max(of) > 0.01 for of in shares.values()))


def without_fp8(records: Records) -> Evidence:
    """How far rows without FP8, step 4 among them, and step 4 with it end from step 0, by seed."""
    study, losses = records.study(), parity.heldout_loss
    reference = parity.by_seed(study, "0_baseline", losses)
    far = {row: parity.apart(parity.by_seed(study, row, losses), reference).values() for row in parity.rows(study)}
    without, step_4 = far[WITHOUT], far[IN_FP8[0]]
    if min(len(without), len(step_4)) < parity.FEWEST_SEEDS:
        raise KeyError("seeds")
    most = max(abs(one) for row, of in far.items() if row not in IN_FP8 for one in of)
    text = each({row: ", ".join(f"{one:+.4f}" for one in far[row]) for row in (WITHOUT, IN_FP8[0])})
    fine = most <= 0.008 and max(map(abs, without)) <= 0.001 and f"{-min(step_4):.3f}" == "0.043"
    return Evidence(f"by seed, in nats, {text}; rows without FP8 at most {most:.4f}", STUDIED, fine)


# --- the claims -----------------------------------------------------------------------------------

MARKED = f"{LEGEND} in [performance](performance.md)."
CONSISTENT = "consistent, not shown"
PAGE, README, METHOD, PARITY = "docs/performance.md", "README.md", "docs/method.md", "docs/parity.md"
WITH_PEERS, PEERS = "h200-16f3e8d", ("te_layer", "torchao_float8", "transformers_gpt2")  # the early run


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
    Claim("2_sdpa.py", "Autocast no longer casts them to FP32 for softmax, and back.",
          change("1_cublas", "2_sdpa", "copies and casts"), shown=False),
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
    Claim(PAGE, "At gpt3-6.7b-slice (the slice, the workload of README's table), step 2 then saves nearly as much time "
          "in attention, casts and pointwise kernels as the products take. At wide-8192 it saves less than half as "
          "much, and at the other workloads of h200 more than the products take.", removed_by_fused_attention),
    Claim(PAGE, "At the slice, two thirds of the step are then matrix products.",
          share_of_products("2_sdpa", 0.63, SLICE)),
    Claim(PAGE, "At the slice AdamW is the largest part of what it gains, at gpt2-batch-8 the copies and casts are.",
          largest_at({SLICE: "optimizer", "gpt2-batch-8": "copies and casts"})),
    Claim(PAGE, "At gpt2 with batch 32 the capture of the compiled step gives nothing beyond the spread, and without "
          "compilation the captured step takes a third longer", capture_at_gpt2),
    Claim(PAGE, "steps 3 and 4 took the time that they took in another run, on another GPU, without that load.",
          busy_host, shown=False),
    Claim(PAGE, "Step 4 halves the time of the slice's matrix products",
          change("3_compile", "4_transformer_engine", "matrix products", names=(SLICE,), ratio=(0.45, 0.55))),
    Claim(PAGE, "and adds casts.",
          change("3_compile", "4_transformer_engine", "copies and casts", ratio=(1, math.inf))),
    Claim(PAGE, "Among these workloads step 4 gains more, the wider the model is;", step_4_by_width, shown=False),
    Claim(PAGE, "the casts cost more than the products save, and LayerNorm and GELU are no longer compiled: step 4 is "
          "slower than step 3.",
          change("3_compile", "4_transformer_engine", "matrix products", "copies and casts", names=("narrow-320",),
                 ratio=(1, math.inf))),
    Claim(PAGE, "The same products take longer in steps 2 and 3 of the slice than in step 1, at a lower clock that the "
          "power limit holds down.", power_limit),
    Claim(METHOD, "because a GPU lowers its clock until its power is within the limit", clock_under_load, shown=False),
    Claim(METHOD, "it runs faster at the same power limit.", zeros),
    Claim(METHOD, "On a shared machine a row can change by more from pass to pass than an optimization changes it.",
          passes_apart, CPU),
    Claim(PARITY, "In an early run of gpt2, with one seed and 105 steps, all three peers ended above step 0.",
          peers_ended_higher, WITH_PEERS),
    Claim(PARITY, "With PyTorch's fused AdamW in place of the compiled one, step 3 has the same loss after 105 steps, "
          "within a tenth of a per cent.", fused_adamw),
    Claim(PARITY, "After 105 steps, step 3's loss differs from seed to seed by more than the early run's peers in FP8 "
          "differed from step 0.", range_of_seeds),
    Claim(PARITY, "After 105 steps the rows in FP8 are below step 3 with one seed and above it with another.",
          fp8_by_seed),
    Claim(PARITY, "With the same seed, rows without FP8 end at most 0.008 nats from step 0, and step 4 without FP8 at "
          "most 0.001. Step 4 ends up to 0.043 below it.", without_fp8),
]  # fmt: skip


def claims_table(results: Path) -> str:
    """A row per claim: where it stands, its figure, the record, and whether the figure bears it out."""
    machines = {name: Records.read(results / name) for name in (GPU, CPU, WITH_PEERS)}
    cells = []
    for claim in CLAIMS:
        found = machines[claim.machine].measured(claim.measure)
        figure, record = (found.figure, f"{claim.machine}/{found.record}") if found else ("not measured", "-")
        agrees = "yes" if claim.shown else CONSISTENT
        verdict = "-" if found is None else agrees if found.holds else "no"
        cells.append((claim.sentence, claim.where, markdown(figure), markdown(record), verdict))
    table = pipe_table(("sentence", "stands in", "measured", "record", "holds"), cells, n_left=5)
    return f"{table}\n\n{MARKED}" if any(MARK in figure for _, _, figure, *_ in cells) else table
