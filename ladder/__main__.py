"""The ladder: every step in a process of its own, the roofs of the machine, the report. See ./run_all.sh --help."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run_all.sh starts this file by its path, from any folder

from common.errors import needs, run_command, smaller_batch  # noqa: E402
from common.record import (  # noqa: E402
    LAUNCHED_ALONE,
    PLAN,
    PREDICTED,
    ROOFS,
    SCHEMA_VERSION,
    Plan,
    Row,
    Run,
    read_object,
    scaling_places,
    write_json,
    write_run,
)
from common.text import OneLineParser, one_line, portable_command, positive_int, say  # noqa: E402
from ladder import process, scaling, shared  # noqa: E402
from ladder.counts import BY_HAND  # noqa: E402
from report.__main__ import report  # noqa: E402

STEPS = "01234"


@dataclass
class Ladder:
    """One run under way: what was planned, what the arguments mean here, and the rows that left no record."""

    folder: Path
    plan: Plan
    facts: dict
    limit_s: int
    stop: process.Stop
    ended: dict[str, Row] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return process.passive_waits(self.facts["device_type"]) | process.share_of_threads(self.plan.gpus)

    def run(self, command: list[str], log: Path, **listeners) -> process.Ended:
        """Run a command with this run's limits. Raises OSError where its log cannot be written."""
        return process.run(command, log, self.limit_s, self.stop, environment=self.environment, **listeners)


def build_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="run_all.sh",
        usage="./run_all.sh [OPTION ...] [ARGUMENT ...]",
        description="Runs the five steps with the ARGUMENTs (python 0_baseline.py --help lists them), measures the\n"
        "machine's roofs, prints a table, and writes it with all records, traces and logs to a new folder under\n"
        "results/. results/latest names the newest run that was not interrupted.",
        epilog="--batch-size max         the largest batch that each step can train, and its speed there (one GPU)\n"
        "STEP_TIMEOUT=SECONDS     the longest that one row may take (default 1800); --sweep has --sweep-minutes\n"
        "PYTHON=INTERPRETER       use this Python, and install nothing\n"
        "./run_all.sh --setup     only prepare Python, and print the interpreter that will be used\n\n"
        "Exit code: 0 when every row is ok, skipped or left out by --only, 2 for bad arguments, 130 after Ctrl-C,\n"
        "1 otherwise.",
    )
    parser.add_argument(
        "--only", metavar="N,N", help="run these steps only, for example 3,4; the other rows are `not run`"
    )
    parser.add_argument(
        "--repeat", type=positive_int, default=1, metavar="N", help="passes over all rows: the table shows the range"
    )
    text = "N processes a row, each with its own GPU (on a CPU: its share of the cores) and its own batch"
    parser.add_argument("--gpus", type=positive_int, metavar="N", help=text)
    text = "how they share the model (default: ddp; with --scaling both, fsdp for steps 3 and 4 or those of --only)"
    parser.add_argument("--parallel", choices=scaling.PARALLEL, help=text)
    text = "each row on 1, 2, 4, ... GPUs, up to --gpus or all (on a CPU: 1 and 2 processes), and its efficiency"
    parser.add_argument("--scaling", action="store_true", help=text)
    parser.add_argument("--resume", type=Path, metavar="DIR", help="finish an interrupted run, with its own options: "
                        "run its rows that are not ok")  # fmt: skip
    text = "the ladder at many widths, batches and lengths, few steps each: where does a step pay?"
    parser.add_argument("--sweep", action="store_true", help=text)
    text = f"about the longest that --sweep may take (default: {shared.SWEEP_MINUTES}); --sweep --resume DIR goes on"
    parser.add_argument("--sweep-minutes", type=positive_int, metavar="N", help=text)
    parser.add_argument("--peers", action="store_true", help="also run peers/*.py, on the same workload")
    parser.add_argument("--no-roofs", action="store_true", help="do not measure copy bandwidth and matrix products")
    parser.add_argument("--no-profile", action="store_true", help="do not profile steps after the timed ones")
    return parser


