"""From the records of a run to a table and Markdown: `python -m common.report RUN_DIR`.

Works from JSON alone, without torch. A run folder holds one `<step>.json` per script and, where a
script ended without one, `<step>.exit`: why, in the words of run_all.sh. `results.json` is all of
them merged; a folder that holds nothing else is reported from it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from tabulate import tabulate

from common.record import (
    SCHEMA_VERSION,
    RecordError,
    checked_roofs,
    describe_shape,
    empty_step_record,
    read_envelope,
    smaller_batch,
    write_json,
)

ROOT = Path(__file__).resolve().parent.parent
UNREADABLE = "its record cannot be read"
MERGED, ROOFS, COMMAND = "results.json", "roofs.json", "command"
GENERATED_BEGIN, GENERATED_END = "<!-- results:begin -->", "<!-- results:end -->"
LOSS_WINDOW = 20
BOUND_RULE = (
    "bound by: the largest share of the step, of compute (matrix products and fused attention), memory (all other "
    "kernels) and launch (the GPU waits for the host)"
)
CONVENTION = (
    "TFLOP/s are model FLOPs by the causal convention: attention counts the half of the (T, T) square it needs. "
    f"Loss is the mean of the last {LOSS_WINDOW} training steps (of all, untimed ones too, where there were fewer), "
    "on the same batches in every row."
)


# --- a run folder to one envelope -----------------------------------------------------------------


def load_run(run_dir: Path) -> dict:
    """Merge the records of a run folder into one envelope; `problems` names the files left out.

    Raises RecordError where nothing can be reported, or where the records are of different workloads.
    """
    if not run_dir.is_dir():
        raise RecordError(f"{run_dir} is not a folder")
    problems: list[str] = []
    envelopes, ended = _read_folder(run_dir, problems)
    peers, peers_ended = _read_folder(run_dir / "peers", problems)
    if not envelopes and not ended:
        if not (run_dir / MERGED).exists():
            raise RecordError("; ".join([f"{run_dir} holds no record", *problems]))
        return read_envelope(run_dir / MERGED)
    merged = _merge(envelopes, _of_same_workload(peers, envelopes, problems))
    if (run_dir / COMMAND).exists():
        merged["command"] = _without_folders((run_dir / COMMAND).read_text())
    merged["problems"] = problems + _machine_problems(envelopes + peers) + _read_roofs(run_dir, merged)
    batch_size = merged["workload"].get("batch_size")
    merged["steps"] = _with_ended(merged["steps"], ended, batch_size)
    merged["peers"] = _with_ended(merged["peers"], peers_ended, batch_size)
    return _with_earlier(merged, run_dir)


def _of_same_workload(peers: list[dict], envelopes: list[dict], problems: list[str]) -> list[dict]:
    same = [peer for peer in peers if not envelopes or peer["workload"] == envelopes[0]["workload"]]
    problems += [f"left out: peer {p['steps'][0]['step']} ran a different workload" for p in peers if p not in same]
    return same


def _with_earlier(merged: dict, run_dir: Path) -> dict:
    """Rows whose file has become unreadable, from the merge made while it could be read."""
    try:
        earlier = read_envelope(run_dir / MERGED)
    except RecordError:
        return merged
    for kind in ("steps", "peers"):
        known = {row["step"]: row for row in earlier[kind] if row["reason"] != UNREADABLE}
        for index, row in enumerate(merged[kind]):
            if row["reason"] == UNREADABLE and row["step"] in known:
                merged[kind][index] = known[row["step"]]
                merged["problems"].append(f"{row['step']}: taken from {MERGED}, because {UNREADABLE}")
    if merged["roofs"] is None and earlier["roofs"] and (run_dir / ROOFS).exists():
        merged["roofs"] = earlier["roofs"]
    return merged


def _read_folder(folder: Path, problems: list[str]) -> tuple[list[dict], dict[str, str]]:
    """The envelopes of a folder, and how the processes ended that left none; adds to `problems`."""
    envelopes, ended = [], {}
    for path in sorted(folder.glob("*.json")):
        if path.name in (MERGED, ROOFS):
            continue
        try:
            envelopes.append(read_envelope(path))
        except RecordError as error:
            problems.append(f"left out: {error}")
            ended[path.stem] = UNREADABLE
    for path in sorted(folder.glob("*.exit")):
        if path.is_file():
            ended[path.stem] = path.read_text(errors="replace").strip() or UNREADABLE
    return envelopes, ended


def _read_roofs(run_dir: Path, merged: dict) -> list[str]:
    """Put the roofs of a run folder into its envelope; returns what to say of them."""
    failed = run_dir / "roofs.failed"
    if failed.exists():
        return [failed.read_text().strip()]
    if not (run_dir / ROOFS).exists():
        return []
    try:
        merged["roofs"] = checked_roofs(json.loads((run_dir / ROOFS).read_text()))
    except (OSError, ValueError) as error:
        return [f"left out: {ROOFS} cannot be read ({type(error).__name__})"]
    return []


def _without_folders(command: str) -> str:
    """The command line with absolute paths shortened to their last part: the folders are of this machine alone."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command.strip()
    return shlex.join(Path(word).name if word.startswith("/") else word for word in words)


