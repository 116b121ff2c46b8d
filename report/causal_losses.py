"""The figures behind sentences on what rows learn, from the studies of losses and an early run, for docs/causes.md."""

from __future__ import annotations

from statistics import fmean

from common.record import MERGED
from report import analysis, parity
from report.causal_figures import Evidence, each
from report.records import Records
from report.table import percent

STUDIED, REPEATED = f"parity/{parity.STUDY}", f"repeat-without-fp8/{parity.STUDY}"
PEERS = ("te_layer", "torchao_float8", "transformers_gpt2")
IN_FP8, WITHOUT = ("4_transformer_engine", "peers/te_layer", "peers/torchao_float8"), "BF16 instead of FP8"
LAST_NORM = "final LayerNorm in BF16, step 2"


def peers_ended_higher(records: Records) -> Evidence:
    """How far the peers of the early run ended from step 0."""
    run = records.runs["gpt2"]
    ends = {row.step: analysis.mean_loss(row) for row in (*run.steps, *run.peers)}
    above = {name: ends[name] / ends["0_baseline"] - 1 for name in PEERS}
    text = each({name: percent(end) for name, end in above.items()})
    return Evidence(text, f"gpt2/{MERGED}", min(above.values()) > 0)


def at_105(records: Records, *rows: str) -> list[parity.Losses]:
    """The loss of rows of the study around step 105, where the early run ended, by seed."""
    found = [parity.by_seed(records.study(), row, parity.losses_until(105)) for row in rows]
    if any(len(losses) < parity.FEWEST_SEEDS for losses in found):
        raise KeyError("seeds")
    return found


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
    fine = most <= 0.008 and max(map(abs, without)) <= 0.003 and f"{-min(step_4):.3f}" == "0.043"
    return Evidence(f"by seed, in nats, {text}; rows without FP8 at most {most:.4f}", STUDIED, fine)


def last_norm_in_bf16(records: Records) -> Evidence:
    """How far the first losses lie above step 0's with one weight in BF16, and in step 4 without FP8."""
    study, names = records.study(), ("0_baseline", LAST_NORM, WITHOUT, IN_FP8[0])
    reference, *rows = (parity.by_seed(study, row, parity.first_losses) for row in names)
    if min(map(len, rows)) < parity.FEWEST_SEEDS:
        raise KeyError("seeds")
    rounding, whole, step_4 = (parity.difference(row, reference) for row in rows)
    sooner = [parity.by_seed(study, row, lambda run: fmean(run.loss[: parity.FIRST_STEPS // 2])) for row in names[:3]]
    share, earlier = rounding / whole, parity.difference(sooner[1], sooner[0]) / parity.difference(sooner[2], sooner[0])
    seen = all(parity.verdict(row, reference) == parity.DIFFERENT for row in rows)
    text = f"{rounding:+.4f} nats of {whole:+.4f}, {share:.0%}, over 25 steps {earlier:.0%}; step 4 {step_4:+.4f}"
    holds = 0.85 < share < 0.95 and earlier < share and 0.25 < whole / step_4 < 0.35
    return Evidence(text, STUDIED, seen and holds)


def same_row_again(records: Records) -> Evidence:
    """How far the held-out loss of step 4 without FP8 is from that of an earlier recording of it, by seed."""
    earlier = parity.read_study(records.path(REPEATED))
    losses = (parity.by_seed(study, WITHOUT, parity.heldout_loss) for study in (records.study(), earlier))
    far = parity.apart(*losses)
    text = ", ".join(f"{one:+.4f}" for one in far.values())
    return Evidence(f"by seed, in nats, {text}", REPEATED, 0.0025 < max(map(abs, far.values())) < 0.0035)
