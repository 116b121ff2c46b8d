"""Renew what is generated from docs/results/, in README, docs/ and beside the records: `python -m common.documents`."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from common.analysis import (
    GIB,
    bound_by,
    describe_profile_off,
    loss_difference,
    median_ms,
    peak_bytes,
    quartiles_ms,
    reference_step,
    row_note,
)
from common.record import OneLineParser, RecordError, read_envelope
from common.report import CONVENTION, MERGED, describe_device, describe_roofs, table, write_reports

ROOT = Path(__file__).resolve().parent.parent
PREDICTED_FOR = "predictions are for gpt3-6.7b-slice on an H200 unless they say otherwise"
GENERATED_BEGIN, GENERATED_END = "<!-- results:begin -->", "<!-- results:end -->"


def readme_table(results: Path) -> str:
    """The recorded runs under `results/<machine>/<preset>/`, machine by machine, steps as rows."""
    parts = []
    for machine in sorted(path for path in results.iterdir() if path.is_dir()):
        records = {path.parent.name: read_envelope(path) for path in machine.glob(f"*/{MERGED}")}
        runs = {name: run for name, run in records.items() if reference_step(run["steps"])}
        if runs:
            by_work = sorted(runs.items(), key=lambda named: named[1]["workload"]["flops_per_step"])
            parts.append(_machine_table(machine, dict(by_work)))
    return "\n\n".join(parts)


def _machine_table(folder: Path, runs: dict[str, dict]) -> str:
    rows_of = {name: [row[0] for row in table(run)[1]] for name, run in runs.items()}
    widest = max(runs, key=lambda name: (len(rows_of[name]), runs[name]["workload"]["flops_per_step"]))
    names = rows_of[widest]
    headers, columns = ["step"], [names]
    for name, run in runs.items():
        headers.append(f"{name}, batch {run['workload']['batch_size']}")
        columns.append(_column(run, names, _speedup_cell if rows_of[name][0] == names[0] else _milliseconds_cell))
    for title, index in (("TFLOP/s", 4), ("peak GiB", 7)):
        headers.append(title)
        columns.append(_column(runs[widest], names, _table_cell(index)))
    headers.append("loss difference, in the same order")
    differences = [_column(run, names, _table_cell(10)) for run in runs.values()]
    columns.append([", ".join(cells) for cells in zip(*differences, strict=True)])
    rows = [list(row) for row in zip(*columns, strict=True)]
    drawn = tabulate(rows, headers, tablefmt="pipe", colalign=_numbers(headers))
    links = ", ".join(_link(folder, name, run) for name, run in runs.items())
    picture = _picture(folder, widest)
    partly = [
        f" Of {name} only the rows shown were run{_how_run(run)}; its loss is against {rows_of[name][0]}."
        for name, run in runs.items()
        if rows_of[name][0] != names[0]
    ]
    return (
        f"{describe_device(runs[widest]['environment'])}: milliseconds per training step and speedup over "
        f"the first row; TFLOP/s and memory of {widest}.\n\n{picture}\n\n{drawn}\n\n"
        f"Recorded: {links}.{''.join(partly)}{_earlier_line(runs)}{_repeats_line(folder / name for name in runs)} "
        f"{CONVENTION}"
    )


def _how_run(run: dict) -> str:
    """By which commands rows came together that no ladder made, or nothing."""
    if "run_all.sh" in run["command"]:
        return ""
    return ", one command a row" + (", and its roofs measured by `python -m common.hardware`" if run["roofs"] else "")


def _earlier_line(runs: dict[str, dict]) -> str:
    """Which rows have a time of another script than the one of this checkout, or nothing."""
    workloads_of: dict[str, list[str]] = {}
    for name, run in runs.items():
        for row in _ok_rows(run):
            script = _script(row["step"])
            if script is None or _code(row["source"]) != _code(script):
                workloads_of.setdefault(row["step"], []).append(name)
    said = "; ".join(f"{step} of {', '.join(names)}" for step, names in workloads_of.items())
    return f" Recorded with an earlier version of the script, which the record holds: {said}." if said else ""


def _script(step: str) -> str | None:
    """The text of a step's or peer's script as it is now; None where there is none of this name."""
    found = [path for path in (ROOT / f"{step}.py", ROOT / "peers" / f"{step}.py") if path.exists()]
    return found[0].read_text() if found else None


def _picture(folder: Path, name: str) -> str:
    path = f"docs/results/{folder.name}/{name}"
    return f'<a href="{path}/report.html"><img src="{path}/speedup.png" width="560" alt="Speedup by step, {name}"></a>'


def _link(folder: Path, name: str, run: dict) -> str:
    commit, n_losses = run["environment"].get("commit") or "unknown", len(reference_step(run["steps"])["loss"])
    path = f"docs/results/{folder.name}/{name}"
    return f"{name} ([report]({path}/report.html), [record]({path}/{MERGED}), {n_losses} steps, commit {commit[:7]})"


def _column(run: dict, names: list[str], cell: Callable[[dict, list[str], dict], str]) -> list[str]:
    """One cell for each of `names`, from the run's record and table row of that name; a dash where it has none."""
    records, reference = [*run["steps"], *run["peers"]], reference_step(run["steps"])
    found = {row[0]: cell(record, row, reference) for record, row in zip(records, table(run)[1], strict=True)}
    return [found.get(name, "-") for name in names]


