"""The table of a run, the lines under it, and report.md."""

from __future__ import annotations

import re
from collections.abc import Iterable

from common.record import PRECISIONS, Environment, Roofs, Row, Run, Workload, describe_shape
from common.text import aligned, one_line
from report import analysis
from report.analysis import is_timed, median_ms
from report.load import environment_of

BOUND_RULE = (
    "bound by: the largest share of the step, of compute (matrix products and fused attention), memory (all other "
    "kernels) and launch (the GPU idles: it waits for the host or, in a replay, from kernel to kernel)"
)
CONVENTION = (
    "TFLOP/s are model FLOPs by the causal convention: attention counts the half of the (T, T) square that it needs. "
    f"The loss is the mean of the last {analysis.LOSS_WINDOW} training steps, untimed ones included (of all steps "
    "where there were fewer), on the same batches in every row."
)


def table_rows(run: Run) -> list[dict[str, str]]:
    """One row of cells by column name per step and peer; a row without a time has dashes."""
    reference = analysis.reference_row(run.steps)
    rows = [_cells(run, row, before, reference) for before, row in analysis.consecutive(run.steps)]
    rows += [_cells(run, peer, None, reference) | {"step": f"peer: {peer.step}"} for peer in run.peers]
    empty = [name for name in ("of roof", "bound by") if all(row[name] == "-" for row in rows)]
    return [{name: cell for name, cell in row.items() if name not in empty} for row in rows]


def _cells(run: Run, row: Row, before: Row | None, reference: Row | None) -> dict[str, str]:
    plain, timed, gpus = analysis.plain_row(run.steps), is_timed(row), run.workload.gpus if run.workload else 1
    baseline = "vs baseline" if reference in (None, run.steps[0]) else f"vs {reference.step}"
    against = {"vs previous": before, baseline: reference} | ({f"vs {plain.step}": plain} if plain else {})
    return {
        "step": row.step,
        "status": row.status,
        "ms/step": f"{median_ms(row):.1f}" if timed else "-",
        "tokens/s": f"{row.tokens_per_s:,.0f}" if timed else "-",
        **({"tokens/s per GPU": f"{row.tokens_per_s / gpus:,.0f}" if timed else "-"} if gpus > 1 else {}),
        "TFLOP/s": tflops(row.model_flops_per_s) if timed else "-",
        **{name: times_faster(row, other, "{:.2f}x") for name, other in against.items()},
        "peak GiB": gib(row),
        "warm-up s": f"{row.timing.warmup_s:.1f}" if timed else "-",
        "loss": f"{analysis.mean_loss(row):.4f}" if timed else "-",
        "loss difference": percent(analysis.loss_difference(row, reference)) if timed and reference else "-",
        "of roof": describe_share_of_roof(row, run.roofs) if timed else "-",
        "bound by": analysis.describe_bound(row) if timed else "-",
    }


def grid(headers: Iterable[str], rows: Iterable[tuple]) -> list[dict]:
    """Rows of cells by the names of their columns."""
    return [dict(zip(headers, cells, strict=True)) for cells in rows]


def gib(row: Row) -> str:
    """The peak of a row's memory, or a dash."""
    peak = analysis.peak_gib(row)
    return f"{peak:.1f}" if peak and is_timed(row) else "-"


def times_faster(row: Row, reference: Row | None, form: str) -> str:
    """The speedup over another row, or a dash."""
    return form.format(analysis.speedup(row, reference)) if reference and is_timed(row) else "-"


def commit_of(run: Run, digits: int = 10) -> str:
    """The first digits of the commit that ran, and whether files differed from it."""
    environment = environment_of(run)
    return (environment.commit or "unknown")[:digits] + (" with uncommitted changes" if environment.dirty else "")


def tflops(flops_per_s: float) -> str:
    """In TFLOP/s, without a unit: whole numbers from 10 on, below with three significant digits."""
    rate = flops_per_s / 1e12
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.3g}"


def percent(share: float | None) -> str:
    """`+1.50%`, or a dash."""
    return "-" if share is None else f"{share:+.2%}"


def describe_share_of_roof(row: Row, roofs: Roofs | None) -> str:
    """`74% of fp8`, or a dash."""
    share = analysis.share_of_roof(row, roofs)
    return f"{share[1]:.0%} of {share[0]}" if share else "-"


