"""Small experiments that show why each step helps.

python -m anatomy                   lists the experiments
python -m anatomy NAME [ARGUMENT]   runs one: it says what to predict, then measures. --help has its own prediction
python -m anatomy all [NAME ...]    runs all of them, or these, in quick form; writes JSON and Markdown under results/
"""

import ast
import datetime
import importlib
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from anatomy import exit_at_once
from common.errors import is_out_of_memory, missing_tool
from common.record import check_writable, read_object, write_json
from common.text import OneLineParser, aligned, one_line, portable_command, positive_int, say
from ladder import process

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIMIT_S = 300
INDEX = "anatomy.md"  # of a folder of results
INDEX_TITLE, PREDICTIONS = "# Anatomy on ", "predictions within 25 %, or under their bound"


def experiments() -> dict[str, str]:
    """Name -> question of every file with `add_arguments` and `run`. This reads the files and imports none."""
    questions = {}
    for path in sorted(HERE.glob("*.py")):
        tree = ast.parse(path.read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if {"add_arguments", "run"} <= functions:
            questions[path.stem.replace("_", "-")] = ast.get_docstring(tree).partition("\n")[0]
    return questions


def lesson(docstring: str) -> dict[str, str]:
    """What an experiment's docstring asks the reader to predict and to change, and its own prediction between them."""
    _, predict, *prediction, last = docstring.strip().split("\n\n")
    change = last.partition("\nSource:")[0]
    return {
        "predict": one_line(" ".join(predict.removeprefix("Predict:").split()), 1000),
        "prediction": "\n\n".join(prediction),
        "change": one_line(" ".join(change.removeprefix("Change:").split()), 1000),
    }


# --- one experiment -------------------------------------------------------------------------------


def run_one(name: str, argv: list[str]) -> int:
    """Run one experiment and print it. Returns 0, or 1 after a failure; exits with 2 if it cannot run as asked."""
    import torch

    from anatomy import experiment
    from common import hardware

    module = importlib.import_module(f"anatomy.{name.replace('-', '_')}")
    parser = OneLineParser(prog=f"python -m anatomy {name}", description=module.__doc__)
    module.add_arguments(parser.add_argument_group("sizes"))
    experiment.common_arguments(parser.add_argument_group("run"))
    args = parser.parse_args(argv)
    started, started_at = time.monotonic(), datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    try:
        if args.output:
            check_writable(args.output, "experiment")
        args.device = resolve_device(args.device)
        args.dtype = experiment.DTYPES.get(args.dtype)
        refuse_missing_dtype(args.dtype, args.device)
    except ValueError as error:
        parser.error(one_line(error))
    args.iters = args.iters or (experiment.QUICK_ITERS if args.quick else experiment.ITERS)
    torch.set_float32_matmul_precision("highest")  # some containers set TF32
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on Ctrl-C removes temporary files
    asked = lesson(module.__doc__)
    say(f"{experiments()[name]}\n\nPredict: {asked['predict']}\n")
    try:
        result = module.run(args)
        result.explain()
    except (experiment.Refused, hardware.DeviceError) as error:
        parser.error(one_line(error))
    except Exception as error:  # the errors of torch.compile and CUDA have no common class
        if tool := missing_tool(error):
            parser.error(tool)
        return report_failure(parser.prog, error)
    say(f"{result.render()}\n\nChange this and predict again: {asked['change']}")
    if args.output:
        command = portable_command(["python", "-m", "anatomy", name, *argv])
        record = {
            "experiment": name, "question": experiments()[name], "command": command, "started_at": started_at,
            "seconds": round(time.monotonic() - started, 1), "lesson": asked,
            "environment": asdict(hardware.describe(args.device)),
        }  # fmt: skip
        try:
            write_result(args.output, record, result)
        except OSError as error:
            parser.exit(1, f"{parser.prog}: error: cannot write --output: {error.strerror or error}\n")
    elif result.attachments:
        say(f"\n--output FILE also writes {', '.join(result.attachments)}.")
    return 0


def write_result(path: Path, record: dict, result) -> None:
    """Write the record, and its attachments in a folder beside it: d/x.json has d/x/. Raises OSError."""
    attachments = path.with_suffix("") if path.suffix else path.with_name(f"{path.name}-files")
    record |= result.record()
    record["attachments"] = [f"{attachments.name}/{name}" for name in result.attachments]
    if result.attachments:
        attachments.mkdir(exist_ok=True)
    for name, content in result.attachments.items():
        (attachments / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    write_json(path, record)


def report_failure(prog: str, error: Exception) -> int:
    """Print the traceback, and the reason as the last line."""
    if is_out_of_memory(error):
        sys.stderr.write(f"{prog}: error: out of memory: pass smaller sizes (--help lists them), or --quick\n")
    else:
        traceback.print_exception(error)
        sys.stderr.write(f"{prog}: error: {type(error).__name__}: {one_line(error)}\n")
    return 1


def resolve_device(name: str):
    import torch

    from anatomy.experiment import keep_memory
    from common import hardware

    device = hardware.resolve_device(name)
    if device.type == "cpu":
        keep_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton and torch.utils.benchmark use the current device
    return device


def refuse_missing_dtype(dtype, device) -> None:
    """Raises Refused for a number format that the GPU cannot multiply."""
    import torch

    from anatomy.experiment import Refused
    from common import hardware

    if dtype is torch.bfloat16 and device.type == "cuda" and not hardware.has_bf16_matrix_instructions(device):
        raise Refused("--dtype bfloat16 needs an Ampere GPU or newer; this one multiplies float16")


# --- all of them ----------------------------------------------------------------------------------


def run_all(argv: list[str]) -> int:
    """Run experiments, each in its own process, and write the index. Returns 1 if one gave no result."""
    from common import hardware

    parser, known = OneLineParser(prog="python -m anatomy all", description="All experiments."), experiments()
    text = "run these alone; with --output, the index of that folder keeps the others"
    parser.add_argument("names", nargs="*", metavar="NAME", help=text)
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:N (default: auto)")
    parser.add_argument("--iters", type=positive_int, metavar="N", help="timed calls (default: each experiment's own)")
    parser.add_argument("--full", action="store_true", help="use the full sizes instead of the quick ones")
    parser.add_argument("--limit", type=positive_int, default=LIMIT_S, metavar="S",
                        help=f"seconds that an experiment may take (default: {LIMIT_S})")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder (default: results/anatomy-<UTC time>)")
    args = parser.parse_args(argv)
    if strangers := [name for name in args.names if name not in known]:
        parser.error(not_named(strangers[0], known))
    stop = process.Stop()
    try:
        device = resolve_device(args.device)
        folder = (args.output or new_folder(ROOT / "results")).resolve()
        check_folder(folder)
    except (hardware.DeviceError, OSError, ValueError) as error:
        parser.error(one_line(error))
    shared = ["--device", str(device)] + ([] if args.full else ["--quick"])
    shared += ["--iters", str(args.iters)] if args.iters else []
    environment = process.passive_waits(device.type)
    stop.listen()
    outcomes = recorded(folder, known)
    for name in args.names or known:
        say(f"{name}: {known[name]}")
        outcomes[name] = run_child(child_command(name, shared, folder), name, folder, args.limit, stop, environment)
        say(f"  {outcomes[name]['reason'] or 'ok'}, {outcomes[name]['seconds']:.0f} s")
        (folder / INDEX).write_text(index(outcomes, hardware.device_name(device)))  # after every experiment
        if stop.requests:
            sys.stderr.write("python -m anatomy all: interrupted; finished experiments are kept\n")
            return 130
    say(f"\n{folder / INDEX}")
    return int(any(outcome["reason"] for outcome in outcomes.values()))


def recorded(folder: Path, names: Iterable[str]) -> dict[str, dict]:
    """What earlier calls left in a folder, as `run_child` returns it; without files that are no such record."""
    records = {name: read_object(folder / f"{name}.json") for name in names}
    return {
        name: {"reason": None, "record": one, "seconds": one["seconds"]}
        for name, one in records.items()
        if {"seconds", "checks", "sentences"} <= one.keys()
    }


def renew_index(folder: Path) -> None:
    """Write the index of a folder's records anew, where some of them came from elsewhere."""
    outcomes = recorded(folder, experiments())
    devices = {outcome["record"]["environment"]["device"] for outcome in outcomes.values()}
    (folder / INDEX).write_text(index(outcomes, ", ".join(sorted(devices))))


def new_folder(parent: Path) -> Path:
    parent.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=time.strftime("anatomy-%Y%m%d-%H%M%S-", time.gmtime())))
    folder.chmod(0o755)
    return folder


