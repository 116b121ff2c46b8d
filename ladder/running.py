"""A plan under way: its folder, its rows one after the other, and the report at the end."""

import argparse
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
from typing import NamedTuple, TextIO

from common import record as schema
from common.fingerprint import code_sha256, sha256_of
from common.text import Skip, positive_int, say
from ladder import patches, process, runs
from ladder.process import ROOT

LOCK = ".lock"


class Job(NamedTuple):
    """What is to run."""

    plan: dict  # what the run folder holds of it from the first row on
    rows: list[runs.Planned]
    facts: dict  # what the arguments mean on this machine: see ladder/facts.py


class Running:
    """One run under way."""

    def __init__(self, folder: Path, job: Job, stop: process.Stop):
        self.folder, self.plan, self.facts, self.stop = folder, job.plan, job.facts, stop

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
        content = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
        times = content.get("step_ms")
        are_times = isinstance(times, list) and times and all(isinstance(ms, (int, float)) for ms in times)
        return content if are_times or content.get("status") in ("skipped", "oom", "failed") else {}

    def decides(self, row: runs.Planned) -> bool:
        """Whether the rows behind a row are made from it: those of a model, by their first pass."""
        return row.script == runs.MODEL_SCRIPT and not row.output.startswith("pass-")

    def forget(self, rows: list[runs.Planned]) -> None:
        """Remove the records of rows that were made from other rows than there are now."""
        for row in rows:
            (self.folder / row.output).unlink(missing_ok=True)

    def run_row(self, row: runs.Planned, place: str) -> None:
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


def plan_of(kind: str, rows: list[runs.Planned], facts: dict, limit_s: int | None) -> dict:
    """The plan that a run folder holds from its first row on; its command is still missing."""
    return {
        "schema_version": schema.SCHEMA_VERSION,
        "kind": kind,
        "started_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "workload": facts["workload"],
        "seen": facts.get("seen", {}),
        "rows": [row._asdict() for row in rows],
        "limit_s": limit_s or runs.LIMIT_S,
        "roofs": False,
    }


def execute(folder: Path, job: Job, finishes: str) -> int:
    """Run all rows of a job that have no ok record in `folder`, and report. Returns the exit code; `finishes`
    is the command that finishes the run where the user interrupts it. Raises Skip for a folder that another
    run has."""
    lock = locked(folder)
    if lock is None:
        raise Skip(f"{folder} is in use by another run")
    schema.write_json(folder / schema.PLAN, job.plan)
    say("\n".join([*job.facts["said"], *told_of_limit(job)]))
    stop = process.Stop()
    stop.listen()
    running = Running(folder, job, stop)
    if job.plan["roofs"] and not (folder / schema.PREDICTED).exists():
        running.predict()
    recorded = [row for row in job.rows if running.recorded(row).get("status") == "ok"]
    if recorded:
        say(f"{len(recorded)} of {len(job.rows)} rows are recorded already")
    for k, row in enumerate(job.rows, 1):
        if not stop.requests and running.recorded(row).get("status") != "ok":
            running.run_row(row, f"row {k} of {len(job.rows)}")
            if running.decides(row) and running.recorded(row).get("status") == "ok":
                running.forget(job.rows[k:])
    return finish(folder, stop, finishes, is_latest="argv" in job.plan)


