"""Renew what is generated from docs/results/, in README, docs/ and beside the records: `python -m report.documents`."""

from __future__ import annotations

if __name__ == "__main__":
    from common.errors import needs

    needs("msgspec", "tabulate", "jinja2", "matplotlib")

import json
from collections.abc import Iterator
from pathlib import Path

from common.record import Row, Run
from common.text import OneLineParser, aligned
from report import analysis
from report.__main__ import write_reports
from report.analysis import is_timed, median_ms
from report.load import MERGED, RecordError, read_run
from report.table import CONVENTION, describe_device, describe_roofs, describe_share_of_roof, percent, tflops

ROOT = Path(__file__).resolve().parent.parent
GENERATED_BEGIN, GENERATED_END = "<!-- results:begin -->", "<!-- results:end -->"
SHOWN = "h200/gpt3-6.7b-slice"  # the workload of README's table


def recorded_runs(results: Path) -> Iterator[tuple[Path, Run]]:
    """Every recorded run, the one with the least work first."""
    runs = [(path.parent, read_run(path)) for path in sorted(results.glob(f"*/*/{MERGED}"))]
    yield from sorted(runs, key=lambda named: named[1].workload.flops_per_step)


# --- README ---------------------------------------------------------------------------------------


def readme_table(results: Path) -> str:
    """Five rows of one workload, a line about it, and links to the others."""
    folder = results / SHOWN
    run = read_run(folder / MERGED)
    baseline, plain = analysis.reference_row(run.steps), analysis.plain_row(run.steps)
    rows = [
        {"step": row.step, "ms per step": f"{median_ms(row):.1f}" if is_timed(row) else row.status}
        | {f"times faster than {baseline.step}": times(row, baseline), f"than {plain.step}": times(row, plain)}
        | {"TFLOP/s": tflops(row.model_flops_per_s) if is_timed(row) else "-", "peak GiB": gib(row)}
        for row in run.steps
    ]
    at, commit = f"docs/results/{SHOWN}", (run.environment.commit or "unknown")[:7]
    others = ", ".join(
        f"[{path.name}]({path.relative_to(results.parent.parent)}/report.md)"
        for path, _ in recorded_runs(results)
        if path != folder
    )
    return "\n\n".join(
        [
            f'<img src="{at}/speedup.png" width="560" alt="Times faster than the baseline, by step">',
            aligned(rows, "pipe"),
            f"{describe_device(run.environment)}; {run.workload.preset}, batch {run.workload.batch_size}, "
            f"commit {commit}: [report]({at}/report.md), [record]({at}/{MERGED}). "
            f"Other workloads: {others}. {CONVENTION}",
        ]
    )


def times(row: Row, reference: Row | None) -> str:
    return f"{analysis.speedup(row, reference):.1f}" if reference and is_timed(row) else "-"


def gib(row: Row) -> str:
    peak = analysis.peak_gib(row)
    return f"{peak:.1f}" if peak and is_timed(row) else "-"


# --- docs/performance.md --------------------------------------------------------------------------


def performance_tables(results: Path) -> str:
    """Speedups of all workloads; then, of every run with profiles, time by category; variants; bytes of attention."""
    parts = ["## All workloads", _workload_table(results)]
    for path, run in recorded_runs(results):
        rows = [row for row in [*run.steps, *run.peers] if row.profile]
        if not rows:
            continue
        commit = (run.environment.commit or "unknown")[:7]
        parts.append(f"## {path.name}, batch {run.workload.batch_size}, {run.environment.device}, commit {commit}")
        parts += [_category_table(rows), _limits_table(rows, run)]
        notes = [(row.step, note) for row in rows for note in (row.note, analysis.describe_profile_offset(row)) if note]
        lines = [f"{step}: {note}" for step, note in notes]
        parts.append("\n".join(f"- {line}" for line in lines + (describe_roofs(run.roofs) if run.roofs else [])))
    for path in sorted(results.glob("*/*/ablations.json")):
        table = _ablation_table(json.loads(path.read_text())["variants"])
        parts += [f"## What each choice gives: {path.parent.name}", table]
    for path in sorted(results.glob("*/attention-traffic.json")):
        parts += ["## DRAM bytes of attention", _traffic_table(json.loads(path.read_text()))]
    return "\n\n".join(parts)