def check_folder(folder: Path) -> None:
    """Make the folder. Raises ValueError if it holds other files, and OSError if nothing can be written to it."""
    folder.mkdir(parents=True, exist_ok=True)
    index_page = folder / INDEX
    ours = index_page.is_file() and index_page.read_text(errors="replace").startswith(INDEX_TITLE)
    if any(folder.iterdir()) and not ours:
        raise ValueError(f"--output {folder} holds other files: give a new folder")
    with tempfile.TemporaryFile(dir=folder):
        pass


def child_command(name: str, shared: list[str], folder: Path) -> list[str]:
    return process.module_command("anatomy", name, *shared, "--output", str(folder / f"{name}.json"))


def run_child(command: list[str], name: str, folder: Path, limit_s: int, stop: process.Stop, environment: dict) -> dict:
    """Returns `reason` (None after success), `record` and `seconds`. Writes NAME.json, NAME.md and NAME.log."""
    output, log, record, reason = folder / f"{name}.json", folder / f"{name}.log", None, None
    output.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    ended = process.run(command, log, limit_s, stop, environment=environment)
    if ended.code == 0:
        record = json.loads(output.read_text())
    else:
        status, cause = process.describe(ended, limit_s, log)
        # What went to stdout may come after the error.
        errors = re.findall(r"python -m anatomy .*?error: (.*)", log.read_text(errors="replace"))
        if errors and status == "failed":
            status, cause = "cannot run" if ended.code == 2 else "failed", one_line(errors[-1])
        reason = status if status == cause else f"{status}: {cause}"
    (folder / f"{name}.md").write_text(page(record) if record else f"# {name}\n\nNo result: {reason}\n")
    return {"reason": reason, "record": record, "seconds": ended.seconds}


