"""The report as one HTML file that needs neither torch nor a network.

All text comes from records that anybody may have written, so the template escapes everything. Only the charts of
report/charts.py, which escape what they draw, are inserted as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.record import Row, Run
from common.text import one_line
from report import analysis, charts, table
from report.analysis import is_timed, median_ms, passes_ms, reason_untimed
from report.doubts import NOTICE, SERIOUS, Speedup, busy, compared, describe_profile_offset, mark
from report.load import environment_of
from report.sentences import headline, largest_loss_difference, sentence, sentences

SECTIONS = (
    ("headline", "Headline"),
    ("waterfall", "How the step shrank"),
    ("where", "Where the time went"),
    ("steps", "Step by step"),
    ("roofline", "Roofline"),
    ("loss", "Loss"),
    ("trust", "Can I trust this?"),
)
MOST_KERNELS = 10
LONGEST_SETTINGS, LONGEST_KERNEL = 300, 120
FACTS = {  # of two rows beside each other: the figure, and its digits
    "ms per step": (median_ms, 1),
    "peak GiB": (analysis.peak_gib, 1),
    "kernels launched (of a CPU: operators)": (lambda row: row.profile and row.profile.kernels_per_step, 0),
    "gaps, ms": (analysis.gaps_ms, 1),
    "backward nodes of attention": (lambda row: row.profile and row.profile.autograd_nodes_attention, 0),
    "host waits for the GPU": (lambda row: row.host_syncs, 0),
}


def render(run: Run) -> str:
    """The page of a run."""
    rows, steps, said = [*run.steps, *run.peers], [*analysis.consecutive(run.steps)], headline(run)[1:]
    context = {
        "title": "Training step speedup",
        "headline": said,
        "machine": table.describe_machine(environment_of(run)),
        "workload": table.describe_workload(run),
        "convention": table.CONVENTION,
        "sections": SECTIONS,
        "on_cpu": environment_of(run).device_type == "cpu",
        "sentences": sentences(run),
        "table_rows": table.table_rows(run),
        "legend": table.legend(run),
        "remarks": table.remarks(run),
        **{level: table.levels(run, said).get(level, []) for level in (SERIOUS, NOTICE)},
        "untimed": [f"{row.step}: {reason_untimed(row)}" for row in run.steps if not is_timed(row)],
        "pairs": [_pair(run, script, *pair) for script, pair in zip(run.steps, steps[1:], strict=False)],
        "busy": busy(run),
        "reproduce": run.command or "the command is not recorded",
        **_waterfall(run),
        **_categories(rows),
        **_roofline(run),
        **_loss(run.steps),
        **_trust(run, rows),
    }
    loader = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("page.html")
    return template.render(context)


def speedup_png(run: Run) -> bytes:
    """The picture of a run: times faster than the first row with a time; of a busy machine times alone."""
    first = analysis.reference_row(run.steps)

    def bar(row: Row) -> charts.Bar:
        speedup, ms = compared(row, first, run), f"{_ms(run, row)} ms"
        return charts.Bar(row.step, *((speedup.ratio, f"{_times(speedup)} ({ms})") if speedup else (None, ms)))

    preset = run.workload.preset if run.workload else "unknown workload"
    title = f"{environment_of(run).device}, {preset}: training step, times faster"
    verdict, _, _ = (busy(run) or "").partition(" (")
    return charts.speedup_png(_bars(run.steps, bar), verdict or title)


def _times(speedup: Speedup) -> str:
    return f"{speedup.ratio:.1f}x{speedup.mark}"


def _ms(run: Run, row: Row) -> str:
    """In a chart, where there is no room for a range."""
    return f"{median_ms(row):.1f}{mark(run, row)}"


def _ms_cell(run: Run, row: Row) -> str:
    """In a table whose other columns say the range."""
    return decimal(row.timing.median_ms) + mark(run, row)


def _bars(rows: list[Row], bar: Callable[[Row], charts.Bar]) -> list[charts.Bar]:
    """`bar` of every row that has a time; of the others their reason."""
    return [bar(row) if is_timed(row) else charts.Bar(row.step, None, reason_untimed(row)) for row in rows]


def _waterfall(run: Run) -> dict:
    reference, passes = analysis.reference_row(run.steps), analysis.passes(run)

    def time(row: Row) -> charts.Bar:
        speedup = compared(row, reference, run)
        label = ", ".join([f"{_ms(run, row)} ms", *([_times(speedup)] if speedup else [])])
        return charts.Bar(row.step, median_ms(row), label, *analysis.extent_ms(row))

    def memory(row: Row) -> charts.Bar:
        gib = analysis.peak_gib(row)
        return charts.Bar(row.step, gib, f"{gib:.1f} GiB" if gib else "not measured")

    times, memories = _bars(run.steps, time), _bars(run.steps, memory)
    time_cells = [
        (row.step, _ms_cell(run, row), decimal(bar.low), decimal(bar.high), bar.label)
        for row, bar in zip(run.steps, times, strict=True)
    ]
    ends = ("fastest pass", "slowest pass") if passes else ("p25", "p75")
    return {
        "time_svg": charts.falling_bars(times, "milliseconds"),
        "time_rows": table.grid(("step", "ms per step", *ends, ""), time_cells),
        "time_extent": f" of the medians of {passes} passes; whiskers from the fastest pass to the slowest"
        if passes
        else "; whiskers from the 25th to the 75th percentile",
        "memory_svg": charts.falling_bars(memories, "GiB"),
        "memory_rows": table.grid(("step", "GiB", ""), [(bar.name, decimal(bar.value), bar.label) for bar in memories]),
    }


def _categories(rows: list[Row]) -> dict:
    stacks = []
    for row in rows:
        times = analysis.category_ms(row) if is_timed(row) else None
        stacks.append((row.step, times, "" if times else "not profiled" if is_timed(row) else reason_untimed(row)))
    names = charts.drawn_categories(stacks)
    cells = [
        (step, *(decimal(times[name]) for name in names), decimal(sum(times.values())))
        if times
        else (step, *("" for _ in names), why)
        for step, times, why in stacks
    ]
    return {
        "category_rows": table.grid(("ms per step", *names, "sum"), cells) if names else [],
        "profiled_off": [row.step for row in rows if is_timed(row) and describe_profile_offset(row)],
        "stacked_svg": names and charts.stacked_bars(stacks, "milliseconds", shares=False),
        "shares_svg": names and charts.stacked_bars(stacks, "milliseconds", shares=True),
    }


def _pair(run: Run, script_before: Row, before: Row | None, after: Row) -> dict:
    """Code of two consecutive scripts, and what the machine did: against the last row before that has a time."""
    comparable = before is not None and is_timed(after)
    categories = analysis.changed_categories(before, after) if comparable else []
    kernels = analysis.changed_kernels(before, after) if categories else []
    category_cells = [
        (c.name, arrow(c.before_ms, c.after_ms, 1), f"{c.ms:+,.1f}", arrow(c.before_launches, c.after_launches))
        for c in categories
    ]
    kernel_cells = [
        (kernel_name(k.name), k.kind, arrow(k.before_ms, k.after_ms, 2), arrow(k.before_launches, k.after_launches))
        for k in kernels[:MOST_KERNELS]
    ]
    return {
        "before": script_before.step,
        "after": after.step,
        "compared": before.step if before else "",
        "comparable": comparable,
        "sentence": sentence(run, before, after),
        "code": analysis.code_diff(script_before, after),
        "facts": _facts(run, before, after) if comparable else [],
        "categories": table.grid(("category", "ms", "change", "launches"), category_cells),
        "kinds": Counter(kernel.kind for kernel in kernels),
        "kernels": table.grid(("kernel", "", "ms", "launches"), kernel_cells),
    }


def _facts(run: Run, before: Row, after: Row) -> list[dict]:
    facts = []
    for name, (figure, digits) in FACTS.items():
        a, b = figure(before), figure(after)
        if a is not None or b is not None:
            change = "-" if a is None or b is None else f"{b - a:+,.{digits}f}"
            marks = [mark(run, row) if figure is median_ms else "" for row in (before, after)]
            facts.append((name, decimal(a, digits) + marks[0], decimal(b, digits) + marks[1], change))
    if analysis.bound(before) or analysis.bound(after):
        facts.append(("bound by", analysis.describe_bound(before), analysis.describe_bound(after), ""))
    return table.grid(("", "before", "after", "change"), facts)


def _roofline(run: Run) -> dict:
    copy, rates = (run.roofs.copy_bytes_per_s, table.ceilings(run.roofs)) if run.roofs else (None, {})
    if not (rates and copy):
        return {"no_roofline": "The ceilings of this machine were not measured in this run."}
    counted = [row for row in run.steps if is_timed(row) and row.bytes_per_step and row.bytes_per_step.value]
    if not counted:
        return {"no_roofline": "No row holds the bytes of its step, so it has no place under the roofs."}
    points = [(row.step, run.workload.flops_per_step / row.bytes_per_step.value, row.model_flops_per_s)
              for row in counted]  # fmt: skip
    untimed = [f"{row.step}: {reason_untimed(row)}" for row in run.steps if not is_timed(row)]
    ridges = [(f"ridge of {name}", rate / copy, rate) for name, rate in rates.items()]
    shares = [(table.describe_share_of_roof(row, run), *table.products_cells(row, run)) for row in counted]
    shares += [("", "", "")] * len(ridges)
    cells = [(name, decimal(intensity), table.tflops(rate), *three)
             for (name, intensity, rate), three in zip(points + ridges, shares, strict=True)]  # fmt: skip
    headers = ("", "FLOP per byte", "TFLOP/s", "of roof", "matrix products alone, TFLOP/s", "of their ceiling")
    return {
        "no_roofline": "",
        "roofline_svg": charts.roofline(points, copy, rates, untimed),
        "roofline_rows": table.grid(headers, cells),
        "copy_gb_per_s": f"{copy / 1e9:,.0f}",
    }


def _loss(rows: list[Row]) -> dict:
    timed = [row for row in rows if is_timed(row)]
    if not timed:
        return {"loss_rows": []}
    curves = [(row.step, row.loss, "") if is_timed(row) else (row.step, [], reason_untimed(row)) for row in rows]
    headers, cells = ("step", "first", "last", "mean of the last", "difference"), []
    for row in timed:
        losses = (decimal(loss, 4) for loss in (row.loss[0], row.loss[-1], analysis.mean_loss(row)))
        cells.append((row.step, *losses, table.percent(analysis.loss_difference(row, timed[0]))))
    if any(row.heldout_loss is not None for row in timed):
        headers += ("held-out", "difference of it")
        more = [
            (decimal(row.heldout_loss, 4), table.percent(analysis.heldout_difference(row, timed[0]))) for row in timed
        ]
        cells = [one + two for one, two in zip(cells, more, strict=True)]
    return {
        "loss_svg": charts.loss_curves(curves),
        "loss_rows": table.grid(headers, cells),
        "loss_gap": largest_loss_difference(rows),
    }


def _trust(run: Run, rows: list[Row]) -> dict:
    strips, strip_cells = [], []
    for row in rows:
        times = row.timing.step_ms if is_timed(row) else []
        why = reason_untimed(row) if not is_timed(row) else "" if times else "no raw times"
        strips.append((row.step, row.timing.median_ms or 0.0, times, why))
        ends = (decimal(min(times, default=None)), decimal(max(times, default=None)))
        strip_cells.append((row.step, len(times) or why, ends[0], _ms_cell(run, row), ends[1]))
    passes = max((len(passes_ms(row)) for row in rows), default=0)
    repeated = [(row.step, [*map(decimal, passes_ms(row))]) for row in rows if passes_ms(row)]
    pass_cells = [(step, *times, *["-"] * (passes - len(times))) for step, times in repeated]
    return {
        "strip_svg": charts.strip_plot(strips),
        "strip_rows": table.grid(("step", "timed steps", "fastest ms", "median ms", "slowest ms"), strip_cells),
        "pass_rows": table.grid(("step", *(f"pass {k}, ms" for k in range(1, passes + 1))), pass_cells),
        **_clocks(rows),
        "settings_rows": table.grid(("step", "settings"), [(row.step, _settings(row)) for row in rows]),
        "environment_rows": table.grid(("", "value"), asdict(run.environment).items() if run.environment else ()),
    }


def _clocks(rows: list[Row]) -> dict:
    """Clocks and power at the end of the timed steps, and their means while the same step ran on."""
    ends, means = [], []
    for row in rows:
        if state := row.gpu_state:
            mhz = (decimal(state.sm_clock_mhz, 0), decimal(state.max_sm_clock_mhz, 0))
            held_down_by = ", ".join(analysis.throttle_reasons(row)) or "-"
            ends.append((row.step, *mhz, decimal(state.temperature_c, 0), decimal(state.power_w), held_down_by))
        if row.energy_j_per_step is not None or row.clock_mhz is not None or row.power_w is not None:
            mean = (decimal(row.clock_mhz, 0), decimal(row.power_w), decimal(row.energy_j_per_step))
            means.append((row.step, *mean, table.tokens_per_joule(row)))
    end_headers = ("step", "SM MHz", "of at most", "temperature, °C", "power, W", "held down by")
    mean_headers = ("step", "mean SM MHz", "mean power, W", "J per step", "tokens/J")
    return {"clock_rows": table.grid(end_headers, ends), "energy_rows": table.grid(mean_headers, means)}


def _settings(row: Row) -> str:
    if not is_timed(row):
        return reason_untimed(row)
    listed = (f"{name} {value}" for name, value in vars(row.settings).items() if value is not None)
    return one_line(", ".join(listed), LONGEST_SETTINGS)


def decimal(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def arrow(before: float | None, after: float | None, digits: int = 0) -> str:
    return "" if before is None and after is None else f"{decimal(before, digits)} → {decimal(after, digits)}"


def kernel_name(name: str) -> str:
    """A kernel's name without what all names share. A long one loses its middle: ends tell kernels apart."""
    for noise in ("void ", "at::native::", "(anonymous namespace)::", "transformer_engine::"):
        name = name.replace(noise, "")
    cut = len(name) > LONGEST_KERNEL
    return f"{name[: LONGEST_KERNEL * 2 // 3]} … {name[-LONGEST_KERNEL // 3 :]}" if cut else name
