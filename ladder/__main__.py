"""The ladder: every step in a process of its own, the roofs of the machine, the report. See ./run_all.sh --help."""

import argparse
import contextlib
import datetime
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run_all.sh starts this file by its path, from any folder

from common import record as schema  # noqa: E402
from common.text import OneLineParser, Progress, one_line, portable_command, positive_int, run_command, say  # noqa: E402
from ladder import process, runs  # noqa: E402

KINDS = ("ladder", "scaling", "sweep")


def build_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="run_all.sh",
        usage="./run_all.sh [OPTION ...] [ARGUMENT ...]",
        description="Runs the five steps with the ARGUMENTs (python 0_baseline.py --help lists them), measures the\n"
        "machine's roofs, prints a table, and writes it with all records and logs to a new folder under results/.",
        epilog="STEP_TIMEOUT=SECONDS     the longest that one row may take (default 1800)\n"
        "PYTHON=INTERPRETER       use this Python, and install nothing\n"
        "./run_all.sh --setup     only prepare Python, and print the interpreter that will be used\n\n"
        "Exit code: 0 when every row is ok, skipped or left out by --only, 2 for bad arguments, 130 after Ctrl-C,\n"
        "1 otherwise.",
    )
    parser.add_argument("--only", metavar="N,N", help="these steps only, for example 3,4; the others are `not run`")
    parser.add_argument("--repeat", type=positive_int, default=1, metavar="N", help="passes over all rows")
    text = "N processes a row, each with its own GPU (on a CPU: its share of the cores) and its own batch"
    parser.add_argument("--gpus", type=positive_int, metavar="N", help=text)
    text = "how they share the model (default: ddp; with --scaling both)"
    parser.add_argument("--parallel", choices=runs.PARALLEL, help=text)
    text = "each row on 1, 2, 4, ... GPUs, up to --gpus or all (on a CPU: 1 and 2 processes)"
    parser.add_argument("--scaling", action="store_true", help=text)
    parser.add_argument("--sweep", action="store_true", help="each row at several widths and lengths")
    parser.add_argument("--peers", action="store_true", help="also run peers/*.py, on the same workload")
    parser.add_argument("--no-roofs", action="store_true", help="do not measure copies and matrix products")
    text = "finish an interrupted run, with its own options: run its rows that are not ok"
    parser.add_argument("--resume", type=Path, metavar="DIR", help=text)
    return parser


def time_limit(parser: OneLineParser) -> int:
    try:
        return positive_int(os.environ.get("STEP_TIMEOUT", "1800"))
    except argparse.ArgumentTypeError as error:
        parser.error(f"STEP_TIMEOUT: {error}")


def kind_of(given: argparse.Namespace, arguments: list[str], parser: OneLineParser) -> str:
    """The kind of the run. Exits where options contradict each other: nobody's option is ignored."""
    kind, several = "scaling" if given.scaling else "sweep" if given.sweep else "ladder", given.scaling or given.gpus
    for wrong, why in (
        (given.scaling and given.sweep, "--scaling and --sweep exclude each other"),
        (
            given.only is not None and not set(given.only.split(",")) <= set("01234"),
            f"--only {given.only}: give some of 0,1,2,3,4",
        ),
        (given.peers and (several or kind != "ladder"), "--peers run on one GPU, in a ladder"),
        (given.repeat > 1 and kind != "ladder", "--repeat is for a ladder"),
        ((given.gpus or given.parallel) and kind == "sweep", "a sweep runs on one GPU"),
        (given.parallel and not several, "--parallel is for several processes: add --gpus N"),
        (any(word.startswith("--output") for word in arguments), "--output is chosen here: a folder under results/"),
    ):
        if wrong:
            parser.error(why)
    return kind