def remarks(run: Run) -> list[str]:
    """Lines under the table: why a row has no time, what qualifies one that has, and what the columns mean."""
    rows = [*run.steps, *run.peers]
    notes = [(row.step, row.note if is_timed(row) else row.reason) for row in rows]
    lines = [f"{step}: {note}" for step, note in notes if note]
    if environment_of(run).device_type == "cpu":
        lines.append("peak GiB is the memory of the whole process: on a CPU nothing counts the tensors alone")
    if run.roofs:
        lines += describe_roofs(run.roofs)
    if any(analysis.bound(row) for row in rows if is_timed(row)):
        lines.append(BOUND_RULE)
    return lines


def measured_roofs(roofs: Roofs) -> dict[str, float]:
    """FLOP/s of matrix products by the name of their precision, in capitals."""
    rates = {precision.upper(): getattr(roofs, f"{precision}_flops_per_s") for precision in PRECISIONS}
    return {precision: rate for precision, rate in rates.items() if rate}


def describe_roofs(roofs: Roofs) -> list[str]:
    """What the machine reaches at most, in one line, and what could not be measured."""
    rates = [f"{precision} {tflops(rate)} TFLOP/s" for precision, rate in measured_roofs(roofs).items()]
    if roofs.copy_bytes_per_s:
        rates.insert(0, f"copy {roofs.copy_bytes_per_s / 1e9:,.0f} GB/s")
    line = f"roofs, measured in this run, matrix products at the shapes of this workload: {', '.join(rates)}"
    return [line if rates else "roofs: none could be measured", *roofs.notes]


def describe_device(environment: Environment) -> str:
    """The device, and the versions of what ran on it."""
    others = {
        "Transformer Engine": environment.transformer_engine,
        "CUDA": environment.cuda,
        "driver": environment.driver,
    }
    versions = [f"{name} {version}" for name, version in others.items() if version]
    return ", ".join([environment.device, f"torch {environment.torch}", *versions])


def describe_machine(environment: Environment) -> str:
    """The device, the versions, and the commit."""
    if environment.torch is None:
        return "the machine is unknown: no row left its record"
    dirty = " with uncommitted changes" if environment.dirty else ""
    unknown = f"commit unknown: {environment.commit_reason}"
    commit = f"commit {environment.commit[:10]}{dirty}" if environment.commit else unknown
    return f"{describe_device(environment)}, {commit}"


def describe_workload(workload: Workload) -> str:
    return (
        f"{workload.preset}: {describe_shape(workload)}, {workload.parameters / 1e6:.1f} M parameters, "
        f"{workload.warmup} + {workload.steps} steps (untimed + timed) on {workload.data.name}"
    )


def render_text(run: Run) -> str:
    """The report for a terminal."""
    lines = dict.fromkeys([*remarks(run), *analysis.doubts(run)])
    return "\n".join([aligned(table_rows(run), n_left=2), "", *lines, CONVENTION])


def markdown(text: object) -> str:
    """A line of Markdown in which nothing that a record says is markup, a link, or the end of a cell."""
    line = one_line(text, 1000).replace("&", "&amp;").replace("<", "&lt;").replace("`", "'")
    line = re.sub(r"([\\\[\]!|])", r"\\\1", line)
    line = line.replace("://", ":\\//").replace("www.", "www\\.")  # GitHub makes links of bare addresses
    return re.sub(r"^(\d*)(>|#|[+.)-](?=[\s-]))", r"\1\\\2", line)  # nor a heading, a quotation, a list


def render_markdown(run: Run) -> str:
    """report.md."""
    lines = ["# Training step speedup", "", *(f"**{markdown(line)}**\n" for line in analysis.headline(run)[1:])]
    if run.environment and run.workload:
        lines += [f"Machine: {markdown(describe_machine(run.environment))}", ""]
        lines += [f"Workload: {markdown(describe_workload(run.workload))}", ""]
    rows = [{name: markdown(cell) for name, cell in row.items()} for row in table_rows(run)]
    lines += [aligned(rows, "pipe", n_left=2), ""]
    lines += [f"- {markdown(analysis.sentence(before, row))}" for before, row in analysis.consecutive(run.steps)]
    lines += ["", *(f"- {markdown(line)}" for line in dict.fromkeys([*analysis.doubts(run), *remarks(run)]))]
    commands = [one_line(line, 1000) for line in run.command.splitlines()]
    lines += [f"- {CONVENTION}", "", "Reproduce:", "", *(f"    {command}" for command in commands), ""]
    return "\n".join(lines)
