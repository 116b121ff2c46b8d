"""What a sweep says: for each rung where it pays and where it does not, from its cells.

python -m report.sweep DIR     write sweep.md and sweep.html again from DIR/sweep.json
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import run_command
from common.record import write_bytes
from common.text import OneLineParser, aligned, one_line, say
from report import predictions
from report.load import RecordError, convert, read_json
from report.table import commit_name, markdown, pipe

SWEEP, PICTURE = "sweep.json", "sweep.png"
SHAPE = ("n_layer", "n_head", "n_embd", "seq_len", "vocab_size", "batch_size")
NONE = "No sweep is recorded yet: `./run_all.sh --sweep` makes one."
HOW = (
    "A cell is one script at one shape, with few steps right after its warm-up: a GPU has not settled, and a recorded "
    "ladder's times are some percent longer. A ratio is the time of the step before over the time of the step. Above 1 "
    "the step pays, if the middle halves of both steps' times lie apart."
)


@dataclass
class Cell:
    """One script at one shape. What was predicted is from the machine's roofs, measured in the same run."""

    step: str
    n_layer: int
    n_head: int
    n_embd: int
    seq_len: int
    vocab_size: int
    batch_size: int
    status: str  # of common.record.STATUSES
    reason: str | None = None
    median_ms: float | None = None
    predicted_ms: float | None = None
    note: str | None = None
    step_ms: list[float] = field(default_factory=list)  # every timed step
    warmup_s: float | None = None  # compilation and capture included
    peak_bytes: int | None = None  # of CUDA's allocator; null on a CPU
    host_bound: bool | None = None  # whether the GPU had no work left when the last step had been launched
    captured: bool | None = None
    predicted_category_ms: dict[str, float] = field(default_factory=dict)
    predicted_host_ms: float | None = None  # to launch the kernels of a step that is launched
    launches: int | None = None  # of a step, as counted for the prediction
    category_ms: dict[str, float] = field(default_factory=dict)  # profiled, gaps included; where a step was slower
    started_at: str | None = None
    device: str | None = None  # these five: of the machine that ran it
    torch: str | None = None
    transformer_engine: str | None = None
    commit: str | None = None
    dirty: bool | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in SHAPE)

    @property
    def column(self) -> tuple[int, int]:
        """Tokens a step, and sequence length."""
        return self.batch_size * self.seq_len, self.seq_len

    @property
    def is_timed(self) -> bool:
        return self.status == "ok" and bool(self.median_ms)


Shapes = dict[tuple[int, ...], dict[str, Cell]]  # cells by shape, by step


def read_cells(path: Path) -> list[Cell]:
    """The cells of a sweep.json. Raises RecordError."""
    cells = convert(read_json(path), list[Cell], path.name)
    if not cells:
        raise RecordError(f"{path.name} holds no cells")
    return cells


def by_shape(cells: list[Cell]) -> Shapes:
    shapes: Shapes = {}
    for cell in sorted(cells, key=lambda cell: (cell.column, cell.n_embd, cell.step)):
        shapes.setdefault(cell.shape, {})[cell.step] = cell
    return shapes


def rungs(cells: list[Cell]) -> list[tuple[str, str]]:
    """Each step and the one before it."""
    return [*itertools.pairwise(sorted({cell.step for cell in cells}))]


def ratio(shape: dict[str, Cell], before: str, step: str) -> float | None:
    """How many times faster a step is than the one before; None where one has no time."""
    pair = [shape[name] for name in (before, step) if name in shape and shape[name].is_timed]
    return pair[0].median_ms / pair[1].median_ms if len(pair) == 2 else None


def fastest(shape: dict[str, Cell]) -> Cell | None:
    return min(filter(lambda cell: cell.is_timed, shape.values()), key=lambda cell: cell.median_ms, default=None)


def describe_shape(cell: Cell) -> str:
    return f"{cell.n_embd} channels, {cell.column[0]:,} tokens, T {cell.seq_len}"


# --- where a rung pays, and why not -----------------------------------------------------------------


def apart(cell: Cell, before: Cell) -> bool:
    """Whether the middle half of one step's times lies on one side of the other's: else no difference is shown."""
    (least, most), (least_before, most_before) = map(_quartiles, (cell, before))
    return most < least_before or least > most_before


def pays(shape: dict[str, Cell], before: str, step: str) -> bool:
    """Whether a step is shown to be faster than the one before."""
    return (ratio(shape, before, step) or 0) > 1 and apart(shape[step], shape[before])