def new_plan(given: argparse.Namespace, arguments: list[str], argv: list[str], parser: OneLineParser):
    """The plan of a new run, and what its arguments mean here."""
    kind, gpus = kind_of(given, arguments, parser), given.gpus or 1
    arguments = [part for word in arguments for part in (word.split("=", 1) if word[:7] == "--data=" else [word])]
    if "--data" in arguments[:-1]:  # a resumed run finds it from any folder
        place = arguments.index("--data") + 1
        arguments[place] = str(Path(arguments[place]).absolute())
    arguments += [] if kind == "sweep" or "--profile" in arguments else ["--profile"]
    shared = ["--parallel", given.parallel] if given.parallel and kind == "ladder" else []
    facts = runs.check(arguments + shared, gpus if kind == "ladder" else 1)
    arguments += facts["pinned"] + shared
    rows = runs.ladder(arguments, runs.scripts(), given.only, gpus if kind == "ladder" else 1)
    if kind == "scaling":
        most = given.gpus or facts["gpus"] or 2  # a CPU runs two processes
        if most < 2:
            parser.error("--scaling needs two GPUs or more; with --device cpu it runs two processes on the CPU")
        rows = runs.scaling(rows, most, given.parallel, given.only, facts["device_type"])
    elif kind == "sweep":
        rows = runs.sweep(rows, facts["device_type"])
    else:
        peers = [f"peers/{path.name}" for path in sorted(ROOT.glob("peers/*.py")) if given.peers]
        rows = runs.repeated(rows + runs.ladder(arguments, peers, None), given.repeat)
    for note in facts["notes"]:
        say(note)
    command = portable_command("./run_all.sh", argv)
    roofs = kind in ("ladder", "sweep") and not given.no_roofs and gpus == 1
    return schema.Plan(kind, command, now().isoformat(timespec="seconds"), facts["workload"], rows, roofs), facts


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def new_folder(plan: schema.Plan, parser: OneLineParser) -> Path:
    """A new folder below results/, named by the time and the kind, with the plan. Exits where it cannot be written."""
    try:
        (ROOT / "results").mkdir(exist_ok=True)
        folder = ROOT / "results" / f"{now():%Y%m%d-%H%M%S-%f}-{plan.kind}"
        folder.mkdir()
        schema.write_json(folder / schema.PLAN, plan)
    except OSError as error:
        parser.exit(1, f"run_all.sh: error: cannot write to results/: {error.strerror or error}\n")
    return folder


def resumed_plan(folder: Path, parser: OneLineParser) -> tuple[schema.Plan, dict]:
    """The plan of an ended run. Refuses one that cannot be read, that names anything but this project's scripts, or
    whose workload has changed."""
    try:
        import msgspec  # which run_all.sh installs

        plan = msgspec.json.decode(
            (folder / schema.PLAN).read_bytes() if (folder / schema.PLAN).is_file() else b"", type=schema.Plan
        )
    except (ImportError, OSError, ValueError, RecursionError) as error:
        parser.error(f"--resume {folder} holds no {schema.PLAN} that can be read: {one_line(error, 100)}")
    if (
        not plan.rows
        or not all(map(runs.is_safe, plan.rows))
        or not plan.workload
        or plan.kind not in KINDS
        or plan.schema_version != schema.SCHEMA_VERSION
    ):
        parser.error(f"--resume {folder}: its plan names other files than this project's scripts and their records")
    try:
        facts = runs.check(plan.rows[0].arguments, plan.rows[0].gpus)
    except (ValueError, IndexError):
        parser.error(f"--resume {folder}: its plan holds arguments that no step has")
    if plan.kind == "ladder" and facts["workload"] != asdict(plan.workload):
        parser.error(f"--resume {folder}: its workload has changed, the text or this machine's defaults")
    return plan, facts


