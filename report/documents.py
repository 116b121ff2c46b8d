"""Renew what is generated from docs/results/, in README, docs/ and beside the records: `python -m report.documents`."""

from __future__ import annotations

if __name__ == "__main__":
    from common.errors import needs

    needs("msgspec", "tabulate", "jinja2", "matplotlib")

import json
from collections.abc import Iterable
from pathlib import Path

from common.errors import run_command
from common.record import Roofs, Row, Run, write_bytes
from common.text import OneLineParser, aligned, say
from report import analysis, table
from report.__main__ import write_reports
from report.analysis import is_timed
from report.doubts import BUSY, NOTICE, SERIOUS, reference_extremes
from report.load import MERGED, ROOFS, RecordError, convert, read_json, read_run
from report.table import commit_of, gib, levels, markdown, ms_cell, speedup_cell, tflops

ROOT = Path(__file__).resolve().parent.parent
GENERATED_BEGIN, GENERATED_END = "<!-- results:begin -->", "<!-- results:end -->"
SHOWN = "h200/gpt3-6.7b-slice"  # the workload of README's table


def recorded_runs(folder: Path, pattern: str = "*/*") -> list[tuple[Path, Run]]:
    """Every recorded run below a folder, the one with the least work first."""
    runs = [(path.parent, read_run(path)) for path in sorted(folder.glob(f"{pattern}/{MERGED}"))]
    return sorted(runs, key=lambda named: named[1].workload.flops_per_step)


def pipe_table(headers: Iterable[str], cells: Iterable[tuple], n_left: int = 1) -> str:
    return aligned(table.grid(headers, cells), "pipe", n_left)


def readme_table(results: Path) -> str:
    """Five rows of one workload, a line about it, and links to the others."""
    folder = results / SHOWN
    run = read_run(folder / MERGED)
    baseline, plain = analysis.reference_row(run.steps), analysis.plain_row(run.steps)
    headers = (
        "step",
        "ms per step",
        f"times faster than {baseline.step}",
        f"times faster than {plain.step}",
        "TFLOP/s",
        "peak GiB",
    )
    cells = []
    for row in run.steps:
        rate = tflops(row.model_flops_per_s) if is_timed(row) else "-"
        speedups = (speedup_cell(row, other, run, digits=1, unit="") for other in (baseline, plain))
        cells.append((row.step, ms(row, run), *speedups, rate, gib(row)))
    at, base = f"docs/results/{SHOWN}", results.parent.parent
    others = [path for path, _ in recorded_runs(folder.parent, "*") if path != folder]
    links = ", ".join(f"[{path.name}]({path.relative_to(base)}/report.md)" for path in others)
    steps = f"{run.workload.warmup} + {run.workload.steps} steps (untimed + timed)"
    about = (
        f"{table.describe_device(run.environment)}; {run.workload.preset}, batch {run.workload.batch_size}, "
        f"commit {commit_of(run, 7)}: [report]({at}/report.md), [record]({at}/{MERGED}). "
        f"{', '.join([steps, *table.describe_passes(run)])}. Other workloads: {links}. "
        "TFLOP/s are model FLOPs by the causal convention: attention counts half of the (T, T) square."
    )
    picture = f'<img src="{at}/speedup.png" width="560" alt="Times faster than the baseline, by step">'
    doubts = "\n".join(f"- {markdown(text)}" for text in levels(run).get(SERIOUS, []))
    return "\n\n".join(filter(None, [picture, pipe_table(headers, cells), *table.legend(run), doubts, about]))


def ms(row: Row, run: Run) -> str:
    return ms_cell(row, run) if is_timed(row) else row.status


def performance_tables(results: Path) -> str:
    """Machine by machine: speedups of all workloads, time by category, variants; then bytes of attention."""
    machines = sorted(path for path in results.iterdir() if any(path.glob(f"*/{MERGED}")))
    parts = [part for machine in machines for part in _machine_tables(machine)]
    for path in sorted(results.glob("*/attention-traffic.json")):
        parts += ["## DRAM bytes of attention", _traffic_table(json.loads(path.read_text()))]
    return "\n\n".join(parts)


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
    for path in sorted(machine.glob("*/ablations.json")):
        variants = json.loads(path.read_text())["variants"]
        parts += [f"### What each choice gives: {path.parent.name}", _ablation_table(variants)]
    return parts


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
            return f"{ms(row, run)}, {speedup_cell(row, baseline, run, digits=1)}"
        return ms(row, run) if row else "-"

    headers = [f"{path.name}, batch {run.workload.batch_size}" for path, run in runs]
    cells = [(name, *(cell(name, rows, run) for rows, (_, run) in zip(rows_of, runs, strict=True))) for name in names]
    return pipe_table(("ms per step, times faster", *headers), cells)


def _category_table(rows: list[Row], run: Run) -> str:
    times = [analysis.category_ms(row) for row in rows]
    names = [name for name in times[0] if any(by_category[name] >= 0.05 for by_category in times)]
    cells = [(row.step, *(f"{by_category[name]:.1f}" for name in names), ms(row, run))
             for row, by_category in zip(rows, times, strict=True)]  # fmt: skip
    return pipe_table(("ms per step", *names, "timed"), cells)


