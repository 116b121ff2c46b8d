"""A run folder to one checked run.

A run folder holds `plan.json` (what the ladder meant to run), one record per row that ended, `roofs.json`,
`predicted.json`, logs, and `results.json`, all of them merged. The records of the second pass of `--repeat` are below
`pass-2`, and so on. A folder that holds nothing but `results.json` is a recorded run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from common.record import (
    CATEGORIES,
    MERGED,
    PLAN,
    PREDICTED,
    ROOFS,
    SCHEMA_VERSION,
    STATUSES,
    Environment,
    Plan,
    Repetition,
    Roofs,
    Row,
    Run,
    Workload,
    differing_fields,
)
from common.text import one_line

PREDICTIONS = "predictions.json"  # of all runs of a machine, beside their folders
LARGEST_RECORD_BYTES = 50_000_000  # a record with the profile of a deep model has less than one
LARGEST_NUMBER = 1e24  # beyond it a figure means nothing and a chart cannot be drawn
ROOFS_APART = "the roofs were measured when the run was resumed"
LEFT_OUT, DIFFER = "left out", "rows differ in"  # how problems begin that a reader must see first
TEXTS_WITH_LINES = ("source", "command")
SAME_IN_ALL_ROWS = (
    "device", "gpu_uuid", "power_limit_w", "driver", "python", "torch", "cuda", "cudnn", "triton", "transformer_engine",
    "torchao", "transformers", "variables", "commit", "dirty",
)  # fmt: skip


class RecordError(ValueError):
    """A file is not a record that this version can read; the message is one line that says why."""


def read_json(path: Path) -> Any:
    """The content of a JSON file whose text cannot harm a terminal or a page. Raises RecordError."""
    name = one_line(path.name)
    try:
        if not path.is_file():
            raise RecordError(f"{name} is not a regular file")
        if (size := path.stat().st_size) > LARGEST_RECORD_BYTES:
            raise RecordError(f"{name} has {size / 1e6:,.0f} MB, more than any record")
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise RecordError(f"{name} cannot be read ({error.strerror or error})") from None
    try:
        return _harmless(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{name} is not readable JSON ({type(error).__name__})") from None


def _harmless(value: Any, key: str = "") -> Any:
    """A JSON value in which every text is one line without control characters, code and commands apart."""
    if isinstance(value, str):
        if key in TEXTS_WITH_LINES:
            return "".join(c if c.isprintable() or c in "\n\t" else " " for c in value)
        return one_line(value, 2000)
    if isinstance(value, list):
        return [_harmless(item, key) for item in value]
    if isinstance(value, dict):
        return {one_line(name): _harmless(item, name) for name, item in value.items()}
    return value


def convert(content: Any, kind: Any, name: str) -> Any:
    """JSON content as an object of a record's class. Raises RecordError that names the field.

    Only a loss may be negative, and no number is larger than LARGEST_NUMBER.
    """
    try:
        converted = msgspec.convert(content, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise RecordError(f"{name}: {one_line(error, 150)}") from None
    for key, value in inside(content):
        least = -LARGEST_NUMBER if "loss" in key else 0
        if isinstance(value, (int, float)) and not least <= value <= LARGEST_NUMBER:  # which NaN is not either
            raise RecordError(f"{name}: {key} is {one_line(value, 12)}")
    return converted


def inside(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """A JSON value and every value inside it, each with the name of the field that holds it."""
    yield key, content
    if isinstance(content, (dict, list)):
        for name, value in content.items() if isinstance(content, dict) else ((key, value) for value in content):
            yield from inside(value, name)


def read_run(path: Path) -> Run:
    """Read and check a run. Raises RecordError for a file that is corrupt, foreign, newer or too large.

    A row or roofs with a field of a wrong kind are left out, and `problems` names them.
    """
    content = read_json(path)
    name = one_line(path.name)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version != SCHEMA_VERSION:
        newer = f"; this report reads up to {SCHEMA_VERSION}"
        advice = newer if version > SCHEMA_VERSION else ", which is no longer read: record it again"
        raise RecordError(f"{name} has schema version {version}{advice}")
    listed = {kind: content.get(kind) or [] for kind in ("steps", "peers")} if version == SCHEMA_VERSION else {}
    if not listed.get("steps") or not all(isinstance(rows, list) for rows in listed.values()):
        raise RecordError(f"{name} is not a record of this benchmark")
    problems: list[str] = []
    rows = {
        kind: [_read_row(row, f"{path.stem}, row {k + 1}", problems) for k, row in enumerate(rows)]
        for kind, rows in listed.items()
    }
    try:
        roofs = convert(content.get("roofs"), Roofs | None, "roofs")
    except RecordError as error:
        roofs = None
        problems.append(f"{LEFT_OUT} of {name}: {error}")
    run = convert(content | {"steps": [], "peers": [], "roofs": None}, Run, name)
    names = [row.step for row in rows["steps"] + rows["peers"]]
    if len(set(names)) < len(names):
        raise RecordError(f"{name} holds two rows of one name")
    return replace(run, **rows, roofs=roofs, problems=[*run.problems, *problems])


def _read_row(content: Any, place: str, problems: list[str]) -> Row:
    """A row; `place` names it where it does not name itself. One that cannot be read is a failed row."""
    name = content.get("step") if isinstance(content, dict) else None
    name = one_line(name if isinstance(name, str) else place, 100)
    try:
        row = convert(content, Row, name)
        _check(row)
    except RecordError as error:
        problems.append(f"{LEFT_OUT}: {error}")
        return Row(name, status="failed", reason="its record cannot be read")
    row.step = name
    return row


def _check(row: Row) -> None:
    """Raises RecordError for an unknown status, and where an ok row lacks the numbers that reports are made of."""
    if row.status not in STATUSES:
        raise RecordError(f"{one_line(row.step, 60)}: status {row.status} is unknown")
    if row.status != "ok":
        row.profile = None
        return
    if row.profile and not set(row.profile.categories) <= set(CATEGORIES):
        raise RecordError(f"{row.step}: unknown categories of kernels")
    needed = [row.timing.median_ms, row.timing.p25_ms, row.timing.p75_ms, *row.timing.step_ms]
    needed += [row.tokens_per_s, row.model_flops_per_s, row.loss]
    needed += [time for again in row.repetitions for time in (again.timing.median_ms, *again.timing.step_ms)]
    if not all(needed) or row.timing.warmup_s is None or (row.profile and not row.profile.step_ms):
        raise RecordError(f"{row.step}: an ok row without its numbers")


def load_run(folder: Path, ended: dict[str, Row] | None = None) -> Run:
    """Merge the records of a run folder into one run; `problems` names what was left out.

    `ended` holds rows, by name, that could leave no file. Raises RecordError where nothing can be reported.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder} is not a folder")
    if holds_only_the_merge(folder):
        return read_run(folder / MERGED)
    problems: list[str] = []
    plan = read_plan(folder) if (folder / PLAN).exists() else None
    passes = _passes(folder)
    names = _row_names([*passes.values()], plan)
    records = {(k, name): _read_record(place, name, problems) for k, place in passes.items() for name in names}
    runs = [run for run in records.values() if run]
    if not runs and plan is None:
        raise RecordError("; ".join([f"{folder} holds no record", *problems]))
    workload, repeat = plan.workload if plan else runs[0].workload, max(plan.repeat if plan else 1, *passes)
    every: dict[str, dict[int, Row]] = {name: {} for name in names}
    for (k, name), run in records.items():
        row = _row_of(name, run, plan, workload, passes[k])
        row = (ended or {}).get(name, row) if run is None else row
        if repeat > 1 and row.status == "ok":
            once = Repetition(row.timing, run.started_at, row.reference_ms, row.tokens_per_joule, row.clock_mhz)
            row.repetitions = [once]
        every[name][k] = row
    rows = {name: _merge_passes(each, repeat, problems) for name, each in every.items()}
    measured = [run for run in runs if run.environment is not None]
    merged = Run(
        command=plan.command if plan else "\n".join(dict.fromkeys(run.command for run in runs)),
        started_at=plan.started_at if plan else min((r.started_at for r in runs if r.started_at), default=None),
        environment=measured[0].environment if measured else None,
        workload=workload,
        steps=[row for name, row in rows.items() if not name.startswith("peers/")],
        peers=[row for name, row in rows.items() if name.startswith("peers/")],
    )
    merged.problems = [*problems, *(p for run in runs for p in run.problems), *_machine_problems(measured)]
    merged.roofs = _read_roofs(folder, measured, merged.problems)
    predicted = _read_predicted(folder, merged.problems)
    merged.steps = [replace(row, predicted_ms=predicted.get(row.step)) for row in merged.steps]
    return merged


