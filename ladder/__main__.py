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
from ladder import rows, running  # noqa: E402

FILES = ("--data", "--model")


class Request(NamedTuple):
    """What a user asked for."""

    options: argparse.Namespace  # what run_all.sh itself takes
    arguments: list[str]  # the others, which every script gets
    words: list[str]  # all of them

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
        "writes it with all records and logs to a folder under results/.",
        epilog="PYTHON=INTERPRETER       use this Python, and install nothing\n"
        "./run_all.sh --setup     only prepare Python, and print the interpreter that will be used\n\n"
        "Exit code: 0 when every row is ok or skipped, 2 for bad arguments, 130 after Ctrl-C, 143 after\n"
        "kill, 1 otherwise.",
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
        choices=rows.PARALLEL,
        help="ddp copies the model, fsdp divides it (default: ddp; --scaling: both)",
    )
    text = "a model of yours instead of the steps: a file with model() and batches(), as examples/gpt2.py"
    add("--model", metavar="FILE", help=text)
    text = "of --model: what the file does already, each with those before it (default: what its steps show)"
    add("--from", dest="start", choices=[*rows.FROM], help=text)
    text = "each row on 1, 2, 4, ... GPUs, up to --gpus or all (on a CPU: 1 and 2 processes)"
    add("--scaling", action="store_true", help=text)
    add("--sweep", action="store_true", help="each row at several widths and lengths")
    add("--peers", action="store_true", help="also run peers/*.py, on the same workload")
    add("--no-roofs", action="store_true", help="do not measure copies and matrix products")
    running.add_options(parser)
    return parser


def parse(argv: list[str]) -> Request:
    words = with_absolute_files(argv)
    options, arguments = build_parser().parse_known_args(words)
    return Request(options, arguments, words)


def with_absolute_files(argv: list[str]) -> list[str]:
    """The words with an absolute path behind --data and --model: rows run in the project's folder."""
    words: list[str] = []
    for word in argv:
        option, equals, value = word.partition("=")
        if option in FILES and equals:
            words += [option, str(Path(os.path.expanduser(value)).absolute())]
        elif words[-1:] and words[-1] in FILES:
            words.append(str(Path(word).absolute()))
        else:
            words.append(word)
    return words


def check(request: Request) -> None:
    """Raises Skip where options exclude each other or are not for this kind of run: none is ignored."""
    options, kind = request.options, request.kind
    every = rows.MODEL_ROWS if options.model else rows.scripts()
    numbers = [*dict.fromkeys(name.partition("_")[0] for name in every)]
    chosen = options.only.split(",") if options.only is not None else numbers
    names = {word.partition("=")[0] for word in request.arguments}
    shape = [name for name in names if name.startswith(("--n-", "--seq-", "--batch-"))]
    in_file = sorted({*shape, *names & {"--preset", "--vocab-size", "--data"}})
    for is_wrong, why in (
        (options.scaling and options.sweep, "--scaling and --sweep exclude each other"),
        (not set(chosen) <= set(numbers), f"--only {options.only}: give some of {','.join(numbers)}"),
        (
            options.peers and (options.gpus or kind != "ladder"),
            "--peers excludes --gpus, --scaling, --sweep and --model",
        ),
        (
            options.repeat > 1 and kind in ("scaling", "sweep"),
            "--repeat is for a ladder: leave out --scaling and --sweep",
        ),
        (
            options.model and (options.gpus or options.scaling or options.sweep),
            "--model runs on one GPU, without --gpus, --scaling and --sweep",
        ),
        (
            options.model and in_file,
            f"{' '.join(in_file)}: not with --model, whose file makes the model and its batches",
        ),
        (options.start and not options.model, "--from is for --model: add --model FILE"),
        (
            kind == "sweep" and (options.gpus or options.parallel),
            "a sweep runs on one GPU: leave out --gpus and --parallel",
        ),
        (
            kind == "sweep" and len(set(chosen)) == 1 and options.only,
            "--sweep compares steps: give --only two or more",
        ),
        (kind == "sweep" and shape, f"--sweep chooses the shape: leave out {' '.join(sorted(shape))}"),
        (
            options.parallel and not (options.gpus or options.scaling),
            "--parallel is for several processes: add --gpus N",
        ),
    ):
        if is_wrong:
            raise Skip(why)


def prepare(request: Request) -> running.Job:
    """What is to run here. Raises Skip, one line, where the request cannot be met."""
    check(request)
    options, kind, arguments = request.options, request.kind, list(request.arguments)
    if options.parallel and kind == "ladder":
        arguments += ["--parallel", options.parallel]
    if options.start:
        arguments += ["--from", options.start]
    limit_s = options.step_timeout or rows.LIMIT_S
    is_measured = options.output and (options.output / record.ROOFS).exists()
    roofs = kind == "ladder" and request.processes == 1 and not (options.no_roofs or is_measured)
    facts = rows.check(arguments, request.processes, options.model, limit_s, roofs=roofs)
    check_gpus(request, facts)
    rule = "a step is called NUMBER_name.py, with letters, digits and _ in its name"
    told = [f"{name} is left out: {rule}" for name in rows.misnamed_scripts()]
    facts |= {"messages": [*facts["messages"], *told]}
    pinned = dict(facts["pinned"])
    if kind == "sweep":
        pinned.pop("--batch-size", None)  # each shape has its own
    arguments = rows.with_pinned(arguments, pinned)
    if kind != "sweep":  # of its many rows no page shows a profile
        arguments.append("--profile")
    planned, kind = rows_of(request, arguments, facts), "ladder" if kind == "model" else kind
    if not planned:
        raise Skip(f"--only {options.only}: {Path(options.model).name} does that itself")
    command = portable_command("./run_all.sh", request.words)
    plan = running.plan_of(kind, planned, facts, options.step_timeout, command)
    again = running.resume_command("./run_all.sh", rows.with_pinned(request.words, pinned))
    return running.Job(plan, planned, facts, again)


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


def rows_of(request: Request, arguments: list[str], facts: dict) -> list[rows.Planned]:
    if request.kind == "model":
        planned = rows.of_model(request.options.model, arguments, request.options.only, facts["seen"])
        return rows.repeat(planned, request.options.repeat)
    planned = rows.ladder(arguments, rows.scripts(request.options.only), request.processes)
    if request.kind == "scaling":
        most = most_gpus(request, facts)
        return rows.scaling(planned, most, request.options.parallel, facts["device_type"])
    if request.kind == "sweep":
        return rows.sweep(planned, facts["device_type"])
    if request.options.peers:
        planned += rows.ladder(arguments, rows.peers())
    return rows.repeat(planned, request.options.repeat)


def main(argv: list[str]) -> int:
    request = parse(argv)
    try:
        return running.execute(prepare(request), request.options.output)
    except Skip as error:
        build_parser().error(str(error))


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]), "run_all.sh")
