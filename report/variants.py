"""What each choice inside a script gives, from the records of `python -m anatomy.ablations`: docs/performance.md, and
docs/scaling.md for choices of how several processes share the model."""

from __future__ import annotations

from pathlib import Path

from report import analysis
from report.causes import Variant, gain_ms, read_causes, time_cell
from report.records import SLICE
from report.table import percent, pipe_table

LEGEND = (
    "*Unchanged* is the script as it is, *varied* the script with this one choice changed, quartiles in brackets. "
    "*Difference* is the varied time less the unchanged one, so a minus sign is a gain. *GiB* is the same of the peak "
    "memory, and *loss* of the mean loss, in per cent. *Predicted* was written before, by arithmetic for "
    f"`{SLICE}` except where it names another workload: in the tables of others it shows what was thought of, and is "
    "no prediction for them."
)
HEADERS = ("variant", "script", "predicted", "unchanged, ms (p25-p75)", "varied, ms", "difference", "GiB", "loss",
           "commit")  # fmt: skip


def sections(machine: Path) -> list[str]:
    """A heading and a table per workload, above the first what its columns are."""
    parts = []
    for path in sorted(machine.glob("*/ablations.json")):
        legend = [] if parts else [LEGEND]
        table = pipe_table(HEADERS, map(_cells, read_causes(path).variants), n_left=3)
        parts += [f"### What each choice gives: {path.parent.name}", *legend, table]
    return parts


def _cells(variant: Variant) -> tuple[str, ...]:
    both = (variant, variant.baseline)
    more_ms, peaks = gain_ms(*both), [one.peak_allocated_bytes for one in both]
    difference = loss = variant.reason or "-"
    if more_ms is not None:
        difference = f"{more_ms:+.1f} ms"
        loss = percent(analysis.loss_difference(*(one.row for one in both)))
    memory = f"{(peaks[0] - peaks[1]) / analysis.GIB:+.1f}" if all(peaks) else "-"
    script, commit = f"{variant.script}, {variant.kind}", (variant.commit or "-")[:7]
    times = (time_cell(variant.baseline), time_cell(variant))
    return variant.name, script, variant.predicted, *times, difference, memory, loss, commit
