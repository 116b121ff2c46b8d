"""What each choice inside a script gives, from the records of `python -m anatomy.ablations`: docs/performance.md, and
docs/scaling.md for choices of how several processes share the model."""

from __future__ import annotations

import json
from pathlib import Path

from common.record import Row
from report import analysis
from report.causal_claims import SLICE
from report.table import percent, pipe_table

LEGEND = (
    "*Unchanged* is the script as it is, *varied* the script with this one choice changed, quartiles in brackets. "
    "*Difference* is varied less unchanged, so a minus sign is a gain, and so are *GiB* and *loss*. *Predicted* was "
    f"written before, by arithmetic for `{SLICE}` except where it names another workload."
)


def sections(machine: Path) -> list[str]:
    """A heading and a table per workload, above the first what its columns are."""
    parts = []
    for path in sorted(machine.glob("*/ablations.json")):
        legend = [] if parts else [LEGEND]
        table = _table(json.loads(path.read_text())["variants"])
        parts += [f"### What each choice gives: {path.parent.name}", *legend, table]
    return parts


def _table(variants: list[dict]) -> str:
    cells = []
    for variant in variants:
        timing, baseline = variant["timing"], variant["baseline"]["timing"]
        difference = loss = variant["reason"] or "-"
        if timing["median_ms"] is not None and baseline["median_ms"] is not None:
            difference = f"{timing['median_ms'] - baseline['median_ms']:+.1f} ms"
            varied, unchanged = (Row("", loss=recorded["loss"]) for recorded in (variant, variant["baseline"]))
            loss = percent(analysis.loss_difference(varied, unchanged))
        peaks = [recorded.get("peak_allocated_bytes") for recorded in (variant, variant["baseline"])]
        memory = f"{(peaks[0] - peaks[1]) / analysis.GIB:+.1f}" if all(peaks) else "-"
        script, commit = f"{variant['script']}, {variant['kind']}", (variant.get("commit") or "-")[:7]
        times = (_quartiles(baseline), _quartiles(timing))
        cells.append((variant["name"], script, variant["predicted"], *times, difference, memory, loss, commit))
    headers = (
        "variant",
        "script",
        "predicted",
        "unchanged, ms (p25-p75)",
        "varied, ms",
        "difference",
        "GiB",
        "loss",
        "commit",
    )
    return pipe_table(headers, cells, n_left=3)


def _quartiles(timing: dict) -> str:
    if timing["median_ms"] is None:
        return "-"
    return f"{timing['median_ms']:.1f} ({timing['p25_ms']:.1f}-{timing['p75_ms']:.1f})"
