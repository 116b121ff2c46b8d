"""The page of a sweep and its Markdown: tables, heat maps, predictions.

python -m report.sweep_page DIR     write sweep.md and sweep.html again from DIR/sweep.json
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import run_command
from common.record import write_bytes
from common.text import OneLineParser, aligned, one_line, say
from report import predictions
from report.load import RecordError
from report.records import GPU
from report.sweep import (
    LEAST,
    SWEEP,
    Cell,
    Shapes,
    apart,
    boundaries,
    by_shape,
    describe_rung,
    describe_shape,
    describe_trends,
    explanations,
    fastest,
    ratio,
    read_cells,
    rungs,
)
from report.table import commit_name, markdown, pipe

PICTURE = "sweep.png"
HOW = (
    "A cell is one script at one shape, trained once, with few steps right after its warm-up. A GPU has not settled "
    "then: the times of some steps still rise, so a ratio may be off by some percent. A ratio is the time of the step "
    f"before over the time of the step. Above 1 the step pays, if the two differ by more than {LEAST:.0%}, and by more "
    "than their spread: the middle half of one step's times lies beyond that of the other's. A trend is one of the "
    "medians at all shapes; neighbours may lie within each other's spread. A model with more layers or a larger "
    "vocabulary has another mix of kernels, so a step may begin to pay at another width there."
)
TIMES = (
    "In brackets, how many times faster than the step before in this table. The last column names the step with the "
    "shortest time, and every step that is not shown to be slower."
)
SLOWER = (
    "A difference with + is time that the step takes longer. *Timed* is the cell itself. Where time was left, both "
    "steps were then trained once more: *again* is their time in that training, where it is recorded, and *profiled* "
    "that of its profile. The kinds of kernels that became longer or shorter follow. Where the profiled difference is "
    "far below the timed one, they explain a part of it. Where it is far above, they are of the second training."
)


def time_rows(shapes: Shapes, pairs: list[tuple[str, str]]) -> list[dict]:
    """A row per shape: each step's time, its ratio to the step before, and the fastest step."""
    before_of, rows = {step: before for before, step in pairs}, []
    for shape in shapes.values():
        one = next(iter(shape.values()))
        row = {"tokens a step": f"{one.column[0]:,}", "T": one.seq_len, "channels": one.n_embd, "heads": one.n_head}
        for step, cell in shape.items():
            value = ratio(shape, before_of[step], step) if step in before_of else None
            row[f"{step}, ms"] = _time(cell) + (f" ({value:.2f})" if value else "")
        rows.append(row | {"fastest": " or ".join(cell.step for cell in fastest(shape)) or "-"})
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


def predicted_pairs(shapes: Shapes, pairs: list[tuple[str, str]]) -> list[tuple[str, float, float]]:
    """Predicted and measured ratios of each step to the one before, where they differ by more than their spread."""
    found = []
    for shape in shapes.values():
        for before, step in pairs:
            if (value := ratio(shape, before, step)) and apart(shape[step], shape[before]):
                cell, other = shape[step], shape[before]
                if cell.predicted_ms and other.predicted_ms:
                    name = f"{step}, {describe_shape(cell)}"
                    found.append((name, other.predicted_ms / cell.predicted_ms, value))
    return found


def launch_costs(cells: list[Cell]) -> list[str]:
    """What a launch cost where steps waited for the host, beside what predictions take for it."""
    launched = [cell for cell in cells if cell.is_timed and cell.predicted_host_ms and cell.launches]
    us = [1e3 * cell.median_ms / cell.launches for cell in launched if cell.host_bound and not cell.captured]
    if not us:
        return []
    predicted = {f"{1e3 * cell.predicted_host_ms / cell.launches:.0f}" for cell in launched}
    return [
        f"{len(us)} cells waited for the host: {min(us):.0f} to {max(us):.0f} µs a launch. Predictions take "
        f"{' or '.join(sorted(predicted))} µs, as the roofs measured it. What a launch costs depends on the core "
        "of the host and on what else runs there: `python -m anatomy host-cost` measures how much."
    ]


def reasons(cells: list[Cell]) -> list[str]:
    """Every reason of cells without a time, and how many have it; notes of the others."""
    why = [f"{cell.step}: {cell.status}: {cell.reason or 'no reason given'}" for cell in cells if not cell.is_timed]
    why += [f"{cell.step}: {cell.note}" for cell in cells if cell.is_timed and cell.note]
    return [f"{text} ({count} cells)" if count > 1 else text for text, count in Counter(why).items()]


