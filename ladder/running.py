"""A plan under way: its folder, its rows one after the other, and the report at the end."""

import contextlib
import datetime
import fcntl
import hashlib
import itertools
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TextIO

from common import record as schema
from common.record import code_sha256
from common.text import Skip, say
from ladder import patches, process, runs
from ladder.process import ROOT

LIMIT_S = 1800  # of a row, by default
LOCK = ".lock"


class Running:
    """One run under way."""

    def __init__(self, folder: Path, plan: dict, facts: dict, stop: process.Stop):
        self.folder, self.plan, self.facts, self.stop = folder, plan, facts, stop

    def run(self, command: list[str], log: Path, name: str, gpus: int = 1) -> tuple[str, str] | None:
        variables = process.environment(self.facts["device_type"], gpus)
        return process.run(command, log, self.plan["limit_s"], self.stop, name, variables)

    def predict(self) -> None:
        """Measure roofs, and predict all rows from them."""
        command = process.module_command("ladder.predict", "--plan", str(self.folder))
        ended = self.run(command, self.folder / "roofs.log", "roofs and predictions")
        if ended and not self.stop.requests:
            say(f"no predictions: {ended[1]}")

    def recorded(self, row: runs.Planned) -> dict:
        """The row that a script left; empty where there is none that can be read."""
        record = schema.read_object(self.folder / row.output)
        rows = record.get("rows") if record.get("schema_version") == schema.SCHEMA_VERSION else None
        return rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}

    def run_row(self, row: runs.Planned, place: str) -> None:
        """Run one script, and print what came of it. One that leaves no record gets one that holds how it
        ended. `place` tells which of all rows it is."""
        record, name = self.folder / row.output, row.output.removesuffix(".json")
        record.parent.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)
        ended = self.too_large(row) or self.run_script(row, record, f"{place}: {name}")
        left = self.recorded(row)
        if not left or (left["status"] == "failed" and ended and ended[0] == "oom"):  # its peers failed
            failed = schema.Row(Path(row.script).stem, *(ended or ("failed", "left no record")))
            schema.write_json(record, schema.Run(self.plan["command"], None, None, None, [failed]))
            left = vars(failed)
        status, reason = left["status"], left["reason"]
        took = (
            f"{statistics.median(left['step_ms']):,.1f} ms a step"
            if status == "ok"
            else f"{status}: {reason}"
        )
        say(f"{name}: {took}")

    def too_large(self, row: runs.Planned) -> tuple[str, str] | None:
        """Status and reason of a row that a CPU's free memory is not enough for: there the system would end
        it."""
        needed, free = self.facts["needed_bytes"].get(row.script, 0), self.facts["free_bytes"]
        if self.facts["device_type"] == "cpu" and self.plan["kind"] == "ladder" and free and needed > free:
            needs = f"needs about {needed / 2**30:.0f} GiB of {free / 2**30:.0f} free"
            return "oom", f"{needs}: try a smaller --batch-size"
        return None

    def run_script(self, row: runs.Planned, record: Path, name: str) -> tuple[str, str] | None:
        """Run a row's script, or a patched copy of it. Returns how it ended, where it did not end well."""
        words = [*row.arguments, "--output", str(record)]
        log = record.with_suffix(".log")
        if row.patch is None:
            return self.run(process.script_command(ROOT / row.script, words, row.gpus), log, name, row.gpus)
        with tempfile.TemporaryDirectory() as folder:
            try:
                script = patches.write_script(row.patch, row.script, Path(folder))
            except Skip as error:
                return "failed", str(error)
            return self.run(process.script_command(script, words, row.gpus), log, name, row.gpus)


