"""The ladder: every step in a process of its own, the roofs of the machine, the report. See ./run_all.sh
--help."""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run_all.sh starts this file by its path, from any folder

from common import record as schema  # noqa: E402
from common.text import OneLineParser, Skip, portable_command, positive_int, run_command  # noqa: E402
from ladder import running, runs  # noqa: E402


def build_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="run_all.sh",
        usage="./run_all.sh [OPTION ...] [ARGUMENT ...]",
        description="Runs the steps with the ARGUMENTs (python 0_baseline.py --help lists them), measures\n"
        "a GPU's roofs, prints a table, and writes it with all records and logs to a new\n"
        "folder under results/.",
        epilog="PYTHON=INTERPRETER       use this Python, and install nothing\n"
        "./run_all.sh --setup     only prepare Python, and print the interpreter that will be used\n\n"
        "Exit code: 0 when every row is ok or skipped, 2 for bad arguments, 130 after Ctrl-C, 1 otherwise.",
    )
    parser.add_argument("--only", metavar="N,N", help="these steps alone, for example 3,4")
    parser.add_argument("--repeat", type=positive_int, default=1, metavar="N", help="passes over all rows")
    text = "N processes a row, each with its own GPU (on a CPU: its share of the cores) and its own batch"
    parser.add_argument("--gpus", type=positive_int, metavar="N", help=text)
    parser.add_argument(
        "--parallel", choices=runs.PARALLEL, help="how to share the model (--scaling: both, else ddp)"
    )
    text = "each row on 1, 2, 4, ... GPUs, up to --gpus or all (on a CPU: 1 and 2 processes)"
    parser.add_argument("--scaling", action="store_true", help=text)
    parser.add_argument("--sweep", action="store_true", help="each row at several widths and lengths")
    parser.add_argument("--peers", action="store_true", help="also run peers/*.py, on the same workload")
    parser.add_argument("--no-roofs", action="store_true", help="do not measure copies and matrix products")
    text = "finish an interrupted run, with its own options: run its rows that are not ok"
    parser.add_argument("--resume", type=Path, metavar="DIR", help=text)
    parser.add_argument(
        "--step-timeout", type=positive_int, metavar="S", help="seconds for a row (default: 1800)"
    )
    return parser


def plan(argv: list[str], parser: OneLineParser, fresh: bool) -> tuple[dict, list[runs.Planned], dict]:
    """The plan that a run folder holds from its first row on, its rows, and what its arguments mean here.
    From `argv`, --resume makes the same plan again. Exits where options contradict each other: nobody's
    option is ignored."""
    argv = [part for word in argv for part in (word.split("=", 1) if word.startswith("--data=") else [word])]
    argv = [str(Path(b).absolute()) if a == "--data" else b for a, b in zip(["", *argv], argv, strict=False)]
    given, arguments = parser.parse_known_args(argv)
    kind, several = (
        "scaling" if given.scaling else "sweep" if given.sweep else "ladder",
        given.scaling or given.gpus,
    )
    numbers = [name.partition("_")[0] for name in runs.scripts()]
    only = given.only is None or set(given.only.split(",")) <= {*numbers}
    for wrong, why in (
        (given.scaling and given.sweep, "--scaling and --sweep exclude each other"),
        (not only, f"--only {given.only}: give some of {','.join(numbers)}"),
        (given.peers and (several or kind != "ladder"), "--peers excludes --gpus, --scaling and --sweep"),
        (given.repeat > 1 and kind != "ladder", "--repeat is for a ladder"),
        ((given.gpus or given.parallel) and kind == "sweep", "a sweep runs on one GPU"),
        (
            kind == "sweep" and given.only and "," not in given.only,
            "--sweep compares steps: give --only two or more",
        ),
        (
            kind == "sweep" and fresh and re.search("--(n-|seq|batch)", str(arguments)),
            "--sweep chooses the shape",
        ),
        (given.parallel and not several, "--parallel is for several processes: add --gpus N"),
        (
            any(word.startswith("--output") for word in arguments),
            "--output is chosen here: a folder under results/",
        ),
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
            parser.error(
                "--scaling needs two GPUs or more; with --device cpu it runs two processes on the CPU"
            )
        rows = runs.scaling(rows, most, given.parallel, facts["device_type"])
    elif kind == "sweep":
        rows = runs.sweep(rows, facts["device_type"])
    else:
        peers = [f"peers/{path.name}" for path in sorted(ROOT.glob("peers/*.py")) if given.peers]
        rows = runs.repeated(rows + runs.ladder(arguments, peers), given.repeat)
    with_roofs = kind != "scaling" and gpus == 1 and not given.no_roofs and facts["device_type"] != "cpu"
    command = portable_command("./run_all.sh", argv)
    made = running.plan_of(
        kind, command, rows, facts, given.step_timeout, argv=argv + pinned, roofs=with_roofs
    )
    return made, rows, facts


def main(argv: list[str]) -> int:
    parser, before = build_parser(), {}
    given, others = parser.parse_known_args(argv)
    if resumed := given.resume:
        alone = vars(parser.parse_args([])) | {"resume": resumed, "step_timeout": given.step_timeout}
        if others or vars(given) != alone:
            parser.error(f"--resume takes its options from {resumed}: give no others but --step-timeout")
        before = schema.read_object(resumed / schema.PLAN)
        if not isinstance(before.get("argv"), list):
            parser.error(f"--resume {resumed} holds no {schema.PLAN} of run_all.sh that can be read")
        argv = [*map(str, before["argv"]), *(f"--step-timeout={s}" for s in [given.step_timeout] if s)]
    made, rows, facts = plan(argv, parser, fresh=not before)
    if before and any(before.get(name) != made[name] for name in ("workload", "rows", "schema_version")):
        parser.error(
            f"--resume {resumed}: its work has changed: the scripts, the text or this machine's defaults"
        )
    folder = resumed.resolve() if before else running.new_folder(made["kind"])
    shown = f"results/{folder.name}" if folder.parent == ROOT / "results" else str(folder)
    try:
        kept = made | {name: str(before.get(name) or made[name]) for name in ("command", "started_at")}
        kept["argv"] = before.get("argv", made["argv"])
        return running.execute(folder, kept, rows, facts, f"./run_all.sh --resume {shown}")
    except Skip as error:
        parser.error(str(error))


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]), "run_all.sh")
