"""The report as one HTML file: the records of a run told to a reader, without torch and without a network.

All text comes from records that anybody may have written, so the template escapes everything; only the charts of
common/charts.py and difflib's table, which escape what they draw, are inserted as they are.
"""

from __future__ import annotations

import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from common import analysis, charts
from common.analysis import GIB, is_timed, median_ms, peak_bytes, quartiles_ms, why_untimed
from common.record import printable

SECTIONS = (
    ("headline", "Headline"),
    ("waterfall", "How the step shrank"),
    ("where", "Where the time went"),
    ("steps", "Step by step"),
    ("roofline", "Roofline"),
    ("loss", "Loss"),
    ("trust", "Can I trust this?"),
)
LONGEST_SETTINGS, KERNEL_NAME = 300, 120


def render(run: dict, table: tuple[list[str], list[list[str]]], remarks: list[str], words: dict[str, str]) -> str:
    """The page of an envelope.

    `table` and `remarks` are those of the printed report; `words` are its `machine`, `workload` and `convention`.
    Raises TypeError, ValueError or KeyError for a field of a wrong kind.
    """
    lines = analysis.headline(run)
    context = {
        "title": "Training step speedup",
        "headline": lines,
        "sections": SECTIONS,
        "sentences": [analysis.sentence(before, step) for before, step in analysis.consecutive(run["steps"])],
        "table_headers": table[0],
        "table_rows": table[1],
        "remarks": remarks,
        "warnings": analysis.warnings(run),
        "untimed": [f"{s['step']}: {why_untimed(s)}" for s in run["steps"] if not is_timed(s)],
        "pairs": [_pair(run["steps"], index) for index in range(1, len(run["steps"]))],
        "reproduce": run["command"] or "the command is not recorded",
        **words,
        **_waterfall(run),
        **_categories([*run["steps"], *run["peers"]], run["environment"].get("device_type") == "cpu"),
        **_roofline(run),
        **_loss(run["steps"]),
        **_trust(run),
    }
    loader = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("page.html")
    return template.render(context)


# --- sections -------------------------------------------------------------------------------------


def speedup_bars(run: dict) -> list[charts.Bar]:
    """Times faster than the first timed step; rows without a time keep their reason."""
    first = analysis.reference_step(run["steps"])
    return [
        charts.Bar(
            step["step"],
            median_ms(first) / median_ms(step),
            f"{median_ms(first) / median_ms(step):.1f}x ({median_ms(step):.1f} ms)",
        )
        if is_timed(step)
        else charts.Bar(step["step"], None, why_untimed(step))
        for step in run["steps"]
    ]


def _waterfall(run: dict) -> dict:
    times, memory = [], []
    for step, speedup in zip(run["steps"], speedup_bars(run), strict=True):
        if not is_timed(step):
            times.append(charts.Bar(step["step"], None, why_untimed(step)))
            memory.append(charts.Bar(step["step"], None, why_untimed(step)))
            continue
        low, high = quartiles_ms(step)
        label = f"{median_ms(step):.1f} ms, {speedup.value:.1f}x"
        times.append(charts.Bar(step["step"], median_ms(step), label, low, high))
        peak = peak_bytes(step)
        said = f"{peak / GIB:.1f} GiB" if peak else "not measured"
        memory.append(charts.Bar(step["step"], peak / GIB if peak else None, said))
    of_process = run["environment"].get("device_type") == "cpu"
    return {
        "time_svg": Markup(charts.falling_bars(times, "milliseconds")),
        "time_rows": [[b.name, _number(b.value), _number(b.low), _number(b.high), b.label] for b in times],
        "memory_svg": Markup(charts.falling_bars(memory, "GiB")),
        "memory_rows": [[bar.name, _number(bar.value), bar.label] for bar in memory],
        "memory_caption": "Peak memory of the whole process, GiB: on a CPU nothing counts the tensors alone."
        if of_process
        else "Peak of the CUDA allocator over the timed steps, GiB.",
    }


