"""Records from disk, checked: one file, or the records of a run folder merged by its plan.

A run folder holds `plan.json` (what was meant to run), a record at the `output` of every planned row,
`roofs.json` and `predicted.json`. Nothing but what the plan names is read. A folder without a plan holds
`results.json`: a recorded run.
"""

from dataclasses import replace
from pathlib import Path, PurePath
from statistics import median
from typing import Any

import msgspec

import common.record as schema
from common.record import Row, Run, Study, Workload
from common.text import one_line

LARGEST_NUMBER, LEAST_NUMBER = 1e18, 1e-15  # beyond them a figure means nothing and a chart cannot be drawn
DIFFER = "rows differ in"  # how a problem begins that is about every row
SAME_IN_ALL_ROWS = ("device", "gpu_uuid", "code_sha256", "commit")  # and all versions
NO_TIME = ("not run", "interrupted")  # statuses of a row that a resumed run finishes


class RecordError(ValueError):
    """A file is not a record that this version can read; the message is one line that says why."""


class Planned(msgspec.Struct):
    """A row that the ladder meant to run: its script, and where its record is in the run folder."""

    script: str
    output: str  # x.json, peers/x.json, pass-2/x.json, 2-ddp/x.json


class Plan(msgspec.Struct):
    """What the ladder writes before its first row."""

    kind: str  # ladder, or the kind of a Study: then the folder of an output names the run that it belongs to
    command: str
    started_at: str
    workload: Workload | None
    rows: list[Planned]
    schema_version: int


# --- one file -------------------------------------------------------------------------------------


def read(path: Path) -> Run | Study:
    """A checked record. Raises RecordError for one that is damaged, foreign, or of another version."""
    content, name = read_json(path), one_line(path.name)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != schema.SCHEMA_VERSION:
        raise RecordError(
            f"{name} is not a record of schema version {schema.SCHEMA_VERSION}, the one that is read"
        )
    record = convert(content, Study if "runs" in content else Run, name)
    runs = [*record.runs.values()] if isinstance(record, Study) else [record]
    for run in runs:
        rows = [*run.rows, *run.peers]
        if len({row.step for row in rows}) != max(1, len(rows)):
            raise RecordError(f"{name} holds no rows, or two of one name")
        if run.workload and not (run.workload.tokens_per_step and run.workload.gpus):
            raise RecordError(f"{name} holds a workload of nothing")
        for row in rows:
            _check(row)
    if not runs:
        raise RecordError(f"{name} holds no runs")
    return record


def read_json(path: Path) -> Any:
    """The content of a JSON file, without text or numbers that could harm a terminal or a chart. Raises
    RecordError."""
    name = one_line(path.name)
    try:
        if not path.is_file():
            raise RecordError(f"there is no file {name}")
        return _harmless(msgspec.json.decode(path.read_bytes()))
    except OSError as error:
        raise RecordError(f"{name} cannot be read ({error.strerror or error})") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RecordError(f"{name} is not readable JSON ({type(error).__name__})") from None


def _harmless(value: Any, key: str = "") -> Any:
    """A JSON value in which every text is one line without control characters, a script's source apart.

    Raises RecordError for a number that is too large, or negative and no loss.
    """
    if isinstance(value, str):
        if key == "source":
            return "".join(c if c.isprintable() or c in "\n\t" else " " for c in value)
        return one_line(value, 5000 if key == "command" else 1000)  # a study joins several commands
    if isinstance(value, list):
        return [_harmless(item, key) for item in value]
    if isinstance(value, dict):
        return {one_line(name): _harmless(item, name) for name, item in value.items()}
    least = -LARGEST_NUMBER if key in ("loss", "heldout") else 0
    if isinstance(value, (int, float)) and not (
        least <= value <= LARGEST_NUMBER and not 0 < value < LEAST_NUMBER
    ):
        raise RecordError(f"{one_line(key, 40)} is {one_line(value, 12)}")
    return value


