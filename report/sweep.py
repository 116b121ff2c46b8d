"""Many shapes, each a run: how much each step gains where."""

from itertools import pairwise
from operator import attrgetter

from common.record import Study
from report.cells import gain_over, time_or_status
from report.derive import derive_study
from report.figures import Figures


def shapes(study: Study) -> list[Figures]:
    """The figures of every shape, by tokens a step, length and width."""
    every = [figures for figures in derive_study(study).values() if figures.run.workload]
    size = attrgetter("tokens_per_step", "seq_len", "n_embd")
    return sorted(every, key=lambda figures: size(figures.run.workload))


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


def tables(study: Study) -> dict[str, list[dict]]:
    return {"Times faster than the step before:": [gain_cells(figures) for figures in shapes(study)]}