def _categories(rows: list[dict], on_cpu: bool) -> dict:
    caption = (
        "Milliseconds of the profiled step by kernel category; with the gaps, in which the GPU idles, they add up."
    )
    if on_cpu:
        caption = "Milliseconds of the profiled step by category of PyTorch's operators; profiling makes a step longer."
    off = [row["step"] for row in rows if is_timed(row) and analysis.profile_is_off(row) is not None]
    if off:
        caption += (
            f" Off the timed median by more than {analysis.MOST_PROFILE_OFF:.0%}: {', '.join(off)} (see the remarks)."
        )
    stacks = [
        (row["step"], times, "" if times else (why_untimed(row) if not is_timed(row) else "not profiled"))
        for row in rows
        for times in [analysis.category_ms(row)]
    ]
    names = [name for name in analysis.CATEGORIES if any(times and times.get(name) for _, times, _ in stacks)]
    if not names:
        return {
            "category_rows": [],
            "category_headers": [],
            "category_caption": "",
            "stacked_svg": None,
            "shares_svg": None,
        }
    cells = [
        [name, *([_number(times.get(n, 0.0)) for n in names] + [_number(sum(times.values()))] if times else [why])]
        for name, times, why in stacks
    ]
    return {
        "category_headers": ["ms per step", *names, "sum"],
        "category_caption": caption,
        "category_rows": cells,
        "stacked_svg": Markup(charts.stacked_bars(stacks, "milliseconds", shares=False)),
        "shares_svg": Markup(charts.stacked_bars(stacks, "milliseconds", shares=True)),
    }


def _pair(steps: list[dict], index: int) -> dict:
    """Code of two consecutive scripts, and what the machine did: against the last step before that has a time."""
    script_before, after = steps[index - 1], steps[index]
    before = next((step for step in reversed(steps[:index]) if is_timed(step)), None)
    code = analysis.code_diff(script_before, after)
    pair = {
        "before": script_before["step"],
        "after": after["step"],
        "compared": before["step"] if before else "",
        "sentence": analysis.sentence(before, after),
        "code": Markup(code) if code else None,
        "no_code": "The records hold no source to compare.",
        "facts": [],
        "categories": [],
        "kernels": [],
        "counts": "",
        "no_profile": "There is no profile of both steps, so kernels cannot be compared.",
    }
    if before is None or not is_timed(after):
        return pair | {"no_profile": f"There is nothing to compare: {pair['sentence']}"}
    pair["facts"] = _facts(before, after)
    changed = analysis.changed_categories(before, after)
    if changed:
        counts = analysis.count_changes(before, after)
        pair["counts"] = (
            f"Of the kernels by name, {counts['vanished']} vanished, {counts['appeared']} appeared and "
            f"{counts['stayed']} stayed; those with the largest change:"
        )
        pair["categories"] = [
            [
                row["name"],
                _arrow(row, "ms", 1),
                f"{row['after_ms'] - row['before_ms']:+,.1f}",
                "" if row["name"] == analysis.GAPS else _arrow(row, "launches"),
            ]
            for row in changed
        ]
        kernels = analysis.changed_kernels(before, after)
        pair["kernels"] = [
            [_kernel(row["name"]), row["what"], _arrow(row, "ms", 2), _arrow(row, "launches")] for row in kernels
        ]
    return pair


def _facts(before: dict, after: dict) -> list[list[str]]:
    def of(name: str) -> list[float | None]:
        return [(step["profile"] or {}).get(name) for step in (before, after)]

    peaks = [peak / GIB if peak else None for peak in (peak_bytes(before), peak_bytes(after))]
    rows = [
        ("ms per step", [median_ms(before), median_ms(after)], 1),
        ("peak GiB", peaks, 1),
        ("kernels launched (of a CPU: operators)", of("kernels_per_step"), 0),
        ("gaps, ms", [analysis.gaps_ms(before), analysis.gaps_ms(after)], 1),
        ("backward nodes of attention", of("autograd_nodes_attention"), 0),
        ("host waits for the GPU", [before.get("host_syncs"), after.get("host_syncs")], 0),
    ]
    shown = [
        [name, _number(a, digits), _number(b, digits), "-" if a is None or b is None else f"{b - a:+,.{digits}f}"]
        for name, (a, b), digits in rows
        if a is not None or b is not None
    ]
    bounds = [analysis.bound_by(step) for step in (before, after)]
    return shown if bounds == ["-", "-"] else [*shown, ["bound by", *bounds, ""]]


