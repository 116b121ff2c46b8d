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
from report.analysis import is_timed, median_ms, reason_untimed
from report.load import environment_of

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
    rows, steps = [*run.steps, *run.peers], [*analysis.consecutive(run.steps)]
    context = {
        "title": "Training step speedup",
        "headline": analysis.headline(run),
        "machine": table.describe_machine(environment_of(run)),
        "workload": table.describe_workload(run.workload) if run.workload else "workload unknown",
        "convention": table.CONVENTION,
        "sections": SECTIONS,
        "on_cpu": environment_of(run).device_type == "cpu",
        "sentences": [analysis.sentence(before, row) for before, row in steps],
        "table_rows": table.table_rows(run),
        "remarks": table.remarks(run),
        "doubts": analysis.doubts(run),
        "untimed": [f"{row.step}: {reason_untimed(row)}" for row in run.steps if not is_timed(row)],
        "pairs": [_pair(script, *pair) for script, pair in zip(run.steps, steps[1:], strict=False)],
        "reproduce": run.command or "the command is not recorded",
        **_waterfall(run.steps),
        **_categories(rows),
        **_roofline(run),
        **_loss(run.steps),
        **_trust(rows, asdict(run.environment) if run.environment else {}),
    }
    loader = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("page.html")
    return template.render(context)


def speedup_png(run: Run) -> bytes:
    """The picture of a run: times faster than the first row with a time."""
    first = analysis.reference_row(run.steps)

    def bar(row: Row) -> charts.Bar:
        ratio = analysis.speedup(row, first)
        return charts.Bar(row.step, ratio, f"{ratio:.1f}x ({median_ms(row):.1f} ms)")

    preset = run.workload.preset if run.workload else "unknown workload"
    title = f"{environment_of(run).device}, {preset}: training step, times faster"
    return charts.speedup_png(_bars(run.steps, bar), title)


def _bars(rows: list[Row], bar: Callable[[Row], charts.Bar]) -> list[charts.Bar]:
    """`bar` of every row that has a time; of the others their reason."""
    return [bar(row) if is_timed(row) else charts.Bar(row.step, None, reason_untimed(row)) for row in rows]


def _waterfall(rows: list[Row]) -> dict:
    reference = analysis.reference_row(rows)

    def time(row: Row) -> charts.Bar:
        label = f"{median_ms(row):.1f} ms, {analysis.speedup(row, reference):.1f}x"
        return charts.Bar(row.step, median_ms(row), label, *analysis.quartiles_ms(row))

    def memory(row: Row) -> charts.Bar:
        gib = analysis.peak_gib(row)
        return charts.Bar(row.step, gib, f"{gib:.1f} GiB" if gib else "not measured")

    times, memories = _bars(rows, time), _bars(rows, memory)
    time_cells = [(bar.name, *map(decimal, (bar.value, bar.low, bar.high)), bar.label) for bar in times]
    return {
        "time_svg": charts.falling_bars(times, "milliseconds"),
        "time_rows": table.grid(("step", "ms per step", "p25", "p75", ""), time_cells),
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
        "profiled_off": [row.step for row in rows if is_timed(row) and analysis.describe_profile_offset(row)],
        "stacked_svg": names and charts.stacked_bars(stacks, "milliseconds", shares=False),
        "shares_svg": names and charts.stacked_bars(stacks, "milliseconds", shares=True),
    }


def _pair(script_before: Row, before: Row | None, after: Row) -> dict:
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
        "sentence": analysis.sentence(before, after),
        "code": analysis.code_diff(script_before, after),
        "facts": _facts(before, after) if comparable else [],
        "categories": table.grid(("category", "ms", "change", "launches"), category_cells),
        "kinds": Counter(kernel.kind for kernel in kernels),
        "kernels": table.grid(("kernel", "", "ms", "launches"), kernel_cells),
    }


