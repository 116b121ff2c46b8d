"""The tables of one run. A row of a table is a dict of cells by the names of their columns."""

from itertools import pairwise

from common.record import PRECISIONS, Roofs
from report.cells import (
    LAUNCH,
    dtype,
    gain,
    gain_over,
    milliseconds,
    number,
    only_filled,
    scaling,
    tflops,
    three_digits,
    time_or_status,
)
from report.changes import lines_added
from report.figures import Figures, Line, ratio
from report.proof import limit

VERSIONS = ("torch", "transformer-engine", "cuda")  # that are told beside a result


def main_rows(figures: Figures, detailed: bool = False) -> list[dict[str, str]]:
    """Every step and peer of a run. `detailed` adds the ranges of the passes, and how peers differ."""
    rows, unit = [], figures.run.workload.unit if figures.run.workload else "tokens"
    tells_base = detailed or _has_another_base(figures)
    over = "x made from" if _has_another_base(figures) else "x above"
    for line in figures.lines:
        row = {
            "step": f"{line.name} (peer)" if line.is_peer and detailed else line.name,
            "ms": time_or_status(line, with_range=detailed),
            f"{unit}/s": number(line.tokens_per_s, ",.0f"),
            "TFLOP/s": tflops(line.flops_per_s),
            over: gain(line.over_before),
            _column_over(figures.first): gain(line.over_first),
            _column_over(figures.plain): gain(line.over_plain),
            "GiB": number(line.gib),
            "loss": number(line.loss, ".3f"),
        }
        if detailed and figures.run.peers:
            settings = line.row.settings
            row |= {"launch": LAUNCH[settings.captured], "residual": dtype(settings.residual_dtype)}
            row |= {"head": settings.head or "-", "FP8 scaling": scaling(settings.fp8_recipe)}
        row["made from"] = line.base.name if line.base and tells_base else "-"
        rows.append(row)
    return only_filled(rows)


def _has_another_base(figures: Figures) -> bool:
    """Whether a row is a copy, with one change more, of another row than the one above."""
    return any(line.base and line.base is not above for above, line in pairwise(figures.lines))


def _column_over(line: Line | None) -> str:
    """The header of a column of gains over a row; without such a row, one that is never filled."""
    return f"x {line.name}" if line else "-"


def front_rows(figures: Figures, additions: list[str]) -> list[dict[str, str]]:
    """README's table: the ladder in seven columns. `additions` are words for what each step adds; a later
    step has none. Raises ValueError for more words than steps."""
    if len(additions) > len(figures.steps):
        raise ValueError(f"{len(additions)} words for {len(figures.steps)} steps")
    rows, before, words = [], None, dict(enumerate(additions))
    for k, line in enumerate(figures.steps):
        rows.append(
            {
                "script": f"{line.name}.py",
                "what it adds": words.get(k, "-"),
                "code lines added": number(lines_added(before.row, line.row) if before else None, "d"),
                "ms": time_or_status(line),
                "x the row above": gain(line.over_before),
                "x FP32": gain(line.over_first),
                "GiB": number(line.gib),
            }
        )
        before = line
    return rows


def card_row(figures: Figures) -> dict[str, str]:
    """A run as a row of docs/cards.md, one a GPU: the first and the last step in ms, and the gains
    between."""
    ran = [line for line in figures.steps if line.row.status != "skipped"]
    work, machine = figures.run.workload, figures.environment
    known = [name for name in VERSIONS if name in machine.versions]
    row = {"device": machine.device, "workload": "-", "first step, ms": "-", "last step, ms": "-"}
    if work:
        shape = f"{work.n_layer} x {work.n_embd}, {work.batch_size} x {work.seq_len} tokens"
        row["workload"] = f"{work.preset}: {shape}"
    if ran:
        row |= {"first step, ms": time_or_status(ran[0]), "last step, ms": time_or_status(ran[-1])}
    row["gains, step by step"] = "-"
    if len(ran) > 1:
        steps = " x ".join(gain_over(before, line) for before, line in pairwise(ran))
        row["gains, step by step"] = f"{steps} = {gain(ratio(ran[-1], ran[0]))}"
    row["versions"] = ", ".join(f"{name} {machine.versions[name]}" for name in known)
    row["date"] = (figures.run.started_at or "-")[:10]
    return row | {"commit": (machine.commit or "-")[:7]}


