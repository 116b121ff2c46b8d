"""A plan under way: its folder, its rows one after the other, and the report at the end.

A folder continues if its plan equals mine: the same kind of run, device and workload, and rows of one name
that are the same, of the same code. It may hold other rows too."""

import argparse
import contextlib
import datetime
import fcntl
import hashlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from common import record as schema
from common.fingerprint import row_sha256
from common.text import Skip, portable_command, positive_int, say
from ladder import patches, process, rows
from ladder.process import ROOT

LOCK = ".lock"
SAME = ("schema_version", "kind", "device", "workload")  # of a plan that continues a folder's
PER_ROW = ("gpus", "parallel", "warmup")  # fields of the workload in which rows of one run may differ


class Job(NamedTuple):
    """What is to run."""

    plan: dict  # what the run folder holds of it from the first row on
    rows: list[rows.Planned]
    facts: dict  # what the arguments mean on this machine: see ladder/facts.py
    again: str  # the command that finishes it, without its folder


class Running:
    """One run under way."""

    def __init__(self, folder: Path, job: Job, stop: process.Stop):
        self.folder, self.plan, self.facts, self.stop = folder, job.plan, job.facts, stop

    def recorded(self, row: rows.Planned) -> dict:
        """The row that a script left; empty where there is none, or one of another version."""
        record = schema.read_object(self.folder / row.output)
        is_read = record.get("schema_version") == schema.SCHEMA_VERSION and record.get("rows")
        return record["rows"][0] if is_read else {}

    def decides(self, row: rows.Planned) -> bool:
        """Whether the rows behind a row are made from it: those of a model, by their first pass."""
        return row.script == rows.MODEL_SCRIPT and not row.output.startswith("pass-")

    def run_row(self, row: rows.Planned, place: str) -> None:
        """Run one script, and print what came of it. One that leaves no record gets one that holds how it
        ended. `place` tells which of all rows it is: `row 2 of 5`."""
        path, name = self.folder / row.output, row.output.removesuffix(".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        ended = self.too_large(row) or self.run_script(row, path, f"{place}: {name}")
        recorded = self.recorded(row)
        # Of several processes one ran out of memory, and the record is of another, which lost contact with
        # it.
        lost_contact = recorded.get("status") == "failed" and ended and ended[0] == "oom"
        if not recorded or lost_contact:
            failed = schema.Row(path.stem, *(ended or ("failed", "left no record")))
            schema.write_json(path, schema.Run(self.plan["command"], None, None, None, [failed]))
            recorded = vars(failed)
        outcome = f"{recorded['status']}: {recorded['reason']}"
        if recorded["status"] == "ok":
            outcome = f"{statistics.median(recorded['step_ms']):,.1f} ms a step"
        say(f"{name}: {outcome}")

    def too_large(self, row: rows.Planned) -> tuple[str, str] | None:
        """Status and reason of a row that a CPU's free memory is not enough for: there the system would end
        it."""
        needed, free = self.facts.get("needed_bytes", {}).get(row.script, 0), self.facts["free_bytes"]
        if self.facts["device_type"] == "cpu" and self.plan["kind"] == "ladder" and free and needed > free:
            needs = f"needs about {needed / 2**30:.0f} GiB of {free / 2**30:.0f} free"
            return "oom", f"{needs}: try a smaller --batch-size"
        return None

    def run_script(self, row: rows.Planned, record: Path, name: str) -> tuple[str, str] | None:
        """Run a row's script, or a patched copy of it. Returns how it ended, where it did not end well."""
        words, log = [*row.arguments, "--output", str(record)], record.with_suffix(".log")
        variables = process.environment(self.facts["device_type"], row.gpus)
        try:
            with script_of(row) as script:
                command = process.script_command(script, words, row.gpus)
                return process.run(command, log, self.plan["limit_s"], self.stop, name, variables)
        except Skip as error:
            return "failed", str(error)


@contextlib.contextmanager
def script_of(row: rows.Planned) -> Iterator[Path]:
    """A row's script, or while the context lasts a patched copy of it. Raises Skip for a patch that does not
    fit."""
    with tempfile.TemporaryDirectory() as copy:
        yield patches.write_script(row.patch, row.script, Path(copy)) if row.patch else ROOT / row.script


# --- the folder -----------------------------------------------------------------------------------


def folder_of(kind: str, output: Path | None) -> Path:
    """The folder of a run: the one that the user names, or a new one. Raises Skip for one that cannot be."""
    try:
        if output is None:
            return new_folder(kind)
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Skip(f"{output or ROOT / 'results'} cannot be used: {error.strerror or error}") from None
    return output.resolve()


def new_folder(kind: str) -> Path:
    """A folder under results/ that no other run has, also where two start in the same second."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{kind}"
    (ROOT / "results").mkdir(exist_ok=True)
    for k in itertools.count(1):
        folder = ROOT / "results" / (name if k == 1 else f"{name}-{k}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder


def locked(folder: Path) -> TextIO | None:
    """A file that holds the lock of a run folder until this process ends; None where another process has
    it."""
    lock = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:  # a file system without locks
        pass
    return lock


# --- the plan -------------------------------------------------------------------------------------


def plan_of(kind: str, planned: list[rows.Planned], facts: dict, limit_s: int | None, command: str) -> dict:
    """The plan that a run folder holds from its first row on."""
    return {
        "schema_version": schema.SCHEMA_VERSION,
        "kind": kind,
        "command": command,
        "started_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": facts["device"],
        "workload": facts["workload"],
        "seen": facts.get("seen", {}),
        "rows": [row._asdict() for row in planned],
        "code": {label(row): code_of(row) for row in planned},
        "limit_s": limit_s or rows.LIMIT_S,
    }


def label(row: rows.Planned) -> str:
    return f"{row.script} with {row.patch}" if row.patch else row.script


def code_of(row: rows.Planned) -> str | None:
    """What a row's script and its patch run through, as its record will hold it; None of a patch that does
    not fit."""
    if row.script == rows.MODEL_SCRIPT:
        return row_sha256((ROOT / "ladder" / "model_changes.py").read_text(), ROOT)
    if row.script == rows.LOOP_SCRIPT:
        files = [path.read_bytes() for path in sorted((ROOT / "examples" / "loop").glob("[0-9l]*"))]
        return hashlib.sha256(b"".join(files)).hexdigest()[:16]
    with contextlib.suppress(Skip), script_of(row) as script:
        return row_sha256(script.read_text(), ROOT)
    return None


def continued(folder: Path, plan: dict) -> dict:
    """The plan of a folder that goes on with mine: its start and all of its rows are kept. Raises Skip for a
    folder that holds something else."""
    before = schema.read_object(folder / schema.PLAN)
    if not before:
        if {path.name for path in folder.iterdir()} - {LOCK}:
            raise Skip(f"--output {folder} holds files that are of no run")
        return plan
    theirs, mine = rows_by_output(before), rows_by_output(plan)
    code = before["code"] if isinstance(before.get("code"), dict) else {}
    differing = [name for name in SAME if comparable(before, name) != comparable(plan, name)]
    differing += [output for output in mine if theirs.get(output, mine[output]) != mine[output]]
    differing += [
        f"the code of {name}"
        for name in plan["code"]
        if code.get(name, plan["code"][name]) != plan["code"][name]
    ]
    if differing:
        raise Skip(f"--output {folder} holds another run: {', '.join(differing[:3])} differ")
    together = theirs | mine if mine.keys() <= theirs.keys() else mine | theirs
    commands = (
        [before.get("command"), plan["command"]] if mine.keys() - theirs.keys() else [before.get("command")]
    )
    return plan | {
        "started_at": before.get("started_at"),
        "command": " && ".join(dict.fromkeys(map(str, commands))),
        "rows": list(together.values()),
        "code": code | plan["code"],
    }


def rows_by_output(plan: dict) -> dict[str, dict]:
    """The rows of a plan by the file of their record; empty of what is no plan."""
    planned = plan.get("rows")
    planned = planned if isinstance(planned, list) else []
    return {str(row.get("output")): row for row in planned if isinstance(row, dict)}


def comparable(plan: dict, name: str) -> object:
    """A part of a plan, of the workload without what may differ from row to row."""
    part = plan.get(name)
    return {key: part[key] for key in part if key not in PER_ROW} if isinstance(part, dict) else part


# --- running it -----------------------------------------------------------------------------------


def execute(job: Job, output: Path | None) -> int:
    """Run all rows of a job that have no ok record in their folder, and report. Returns the exit code. Raises
    Skip for a folder that another run has, or that holds something else."""
    folder = folder_of(job.plan["kind"] if not job.facts.get("seen") else "model", output)
    lock = locked(folder)
    if lock is None:
        raise Skip(f"{folder} is in use by another run")
    schema.write_json(folder / schema.PLAN, continued(folder, job.plan))
    if "roofs" in job.facts:
        schema.write_json(folder / schema.ROOFS, job.facts["roofs"])
    say("\n".join(job.facts["messages"]))
    stop = process.Stop()
    stop.listen()
    running = Running(folder, job, stop)
    recorded = [row for row in job.rows if running.recorded(row).get("status") == "ok"]
    if recorded:
        say(f"{len(recorded)} of {len(job.rows)} rows are recorded already")
    for k, row in enumerate(job.rows, 1):
        if not stop.requests and running.recorded(row).get("status") != "ok":
            running.run_row(row, f"row {k} of {len(job.rows)}")
            if running.decides(row) and running.recorded(row).get("status") == "ok":
                for later in job.rows[k:]:  # they were made from other rows than there are now
                    (folder / later.output).unlink(missing_ok=True)
    return finish(folder, stop, job)


def finish(folder: Path, stop: process.Stop, job: Job) -> int:
    """Print and write the report; returns the exit code. Of a run of run_all.sh, results/latest leads to this
    folder."""
    say("")
    ended = subprocess.run(process.module_command("report", str(folder)), cwd=ROOT, start_new_session=True)
    if not (folder / schema.MERGED).exists():
        say(f"no table: the records are kept. This makes it: {sys.executable} -m report {folder}")
    latest = ROOT / "results" / "latest"
    free = folder.parent == latest.parent and (latest.is_symlink() or not latest.exists())
    if job.plan["command"].startswith("./run_all.sh") and ended.returncode != 2 and free:
        with contextlib.suppress(OSError):
            latest.unlink(missing_ok=True)
            latest.symlink_to(folder.name)
    if stop.requests:
        shown = f"results/{folder.name}" if folder.parent == latest.parent else folder
        say(f"interrupted: {job.again} --output {shown} finishes it")
        return 130
    return ended.returncode


# --- studies --------------------------------------------------------------------------------------


def run_study(
    kind: str,
    planned: list[rows.Planned],
    arguments: list[str],
    options: argparse.Namespace,
    words: list[str],
) -> int:
    """Run the rows of a study in a folder, new or continued with more rows; `words` are those of its command.
    Returns the exit code. `options` are those of `add_options`. Raises Skip, one line, for a folder that
    cannot be used."""
    name = f"python -m ladder.{kind}"
    facts = rows.check(
        arguments, max(row.gpus for row in planned), limit_s=options.step_timeout or rows.LIMIT_S, name=name
    )
    planned = [row._replace(arguments=rows.with_pinned(row.arguments, facts["pinned"])) for row in planned]
    command = portable_command(name, words)
    plan = plan_of(kind, planned, facts, options.step_timeout, command)
    return execute(Job(plan, planned, facts, command), options.output)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every run."""
    text = "of the run: a new one, or one to continue (default: a new one under results/)"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=text)
    text = "seconds for a row (default: 1800)"
    parser.add_argument("--step-timeout", type=positive_int, metavar="S", help=text)
