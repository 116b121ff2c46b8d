"""Reports from records, without torch.

python -m report RUN_DIR                  print the table; write report.md, report.html and speedup.png,
                                          of a run with --scaling: scaling.json, scaling.md and scaling.png
python -m report --compare RUN_A RUN_B    two runs beside each other; --html FILE writes that as a page too
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from common.errors import needs, run_command
from common.record import scaling_places, write_run
from common.text import OneLineParser, one_line, say

GOOD = ("ok", "skipped")


def plain_table(folder: Path) -> tuple[str, int]:
    """A bare table of a run folder, for a Python that lacks msgspec or tabulate, and the exit code.

    Nothing is checked but what it shows.
    """
    lines, code = [f"{'step':24}{'status':>12}{'ms/step':>12}"], 0
    places = ("", "pass-*/", "[0-9]*/", "[0-9]*/pass-*/")
    patterns = [f"{place}{rows}.json" for place in places for rows in ("[0-9]_*", "peers/*")]
    records = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    for path in records or [folder / "results.json"]:
        try:
            for row in json.loads(path.read_text())["steps"]:
                ms, status = row["timing"]["median_ms"], one_line(row["status"])
                cells = f"{one_line(row['step']):24}{status:>12}{'-' if ms is None else f'{ms:.1f}':>12}"
                lines.append(cells + (f"  {one_line(row['reason'])}" if row["reason"] else ""))
                code |= status not in GOOD
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            lines.append(f"{one_line(path.name)} cannot be read")
            code = 1
    return "\n".join([*lines, "for the whole report: pip install msgspec tabulate jinja2 matplotlib"]), int(code)


def write_reports(run, folder: Path) -> list[str]:
    """Write report.md, report.html and speedup.png of a run; returns what could not be written, and why.

    Everything is rendered before anything is replaced. Raises OSError.
    """
    from common.record import write_bytes
    from report import table

    files, missing = {"report.md": table.render_markdown(run).encode()}, []
    try:
        from report import glossary, page  # what draws may be absent or broken; the table must not be

        files["report.html"] = glossary.with_terms(page.render(run)).encode()
        files["speedup.png"] = page.speedup_png(run)
    except Exception as error:
        advice = ": pip install -r requirements.txt" if isinstance(error, ImportError) else ""
        missing = [f"no report.html and speedup.png ({one_line(error)}){advice}"]
        for name in ("report.html", "speedup.png"):  # of an earlier report: they would not fit report.md
            (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_bytes(folder / name, content)
    return missing


def report(folder: Path, ended: dict | None = None) -> int:
    """Print and write the report of a run folder; the exit code is 0 where every row is as it should be.

    `ended` holds rows, by run folder and name, that could leave no record. Raises RecordError where there is nothing
    to report, OSError where nothing can be written.
    """
    try:
        import tabulate  # noqa: F401  imported where a table is drawn

        from report import load, predictions, scaling, sweep, table
    except ImportError:
        text, code = plain_table(folder)
        say(text)
        return code
    if (folder / sweep.SWEEP).exists() and not (folder / load.MERGED).exists():
        raise ValueError(f"{folder} is a sweep: python -m report.sweep_page {folder} makes its page again")
    if scaling_places(folder):
        runs = scaling.load_places(folder, ended)
        say(scaling.render_text(runs))
        for line in scaling.write(folder, runs):
            say(line)
        return int(any(row.status not in GOOD for row in scaling.scaled_rows(runs)))
    run = load.load_run(folder, (ended or {}).get(folder))
    if recorded := load.holds_only_the_merge(folder):
        predictions.add_later(run, folder)
    say(table.render_text(run))
    for line in write_reports(run, folder):
        say(line)
    if not recorded:
        write_run(folder / load.MERGED, run)
    left_out = load.read_plan(folder).left_out if (folder / load.PLAN).exists() else []
    rows = [*run.steps, *run.peers]
    return int(any(row.status not in GOOD for row in rows if not (row.status == "not run" and row.step in left_out)))


def main() -> int:
    parser = OneLineParser(prog="python -m report", description=__doc__)
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="a folder that run_all.sh wrote")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("RUN_A", "RUN_B"), help="ratios, step by step")
    parser.add_argument("--html", type=Path, metavar="FILE", help="with --compare: also write a page")
    args = parser.parse_args()
    if (args.run_dir is None) == (args.compare is None):
        parser.error("give one RUN_DIR, or --compare RUN_A RUN_B")
    if args.html and not args.compare:
        parser.error("--html goes with --compare")
    try:
        if not args.compare:
            return report(args.run_dir)
        needs("msgspec", "tabulate", *(["jinja2", "matplotlib"] if args.html else []))
        from report.compare import compare_folders, page_of, text_of

        made = compare_folders(*args.compare)
        say(text_of(made))
        if args.html:
            from report.glossary import with_terms

            args.html.write_text(with_terms(page_of(made)), encoding="utf-8")
            sys.stderr.write(f"written to {args.html}\n")
        return 0
    except ValueError as error:  # RecordError
        parser.error(str(error))


if __name__ == "__main__":
    run_command(main, "python -m report")
