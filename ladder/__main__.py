"""The command behind run_all.sh: every step in a process of its own, and the report. See ./run_all.sh
--help."""

import argparse
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run_all.sh starts this file by its path, from any folder

from common import record  # noqa: E402
from common.text import OneLineParser, Skip, portable_command, positive_int, run_command  # noqa: E402
from ladder import running, runs  # noqa: E402


class Request(NamedTuple):
    """What a user asked for."""

    argv: list[str]  # all words, from which --resume makes the same request again
    options: argparse.Namespace  # of run_all.sh itself
    arguments: list[str]  # of every step

    @property
    def kind(self) -> str:
        """One of record.KINDS."""
        if self.options.scaling:
            return "scaling"
        return "sweep" if self.options.sweep else "ladder"

    @property
    def gpus(self) -> int:
        """How many processes share a row of a ladder. A scaling chooses for each row."""
        return self.options.gpus or 1 if self.kind == "ladder" else 1


def build_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="run_all.sh",
        usage="./run_all.sh [OPTION ...] [ARGUMENT ...]",
        description="Runs the steps with the ARGUMENTs (python 0_baseline.py --help lists them). On a GPU\n"
        "it also measures roofs: how fast bare copies and matrix products are. It prints a table, and\n"
        "writes it with all records and logs to a new folder under results/.",
        epilog="PYTHON=INTERPRETER       use this Python, and install nothing\n"
        "./run_all.sh --setup     only prepare Python, and print the interpreter that will be used\n\n"
        "Exit code: 0 when every row is ok or skipped, 2 for bad arguments, 130 after Ctrl-C, 1 otherwise.",
    )
    add = parser.add_argument
    add("--only", metavar="N,N", help="these steps alone, for example 3,4")
    add("--repeat", type=positive_int, default=1, metavar="N", help="passes over all rows")
    text = "N processes a row, each with its own GPU (on a CPU: its share of the cores) and its own batch"
    add("--gpus", type=positive_int, metavar="N", help=text)
    add("--parallel", choices=runs.PARALLEL, help="how to share the model (--scaling: both, else ddp)")
    text = "each row on 1, 2, 4, ... GPUs, up to --gpus or all (on a CPU: 1 and 2 processes)"
    add("--scaling", action="store_true", help=text)
    add("--sweep", action="store_true", help="each row at several widths and lengths")
    add("--peers", action="store_true", help="also run peers/*.py, on the same workload")
    add("--no-roofs", action="store_true", help="do not measure copies and matrix products")
    text = "finish an interrupted run, with its own options: run its rows that are not ok"
    add("--resume", type=Path, metavar="DIR", help=text)
    add("--step-timeout", type=positive_int, metavar="S", help="seconds for a row (default: 1800)")
    return parser


def parse(argv: list[str], parser: OneLineParser) -> Request:
    argv = with_absolute_data(argv)
    return Request(argv, *parser.parse_known_args(argv))


def with_absolute_data(argv: list[str]) -> list[str]:
    """The words with an absolute path behind --data: rows run in the project's folder, and --resume
    anywhere."""
    words: list[str] = []
    for word in argv:
        option, equals, value = word.partition("=")
        if option == "--data" and equals:
            words += ["--data", str(Path(value).absolute())]
        elif words[-1:] == ["--data"]:
            words.append(str(Path(word).absolute()))
        else:
            words.append(word)
    return words


def contradiction(request: Request, resumes: bool) -> str | None:
    """Why options exclude each other, in one line: no option is ignored. None where they do not."""
    options, kind = request.options, request.kind
    numbers = [name.partition("_")[0] for name in runs.scripts()]
    chosen = options.only.split(",") if options.only is not None else numbers
    given = {word.partition("=")[0] for word in request.arguments if word.startswith("--")}
    shape = {name for name in given if re.match("--(n-|seq-|batch-)", name)}
    if options.scaling and options.sweep:
        return "--scaling and --sweep exclude each other"
    if not set(chosen) <= set(numbers):
        return f"--only {options.only}: give some of {','.join(numbers)}"
    if options.peers and (options.gpus or kind != "ladder"):
        return "--peers excludes --gpus, --scaling and --sweep"
    if options.repeat > 1 and kind != "ladder":
        return "--repeat is for a ladder"
    if kind == "sweep" and (options.gpus or options.parallel):
        return "a sweep runs on one GPU"
    if kind == "sweep" and options.only and len(chosen) < 2:
        return "--sweep compares steps: give --only two or more"
    if kind == "sweep" and shape and not resumes:  # what is resumed has the preset and batch size of its plan
        return "--sweep chooses the shape"
    if options.parallel and not (options.gpus or options.scaling):
        return "--parallel is for several processes: add --gpus N"
    if "--output" in given:
        return "--output is chosen here: a folder under results/"
    return None