def why_slower(cell: Cell, before: Cell) -> str:
    """Why a step is slower than the one before: from its host, the profiled parts of both, or the predicted ones."""
    if cell.category_ms and before.category_ms:
        profiled = sum(cell.category_ms.values()) - sum(before.category_ms.values())
        both = f"timed {cell.median_ms - before.median_ms:+.3g} ms, profiled {profiled:+.3g}"
        return f"{both}: {_largest(cell.category_ms, before.category_ms)}" if profiled > 0 else f"not explained: {both}"
    if cell.host_bound and not cell.captured:
        count = f" {cell.launches} kernels" if cell.launches else ""
        return f"the host launches{count} longer than the GPU works: none was queued when the last was launched"
    if not (cell.predicted_ms and before.predicted_ms):
        return "nothing is predicted for it"
    times = before.predicted_ms / cell.predicted_ms
    if times < 1:
        return f"the roofs predict {times:.2f} times as well: {_changes(cell, before)}"
    return f"not explained: the roofs predict {times:.2f} times ({_changes(cell, before)})"


def _changes(cell: Cell, before: Cell) -> str:
    """The two largest differences of the predicted parts: `copies and casts +0.31 ms, matrix products -0.12 ms`."""
    if cell.predicted_host_ms and cell.predicted_ms == cell.predicted_host_ms:
        return f"the host launches {cell.launches} kernels in {cell.predicted_host_ms:.3g} ms"
    return _largest(cell.predicted_category_ms, before.predicted_category_ms)


def _largest(parts: dict[str, float], parts_before: dict[str, float]) -> str:
    """The two kinds of kernels whose times differ most."""
    change = {name: parts.get(name, 0.0) - parts_before.get(name, 0.0) for name in parts | parts_before}
    largest = sorted(change, key=lambda name: -abs(change[name]))[:2]
    return ", ".join(f"{name} {change[name]:+.3g} ms" for name in largest)


def _quartiles(cell: Cell) -> tuple[float, float]:
    times = cell.step_ms if len(cell.step_ms) > 1 else [cell.median_ms] * 2
    p25, _, p75 = statistics.quantiles(times, method="inclusive")
    return p25, p75


def describe_rung(shapes: Shapes, before: str, step: str) -> str:
    """At how many shapes a step pays, and how much."""
    timed = [shape for shape in shapes.values() if ratio(shape, before, step)]
    if not timed:
        cells = [shape[step] for shape in shapes.values() if step in shape]
        tried = [cell for cell in cells if cell.status != "not run"] or cells
        reasons = Counter(cell.reason or cell.status for cell in tried)
        return f"{step} has no time beside {before} at any shape: {reasons.most_common(1)[0][0]}."
    ends = (end(timed, key=lambda shape: ratio(shape, before, step)) for end in (min, max))
    extent = [f"{ratio(shape, before, step):.2f} times ({describe_shape(shape[step])})" for shape in ends]
    faster = sum(pays(shape, before, step) for shape in timed)
    alike = sum(not apart(shape[step], shape[before]) for shape in timed)
    unknown = f", with no difference shown at {alike}" * bool(alike)
    if len(timed) == 1:
        difference = ", with no difference shown" * bool(alike)
        return f"{step} and {before} have times at one shape alone: the ratio is {extent[0]}{difference}."
    return f"{step} is faster than {before} at {faster} of {len(timed)} shapes{unknown}: from {' to '.join(extent)}."


def boundaries(shapes: Shapes, before: str, step: str) -> list[str]:
    """For each length and number of tokens, the width from which a step pays at every wider shape."""
    columns: dict[tuple[int, int], list[tuple[int, float, bool]]] = {}
    for shape in shapes.values():
        if value := ratio(shape, before, step):
            columns.setdefault(shape[step].column, []).append((shape[step].n_embd, value, pays(shape, before, step)))
    lines = []
    for (tokens, T), found in sorted(columns.items()):
        found, paying = sorted(found), []
        for width, value, faster in reversed(found):
            if not faster:
                break
            paying.append(f"{width} channels ({value:.2f})")
        narrower = [f"{width} channels ({value:.2f})" for width, value, _ in found[: len(found) - len(paying)]]
        if not paying:
            says = f"{step} pays not even at {narrower[-1]}"
        elif narrower:
            says = f"{step} pays from {paying[-1]} on, and not yet at {narrower[-1]}"
        else:
            says = f"{step} pays at every width, from {paying[-1]} on"
        lines.append(f"{tokens:,} tokens a step, T {T}: {says}")
    return lines