def _with_ended(records: list[dict], ended: dict[str, str], batch_size: int | None) -> list[dict]:
    """The records and rows for processes that left none, by name."""
    known = {record["step"] for record in records}
    rows = [_ended_record(name, why, batch_size) for name, why in ended.items() if name not in known]
    return sorted(records + rows, key=lambda record: record["step"])


def _merge(envelopes: list[dict], peers: list[dict]) -> dict:
    first = envelopes[0] if envelopes else {"command": "", "started_at": None, "environment": {}, "workload": {}}
    for envelope in envelopes[1:]:
        ours, theirs = first["workload"], envelope["workload"]
        differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        if differing:
            steps = first["steps"][0]["step"], envelope["steps"][0]["step"]
            raise RecordError(f"{steps[0]} and {steps[1]} ran different workloads: {', '.join(differing)} differ")
    return {
        "schema_version": SCHEMA_VERSION,
        "command": str(first.get("command") or ""),
        "started_at": min((e["started_at"] for e in envelopes if e.get("started_at")), default=None),
        "environment": first["environment"],
        "workload": first["workload"],
        "roofs": next((e["roofs"] for e in envelopes if e.get("roofs")), None),
        "steps": [step for envelope in envelopes for step in envelope["steps"]],
        "peers": [step for envelope in peers for step in envelope["steps"]],
    }


def _machine_problems(envelopes: list[dict]) -> list[str]:
    """Rows of one table must come from one machine, one torch and one commit."""
    problems = []
    for key in ("device", "torch", "driver", "commit"):
        seen = {str(envelope["environment"].get(key)) for envelope in envelopes}
        if len(seen) > 1:
            problems.append(f"rows differ in {key}: {', '.join(sorted(seen))}")
    return problems


def _ended_record(name: str, why: str, batch_size: int | None) -> dict:
    """The row of a process that left no record. `why` is `STATUS REASON`, as run_all.sh writes it."""
    status, _, reason = why.partition(" ")
    if status not in ("oom", "failed", "timeout"):
        status, reason = "failed", why
    if status == "oom" and batch_size:
        reason = f"{reason}; {smaller_batch(batch_size)}"
    return empty_step_record(name, None) | {"status": status, "reason": reason}


# --- the table ------------------------------------------------------------------------------------


def mean_loss(step: dict) -> float:
    """Mean of the last LOSS_WINDOW training steps, in nats."""
    window = step["loss"][-LOSS_WINDOW:]
    return sum(window) / len(window)


