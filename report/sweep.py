"""Many shapes, each a run: how much each step gains where, and how near the predictions came."""

import math
from itertools import pairwise
from statistics import median

from common.record import Study, Workload
from common.text import one_line
from report.charts import INK, figure, plain_numbers, png
from report.figures import Figures, figures, ratio
from report.table import percent, status_or_ms, times

FAR = 0.25  # an error of a prediction that is counted as far off
SURE = 0.02  # difference of two times beyond which a direction is counted


def shapes(study: Study) -> list[Figures]:
    """The figures of every shape, by tokens a step, length and width."""
    runs = [run for run in study.runs.values() if run.workload]
    return [
        figures(run) for run in sorted(runs, key=lambda run: (*column(run.workload), run.workload.n_embd))
    ]


def column(work: Workload) -> tuple[int, int]:
    """Tokens a step, and length of a sequence."""
    return work.batch_size * work.seq_len, work.seq_len


def gain_cells(made: Figures) -> dict[str, str]:
    """A shape, and how many times faster each step is than the step before; `fits` where the step before did
    not."""
    work, ran = made.run.workload, [line for line in made.steps if line.row.status != "skipped"]
    cells = {"channels": str(work.n_embd), "heads": str(work.n_head), "layers": str(work.n_layer)}
    cells |= {"T": str(work.seq_len), "tokens a step": f"{work.tokens_per_step:,}"}
    cells |= {f"{line.name}, ms": status_or_ms(line) for line in made.steps[:1]}
    for before, line in pairwise(made.steps):
        gain = "fits" if before.row.status == "oom" else times(ratio(line, before))
        cells[line.name] = gain if line.ms else line.row.status
    return cells | {f"{line.name}, ms": status_or_ms(line) for line in ran[-1:]}


def error_cells(runs: list[Figures]) -> dict[str, str]:
    """How far predicted times, and predicted gains over the step before, lie from what was measured; empty
    without."""
    errors, gains, foreseen = [], [], []
    for made in runs:
        lines = [line for line in made.steps if line.error is not None]
        errors += [abs(line.error) for line in lines]
        for before, line in pairwise(lines):
            predicted, measured = before.row.predicted_ms / line.row.predicted_ms, before.ms / line.ms
            gains.append(abs(predicted / measured - 1))
            if abs(measured - 1) > SURE:
                foreseen.append((predicted > 1) == (measured > 1))
    if not gains:
        return {}
    return {
        "times": str(len(errors)),
        "median error": percent(median(errors), 0),
        "largest error": percent(max(errors), 0),
        f"over {FAR:.0%}": str(sum(error > FAR for error in errors)),
        "median error of gains": percent(median(gains), 0),
        "largest error of gains": percent(max(gains), 0),
        "direction foreseen": f"{sum(foreseen)} of {len(foreseen)}",
    }


def tables(study: Study) -> dict[str, list[dict]]:
    rows = {"Times faster than the step before:": [*map(gain_cells, shapes(study))]}
    predicted = error_cells(shapes(study))
    return rows | ({"Predicted from the roofs:": [predicted]} if predicted else {})


def picture(study: Study) -> bytes | None:
    """For each step, its gain over the one before by width: a line for each number of tokens and length."""
    made, gains = shapes(study), {}
    for one in made:
        for before, line in pairwise(one.steps):
            if faster := ratio(line, before):
                points = gains.setdefault(line.name, {}).setdefault(column(one.run.workload), [])
                points.append((one.run.workload.n_embd, faster.value))
    if not gains:
        return None
    with figure(1.9 * len(gains) + 0.6) as drawn:
        panels = drawn.subplots(len(gains), sharex=True, squeeze=False)[:, 0]
        for axes, (step, columns) in zip(panels, gains.items(), strict=True):
            for tokens, T in dict.fromkeys(
                column(one.run.workload) for one in made
            ):  # one look in all panels
                points = columns.get((tokens, T), [(math.nan, math.nan)])
                axes.plot(*zip(*points, strict=True), label=f"{tokens:,} tokens, T {T}", marker=".")
            axes.axhline(1, color=INK, linewidth=0.7)
            axes.set(xscale="log", yscale="log", ylabel=one_line(step, 14))
            plain_numbers(axes.yaxis, (1, 1.2, 1.5, 2, 3, 5, 7))
        panels[-1].set_xlabel("channels")
        widths = sorted({one.run.workload.n_embd for one in made})
        panels[-1].set_xticks(widths, [str(width) for width in widths])
        panels[-1].set_xticks([], minor=True)
        drawn.supylabel("times faster than the step before", fontsize=9)
        drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
        return png(drawn)
