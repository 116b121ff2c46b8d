"""A run with the figures of its rows: what each is compared with, and why it may be wrong."""

from collections.abc import Iterable

from common.record import PATCHED, Environment, Run, Study
from report import doubts
from report.figures import Figures, Line, base_of, fastest_reference

VARIED = ("ablations", "parity")  # kinds of studies whose scripts may be patched


def derive(run: Run, among: Iterable[Run] = (), is_patched: bool = False) -> Figures:
    """All figures of a run. `among` are runs of the same machine at the same time, for its reference work.
    Where a script `is_patched`, its name promises nothing."""
    fastest = fastest_reference([run, *among])
    # A patch of a user's file that did not run is told with the lines that it would make.
    rows = [row for row in run.rows if row.step != PATCHED or row.status == "ok"]
    lines = [Line(row, run, fastest=fastest) for row in rows]
    lines += [Line(row, run, is_peer=True, fastest=fastest) for row in run.peers]
    machine = run.environment or Environment(device="unknown machine", device_type="unknown")
    figures = Figures(run, lines, machine)
    for k, line in enumerate(figures.steps):
        earlier = figures.steps[:k]
        line.base = base_of(line, earlier)
        timed = [other for other in [*earlier, line.base] if other and other.ms]
        line.before = timed[-1] if timed else None
    for line in lines:
        line.first = figures.first
    for line in figures.timed:
        line.doubts = doubts.of(line, figures, is_patched)
    return figures


def derive_study(study: Study) -> dict[str, Figures]:
    """The figures of every run of a study. Reference work is compared between all runs of one card."""
    of_card: dict[tuple, list[Run]] = {}
    for run in study.runs.values():
        of_card.setdefault(_card(run), []).append(run)
    figures = {}
    for name, run in study.runs.items():
        is_patched = study.kind in VARIED and name.partition(",")[0] != run.rows[0].step
        figures[name] = derive(run, of_card[_card(run)], is_patched)
    return figures


def _card(run: Run) -> tuple:
    """What tells the card of a run from others; on a CPU the processor, which several processes share."""
    if run.environment is None:
        return ()
    shared_by = run.workload.gpus if run.workload and run.environment.device_type == "cpu" else 1
    return run.environment.device, run.environment.gpu_uuid, shared_by