def time_limit(parser: OneLineParser) -> int:
    text = os.environ.get("STEP_TIMEOUT", "1800")
    try:
        return positive_int(text)
    except argparse.ArgumentTypeError:
        parser.error(f"STEP_TIMEOUT={text} is not a whole number of seconds")


def rows_to_run(only: str | None, peers: bool, parser: OneLineParser) -> tuple[list[str], list[str]]:
    """Names of all rows, and of those that --only leaves out."""
    there = shared.step_names(ROOT)
    scripts = sorted(there + [f"{k}_missing" for k in STEPS if k not in {name[0] for name in there}])
    wanted = shared.steps_named(only, scripts, parser)
    left_out = [name for name in scripts if name not in wanted]
    return scripts + [f"peers/{path.stem}" for path in sorted(ROOT.glob("peers/*.py")) if peers], left_out


def check(arguments: list[str], gpus: int) -> dict:
    """What the arguments mean on this machine, from `python -m ladder.check`. Exits where they are wrong."""
    unwritten = Path(tempfile.gettempdir()) / f"ladder-check-{os.getpid()}.json"  # not the user's own results/
    command = process.module_command("ladder.check", *arguments, "--output", str(unwritten))
    environment = os.environ | process.first_of(gpus)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    if done.returncode:
        killed = f"run_all.sh: error: the check of the arguments was killed by signal {-done.returncode}"
        sys.exit(done.returncode if done.returncode > 0 else killed)
    return json.loads(done.stdout.splitlines()[-1])  # a sitecustomize may print before it


