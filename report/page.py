"""The report as one HTML file that needs neither torch nor a network.

All text comes from records that anybody may have written, so the template escapes everything. Only the charts of
report/charts.py, which escape what they draw, are inserted as they are.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from common.record import PRECISIONS, Row, Run
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


def render(run: Run) -> str:
    """The page of a run."""
    context = {
        "title": "Training step speedup",
        "headline": analysis.headline(run),
        "machine": table.describe_machine(environment_of(run)),
        "workload": table.describe_workload(run.workload) if run.workload else "workload unknown",
        "convention": table.CONVENTION,
        "sections": SECTIONS,
        "sentences": [analysis.sentence(before, row) for before, row in analysis.consecutive(run.steps)],
        "table_rows": table.table_rows(run),
        "remarks": table.remarks(run),
        "doubts": analysis.doubts(run),
        "untimed": [f"{row.step}: {reason_untimed(row)}" for row in run.steps if not is_timed(row)],
        "pairs": [_pair(run.steps, index) for index in range(1, len(run.steps))],
        "reproduce": run.command or "the command is not recorded",
        **_waterfall(run),
        **_categories([*run.steps, *run.peers], environment_of(run).device_type == "cpu"),
        **_roofline(run),
        **_loss(run.steps),
        **_trust(run),
    }
    loader = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("page.html")
    return template.render(context)


def speedup_png(run: Run) -> bytes:
    """The picture of a run: times faster than the first row with a time."""
    preset = run.workload.preset if run.workload else "unknown workload"
    return charts.speedup_png(
        _speedup_bars(run), f"{environment_of(run).device}, {preset}: training step, times faster"
    )


# --- sections -------------------------------------------------------------------------------------


def _speedup_bars(run: Run) -> list[charts.Bar]:
    first = analysis.reference_row(run.steps)
    bars = []
    for row in run.steps:
        ratio = analysis.speedup(row, first) if is_timed(row) else None
        label = f"{ratio:.1f}x ({median_ms(row):.1f} ms)" if ratio else reason_untimed(row)
        bars.append(charts.Bar(row.step, ratio, label))
    return bars


def _waterfall(run: Run) -> dict:
    times, memory, reference = [], [], analysis.reference_row(run.steps)
    for row in run.steps:
        if not is_timed(row):
            times.append(charts.Bar(row.step, None, reason_untimed(row)))
            memory.append(charts.Bar(row.step, None, reason_untimed(row)))
            continue
        label = f"{median_ms(row):.1f} ms, {analysis.speedup(row, reference):.1f}x"
        times.append(charts.Bar(row.step, median_ms(row), label, *analysis.quartiles_ms(row)))
        gib = analysis.peak_gib(row)
        memory.append(charts.Bar(row.step, gib, f"{gib:.1f} GiB" if gib else "not measured"))
    on_cpu = environment_of(run).device_type == "cpu"
    return {
        "time_svg": Markup(charts.falling_bars(times, "milliseconds")),
        "time_rows": [
            {
                "step": b.name,
                "ms per step": decimal(b.value),
                "p25": decimal(b.low),
                "p75": decimal(b.high),
                "": b.label,
            }
            for b in times
        ],
        "memory_svg": Markup(charts.falling_bars(memory, "GiB")),
        "memory_rows": [{"step": bar.name, "GiB": decimal(bar.value), "": bar.label} for bar in memory],
        "memory_caption": "Peak memory of the whole process, GiB. On a CPU nothing counts the tensors alone."
        if on_cpu
        else "Peak of the CUDA allocator over the timed steps, GiB.",
    }


def _categories(rows: list[Row], on_cpu: bool) -> dict:
    caption = (
        "Milliseconds of the profiled step by kernel category. With the gaps, in which the GPU idles, they add up."
    )
    if on_cpu:
        caption = "Milliseconds of the profiled step by category of PyTorch's operators. Profiling makes a step longer."
    if off := [row.step for row in rows if is_timed(row) and analysis.describe_profile_offset(row)]:
        caption += f" Profiling ran slower or faster than timing: {', '.join(off)} (see the last section)."
    stacks = []
    for row in rows:
        times = analysis.category_ms(row) if is_timed(row) else None
        stacks.append((row.step, times, "" if times else "not profiled" if is_timed(row) else reason_untimed(row)))
    names = [name for name in charts.CATEGORY_COLORS if any(times and times[name] for _, times, _ in stacks)]
    if not names:
        return {"category_rows": [], "category_caption": "", "stacked_svg": None, "shares_svg": None}
    table_rows = [
        {"ms per step": step}
        | {name: decimal(times[name]) if times else "" for name in names}
        | {"sum": decimal(sum(times.values())) if times else why}
        for step, times, why in stacks
    ]
    return {
        "category_caption": caption,
        "category_rows": table_rows,
        "stacked_svg": Markup(charts.stacked_bars(stacks, "milliseconds", shares=False)),
        "shares_svg": Markup(charts.stacked_bars(stacks, "milliseconds", shares=True)),
    }


def _pair(rows: list[Row], index: int) -> dict:
    """Code of two consecutive scripts, and what the machine did: against the last row before that has a time."""
    script_before, after = rows[index - 1], rows[index]
    before = next((row for row in reversed(rows[:index]) if is_timed(row)), None)
    pair = {
        "before": script_before.step,
        "after": after.step,
        "compared": before.step if before else "",
        "sentence": analysis.sentence(before, after),
        "code": analysis.code_diff(script_before, after),
        "facts": [],
        "categories": [],
        "kernels": [],
        "counts": "",
        "no_profile": "There is no profile of both steps, so kernels cannot be compared.",
    }
    if before is None or not is_timed(after):
        return pair | {"no_profile": f"There is nothing to compare: {pair['sentence']}"}
    pair["facts"] = _facts(before, after)
    if categories := analysis.changed_categories(before, after):
        kernels = analysis.changed_kernels(before, after)
        vanished, appeared = (sum(k.kind == kind for k in kernels) for kind in ("vanished", "appeared"))
        stayed = len(kernels) - vanished - appeared
        pair["counts"] = (
            f"Of the kernels by name, {vanished} vanished, {appeared} appeared and {stayed} stayed. "
            "Those with the largest change:"
        )
        pair["categories"] = [
            {
                "category": change.name,
                "ms": arrow(change.before_ms, change.after_ms, 1),
                "change": f"{change.ms:+,.1f}",
                "launches": arrow(change.before_launches, change.after_launches),
            }
            for change in categories
        ]
        pair["kernels"] = [
            {
                "kernel": kernel_name(change.name),
                "": change.kind,
                "ms": arrow(change.before_ms, change.after_ms, 2),
                "launches": arrow(change.before_launches, change.after_launches),
            }
            for change in kernels[:MOST_KERNELS]
        ]
    return pair


def _facts(before: Row, after: Row) -> list[dict]:
    def of_profile(name: str) -> list[float | None]:
        return [getattr(row.profile, name) if row.profile else None for row in (before, after)]

    pairs = [
        ("ms per step", [median_ms(before), median_ms(after)], 1),
        ("peak GiB", [analysis.peak_gib(before), analysis.peak_gib(after)], 1),
        ("kernels launched (of a CPU: operators)", of_profile("kernels_per_step"), 0),
        ("gaps, ms", [analysis.gaps_ms(before), analysis.gaps_ms(after)], 1),
        ("backward nodes of attention", of_profile("autograd_nodes_attention"), 0),
        ("host waits for the GPU", [before.host_syncs, after.host_syncs], 0),
    ]
    facts = [
        {"": name, "before": decimal(a, digits), "after": decimal(b, digits)}
        | {"change": "-" if a is None or b is None else f"{b - a:+,.{digits}f}"}
        for name, (a, b), digits in pairs
        if a is not None or b is not None
    ]
    bounds = [analysis.describe_bound(row) for row in (before, after)]
    return facts + (
        [] if bounds == ["-", "-"] else [{"": "bound by", "before": bounds[0], "after": bounds[1], "change": ""}]
    )


def _roofline(run: Run) -> dict:
    nothing = {"roofline_rows": [], "roofline_svg": None, "roofline_caption": "", "no_roofline": ""}
    copy = run.roofs.copy_bytes_per_s if run.roofs else None
    measured = {p.upper(): getattr(run.roofs, f"{p}_flops_per_s") for p in PRECISIONS} if run.roofs else {}
    rates = {name: rate for name, rate in measured.items() if rate}
    if not (rates and copy):
        return nothing | {"no_roofline": "The roofs of this machine were not measured in this run."}
    counted = [row for row in run.steps if is_timed(row) and row.bytes_per_step and row.bytes_per_step.value]
    if not counted:
        return nothing | {"no_roofline": "No row holds the bytes of its step, so it has no place under the roofs."}
    points = [(row, run.workload.flops_per_step / row.bytes_per_step.value) for row in counted]
    untimed = [f"{row.step}: {reason_untimed(row)}" for row in run.steps if not is_timed(row)]
    placed = [(row.step, intensity, row.model_flops_per_s) for row, intensity in points]
    rows = [(row.step, intensity, row.model_flops_per_s, table.describe_share_of_roof(row, run.roofs))
            for row, intensity in points]  # fmt: skip
    rows += [(f"ridge of {name}", rate / copy, rate, "") for name, rate in rates.items()]
    return nothing | {
        "roofline_svg": Markup(charts.roofline(placed, copy, rates, untimed)),
        "roofline_rows": [
            {"": name, "FLOP per byte": decimal(intensity), "TFLOP/s": table.tflops(rate), "of roof": share}
            for name, intensity, rate, share in rows
        ],
        "roofline_caption": (
            f"Measured ceilings: copy bandwidth {copy / 1e9:,.0f} GB/s, and matrix products at this workload's shapes "
            "(gray, TFLOP/s). Diamonds are the ridge points. FLOPs are the model's, by the causal convention. Bytes "
            "are counted, not measured: the least that a step has to move, with activations of 2 bytes and FP32 "
            "weights, each operand of a matrix product once per product, and AdamW. Both are the same for every step, "
            "whatever format it computes in, so the points stand in one column."
        ),
    }


def _loss(rows: list[Row]) -> dict:
    timed = [row for row in rows if is_timed(row)]
    if not timed:
        return {"loss_rows": [], "loss_svg": None, "loss_caption": ""}
    curves = [
        (row.step, row.loss if is_timed(row) else [], "" if is_timed(row) else reason_untimed(row)) for row in rows
    ]
    return {
        "loss_svg": Markup(charts.loss_curves(curves)),
        "loss_rows": [
            {
                "step": row.step,
                "first": f"{row.loss[0]:.4f}",
                "last": f"{row.loss[-1]:.4f}",
                "mean of the last": f"{analysis.mean_loss(row):.4f}",
                "difference": table.percent(analysis.loss_difference(row, timed[0])),
            }
            for row in timed
        ],
        "loss_caption": f"Loss of every training step, on the same batches. {analysis.largest_loss_difference(rows)}",
    }


def _trust(run: Run) -> dict:
    rows = [*run.steps, *run.peers]
    strips, strip_rows, clock_rows = [], [], []
    for row in rows:
        times = row.timing.step_ms if is_timed(row) else []
        why = reason_untimed(row) if not is_timed(row) else "" if times else "no raw times"
        strips.append((row.step, median_ms(row) if is_timed(row) else 0.0, times, why))
        strip_rows.append(
            {"step": row.step, "timed steps": len(times) or why}
            | {"fastest ms": decimal(min(times, default=None)), "median ms": decimal(row.timing.median_ms)}
            | {"slowest ms": decimal(max(times, default=None))}
        )
        if state := row.gpu_state:
            clock_rows.append(
                {
                    "step": row.step,
                    "SM MHz": decimal(state.sm_clock_mhz, 0),
                    "of at most": decimal(state.max_sm_clock_mhz, 0),
                }
                | {"temperature, °C": decimal(state.temperature_c, 0), "power, W": decimal(state.power_w)}
                | {"held down by": ", ".join(analysis.throttle_reasons(row)) or "-"}
            )
    environment = asdict(run.environment) if run.environment else {}
    return {
        "strip_svg": Markup(charts.strip_plot(strips)),
        "strip_rows": strip_rows,
        "clock_rows": clock_rows,
        "settings_rows": [{"step": row.step, "settings": _settings(row)} for row in rows],
        "environment_rows": [{"": name, "value": str(value)} for name, value in environment.items()],
    }


def _settings(row: Row) -> str:
    if not is_timed(row):
        return reason_untimed(row)
    listed = [f"{name} {value}" for name, value in vars(row.settings).items() if value is not None]
    return one_line(", ".join(listed), LONGEST_SETTINGS)


# --- cells ----------------------------------------------------------------------------------------


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
