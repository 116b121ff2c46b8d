"""Reports from records, without torch.

python -m report DIR               print the table of a run folder, and write its reports into it
python -m report --compare A B     two runs, row by row; with --bound 0.03 whether B bears out A
"""

import sys
from pathlib import Path

from common.record import MERGED, PATCHED, PLAN, Run, Study, write_bytes, write_json
from common.text import OneLineParser, run_command, say

GOOD = ("ok", "skipped")


def render(folder: Path, record: Run | Study) -> tuple[str, dict[str, bytes]]:
    """What a terminal shows of a run or a study in a folder, and its files by name."""
    from report import applied, bars, parity, printers, sections, table
    from report.derive import derive

    report, end = sections.of(record), []
    files = {"report.md": printers.markdown(report).encode()}
    if isinstance(record, Study):
        if record.kind == "parity" and (picture := parity.picture(record)):
            files["parity.png"] = picture
    else:
        figures = derive(record)
        files["report.html"] = printers.html(report).encode()
        files["steps.svg"] = bars.picture(figures).encode()
        if patch := applied.patch_to_offer(figures):
            files[applied.patch_name(record)] = patch.encode()
        if table.fits_cards(figures):
            row = " | ".join(map(printers.escape, table.card_row(figures).values()))
            end = ["This GPU as a row of docs/cards.md:", f"| {row} |"]
    shown = [name for name in files if name == "report.html" or isinstance(record, Study)]
    end.insert(0, f"Report: {' and '.join(str(folder / name) for name in shown)}")
    return printers.terminal(report, end), files


def main() -> int:
    parser = OneLineParser(prog="python -m report", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="a folder that run_all.sh wrote")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="folders of two runs")
    text = "with --compare: fail where a row of B differs by a larger share from that of A"
    parser.add_argument("--bound", type=float, metavar="SHARE", help=text)
    text = "print the row with the changes that a run of a model recommends, and nothing else"
    parser.add_argument("--recommended", action="store_true", help=text)
    args = parser.parse_args()
    if (args.folder is None) == (args.compare is None):
        parser.error("give one DIR, or --compare A B")
    if args.bound is not None and not (args.compare and 0 < args.bound < 1):
        parser.error("--bound is a share between 0 and 1, with --compare")
    from report import applied, load
    from report.compare import compare
    from report.derive import derive

    try:
        if args.compare:
            text, is_borne_out = compare(*args.compare, args.bound)
            say(text)
            return int(not is_borne_out)
        record = load.load(args.folder)
    except load.RecordError as error:
        parser.error(str(error))
    if args.recommended:
        line = applied.recommended_line(derive(record))
        say(line.name if line else "")
        return 0
    text, files = render(args.folder, record)
    say(text)  # first: the folder may be read-only
    if (args.folder / PLAN).exists():
        if lost := load.lost_rows(args.folder / MERGED, record):
            say(f"{MERGED} stays as it is: it has {', '.join(lost)}, whose records are gone", sys.stderr)
        else:
            write_json(args.folder / MERGED, record)
        if isinstance(record, Run) and not record.is_of_ladder:
            (args.folder / applied.patch_name(record)).unlink(missing_ok=True)  # of rows that ran before
    for name, content in files.items():
        write_bytes(args.folder / name, content)
    runs = load.runs_of(record).values()
    rows = [row for run in runs for row in [*run.rows, *run.peers] if row.step != PATCHED]
    return int(any(row.status not in GOOD for row in rows))


if __name__ == "__main__":
    run_command(main, "python -m report")
