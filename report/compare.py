"""Two runs, row by row."""

from pathlib import Path

from common.record import Run
from common.text import aligned, one_line
from report.cells import gain, only_filled, time_or_status
from report.figures import Figures, Line, derive, ratio
from report.load import RecordError, load
from report.sentences import describe_machine

# Fields of workloads that may differ where times are compared: a step takes as long with another text.
HARMLESS = {"warmup", "steps", "text", "text_sha256"}


def compare(a: Path, b: Path) -> str:
    """Two run folders for a terminal: times of the same work, otherwise speedups. Raises RecordError."""
    sides = {"A": _figures(a), "B": _figures(b)}
    in_b = {line.name: line for line in sides["B"].timed}
    pairs = [(line, in_b[line.name]) for line in sides["A"].timed if line.name in in_b]
    if not pairs:
        raise RecordError("they have no row in common that has a time in both")
    differing = sides["A"].run.workload.differing(sides["B"].run.workload)
    comparable = set(differing) <= HARMLESS
    note = f"The workload differs in {', '.join(differing)}." if differing else "The workload is the same."
    if comparable:
        note += " Where A / B is above 1, B is faster."
    machines = [f"{side}: {describe_machine(figures.environment)}" for side, figures in sides.items()]
    remarks = [f"{side}: {text}" for side, figures in sides.items() for text in figures.remarks]
    table = aligned(only_filled(_rows(pairs, comparable)))
    unshared = _unshared(sides, {line.name for line, _ in pairs})
    return "\n".join([*machines, note, *unshared, "", table, "", *remarks])


def _unshared(sides: dict[str, Figures], shared: set[str]) -> list[str]:
    """For each side the rows that have a time there alone, in a sentence."""
    sentences = []
    for side, figures in sides.items():
        if names := [line.name for line in figures.timed if line.name not in shared]:
            sentences.append(f"Only {side} has a time of {', '.join(names)}.")
    return sentences


def _figures(folder: Path) -> Figures:
    run = load(folder)
    if not isinstance(run, Run) or not run.workload:
        raise RecordError(
            f"{one_line(folder)}: a sweep or another study cannot be compared, give two runs of steps"
        )
    return derive(run)


def _rows(pairs: list[tuple[Line, Line]], comparable: bool) -> list[dict[str, str]]:
    """Times of both runs, B's gain over A where they did comparable work, and gains over the first common
    row."""
    first_a, first_b = pairs[0]
    rows = []
    for a, b in pairs:
        rows.append(
            {
                "step": a.name,
                "A, ms": time_or_status(a, with_range=True),
                "B, ms": time_or_status(b, with_range=True),
                "A / B": gain(ratio(b, a)) if comparable else "-",
                f"A x {first_a.name}": gain(ratio(a, first_a)),
                f"B x {first_a.name}": gain(ratio(b, first_b)),
            }
        )
    return rows