def peak_bytes(step: dict) -> int | None:
    """CUDA allocator's peak; on a CPU the peak of the whole process."""
    return step["peak_allocated_bytes"] or step["peak_rss_bytes"]


def reference_step(steps: list[dict]) -> dict | None:
    """The row that speedups are against: the first that has a time."""
    return next((step for step in steps if step["status"] == "ok"), None)


def table(run: dict) -> tuple[list[str], list[list[str]]]:
    """Headers and one row of strings per step; a row without a time has dashes."""
    steps = run["steps"]
    reference = reference_step(steps)
    with_roofs, with_profile = bool(run.get("roofs")), any(_bound_cell(step["profile"]) != "-" for step in steps)
    against = "vs baseline" if reference in (None, steps[0]) else f"vs {reference['step']}"
    headers = ["step", "status", "ms/step", "tokens/s", "TFLOP/s", "vs previous", against, "peak GiB", "warm-up s"]
    headers += ["loss", "loss difference"]
    headers += ["of roof"] if with_roofs else []
    headers += ["bound by"] if with_profile else []
    rows, previous = [], None
    peers = run.get("peers", [])
    for step, peer in [*((step, False) for step in steps), *((step, True) for step in peers)]:
        name = f"peer: {step['step']}" if peer else step["step"]
        if step["status"] != "ok":
            rows.append([name, step["status"], *["-"] * (len(headers) - 2)])
            continue
        cells = _measured_cells(step, previous or step, reference or step)
        if peer:
            cells[3] = "-"  # a peer follows no step
        else:
            previous = step
        cells += [_roof_cell(step, run["roofs"])] if with_roofs else []
        cells += [_bound_cell(step["profile"])] if with_profile else []
        rows.append([name, "ok", *cells])
    return headers, rows


def roof_of(step: dict, roofs: dict) -> tuple[str, float | None]:
    """The precision a row's matrix products are held against, and its measured FLOP/s."""
    settings = step["settings"]
    dtype, highest = settings.get("amp_dtype"), settings.get("float32_matmul_precision") == "highest"
    if settings.get("fp8_recipe"):
        precision = "fp8"
    elif dtype in ("bfloat16", "float16"):
        precision = "bf16"
    else:
        precision = "fp32" if highest or roofs.get("tf32_flops_per_s") is None else "tf32"
    return precision, roofs.get(f"{precision}_flops_per_s")


def _roof_cell(step: dict, roofs: dict) -> str:
    precision, roof = roof_of(step, roofs)
    return f"{step['model_flops_per_s'] / roof:.0%} of {precision}" if roof else "-"


def _bound_cell(profile: dict | None) -> str:
    if not (profile and profile.get("bound_by")):
        return "-"
    return f"{profile['bound_by']} {profile['shares'][profile['bound_by']]:.0%}"


def _tflops(flops_per_s: float) -> str:
    tflops = flops_per_s / 1e12
    return f"{tflops:,.0f}" if tflops >= 10 else f"{tflops:.3f}"


def _measured_cells(step: dict, previous: dict, reference: dict) -> list[str]:
    ms, memory, loss = step["timing"]["median_ms"], peak_bytes(step), mean_loss(step)
    return [
        f"{ms:.1f}",
        f"{step['tokens_per_s']:,.0f}",
        _tflops(step["model_flops_per_s"]),
        f"{previous['timing']['median_ms'] / ms:.2f}x",
        f"{reference['timing']['median_ms'] / ms:.2f}x",
        f"{memory / 2**30:.1f}" if memory else "-",
        f"{step['timing']['warmup_s']:.1f}",
        f"{loss:.4f}",
        f"{loss / mean_loss(reference) - 1:+.2%}",
    ]


def render_table(run: dict, style: str) -> str:
    headers, rows = table(run)
    align = ["left", "left", *["right"] * (len(headers) - 2)]
    return tabulate(rows, headers, tablefmt=style, colalign=align, disable_numparse=True)


