"""Records from disk, checked: one file, or the records of a run folder merged by its plan.

A run folder holds `plan.json` (what was meant to run), a record at the `output` of every planned row, and
`roofs.json`. Nothing but what the plan names is read. A folder without a plan holds
`results.json`: a recorded run.
"""

from dataclasses import replace
from pathlib import Path, PurePath
from statistics import median
from typing import Any, Literal

import msgspec

import common.record as schema
from common.record import Environment, Row, Run, Study, Workload
from common.text import one_line
from report import proof

DIFFER = "rows differ in"  # how a problem begins that is about every row
SAME_IN_ALL_ROWS = ("device", "gpu_uuid", "cpu_threads")  # and all versions
CANNOT = "its record cannot be used"
NO_TIME = ("not run", "interrupted")  # statuses of a row that the same command finishes


class RecordError(ValueError):
    """A file is not a record that this version can read; the message is one line that says why."""


class Planned(msgspec.Struct):
    """A row that the ladder meant to run: its script, and where its record is in the run folder."""

    script: str
    output: str  # NAME.json, peers/NAME.json, pass-2/NAME.json, 2-ddp/NAME.json; NAME is the row's


class Plan(msgspec.Struct):
    """What the ladder writes before its first row."""

    # Of a study, the folder of an output names the run that it belongs to.
    kind: Literal[("ladder", *schema.STUDIES)]
    command: str
    started_at: str
    workload: Workload | None
    rows: list[Planned]
    schema_version: int
    code: dict[str, str | None] = {}  # hashes by script and patch: see common/fingerprint.py


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
    runs = runs_of(record)
    for run in runs.values():
        rows = [*run.rows, *run.peers]
        if len({row.step for row in rows}) != max(1, len(rows)):
            raise RecordError(f"{name} holds no rows, or two of one name")
        if run.workload and not (run.workload.tokens_per_step and run.workload.gpus):
            raise RecordError(f"{name} holds a workload of nothing")
        if isinstance(record, Study) and not (run.rows and (not run.workload or run.workload.has_shape())):
            raise RecordError(f"{name} holds a run that is no part of a study")
        if run.workload and not (run.workload.model or run.workload.has_shape()):
            raise RecordError(f"{name} holds a workload without its shape")
        for row in [*rows, *(run.larger.rows if run.larger else [])]:
            _check(row)
    if not runs:
        raise RecordError(f"{name} holds no runs")
    return record


def runs_of(record: Run | Study) -> dict[str, Run]:
    """The runs of a study by name, or a run by itself, without a name."""
    return record.runs if isinstance(record, Study) else {"": record}


def read_json(path: Path) -> Any:
    """The content of a JSON file, without text that could harm a terminal. Raises RecordError."""
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
    """A JSON value in which every text is one line without control characters, a script's source apart, and
    without markers of cog: what documents print, cog reads again."""
    if isinstance(value, str) and key in ("source", "code"):
        return "".join(c if c.isprintable() or c in "\n\t" else " " for c in value)
    if isinstance(value, str):
        text = one_line(value, 5000 if key == "command" else 1000)  # a study joins several commands
        return text.replace("[[[", "[ [ [").replace("]]]", "] ] ]")
    if isinstance(value, list):
        return [_harmless(item, key) for item in value]
    if isinstance(value, dict):
        return {one_line(name): _harmless(item, name) for name, item in value.items()}
    return value