def absolute_data(arguments: list[str]) -> list[str]:
    """The arguments with the path of --data made absolute, so that a resumed run finds it from any folder."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--data=") else [word])]
    return [os.path.abspath(word) if words[k - 1 : k] == ["--data"] else word for k, word in enumerate(words)]


def new_run(given, arguments: list[str], argv: list[str], parser: OneLineParser) -> tuple[Path, dict]:
    """Check everything, make the folder, and write the plan, with --scaling one for each of its places.

    Returns the folder, and plan and facts by place.
    """
    rows, left_out = rows_to_run(given.only, given.peers, parser)
    arguments = absolute_data([word for word in arguments if word != "--profile"])
    arguments += [] if given.no_profile else ["--profile"]
    arguments += ["--parallel", given.parallel] if given.parallel and not given.scaling else []
    gpus = 1 if given.scaling else given.gpus or 1
    facts = check(arguments, gpus)
    for note in facts["notes"]:
        say(note)
    plan = Plan(
        command=portable_command(["./run_all.sh", *argv]),
        arguments=arguments + facts["pinned"],
        rows=rows,
        left_out=left_out,
        roofs=not given.no_roofs,
        repeat=given.repeat,
        gpus=gpus,
        started_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        workload=facts["workload"],
    )
    planned = {"": (plan, facts)}
    try:
        if given.scaling:
            sharded = None if given.only else scaling.SHARDED
            planned = scaling.divide(plan, facts, given.gpus, given.parallel, sharded, check)
    except ValueError as error:
        parser.error(str(error))
    plans = {place: asdict(plan) | {"schema_version": SCHEMA_VERSION} for place, (plan, _) in planned.items()}
    return shared.new_folder(ROOT, "", plans, parser), planned


def resumed_run(folder: Path, parser: OneLineParser) -> tuple[Plan, dict]:
    """The plan of an ended run. Refuses one that cannot be read, or whose workload has changed since."""
    from report.load import RecordError, read_plan  # what run_all.sh installs

    try:
        plan = read_plan(folder)
    except RecordError as error:
        parser.error(f"--resume finds no {PLAN} that can be read: {error}")
    facts = check(plan.arguments, plan.gpus)
    if plan.workload is None or facts["workload"] != asdict(plan.workload):
        parser.error(f"--resume {folder}: its workload has changed since, the text or this machine's defaults")
    return plan, facts


def run_row(ladder: Ladder, name: str, record: Path) -> None:
    """Run one script, or say why it is not tried. A row without a record of its own gets one that says how it ended."""
    script, row = ROOT / f"{name}.py", Row(record.stem)
    needed = ladder.plan.gpus * ladder.facts["by_hand_bytes" if name[0] in BY_HAND else "fused_bytes"]
    free, advice = ladder.facts["free_bytes"], smaller_batch(ladder.facts["workload"]["batch_size"])
    on_cpu = ladder.facts["device_type"] == "cpu"  # there what is free is the memory of the host
    if not script.exists():
        row.status, row.reason = "failed", f"{name[0]}_*.py is missing: restore it with git checkout"
    elif on_cpu and free and needed > free:
        row.status = "oom"
        row.reason = f"{shared.too_large(needed, free)}, {advice}"
    else:
        try:
            row.status, row.reason = run_script(ladder, script, record)
        except OSError as error:
            if record.exists():
                return
            row.status, row.reason = "failed", f"cannot write to {ladder.folder.name}: {error.strerror or error}"
        if row.status is None:
            return
        if row.status == "timeout":
            row.reason += ": raise STEP_TIMEOUT, or take fewer --steps"
        if row.status == "oom" and on_cpu and needed * 2 > (free or 0):  # else the batch is hardly the cause
            row.reason += f": {advice}"
    say(f"{row.step}: {row.status}: {row.reason}")
    ladder.ended[name] = row
    with contextlib.suppress(OSError):  # the row is in ladder.ended
        write_run(record, Run(ladder.plan.command, None, None, ladder.plan.workload, [row]))


def run_script(ladder: Ladder, script: Path, record: Path) -> tuple[str | None, str | None]:
    """Run a script; how it ended if it left no record, and (None, None) if it did. Raises OSError."""
    terminal, log = Terminal(script.stem), record.with_suffix(".log")
    record.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    words = [*ladder.plan.arguments, "--output", str(record)]
    command = process.script_command(script, words, ladder.plan.gpus)
    try:
        ended = ladder.run(command, log, show=terminal.show, progress=terminal.progress)
    finally:
        terminal.clear()
    done = shared.row_of(record).get("status") == "ok"  # what was written before the user stopped it stands
    if done or (record.exists() and not ended.stopped):
        return None, None
    return process.describe(ended, ladder.limit_s, log)


def has_roofs(folder: Path) -> bool:
    roofs = read_object(folder / ROOFS)
    return bool(roofs) and "failed" not in roofs


def measure_roofs(ladder: Ladder) -> None:
    roofs, variables = ladder.folder / ROOFS, process.first_of(ladder.plan.gpus)
    try:
        words, environment = ladder.plan.arguments, ladder.environment | variables
        if why := shared.measure_roofs(roofs, words, ladder.limit_s, ladder.stop, environment):
            write_json(roofs, {"failed": why})
    except OSError as error:
        say(f"the roofs could not be written: {error.strerror or error}")


def predict_rows(ladder: Ladder) -> None:
    """Leave what the roofs predict for each row, or one line that says why they predict nothing."""
    log, predicted = ladder.folder / "predicted.log", ladder.folder / PREDICTED
    words = ["--roofs", str(ladder.folder / ROOFS), "--json", str(predicted), *ladder.plan.arguments]
    with contextlib.suppress(OSError):
        ended = ladder.run(process.module_command("ladder.predict", *words), log)
        if ended.code and not ended.stopped:
            say(f"no predictions: {process.last_line(log)}")


def finish(folder: Path, ladders: list[Ladder]) -> int:
    """Print and write the report; returns the exit code."""
    try:
        code = report(folder, {ladder.folder: ladder.ended for ladder in ladders})
    except (ValueError, OSError) as error:  # what is recorded stands
        say(f"run_all.sh: error: no report: {one_line(getattr(error, 'strerror', None) or error)}")
        code = None
    shown = shared.shown(folder, ROOT)
    say(f"written to {shown}")
    if ladders[0].stop.requests:
        say(f"interrupted: ./run_all.sh --resume {shown} finishes it")
        return 130
    latest = ROOT / "results" / "latest"
    if code is None or folder.parent != ROOT / "results":
        return 1 if code is None else code
    if latest.exists() and not latest.is_symlink():
        say("results/latest is a file or folder of your own and stays")
        return code
    try:
        latest.unlink(missing_ok=True)
        latest.symlink_to(folder.name)
    except OSError as error:
        say(f"results/latest was not renewed: {error.strerror or error}")
    return code


class Terminal:
    """What a row prints, and below it one rewritten line with its progress."""

    def __init__(self, step: str):
        self.step = step

    def show(self, data: bytes) -> None:
        self.clear()
        say(data.decode(errors="replace"), end="")

    def progress(self, message: dict) -> None:
        rest = f", about {message['rest_s']:.0f} s left" if message.get("rest_s") is not None else ""
        self.clear(f"{self.step}: {message.get('phase')} {message.get('k')}/{message.get('n')}{rest}")

    def clear(self, line: str = "") -> None:
        """Clear the line of progress, or put another in its place."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{line}")
            sys.stderr.flush()


