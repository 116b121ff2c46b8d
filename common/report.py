"""From the records of a run to a table, Markdown, a page and a picture: `python -m common.report RUN_DIR`.

Works from JSON alone, without torch. A run folder holds one `<step>.json` per script and, where a
script ended without one, `<step>.exit`: why, in the words of run_all.sh. `results.json` is all of
them merged; a folder that holds nothing else is reported from it.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from tabulate import tabulate

from common import compare
from common.analysis import (
    GIB,
    LOSS_WINDOW,
    PRECISIONS,
    bound_by,
    consecutive,
    describe_profile_off,
    headline,
    loss_difference,
    mean_loss,
    of_roof,
    peak_bytes,
    reference_step,
    row_note,
    sentence,
    tflops,
    warnings,
)
from common.record import (
    SCHEMA_VERSION,
    NewerSchemaError,
    OneLineParser,
    RecordError,
    checked_roofs,
    describe_shape,
    empty_step_record,
    printable,
    read_envelope,
    read_text,
    smaller_batch,
    write_bytes,
    write_json,
)

SAME_IN_ALL_ROWS = (
    "device", "gpu_uuid", "power_limit_w", "driver", "python", "torch", "cuda", "cudnn", "triton", "transformer_engine",
    "torchao", "transformers", "variables", "commit", "dirty",
)  # fmt: skip
UNREADABLE = "its record cannot be read"
MERGED, ROOFS, COMMAND = "results.json", "roofs.json", "command"
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
    if holds_only_the_merge(run_dir):
        return read_envelope(run_dir / MERGED)
    problems: list[str] = []
    envelopes, ended = _read_folder(run_dir, problems)
    peers, peers_ended = _read_folder(run_dir / "peers", problems)
    if not envelopes and not ended:
        raise RecordError("; ".join([f"{run_dir} holds no record", *problems]))
    merged = _merge(envelopes, _of_same_workload(peers, envelopes, problems))
    if (run_dir / COMMAND).exists():
        merged["command"] = _without_folders(read_text(run_dir / COMMAND))
    merged["problems"] = problems + _machine_problems(envelopes + peers) + _read_roofs(run_dir, merged)
    batch_size = merged["workload"].get("batch_size")
    merged["steps"] = _with_ended(merged["steps"], ended, batch_size)
    merged["peers"] = _with_ended(merged["peers"], peers_ended, batch_size)
    return _with_earlier(merged, run_dir)


def holds_only_the_merge(run_dir: Path) -> bool:
    """Whether a folder has results.json but no file of a script: a record that was put away.

    What else lies there (a second run, say) is not part of it, and it must not be written anew.
    """
    of_scripts = (path for kind in ("json", "exit") for path in run_dir.glob(f"[0-9]_*.{kind}"))
    return (run_dir / MERGED).exists() and not any(of_scripts) and not (run_dir / "peers").exists()


def _of_same_workload(peers: list[dict], envelopes: list[dict], problems: list[str]) -> list[dict]:
    same = [peer for peer in peers if not envelopes or peer["workload"] == envelopes[0]["workload"]]
    problems += [f"left out: peer {p['steps'][0]['step']} ran a different workload" for p in peers if p not in same]
    return same


def _with_earlier(merged: dict, run_dir: Path) -> dict:
    """Rows whose file has become unreadable, from the merge made while it could be read."""
    try:
        earlier = read_envelope(run_dir / MERGED)
    except NewerSchemaError:
        raise
    except RecordError:
        return merged
    for kind in ("steps", "peers"):
        known = {row["step"]: row for row in earlier[kind] if row["reason"] != UNREADABLE}
        for index, row in enumerate(merged[kind]):
            if row["reason"] == UNREADABLE and row["step"] in known:
                merged[kind][index] = known[row["step"]]
                merged["problems"].append(f"{row['step']}: taken from {MERGED}, because {UNREADABLE}")
        present = {row["step"] for row in merged[kind]}
        for gone in (row for name, row in known.items() if name not in present and row["source"] is not None):
            merged[kind].append(gone)
            merged["problems"].append(f"{gone['step']}: taken from {MERGED}, because its file is gone")
        merged[kind].sort(key=lambda row: row["step"])
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
            envelope = read_envelope(path)
            names, known = ({row["step"] for e in some for row in e["steps"]} for some in ([envelope], envelopes))
            if twice := names & known:
                problems.append(f"left out: {path.name} is a second record of {', '.join(sorted(twice))}")
            else:
                envelopes.append(envelope)
        except RecordError as error:
            problems.append(f"left out: {error}")
            if folder.name == "peers" or path.match("[0-9]_*.json"):
                ended[path.stem] = UNREADABLE
    for path in sorted(folder.glob("*.exit")):
        if path.is_file():
            ended[path.stem] = path.read_text(errors="replace").strip() or UNREADABLE
    return envelopes, ended


def _read_roofs(run_dir: Path, merged: dict) -> list[str]:
    """Put the roofs of a run folder into its envelope; returns what to say of them."""
    failed = run_dir / "roofs.failed"
    if failed.exists():
        return [printable(read_text(failed).strip())]
    if not (run_dir / ROOFS).exists():
        return []
    try:
        merged["roofs"] = checked_roofs(json.loads(read_text(run_dir / ROOFS)))
    except (OSError, ValueError, RecursionError) as error:
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
        "command": "\n".join(dict.fromkeys(str(e["command"]) for e in envelopes if e.get("command"))),
        "started_at": min((e["started_at"] for e in envelopes if e.get("started_at")), default=None),
        "environment": first["environment"],
        "workload": first["workload"],
        "roofs": next((e["roofs"] for e in envelopes if e.get("roofs")), None),
        "steps": [step for envelope in envelopes for step in envelope["steps"]],
        "peers": [step for envelope in peers for step in envelope["steps"]],
    }


def _machine_problems(envelopes: list[dict]) -> list[str]:
    """Rows of one table must come from one machine, with the same software and the same code."""
    problems = []
    for key in SAME_IN_ALL_ROWS:
        rows_of: dict[str, list[str]] = {}
        for envelope in envelopes:
            value = envelope["environment"].get(key)
            rows = rows_of.setdefault("none" if value in (None, {}) else str(value), [])
            rows += [step["step"] for step in envelope["steps"]]
        if len(rows_of) > 1:
            said = "; ".join(f"{value} in {', '.join(rows)}" for value, rows in sorted(rows_of.items()))
            problems.append(f"rows differ in {key}: {said}")
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


def table(run: dict) -> tuple[list[str], list[list[str]]]:
    """Headers and one row of strings per step; a row without a time has dashes."""
    steps = run["steps"]
    reference = reference_step(steps)
    with_roofs, with_profile = bool(run.get("roofs")), any(bound_by(step) != "-" for step in steps)
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
        cells += [of_roof(step, run["roofs"])] if with_roofs else []
        cells += [bound_by(step)] if with_profile else []
        rows.append([name, "ok", *cells])
    return headers, rows


def _measured_cells(step: dict, previous: dict, reference: dict) -> list[str]:
    ms, memory, loss = step["timing"]["median_ms"], peak_bytes(step), mean_loss(step)
    return [
        f"{ms:.1f}",
        f"{step['tokens_per_s']:,.0f}",
        tflops(step["model_flops_per_s"]),
        f"{previous['timing']['median_ms'] / ms:.2f}x",
        f"{reference['timing']['median_ms'] / ms:.2f}x",
        f"{memory / GIB:.1f}" if memory else "-",
        f"{step['timing']['warmup_s']:.1f}",
        f"{loss:.4f}",
        loss_difference(step, reference),
    ]


def render_table(run: dict, style: str) -> str:
    headers, rows = table(run)
    if style == "pipe":
        rows = [[_as_markdown(cell).replace("|", "\\|") for cell in row] for row in rows]
    align = ["left", "left", *["right"] * (len(headers) - 2)]
    return tabulate(rows, headers, tablefmt=style, colalign=align, disable_numparse=True)


def remarks(run: dict) -> list[str]:
    """Lines under the table: why a row has no time, what qualifies one that has, what was left out."""
    lines = [
        f"{step['step']}: {said}"
        for step in [*run["steps"], *run.get("peers", [])]
        for said in ([row_note(step), describe_profile_off(step)] if step["status"] == "ok" else [step["reason"]])
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
        f"{precision.upper()} {tflops(roofs[f'{precision}_flops_per_s'])} TFLOP/s"
        for precision in PRECISIONS
        if roofs.get(f"{precision}_flops_per_s")
    ]
    copy = roofs.get("copy_bytes_per_s")
    rates = ([f"copy {copy / 1e9:,.0f} GB/s"] if copy else []) + rates
    said = f"roofs, measured in this run, matrix products at the shapes of this workload: {', '.join(rates)}"
    return [said if rates else "roofs: none could be measured", *map(str, roofs.get("notes", []))]


def describe_device(environment: dict) -> str:
    """The device, and the versions of what ran on it."""
    parts = [environment.get("device"), f"torch {environment.get('torch')}"]
    for name, label in (("transformer_engine", "Transformer Engine"), ("cuda", "CUDA"), ("driver", "driver")):
        if environment.get(name):
            parts.append(f"{label} {environment[name]}")
    return ", ".join(str(part) for part in parts)


def describe_machine(environment: dict) -> str:
    commit = environment.get("commit")
    dirty = " with uncommitted changes" if environment.get("dirty") else ""
    where = f"commit {commit[:10]}{dirty}" if commit else f"commit unknown ({environment.get('commit_reason')})"
    return f"{describe_device(environment)}, {where}"


def describe_workload(workload: dict) -> str:
    parameters, data = workload.get("parameters", 0), workload.get("data") or {}
    return (
        f"{workload.get('preset')}: {describe_shape(workload)}, {parameters / 1e6:.1f} M parameters, "
        f"{workload.get('warmup')} + {workload.get('steps')} steps (untimed + timed) on {data.get('name')}"
    )


def render_text(run: dict) -> str:
    lines = [render_table(run, "simple"), "", *dict.fromkeys([*remarks(run), *warnings(run)]), CONVENTION]
    return "\n".join(lines)


def _as_markdown(line: str) -> str:
    """A line in which nothing that a record says is markup, or ends a cell."""
    return printable(line, 1000).replace("&", "&amp;").replace("<", "&lt;").replace("`", "'")


def render_markdown(run: dict) -> str:
    lines = ["# Training step speedup", "", *(f"**{_as_markdown(line)}**\n" for line in headline(run)[1:])]
    if run["environment"]:
        lines += [f"Machine: {_as_markdown(describe_machine(run['environment']))}", ""]
        lines += [f"Workload: {_as_markdown(describe_workload(run['workload']))}", ""]
    lines += [render_table(run, "pipe"), ""]
    lines += [f"- {_as_markdown(sentence(before, step))}" for before, step in consecutive(run["steps"])]
    lines += ["", *(f"- {_as_markdown(line)}" for line in dict.fromkeys([*warnings(run), *remarks(run)]))]
    commands = [printable(line, 1000) for line in run["command"].splitlines()]
    lines += [f"- {CONVENTION}", "", "Reproduce:", "", *(f"    {command}" for command in commands), ""]
    return "\n".join(lines)


# --- the command ----------------------------------------------------------------------------------


def render_html(run: dict) -> str:
    """The page of an envelope. Raises ImportError where what draws it is not installed."""
    from common import page

    words = {"machine": describe_machine(run["environment"]), "workload": describe_workload(run["workload"])}
    notes = [line for line in remarks(run) if line not in run.get("problems", [])]
    return page.render(run, table(run), notes, words | {"convention": CONVENTION})


def write_reports(run: dict, folder: Path) -> list[str]:
    """Write report.md, report.html and speedup.png of an envelope; returns what could not be written, and why.

    Everything is rendered before anything is replaced.
    """
    files: dict[str, bytes] = {"report.md": render_markdown(run).encode()}
    missing = []
    try:
        from common import charts, page  # what draws may be absent or broken; the table must not be
    except Exception as error:
        missing = [f"no report.html and speedup.png ({error}): pip install -r requirements.txt"]
        for name in ("report.html", "speedup.png"):  # of an earlier run of this command: they would not fit report.md
            (folder / name).unlink(missing_ok=True)
    else:
        files["report.html"] = render_html(run).encode()
        title = f"{run['environment'].get('device')}, {run['workload'].get('preset')}: training step, times faster"
        files["speedup.png"] = charts.speedup_png(page.speedup_bars(run), title)
    for name, content in files.items():
        write_bytes(folder / name, content)
    return missing


def compare_runs(folders: tuple[Path, Path]) -> str:
    """What two run folders have to say to each other. Raises RecordError where they cannot be compared."""
    return compare.compare(*map(load_run, folders), compare.names_of(folders))


def main() -> None:
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that has no such letters gets the table, too
    parser = OneLineParser(prog="python -m common.report", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="a folder run_all.sh wrote")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("RUN_A", "RUN_B"), help="ratios of two runs, step by step"
    )
    args = parser.parse_args()
    if (args.run_dir is None) == (args.compare is None):
        parser.error("give one RUN_DIR, or --compare RUN_A RUN_B")
    try:
        if args.compare:
            print("\n".join(printable(line, 1000) for line in compare_runs(tuple(args.compare)).splitlines()))
            return
        run = load_run(args.run_dir)
        print("\n".join(printable(line, 1000) for line in render_text(run).splitlines()), flush=True)
        for line in write_reports(run, args.run_dir):
            print(printable(line, 1000))
        if not holds_only_the_merge(args.run_dir):
            write_json(args.run_dir / MERGED, run)
    except (RecordError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        said = str(error).splitlines()[0][:150] if str(error) else type(error).__name__
        where = args.run_dir or " or ".join(map(str, args.compare))
        parser.exit(2, f"{parser.prog}: error: a record in {where} has a field of a wrong kind ({said})\n")
    rows = [*run["steps"], *run.get("peers", [])]
    sys.exit(0 if all(row["status"] in ("ok", "skipped") for row in rows) else 1)


if __name__ == "__main__":
    main()
