"""The table of a run, the lines under it, and report.md."""

from __future__ import annotations

import re
from collections.abc import Iterable

from common.record import PRECISIONS, Conditions, Environment, Roofs, Row, Run, Workload, describe_shape
from common.text import aligned, one_line
from report import analysis
from report.analysis import is_timed, median_ms
from report.doubts import LEGEND, NOTICE, ROOF, SERIOUS, TIME, compared, doubts, mark
from report.load import environment_of
from report.sentences import headline
from report.symptoms import pointers

ON_A_CPU = "On a CPU the processes share its cores: the figures show that it works, not how it scales."
SHARE_RULE = (
    "most time in: what has the largest share of the step, of compute (matrix products and fused attention), other "
    "kernels (most of them pass over memory), gaps on the GPU's timeline and, of several processes, communication that "
    "overlaps nothing else"
)
PREDICTION = (
    "predicted ms: what the roofs say before a step runs, from FLOPs, bytes and launches (ladder/predict.py); nothing "
    "in it is taken from these times"
)
NOT_SHORT = ("tokens/s", "tokens/s per GPU", "vs previous", "warm-up s", "loss", "loss difference",
             "of roof", "most time in")  # fmt: skip
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
    optional = ("predicted ms", "tokens/J", "of roof", "most time in")
    empty = [name for name in optional if all(row[name] == "-" for row in rows)]
    empty += ["LM head"] if not any(peer.settings.head for peer in run.peers) else []
    return [{name: cell for name, cell in row.items() if name not in empty} for row in rows]


def halves(rows: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The columns of a table that a reader needs first, and the others, each beside the names of the rows."""
    first = [{name: cell for name, cell in row.items() if name not in NOT_SHORT} for row in rows]
    more = [{name: cell for name, cell in row.items() if name == "step" or name in NOT_SHORT} for row in rows]
    return first, more


def _cells(run: Run, row: Row, before: Row | None, reference: Row | None) -> dict[str, str]:
    plain, timed, gpus = analysis.plain_row(run.steps), is_timed(row), run.workload.gpus if run.workload else 1
    whole = reference is None or (reference is run.steps[0] and reference.step.startswith("0_"))
    baseline = "vs baseline" if whole else f"vs {reference.step}"
    against = {"vs previous": before, baseline: reference} | ({f"vs {plain.step}": plain} if plain else {})
    return {
        "step": row.step,
        "status": row.status,
        "ms/step": ms_cell(row, run) if timed else "-",
        "predicted ms": f"{row.predicted_ms:.1f}" if row.predicted_ms else "-",
        "tokens/s": f"{row.tokens_per_s:,.0f}" if timed else "-",
        **({"tokens/s per GPU": f"{row.tokens_per_s / gpus:,.0f}" if timed else "-"} if gpus > 1 else {}),
        "TFLOP/s": tflops(row.model_flops_per_s),
        **{name: speedup_cell(row, other, run) for name, other in against.items()},
        "LM head": row.settings.head or "-",
        "peak GiB": gib(row),
        "tokens/J": tokens_per_joule(row),
        "warm-up s": f"{row.timing.warmup_s:.1f}" if timed else "-",
        "loss": f"{analysis.mean_loss(row):.4f}" if timed else "-",
        "loss difference": percent(analysis.loss_difference(row, reference)) if timed and reference else "-",
        "of roof": describe_share_of_roof(row, run) if timed else "-",
        "most time in": analysis.describe_bound(row) if timed else "-",
    }


def grid(headers: Iterable[str], rows: Iterable[tuple]) -> list[dict]:
    """Rows of cells by the names of their columns."""
    return [dict(zip(headers, cells, strict=True)) for cells in rows]


def pipe_table(headers: Iterable[str], cells: Iterable[tuple], n_left: int = 1) -> str:
    """A table of Markdown."""
    return aligned(grid(headers, cells), "pipe", n_left)


def pipe(rows: Iterable[dict], n_left: int = 2) -> str:
    """Rows whose cells and headers may be a record's words, as a table of Markdown."""
    return aligned([{markdown(name): markdown(cell) for name, cell in row.items()} for row in rows], "pipe", n_left)


def gib(row: Row) -> str:
    """The peak of a row's memory, or a dash."""
    peak = analysis.peak_gib(row)
    return f"{peak:.1f}" if peak and is_timed(row) else "-"


def ms_cell(row: Row, run: Run) -> str:
    """`49.4 (49.1-49.6)` of a row with a time, without the range where there are no passes."""
    extent = " ({:.1f}-{:.1f})".format(*analysis.extent_ms(row)) if analysis.passes_ms(row) else ""
    return f"{median_ms(row):.1f}{mark(run, row)}{extent}"


def ms_or_status(row: Row, run: Run) -> str:
    return ms_cell(row, run) if analysis.is_timed(row) else row.status


def speedup_cell(row: Row, reference: Row | None, *runs: Run, digits: int = 2, unit: str = "x") -> str:
    """The speedup over another row, or a dash."""
    speedup = compared(row, reference, *runs)
    return speedup.cell(digits, unit) if speedup else "-"


def legend(*runs: Run) -> list[str]:
    """What the mark of doubted figures means, where there are any."""
    marked = any(mark(run, *run.steps, *run.peers, about=about) for run in runs for about in (TIME, ROOF))
    return [LEGEND] if marked else []


def figure(value: float | None, form: str = ",.1f") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:{form}}"


