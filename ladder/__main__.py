"""The ladder: every step in a process of its own, the roofs of the machine, the report. See ./run_all.sh --help."""

import contextlib
import datetime
import fcntl
import itertools
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run_all.sh starts this file by its path, from any folder

from common import record as schema  # noqa: E402
from common.text import OneLineParser, portable_command, positive_int, run_command, say  # noqa: E402
from ladder import process, runs  # noqa: E402


def build_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="run_all.sh",
        usage="./run_all.sh [OPTION ...] [ARGUMENT ...]",
        description="Runs the steps with the ARGUMENTs (python 0_baseline.py --help lists them), measures a GPU's\n"
        "roofs, prints a table, and writes it with all records and logs to a new folder under results/.",
        epilog="PYTHON=INTERPRETER       use this Python, and install nothing\n"
        "./run_all.sh --setup     only prepare Python, and print the interpreter that will be used\n\n"
        "Exit code: 0 when every row is ok or skipped, 2 for bad arguments, 130 after Ctrl-C, 1 otherwise.",
    )
    parser.add_argument("--only", metavar="N,N", help="these steps alone, for example 3,4")
    parser.add_argument("--repeat", type=positive_int, default=1, metavar="N", help="passes over all rows")
    text = "N processes a row, each with its own GPU (on a CPU: its share of the cores) and its own batch"
    parser.add_argument("--gpus", type=positive_int, metavar="N", help=text)
    parser.add_argument("--parallel", choices=runs.PARALLEL, help="how to share the model (--scaling: both, else ddp)")
    text = "each row on 1, 2, 4, ... GPUs, up to --gpus or all (on a CPU: 1 and 2 processes)"
    parser.add_argument("--scaling", action="store_true", help=text)
    parser.add_argument("--sweep", action="store_true", help="each row at several widths and lengths")
    parser.add_argument("--peers", action="store_true", help="also run peers/*.py, on the same workload")
    parser.add_argument("--no-roofs", action="store_true", help="do not measure copies and matrix products")
    text = "finish an interrupted run, with its own options: run its rows that are not ok"
    parser.add_argument("--resume", type=Path, metavar="DIR", help=text)
    parser.add_argument("--step-timeout", type=positive_int, metavar="S", help="seconds for a row (default: 1800)")
    return parser


def plan(argv: list[str], parser: OneLineParser, fresh: bool) -> tuple[dict, list[runs.Planned], dict]:
    """The plan that a run folder holds from its first row on, its rows, and what its arguments mean here. From `argv`,
    --resume makes the same plan again. Exits where options contradict each other: nobody's option is ignored."""
    argv = [part for word in argv for part in (word.split("=", 1) if word.startswith("--data=") else [word])]
    argv = [str(Path(b).absolute()) if a == "--data" else b for a, b in zip(["", *argv], argv, strict=False)]
    given, arguments = parser.parse_known_args(argv)
    kind, several = "scaling" if given.scaling else "sweep" if given.sweep else "ladder", given.scaling or given.gpus
    numbers = [name.partition("_")[0] for name in runs.scripts()]
    only = given.only is None or set(given.only.split(",")) <= {*numbers}
    for wrong, why in (
        (given.scaling and given.sweep, "--scaling and --sweep exclude each other"),
        (not only, f"--only {given.only}: give some of {','.join(numbers)}"),
        (given.peers and (several or kind != "ladder"), "--peers excludes --gpus, --scaling and --sweep"),
        (given.repeat > 1 and kind != "ladder", "--repeat is for a ladder"),
        ((given.gpus or given.parallel) and kind == "sweep", "a sweep runs on one GPU"),
        (kind == "sweep" and given.only and "," not in given.only, "--sweep compares steps: give --only two or more"),
        (kind == "sweep" and fresh and re.search("--(n-|seq|batch)", str(arguments)), "--sweep chooses the shape"),
        (given.parallel and not several, "--parallel is for several processes: add --gpus N"),
        (any(word.startswith("--output") for word in arguments), "--output is chosen here: a folder under results/"),
    ):
        if wrong:
            parser.error(why)
    gpus = given.gpus or 1 if kind == "ladder" else 1
    shared = ["--parallel", given.parallel] if given.parallel and kind == "ladder" else []
    facts = runs.check(arguments + shared, gpus)
    if (given.gpus or 1) > (there := facts["gpus"] or os.cpu_count() or 1):
        parser.error(f"--gpus {given.gpus}: there {'is' if there == 1 else 'are'} {there} here")
    pinned = facts["pinned"] if fresh else []  # a resumed run has them already
    arguments += [*pinned, *shared, *([] if kind == "sweep" else ["--profile"])]
    rows = runs.ladder(arguments, runs.scripts(given.only), gpus)
    if kind == "scaling":
        most = given.gpus or facts["gpus"] or 2  # a CPU runs two processes
        if most < 2:
            parser.error("--scaling needs two GPUs or more; with --device cpu it runs two processes on the CPU")
        rows = runs.scaling(rows, most, given.parallel, facts["device_type"])
    elif kind == "sweep":
        rows = runs.sweep(rows, facts["device_type"])
    else:
        peers = [f"peers/{path.name}" for path in sorted(ROOT.glob("peers/*.py")) if given.peers]
        rows = runs.repeated(rows + runs.ladder(arguments, peers), given.repeat)
    made = {
        "kind": kind,
        "command": portable_command("./run_all.sh", argv),
        "started_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "workload": facts["workload"],
        "rows": [row._asdict() for row in rows],
        "argv": argv + pinned,
        "limit_s": given.step_timeout or 1800,
        "roofs": kind != "scaling" and gpus == 1 and not given.no_roofs and facts["device_type"] != "cpu",
        "schema_version": schema.SCHEMA_VERSION,
    }
    return made, rows, facts


