"""The command behind run_all.sh: what a user asks for becomes a list of rows, which ladder/running.py runs.

Each row is a script in a process of its own. ./run_all.sh --help lists the options.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run_all.sh starts this file by its path, from any folder

from common import record  # noqa: E402
from common.text import OneLineParser, Skip, portable_command, positive_int, run_command  # noqa: E402
from ladder import running, runs  # noqa: E402

FILES = ("--data", "--model")
MOST_PASSES = 100


class Request(NamedTuple):
    """What a user asked for."""

    argv: list[str]  # all words, from which --resume makes the same request again
    options: argparse.Namespace  # what run_all.sh itself takes of them
    arguments: list[str]  # the others, which every script gets

    @property
    def kind(self) -> str:
        """ladder, scaling, sweep, or model: a ladder of a model that is not ours."""
        if self.options.scaling:
            return "scaling"
        if self.options.model:
            return "model"
        return "sweep" if self.options.sweep else "ladder"

    @property
    def processes(self) -> int:
        """How many processes run a row of a ladder. With --scaling each row has a number of its own."""
        if self.kind != "ladder":
            return 1
        return self.options.gpus or 1


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
    add(
        "--only",
        metavar="N,N",
        help="these steps alone, for example 3,4; rows of --model build on those before them",
    )
    add("--repeat", type=positive_int, default=1, metavar="N", help="passes over all rows")
    text = "N processes a row, each with its own GPU (on a CPU: its share of the cores) and its own batch"
    add("--gpus", type=positive_int, metavar="N", help=text)
    add(
        "--parallel",
        choices=runs.PARALLEL,
        help="ddp copies the model, fsdp divides it (default: ddp; --scaling: both)",
    )
    text = "a model of yours instead of the steps: a file with model() and batches(), as examples/gpt2.py"
    add("--model", metavar="FILE", help=text)
    text = "each row on 1, 2, 4, ... GPUs, up to --gpus or all (on a CPU: 1 and 2 processes)"
    add("--scaling", action="store_true", help=text)
    add("--sweep", action="store_true", help="each row at several widths and lengths")
    add("--peers", action="store_true", help="also run peers/*.py, on the same workload")
    add("--no-roofs", action="store_true", help="do not measure copies and matrix products")
    text = "finish an interrupted run with the options that it was started with"
    add("--resume", type=Path, metavar="DIR", help=text)
    add("--step-timeout", type=positive_int, metavar="S", help="seconds for a row (default: 1800)")
    return parser


def parse(argv: list[str]) -> Request:
    argv = with_absolute_files(argv)
    options, arguments = build_parser().parse_known_args(argv)
    return Request(argv, options, arguments)


def with_absolute_files(argv: list[str]) -> list[str]:
    """The words with an absolute path behind --data and --model: rows run in the project's folder, and
    --resume anywhere."""
    words: list[str] = []
    for word in argv:
        option, equals, value = word.partition("=")
        if option in FILES and equals:
            words += [option, str(Path(value).absolute())]
        elif words[-1:] and words[-1] in FILES:
            words.append(str(Path(word).absolute()))
        else:
            words.append(word)
    return words


def check(request: Request, resumes: bool) -> None:
    """Raises Skip where options exclude each other or are not for this kind of run: none is ignored."""
    options, kind = request.options, request.kind
    numbers = [name.partition("_")[0] for name in (runs.MODEL_ROWS if options.model else runs.scripts())]
    chosen = options.only.split(",") if options.only is not None else numbers
    names = {word.partition("=")[0] for word in request.arguments}
    # The words of a resumed sweep hold the batch size that was chosen when it started.
    shape = [name for name in names if name.startswith(("--n-", "--seq-", "--batch-")) and not resumes]
    in_file = sorted({*shape, *names & {"--preset", "--vocab-size", "--data"}})
    for is_wrong, why in (
        (options.scaling and options.sweep, "--scaling and --sweep exclude each other"),
        (not set(chosen) <= set(numbers), f"--only {options.only}: give some of {','.join(numbers)}"),
        (
            options.peers and (options.gpus or kind != "ladder"),
            "--peers excludes --gpus, --scaling, --sweep and --model",
        ),
        (options.repeat > MOST_PASSES, f"--repeat {options.repeat}: at most {MOST_PASSES} passes"),
        (options.repeat > 1 and kind in ("scaling", "sweep"), "--repeat is for a ladder"),
        (
            options.model and (options.gpus or options.scaling or options.sweep),
            "--model runs on one GPU, without --gpus, --scaling and --sweep",
        ),
        (
            options.model and in_file,
            f"{' '.join(in_file)}: not with --model, whose file makes the model and its batches",
        ),
        (kind == "sweep" and (options.gpus or options.parallel), "a sweep runs on one GPU"),
        (
            kind == "sweep" and len(set(chosen)) == 1 and options.only,
            "--sweep compares steps: give --only two or more",
        ),
        (kind == "sweep" and shape, "--sweep chooses the shape"),
        (
            options.parallel and not (options.gpus or options.scaling),
            "--parallel is for several processes: add --gpus N",
        ),
        ("--output" in names, "--output is chosen here: a folder under results/"),
    ):
        if is_wrong:
            raise Skip(why)


def prepare(request: Request, resumes: bool) -> running.Job:
    """What is to run here. Raises Skip, one line, where the request cannot be met."""
    check(request, resumes)
    options, kind, arguments = request.options, request.kind, list(request.arguments)
    parallel = ["--parallel", options.parallel] if options.parallel and kind == "ladder" else []
    limit_s = options.step_timeout or runs.LIMIT_S
    facts = runs.check(arguments + parallel, request.processes, options.model, limit_s)
    check_gpus(request, facts)
    # What `auto` chose stands in the words of a resumed run: more memory may be free by now.
    pinned = [] if resumes else facts["pinned"]
    arguments += pinned + parallel
    if kind != "sweep":  # of its many rows no page shows a profile
        arguments.append("--profile")
    rows = rows_of(request, arguments, facts)
    can_measure_roofs = kind in ("ladder", "sweep") and request.processes == 1
    plan = running.plan_of("ladder" if kind == "model" else kind, rows, facts, options.step_timeout)
    plan["argv"] = request.argv + pinned
    plan["command"] = portable_command("./run_all.sh", request.argv)
    plan["roofs"] = facts["device_type"] == "cuda" and can_measure_roofs and not options.no_roofs
    return running.Job(plan, rows, facts)


def check_gpus(request: Request, facts: dict) -> None:
    """Raises Skip where more GPUs, or on a CPU processes, are asked for than the machine has."""
    gpus, present = request.options.gpus or 1, facts["gpus"] or os.cpu_count() or 1
    if gpus > present:
        raise Skip(f"--gpus {gpus}: there {'is' if present == 1 else 'are'} {present} here")
    if request.kind == "scaling" and most_gpus(request, facts) < 2:
        raise Skip("--scaling needs two GPUs or more; with --device cpu it runs two processes on the CPU")


def most_gpus(request: Request, facts: dict) -> int:
    """Up to how many GPUs a scaling goes; on a CPU, processes."""
    return request.options.gpus or facts["gpus"] or 2


def rows_of(request: Request, arguments: list[str], facts: dict) -> list[runs.Planned]:
    if request.kind == "model":
        rows = runs.of_model(request.options.model, arguments, request.options.only)
        return runs.repeated(rows, request.options.repeat)
    rows = runs.ladder(arguments, runs.scripts(request.options.only), request.processes)
    if request.kind == "scaling":
        most = most_gpus(request, facts)
        return runs.scaling(rows, most, request.options.parallel, facts["device_type"])
    if request.kind == "sweep":
        return runs.sweep(rows, facts["device_type"])
    if request.options.peers:
        rows += runs.ladder(arguments, runs.peers())
    return runs.repeated(rows, request.options.repeat)


def start(request: Request) -> int:
    job = prepare(request, resumes=False)
    folder = running.new_folder(request.kind)
    return running.execute(folder, job, f"./run_all.sh --resume results/{folder.name}")


def resume(request: Request) -> int:
    """Run what an interrupted run has left, by the words that its plan holds."""
    folder, limit = request.options.resume, request.options.step_timeout
    limits = [f"--step-timeout={limit}"] if limit else []
    alone = parse([f"--resume={folder}", *limits])
    if (alone.options, alone.arguments) != (request.options, request.arguments):
        raise Skip(f"--resume takes its options from {folder}: give no others but --step-timeout")
    if not Path(folder).is_dir():
        raise Skip(f"--resume {folder}: there is no such folder")
    before = record.read_object(folder / record.PLAN)
    argv = before.get("argv")
    if not isinstance(argv, list) or not all(isinstance(word, str) and "\0" not in word for word in argv):
        raise Skip(f"--resume {folder} holds no {record.PLAN} of run_all.sh that can be read")
    job = prepare(parse([*argv, *limits]), resumes=True)
    if any(before.get(name) != job.plan[name] for name in ("workload", "rows", "schema_version")):
        raise Skip(
            f"--resume {folder}: its work has changed: "
            "a script, the text, the file of --model or this machine's defaults"
        )
    job.plan["argv"] = argv  # a --step-timeout of this call alone is not kept
    for name in ("command", "started_at"):
        job.plan[name] = str(before.get(name) or job.plan[name])
    folder = folder.resolve()
    shown = f"results/{folder.name}" if folder.parent == ROOT / "results" else folder
    return running.execute(folder, job, f"./run_all.sh --resume {shown}")


def main(argv: list[str]) -> int:
    request = parse(argv)
    try:
        return resume(request) if request.options.resume else start(request)
    except Skip as error:
        build_parser().error(str(error))


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]), "run_all.sh")