def _roofline(run: dict) -> dict:
    roofs = run.get("roofs") or {}
    named = {precision.upper(): roofs.get(f"{precision}_flops_per_s") for precision in analysis.PRECISIONS}
    rates = {name: rate for name, rate in named.items() if rate}
    points = []
    for step in run["steps"]:
        counted = step["bytes_per_step"]
        if is_timed(step) and counted and counted.get("value"):
            intensity = run["workload"]["flops_per_step"] / counted["value"]
            points.append((step, intensity, step["model_flops_per_s"]))
    nothing = {"roofline_rows": [], "roofline_svg": None, "roofline_caption": "", "no_roofline": ""}
    if not (rates and roofs.get("copy_bytes_per_s")):
        return nothing | {"no_roofline": "The roofs of this machine were not measured in this run."}
    if not points:
        return nothing | {"no_roofline": "No row holds the bytes of its step, so it has no place under the roofs."}
    untimed = [f"{step['step']}: {why_untimed(step)}" for step in run["steps"] if not is_timed(step)]
    sources = ", ".join(sorted({str(step["bytes_per_step"].get("source")) for step, _, _ in points}))
    placed = [(step["step"], intensity, rate) for step, intensity, rate in points]
    return nothing | {
        "roofline_svg": Markup(charts.roofline(placed, roofs["copy_bytes_per_s"], rates, untimed)),
        "roofline_rows": [
            *(
                [step["step"], _number(intensity), f"{rate / 1e12:,.4g}", analysis.of_roof(step, roofs)]
                for step, intensity, rate in points
            ),
            *([step["step"], "-", "-", why_untimed(step)] for step in run["steps"] if not is_timed(step)),
            *(
                [f"ridge of {name}", _number(rate / roofs["copy_bytes_per_s"]), f"{rate / 1e12:,.4g}", ""]
                for name, rate in rates.items()
            ),
        ],
        "roofline_caption": (
            f"Measured ceilings: copy bandwidth {roofs['copy_bytes_per_s'] / 1e9:,.0f} GB/s, and matrix products at "
            "this workload's shapes (gray, TFLOP/s); diamonds are the ridge points. FLOPs are the model's, by the "
            f"causal convention; bytes ({sources}) are the least a step has to move with activations of 2 bytes and "
            "FP32 weights: each operand of a matrix product once per product, and AdamW. Both are the same for every "
            "step, whatever format it computes in, so the points stand in one column."
        ),
    }


def _loss(steps: list[dict]) -> dict:
    timed = [step for step in steps if is_timed(step)]
    if not timed:
        return {"loss_rows": [], "loss_svg": None, "loss_caption": ""}
    return {
        "loss_svg": Markup(
            charts.loss_curves(
                [(s["step"], s["loss"], "") if is_timed(s) else (s["step"], [], why_untimed(s)) for s in steps]
            )
        ),
        "loss_rows": [
            [
                step["step"],
                *(f"{loss:.4f}" for loss in (step["loss"][0], step["loss"][-1], analysis.mean_loss(step))),
                analysis.loss_difference(step, timed[0]),
            ]
            if is_timed(step)
            else [step["step"], "-", "-", "-", why_untimed(step)]
            for step in steps
        ],
        "loss_caption": f"Loss of every training step, on the same batches. {analysis.largest_loss_difference(steps)}",
    }


def _trust(run: dict) -> dict:
    rows = [*run["steps"], *run["peers"]]
    strips = [
        (row["step"], median_ms(row), row["timing"].get("step_ms") or [], "no raw times")
        if is_timed(row)
        else (row["step"], 0.0, [], why_untimed(row))
        for row in rows
    ]
    clocks = [(row["step"], row["gpu_state"]) for row in rows if row.get("gpu_state")]
    return {
        "strip_svg": Markup(charts.strip_plot(strips)),
        "strip_rows": [
            [name, len(times), _number(min(times)), _number(middle), _number(max(times))] if times else [name, why]
            for name, middle, times, why in strips
        ],
        "clock_rows": [
            [
                name,
                *(_number(state.get(k)) for k in ("sm_clock_mhz", "max_sm_clock_mhz", "temperature_c", "power_w")),
                ", ".join(analysis.throttle_reasons({"gpu_state": state})) or "-",
            ]
            for name, state in clocks
        ],
        "settings_rows": [[row["step"], _settings(row)] for row in rows],
        "environment_rows": [
            [name, json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)]
            for name, value in run["environment"].items()
        ],
    }


def _settings(row: dict) -> str:
    if not is_timed(row):
        return why_untimed(row)
    return printable(
        ", ".join(f"{name} {value}" for name, value in row["settings"].items() if value is not None), LONGEST_SETTINGS
    )


# --- cells ----------------------------------------------------------------------------------------


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None or isinstance(value, str) else f"{value:,.{digits}f}"


def _arrow(row: dict, what: str, digits: int = 0) -> str:
    values = [row[f"before_{what}"], row[f"after_{what}"]]
    return " → ".join("-" if value is None else f"{value:,.{digits}f}" for value in values)


def _kernel(name: str) -> str:
    """A kernel's name without what all names share, its middle left out where it is long: ends tell them apart."""
    for noise in ("void ", "at::native::", "(anonymous namespace)::", "transformer_engine::"):
        name = name.replace(noise, "")
    return name if len(name) <= KERNEL_NAME else f"{name[: KERNEL_NAME * 2 // 3]} … {name[-KERNEL_NAME // 3 :]}"