def _table_cell(index: int) -> Callable[[dict, list[str], dict], str]:
    return lambda _record, row, _reference: row[index]


def _speedup_cell(record: dict, row: list[str], reference: dict) -> str:
    if record["status"] != "ok":
        return record["status"]
    ms = record["timing"]["median_ms"]
    return f"{row[2]} ms, {reference['timing']['median_ms'] / ms:.1f}x"


def _milliseconds_cell(record: dict, row: list[str], _reference: dict) -> str:
    return f"{row[2]} ms" if record["status"] == "ok" else record["status"]


def performance_tables(results: Path) -> str:
    """Of every recorded run with a profile: time by category, row by row; and the counted bytes of attention."""
    parts = []
    for path in sorted(results.glob(f"*/*/{MERGED}")):
        run = read_envelope(path)
        profiled = [row for row in [*run["steps"], *run["peers"]] if row["profile"]]
        if profiled:
            workload = run["workload"]
            title = f"### {path.parent.name}, batch {workload['batch_size']}, {run['environment']['device']}"
            said = [(row["step"], line) for row in profiled for line in (row_note(row), describe_profile_off(row))]
            notes = [f"{step}: {line}" for step, line in said if line]
            parts += [title, _category_table(profiled)]
            parts += [f"- {line}" for line in notes + describe_roofs(run["roofs"] or {})]
    parts += ["### The same again", _repeat_table(results)]
    for path in sorted(results.glob("*/*/ablations.json")):
        parts += [
            f"### What each choice gives: {path.parent.name}",
            f"{PREDICTED_FOR[0].upper()}{PREDICTED_FOR[1:]}.",
            ablation_table(json.loads(path.read_text())["variants"], "pipe"),
        ]
    for path in sorted(results.glob("*/attention-traffic.json")):
        parts += ["### DRAM bytes of attention", _traffic_table(json.loads(path.read_text()))]
    return "\n\n".join(parts)


def _category_table(rows: list[dict]) -> str:
    names = [
        name for name in rows[0]["profile"]["categories"] if any(r["profile"]["categories"][name]["ms"] for r in rows)
    ]
    headers = ["ms per step", *names, "gaps", "profiled", "timed", "launches", "bound by", "peak GiB"]
    drawn = []
    for row in rows:
        profile = row["profile"]
        cells = [f"{profile['categories'][name]['ms']:.1f}" for name in names]
        cells += [f"{profile[name]:.1f}" for name in ("gpu_idle_ms", "step_ms")]
        cells += [f"{row['timing']['median_ms']:.1f}", f"{profile['kernels_per_step']:.0f}", bound_by(row)]
        drawn.append([row["step"], *cells, f"{peak_bytes(row) / GIB:.1f}"])
    return tabulate(drawn, headers, tablefmt="pipe", disable_numparse=True, colalign=_numbers(headers))


class Repeat(NamedTuple):
    """A row of another run of a workload, beside that of the run in README."""

    workload: str
    run: str
    shown: dict
    other: dict
    commit: str
    same_commit: bool

    @property
    def same_script(self) -> bool:
        return _code(self.shown["source"]) == _code(self.other["source"])

    @property
    def difference(self) -> float:
        return median_ms(self.other) / median_ms(self.shown) - 1


def _code(source: str) -> str:
    """What a script does: its text without comments, layout and docstring."""
    tree = ast.parse(source)
    return ast.dump(ast.Module(tree.body[1:] if ast.get_docstring(tree) else tree.body, []))


def _repeats(folders: Iterable[Path]) -> list[Repeat]:
    """The rows, peers' too, of all other runs in these folders that have a time in both."""
    found = []
    for path in (path for folder in folders for path in sorted(folder.glob("results-[0-9].json"))):
        first, run, number = read_envelope(path.parent / MERGED), read_envelope(path), path.stem.rpartition("-")[2]
        shown = {row["step"]: row for row in _ok_rows(first)}
        ours, theirs = (each["environment"].get("commit") or "unknown" for each in (first, run))
        for row in _ok_rows(run):
            if row["step"] in shown:
                found.append(Repeat(path.parent.name, number, shown[row["step"]], row, theirs[:7], ours == theirs))
    return found