def tokens_per_joule(row: Row) -> str:
    """With one decimal from 10 on, below with two; or a dash."""
    known = row.tokens_per_joule if is_timed(row) else None
    return figure(known, ",.1f" if known and known >= 10 else ".2f")


def commit_of(run: Run, digits: int = 10) -> str:
    """The first digits of the commit that ran, and whether files differed from it."""
    return commit_name(environment_of(run).commit, environment_of(run).dirty, digits)


def commit_name(commit: str | None, dirty: bool | None, digits: int | None = None) -> str:
    """The first digits of a commit, or all; and whether files differed from it."""
    return (commit or "unknown")[:digits] + " with uncommitted changes" * bool(dirty)


def tflops(flops_per_s: float | None) -> str:
    """In TFLOP/s, without a unit: whole numbers from 10 on, below with three significant digits; or a dash."""
    if not flops_per_s:
        return "-"
    rate = flops_per_s / 1e12
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.3g}"


def percent(share: float | None) -> str:
    """`+1.50%`, or a dash."""
    return figure(share, "+.2%")


def describe_share_of_roof(row: Row, run: Run) -> str:
    """`74% of fp8`, or a dash."""
    precision, ceiling = analysis.roof(row, run.roofs) or ("", None)
    return f"{row.model_flops_per_s / ceiling:.0%}{mark(run, row, about=ROOF)} of {precision}" if ceiling else "-"


def products_cells(row: Row, run: Run) -> tuple[str, str]:
    """TFLOP/s of the matrix products while they run, and their share of the ceiling; or dashes."""
    rate, share = analysis.products_rate(row, run), analysis.products_share(row, run)
    return tflops(rate), f"{share:.0%}{mark(run, row, about=ROOF)}" if share else "-"


def row_notes(run: Run) -> list[str]:
    """Why a row has no time, and what qualifies one that has."""
    notes = [(row.step, row.note if is_timed(row) else row.reason) for row in [*run.steps, *run.peers]]
    return [f"{step}: {note}" for step, note in dict.fromkeys(notes) if note]


def remarks(run: Run) -> list[str]:
    """Lines under the table: why a row has no time, what qualifies one that has, and what the columns mean."""
    rows, lines = [*run.steps, *run.peers], row_notes(run) + pointers(run)
    if environment_of(run).device_type == "cpu":
        lines.append("peak GiB is the memory of the whole process: on a CPU nothing counts the tensors alone")
        lines += [ON_A_CPU] if run.workload and run.workload.gpus > 1 else []
    if run.roofs:
        lines += describe_roofs(run.roofs)
    if any(row.predicted_ms for row in rows):
        lines.append(PREDICTION)
    if any(analysis.bound(row) for row in rows if is_timed(row)):
        lines.append(SHARE_RULE)
    return lines


def ceilings(roofs: Roofs) -> dict[str, float]:
    """The most FLOP/s of matrix products by the name of their precision, in capitals."""
    return {name.upper(): roofs.ceilings[name] for name in PRECISIONS if roofs.ceilings.get(name)}


def describe_roofs(roofs: Roofs) -> list[str]:
    """What the machine reaches, in one line; what the data cost; and what could not be measured."""
    rates = [f"copy {roofs.copy_bytes_per_s / 1e9:,.0f} GB/s"] if roofs.copy_bytes_per_s else []
    rates += filter(None, (_describe_precision(roofs, precision) for precision in PRECISIONS))
    line = f"roofs, matrix products at the shapes of this workload: {'; '.join(rates)}"
    zeros = ", ".join(filter(None, (_describe_zeros(roofs, precision) for precision in PRECISIONS)))
    powers = [at.power_w for at in roofs.conditions.values()]
    why = ", because zeros draw less power" if any(powers) else ""  # of a GPU it is known
    cost = [f"a product of zeros is faster{why}: {zeros}"] if zeros else []
    return [line if rates else "roofs: none could be measured", *cost, *roofs.notes]


def _describe_precision(roofs: Roofs, precision: str) -> str:
    """`BF16 690 TFLOP/s back to back (1480 MHz, 699 W), 792 at most, in bursts (1980 MHz)`; empty where unmeasured."""
    rate, ceiling = getattr(roofs, f"{precision}_flops_per_s"), roofs.ceilings.get(precision)
    if not rate:
        return ""
    state = roofs.conditions.get(precision, Conditions())
    said = f"{precision.upper()} {tflops(rate)} TFLOP/s back to back{_at(state.clock_mhz, state.power_w)}"
    return f"{said}, {tflops(ceiling)} at most, in bursts{_at(state.ceiling_clock_mhz)}" if ceiling else said


