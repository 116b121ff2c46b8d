"""A plan under way: its folder, its rows one after the other, and the report at the end.

A folder continues if its plan equals the new one: the same kind of run, device and workload, and rows of one
name that are the same, of the same code. It may hold other rows too."""

import argparse
import contextlib
import datetime
import fcntl
import hashlib
import os
import re
import shlex
import signal
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
from common.record import ALLOCATION, LARGER, PATCHED
from common.text import Skip, portable_command, positive_int, say, without
from ladder import patches, process, rows
from ladder.process import ROOT

LOCK = ".lock"
SAME = ("schema_version", "kind", "device", "workload")  # of a plan that continues a folder's
OF_SWEEP = ("text", "text_sha256", "seed")  # what all its rows share: each has a shape of its own
MOST_TRIES = 3  # of a row whose time drifts
PER_ROW = ("gpus", "parallel", "warmup")  # fields of the workload in which rows of one run may differ


class Job(NamedTuple):
    """What is to run."""

    plan: dict  # what the run folder holds of it from the first row on
    rows: list[rows.Planned]
    facts: dict  # what the arguments mean on this machine: see ladder/facts.py
    again: str  # the command that finishes it, without its folder


class Try(NamedTuple):
    """One run of a row that was timed."""

    ms: float
    drift: float
    files: dict[Path, bytes]


def best_try(tries: list[Try]) -> Try:
    """The steadiest of those that are within 5 % of the fastest: what runs beside a row only slows it."""
    fastest = min(each.ms for each in tries)
    near = [each for each in tries if each.ms <= (1 + schema.DRIFT) * fastest]
    return min(near, key=lambda each: abs(each.drift))


