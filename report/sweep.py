"""Many shapes, each a run: how much each step gains where, and how near the predictions came."""

from itertools import pairwise
from statistics import median

from common.record import Study, Workload
from report.cells import gain_over, percent, time_or_status
from report.figures import Figures, Line, derive_study


def shapes(study: Study) -> list[Figures]:
    """The figures of every shape, by tokens a step, length and width."""
    every = [figures for figures in derive_study(study).values() if figures.run.workload]
    return sorted(every, key=lambda figures: _size(figures.run.workload))


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
        cells[line.name] = gain_over(before, line)
    return cells | {f"{line.name}, ms": time_or_status(line) for line in ran[-1:]}


def gains_by_step(every: list[Figures]) -> dict[str, list[float]]:
    """The measured gains over the step before, by step, of those steps that were predicted."""
    gains: dict[str, list[float]] = {}
    for figures in every:
        for before, line in predicted_pairs(figures):
            gains.setdefault(line.name, []).append(before.ms / line.ms)
    return gains


def predicted_pairs(figures: Figures) -> list[tuple[Line, Line]]:
    """Every step with the step before it, where both were predicted."""
    pairs = pairwise(figures.steps)
    return [(before, line) for before, line in pairs if None not in (before.error, line.error)]


def error_cells(shapes: list[Figures], guess: dict[str, float]) -> dict[str, str]:
    """How far predicted times, and predicted gains over the step before, lie from what was measured, and how
    far a constant gain for each step, `guess`, lies from it; empty without predictions."""
    errors, gains, guessed = [], [], []
    for figures in shapes:
        errors += [abs(line.error) for line in figures.steps if line.error is not None]
        for before, line in predicted_pairs(figures):
            measured = before.ms / line.ms
            gains.append(abs(before.row.predicted_ms / line.row.predicted_ms / measured - 1))
            if line.name in guess:
                guessed.append(abs(guess[line.name] / measured - 1))
    if not gains:
        return {}
    predictors = {figures.run.roofs.predictor or "-" for figures in shapes if figures.run.roofs} or {"-"}
    return {
        "predicted times": str(len(errors)),
        "median error": percent(median(errors), 0),
        "largest error": percent(max(errors), 0),
        "median error of gains": percent(median(gains), 0),
        "largest error of gains": percent(max(gains), 0),
        "median error of guessed gains": percent(median(guessed) if guessed else None, 0),
        "largest error of guessed gains": percent(max(guessed, default=None), 0),
        "predictor": ", ".join(sorted(predictors)),
    }


def constant_guess(every: list[Figures]) -> dict[str, float]:
    """For each step the median of its measured gains: what one would guess without knowing the shape. None
    of a step with one gain, whose guess would be the answer."""
    return {name: median(gains) for name, gains in gains_by_step(every).items() if len(gains) > 1}


def tables(study: Study) -> dict[str, list[dict]]:
    every = shapes(study)
    tables = {"Times faster than the step before:": [gain_cells(figures) for figures in every]}
    if predicted := error_cells(every, constant_guess(every)):
        tables["Predicted from the roofs:"] = [predicted]
    return tables
