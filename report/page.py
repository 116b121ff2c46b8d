"""The report as one HTML file that needs neither torch nor a network.

All text comes from records that anybody may have written, so the template escapes everything. Only the pictures of
report/charts.py and report/drawn.py, which escape what they draw, are inserted as they are.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from common.record import Row, Run
from common.text import one_line
from report import analysis, charts, drawn, predictions, story, table
from report.analysis import is_timed, reason_untimed
from report.doubts import NOTICE, SERIOUS, busy, compared, describe_profile_offset
from report.load import environment_of
from report.sentences import headline, largest_loss_difference, rising_loss

SECTIONS = (
    ("where", "Where the time went"),
    ("steps", "Step by step"),
    ("block", "One block"),
    ("roofline", "Roofline"),
    ("memory", "Memory"),
    ("energy", "Energy"),
    ("loss", "Loss"),
    ("trust", "Can I trust this?"),
    ("figures", "All figures"),
)
LONGEST_SETTINGS = 300


def render(run: Run) -> str:
    """The page of a run."""
    rows, said = [*run.steps, *run.peers], headline(run)
    first, more = table.halves(table.table_rows(run))
    context = {
        "title": said,
        "machine": table.describe_machine(environment_of(run)),
        "workload": table.describe_workload(run),
        "convention": table.CONVENTION,
        "sections": SECTIONS,
        "cards": story.cards(run),
        "one_block": story.ONE_BLOCK,
        "blocks": story.blocks(run),
        "block_rows": story.block_table(run),
        "on_cpu": environment_of(run).device_type == "cpu",
        "left_out": [row.step for row in run.steps if row.status == "not run"],
        "evidence": evidence(run),
        "table_rows": first,
        "more_rows": more,
        "legend": table.legend(run),
        "remarks": table.remarks(run),
        **{level: table.levels(run, [said]).get(level, []) for level in (SERIOUS, NOTICE)},
        "busy": busy(run),
        "reproduce": run.command or "the command is not recorded",
        "where": story.where(run),
        "where_caption": _where_caption(run),
        "off": _off(rows),
        "category_rows": _category_rows(rows),
        "passes": analysis.passes(run),
        "settings_rows": table.grid(("step", "settings"), [(row.step, _settings(row)) for row in rows]),
        "environment_rows": table.grid(("", "value"), asdict(run.environment).items() if run.environment else ()),
    }
    return environment().get_template("page.html").render(context)


def environment() -> Environment:
    """The templates, which escape all that they insert; their filters say where a line may break and where not."""
    made = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
    made.filters |= {"soft": _soft, "units": _units, "code": _code}
    return made


def _soft(name: object) -> Markup:
    """A name that may break behind an underscore."""
    return Markup(re.sub(r"([_/])", r"\1<wbr>", str(escape(name))))


def _units(sentence: str) -> Markup:
    """A sentence whose figures keep their unit."""
    return Markup(re.sub(r"(\d) (s|ms|times|MHz|GiB)\b", r"\1&nbsp;\2", str(escape(sentence))))


def _code(line: str) -> Markup:
    """A line of code that breaks between words and behind brackets and dots, never behind its indentation."""
    code = line.lstrip(" ")
    return Markup("&nbsp;" * (len(line) - len(code)) + re.sub(r"([(.=])(?=[^\s(=])", r"\1<wbr>", str(escape(code))))


def speedup_png(run: Run) -> bytes:
    """The picture of a run: times faster than the first row with a time; of a busy machine times alone."""
    first = analysis.reference_row(run.steps)

    def bar(row: Row) -> tuple[str, float | None, str]:
        if not is_timed(row):
            return row.step, None, reason_untimed(row)
        ms = f"{story.ms_of(run, row)} ms"
        if speedup := compared(row, first, run):
            return row.step, speedup.ratio, f"{speedup.ratio:.1f}x{speedup.mark} ({ms})"
        return row.step, None, ms

    preset = run.workload.preset if run.workload else "unknown workload"
    title = f"{environment_of(run).device}, {preset}: training step, times faster"
    verdict, _, _ = (busy(run) or "").partition(" (")
    return charts.speedup_png([*map(bar, run.steps)], verdict or title)


def _where_caption(run: Run) -> str:
    passes, off_by = analysis.passes(run), predictions.off(run)
    kind = "operator" if environment_of(run).device_type == "cpu" else "kernel"
    of = f"{passes} passes" if passes else "one pass, so how far it changes from run to run is not known"
    caption = f"Milliseconds of a training step by kind of {kind}; the figure is the median of {of}."
    caption += f" Dashed: what was predicted from measured roofs alone, {off_by}." if off_by else ""
    return caption + (f" {story.PEERS}" if run.peers else "")


def _off(rows: list[Row]) -> str:
    """A sentence about rows that the profiler slowed down or sped up; empty without any."""
    off = [row.step for row in rows if is_timed(row) and describe_profile_offset(row)]
    return f" Profiling changed the time of {', '.join(off)}: the doubts say by how much." if off else ""


def _category_rows(rows: list[Row]) -> list[dict]:
    times = {row.step: analysis.category_ms(row) for row in rows if row.profile}
    names = [name for name in drawn.CATEGORY_COLORS if any(by_category[name] for by_category in times.values())]
    cells = [(step, *(table.figure(by_category[name]) for name in names), table.figure(sum(by_category.values())))
             for step, by_category in times.items()]  # fmt: skip
    return table.grid(("ms per step", *names, "sum"), cells)


@dataclass
class Evidence:
    """A section of the page; without a picture its caption says why there is none."""

    name: str
    svg: str
    caption: str
    rows: list[dict]


def evidence(run: Run) -> dict[str, Evidence]:
    """The sections that stand behind the story, by id."""
    return {"roofline": _roofline(run), "memory": _memory(run), "energy": _energy(run), "loss": _loss(run.steps)}


def _memory(run: Run) -> Evidence:
    if any(row.memory for row in run.steps):
        caption = (
            "What CUDA's allocator holds in one launched step, by what it is for, at one scale. From left to right are "
            "its allocations in their order. Where they are too many, the fullest of some neighbors is drawn. Time is "
            "not to scale: dashed lines, at the same place for every step, show where backward and the optimizer "
            "begin. Activations are what forward keeps for backward. Temporary is what is freed again soon. Where the "
            "timed step is captured, its peak can differ from the one here, because the capture keeps memory of its "
            "own."
        )
    elif environment_of(run).device_type == "cpu":
        caption = "Peak memory of the whole process. On a CPU nothing counts the tensors alone."
    else:
        caption = (
            "Peak of CUDA's allocator over the training steps, the capture of a captured step included. These records "
            "do not say what the memory was for."
        )
    return Evidence("Memory", story.memory(run), caption, story.memory_table(run))


def _roofline(run: Run) -> Evidence:
    copy, rates = (run.roofs.copy_bytes_per_s, table.ceilings(run.roofs)) if run.roofs else (None, {})
    if not (rates and copy):
        return Evidence("Roofline", "", "The ceilings of this machine were not measured in this run.", [])
    counted = [row for row in run.steps if is_timed(row) and row.bytes_per_step and row.bytes_per_step.value]
    if not counted:
        return Evidence("Roofline", "", "No row holds the bytes of its step, so it has no place under the roofs.", [])
    points = [(row.step, run.workload.flops_per_step / row.bytes_per_step.value, row.model_flops_per_s)
              for row in counted]  # fmt: skip
    cells = [(name, table.figure(intensity), table.tflops(rate), table.describe_share_of_roof(row, run),
              *table.products_cells(row, run))
             for row, (name, intensity, rate) in zip(counted, points, strict=True)]  # fmt: skip
    cells += [(f"ridge of {name}", table.figure(rate / copy), table.tflops(rate), "", "", "")
              for name, rate in rates.items()]  # fmt: skip
    headers = ("step", "FLOP per byte", "TFLOP/s", "of roof", "matrix products alone, TFLOP/s", "of their ceiling")
    caption = (
        f"Measured ceilings: copy bandwidth {copy / 1e9:,.0f} GB/s, and matrix products at this workload's shapes in "
        "short bursts (gray, TFLOP/s). Diamonds are the ridge points. FLOPs are the model's. Bytes are "
        "computed from the shapes: the least that a step has to move. They are the same for every step, so the points "
        "stand in one column."
    )
    return Evidence("Roofline", charts.roofline(points, copy, rates), caption, table.grid(headers, cells))


def _energy(run: Run) -> Evidence:
    rows = [row for row in [*run.steps, *run.peers] if is_timed(row)]
    measured = [row for row in rows if any((row.energy_j_per_step, row.clock_mhz, row.power_w))]
    headers = ("step", "mean SM MHz", "mean power, W", "J per step", "tokens/J")
    cells = [(row.step, table.figure(row.clock_mhz, ",.0f"), table.figure(row.power_w),
              table.figure(row.energy_j_per_step), table.tokens_per_joule(row)) for row in measured]  # fmt: skip
    picture = story.energy(run)
    caption = (
        "Tokens that one joule of the GPU trains, while the same step ran on for at least 5 s."
        if picture
        else "No energy was measured. A CPU has no counter that is read here, a GPU's is read through NVML, and "
        "--quick reads none."
    )
    return Evidence("Energy", picture, caption, table.grid(headers, cells))


def _loss(rows: list[Row]) -> Evidence:
    timed = [row for row in rows if is_timed(row)]
    if not timed:
        return Evidence("Loss", "", "No step has a loss.", [])
    headers, cells = ("step", "first", "last", "mean of the last", "difference"), []
    heldout = any(row.heldout_loss is not None for row in timed)
    headers += ("held-out", "difference of it") if heldout else ()
    for row in timed:
        losses = (table.figure(loss, ",.4f") for loss in (row.loss[0], row.loss[-1], analysis.mean_loss(row)))
        cells.append((row.step, *losses, table.percent(analysis.loss_difference(row, timed[0]))))
        if heldout:
            difference = table.percent(analysis.heldout_difference(row, timed[0]))
            cells[-1] += (table.figure(row.heldout_loss, ",.4f"), difference)
    said = ["Loss of every training step, counted from 0, on the same batches; below, its difference to that of the "
            f"first row, {timed[0].step}.", rising_loss(rows), largest_loss_difference(rows),
            "So few steps do not show whether a step learns as well: docs/parity.md has long runs."]  # fmt: skip
    picture = charts.loss_curves([(row.step, row.loss) for row in timed])
    return Evidence("Loss", picture, " ".join(filter(None, said)), table.grid(headers, cells))


def _settings(row: Row) -> str:
    if not is_timed(row):
        return reason_untimed(row)
    listed = (f"{name} {value}" for name, value in vars(row.settings).items() if value is not None)
    return one_line(", ".join(listed), LONGEST_SETTINGS)