def _facts(before: Row, after: Row) -> list[dict]:
    facts = []
    for name, (figure, digits) in FACTS.items():
        a, b = figure(before), figure(after)
        if a is not None or b is not None:
            change = "-" if a is None or b is None else f"{b - a:+,.{digits}f}"
            facts.append((name, decimal(a, digits), decimal(b, digits), change))
    if analysis.bound(before) or analysis.bound(after):
        facts.append(("bound by", analysis.describe_bound(before), analysis.describe_bound(after), ""))
    return table.grid(("", "before", "after", "change"), facts)


def _roofline(run: Run) -> dict:
    copy, rates = (run.roofs.copy_bytes_per_s, table.measured_roofs(run.roofs)) if run.roofs else (None, {})
    if not (rates and copy):
        return {"no_roofline": "The roofs of this machine were not measured in this run."}
    counted = [row for row in run.steps if is_timed(row) and row.bytes_per_step and row.bytes_per_step.value]
    if not counted:
        return {"no_roofline": "No row holds the bytes of its step, so it has no place under the roofs."}
    points = [(row.step, run.workload.flops_per_step / row.bytes_per_step.value, row.model_flops_per_s)
              for row in counted]  # fmt: skip
    untimed = [f"{row.step}: {reason_untimed(row)}" for row in run.steps if not is_timed(row)]
    shares = [table.describe_share_of_roof(row, run.roofs) for row in counted] + [""] * len(rates)
    ridges = [(f"ridge of {name}", rate / copy, rate) for name, rate in rates.items()]
    cells = [(name, decimal(intensity), table.tflops(rate)) for name, intensity, rate in points + ridges]
    cells = [(*three, share) for three, share in zip(cells, shares, strict=True)]
    return {
        "no_roofline": "",
        "roofline_svg": charts.roofline(points, copy, rates, untimed),
        "roofline_rows": table.grid(("", "FLOP per byte", "TFLOP/s", "of roof"), cells),
        "copy_gb_per_s": f"{copy / 1e9:,.0f}",
    }


def _loss(rows: list[Row]) -> dict:
    timed = [row for row in rows if is_timed(row)]
    if not timed:
        return {"loss_rows": []}
    curves = [(row.step, row.loss, "") if is_timed(row) else (row.step, [], reason_untimed(row)) for row in rows]
    cells = []
    for row in timed:
        losses = (decimal(loss, 4) for loss in (row.loss[0], row.loss[-1], analysis.mean_loss(row)))
        cells.append((row.step, *losses, table.percent(analysis.loss_difference(row, timed[0]))))
    return {
        "loss_svg": charts.loss_curves(curves),
        "loss_rows": table.grid(("step", "first", "last", "mean of the last", "difference"), cells),
        "loss_gap": analysis.largest_loss_difference(rows),
    }


def _trust(rows: list[Row], environment: dict) -> dict:
    strips, strip_cells, clocks = [], [], []
    for row in rows:
        times = row.timing.step_ms if is_timed(row) else []
        why = reason_untimed(row) if not is_timed(row) else "" if times else "no raw times"
        strips.append((row.step, row.timing.median_ms or 0.0, times, why))
        figures = (min(times, default=None), row.timing.median_ms, max(times, default=None))
        strip_cells.append((row.step, len(times) or why, *map(decimal, figures)))
        if state := row.gpu_state:
            figures = (
                (state.sm_clock_mhz, 0),
                (state.max_sm_clock_mhz, 0),
                (state.temperature_c, 0),
                (state.power_w, 1),
            )
            held_down_by = ", ".join(analysis.throttle_reasons(row)) or "-"
            clocks.append((row.step, *(decimal(*figure) for figure in figures), held_down_by))
    return {
        "strip_svg": charts.strip_plot(strips),
        "strip_rows": table.grid(("step", "timed steps", "fastest ms", "median ms", "slowest ms"), strip_cells),
        "clock_rows": table.grid(
            ("step", "SM MHz", "of at most", "temperature, °C", "power, W", "held down by"), clocks
        ),
        "settings_rows": table.grid(("step", "settings"), [(row.step, _settings(row)) for row in rows]),
        "environment_rows": table.grid(("", "value"), environment.items()),
    }


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