def told_of_limit(job: Job) -> list[str]:
    """That a row takes longer than it may, where that is known beforehand."""
    if job.facts.get("row_s", 0) <= job.plan["limit_s"]:
        return []
    return [f"A row ends after {job.plan['limit_s']:,} s (--step-timeout). A smaller shape shows the same"]


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
    kind: str, rows: list[runs.Planned], arguments: list[str], options: argparse.Namespace, command: str
) -> int:
    """Run the rows of a study in a folder, new or continued with more rows. Returns the exit code. `options`
    are those of `add_options`.

    Raises Skip, one line, for a folder that cannot be used or holds something else, and where its rows are of
    another workload, machine or code.
    """
    limit_s = options.step_timeout or runs.LIMIT_S
    most = max(row.gpus for row in rows)
    facts = runs.check(arguments, most, limit_s=limit_s, name=f"python -m anatomy.{kind}")
    folder, before = study_folder(kind, options.output)
    same = {"device": facts["device"], "code": code_of_study(), "arguments": arguments}
    same["workload"] = facts["workload"]
    if before and comparable(before.get("same")) != comparable(same):
        raise Skip(f"--output {options.output} holds rows of another workload, machine or code")
    rows = [row._replace(arguments=[*facts["pinned"], *row.arguments]) for row in rows]
    recorded = before.get("rows")
    recorded = recorded if isinstance(recorded, list) else []
    rows = [*(checked(row, options.output) for row in recorded), *rows]
    rows = list({row.output: row for row in rows}.values())
    earlier = [text for text in str(before.get("command") or "").split(" && ") if text]
    commands = " && ".join(dict.fromkeys([*earlier, command]))
    plan = plan_of(kind, rows, facts, options.step_timeout) | {"command": commands, "same": same}
    plan["started_at"] = str(before.get("started_at") or plan["started_at"])
    return execute(folder, Job(plan, rows, facts), f"the same command with --output {folder}")


def comparable(same: object) -> object:
    """What all rows of a study have in common: not how many GPUs they run on."""
    if not isinstance(same, dict) or not isinstance(same.get("workload"), dict):
        return same
    left_out = ("gpus", "parallel", "warmup")
    return same | {
        "workload": {name: value for name, value in same["workload"].items() if name not in left_out}
    }


OF_A_STUDY = "of the study, new or continued (default: a new one under results/)"


def add_options(parser: argparse.ArgumentParser, output: str = OF_A_STUDY) -> None:
    """The options of every study, with the help of `--output`."""
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=output)
    text = "seconds for a row (default: 1800)"
    parser.add_argument("--step-timeout", type=positive_int, metavar="S", help=text)


def study_folder(kind: str, output: Path | None) -> tuple[Path, dict]:
    """The folder of a study, and its plan where it is continued. Raises Skip for one that holds another
    thing."""
    try:
        folder = output.resolve() if output else new_folder(kind)
        folder.mkdir(parents=True, exist_ok=True)
        files = {path.name for path in folder.iterdir()} - {LOCK}
    except (OSError, RuntimeError) as error:
        raise Skip(f"--output {output} cannot be used: {error}") from None
    before = schema.read_object(folder / schema.PLAN)
    if files and before.get("kind") != kind:
        raise Skip(f"--output {output} holds files that are of no study of {kind}")
    return folder, before


def code_of_study() -> str:
    """What the rows of a study depend on: what a timed step runs through, the held-out losses, peers and
    patches."""
    others = [ROOT / "common" / "benchmark.py", *(ROOT / peer for peer in runs.peers())]
    variants = b"".join(path.read_bytes() for path in sorted(ROOT.glob("anatomy/variants/*.patch")))
    return code_sha256(ROOT) + sha256_of(others) + hashlib.sha256(variants).hexdigest()[:16]


def checked(row: object, output: Path | None) -> runs.Planned:
    """A row of an earlier plan. Raises Skip for one that no study of this checkout has made."""
    try:
        planned = runs.Planned(**row)
        place, name = Path(planned.output).parts
        known = (
            planned.script in [*runs.scripts(), *runs.peers()]
            and name == f"{Path(planned.script).stem}.json"
            and place not in ("..", "/")
            and place.isprintable()
            and planned.gpus in {int(head["GPUs"]) for head in patches.variants().values()}
            and (planned.patch is None or planned.patch in patches.variants())
            and all(isinstance(word, str) and word.isprintable() for word in planned.arguments)
        )
    except (TypeError, ValueError):
        known = False
    if not known:
        raise Skip(f"--output {output} holds a {schema.PLAN} that no study has written")
    return planned
