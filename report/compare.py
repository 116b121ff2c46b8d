"""Two runs, row by row; with a bound, whether the second one bears out the first.

Ratios of times are also shown for cards that are equal: divided by how much longer the reference work took
around the second run, in the median over all rows. So a slower card is told from slower code.
"""

from pathlib import Path
from statistics import median

from common.record import Run
from common.text import aligned, one_line
from report.cells import gain, number, time_with_range
from report.derive import derive
from report.doubts import remarks
from report.figures import MARK, Figures, Line, launch_us, ratio, reference_ms, waits_for_the_host
from report.load import DIFFER, RecordError, load
from report.sentences import describe_machine
from report.table import only_filled

# Fields of workloads that may differ where times are compared: a step takes as long with another text.
HARMLESS = {"warmup", "steps", "text", "text_sha256"}
OF_FILE = {"text", "text_sha256"}  # with --model they are of the file itself
SLOW_HOST = 1.25  # times as long as in A, from which launches excuse a row whose GPU waits for them
BORNE_OUT = "B bears out A"

Pair = tuple[Line, Line]  # a row of A, and of B


def compare(a: Path, b: Path, bound: float | None = None) -> tuple[str, bool]:
    """Two run folders for a terminal: times of the same work, otherwise speedups; and whether B bears out A,
    which is asked with a `bound`, the share by which a ratio may differ from 1. Raises RecordError."""
    sides = {"A": _figures(a), "B": _figures(b)}
    in_b = {line.name: line for line in sides["B"].timed}
    pairs = [(line, in_b[line.name]) for line in sides["A"].timed if line.name in in_b]
    if not pairs:
        raise RecordError(
            "they have no row in common that has a time in both: give two runs of the same steps"
        )
    differing = sides["A"].run.workload.differing(sides["B"].run.workload)
    harmless = HARMLESS - (OF_FILE if sides["A"].run.workload.model else set())
    comparable, card = set(differing) <= harmless, card_ratio(pairs)
    note = f"The workload differs in {', '.join(differing)}." if differing else "The workload is the same."
    if comparable:
        note += (
            f" Where A / B is above 1, B is faster. The reference work took {card:.3f} times as long in B; "
            "times of equal cards are divided by that."
        )
    machines = [f"{side}: {describe_machine(figures.environment)}" for side, figures in sides.items()]
    unusual = [f"{side}: {text}" for side, figures in sides.items() for text in remarks(figures)]
    table = aligned(only_filled(_rows(pairs, card, comparable)))
    shared, unshared = {line.name for line, _ in pairs}, []
    for side, figures in sides.items():
        if names := [line.name for line in figures.timed if line.name not in shared]:
            unshared.append(f"Only {side} has a time of {', '.join(names)}.")
    lines = [*machines, note, *unshared, "", table, "", *unusual]
    if bound is None:
        return "\n".join(lines), True
    failed = objections(sides["A"], sides["B"], pairs, bound) if comparable else ["it did other work"]
    lines += [f"B does not bear out A: {line}" for line in failed] or [BORNE_OUT]
    return "\n".join(lines), not failed


def _figures(folder: Path) -> Figures:
    run = load(folder)
    if not isinstance(run, Run) or not run.workload:
        raise RecordError(
            f"{one_line(folder)}: a sweep or another study cannot be compared, give two runs of steps"
        )
    return derive(run)


def _rows(pairs: list[Pair], card: float, comparable: bool) -> list[dict[str, str]]:
    """Times of both runs, B's gain over A and further ratios where they did comparable work, and gains over
    the first common row."""
    first_a, first_b = pairs[0]
    rows = []
    for a, b in pairs:
        ratios = ratios_of(a, b, card) if comparable else {}
        row = {"step": a.name, "A, ms": time_with_range(a)}
        row |= {"B, ms": time_with_range(b)}
        row |= {"A / B": gain(ratio(b, a)) if comparable else "-"}
        row |= {f"B / A, {name}": number(ratios.get(name), ".3f") for name in ("equal cards", "peak", "loss")}
        if ratios and max(a.mark, b.mark):
            row["B / A, equal cards"] += MARK
        row |= {
            f"A x {first_a.name}": gain(ratio(a, first_a)),
            f"B x {first_a.name}": gain(ratio(b, first_b)),
        }
        rows.append(row)
    return rows


def card_ratio(pairs: list[Pair]) -> float:
    """How much longer the reference work took in B than in A; 1 where it was not timed."""
    ratios = []
    for a, b in pairs:
        products = [reference_ms(line.row).get("product") for line in (a, b)]
        if all(products):
            ratios.append(products[1] / products[0])
    return median(ratios) if ratios else 1.0


def ratios_of(a: Line, b: Line, card: float) -> dict[str, float]:
    """B's time over A's as if both cards were equal, its peak of memory, and its last losses."""
    ratios = {"equal cards": b.ms / a.ms / card}
    if a.gib and b.gib:
        ratios["peak"] = b.gib / a.gib
    if a.loss and b.loss:
        ratios["loss"] = b.loss / a.loss
    return ratios


# --- whether B bears out A ------------------------------------------------------------------------


def objections(a: Figures, b: Figures, pairs: list[Pair], bound: float) -> list[str]:
    """Why B does not bear out A, a line each."""
    card, paired = card_ratio(pairs), {line.name for line, _ in pairs}
    if "cpu" in (a.environment.device_type, b.environment.device_type):
        return ["a CPU bears out nothing"]
    lines = [f"{line.name} has no time in it" for line in a.timed_steps if line.name not in paired]
    for then, now in pairs:
        if reasons := what_differs(then, now, ratios_of(then, now, card), bound):
            lines.append(f"{then.name}: {'; '.join(reasons)}")
    return lines + [problem for problem in b.run.problems if problem.startswith(DIFFER)]


def what_differs(then: Line, now: Line, ratios: dict[str, float], bound: float) -> list[str]:
    """Why a row does not bear out that of A, in clauses. A host that launches more slowly excuses a time that
    is as much longer."""
    most = {"equal cards": (1 + bound) * slow_host_ratio(then, now)}
    reasons = [
        f"{name} {value:.3f}, not within {1 - bound:.2f} and {most.get(name, 1 + bound):.2f}"
        for name, value in ratios.items()
        if not 1 - bound <= value <= most.get(name, 1 + bound)
    ]
    reasons += [f"{side}: {doubt}" for side, line in (("A", then), ("B", now)) for doubt in line.doubts]
    if then.gib and not now.gib:
        reasons.append("it has no peak of memory")
    if then.loss and not now.loss:
        reasons.append("it has no loss")
    if now.same_work == "differs":
        reasons.append("it did other work than the run's first row")
    if now.row.code_sha256 != then.row.code_sha256:
        reasons.append("it is of other code")
    if other := other_settings(then, now):
        reasons.append(f"other settings: {', '.join(other)}")
    return reasons


def slow_host_ratio(then: Line, now: Line) -> float:
    """How much longer the host took to launch a kernel than in A, where the GPU waits for the launches of a
    row; 1 where it does not, or where they took about as long."""
    before, after = launch_us(then.row), launch_us(now.row)
    if waits_for_the_host(now.row) and before and after and after > SLOW_HOST * before:
        return after / before
    return 1.0


def other_settings(then: Line, now: Line) -> list[str]:
    """The names of what was observed in A, and in B differently."""
    observed = vars(now.row.settings)
    return [name for name, value in vars(then.row.settings).items() if value not in (None, observed[name])]