class Running:
    """One run under way."""

    def __init__(self, folder: Path, job: Job, stop: process.Stop):
        self.folder, self.plan, self.facts, self.stop = folder, job.plan, job.facts, stop

    def read_row(self, row: rows.Planned) -> dict:
        """The row that a script left; empty where there is none, or one of another version."""
        record = schema.read_object(self.folder / row.output)
        content = (record.get("rows") or [{}])[0] if isinstance(record.get("rows"), list) else {}
        is_known = record.get("schema_version") == schema.SCHEMA_VERSION and isinstance(content, dict)
        return content if is_known else {}

    def recorded(self, row: rows.Planned) -> dict:
        """The row that a script left; empty also where it is of other code than the plan's."""
        content, code = self.read_row(row), self.plan.get("code", {}).get(label(row))
        is_changed = row.script != rows.LOOP_SCRIPT and content.get("code_sha256") not in (None, code)
        return {} if is_changed else content

    def run_row(self, row: rows.Planned, place: str) -> None:
        """Run one row. On a GPU, run it again while its time drifts, as beside a busy host, and keep the best
        try. `place` tells which of all rows it is: `row 2 of 5`."""
        self.run_once(row, place)
        if self.plan["kind"] != "ladder" or self.facts["device_type"] != "cuda":
            return
        name, tries = row.output.removesuffix(".json"), []
        while self.recorded(row).get("status") == "ok":
            tries.append(self.read_try(row))
            drift = best_try(tries).drift
            if abs(drift) <= schema.DRIFT or len(tries) == MOST_TRIES or self.stop.requests:
                break
            took = f"took {abs(drift):.1%} {'more' if drift > 0 else 'less'} time"
            say(f"{name}: the second half of its steps {took}, so it runs again")
            self.run_once(row, place)
        for file, content in best_try(tries).files.items() if tries else ():
            schema.write_bytes(file, content)

    def read_try(self, row: rows.Planned) -> "Try":
        path, step_ms = self.folder / row.output, self.recorded(row)["step_ms"]
        files = [path, schema.sketches_of(path), path.with_suffix(".log")]
        content = {file: file.read_bytes() for file in files if file.exists()}
        return Try(statistics.median(step_ms), schema.Row(row.output, step_ms=step_ms).drift, content)

    def run_once(self, row: rows.Planned, place: str) -> None:
        """Run one script, and print what came of it. One that leaves no record gets one that holds how it
        ended."""
        path, name = self.folder / row.output, row.output.removesuffix(".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        ended = self.too_large(row) or self.run_script(row, path, f"{place}: {name}")
        recorded = self.read_row(row)  # also of a script that was edited meanwhile: the report says so
        # Of several processes one ran out of memory, and the record is of another, which lost contact with
        # it.
        lost_contact = recorded.get("status") == "failed" and ended and ended[0] == "oom"
        if not recorded or lost_contact:
            failed = schema.Row(path.stem, *(ended or ("failed", "left no record")))
            schema.write_json(path, schema.Run(self.plan["command"], None, None, None, [failed]))
            recorded = vars(failed)
        outcome = f"{recorded['status']}: {recorded['reason']}"
        if recorded["status"] == "ok":
            ms = statistics.median(recorded["step_ms"])
            outcome = f"{ms:,.{1 if ms >= 1 else 3}f} ms a step"
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
        if row.output == f"{LARGER}.json":
            # Between large tensors lay 23 of 140 GiB in pieces too small for the next one.
            variables[ALLOCATION] = os.environ.get(ALLOCATION, "expandable_segments:True")
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
    folder = output or ROOT / "results" / f"{time.strftime('%Y%m%d-%H%M%S')}-{kind}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Skip(f"{folder} cannot be used: {error.strerror or error}") from None
    return folder.resolve()


def acquire_lock(folder: Path) -> TextIO | None:
    """A file that holds the lock of a run folder until this process and the row that it runs have ended; None
    where another process has it."""
    lock = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:  # a file system without locks
        pass
    os.set_inheritable(lock.fileno(), True)  # a row that outlives a kill -9 keeps it
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
    """The hash of the code that a row's script and patch run, as its record holds it; None if the patch does
    not fit, or the script cannot be read."""
    if row.script == rows.MODEL_SCRIPT:
        return row_sha256((ROOT / "mine" / "program.py").read_text(), ROOT)
    if row.script == rows.LOOP_SCRIPT:
        files = [path.read_bytes() for path in sorted((ROOT / "examples" / "loop").glob("[0-9l]*"))]
        return hashlib.sha256(b"".join(files)).hexdigest()[:16]
    with contextlib.suppress(Skip, SyntaxError, ValueError), script_of(row) as script:
        return row_sha256(script.read_text(), ROOT)
    return None


def refuse_another(before: dict, plan: dict, folder: Path) -> None:
    """Raises Skip where the plan of a folder is of another run than mine."""
    theirs, code = rows_by_output(before), before.get("code", {})
    differing = [name for name in SAME if comparable(before, name) != comparable(plan, name)]
    for output, row in rows_by_output(plan).items():
        fields = [field for field in row if theirs.get(output, row).get(field) != row[field]]
        differing += [f"{field} of {output}" for field in fields]
    for name, own in plan["code"].items():
        if code.get(name, own) != own:
            differing.append(f"the code of {name}")
    began, begins = (each.get("seen") or {} for each in (before, plan))
    if any(began.get(name) != begins.get(name) for name in ("first", "rows_in_file")):
        differing.append("--from, or what the file does itself,")
    if differing:
        differ = f"{', '.join(differing[:3])} differ"
        raise Skip(f"--output {folder} holds another run: {differ}: give another folder")


def merge(before: dict, plan: dict) -> dict:
    """The new plan with the start, the commands and all rows of the plan that a folder holds."""
    theirs, ours = rows_by_output(before), rows_by_output(plan)
    commands, together = [str(before.get("command"))], theirs | ours
    if ours.keys() - theirs.keys():
        commands.append(plan["command"])
    if plan["kind"] == "ladder":
        order = sorted(together, key=place_of)
    else:  # each run has a folder
        folders = list(dict.fromkeys(Path(output).parent for output in together))
        order = sorted(together, key=lambda it: (folders.index(Path(it).parent), place_of(Path(it).name)))
    return plan | {
        "started_at": before.get("started_at"),
        "command": " && ".join(dict.fromkeys(commands)),
        "rows": [together[output] for output in order],
        "code": before.get("code", {}) | plan["code"],
    }


def place_of(output: str) -> tuple:
    """Where a row of a ladder stands: pass by pass, steps by their numbers, and peers behind them."""
    *folders, name = Path(output).parts
    times = [int(part[5:]) for part in folders if part.startswith("pass-") and part[5:].isdecimal()]
    number = re.match(r"\d*", name)[0]
    return times, "peers" in folders, int(number or 0), name


def rows_by_output(plan: dict) -> dict[str, dict]:
    """The rows of a plan by the file of their record; empty for what is no plan."""
    return {row["output"]: row for row in plan.get("rows") or []}


def comparable(plan: dict, name: str) -> object:
    """A part of a plan, of the workload without what may differ from row to row."""
    part = plan.get(name)
    if not isinstance(part, dict):
        return part
    names = OF_SWEEP if plan.get("kind") == "sweep" else part.keys() - {*PER_ROW}
    return {key: part.get(key) for key in names}


# --- running it -----------------------------------------------------------------------------------


def execute(job: Job, output: Path | None) -> int:
    """Run all rows of a job that have no ok record in their folder, and report. Returns the exit code. Raises
    Skip for a folder that another run has, or that holds something else."""
    folder = folder_of(job.plan["kind"] if not job.facts.get("seen") else "model", output)
    plan, before = job.plan, schema.read_object(folder / schema.PLAN)
    if not before and {path.name for path in folder.iterdir()} - {LOCK}:
        raise Skip(f"--output {folder} holds files that are of no run: give a new or an empty folder")
    lock = acquire_lock(folder)
    if lock is None:
        raise Skip(f"{folder} is in use by another run: wait for it, or give another --output")
    before = schema.read_object(folder / schema.PLAN)  # nobody else writes it now
    if before:
        refuse_another(before, plan, folder)
        plan = merge(before, plan)
    schema.write_json(folder / schema.PLAN, plan)
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
            # With --model, later rows depend on the record of this one's first pass.
            is_first_pass = row.script == rows.MODEL_SCRIPT and not row.output.startswith("pass-")
            if is_first_pass and running.recorded(row).get("status") == "ok":
                forget_rows_behind(row, plan, folder)
    if job.facts.get("seen") and not stop.requests:
        apply_recommended(running, job, plan)
    return finish(folder, stop, job)


def apply_recommended(running: Running, job: Job, plan: dict) -> None:
    """Where a run of a model recommends changes, run its file with a patch that makes them, and the changes
    with the largest batch that fits. What was run for another recommendation is forgotten."""
    command = [sys.executable, "-m", "report", str(running.folder), "--recommended"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, start_new_session=True)
    if answer.returncode or running.stop.requests:
        return
    recommended, words = answer.stdout.strip(), job.rows[0].arguments[1:]
    patched = rows.Planned(rows.MODEL_SCRIPT, [PATCHED, recommended, *words], f"{PATCHED}.json")
    larger = rows.Planned(rows.MODEL_SCRIPT, [LARGER, recommended, *words], f"{LARGER}.json")
    before = rows_by_output(plan).get(patched.output, {})
    if before.get("arguments") != patched.arguments:
        for row in (patched, larger):
            (running.folder / row.output).unlink(missing_ok=True)
    others = [other for other in plan["rows"] if other["output"] != patched.output]
    planned = [*others, *([patched._asdict()] if recommended else [])]
    schema.write_json(running.folder / schema.PLAN, plan | {"rows": planned})
    if recommended and running.recorded(patched).get("status") != "ok":
        running.run_row(patched, "the patched file")
    tried = running.recorded(larger).get("status") in ("ok", "oom", "skipped")
    if recommended and not tried and not running.stop.requests:
        running.run_row(larger, "a larger batch")


def forget_rows_behind(row: rows.Planned, plan: dict, folder: Path) -> None:
    """Remove the records of a model's rows behind one: they were made from other rows than there are now."""
    outputs = [planned["output"] for planned in plan["rows"]]
    for output in outputs[outputs.index(row.output) + 1 :]:
        if Path(output).stem in {*rows.MODEL_ROWS, PATCHED}:
            (folder / output).unlink(missing_ok=True)
    (folder / f"{LARGER}.json").unlink(missing_ok=True)


def finish(folder: Path, stop: process.Stop, job: Job) -> int:
    """Print and write the report, which a signal ends at once; returns the exit code. Of a run of run_all.sh,
    results/latest leads to this folder."""
    say("")
    requests, command = stop.requests, [sys.executable, "-m", "report", str(folder)]
    report = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    while report.poll() is None and stop.requests == requests:
        time.sleep(process.POLL_S)
    if report.poll() is None:
        os.killpg(report.pid, signal.SIGKILL)
    code = report.wait()
    if stop.requests == requests and not (folder / schema.MERGED).exists():
        say(f"no table: the records are kept. With pip, this makes it:\n  cd {shlex.quote(str(ROOT))} &&")
        say(f"  ./run_all.sh --setup && {shlex.join(command)}")
    latest = ROOT / "results" / "latest"
    free = folder.parent == latest.parent and (latest.is_symlink() or not latest.exists())
    if job.plan["command"].startswith("./run_all.sh") and code in (0, 1) and free:
        with contextlib.suppress(OSError):
            latest.unlink(missing_ok=True)
            latest.symlink_to(folder.name)
    if stop.requests:
        shown = f"results/{folder.name}" if folder.parent == latest.parent else folder
        say(f"interrupted: {job.again} --output {shlex.quote(str(shown))} finishes it")
        return stop.code
    return code


# --- studies --------------------------------------------------------------------------------------


def run_study(
    kind: str, planned: list[rows.Planned], arguments: list[str], options: argparse.Namespace
) -> int:
    """Run the rows of a study in a folder, new or continued with more rows. Returns the exit code. `options`
    are those of `add_options`. Raises Skip, one line, for a folder that cannot be used."""
    name, words = f"python -m ladder.{kind}", sys.argv[1:]
    facts = rows.check(
        arguments, max(row.gpus for row in planned), limit_s=options.step_timeout or rows.LIMIT_S, name=name
    )
    planned = [row._replace(arguments=rows.with_pinned(row.arguments, facts["pinned"])) for row in planned]
    plan = plan_of(kind, planned, facts, options.step_timeout, portable_command(name, words))
    return execute(Job(plan, planned, facts, resume_command(name, words)), options.output)


def resume_command(name: str, words: list[str]) -> str:
    """The command that finishes a run, without its folder."""
    return shlex.join([*name.split(), *without(words, ["--output"])])


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every run."""
    text = "of the run: a new one, or one to continue (default: a new one under results/)"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=text)
    text = "seconds for a row (default: 1800)"
    parser.add_argument("--step-timeout", type=positive_int, metavar="S", help=text)