def about(cells: list[Cell]) -> str:
    """The machines, versions and commits that the cells name, and the shape that they share."""
    machines: dict[str, Counter] = {}
    for cell in (cell for cell in cells if cell.device):
        te = f", Transformer Engine {cell.transformer_engine}" if cell.transformer_engine else ""
        counts = machines.setdefault(f"{cell.device}, torch {cell.torch}{te}", Counter())
        counts[commit_name(cell.commit, cell.dirty, 7)] += 1
    said = [f"{machine}, {_commits(counts)}" for machine, counts in machines.items()]
    vocabularies = sorted({cell.vocab_size for cell in cells})
    timed = sum(cell.is_timed for cell in cells)
    layers, counts = sorted({cell.n_layer for cell in cells}), [len(cell.step_ms) for cell in cells if cell.is_timed]
    words = f"{timed} of {len(cells)} cells have a time, of {_extent(counts)} steps" if counts else "No cell has a time"
    words += f"; vocabulary {_extent(vocabularies)}; {_extent(layers)} layers"
    return f"{'; '.join(said) or 'unknown machine'}. {words}."


def _commits(counts: Counter) -> str:
    """`commit 926c1f8`, or each with how many cells are of it."""
    several = [f"{commit} ({count} cells)" for commit, count in counts.most_common()]
    return f"commits {' and '.join(several)}" if len(counts) > 1 else f"commit {min(counts)}"


def _extent(numbers: list[int]) -> str:
    return " to ".join(dict.fromkeys(str(end(numbers)) for end in (min, max)))


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
    pays = [" ".join([describe_rung(shapes, *pair), *describe_trends(shapes, *pair)]) for pair in pairs]
    found = [Section("Where each step pays", [HOW], pays)]
    if pairs and (begins := boundaries(shapes, *pairs[-1])):
        before, step = pairs[-1]
        how = f"In brackets, how many times faster than {before}."
        found.append(Section(f"Where {step} begins to pay", [how], begins))
    found.append(Section("Times", [TIMES], [], time_rows(shapes, pairs)))
    slower = explanations(shapes, pairs)
    said = SLOWER if slower else "No step is shown to be slower than the one before it."
    found.append(Section("Where a step is slower than the one before, and why", [said], slower))
    rows, errors = prediction_rows(shapes)
    if errors:
        how = "A figure is the predicted time over the measured one, less one. The roofs were measured with this sweep."
        said = [how, predictions.summary(errors), *predictions.directions(predicted_pairs(shapes, pairs)),
                *launch_costs(cells)]  # fmt: skip
        found.append(Section("Predicted from the roofs alone", said, [], rows))
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
    named = [f"{tokens // 1024 if tokens >= 1024 else tokens / 1024:g} Ki tokens\nT {T}" for tokens, T in columns]
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
        shown = " or ".join(cell.step[0] for cell in found) or "-"
        best.cells[place[key]] = (steps.index(found[0].step) if found else None, shown)
    return [*maps, best]


def _unpaired(cell: Cell | None, before: Cell | None) -> str:
    """What stands in a cell without a ratio."""
    missing = next((one for one in (cell, before) if one and not one.is_timed), None)
    return missing.status if missing else "-"


def write(folder: Path) -> list[str]:
    """Write sweep.md, sweep.html and sweep.png of a folder; what to print. Raises RecordError, ImportError, OSError."""
    from report import charts
    from report.glossary import with_terms
    from report.page import environment

    cells = read_cells(folder / SWEEP)
    maps = heat_maps(cells)
    drawn = [(one.title, charts.heat_map(one)) for one in maps]
    template = environment().get_template("sweep.html")
    page = template.render(title="The ladder over shapes", about=about(cells), maps=drawn, sections=sections(cells))
    text = f"# The ladder over shapes\n\n{render_markdown(cells)}\n"
    for name, content in (("sweep.md", text.encode()), ("sweep.html", with_terms(page).encode()),
                          (PICTURE, charts.heat_maps_png(maps))):  # fmt: skip
        write_bytes(folder / name, content)
    shapes, pairs = by_shape(cells), rungs(cells)
    lines = [describe_rung(shapes, *pair) for pair in pairs] + (boundaries(shapes, *pairs[-1]) if pairs else [])
    return ["", aligned(time_rows(shapes, pairs), n_left=0), "", *map(one_line, lines)]


def recorded(results: Path) -> str:
    """Markdown of every sweep below docs/results, a GPU's first, for docs/sweep.md."""
    parts, found = [], sorted(results.glob(f"*/{SWEEP}"))
    for path in sorted(found, key=lambda path: path.parent.name != GPU):
        text = render_markdown(read_cells(path), "###", f"results/{path.parent.name}/{PICTURE}")
        parts += [f"## Recorded in `{path.parent.name}`", text]
    return "\n\n".join(parts)


def main() -> None:
    parser = OneLineParser(prog="python -m report.sweep_page", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args().folder
    try:
        for line in write(folder):
            say(line)
    except (RecordError, ImportError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    run_command(main, "python -m report.sweep_page")