def _merge_passes(passes: dict[int, Row], repeat: int, problems: list[str]) -> Row:
    """One row of all passes: it has a time only if none ended without one. `problems` names one that lacks passes."""
    present = {k: row for k, row in passes.items() if row.status not in ("interrupted", "not run")}
    if repeat == 1 or not present:
        return passes[1]
    rows = [*present.values()]
    if all(row.status == "skipped" for row in rows):
        return rows[0]
    for k, row in present.items():
        if row.status != "ok":
            return replace(row, reason=f"pass {k} of {repeat}: {row.reason or 'no reason given'}")
    if len(rows) < repeat:
        problems.append(f"{rows[0].step} ran in {len(rows)} of {repeat} passes only")
    middle = median(row.timing.median_ms for row in rows)
    nearest = min(rows, key=lambda row: abs(row.timing.median_ms - middle))
    ratio = nearest.timing.median_ms / middle
    return replace(
        nearest,
        timing=replace(nearest.timing, median_ms=middle),
        tokens_per_s=nearest.tokens_per_s * ratio,
        model_flops_per_s=nearest.model_flops_per_s * ratio,
        repetitions=[once for row in rows for once in row.repetitions],
    )


def _passes(folder: Path) -> dict[int, Path]:
    """Where the records of each pass of `--repeat` are, by its number: of the first in the run folder itself."""
    found = (re.fullmatch(r"pass-([1-9]\d{0,3})", path.name) for path in folder.glob("pass-*"))
    numbers = sorted(int(name[1]) for name in found if name)
    return {1: folder} | {k: folder / f"pass-{k}" for k in numbers if k > 1}