def fits_cards(figures: Figures) -> bool:
    """Whether a run may be a row of docs/cards.md: the whole ladder on one GPU, with at least two times."""
    work, machine = figures.run.workload, figures.environment
    chosen = any(word.partition("=")[0] == "--only" for word in figures.run.command.split())
    ended = all(line.row.status not in ("not run", "interrupted") for line in figures.steps)
    on_one_gpu = machine.device_type == "cuda" and work is not None and work.gpus == 1
    return on_one_gpu and not work.model and ended and not chosen and len(figures.timed_steps) > 1


def category_rows(figures: Figures) -> list[dict[str, str]]:
    """Milliseconds of a step by kind of kernel, and the timed step."""
    profiled = [line for line in figures.timed if line.category_ms]
    names = dict.fromkeys(name for line in profiled for name, ms in line.category_ms.items() if ms)
    rows = []
    for line in profiled:
        row = {"ms per step": line.name}
        row |= {name: number(line.category_ms.get(name)) for name in names}
        rows.append(row | {"timed": time_or_status(line, with_range=True)})
    return rows


def limit_rows(figures: Figures) -> list[dict[str, str]]:
    """What limits each step; empty where nothing is known but the names."""
    rows = []
    for line in figures.timed:
        row, profile = line.row, line.row.profile
        largest, share = line.share or ("", 0.0)
        rows.append(
            {
                "step": line.name,
                "kernels run": number(profile.launches if profile else None, ",.0f"),
                "most time in": f"{largest} {share:.0%}" if line.share else "-",
                "of roof": f"{line.of_roof:.0%} of {line.precision.upper()}" if line.of_roof else "-",
                "MFU": f"{line.mfu:.0%}" if line.mfu else "-",
                "clock, MHz": number(row.clock_mhz, ",.0f"),
                "tokens/J": three_digits(line.tokens_per_joule),
                "predicted ms": milliseconds(row.predicted_ms),
                "ms at least": "-",
                "warm-up s": number(row.warmup_s),
            }
        )
    for precision, ms in (figures.run.roofs.allows_ms if figures.run.roofs and rows else {}).items():
        name = f"what the card allows, {precision.upper()}"
        column = "predicted ms" if any(line.row.predicted_ms for line in figures.timed) else "ms at least"
        rows.append(dict.fromkeys(rows[0], "-") | {"step": name, column: milliseconds(ms)})
    rows = only_filled(rows)
    return rows if rows and set(rows[0]) > {"step"} else []


def proof_rows(figures: Figures) -> list[dict[str, str]]:
    """How the gradients of one step compare with those of the first row, and with --model those of two passes
    of the first row; empty where none was compared."""
    rows = []
    for line in figures.timed:
        if proof := line.row.proof:
            row = {"step": line.name, "compared with": proof.against, "weights": f"{proof.paired:.0%}"}
            row |= {"least cosine": number(proof.cosine, ".5f"), "of the gradient of": proof.weight or "-"}
            row |= {"two passes": number(proof.repeated, ".5f"), "agrees from": f"{limit(proof):.3g}"}
            rows.append(row | {"work": line.same_work})
    return only_filled(rows)


def roof_rows(roofs: Roofs) -> list[dict[str, str]]:
    """What bare matrix products of the workload reach, by precision."""
    rows = []
    for name in PRECISIONS:
        steady, burst = roofs.rate(name), roofs.rate(name, burst=True)
        if steady and burst:
            rows.append({"TFLOP/s": name.upper(), "back to back": tflops(steady), "in bursts": tflops(burst)})
    return rows
