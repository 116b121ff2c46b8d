"""The tables of a run: lists of columns. A row of a table is a dict of cells by the names of columns."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from common.record import PRECISIONS, Roofs
from report.cells import (
    LAUNCH,
    dtype,
    gain,
    gain_over,
    milliseconds,
    number,
    scaling,
    share,
    tflops,
    three_digits,
    time_or_status,
    time_with_range,
    whole,
)
from report.changes import lines_added
from report.figures import Figures, Line, ratio
from report.proof import limit

VERSIONS = ("torch", "transformer-engine", "cuda")  # that are told beside a result


class Column(NamedTuple):
    """A column: its name, the figure of a line by its property, by a path of them (`row.clock_mhz`) or by a
    function, and how that figure is written."""

    name: str
    figure: str | Callable[[Line], object]
    write: Callable[..., str] = str

    def cell(self, line: Line) -> str:
        if callable(self.figure):
            return self.write(self.figure(line))
        value = line
        for name in self.figure.split("."):
            value = getattr(value, name, None)
        return self.write(value)


def rows_of(lines: Iterable[Line], columns: list[Column]) -> list[dict[str, str]]:
    """A row of a table for each line, without columns that no line fills."""
    return only_filled([{column.name: column.cell(line) for column in columns} for line in lines])


def only_filled(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows without the columns that none of them fills."""
    filled = {name for row in rows for name, cell in row.items() if cell != "-"}
    return [{name: cell for name, cell in row.items() if name in filled} for row in rows]


def itself(line: Line) -> Line:
    return line


STEP, LAST_TIME = Column("step", "name"), Column("timed", itself, time_with_range)
# What may make peers unequal.
EQUALS = [
    Column("launch", "row.settings.captured", LAUNCH.get),
    Column("residual", "row.settings.residual_dtype", dtype),
    Column("head", "row.settings.head", lambda head: head or "-"),
    Column("FP8 scaling", "row.settings.fp8_recipe", scaling),
]
LIMITS = [
    STEP,
    Column("kernels run", "profile.launches", whole),
    Column("most time in", "share", lambda largest: f"{largest[0]} {largest[1]:.0%}" if largest else "-"),
    Column(
        "of roof",
        lambda line: f"{line.roofline_share:.0%} of {line.precision.upper()}" if line.roofline_share else "-",
    ),
    Column("MFU", "mfu", share),
    Column("clock, MHz", "row.clock_mhz", whole),
    Column("tokens/J", "tokens_per_joule", three_digits),
    Column("ms at least", lambda line: None, number),  # of what the card allows alone
    Column("warm-up s", "row.warmup_s", number),
]
PROOF = [
    STEP,
    Column("compared with", "row.proof.against"),
    Column("weights", "row.proof.paired", "{:.0%}".format),
    Column("least cosine", "row.proof.cosine", lambda cosine: number(cosine, ".5f")),
    Column("of the gradient of", "row.proof.weight", lambda weight: weight or "-"),
    Column("two passes", "row.proof.repeated", lambda cosine: number(cosine, ".5f")),
    Column("agrees from", lambda line: f"{limit(line.row.proof):.3g}"),
    Column("work", "same_work"),
]


def main_rows(figures: Figures, detailed: bool = False) -> list[dict[str, str]]:
    """Every step and peer of a run; `detailed` adds the ranges of the passes, and how peers differ."""
    unit = figures.run.workload.unit if figures.run.workload else "tokens"
    name = (lambda line: f"{line.name} (peer)" if line.is_peer else line.name) if detailed else "name"
    columns = [
        Column("step", name),
        Column("ms", itself, time_with_range if detailed else time_or_status),
        Column(f"{unit}/s", "tokens_per_s", whole),
        Column("TFLOP/s", "flops_per_s", tflops),
        Column("x made from" if has_another_base(figures) else "x above", "over_before", gain),
    ]
    for other in filter(None, (figures.first, figures.plain)):
        columns.append(Column(f"x {other.name}", partial(ratio, other=other), gain))
    columns += [Column("GiB", "gib", number), Column("loss", "loss", lambda loss: number(loss, ".3f"))]
    if detailed and figures.run.peers:
        columns += EQUALS
    if has_another_base(figures):
        columns.append(Column("made from", lambda line: line.base.name if line.base else "-"))
    return rows_of(figures.lines, columns)


def has_another_base(figures: Figures) -> bool:
    """Whether a timed step is made from another step than the nearest timed one above."""
    steps = figures.timed_steps
    return any(line.before is not above for above, line in pairwise(steps))


