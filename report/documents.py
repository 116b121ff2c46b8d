"""Renew what is generated from docs/results/, in README, docs/ and beside the records: `python -m report.documents`."""

from __future__ import annotations

if __name__ == "__main__":
    from common.errors import needs

    needs("msgspec", "tabulate", "jinja2", "matplotlib")

import os
from pathlib import Path

from common.errors import run_command
from common.record import Roofs, Row, Run, write_bytes
from common.text import OneLineParser, say
from report import (
    analysis,
    causal_claims,
    causes,
    claims,
    glossary,
    largest_batch,
    parity,
    parity_page,
    predictions,
    questions,
    recordings,
    scaling,
    steps,
    sweep,
    sweep_page,
    table,
    traffic,
    tree,
)
from report.__main__ import write_reports
from report.analysis import is_timed
from report.doubts import BUSY, NOTICE, SERIOUS, furthest_around_a_row, reference_extremes
from report.load import MERGED, ROOFS_APART, RecordError, read_run
from report.readme import SHOWN, gains_table, machines_table, readme_table
from report.records import GPU, recorded_runs
from report.symptom_examples import examples_table
from report.table import commit_of, gib, levels, ms_or_status, pipe_table, speedup_cell, tflops

ROOT = Path(__file__).resolve().parent.parent
GENERATED_BEGIN, GENERATED_END = "<!-- results:begin -->", "<!-- results:end -->"


def performance_tables(results: Path) -> str:
    """Machine by machine: speedups of all workloads, time by category, variants; then bytes of attention."""
    machines = sorted(results.iterdir(), key=lambda path: (path.name != GPU, path.name))
    parts = [part for machine in machines if any(machine.glob(f"*/{MERGED}")) for part in _machine_tables(machine)]
    return "\n\n".join([*parts, *causes.sections(results), *traffic.sections(results)])


def _machine_tables(machine: Path) -> list[str]:
    runs = recorded_runs(machine, "*")
    legend = table.legend(*(run for _, run in runs))
    parts = [f"## Recorded in `{machine.name}`", _workload_table(runs), *legend]
    for path, run in runs:
        profiled = [row for row in [*run.steps, *run.peers] if row.profile]
        tables = [_category_table(profiled, run), _limits_table(profiled, run)] if profiled else []
        lines = "\n".join(f"- {line}" for line in _lines(run))
        if tables or lines:
            at = f"batch {run.workload.batch_size}, {run.environment.device}, commit {commit_of(run, 7)}"
            parts += filter(None, [f"### {path.name}, {at}", *tables, lines])
    return [*parts, *causes.choices(machine), *predictions.section(machine, runs)]


def _lines(run: Run) -> list[str]:
    """What is to be said of a run: its notes, its doubts, and its roofs."""
    doubts = levels(run)
    return [
        *(f"{row.step}: {row.note}" for row in [*run.steps, *run.peers] if row.note),
        *(f"serious: {text}" for text in doubts.get(SERIOUS, [])),
        *doubts.get(NOTICE, []),
        *(table.describe_roofs(run.roofs) if run.roofs else []),
    ]


def _workload_table(runs: list[tuple[Path, Run]]) -> str:
    """Rows by step and columns by run; times faster only where a run has the first row of all."""
    rows_of = [{row.step: row for row in [*run.steps, *run.peers]} for _, run in runs]
    names = sorted({name for rows in rows_of for name in rows})  # steps before peers

    def cell(name: str, rows: dict[str, Row], run: Run) -> str:
        row, baseline = rows.get(name), rows.get(names[0])
        if row and baseline and is_timed(row) and is_timed(baseline):
            head = f", {row.settings.head} LM head" if row.settings.head and run.peers else ""
            return f"{ms_or_status(row, run)}, {speedup_cell(row, baseline, run, digits=1)}{head}"
        return ms_or_status(row, run) if row else "-"

    headers = [f"{path.name}, batch {run.workload.batch_size}" for path, run in runs]
    cells = [(name, *(cell(name, rows, run) for rows, (_, run) in zip(rows_of, runs, strict=True))) for name in names]
    return pipe_table(("ms per step, times faster", *headers), cells)


def _category_table(rows: list[Row], run: Run) -> str:
    times = [analysis.category_ms(row) for row in rows]
    names = [name for name in times[0] if any(by_category[name] >= 0.05 for by_category in times)]
    cells = [(row.step, *(f"{by_category[name]:.1f}" for name in names), ms_or_status(row, run))
             for row, by_category in zip(rows, times, strict=True)]  # fmt: skip
    return pipe_table(("ms per step", *names, "timed"), cells)