def convert(content: Any, kind: Any, name: str) -> Any:
    """JSON content as an object of a record's class. Raises RecordError that names the field."""
    try:
        return msgspec.convert(content, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise RecordError(f"{name}: {one_line(error, 150)}") from None


def _check(row: Row) -> None:
    """Raises RecordError for a row without a status, and for an ok row, or a pass of it, without its
    times."""
    row.step = one_line(row.step, 100) or "unnamed"
    if row.status is None:
        raise RecordError(f"{row.step}: no status")
    for timed in [row, *row.passes]:
        if row.status == "ok" and not (timed.step_ms and min(timed.step_ms) > 0):
            raise RecordError(f"{row.step}: an ok row without its times")


# --- a run folder ---------------------------------------------------------------------------------


def load(folder: Path) -> Run | Study:
    """What a run folder holds. Raises RecordError where nothing can be reported."""
    if not folder.is_dir():
        raise RecordError(f"{one_line(folder)} is not a folder")
    if not (folder / schema.PLAN).exists():
        if not (folder / schema.MERGED).exists():
            raise RecordError(f"there is no file {schema.MERGED} in {one_line(folder)}")
        return read(folder / schema.MERGED)
    plan = convert(read_json(folder / schema.PLAN), Plan, schema.PLAN)
    if plan.schema_version != schema.SCHEMA_VERSION or not plan.rows:
        raise RecordError(f"{schema.PLAN} names no rows, or is not of schema version {schema.SCHEMA_VERSION}")
    runs = {name: _merge(folder, plan, rows) for name, rows in _planned_runs(plan).items()}
    first = next(iter(runs.values()))
    roofs = folder / schema.ROOFS
    try:
        first.roofs = convert(read_json(roofs), schema.Roofs, roofs.name) if roofs.exists() else None
    except RecordError as error:
        first.problems.append(f"left out: {error}")
    if (folder / f"{schema.LARGER}.json").exists() and plan.kind == "ladder":
        first.larger = _read_planned(folder, Planned("", f"{schema.LARGER}.json"), schema.LARGER)
        if (reason := first.larger.rows[0].reason or "").startswith(CANNOT):
            first.problems.append(f"left out: the larger batch: {reason}")
    if plan.kind == "ladder":
        return first
    if plan.kind == "ablations":
        _prove_variants(folder, plan, runs)
    # Runs of other studies may be of several cards.
    first.problems += [] if plan.kind == "ablations" else _differences(list(runs.items()), ("device",))
    return Study(plan.kind, plan.command, plan.started_at, runs)


def statuses(recording: Run | Study) -> dict[str, str | None]:
    """Of all rows, by their names behind those of their runs."""
    runs = runs_of(recording).items()
    return {f"{name} {row.step}".strip(): row.status for name, run in runs for row in [*run.rows, *run.peers]}


def lost_rows(merged: Path, record: Run | Study) -> list[str]:
    """The rows with a time in an earlier merge that have no record now."""
    try:
        before, now = statuses(read(merged)) if merged.exists() else {}, statuses(record)
    except RecordError:
        return []
    return [name for name, status in before.items() if status == "ok" and now.get(name) in NO_TIME]


def _planned_runs(plan: Plan) -> dict[str, dict[str, list[Planned]]]:
    """The rows of a plan by the run that they belong to and their name: a list of passes each."""
    runs: dict[str, dict[str, list[Planned]]] = {}
    for planned in plan.rows:
        output = PurePath(planned.output)
        if output.is_absolute() or ".." in output.parts or "\0" in planned.output:
            raise RecordError(f"{schema.PLAN} names a file outside the run folder")
        run = "" if plan.kind == "ladder" else str(output.parent)
        runs.setdefault(run, {}).setdefault(output.stem, []).append(planned)
    return runs


def _prove_variants(folder: Path, plan: Plan, runs: dict[str, Run]) -> None:
    """Compare every variant with the script that it changes, whose run has the script's name; a problem names
    what else than the patch differs."""
    samples = {
        str(PurePath(planned.output).parent): proof.read(folder / planned.output) for planned in plan.rows
    }
    for name, run in runs.items():
        script = run.rows[0].step
        if name != script and script in runs:
            proof.prove([(runs[script].rows[0], samples[script]), (run.rows[0], samples[name])])
            run.problems += _differences([(script, runs[script]), (name, run)])


def _merge(folder: Path, plan: Plan, planned: dict[str, list[Planned]]) -> Run:
    """The rows of one run, from their records; `problems` names what differs between them."""
    workload = plan.workload if plan.kind == "ladder" else None
    merged, records, samples = Run(plan.command, plan.started_at, None, workload, []), [], []
    too_few: dict[str, list[str]] = {}  # steps by what they lack
    for step, passes in planned.items():
        of_step = [_read_planned(folder, one_pass, step) for one_pass in passes]
        for record in of_step:
            merged.workload = merged.workload or record.workload
            _refuse_other_work(record, merged.workload, step)
        row = _merge_passes(of_step)
        samples.append((row, proof.read(folder / passes[0].output)))
        is_peer = plan.kind == "ladder" and passes[0].script.startswith("peers/")
        (merged.peers if is_peer else merged.rows).append(row)
        if row.passes and len(row.passes) < len(passes):
            lack = f"ran in {len(row.passes)} of {len(passes)} passes only"
            too_few.setdefault(lack, []).append(step)
        records += of_step
    proof.prove(samples)
    merged.environment = _environment(records)
    merged.problems += [problem for record in records for problem in record.problems]
    merged.problems += _differences([(record.rows[0].step, record) for record in records])
    hashed = {step for step, passes in planned.items() if not passes[0].script.startswith("ladder/")}
    rows = [record.rows[0] for record in records if record.rows[0].step in hashed]
    known = {None, *plan.code.values()}
    if changed := [row.step for row in rows if plan.code and row.code_sha256 not in known]:
        merged.problems.append(f"{DIFFER} code: {', '.join(changed)} changed after the run began")
    merged.problems += [f"{', '.join(steps)} {lack}" for lack, steps in too_few.items()]
    return merged


def _environment(records: list[Run]) -> Environment | None:
    """Where the rows ran: those with times, if any has one. A row without may have run again elsewhere."""
    timed = [record for record in records if record.rows[0].status == "ok"]
    known = [record.environment for record in timed or records if record.environment]
    versions: dict[str, str] = {}
    for environment in known:  # a peer may know the version of what no other row loads
        versions = environment.versions | versions
    return replace(known[0], versions=versions) if known else None


def _refuse_other_work(record: Run, workload: Workload | None, step: str) -> None:
    """Replace the row of a record that did other work than the others by one that says so."""
    if record.workload and record.workload != workload:
        differing = ", ".join(record.workload.differing(workload))
        reason = f"ran a different workload than the other rows: {differing} differ"
        record.rows = [Row(step, "failed", reason)]


def _read_planned(folder: Path, planned: Planned, step: str) -> Run:
    """A planned row's record, or one whose row tells why there is none."""
    path = folder / planned.output
    if not path.exists():
        began = path.with_suffix(".log").exists()
        status, when = ("interrupted", "during") if began else ("not run", "before")
        finishes = "the same command with --output and its folder finishes it"
        row = Row(step, status, f"the run ended {when} this row: {finishes}")
    else:
        try:
            record = read(path)
            if isinstance(record, Run) and [row.step for row in record.rows] == [step]:
                return record
            row = Row(step, "failed", f"{CANNOT}: it is not one of {one_line(step)}")
        except RecordError as error:
            row = Row(step, "failed", f"{CANNOT}: {error}")
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


def _differences(
    records: list[tuple[str, Run]], same_in_all: tuple[str, ...] = SAME_IN_ALL_ROWS
) -> list[str]:
    """Rows of one table, each with its name, must come from one machine, with the same software, variables
    and code."""
    known = [record.environment for _, record in records if record.environment]
    variables = dict.fromkeys(name for environment in known for name in environment.variables)
    names: dict[str, dict[str, list[str]]] = {}  # by what differs, and by its value
    for row_name, record in records:
        if not record.environment or record.rows[0].status != "ok":
            continue
        facts = {name: getattr(record.environment, name) for name in same_in_all}
        facts |= {name: record.environment.variables.get(name, "not set") for name in variables}
        for name, value in (facts | record.environment.versions).items():
            same = names.setdefault(name, {}).setdefault(one_line(value, 40), [])
            if row_name not in same:
                same.append(row_name)
    problems = []
    for name, values in names.items():
        if len(values) > 1:
            each = [f"{value} in {', '.join(same)}" for value, same in values.items()]
            problems.append(f"{DIFFER} {name}: {'; '.join(each)}")
    return problems