def holds_only_the_merge(folder: Path) -> bool:
    """Whether a folder has results.json but no file of a script: a recorded run, which must not be written again."""
    return (folder / MERGED).exists() and not any(folder.glob("[0-9]_*.json")) and not (folder / PLAN).exists()


def read_plan(folder: Path) -> Plan:
    """The plan of a run folder. Raises RecordError."""
    content = read_json(folder / PLAN)
    if isinstance(content, dict) and "sweep" in content:
        raise RecordError(f"{folder} is a sweep, of many shapes: ./run_all.sh --sweep --resume goes on with it")
    return convert(content, Plan, PLAN)


def _row_names(places: list[Path], plan: Plan | None) -> list[str]:
    """Rows of the plan and of the folders: steps by name, then peers."""
    names = {path.stem for place in places for path in place.glob("[0-9]_*.json")} | set(plan.rows if plan else [])
    names |= {f"peers/{path.stem}" for place in places for path in place.glob("peers/*.json")}
    return sorted(names, key=lambda name: (name.startswith("peers/"), name))


def _step(name: str) -> str:
    return one_line(name.removeprefix("peers/"), 100)


def _read_record(folder: Path, name: str, problems: list[str]) -> Run | None:
    """The record of one row; None where there is none or it is not to be used, which `problems` then says."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    try:
        run = read_run(path)
        if [row.step for row in run.steps] == [_step(name)]:
            return run
        held = ", ".join(row.step for row in run.steps)
        problems.append(f"{LEFT_OUT}: {one_line(path.name)} holds {held}, not the one row it is named after")
        problems += run.problems
    except RecordError as error:
        problems.append(f"{LEFT_OUT}: {error}")
    return None


def _row_of(name: str, run: Run | None, plan: Plan | None, workload: Workload | None, folder: Path) -> Row:
    """The row of a record, or one that says why there is none."""
    if run is not None and run.workload and workload and run.workload != workload:
        differing = ", ".join(differing_fields(run.workload, workload))
        status, reason = "failed", f"ran a different workload than the other rows: {differing} differ"
    elif run is not None:
        return run.steps[0]
    elif (folder / f"{name}.json").exists():
        status, reason = "failed", "its record cannot be read"
    elif plan and name in plan.left_out:
        status, reason = "not run", "left out by --only"
    else:
        began = (folder / f"{name}.log").exists()
        status, when = ("interrupted", "during") if began else ("not run", "before")
        reason = f"the run ended {when} this row: ./run_all.sh --resume DIR finishes it"
    return Row(_step(name), status=status, reason=reason)


def _machine_problems(runs: list[Run]) -> list[str]:
    """Rows of one table must come from one machine, with the same software and the same code."""
    problems = []
    for name in SAME_IN_ALL_ROWS:
        rows_of: dict[str, list[str]] = {}
        for run in runs:
            value = getattr(run.environment, name)
            rows_of.setdefault("none" if value in (None, {}) else str(value), []).append(run.steps[0].step)
        if len(rows_of) > 1:  # a row is named once, however many passes it has
            said = [f"{value} in {', '.join(dict.fromkeys(rows))}" for value, rows in sorted(rows_of.items())]
            problems.append(f"{DIFFER} {name}: {'; '.join(said)}")
    return problems


def _read_predicted(folder: Path, problems: list[str]) -> dict[str, float]:
    """What was predicted, by row; nothing where that cannot be read, which `problems` then says."""
    if not (folder / PREDICTED).exists():
        return {}
    try:
        return convert(read_json(folder / PREDICTED), dict[str, float], PREDICTED)
    except RecordError as error:
        problems.append(f"no predictions: {error}")
        return {}


def _read_roofs(folder: Path, rows: list[Run], problems: list[str]) -> Roofs | None:
    """The roofs of a run folder. None without them: `problems` then says why, if they were tried. It also says where
    they were measured when the run was resumed elsewhere."""
    if not (folder / ROOFS).exists():
        return None
    try:
        content = read_json(folder / ROOFS)
        if isinstance(content, dict) and "failed" in content:  # they could not be measured
            raise RecordError(str(content["failed"]))
        roofs = convert(content, Roofs, ROOFS)
        here = convert(content.get("environment"), Environment | None, ROOFS)
    except RecordError as error:
        problems.append(f"no roofs: {error}")
        return None

    def is_other(name: str) -> bool:
        known, value = {getattr(run.environment, name) for run in rows} - {None}, here and getattr(here, name)
        return bool(known and value and value not in known)

    where = []
    if is_other("device"):
        where.append(f"on {here.device}")
    elif is_other("gpu_uuid"):
        where.append("on another card of the same kind")
    if is_other("commit"):
        where.append(f"at commit {here.commit[:7]}")
    if where:
        problems.append(f"{ROOFS_APART}, {', '.join(where)}")
    return roofs


def environment_of(run: Run) -> Environment:
    """The run's environment; an empty one where no row left any."""
    return run.environment or Environment(device="unknown machine", device_type="unknown")