def _workload_table(results: Path) -> str:
    runs = [(path, run) for path, run in recorded_runs(results)]
    names = list(dict.fromkeys(row.step for _, run in runs for row in [*run.steps, *run.peers]))
    rows = []
    for name in names:
        cells = {"ms per step (times faster)": name}
        for path, run in runs:
            row = next((row for row in [*run.steps, *run.peers] if row.step == name), None)
            reference = analysis.reference_row(run.steps)
            cell = "-" if row is None else row.status
            if row is not None and is_timed(row):
                whole = reference is not None and reference.step == names[0]
                cell = f"{median_ms(row):.1f}" + (f" ({times(row, reference)})" if whole else "")
            cells[f"{path.name}, batch {run.workload.batch_size}"] = cell
        rows.append(cells)
    return aligned(rows, "pipe")


def _category_table(rows: list[Row]) -> str:
    times = [(row, analysis.category_ms(row)) for row in rows]
    names = [name for name in times[0][1] if any(by_category[name] for _, by_category in times)]
    return aligned(
        [
            {"ms per step": row.step}
            | {name: f"{by_category[name]:.1f}" for name in names}
            | {"timed": f"{median_ms(row):.1f}"}
            for row, by_category in times
        ],
        "pipe",
    )


def _limits_table(rows: list[Row], run: Run) -> str:
    return aligned(
        [
            {
                "step": row.step,
                "launches": f"{row.profile.kernels_per_step:.0f}",
                "bound by": analysis.describe_bound(row),
            }
            | {"TFLOP/s": tflops(row.model_flops_per_s), "of roof": describe_share_of_roof(row, run.roofs)}
            | {"peak GiB": gib(row)}
            for row in rows
        ],
        "pipe",
    )


def _ablation_table(variants: list[dict]) -> str:
    rows = []
    for variant in variants:
        timing, baseline = variant["timing"], variant["baseline"]["timing"]
        difference = loss = variant["reason"] or "-"
        if timing["median_ms"] is not None and baseline["median_ms"] is not None:
            difference = f"{timing['median_ms'] - baseline['median_ms']:+.1f} ms"
            loss = percent(analysis.loss_difference(_row_of(variant), _row_of(variant["baseline"])))
        rows.append(
            {"variant": variant["name"], "script": f"{variant['script']}, {variant['kind']}"}
            | {"predicted": variant["predicted"], "unchanged, ms (p25-p75)": quartiles(baseline)}
            | {"varied, ms": quartiles(timing), "difference": difference, "loss": loss}
            | {"commit": (variant.get("commit") or "-")[:7]}
        )
    return aligned(rows, "pipe", n_left=3)


def _row_of(recorded: dict) -> Row:
    return Row("", loss=recorded["loss"])


def quartiles(timing: dict) -> str:
    if timing["median_ms"] is None:
        return "-"
    return f"{timing['median_ms']:.1f} ({timing['p25_ms']:.1f}-{timing['p75_ms']:.1f})"


def _traffic_table(traffic: dict) -> str:
    shape = ", ".join(f"{name} {size}" for name, size in traffic["shape"].items())
    return aligned(
        [
            {"forward and backward, BF16": f"attention {which}, {shape}"}
            | {f"{how} GB": f"{counts[key] / 1e9:.2f}" if counts[key] else "-"
               for how, key in (("analytic", "analytic"), ("counted", "counters"))}
            for which, counts in traffic["bytes"].items()
        ],
        "pipe",
    )  # fmt: skip


# --- the command ----------------------------------------------------------------------------------


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
    parser = OneLineParser(prog="python -m report.documents", description=__doc__)
    parser.parse_args()
    results = ROOT / "docs" / "results"
    try:
        for document, text in documents(ROOT, results).items():
            document.write_text(text)
            print(document.relative_to(ROOT))
        for folder, run in recorded_runs(results):
            missing = write_reports(run, folder)
            print(*missing or [folder.relative_to(ROOT)])
    except (RecordError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