def plan(request: Request, parser: OneLineParser, resumes: bool) -> running.Job:
    """What is to run: the plan that a run folder holds from its first row on, its rows, and the facts of this
    machine. Exits with one line where the request cannot be met."""
    if wrong := contradiction(request, resumes):
        parser.error(wrong)
    options, kind, arguments = request.options, request.kind, list(request.arguments)
    shared = ["--parallel", options.parallel] if options.parallel and kind == "ladder" else []
    facts = runs.check(arguments + shared, request.gpus)
    check_gpus(request, facts, parser)
    pinned = [] if resumes else facts["pinned"]  # the words of a resumed run hold them already
    arguments += pinned + shared
    if kind != "sweep":  # of its many rows no page shows a profile
        arguments.append("--profile")
    rows = rows_of(request, arguments, facts)
    measures = facts["device_type"] == "cuda" and kind != "scaling" and request.gpus == 1
    about = {
        "argv": request.argv + pinned,
        "command": portable_command("./run_all.sh", request.argv),
        "roofs": measures and not options.no_roofs,
    }
    return running.Job(running.plan_of(kind, rows, facts, options.step_timeout, **about), rows, facts)


def check_gpus(request: Request, facts: dict, parser: OneLineParser) -> None:
    """Exit with one line where more GPUs are asked for than there are."""
    gpus = request.options.gpus or 1
    present = facts["gpus"] or os.cpu_count() or 1
    if gpus > present:
        parser.error(f"--gpus {gpus}: there {'is' if present == 1 else 'are'} {present} here")
    if request.kind == "scaling" and most_gpus(request, facts) < 2:
        parser.error("--scaling needs two GPUs or more; with --device cpu it runs two processes on the CPU")


def most_gpus(request: Request, facts: dict) -> int:
    """Up to how many GPUs a scaling goes; on a CPU, processes."""
    return request.options.gpus or facts["gpus"] or 2


def rows_of(request: Request, arguments: list[str], facts: dict) -> list[runs.Planned]:
    rows = runs.ladder(arguments, runs.scripts(request.options.only), request.gpus)
    if request.kind == "scaling":
        most = most_gpus(request, facts)
        return runs.scaling(rows, most, request.options.parallel, facts["device_type"])
    if request.kind == "sweep":
        return runs.sweep(rows, facts["device_type"])
    if request.options.peers:
        rows += runs.ladder(arguments, runs.peers())
    return runs.repeated(rows, request.options.repeat)


def start(request: Request, parser: OneLineParser) -> int:
    job = plan(request, parser, resumes=False)
    return execute(running.new_folder(request.kind), job, parser)


def resume(request: Request, parser: OneLineParser) -> int:
    """Run what an interrupted run has left, by the words that its plan holds."""
    folder, limit = request.options.resume, request.options.step_timeout
    limits = [f"--step-timeout={limit}"] if limit else []
    if parse([f"--resume={folder}", *limits], parser)[1:] != request[1:]:
        parser.error(f"--resume takes its options from {folder}: give no others but --step-timeout")
    before = record.read_object(folder / record.PLAN)
    argv = before.get("argv")
    if not isinstance(argv, list) or not all(isinstance(word, str) and "\0" not in word for word in argv):
        parser.error(f"--resume {folder} holds no {record.PLAN} of run_all.sh that can be read")
    job = plan(parse([*argv, *limits], parser), parser, resumes=True)
    if any(before.get(name) != job.plan[name] for name in ("workload", "rows", "schema_version")):
        parser.error(
            f"--resume {folder}: its work has changed: the scripts, the text or this machine's defaults"
        )
    job.plan["argv"] = argv
    for name in ("command", "started_at"):
        job.plan[name] = str(before.get(name) or job.plan[name])
    return execute(folder.resolve(), job, parser)


def execute(folder: Path, job: running.Job, parser: OneLineParser) -> int:
    shown = f"results/{folder.name}" if folder.parent == ROOT / "results" else str(folder)
    try:
        return running.execute(folder, job, f"./run_all.sh --resume {shown}")
    except Skip as error:
        parser.error(str(error))


def main(argv: list[str]) -> int:
    parser = build_parser()
    request = parse(argv, parser)
    return resume(request, parser) if request.options.resume else start(request, parser)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]), "run_all.sh")