def page(record: dict) -> str:
    """The Markdown page of one experiment: what to predict, and under a fold the prediction and the answer."""
    result, asked, environment = result_of(record), record["lesson"], record["environment"]
    links = [f"{'!' * name.endswith(('.svg', '.png'))}[{name}]({name})" for name in record["attachments"]]
    dirty = " with uncommitted changes" if environment.get("dirty") else ""
    where = (
        f"{environment['device']}, torch {environment['torch']}, commit {(environment.get('commit') or 'unknown')[:7]}"
    )
    score = f": {result.score()}" if result.checks else ""
    return "\n\n".join([
        f"# {record['experiment']}", f"**{record['question']}** Recorded on {where}{dirty}. "
        "`docs/glossary.md` explains the terms.",
        f"Predict first: {asked['predict']}",
        folded("How this experiment predicts it", asked["prediction"]),
        folded(f"What was measured{score}", "\n\n".join([result.render("github"), *links])),
        f"Change this and predict again: {asked['change']}",
        f"`{record['command']}`, {record['started_at']}",
    ]) + "\n"  # fmt: skip


def result_of(record: dict):
    """The Result that a record was written from; figures are plain numbers."""
    from anatomy.experiment import Check, Result, Seconds, Table

    checks = []
    for check in record["checks"]:
        fields = {name: check[name] for name in ("what", "predicted", "measured", "unit", "at_most", "cause")}
        for name in ("predicted", "measured"):
            if quartiles := check.get(f"{name}_p25_p75"):
                fields[name] = Seconds(check[name])
                fields[name].quartiles = tuple(quartiles)
        checks.append(Check(**fields))
    tables = [Table(**table) for table in record["tables"]]
    return Result(tables, record["sentences"], record["figures"], checks, listings=record["listings"])


def folded(summary: str, text: str) -> str:
    """A part of a Markdown page that shows only its summary until the reader opens it."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def index(outcomes: dict[str, dict], device: str) -> str:
    """The text of anatomy.md: which experiments gave a result, their scores, and folded their sentences."""
    rows, parts, questions = [], [], experiments()
    for name, outcome in sorted(outcomes.items()):
        record = outcome["record"]
        rows.append({"experiment": f"[{name}]({name}.md)", "question": questions[name]})
        rows[-1] |= {"outcome": outcome["reason"] or "ok", PREDICTIONS: "-"}
        rows[-1] |= {"seconds": f"{outcome['seconds']:.0f}"}
        if record and (checks := record["checks"]):
            rows[-1][PREDICTIONS] = f"{sum(check['hit'] for check in checks)} of {len(checks)}"
        if record:
            lines = "\n".join(f"- {sentence}" for sentence in record["sentences"])
            parts.append(folded(f"{name}: what was measured", lines))
    return "\n\n".join([f"{INDEX_TITLE}{device}", aligned(rows, "github", n_left=3), *parts]) + "\n"


def main(argv: list[str]) -> int:
    known = experiments()
    if not argv or argv[0] in ("-h", "--help", "list"):
        width = max(map(len, known))
        say(__doc__)
        say("\n".join(f"{name:{width}}  {question}" for name, question in known.items()))
        return 0
    name = argv[0].replace("_", "-")
    if name == "all":
        return run_all(argv[1:])
    if name in known:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's stages on stderr tell a reader nothing
        return run_one(name, argv[1:])
    sys.stderr.write(f"python -m anatomy: error: {not_named(argv[0], [*known, 'all'])}\n")
    return 2


def not_named(name: str, known: Iterable[str]) -> str:
    return f"no experiment is named {shlex.quote(one_line(name))}: {', '.join(known)}"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        exit_at_once()
    except OSError as error:  # a full disk: finished experiments are kept
        sys.stderr.write(f"python -m anatomy: error: {error.filename}: {error.strerror or error}\n")
        sys.exit(1)