class Ladder:
    """One run under way."""

    def __init__(self, folder: Path, plan: schema.Plan, facts: dict, limit_s: int, stop: process.Stop):
        self.folder, self.plan, self.facts, self.limit_s, self.stop = folder, plan, facts, limit_s, stop
        self.progress = Progress("ladder")

    def run_all(self) -> None:
        """Roofs, predictions from them, then every row that is not done."""
        if self.plan.roofs and not (self.folder / schema.PREDICTED).exists():
            command = process.module_command("ladder.predict", "--plan", str(self.folder))
            ended = self.run(command, self.folder / "roofs.log", "roofs and predictions")
            if ended and not self.stop.requests:
                say(f"no predictions: {ended[1]}")
        for row in self.plan.rows:
            if not (row.left_out or self.stop.requests or self.is_done(row)):
                self.run_row(row)

    def run(self, command: list[str], log: Path, name: str, gpus: int = 1) -> tuple[str, str] | None:
        self.progress.name, self.progress.began = name, time.monotonic()
        variables = process.environment(self.facts["device_type"], gpus)
        return process.run(command, log, self.limit_s, self.stop, self.progress, variables)

    def is_done(self, row: schema.PlannedRow) -> bool:
        """Whether the row's record holds a whole measurement of its own script."""
        if not (self.folder / row.output).exists():
            return False
        import msgspec  # which run_all.sh installs

        try:
            run = msgspec.convert(schema.read_object(self.folder / row.output), schema.Run)
        except (msgspec.ValidationError, OverflowError):
            return False
        found, of_work = run.rows[0] if run.rows else schema.Row(""), run.workload in (None, self.plan.workload)
        whole = found.status == "ok" and found.step == Path(row.script).stem and found.step_ms
        return bool(whole) and run.schema_version == schema.SCHEMA_VERSION and (of_work or self.plan.kind != "ladder")

    def run_row(self, row: schema.PlannedRow) -> None:
        """Run one script, and print what came of it. One that leaves no record gets one that holds how it ended."""
        record, name = self.folder / row.output, row.output.removesuffix(".json")
        needed, free = self.facts["needed_bytes"].get(row.script, 0), self.facts["free_bytes"]
        try:
            record.parent.mkdir(parents=True, exist_ok=True)
            record.unlink(missing_ok=True)
            if self.facts["device_type"] == "cpu" and self.plan.kind == "ladder" and free and needed > free:
                reason = f"needs about {needed / 2**30:.0f} GiB of {free / 2**30:.0f} free: try a smaller --batch-size"
                ended = "oom", reason
            else:
                log, words = record.with_suffix(".log"), [*row.arguments, "--output", str(record)]
                ended = self.run(process.script_command(row.script, words, row.gpus), log, name, row.gpus)
            found = schema.row_of(record)
            if not found or (found.get("status") == "failed" and ended and ended[0] == "oom"):  # its peers failed
                failed = schema.Row(Path(row.script).stem, *(ended or ("failed", "left no record")))
                schema.write_json(record, schema.Run(self.plan.command, None, None, None, [failed]))
                found = schema.row_of(record)
            status, reason = found.get("status"), found.get("reason")
            took = f"{statistics.median(found['step_ms']):,.1f} ms a step" if status == "ok" else f"{status}: {reason}"
            say(f"{name}: {took}")
        except OSError as error:
            say(f"{name}: failed: cannot write to {self.folder.name}: {error.strerror or error}")


def finish(folder: Path, stop: process.Stop) -> int:
    """Print and write the report; returns the exit code."""
    shown = f"results/{folder.name}" if folder.parent == ROOT / "results" else str(folder)
    say("")
    ended = subprocess.run(process.module_command("report", str(folder)), cwd=ROOT, start_new_session=True)
    if stop.requests:
        say(f"interrupted: ./run_all.sh --resume {shown} finishes it")
        return 130
    latest = ROOT / "results" / "latest"
    if folder.parent == ROOT / "results" and (latest.is_symlink() or not latest.exists()):
        with contextlib.suppress(OSError):
            latest.unlink(missing_ok=True)
            latest.symlink_to(folder.name)
    return ended.returncode


def main(argv: list[str]) -> int:
    parser, stop = build_parser(), process.Stop()
    given, arguments = parser.parse_known_args(argv)
    limit_s = time_limit(parser)
    if given.resume:
        if len(argv) != (1 if any(word.startswith("--resume=") for word in argv) else 2):
            parser.error(f"--resume takes its options from {given.resume}: give no others")
        folder = given.resume.resolve()
        plan, facts = resumed_plan(folder, parser)
    else:
        plan, facts = new_plan(given, arguments, argv, parser)
        folder = new_folder(plan, parser)
    stop.listen()
    Ladder(folder, plan, facts, limit_s, stop).run_all()
    return finish(folder, stop)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]), "run_all.sh")