class Ladder:
    """One run under way."""

    def __init__(self, folder: Path, made: dict, facts: dict, stop: process.Stop):
        self.folder, self.made, self.facts, self.stop = folder, made, facts, stop

    def run(self, command: list[str], log: Path, name: str, gpus: int = 1) -> tuple[str, str] | None:
        variables = process.environment(self.facts["device_type"], gpus)
        return process.run(command, log, self.made["limit_s"], self.stop, name, variables)

    def predict(self) -> None:
        """Measure roofs, and predict all rows from them."""
        command = process.module_command("ladder.predict", "--plan", str(self.folder))
        ended = self.run(command, self.folder / "roofs.log", "roofs and predictions")
        if ended and not self.stop.requests:
            say(f"no predictions: {ended[1]}")

    def recorded(self, row: runs.Planned) -> dict:
        found = schema.read_object(self.folder / row.output)
        rows = found.get("rows") if found.get("schema_version") == schema.SCHEMA_VERSION else None
        return rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}

    def run_row(self, row: runs.Planned, place: str) -> None:
        """Run one script, and print what came of it. One that leaves no record gets one that holds how it ended.
        `place` tells which of all rows it is."""
        record, name = self.folder / row.output, row.output.removesuffix(".json")
        needed, free = self.facts["needed_bytes"].get(row.script, 0), self.facts["free_bytes"]
        record.parent.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)
        if self.facts["device_type"] == "cpu" and self.made["kind"] == "ladder" and free and needed > free:
            reason = f"needs about {needed / 2**30:.0f} GiB of {free / 2**30:.0f} free: try a smaller --batch-size"
            ended = "oom", reason
        else:
            log, words = record.with_suffix(".log"), [*row.arguments, "--output", str(record)]
            ended = self.run(process.script_command(row.script, words, row.gpus), log, f"{place}: {name}", row.gpus)
        found = self.recorded(row)
        if not found or (found["status"] == "failed" and ended and ended[0] == "oom"):  # its peers failed
            failed = schema.Row(Path(row.script).stem, *(ended or ("failed", "left no record")))
            schema.write_json(record, schema.Run(self.made["command"], None, None, None, [failed]))
            found = vars(failed)
        status, reason = found["status"], found["reason"]
        took = f"{statistics.median(found['step_ms']):,.1f} ms a step" if status == "ok" else f"{status}: {reason}"
        say(f"{name}: {took}")


def new_folder(kind: str) -> Path:
    """A folder under results/ that no other run has, also where two start in the same second."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{kind}"
    for k in itertools.count(1):
        folder = ROOT / "results" / (name if k == 1 else f"{name}-{k}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def locked(folder: Path):
    """A file that holds the lock of a run folder until this process ends; None where another process has it."""
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return None
    return lock


def finish(folder: Path, stop: process.Stop) -> int:
    """Print and write the report; returns the exit code."""
    shown = f"results/{folder.name}" if folder.parent == ROOT / "results" else str(folder)
    say("")
    ended = subprocess.run(process.module_command("report", str(folder)), cwd=ROOT, start_new_session=True)
    latest = ROOT / "results" / "latest"
    if ended.returncode != 2 and folder.parent == latest.parent and (latest.is_symlink() or not latest.exists()):
        with contextlib.suppress(OSError):
            latest.unlink(missing_ok=True)
            latest.symlink_to(folder.name)
    if stop.requests:
        say(f"interrupted: ./run_all.sh --resume {shown} finishes it")
        return 130
    return ended.returncode


def main(argv: list[str]) -> int:
    parser, stop, before = build_parser(), process.Stop(), {}
    given, others = parser.parse_known_args(argv)
    if resumed := given.resume:
        alone = vars(parser.parse_args([])) | {"resume": resumed, "step_timeout": given.step_timeout}
        if others or vars(given) != alone:
            parser.error(f"--resume takes its options from {resumed}: give no others but --step-timeout")
        before = schema.read_object(resumed / schema.PLAN)
        if not isinstance(before.get("argv"), list):
            parser.error(f"--resume {resumed} holds no {schema.PLAN} that can be read")
        argv = [*map(str, before["argv"]), *(f"--step-timeout={s}" for s in [given.step_timeout] if s)]
    made, rows, facts = plan(argv, parser, fresh=not before)
    if before and any(before.get(name) != made[name] for name in ("workload", "rows", "schema_version")):
        parser.error(f"--resume {resumed}: its work has changed: the scripts, the text or this machine's defaults")
    folder = resumed.resolve() if before else new_folder(made["kind"])
    if not before:
        schema.write_json(folder / schema.PLAN, made)
    lock = locked(folder)
    if lock is None:
        parser.error(f"{folder} is in use by another run")
    say("\n".join(facts["said"]))
    stop.listen()
    ladder = Ladder(folder, made, facts, stop)
    if made["roofs"] and not (folder / schema.PREDICTED).exists():
        ladder.predict()
    for k, row in enumerate(rows, 1):
        if not (stop.requests or ladder.recorded(row).get("status") == "ok"):
            ladder.run_row(row, f"row {k} of {len(rows)}")
    return finish(folder, stop)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]), "run_all.sh")