def convert(content: Any, kind: Any, name: str) -> Any:
    """JSON content as an object of a record's class. Raises RecordError that names the field."""
    try:
        return msgspec.convert(content, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise RecordError(f"{name}: {one_line(error, 150)}") from None


def _check(row: Row) -> None:
    """Raises RecordError for a row without a status, and for an ok row without its times."""
    row.step = one_line(row.step, 100) or "unnamed"
    times = [one.step_ms for one in [row, *row.passes]]
    if row.status is None or (row.status == "ok" and not all(of and all(of) for of in times)):
        raise RecordError(f"{row.step}: no status, or an ok row without its times")


# --- a run folder ---------------------------------------------------------------------------------


def load(folder: Path) -> Run | Study:
    """What a run folder holds. Raises RecordError where nothing can be reported."""
    if not folder.is_dir():
        raise RecordError(f"{one_line(folder)} is not a folder")
    if not (folder / schema.PLAN).exists():
        return read(folder / schema.MERGED)
    plan = convert(read_json(folder / schema.PLAN), Plan, schema.PLAN)
    if plan.schema_version != schema.SCHEMA_VERSION or not plan.rows:
        raise RecordError(f"{schema.PLAN} names no rows, or is not of schema version {schema.SCHEMA_VERSION}")
    is_study = plan.kind != "ladder"
    planned: dict[str, dict[str, list[Planned]]] = {}  # by the run's name and the row's, a pass each
    for one in plan.rows:
        output = PurePath(one.output)
        if output.is_absolute() or ".." in output.parts or "\0" in one.output:
            raise RecordError(f"{schema.PLAN} names a file outside the run folder")
        rows = planned.setdefault(str(output.parent) if is_study else "", {})
        rows.setdefault(PurePath(one.script).stem, []).append(one)
    runs = {name: _merge(folder, plan, rows) for name, rows in planned.items()}
    first = next(iter(runs.values()))
    predicted = _optional(
        folder / schema.PREDICTED, dict[str, dict[str, float] if is_study else float], first
    )
    for name, run in runs.items():
        times = (predicted or {}).get(name, {}) if is_study else predicted or {}
        for row in run.rows:
            row.predicted_ms = times.get(row.step, row.predicted_ms)
    first.roofs = _optional(folder / schema.ROOFS, schema.Roofs, first)
    return Study(plan.kind, plan.command, plan.started_at, runs) if is_study else first


def _optional(path: Path, kind: Any, run: Run) -> Any:
    """The content of a file that may be absent; None also where it cannot be read, which is then a problem of
    `run`."""
    try:
        return convert(read_json(path), kind, path.name) if path.exists() else None
    except RecordError as error:
        run.problems.append(f"left out: {error}")
        return None


def _merge(folder: Path, plan: Plan, planned: dict[str, list[Planned]]) -> Run:
    """The rows of one run, from their records; `problems` names what differs between them."""
    merged = Run(plan.command, plan.started_at, None, plan.workload if plan.kind == "ladder" else None, [])
    records, incomplete = [], {}
    for step, passes in planned.items():
        ended = [_read_planned(folder, one, step) for one in passes]
        for record in ended:
            merged.workload = merged.workload or record.workload
            if record.workload and record.workload != merged.workload:
                ours, theirs = vars(merged.workload), vars(record.workload)
                differing = ", ".join(name for name in ours if ours[name] != theirs[name])
                record.rows = [
                    Row(step, "failed", f"ran a different workload than the other rows: {differing} differ")
                ]
        row = _merge_passes(ended)
        is_peer = plan.kind == "ladder" and passes[0].script.startswith("peers/")
        (merged.peers if is_peer else merged.rows).append(row)
        if row.passes and len(row.passes) < len(passes):
            incomplete.setdefault(f"ran in {len(row.passes)} of {len(passes)} passes only", []).append(step)
        records += ended
    merged.environment = next((record.environment for record in records if record.environment), None)
    merged.problems += [problem for record in records for problem in record.problems] + _differences(records)
    merged.problems += [f"{', '.join(steps)} {words}" for words, steps in incomplete.items()]
    return merged


def _read_planned(folder: Path, planned: Planned, step: str) -> Run:
    """A planned row's record, or one whose row tells why there is none."""
    path = folder / planned.output
    if not path.exists():
        began = path.with_suffix(".log").exists()
        status, when = ("interrupted", "during") if began else ("not run", "before")
        row = Row(step, status, f"the run ended {when} this row: --resume with its folder finishes it")
    else:
        try:
            record = read(path)
            if isinstance(record, Run) and [row.step for row in record.rows] == [step]:
                return record
            row = Row(step, "failed", f"its record cannot be used: it is not one of {one_line(step)}")
        except RecordError as error:
            row = Row(step, "failed", f"its record cannot be used: {error}")
    return Run("", None, None, None, [row])


def _merge_passes(passes: list[Run]) -> Row:
    """One row of all passes. It has a time only if no pass ended without one."""
    rows = [record.rows[0] for record in passes]
    ended = [record for record in passes if record.rows[0].status not in NO_TIME]
    if len(passes) == 1 or not ended or all(record.rows[0].status == "skipped" for record in ended):
        return (ended or passes)[0].rows[0]
    for k, row in enumerate(rows, 1):
        if row.status not in ("ok", *NO_TIME):
            return replace(row, reason=f"pass {k} of {len(rows)}: {row.reason or 'no reason given'}")
    middles = [median(record.rows[0].step_ms) for record in ended]
    nearest = min(range(len(ended)), key=lambda k: abs(middles[k] - median(middles)))
    kept = [replace(record.rows[0], profile=None, source=None) for record in ended]
    return replace(ended[nearest].rows[0], passes=kept)


def _differences(records: list[Run]) -> list[str]:
    """Rows of one table must come from one machine, with the same software and the same code."""
    seen: dict[str, dict[str, dict[str, None]]] = {}  # what -> its value -> the rows that have it
    for record in (record for record in records if record.environment and record.rows[0].status == "ok"):
        facts = {
            name: getattr(record.environment, name) for name in SAME_IN_ALL_ROWS
        } | record.environment.versions
        for name, value in facts.items():
            seen.setdefault(name, {}).setdefault(one_line(value, 40), {})[record.rows[0].step] = None
    said = {
        name: "; ".join(f"{value} in {', '.join(rows)}" for value, rows in of.items())
        for name, of in seen.items()
    }
    return [f"{DIFFER} {name}: {said[name]}" for name, of in seen.items() if len(of) > 1]