def _limits_table(rows: list[Row], run: Run) -> str:
    cells = []
    for row in rows:
        launches, share = f"{row.profile.kernels_per_step:.0f}", table.describe_share_of_roof(row, run)
        cells.append((row.step, launches, analysis.describe_bound(row), tflops(row.model_flops_per_s), share, gib(row)))
    return pipe_table(("step", "launches", "bound by", "TFLOP/s", "of roof", "peak GiB"), cells)


def _ablation_table(variants: list[dict]) -> str:
    cells = []
    for variant in variants:
        timing, baseline = variant["timing"], variant["baseline"]["timing"]
        difference = loss = variant["reason"] or "-"
        if timing["median_ms"] is not None and baseline["median_ms"] is not None:
            difference = f"{timing['median_ms'] - baseline['median_ms']:+.1f} ms"
            varied, unchanged = (Row("", loss=recorded["loss"]) for recorded in (variant, variant["baseline"]))
            loss = table.percent(analysis.loss_difference(varied, unchanged))
        script, commit = f"{variant['script']}, {variant['kind']}", (variant.get("commit") or "-")[:7]
        times = (quartiles(baseline), quartiles(timing))
        cells.append((variant["name"], script, variant["predicted"], *times, difference, loss, commit))
    headers = (
        "variant",
        "script",
        "predicted",
        "unchanged, ms (p25-p75)",
        "varied, ms",
        "difference",
        "loss",
        "commit",
    )
    return pipe_table(headers, cells, n_left=3)


def quartiles(timing: dict) -> str:
    if timing["median_ms"] is None:
        return "-"
    return f"{timing['median_ms']:.1f} ({timing['p25_ms']:.1f}-{timing['p75_ms']:.1f})"


def method_tables(results: Path) -> str:
    """How far the reference work of each recorded run differed between its rows and passes; and the recorded roofs."""
    cells = []
    for folder, run in recorded_runs(results):
        extremes = [reference_extremes(run, kind) for kind in ("product", "copy")]
        ratios = [f"{longest[0] / least[0]:.3f}" if least[0] else "-" for least, longest in extremes]
        if ratios != ["-", "-"]:
            passes = max(len(row.repetitions) or 1 for row in run.steps)
            cells.append((str(folder.relative_to(results)), run.environment.device, passes, *ratios))
    for device, most in BUSY.items():
        cells.append((f"threshold of a {'GPU' if device == 'cuda' else 'CPU'}", "", "", *map(str, most.values())))
    parts = [pipe_table(("largest / smallest", "machine", "ladders", "product", "copy"), cells, n_left=2)]
    for path in sorted(results.glob(f"*/{ROOFS}")):
        parts += [f"Roofs recorded in `{path.parent.name}`:", _roofs_table(convert(read_json(path), Roofs, ROOFS))]
    return "\n\n".join(parts)


def _roofs_table(roofs: Roofs) -> str:
    cells = []
    for precision, ceiling in roofs.ceilings.items():
        name, at = f"{precision}_flops_per_s", roofs.conditions[precision]
        rates = (tflops(getattr(rates, name)) for rates in (roofs, roofs.square, roofs.zeros))
        conditions = (f"{figure:.0f}" if figure else "-" for figure in (at.clock_mhz, at.power_w, at.ceiling_clock_mhz))
        cells.append((precision.upper(), *rates, *conditions, tflops(ceiling)))
    headers = (
        "back to back, TFLOP/s",
        "one square product",
        "the same of zeros",
        "MHz",
        "W",
        "MHz in bursts",
        "ceiling",
    )
    return pipe_table(("", *headers), cells)


def _traffic_table(traffic: dict) -> str:
    shape = ", ".join(f"{name} {size}" for name, size in traffic["shape"].items())
    cells = []
    for which, counts in traffic["bytes"].items():
        gb = (f"{counted / 1e9:.2f}" if counted else "-" for counted in (counts["analytic"], counts["counters"]))
        cells.append((f"attention {which}, {shape}", *gb))
    return pipe_table(("forward and backward, BF16", "analytic GB", "counted GB"), cells)


def between_markers(document: Path, generated: str) -> str:
    """The document's text with the part between its markers replaced. Raises RecordError where it has none."""
    before, begin, rest = document.read_text().partition(GENERATED_BEGIN)
    _, end, after = rest.partition(GENERATED_END)
    if not (begin and end):
        raise RecordError(f"{document.name} lacks the markers {GENERATED_BEGIN} and {GENERATED_END}")
    return f"{before}{begin}\n\n{generated}\n\n{end}{after}"


def documents(root: Path, results: Path) -> dict[Path, str]:
    """The documents with generated parts, as the records would have them."""
    generated = {"README.md": readme_table, "docs/performance.md": performance_tables,
                 "docs/method.md": method_tables}  # fmt: skip
    return {root / name: between_markers(root / name, tables(results)) for name, tables in generated.items()}


def main() -> None:
    parser = OneLineParser(prog="python -m report.documents", description=__doc__)
    parser.parse_args()
    results = ROOT / "docs" / "results"
    try:
        for document, text in documents(ROOT, results).items():
            write_bytes(document, text.encode())
            say(str(document.relative_to(ROOT)))
        for folder, run in recorded_runs(results):
            missing = write_reports(run, folder)
            say("\n".join(missing or [str(folder.relative_to(ROOT))]))
    except (ValueError, KeyError) as error:  # RecordError, or a file of figures with a field missing
        parser.error(f"a record is not as it should be: {error}")


if __name__ == "__main__":
    run_command(main, "python -m report.documents")
