"""Two runs beside each other: two machines, two versions, or two shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from common.record import Row, Run, differing_fields
from common.text import aligned
from report import story
from report.analysis import extent_ms, is_timed, reason_untimed, tells_apart
from report.doubts import SERIOUS, compared
from report.load import RecordError, environment_of, load_run
from report.table import commit_of, describe_passes, grid, legend, levels, ms_cell, speedup_cell, tflops

# What may differ while a median still means the same: how many steps were timed, and where the text came from.
HARMLESS_FIELDS = ("warmup", "steps", "data")


@dataclass
class Comparison:
    """What two runs say of each other."""

    claim: str  # of the last step that has a time in both
    sides: list[str]  # what A and B are
    notes: list[str]  # how their work differs, and what the speedups are over
    table: list[dict]
    doubted: list[str]
    meaning: str
    pictures: list[str]  # SVG


def compare_folders(a: Path, b: Path) -> Comparison:
    """What two run folders say of each other. Raises RecordError where they cannot be compared."""
    runs, (x, y) = (load_run(a), load_run(b)), (a.resolve(), b.resolve())
    names = (x.name, y.name) if x.name != y.name else (f"{x.parent.name}/{x.name}", f"{y.parent.name}/{y.name}")
    return compare(*runs, names)


def compare(a: Run, b: Run, names: tuple[str, str]) -> Comparison:
    """The ratios of two runs, step by step.

    The same workload: times, with the ratio that quartiles or passes allow at least and at most. Two shapes: speedups
    over the first row that both have, because times of different work say nothing about each other. Raises
    RecordError where neither can be compared.
    """
    if a.workload is None or b.workload is None:
        raise RecordError("a run whose workload is unknown cannot be compared")
    differing = differing_fields(a.workload, b.workload)
    serious = [name for name in differing if name not in HARMLESS_FIELDS]
    if "seed" in differing:
        raise RecordError(f"{names[0]} and {names[1]} ran different workloads: seeds differ")
    pairs = _pairs(a, b)
    timed = [pair for pair in pairs if all(map(is_timed, pair))]
    if not timed:
        raise RecordError(f"{names[0]} and {names[1]} have no step in common that has a time in both")
    sides, notes, doubted = [], [], legend(a, b)
    for letter, run, name in (("A", a, names[0]), ("B", b, names[1])):
        sides.append(f"{letter}: {', '.join([_describe(run, name), *describe_passes(run)])}")
        doubted += [f"{letter}, serious: {text}" for text in levels(run).get(SERIOUS, [])]
    if serious:
        notes.append(f"The work differs ({', '.join(serious)}): speedups are compared, times are not.")
        notes.append(f"Speedups are over {timed[0][0].step}, the first row that has a time in both.")
        table, shares = _speedup_table(pairs, timed[0], a, b), _pictures(pairs, a, b)[1:]
        return Comparison(f"{names[0]} beside {names[1]}: other work", sides, notes, table, doubted, "", shares)
    if differing:
        notes.append(f"A step is the same work in both, but {', '.join(differing)} differ.")
    table = [_time_cells(*pair, a, b) for pair in pairs]
    meaning = "A / B above 1 means that B is faster. The range divides the quartiles by each other, or the passes."
    return Comparison(_claim(*timed[-1], a, b, names), sides, notes, table, doubted, meaning, _pictures(pairs, a, b))


def text_of(made: Comparison) -> str:
    """A comparison for a terminal."""
    return "\n".join([*made.sides, *made.notes, "", aligned(made.table), *made.doubted, "", made.meaning]).rstrip()


def page_of(made: Comparison) -> str:
    """A comparison as one HTML file that looks as a report does. Raises ImportError without jinja2."""
    from report.page import environment  # what draws may be absent; the text must not be

    return environment().get_template("compare.html").render(made=made, title=made.claim)


def _claim(before: Row, after: Row, a: Run, b: Run, names: tuple[str, str]) -> str:
    speedup = compared(after, before, a, b)
    if speedup is None or speedup.mark:
        return f"{names[0]} beside {names[1]}: a serious doubt stands against a claim"
    if not tells_apart(after, before):
        return f"{after.step} is as fast in {names[1]} as in {names[0]}, within the spread of its times"
    return f"{after.step} is {speedup.words()} in {names[1]} than in {names[0]}"


def _pictures(pairs: list[tuple[Row, Row]], a: Run, b: Run) -> list[str]:
    """The time of every step in both runs, where kinds of kernels are known in kinds: in ms, and as shares."""
    bars = [replace(story.time_bar(run, row), name=f"{letter}: {row.step}")
            for pair in pairs for letter, run, row in zip("AB", (a, b), pair, strict=True)]  # fmt: skip
    return [*filter(None, story.whole_and_shares(bars))]


def _pairs(a: Run, b: Run) -> list[tuple[Row, Row]]:
    """The rows of both runs by name; a row that only one has gets a counterpart that says so."""
    rows_a, rows_b = ({row.step: row for row in [*run.steps, *run.peers]} for run in (a, b))
    absent_a, absent_b = ({"status": "absent", "reason": f"not in {letter}"} for letter in "AB")
    return [
        (rows_a.get(name) or Row(name, **absent_a), rows_b.get(name) or Row(name, **absent_b))
        for name in sorted(rows_a | rows_b)
    ]


def _describe(run: Run, name: str) -> str:
    environment = environment_of(run)
    return f"{name}: {environment.device}, torch {environment.torch}, commit {commit_of(run)}"


def _time_cells(a: Row, b: Row, run_a: Run, run_b: Run) -> dict[str, str]:
    ms = [ms_cell(row, run) if is_timed(row) else reason_untimed(row) for row, run in ((a, run_a), (b, run_b))]
    ratio = extent = "-"
    if speedup := compared(b, a, run_a, run_b):
        (low_a, high_a), (low_b, high_b) = extent_ms(a), extent_ms(b)
        ratio, extent = f"{speedup.ratio:.3f}{speedup.mark}", f"{low_a / high_b:.3f} to {high_a / low_b:.3f}"
    return {"step": a.step, "A ms": ms[0], "B ms": ms[1], "A / B": ratio, "range": extent}


def _speedup_table(pairs: list[tuple[Row, Row]], firsts: tuple[Row, Row], a: Run, b: Run) -> list[dict]:
    """Speedups over `firsts`, each within one run; but where either was busy, none is compared with another."""
    cells = []
    for pair in pairs:
        both = [*zip(pair, firsts, strict=True)]
        speedups = [compared(row, first, a, b) for row, first in both]
        words = [speedup_cell(row, first, a, b) if is_timed(row) else reason_untimed(row) for row, first in both]
        rates = [tflops(row.model_flops_per_s) for row in pair]
        ratio = f"{speedups[1].ratio / speedups[0].ratio:.3f}{max(s.mark for s in speedups)}" if all(speedups) else "-"
        cells.append((pair[0].step, *words, ratio, *rates))
    return grid(("step", "A speedup", "B speedup", "B / A", "A TFLOP/s", "B TFLOP/s"), cells)