def _at(clock_mhz: float | None, power_w: float | None = None) -> str:
    known = [f"{clock_mhz:.0f} MHz"] if clock_mhz else []
    known += [f"{power_w:.0f} W"] if power_w else []
    return f" ({', '.join(known)})" if known else ""


def _describe_zeros(roofs: Roofs, precision: str) -> str:
    """`894 TFLOP/s instead of 690 in BF16`; empty where zeros gain nothing that is more than noise."""
    data, zeros = (getattr(rates, f"{precision}_flops_per_s", None) for rates in (roofs.square, roofs.zeros))
    gains = data and zeros and zeros > 1.02 * data
    return f"{tflops(zeros)} TFLOP/s instead of {tflops(data)} in {precision.upper()}" if gains else ""


def describe_device(environment: Environment) -> str:
    """The device, and the versions of what ran on it."""
    others = (("Transformer Engine", environment.transformer_engine), ("CUDA", environment.cuda),
              ("driver", environment.driver))  # fmt: skip
    versions = [f"{name} {version}" for name, version in others if version]
    return ", ".join([environment.device, f"torch {environment.torch}", *versions])


def describe_machine(environment: Environment) -> str:
    """The device, the versions, and the commit."""
    if environment.torch is None:
        return "the machine is unknown: no row left its record"
    commit = commit_name(environment.commit, environment.dirty, digits=10)
    reason = f": {environment.commit_reason}" if environment.commit_reason and not environment.commit else ""
    return f"{describe_device(environment)}, commit {commit}{reason}"


def describe_workload(run: Run) -> str:
    """The shape, the steps, and how many passes there were."""
    workload = run.workload
    if workload is None:
        return "workload unknown"
    described = (
        f"{workload.preset}: {describe_shape(workload)}, {workload.parameters / 1e6:.1f} M parameters, "
        f"{describe_steps(workload)}, text: {workload.data.name}"
    )
    return ", ".join([described, *describe_division(workload), *describe_passes(run)])


def describe_steps(workload: Workload) -> str:
    return f"{workload.warmup} untimed and {workload.steps} timed steps"


def describe_division(workload: Workload) -> list[str]:
    """How a step is divided over GPUs, micro-batches and recomputed blocks, where it is."""
    said = []
    if workload.gpus > 1:
        said.append(f"{workload.gpus} processes by {workload.parallel}, each with a batch of this size")
    if workload.accumulate > 1:
        said.append(f"{workload.accumulate} micro-batches a step")
    if workload.checkpoint:
        said.append("blocks recomputed in backward")
    return said


def describe_passes(run: Run) -> list[str]:
    """What a time of a repeated row is; nothing where every row ran once."""
    passes = analysis.passes(run)
    return [f"median of {passes} passes, their range in brackets"] if passes else []


def levels(run: Run, said: Iterable[str] = ()) -> dict[str, list[str]]:
    """The texts of the doubts by level, without those that a headline has said."""
    unsaid = [doubt for doubt in doubts(run) if doubt.text not in said]
    texts = {level: [doubt.text for doubt in unsaid if doubt.level == level] for level in (SERIOUS, NOTICE)}
    return {level: lines for level, lines in texts.items() if lines}


def render_text(run: Run) -> str:
    """The report for a terminal."""
    lines = [aligned(table_rows(run), n_left=2), *legend(run), "", *describe_passes(run), *dict.fromkeys(remarks(run))]
    for level, texts in levels(run).items():
        lines += [f"{level}:", *(f"  {text}" for text in texts)]
    return "\n".join([*lines, CONVENTION])


def markdown(text: object) -> str:
    """A line of Markdown in which nothing that a record says is markup, a link, or the end of a cell."""
    line = one_line(text, 1000).replace("&", "&amp;").replace("<", "&lt;").replace("`", "'")
    line = re.sub(r"([\\\[\]!|*])", r"\\\1", line)
    line = line.replace("://", ":\\//").replace("www.", "www\\.")  # GitHub makes links of bare addresses
    return re.sub(r"^(\d*)(>|#|[+.)-](?=[\s-]))", r"\1\\\2", line)  # nor a heading, a quotation, a list


def render_markdown(run: Run) -> str:
    """report.md: short enough for a comment on a pull request."""
    said = headline(run)
    lines = [f"# {markdown(said)}", "", f"Machine: {markdown(describe_machine(environment_of(run)))}", ""]
    lines += [f"Workload: {markdown(describe_workload(run))}", ""]
    lines += [pipe(halves(table_rows(run))[0]), "", *(f"{line}\n" for line in legend(run))]
    notes = row_notes(run) + pointers(run)
    lines += bullets(notes) if notes else []
    for level, texts in levels(run, [said]).items():
        lines += [f"{level}:", "", *bullets(texts)]
    commands = [one_line(line, 1000) for line in run.command.splitlines()]
    return "\n".join([*lines, "Reproduce:", "", *(f"    {command}" for command in commands), ""])


def bullets(texts: Iterable[str]) -> list[str]:
    """Lines of a Markdown list, and the empty one after it."""
    return [*(f"- {markdown(text)}" for text in texts), ""]