def main(argv: list[str]) -> int:
    parser, stop = build_parser(), process.Stop()
    if any(word.partition("=")[0] == "--output" for word in argv):
        parser.error("--output is chosen by run_all.sh: results/ holds a folder per run")
    given, arguments = parser.parse_known_args(argv)
    limit_s = time_limit(parser)
    if given.sweep or "--batch-size max" in " ".join(arguments).replace("=", " "):
        needs("msgspec", "tabulate")
        from ladder import largest_batch, sweep  # they import torch

        try:
            if given.sweep:
                return sweep.main(given, absolute_data(arguments), argv, parser, check)
            return largest_batch.main(given, absolute_data(arguments), argv, parser, check, limit_s)
        except OSError as error:
            parser.exit(1, f"run_all.sh: error: {error.filename or 'results/'}: {error.strerror or error}\n")
    if given.sweep_minutes:
        parser.error("--sweep-minutes limits a --sweep; STEP_TIMEOUT limits each row of a ladder")
    if given.peers and (given.scaling or (given.gpus or 1) > 1):
        parser.error("--peers run on one GPU: leave out --gpus and --scaling")
    if given.resume:
        shared.refuse_others(given, parser, {"resume"}, f"--resume takes its options from {given.resume}")
        if arguments:
            parser.error(f"--resume takes its arguments from {given.resume}: give no others")
        if not given.resume.is_dir():
            parser.error(f"--resume {given.resume} is no folder")
        folder = given.resume.resolve()
        # The rows of the last place depend on those of all others.
        places = sorted(scaling_places(folder), key=lambda place: place == LAUNCHED_ALONE) or [""]
        planned = {place: resumed_run(folder / place, parser) for place in places}
    else:
        folder, planned = new_run(given, arguments, argv, parser)
    ladders = [Ladder(folder / place, *plan_and_facts, limit_s, stop) for place, plan_and_facts in planned.items()]
    stop.listen()
    with process.lock(ladders[0].folder / PLAN, parser):
        run_rows(ladders)
        return finish(folder, ladders)


def run_rows(ladders: list[Ladder]) -> None:
    """Every row that is not done: of several ladders, a script in each before the next script; then the roofs."""
    plan, stop = ladders[0].plan, ladders[0].stop
    for number, name, ladder in itertools.product(range(1, plan.repeat + 1), plan.rows, ladders):
        record = ladder.folder / ("" if number == 1 else f"pass-{number}") / f"{name}.json"
        wanted = name in ladder.plan.rows and name not in ladder.plan.left_out
        wanted = wanted and shared.row_of(record).get("status") != "ok" and scaling.is_needed(record, ladder.folder)
        if wanted and not stop.requests:
            where = []
            if len(ladders) > 1:
                where.append(f"{name} in {ladder.folder.name}")
            if plan.repeat > 1:
                where.append(f"pass {number} of {plan.repeat}")
            if where:
                say(", ".join(where))
            run_row(ladder, name, record)
            say("")
    if plan.roofs and not (stop.requests or has_roofs(ladders[0].folder)):
        measure_roofs(ladders[0])
    if has_roofs(ladders[0].folder) and plan.gpus == 1 and not stop.requests:
        predict_rows(ladders[0])


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]), "run_all.sh")