def front_rows(figures: Figures, additions: list[str]) -> list[dict[str, str]]:
    """README's table: the ladder in seven columns. `additions` are words for what each step adds; a later
    step has none. Raises ValueError for more words than steps."""
    if len(additions) > len(figures.steps):
        raise ValueError(f"{len(additions)} words for {len(figures.steps)} steps")
    words = dict(zip(figures.steps, additions, strict=False))
    columns = [
        Column("script", lambda line: f"{line.name}.py"),
        Column("what it adds", lambda line: words.get(line, "-")),
        Column(
            "code lines added",
            lambda line: str(len(lines_added(line.base.row.text, line.row.text))) if line.base else "-",
        ),
        Column("ms", itself, time_or_status),
        Column("x the row above", "over_before", gain),
        Column("x FP32", "over_first", gain),
        Column("GiB", "gib", number),
    ]
    return rows_of(figures.steps, columns)


def card_row(figures: Figures) -> dict[str, str]:
    """A run as a row of docs/cards.md, one a GPU: the first and the last step in ms, and the gains
    between."""
    ran = [line for line in figures.steps if line.row.status != "skipped"]
    work, machine = figures.run.workload, figures.environment
    shape = f"{work.n_layer} x {work.n_embd}, {work.batch_size} x {work.seq_len} tokens"
    steps = " x ".join(gain_over(before, line) for before, line in pairwise(ran))
    known = [name for name in VERSIONS if name in machine.versions]
    return {
        "device": machine.device,
        "workload": f"{work.preset}: {shape}",
        "first step, ms": time_or_status(ran[0]),
        "last step, ms": time_or_status(ran[-1]),
        "gains, step by step": f"{steps} = {gain(ratio(ran[-1], ran[0]))}",
        "versions": ", ".join(f"{name} {machine.versions[name]}" for name in known),
        "date": (figures.run.started_at or "-")[:10],
        "commit": (machine.commit or "-")[:7],
    }


def fits_cards(figures: Figures) -> bool:
    """Whether a run may be a row of docs/cards.md: the whole ladder on one GPU, with at least two times, of
    the same work."""
    work, machine = figures.run.workload, figures.environment
    chosen = any(word.partition("=")[0] == "--only" for word in figures.run.command.split())
    ended = all(line.row.status not in ("not run", "interrupted") for line in figures.steps)
    on_one_gpu = machine.device_type == "cuda" and work is not None and work.gpus == 1
    same = all(line.same_work != "differs" for line in figures.timed_steps)
    return on_one_gpu and not work.model and ended and same and not chosen and len(figures.timed_steps) > 1


def category_rows(figures: Figures) -> list[dict[str, str]]:
    """Milliseconds of a step by kind of kernel, and the timed step."""
    profiled = [line for line in figures.timed if line.category_ms]
    names = dict.fromkeys(name for line in profiled for name, ms in line.category_ms.items() if ms)
    kinds = [Column(name, lambda line, name=name: line.category_ms.get(name), number) for name in names]
    return rows_of(profiled, [Column("ms per step", "name"), *kinds, LAST_TIME])


def limit_rows(figures: Figures) -> list[dict[str, str]]:
    """What limits each step; empty where nothing is known but the names."""
    rows = [{column.name: column.cell(line) for column in LIMITS} for line in figures.timed]
    for precision, ms in (figures.run.roofs.allows_ms if figures.run.roofs and rows else {}).items():
        name = f"what the card allows, {precision.upper()}"
        rows.append(dict.fromkeys(rows[0], "-") | {"step": name, "ms at least": milliseconds(ms)})
    rows = only_filled(rows)
    return rows if rows and set(rows[0]) > {"step"} else []


def proof_rows(figures: Figures) -> list[dict[str, str]]:
    """How the gradients of one step compare with those of the first row, and with --model those of two passes
    of the first row; empty where none was compared."""
    return rows_of([line for line in figures.timed if line.row.proof], PROOF)


def roof_rows(roofs: Roofs) -> list[dict[str, str]]:
    """What bare matrix products of the workload reach, by precision."""
    rows = []
    for name in PRECISIONS:
        steady, burst = roofs.rate(name), roofs.rate(name, burst=True)
        if steady and burst:
            rows.append({"TFLOP/s": name.upper(), "back to back": tflops(steady), "in bursts": tflops(burst)})
    return rows