def _ok_rows(run: dict) -> list[dict]:
    return [row for row in [*run["steps"], *run["peers"]] if row["status"] == "ok"]


def _repeat_table(results: Path) -> str:
    """The medians of other runs of a recorded workload, beside those of the run in README."""
    rows = []
    for repeat in _repeats(sorted(results.glob("*/*/"))):
        p25, p75 = quartiles_ms(repeat.other)
        cells = [f"{median_ms(repeat.shown):.1f}", f"{median_ms(repeat.other):.1f}", f"{p25:.1f}-{p75:.1f}"]
        cells += [f"{repeat.difference:+.1%}", "same" if repeat.same_script else "another", repeat.commit]
        rows.append([repeat.workload, repeat.other["step"], repeat.run, *cells])
    headers = ["workload", "step", "run", "run 1, ms/step", "this run", "p25-p75", "difference", "script", "commit"]
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=_numbers(headers))


def _repeats_line(folders: Iterable[Path]) -> str:
    """How far other runs lie from those shown, or nothing where there are none."""
    repeats = _repeats(folders)
    said = [
        f"{which} by {min(differences):+.1%} to {max(differences):+.1%}"
        for which, same in (("those of the same commit", True), ("earlier ones", False))
        if (differences := [repeat.difference for repeat in repeats if repeat.same_commit == same])
    ]
    return (
        f" Other runs differ from these times, {', '.join(said)}: [each of them](docs/performance.md#the-same-again)."
        if said
        else ""
    )


def ablation_table(variants: list[dict], style: str = "simple") -> str:
    """What anatomy.ablations found, a row per variant: the prediction, and the differences to the unchanged script."""
    rows = []
    for variant in variants:
        baseline = variant["baseline"]
        row = [variant["script"], variant["kind"], variant["name"], variant["predicted"]]
        if variant["median_ms"] is None or baseline["median_ms"] is None:
            ended = variant if variant["median_ms"] is None else baseline
            row += [ended["status"], "-", ended["reason"] or "-", "-"]
        else:
            row += [_median_and_quartiles(each) for each in (baseline, variant)]
            row += [f"{variant['median_ms'] - baseline['median_ms']:+.1f} ms", loss_difference(variant, baseline)]
        steps = len(variant["timing"]["step_ms"]) if variant.get("timing") else "-"
        rows.append([*row, steps, (variant.get("commit") or "-")[:7]])
    headers = ["script", "kind", "variant", "predicted", "unchanged, ms (p25-p75)", "varied, ms", "difference", "loss"]
    headers += ["steps", "commit"]
    return tabulate(rows, headers, tablefmt=style, disable_numparse=True)


def _median_and_quartiles(step: dict) -> str:
    p25, p75 = quartiles_ms(step)
    return f"{median_ms(step):.1f} ({p25:.1f}-{p75:.1f})"


def _traffic_table(traffic: dict) -> str:
    shape = ", ".join(f"{name} {size}" for name, size in traffic["shape"].items())
    rows = [
        [
            f"attention {which}, {shape}",
            *(f"{found[how] / 1e9:.2f}" if found[how] else "-" for how in ("analytic", "counters")),
        ]
        for which, found in traffic["bytes"].items()
    ]
    headers = ["forward and backward, BF16", "analytic GB", "counted GB"]
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=_numbers(headers))


def _numbers(headers: list[str]) -> list[str]:
    return ["left", *["right"] * (len(headers) - 1)]


def between_markers(document: Path, generated: str) -> str:
    """The document's text with the part between its markers replaced. Raises RecordError where it has none."""
    before, begin, rest = document.read_text().partition(GENERATED_BEGIN)
    _, end, after = rest.partition(GENERATED_END)
    if not (begin and end):
        raise RecordError(f"{document.name} lacks the markers {GENERATED_BEGIN} and {GENERATED_END}")
    return f"{before}{begin}\n\n{generated}\n\n{end}{after}"


def documents(root: Path, results: Path) -> dict[Path, str]:
    """The documents with generated parts, as the records would have them."""
    readme, performance = root / "README.md", root / "docs" / "performance.md"
    return {
        readme: between_markers(readme, readme_table(results)),
        performance: between_markers(performance, performance_tables(results)),
    }


def main() -> None:
    parser = OneLineParser(prog="python -m common.documents", description=__doc__)
    parser.parse_args()
    results = ROOT / "docs" / "results"
    try:
        from common import charts, page  # noqa: F401  without them write_reports would take the pages away

        for document, text in documents(ROOT, results).items():
            document.write_text(text)
            print(document.relative_to(ROOT))
        for path in sorted(results.glob(f"*/*/{MERGED}")):
            write_reports(read_envelope(path), path.parent)
            print(path.parent.relative_to(ROOT))
    except (RecordError, OSError, ImportError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
