"""Reports from records, without torch.

python -m report DIR               print the table of a run folder, and write its reports into it
python -m report --compare A B     two runs, row by row
"""

from pathlib import Path

from common.record import MERGED, PLAN, Study, write_json
from common.text import OneLineParser, aligned, run_command, say

GOOD = ("ok", "skipped")


def render(folder: Path, record) -> tuple[str, dict[str, bytes]]:
    """What a terminal shows of a run or a study in a folder, and its files by name.

    The module of a study has `tables`: rows by their title; sweep and parity have a `picture`: a PNG, or
    None.
    """
    from report import charts, page, parity, scaling, sweep, table
    from report.figures import figures
    from report.picture import picture

    if not isinstance(record, Study):
        made = figures(record)
        texts = {"report.md": table.render_markdown(made), "report.html": page.render(made)}
        files = {name: text.encode() for name, text in texts.items()}
        files["steps.png"] = charts.png(picture(made, ink="black", paper="white"))
        return table.render_text(made, str(folder / "report.html")), files
    kind = {"scaling": scaling, "sweep": sweep, "parity": parity}.get(record.kind)
    tables = kind.tables(record) if kind else {"": table.variant_rows(record)}
    files = {"report.md": table.render_study(record, tables).encode()}
    if drawn := kind.picture(record) if kind in (sweep, parity) else None:
        files[f"{record.kind}.png"] = drawn
    texts = [f"{title}\n{aligned(rows)}".strip() for title, rows in tables.items() if rows]
    names = " and ".join(str(folder / name) for name in files)
    texts += filter(None, ["\n".join(table.study_remarks(record, tables)), f"Report: {names}"])
    return "\n\n".join(texts), files


def main() -> int:
    parser = OneLineParser(prog="python -m report", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="a folder that run_all.sh wrote")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="folders of two runs")
    args = parser.parse_args()
    if (args.folder is None) == (args.compare is None):
        parser.error("give one DIR, or --compare A B")
    from report import load, page, table  # noqa: F401 so that a missing package is told before anything is read

    try:
        if args.compare:
            say(table.compare(*args.compare))
            return 0
        record = load.load(args.folder)
    except load.RecordError as error:
        parser.error(str(error))
    text, files = render(args.folder, record)
    say(text)  # first: the folder may be read-only
    if (args.folder / PLAN).exists():
        write_json(args.folder / MERGED, record)
    for name, content in files.items():
        (args.folder / name).write_bytes(content)
    runs = record.runs.values() if isinstance(record, Study) else [record]
    return int(any(row.status not in GOOD for run in runs for row in [*run.rows, *run.peers]))


if __name__ == "__main__":
    run_command(main, "python -m report")