def remarks(run: dict) -> list[str]:
    """Lines under the table: why a row has no time, what qualifies one that has, what was left out."""
    lines = [
        f"{step['step']}: {said}"
        for step in [*run["steps"], *run.get("peers", [])]
        for said in [step["reason"] if step["status"] != "ok" else step["note"]]
        if said
    ]
    if run["environment"].get("device_type") == "cpu":
        lines.append("peak GiB is the memory of the whole process: on a CPU nothing counts the tensors alone")
    if run.get("roofs"):
        lines += describe_roofs(run["roofs"])
    if any(step["profile"] and step["profile"].get("bound_by") for step in run["steps"]):
        lines.append(BOUND_RULE)
    return lines + run.get("problems", [])


def describe_roofs(roofs: dict) -> list[str]:
    """What the machine reaches at most, in one line, and what could not be measured."""
    rates = [
        f"{precision.upper()} {_tflops(roofs[f'{precision}_flops_per_s'])} TFLOP/s"
        for precision in ("fp32", "tf32", "bf16", "fp8")
        if roofs.get(f"{precision}_flops_per_s")
    ]
    copy = roofs.get("copy_bytes_per_s")
    rates = ([f"copy {copy / 1e9:,.0f} GB/s"] if copy else []) + rates
    said = f"roofs, measured in this run, matrix products at the shapes of this workload: {', '.join(rates)}"
    return [said if rates else "roofs: none could be measured", *map(str, roofs.get("notes", []))]


def describe_machine(environment: dict) -> str:
    parts = [environment.get("device"), f"torch {environment.get('torch')}"]
    for name, label in (("transformer_engine", "Transformer Engine"), ("cuda", "CUDA"), ("driver", "driver")):
        if environment.get(name):
            parts.append(f"{label} {environment[name]}")
    commit = environment.get("commit")
    dirty = " with uncommitted changes" if environment.get("dirty") else ""
    parts.append(f"commit {commit[:10]}{dirty}" if commit else f"commit unknown ({environment.get('commit_reason')})")
    return ", ".join(str(part) for part in parts)


def describe_workload(workload: dict) -> str:
    parameters, data = workload.get("parameters", 0), workload.get("data") or {}
    return (
        f"{workload.get('preset')}: {describe_shape(workload)}, {parameters / 1e6:.1f} M parameters, "
        f"{workload.get('warmup')} + {workload.get('steps')} steps (untimed + timed) on {data.get('name')}"
    )


def render_text(run: dict) -> str:
    lines = [render_table(run, "simple"), "", *remarks(run), CONVENTION]
    return "\n".join(lines)


def render_markdown(run: dict) -> str:
    lines = ["# Training step speedup", ""]
    if run["environment"]:
        lines += [f"Machine: {describe_machine(run['environment'])}", ""]
        lines += [f"Workload: {describe_workload(run['workload'])}", ""]
    lines += [render_table(run, "pipe"), ""]
    lines += [f"- {line}" for line in remarks(run)]
    lines += [f"- {CONVENTION}", "", f"Reproduce: `{run['command']}`", ""]
    return "\n".join(lines)


# --- README ---------------------------------------------------------------------------------------


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
    comparable = {name: run for name, run in runs.items() if rows_of[name][0] == names[0]}
    differences = [_column(run, names, _table_cell(10)) for run in comparable.values()]
    columns.append([", ".join(cells) for cells in zip(*differences, strict=True)])
    rows = [list(row) for row in zip(*columns, strict=True)]
    drawn = tabulate(rows, headers, tablefmt="pipe", colalign=_numbers(headers))
    links = ", ".join(_link(folder, name, run) for name, run in runs.items())
    return (
        f"{runs[widest]['environment']['device']}, milliseconds per training step and speedup over the first row; "
        f"TFLOP/s and memory of {widest}.\n\n{drawn}\n\nRecords: {links}. {CONVENTION}"
    )


