"""Many shapes, each a run: how much each step gains where, and how near the predictions came."""

from itertools import pairwise
from statistics import median

from common.record import Study, Workload
from report.cells import gain, percent, time_or_status
from report.figures import Figures, derive, ratio

FAR = 0.25  # an error of a prediction that is counted as far off
SURE = 0.02  # difference of two times beyond which a direction is counted


def shapes(study: Study) -> list[Figures]:
    """The figures of every shape, by tokens a step, length and width."""
    runs = [run for run in study.runs.values() if run.workload]
    return [derive(run) for run in sorted(runs, key=lambda run: _size(run.workload))]


def _size(work: Workload) -> tuple[int, int, int]:
    return work.batch_size * work.seq_len, work.seq_len, work.n_embd


def gain_cells(figures: Figures) -> dict[str, str]:
    """A shape, and how many times faster each step is than the step before; `fits` where the step before did
    not."""
    work = figures.run.workload
    cells = {"channels": str(work.n_embd), "heads": str(work.n_head), "layers": str(work.n_layer)}
    cells |= {"T": str(work.seq_len), "tokens a step": f"{work.tokens_per_step:,}"}
    ran = [line for line in figures.steps if line.row.status != "skipped"]
    cells |= {f"{line.name}, ms": time_or_status(line) for line in figures.steps[:1]}
    for before, line in pairwise(figures.steps):
        if not line.ms:
            cells[line.name] = line.row.status
        elif before.row.status == "oom":
            cells[line.name] = "fits"
        else:
            cells[line.name] = gain(ratio(line, before))
    return cells | {f"{line.name}, ms": time_or_status(line) for line in ran[-1:]}


def error_cells(shapes: list[Figures]) -> dict[str, str]:
    """How far predicted times, and predicted gains over the step before, lie from what was measured; empty
    without."""
    errors, gains, foreseen = [], [], []
    for figures in shapes:
        lines = [line for line in figures.steps if line.error is not None]
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
    every = shapes(study)
    tables = {"Times faster than the step before:": [gain_cells(figures) for figures in every]}
    if predicted := error_cells(every):
        tables["Predicted from the roofs:"] = [predicted]
    return tables