def new_folder(kind: str) -> Path:
    """A folder under results/ that no other run has, also where two start in the same second."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{kind}"
    for k in itertools.count(1):
        folder = ROOT / "results" / (name if k == 1 else f"{name}-{k}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
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


def plan_of(
    kind: str, command: str, rows: list[runs.Planned], facts: dict, limit_s: int | None, **more
) -> dict:
    """The plan that a run folder holds from its first row on."""
    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    known = {"kind": kind, "command": command, "started_at": started_at, "workload": facts["workload"]}
    known |= {"rows": [row._asdict() for row in rows], "limit_s": limit_s or LIMIT_S, "roofs": False}
    return known | more | {"schema_version": schema.SCHEMA_VERSION}


def execute(folder: Path, plan: dict, rows: list[runs.Planned], facts: dict, finishes: str) -> int:
    """Run all rows of a plan that have no ok record in `folder`, and report. Returns the exit code;
    `finishes` is the command that finishes the run where the user interrupts it. Raises Skip for a folder
    that another run has."""
    lock = locked(folder)
    if lock is None:
        raise Skip(f"{folder} is in use by another run")
    schema.write_json(folder / schema.PLAN, plan)
    say("\n".join(facts["said"]))
    stop = process.Stop()
    stop.listen()
    running = Running(folder, plan, facts, stop)
    if plan["roofs"] and not (folder / schema.PREDICTED).exists():
        running.predict()
    for k, row in enumerate(rows, 1):
        if not (stop.requests or running.recorded(row).get("status") == "ok"):
            running.run_row(row, f"row {k} of {len(rows)}")
    return finish(folder, stop, finishes, is_latest="argv" in plan)


def finish(folder: Path, stop: process.Stop, finishes: str, is_latest: bool) -> int:
    """Print and write the report; returns the exit code. With `is_latest`, results/latest leads to this
    folder."""
    say("")
    ended = subprocess.run(process.module_command("report", str(folder)), cwd=ROOT, start_new_session=True)
    latest = ROOT / "results" / "latest"
    free = folder.parent == latest.parent and (latest.is_symlink() or not latest.exists())
    if is_latest and ended.returncode != 2 and free:
        with contextlib.suppress(OSError):
            latest.unlink(missing_ok=True)
            latest.symlink_to(folder.name)
    if stop.requests:
        say(f"interrupted: {finishes} finishes it")
        return 130
    return ended.returncode


def run_study(
    kind: str,
    rows: list[runs.Planned],
    arguments: list[str],
    output: Path | None,
    command: str,
    limit_s: int | None,
) -> int:
    """Run the rows of a study in a folder, new or continued with more rows. Returns the exit code.

    Raises Skip, one line, for a folder that cannot be used or holds something else, and where its rows are of
    another workload, machine or code.
    """
    try:
        folder = output.resolve() if output else new_folder(kind)
        folder.mkdir(parents=True, exist_ok=True)
        held = {path.name for path in folder.iterdir()} - {LOCK}
    except (OSError, RuntimeError) as error:
        raise Skip(f"--output {output} cannot be used: {error}") from None
    before = schema.read_object(folder / schema.PLAN)
    if held and before.get("kind") != kind:
        raise Skip(f"--output {output} holds files that are of no study of {kind}")
    facts = runs.check(arguments)
    same = {
        "device": facts["device"],
        "code": code_of_study(),
        "arguments": arguments,
        "workload": facts["workload"],
    }
    if before and before.get("same") != same:
        raise Skip(f"--output {output} holds rows of another workload, machine or code")
    known = [checked(row, output) for row in before.get("rows", [])]
    new = [row._replace(arguments=[*facts["pinned"], *row.arguments]) for row in rows]
    every = list({row.output: row for row in [*known, *new]}.values())
    commands = dict.fromkeys([*filter(None, str(before.get("command") or "").split(" && ")), command])
    plan = plan_of(kind, " && ".join(commands), every, facts, limit_s, same=same)
    return execute(folder, plan, every, facts, f"the same command with --output {folder}")


def code_of_study() -> str:
    """What the rows of a study depend on: the scripts, common/, peers and patches."""
    others = sorted([*ROOT.glob("peers/[a-z]*.py"), *ROOT.glob("anatomy/variants/*.patch")])
    return code_sha256(ROOT) + hashlib.sha256(b"".join(path.read_bytes() for path in others)).hexdigest()[:16]


def checked(row: object, output: Path | None) -> runs.Planned:
    """A row of an earlier plan. Raises Skip for one that no study of this checkout has made."""
    try:
        planned = runs.Planned(**row)
        place, name = Path(planned.output).parts
        peers = [f"peers/{path.name}" for path in ROOT.glob("peers/[a-z]*.py")]
        fits = planned.script in [*runs.scripts(), *peers] and name == f"{Path(planned.script).stem}.json"
        fits = (
            fits
            and place != ".."
            and planned.gpus == 1
            and (planned.patch is None or planned.patch in patches.variants())
        )
        if fits and all(isinstance(word, str) and word.isprintable() for word in planned.arguments):
            return planned
    except (TypeError, ValueError):
        pass
    raise Skip(f"--output {output} holds a {schema.PLAN} that no study has written")