def _link(folder: Path, name: str, run: dict) -> str:
    commit, n_losses = run["environment"].get("commit") or "unknown", len(reference_step(run["steps"])["loss"])
    path = f"docs/results/{folder.name}/{name}/{MERGED}"
    return f"[{name}]({path}) ({n_losses} training steps, commit {commit[:7]})"


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
            notes = [f"{row['step']}: {row['note']}" for row in profiled if row["note"]]
            parts += [title, _category_table(profiled)]
            parts += [f"- {line}" for line in notes + describe_roofs(run["roofs"] or {})]
    parts += ["### The same again", _repeat_table(results)]
    for path in sorted(results.glob("*/*/ablations.json")):
        parts += [
            f"### What each choice gives: {path.parent.name}",
            ablation_table(json.loads(path.read_text()), "pipe"),
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
        cells += [f"{row['timing']['median_ms']:.1f}", f"{profile['kernels_per_step']:.0f}", _bound_cell(profile)]
        drawn.append([row["step"], *cells, f"{peak_bytes(row) / 2**30:.1f}"])
    return tabulate(drawn, headers, tablefmt="pipe", disable_numparse=True, colalign=_numbers(headers))


def _repeat_table(results: Path) -> str:
    """The medians of a second run of a recorded workload, beside those of the first."""
    rows = []
    for path in sorted(results.glob("*/*/results-2.json")):
        first = {step["step"]: step for step in read_envelope(path.parent / MERGED)["steps"]}
        for again in read_envelope(path)["steps"]:
            if again["status"] == "ok" and first[again["step"]]["status"] == "ok":
                ms, ms_again = (step["timing"]["median_ms"] for step in (first[again["step"]], again))
                cells = [f"{ms:.1f}", f"{ms_again:.1f}", f"{ms_again / ms - 1:+.1%}"]
                rows.append([path.parent.name, again["step"], *cells])
    headers = ["workload", "step", "ms/step", "second run", "difference"]
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=_numbers(headers))


def ablation_table(found: dict, style: str = "simple") -> str:
    """What anatomy.ablations found, a row per variant: the prediction, and the difference to the unchanged script."""
    rows = []
    for variant in found["variants"]:
        baseline = found["baselines"][variant["script"]]
        row = [variant["script"], variant["kind"], variant["name"], variant["predicted"]]
        if variant["median_ms"] is None or baseline["median_ms"] is None:
            row += [variant["status"], variant["reason"] or "-"]
        else:
            row += [f"{variant['median_ms']:.1f}", f"{variant['median_ms'] - baseline['median_ms']:+.1f} ms"]
        rows.append(row)
    headers = ["script", "kind", "variant", "predicted", "ms/step", "measured"]
    return tabulate(rows, headers, tablefmt=style, disable_numparse=True)


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


# --- the command ----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m common.report", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="a folder run_all.sh wrote")
    what.add_argument(
        "--update-readme", action="store_true", help="renew the tables of README and docs/ from docs/results/"
    )
    args = parser.parse_args()
    try:
        if args.update_readme:
            for document, text in documents(ROOT, ROOT / "docs" / "results").items():
                document.write_text(text)
            return
        run = load_run(args.run_dir)
        text, markdown = render_text(run), render_markdown(run)  # before anything is replaced
        markdown.encode()
        write_json(args.run_dir / MERGED, run)
        (args.run_dir / "report.md").write_text(markdown)
    except (RecordError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, IndexError) as error:
        said = str(error).splitlines()[0][:150] if str(error) else type(error).__name__
        parser.exit(2, f"{parser.prog}: error: a record in {args.run_dir} has a field of a wrong kind ({said})\n")
    print(text)
    rows = [*run["steps"], *run.get("peers", [])]
    sys.exit(0 if all(row["status"] in ("ok", "skipped") for row in rows) else 1)


if __name__ == "__main__":
    main()