def _limits_table(rows: list[Row], run: Run) -> str:
    cells = []
    for row in rows:
        launches, share = f"{row.profile.kernels_per_step:.0f}", table.describe_share_of_roof(row, run)
        cells.append((row.step, launches, analysis.describe_bound(row), tflops(row.model_flops_per_s), share, gib(row)))
    names = ("step", "kernels run", "most time in", "TFLOP/s", "of roof", "peak GiB")
    kept = [k for k in range(len(names)) if any(row[k] != "-" for row in cells)]
    return pipe_table([names[k] for k in kept], [[row[k] for k in kept] for row in cells])


def method_tables(results: Path) -> str:
    """How far the reference work of each recorded run differed between its rows and passes; and the recorded roofs."""
    cells = []
    for folder, run in recorded_runs(results):
        extremes = [reference_extremes(run, kind) for kind in ("product", "copy")]
        ratios = [f"{longest[0] / least[0]:.3f}" if least[0] else "-" for least, longest in extremes]
        if ratios != ["-", "-"]:
            passes = max(len(row.repetitions) or 1 for row in run.steps)
            around = f"{furthest_around_a_row(run):.3f}"
            cells.append((str(folder.relative_to(results)), run.environment.device, passes, *ratios, around))
    for device, most in BUSY.items():
        cells.append((f"threshold of a {'GPU' if device == 'cuda' else 'CPU'}", "", "", *map(str, most.values()), ""))
    headers = ("largest / smallest", "machine", "ladders", "product", "copy", "copy, before and after one row")
    parts = [pipe_table(headers, cells, n_left=2)]
    for folder, run in recorded_runs(results):
        if run.roofs and run.roofs.conditions:
            parts += [f"Roofs recorded in `{folder.relative_to(results)}`:", _roofs_table(run.roofs)]
            apart = (problem for problem in run.problems if problem.startswith(ROOFS_APART))
            parts += [f"{problem[0].upper()}{problem[1:]}." for problem in apart]
    return "\n\n".join(parts)


def _roofs_table(roofs: Roofs) -> str:
    cells = []
    for precision, ceiling in roofs.ceilings.items():
        name, at = f"{precision}_flops_per_s", roofs.conditions[precision]
        rates = (tflops(getattr(rates, name)) for rates in (roofs, roofs.square, roofs.zeros))
        conditions = (f"{figure:.0f}" if figure else "-" for figure in (at.clock_mhz, at.power_w, at.ceiling_clock_mhz))
        cells.append((precision.upper(), *rates, *conditions, tflops(ceiling)))
    headers = ("", "back to back, TFLOP/s", "one square product", "the same of zeros", "MHz", "W", "MHz in bursts",
               "ceiling")  # fmt: skip
    return pipe_table(headers, cells)


# --- docs/scaling.md ------------------------------------------------------------------------------


def recorded_scalings(results: Path) -> list[tuple[Path, dict[str, Run]]]:
    """Every recorded run with --scaling, by folder: the run of each of its places. The least work comes first, then the
    first step."""
    folders = sorted(path.parent for path in results.glob(f"*/*/{scaling.ROWS}"))
    recorded = [(folder, scaling.load_places(folder)) for folder in folders]
    first = [next(iter(places.values())) for _, places in recorded]
    order = [(run.workload.flops_per_step, run.steps[0].step) for run in first]
    return [one for _, one in sorted(zip(order, recorded, strict=True), key=lambda pair: pair[0])]


def scaling_tables(results: Path) -> str:
    """A summary, a section per recorded run, then what the choices inside give, by machine; or that no run is
    recorded."""
    runs = recorded_scalings(results)
    if not runs:
        return scaling.NOT_RECORDED
    parts = [scaling.SUMMARY, scaling.summary({folder.relative_to(results).as_posix(): run for folder, run in runs})]
    for folder, places in runs:
        name = folder.relative_to(results).as_posix()
        parts.append(scaling.render_markdown(places, f"## {name}", f"results/{name}/"))
    for machine in dict.fromkeys(folder.parent for folder, _ in runs):
        parts += causes.choices(machine)
    return "\n\n".join(parts)


# --- every document -------------------------------------------------------------------------------


