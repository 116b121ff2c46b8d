"""Three printers of the sections of report/sections.py: for a terminal, as Markdown, and as a page."""

import re
from pathlib import Path

import tabulate
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.text import aligned, one_line
from report import bars
from report.sections import PAGE, TERMINAL, Report, Section

tabulate.MIN_PADDING = 0  # a column is no wider than its header
WIDTH, LONGEST_NAME = 100, 24  # of a table in a terminal, and of a row's name
LESS_NEEDED = ("TFLOP/s", "tokens/s", "samples/s")  # left out first: report.md has them


def terminal(report: Report, end: list[str]) -> str:
    """A table of at most 100 columns, every remark, and the lines of `end`."""
    parts = [report.title] if report.title else []
    for section in report.sections:
        if section.shown == TERMINAL:
            rows = _fit_terminal(section.short_rows or section.rows)
            heading = f"{section.heading}:" if section.heading else section.text
            code = "\n".join(f"{sign} {line}" for sign, line in section.code)
            note = section.note if code else ""  # that of a table stands behind the remarks
            table = aligned(rows) if rows else ""
            parts.append("\n".join(filter(None, [heading, code, note, *section.lines, table])))
    notes = [section.note for section in report.sections if section.shown == TERMINAL and section.rows]
    notes = [*filter(None, notes)]
    parts.append("\n".join([*report.remarks, *notes, *end]))
    return "\n\n".join(filter(None, parts))


def _fit_terminal(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows with short names, and without the columns that a terminal has no room for."""
    first = next(iter(rows[0])) if rows else ""
    rows = [row | {first: one_line(row[first], LONGEST_NAME)} for row in rows]
    for name in LESS_NEEDED:
        if rows and max(map(len, aligned(rows).splitlines())) > WIDTH:
            rows = [{column: cell for column, cell in row.items() if column != name} for row in rows]
    return rows


# --- Markdown -------------------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """report.md: short enough for a comment on a pull request."""
    parts = [f"# {escape(report.title)}", escape(report.about)]
    for section in report.sections:
        parts += _markdown_of(section)
    parts.append("\n".join(f"- {escape(remark)}" for remark in report.remarks))
    parts += ["Run it again:", "    " + report.command.replace(" && ", "\n    ")]
    return "\n\n".join(filter(None, parts)) + "\n"


def _markdown_of(section: Section) -> list[str]:
    if section.shown == PAGE:
        return []
    parts = []
    heading = escape(f"{section.heading}:" if section.heading else section.text)
    if section.code:
        code = "\n".join(f"{sign} {line}".replace("`", "'") for sign, line in section.code)
        parts = [heading, f"```diff\n{code}\n```", escape(section.note)]
    if section.lines:
        parts = [heading, "\n".join(f"- {escape(line)}" for line in section.lines)]
    if section.rows:
        parts = [heading, pipe(section.rows), escape(section.note)]
    return parts + [text for part in section.parts for text in _markdown_of(part)]


def pipe(rows: list[dict], n_left: int = 1) -> str:
    """A table of Markdown whose cells and headers may be a record's words."""
    cells = [{escape(name): escape(cell) for name, cell in row.items()} for row in rows]
    return aligned(cells, "pipe", n_left)


def escape(text: object) -> str:
    """A line of Markdown in which nothing that a record says is markup, a link, the end of a cell, or a
    marker of cog, which would be run."""
    line = one_line(text, 1500).replace("&", "&amp;").replace("<", "&lt;").replace("`", "'")
    line = re.sub(r"[\\\[\]!|~*]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", line)
    line = line.replace("://", ":\\//").replace("www.", "www\\.")  # GitHub makes links of bare addresses
    return re.sub(r"^(\d*)(>|#|[+.)-](?=[\s-]))", r"\1\\\2", line)  # nor a heading, a quotation, a list


# --- the page -------------------------------------------------------------------------------------


def html(report: Report) -> str:
    """One HTML file that needs no network. All text comes from records that anybody may have written, so the
    template escapes everything but drawings, which are escaped as they are drawn."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page = environment.get_template("page.html")
    return page.render(report=report, draw=bars.svg, colors_of=bars.colors_of)