def slower(shapes: Shapes, pairs: list[tuple[str, str]]) -> list[tuple[Cell, Cell]]:
    """The cells whose step is shown to be slower than the one before, each behind the cell of that one."""
    return [
        (shape[before], shape[step])
        for before, step in pairs
        for shape in shapes.values()
        if (ratio(shape, before, step) or 1) < 1 and apart(shape[step], shape[before])
    ]


def explanations(shapes: Shapes, pairs: list[tuple[str, str]]) -> list[str]:
    """A line for every cell whose step is shown to be slower than the one before."""
    return [
        f"{cell.step}, {describe_shape(cell)}: {before.median_ms / cell.median_ms:.2f} times {before.step}; "
        f"{why_slower(cell, before)}"
        for before, cell in slower(shapes, pairs)
    ]


# --- tables and text --------------------------------------------------------------------------------


def time_rows(shapes: Shapes, pairs: list[tuple[str, str]]) -> list[dict]:
    """A row per shape: each step's time, its ratio to the step before, and the fastest step."""
    before_of, rows = {step: before for before, step in pairs}, []
    for shape in shapes.values():
        one = next(iter(shape.values()))
        row = {"tokens a step": f"{one.column[0]:,}", "T": one.seq_len, "channels": one.n_embd, "layers": one.n_layer}
        for step, cell in shape.items():
            value = ratio(shape, before_of[step], step) if step in before_of else None
            row[f"{step}, ms"] = _time(cell) + (f" ({value:.2f})" if value else "")
        best = fastest(shape)
        rows.append(row | {"fastest": best.step if best else "-"})
    return rows


def _time(cell: Cell) -> str:
    if not cell.is_timed:
        return cell.status
    return f"{cell.median_ms:.3g}" if cell.median_ms < 100 else f"{cell.median_ms:.0f}"


def prediction_rows(shapes: Shapes) -> tuple[list[dict], list[float]]:
    """Predicted over measured, less one: a row per shape, and all errors."""
    rows, errors = [], []
    for shape in shapes.values():
        one = next(iter(shape.values()))
        row = {"tokens a step": f"{one.column[0]:,}", "T": one.seq_len, "channels": one.n_embd}
        for step, cell in shape.items():
            row[step] = "-"
            if cell.is_timed and cell.predicted_ms:
                errors.append(cell.predicted_ms / cell.median_ms - 1)
                row[step] = f"{errors[-1]:+.0%}"
        rows.append(row)
    return rows, errors


def reasons(cells: list[Cell]) -> list[str]:
    """Every reason of cells without a time, and how many have it; notes of the others."""
    why = [f"{cell.step}: {cell.status}: {cell.reason or 'no reason given'}" for cell in cells if not cell.is_timed]
    why += [f"{cell.step}: {cell.note}" for cell in cells if cell.is_timed and cell.note]
    return [f"{text} ({count} cells)" if count > 1 else text for text, count in Counter(why).items()]


def about(cells: list[Cell]) -> str:
    """The machines, versions and commits that the cells name, and the shape that they share."""
    machines = {}
    for cell in (cell for cell in cells if cell.device):
        te = f", Transformer Engine {cell.transformer_engine}" if cell.transformer_engine else ""
        machines[f"{cell.device}, torch {cell.torch}{te}, commit {commit_name(cell.commit, cell.dirty, 7)}"] = None
    vocabularies = sorted({cell.vocab_size for cell in cells})
    timed = sum(cell.is_timed for cell in cells)
    words = f"{timed} of {len(cells)} cells have a time; vocabulary {', '.join(map(str, vocabularies))}"
    return f"{'; '.join(machines) or 'unknown machine'}. {words}."


@dataclass
class Section:
    """A heading with sentences, a list, and a table: the same in Markdown and in HTML."""

    title: str
    sentences: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)