def between_markers(document: Path, *generated: str) -> str:
    """The document's text with what stands between its pairs of markers replaced, in order.

    Raises RecordError where it lacks a pair.
    """
    done, rest = "", document.read_text()
    for part in generated:
        before, begin, rest = rest.partition(GENERATED_BEGIN)
        _, end, rest = rest.partition(GENERATED_END)
        if not (begin and end):
            raise RecordError(f"{document.name} lacks the markers {GENERATED_BEGIN} and {GENERATED_END}")
        done += f"{before}{begin}\n\n{part}\n\n{end}"
    return done + rest


def documents(root: Path, results: Path) -> dict[Path, str]:
    """The documents with generated parts, as the records would have them, and what has changed since these."""
    generated = {"README.md": (readme_table, gains_table, machines_table), "docs/performance.md": (performance_tables,),
                 "docs/method.md": (method_tables,), "docs/parity.md": (parity_page.tables,),
                 "docs/causes.md": (causal_claims.claims_table,), "docs/scaling.md": (scaling_tables,),
                 "docs/claims.md": (claims.claims_table,), "docs/anatomy.md": (questions.path,),
                 "docs/not-faster.md": (examples_table,),
                 "docs/sweep.md": (sweep_page.recorded, largest_batch.recorded),
                 "docs/steps.md": (lambda results: shown_steps(results)[0],),
                 "docs/results/README.md": (recordings.recordings_page,)}  # fmt: skip
    parts = {name: [make(results) for make in makers] for name, makers in generated.items()}
    parts = recordings.with_since(parts, root, results, results / SHOWN / MERGED)
    parts["docs/tree.md"] = [tree.tree(root)]
    return linked_pages(root, {root / name: between_markers(root / name, *each) for name, each in parts.items()})


def linked_pages(root: Path, generated: dict[Path, str]) -> dict[Path, str]:
    """All pages, those of the experiments too, with their first use of each term linked to the glossary."""
    path = root / "docs" / glossary.GLOSSARY.name
    terms = path.read_text()
    pages = [*root.glob("docs/*.md"), *root.glob("docs/results/*/anatomy/*.md"), *generated]
    linked = {
        page: glossary.linked(generated.get(page) or page.read_text(), terms, os.path.relpath(path, page.parent))
        for page in sorted(set(pages) - {path, path.with_name("tree.md")})
    }
    return generated | linked | {path: glossary.anchored(terms)}


def shown_steps(results: Path) -> tuple[str, dict[str, bytes]]:
    """The story of README's run, and its pictures by file name."""
    folder = results / SHOWN
    counted, parts = traffic.of_run(folder), causes.of_run(folder)
    return steps.steps_page(read_run(folder / MERGED), f"results/{SHOWN}", counted, parts)


def write_pictures(folder: Path, pictures: dict[str, bytes]) -> None:
    """Write pictures by name, and remove those of the folder that are none of them any more. Raises OSError."""
    for name, picture in pictures.items():
        write_bytes(folder / name, picture)
    for path in folder.glob("*.svg"):
        if path.name not in pictures:
            path.unlink()


def main() -> None:
    parser = OneLineParser(prog="python -m report.documents", description=__doc__)
    parser.parse_args()
    results = ROOT / "docs" / "results"
    try:
        for document, text in documents(ROOT, results).items():
            write_bytes(document, text.encode())
            say(str(document.relative_to(ROOT)))
        write_pictures(ROOT / "docs" / steps.FOLDER, shown_steps(results)[1])
        for folder, study in parity_page.recorded_studies(results):
            write_bytes(folder / parity.CURVES, parity_page.curves_png(study))
            say(str((folder / parity.CURVES).relative_to(ROOT)))
        for folder, runs in recorded_scalings(results):
            say("\n".join(scaling.write(folder, runs) or [str(folder.relative_to(ROOT))]))
        for path in sorted(results.glob(f"*/{sweep.SWEEP}")):
            sweep_page.write(path.parent)
            say(str(path.parent.relative_to(ROOT)))
        for folder, run in recorded_runs(results):
            missing = write_reports(run, folder)
            say("\n".join(missing or [str(folder.relative_to(ROOT))]))
    except (ValueError, KeyError) as error:  # RecordError, or a file of figures with a field missing
        parser.error(f"a record is not as it should be: {error}")


if __name__ == "__main__":
    run_command(main, "python -m report.documents")
