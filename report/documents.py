"""The report of a run or a study as a text: for a terminal, and as report.md."""

import re

import tabulate

from common.record import Study
from common.text import aligned, one_line
from report import studies
from report.figures import LEGEND, MARK, Figures, derive, derive_study, loss_rule
from report.sentences import CPU_SHOWS, convention, describe_machine, describe_workload, headline
from report.table import card_row, fits_cards, limit_rows, main_rows, proof_rows

tabulate.MIN_PADDING = 0  # a column is no wider than its header
MOST_REMARKS = 3  # below the table of a terminal
LONGEST_NAME = 24  # of a row there, in 100 columns

Tables = dict[str, list[dict]]  # rows by the title of their table


def for_terminal(figures: Figures, report: str) -> str:
    """The report of a run for a terminal: a table of at most 100 columns, and a few lines under it."""
    rows = [row | {"step": one_line(row["step"], LONGEST_NAME)} for row in main_rows(figures)]
    below = list(figures.remarks)
    if len(below) > MOST_REMARKS:
        left_out = len(below) - MOST_REMARKS + 1
        below = [*below[: MOST_REMARKS - 1], f"{left_out} more lines in the report"]
    below += [loss_rule(figures)]
    below.append(f"{convention(figures)}. Report: {one_line(report, 1000)}")
    if fits_cards(figures):
        row = " | ".join(map(markdown, card_row(figures).values()))
        below.append(f"This GPU as a row of docs/cards.md:\n| {row} |")
    return "\n".join([headline(figures), "", aligned(rows), "", *filter(None, below)])


def as_markdown(figures: Figures) -> str:
    """report.md of a run: short enough for a comment on a pull request."""
    tables = {"": main_rows(figures, detailed=True), "What limits each step:": limit_rows(figures)}
    tables["The same work, by the gradients of one step:"] = proof_rows(figures)
    return _page(
        headline(figures), about(figures), tables, _notes(figures, figures.remarks, tables), figures.run
    )


def study_as_markdown(study: Study, tables: Tables) -> str:
    """report.md of a study, with the machine and the workload of its first run."""
    first = derive(next(iter(study.runs.values())))
    runs = "1 run" if len(study.runs) == 1 else f"{len(study.runs)} runs"
    notes = _notes(first, study_remarks(study, tables), tables)
    if first.environment.device_type == "cpu":
        notes.append(CPU_SHOWS)
    return _page(f"{study.kind.capitalize()}, {runs}", f"The first run: {about(first)}", tables, notes, study)


def about(figures: Figures) -> str:
    return f"{describe_machine(figures.environment)}; {describe_workload(figures.run.workload)}"


def study_remarks(study: Study, tables: Tables) -> list[str]:
    """What is unusual in a study: a line for all rows that share it."""
    kind = studies.KINDS[study.kind]
    names: dict[str, list[str]] = {}
    for name, figures in derive_study(study).items():
        for line in figures.lines:
            where = f"{name}, {line.name}" if len(figures.lines) > 1 else name
            for text in [line.why_untimed, kind.note_of(line), *line.doubts]:
                names.setdefault(text, []).append(where)
    names.pop("", None)
    remarks = [f"{text} ({'; '.join(rows)})" for text, rows in names.items()]
    remarks += dict.fromkeys(problem for run in study.runs.values() for problem in run.problems)
    return [LEGEND, *remarks] if _holds_mark(tables) else remarks


def _holds_mark(tables: Tables) -> bool:
    cells = (cell for rows in tables.values() for row in rows for cell in row.values())
    return any(MARK in cell for cell in cells)


def _notes(figures: Figures, remarks: list[str], tables: Tables) -> list[str]:
    """What stands below the tables of a page: remarks, and what columns mean."""
    notes, columns = list(remarks), {name for rows in tables.values() if rows for name in rows[0]}
    if any("TFLOP/s" in name for name in columns):
        notes.append(convention(figures))
    if "loss" in columns:
        notes.append(loss_rule(figures))
    return notes


def _page(title: str, about: str, tables: Tables, notes: list[str], made_by) -> str:
    """A page of Markdown; `made_by` is the run or the study, whose command stands at its end."""
    parts = [f"# {markdown(title)}", markdown(about)]
    parts += [f"{markdown(above)}\n\n{pipe(rows)}".strip() for above, rows in tables.items() if rows]
    parts.append("\n".join(f"- {markdown(note)}" for note in notes))
    parts += ["Run it again:", "    " + made_by.command.replace(" && ", "\n    ")]
    return "\n\n".join(filter(None, parts)) + "\n"


def pipe(rows: list[dict], n_left: int = 1) -> str:
    """A table of Markdown whose cells and headers may be a record's words."""
    escaped = []
    for row in rows:
        escaped.append({markdown(name): markdown(cell) for name, cell in row.items()})
    return aligned(escaped, "pipe", n_left)


def markdown(text: object) -> str:
    """A line of Markdown in which nothing that a record says is markup, a link, or the end of a cell."""
    line = one_line(text, 1000).replace("&", "&amp;").replace("<", "&lt;").replace("`", "'")
    line = re.sub(r"[\\\[\]!|~*]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", line)
    line = line.replace("://", ":\\//").replace("www.", "www\\.")  # GitHub makes links of bare addresses
    return re.sub(r"^(\d*)(>|#|[+.)-](?=[\s-]))", r"\1\\\2", line)  # nor a heading, a quotation, a list