def sections(cells: list[Cell]) -> list[Section]:
    """All that is said of a sweep."""
    shapes, pairs = by_shape(cells), rungs(cells)
    found = [
        Section("Where each step pays", [HOW], [describe_rung(shapes, *pair) for pair in pairs]),
        Section("Times", ["In brackets, how many times faster than the step before."], [], time_rows(shapes, pairs)),
    ]
    if pairs and (begins := boundaries(shapes, *pairs[-1])):
        before, step = pairs[-1]
        found.insert(1, Section(f"Where {step} begins to pay", [f"Its time against {before}'s, by width."], begins))
    slower = explanations(shapes, pairs) or ["No step is shown to be slower than the one before it."]
    found.append(Section("Where a step is slower than the one before, and why", [], slower))
    rows, errors = prediction_rows(shapes)
    if errors:
        how = "Predicted over measured, less one; the roofs are those of the same run."
        found.append(Section("Predicted from the roofs alone", [how, predictions.summary(errors)], [], rows))
    if without := reasons(cells):
        found.append(Section("Cells without a time, and notes", [], without))
    return found


def render_markdown(cells: list[Cell], level: str = "##", picture: str | None = None) -> str:
    parts = [markdown(about(cells))] + ([f"![Ratios of each step over the one before]({picture})"] if picture else [])
    for section in sections(cells):
        parts += [f"{level} {section.title}", *section.sentences]
        parts += ["\n".join(f"- {markdown(line)}" for line in section.lines)] if section.lines else []
        parts += [pipe(section.rows, n_left=0)] if section.rows else []
    return "\n\n".join(parts)


def heat_maps(cells: list[Cell]) -> list:
    """A map of each rung's ratio by width and column, and one of the fastest step."""
    from report.charts import HeatMap

    shapes, pairs = by_shape(cells), rungs(cells)
    steps = sorted({cell.step for cell in cells})
    columns, widths = sorted({cell.column for cell in cells}), sorted({cell.n_embd for cell in cells})
    named = [f"{tokens // 1024 if tokens >= 1024 else tokens / 1024:g} Ki\nT {T}" for tokens, T in columns]
    place = {key: (widths.index(one.n_embd), columns.index(one.column))
             for key, shape in shapes.items() for one in [next(iter(shape.values()))]}  # fmt: skip
    maps = []
    for before, step in pairs:
        drawn = HeatMap(f"{step} over {before}", widths, named)
        for key, shape in shapes.items():
            value, cell = ratio(shape, before, step), shape.get(step)
            drawn.cells[place[key]] = (value, f"{value:.2f}" if value else _unpaired(cell, shape.get(before)))
        maps.append(drawn)
    best = HeatMap("the fastest step", widths, named, steps)
    for key, shape in shapes.items():
        found = fastest(shape)
        best.cells[place[key]] = (steps.index(found.step) if found else None, found.step[0] if found else "-")
    return [*maps, best]


def _unpaired(cell: Cell | None, before: Cell | None) -> str:
    """What stands in a cell without a ratio."""
    missing = next((one for one in (cell, before) if one and not one.is_timed), None)
    return missing.status if missing else "-"


def write(folder: Path) -> list[str]:
    """Write sweep.md, sweep.html and sweep.png of a folder; what to print. Raises RecordError, ImportError, OSError."""
    from report import charts
    from report.page import environment

    cells = read_cells(folder / SWEEP)
    maps = heat_maps(cells)
    drawn = [(one.title, charts.heat_map(one)) for one in maps]
    template = environment().get_template("sweep.html")
    page = template.render(title="The ladder over shapes", about=about(cells), maps=drawn, sections=sections(cells))
    text = f"# The ladder over shapes\n\n{render_markdown(cells)}\n"
    for name, content in (("sweep.md", text.encode()), ("sweep.html", page.encode()),
                          (PICTURE, charts.heat_maps_png(maps))):  # fmt: skip
        write_bytes(folder / name, content)
    shapes, pairs = by_shape(cells), rungs(cells)
    lines = [describe_rung(shapes, *pair) for pair in pairs] + (boundaries(shapes, *pairs[-1]) if pairs else [])
    return ["", aligned(time_rows(shapes, pairs), n_left=0), "", *map(one_line, lines)]


def recorded(results: Path) -> str:
    """Markdown of every sweep below docs/results, for docs/sweep.md."""
    parts = []
    for path in sorted(results.glob(f"*/{SWEEP}")):
        text = render_markdown(read_cells(path), "###", f"results/{path.parent.name}/{PICTURE}")
        parts += [f"## Recorded in `{path.parent.name}`", text]
    return "\n\n".join(parts or [NONE])


def main() -> None:
    parser = OneLineParser(prog="python -m report.sweep", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args().folder
    try:
        for line in write(folder):
            say(line)
    except (RecordError, ImportError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    run_command(main, "python -m report.sweep")
