"""Small experiments that show why each step helps.

python -m anatomy                   what there is
python -m anatomy NAME [ARGUMENT]   one experiment: tables, then sentences; --help has its sizes
python -m anatomy all               all of them, in quick form, as JSON and Markdown under results/
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from tabulate import tabulate

from anatomy.experiment import DTYPES, ITERS, QUICK_ITERS, Refused, Result, Table, common_arguments, positive
from common import hardware
from common.benchmark import missing_tool, one_line, out_of_memory
from common.record import OneLineParser, check_writable, write_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIMIT_S = 300
INDEX_TITLE = "# Anatomy on "


class Stopped(Exception):
    """An experiment of `all` did not come to a result; the message is its one-line reason."""


def experiments(folder: Path = HERE) -> dict[str, str]:
    """Name -> question of every file with `add_arguments` and `run`; read, not imported: listing is instant."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if {"add_arguments", "run"} <= functions:
            found[path.stem.replace("_", "-")] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def module_name(name: str) -> str:
    return f"anatomy.{name.replace('-', '_')}"


# --- one experiment -------------------------------------------------------------------------------


def run_one(name: str, argv: list[str]) -> int:
    """Run one experiment and print it; its exit code is 0, 1 for a failure, 2 for what cannot run as asked."""
    module = importlib.import_module(module_name(name))
    parser = OneLineParser(
        prog=f"python -m anatomy {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser.add_argument_group("sizes"))
    common_arguments(parser.add_argument_group("run"))
    args = parser.parse_args(argv)
    started, started_at = time.monotonic(), now()
    try:
        args.device = resolve_device(args.device)
        args.dtype = DTYPES[args.dtype] if args.dtype else None
        refuse_missing_dtype(args.dtype, args.device)
        args.iters = args.iters or (QUICK_ITERS if args.quick else ITERS)
        if args.output:
            check_writable(args.output, "experiment")
        torch.set_float32_matmul_precision("highest")  # FP32 means FP32, also in containers that set TF32
        result = module.run(args)
    except (Refused, hardware.DeviceError) as error:
        parser.error(one_line(error))
    except ValueError as error:
        if not str(error).startswith(("--output", "cannot write --output")):
            return failed(parser.prog, error)
        parser.error(one_line(error))
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # what torch.compile and CUDA raise has no common class
        if tool := missing_tool(error):
            parser.error(tool)
        return failed(parser.prog, error)
    print(result.render())
    if args.output:
        record = {
            "experiment": name,
            "question": experiments()[name],
            "command": shlex.join(["python", "-m", "anatomy", name, *without_output(argv)]),
            "started_at": started_at,
            "seconds": round(time.monotonic() - started, 1),
            "environment": hardware.describe(args.device),
        }
        try:
            write_json(args.output, record | result.record())
            write_attachments(result, args.output.parent)
        except OSError as error:
            parser.error(f"cannot write --output: {error}")
    elif result.attachments:
        print(f"\nWith --output FILE it also writes {', '.join(result.attachments)}.")
    return 0


def failed(prog: str, error: Exception) -> int:
    """Where it went wrong, for who wants to mend it, and the reason as the last line."""
    if out_of_memory(error):
        print(f"{prog}: error: out of memory: pass smaller sizes (--help lists them), or --quick", file=sys.stderr)
    else:
        traceback.print_exception(error)
        print(f"{prog}: error: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
    return 1


def resolve_device(name: str) -> torch.device:
    device = hardware.resolve_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton and torch.utils.benchmark mean the current one
    return device


def refuse_missing_dtype(dtype: torch.dtype | None, device: torch.device) -> None:
    if dtype is torch.bfloat16 and device.type == "cuda" and not hardware.has_bf16_matrix_instructions(device):
        raise Refused("--dtype bfloat16 needs an Ampere GPU or newer; this one multiplies float16")


def without_output(argv: list[str]) -> list[str]:
    """The arguments without the paths of this machine."""
    kept, words = [], iter(argv)
    for word in words:
        if word == "--output":
            next(words, None)
        elif not word.startswith("--output="):
            kept.append(word)
    return kept


def write_attachments(result: Result, folder: Path) -> None:
    for name, content in result.attachments.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


# --- all of them ----------------------------------------------------------------------------------


def run_all(argv: list[str]) -> int:
    """Every experiment in a process of its own, then the index; exit code 1 where one did not come to a result."""
    parser = OneLineParser(prog="python -m anatomy all", description="All experiments.", allow_abbrev=False)
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:N (default: auto)")
    parser.add_argument("--iters", type=positive, metavar="N", help="timed calls (default: each experiment's own)")
    parser.add_argument("--full", action="store_true", help="full sizes instead of the quick ones")
    parser.add_argument("--limit", type=positive, default=LIMIT_S, metavar="S",
                        help=f"seconds each may take (default: {LIMIT_S})")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="(default: results/anatomy-<UTC time>)")
    args = parser.parse_args(argv)
    try:
        device = resolve_device(args.device)
        folder = args.output or new_folder(ROOT / "results")
        check_folder(folder)
    except (hardware.DeviceError, OSError, ValueError) as error:
        parser.error(one_line(error))
    shared = ["--device", str(device)] + ([] if args.full else ["--quick"])
    shared += ["--iters", str(args.iters)] if args.iters else []
    outcomes = {}
    for name, question in experiments().items():
        print(f"{name}: {question}", flush=True)
        outcomes[name] = run_child(name, shared, folder.resolve(), args.limit)
        print(f"  {outcomes[name]['reason'] or 'ok'}, {outcomes[name]['seconds']:.0f} s", flush=True)
        (folder / "anatomy.md").write_text(index(outcomes, device))  # after each: what is there is kept
    print(f"\n{folder / 'anatomy.md'}")
    return int(any(outcome["reason"] for outcome in outcomes.values()))


def new_folder(parent: Path) -> Path:
    parent.mkdir(exist_ok=True)
    started = datetime.datetime.now(datetime.timezone.utc)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=f"anatomy-{started:%Y%m%d-%H%M%S}-"))
    folder.chmod(0o755)
    return folder


def check_folder(folder: Path) -> None:
    """Make it. Raises ValueError for one that holds what this command did not write, OSError where it cannot write."""
    folder.mkdir(parents=True, exist_ok=True)
    index_page = folder / "anatomy.md"
    ours = index_page.is_file() and index_page.read_text(errors="replace").startswith(INDEX_TITLE)
    if any(folder.iterdir()) and not ours:
        raise ValueError(f"--output {folder} holds other files: give a new folder")
    with tempfile.TemporaryFile(dir=folder):
        pass


def run_child(name: str, shared: list[str], folder: Path, limit_s: int) -> dict:
    """`reason` (None where it came to a result), `seconds`, `record`; writes NAME.json and NAME.md."""
    output = folder / f"{name}.json"
    output.unlink(missing_ok=True)
    started = time.monotonic()
    outcome = {"reason": None, "record": None}
    try:
        outcome["record"] = finished(child_command(name, shared, output), output, limit_s)
        (folder / f"{name}.md").write_text(page(outcome["record"]))
    except Stopped as error:
        outcome["reason"] = str(error)
        (folder / f"{name}.md").write_text(f"# {name}\n\nNo result: {error}\n")
    return outcome | {"seconds": time.monotonic() - started}


def child_command(name: str, shared: list[str], output: Path) -> list[str]:
    return [sys.executable, "-m", "anatomy", name, *shared, "--output", str(output)]


def finished(command: list[str], output: Path, limit_s: int) -> dict:
    """The record that a process wrote. Raises Stopped, with one line of reason, where it wrote none."""
    # A session of its own, so that compiler workers and data loaders end with it.
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, said = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise Stopped(f"failed: took longer than {limit_s} s") from None
    finally:
        end_session(child)
    if child.returncode < 0:
        raise Stopped(f"failed: ended by {signal.Signals(-child.returncode).name} (SIGKILL: often out of memory)")
    lines = said.strip().splitlines()
    if child.returncode:
        why = lines[-1].partition("error: ")[2] or lines[-1] if lines else "it gave no reason"
        raise Stopped(f"{'cannot run' if child.returncode == 2 else 'failed'} (exit code {child.returncode}): {why}")
    try:
        return json.loads(output.read_text())
    except (OSError, ValueError) as error:
        raise Stopped(f"failed: wrote no record ({type(error).__name__})") from None


def end_session(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def page(record: dict) -> str:
    """One experiment as Markdown."""
    result = Result([Table(**table) for table in record["tables"]], record["sentences"], record["figures"])
    result.listings = record["listings"]
    links = [f"{'!' * name.endswith(('.svg', '.png'))}[{name}]({name})" for name in record["attachments"]]
    environment = record["environment"]
    dirty = " with uncommitted changes" if environment.get("dirty") else ""
    where = f"`{record['command']}` on {environment['device']}, torch {environment['torch']}, {record['started_at']}"
    where += f", commit {(environment.get('commit') or 'unknown')[:7]}{dirty}"
    return "\n\n".join([f"# {record['experiment']}", record["question"], result.render("github"), *links, where]) + "\n"


def index(outcomes: dict[str, dict], device: torch.device) -> str:
    """anatomy.md: which experiments came to a result, and what each of them says."""
    questions = experiments()
    rows = [
        [f"[{name}]({name}.md)", questions.get(name, ""), outcome["reason"] or "ok", f"{outcome['seconds']:.0f}"]
        for name, outcome in outcomes.items()
    ]
    table = tabulate(rows, ["experiment", "question", "outcome", "seconds"], tablefmt="github", disable_numparse=True)
    said = [
        f"## {name}\n\n" + "\n".join(f"- {sentence}" for sentence in outcome["record"]["sentences"])
        for name, outcome in outcomes.items()
        if outcome["record"]
    ]
    return "\n\n".join([f"{INDEX_TITLE}{hardware.device_name(device)}", table, *said]) + "\n"


def main(argv: list[str]) -> int:
    known = experiments()
    if not argv or argv[0] in ("-h", "--help", "list"):
        width = max(map(len, known), default=0)
        print(__doc__)
        print("\n".join(f"{name:{width}}  {question}" for name, question in known.items()))
        return 0
    name, *rest = argv
    if name == "all":
        try:
            return run_all(rest)
        except KeyboardInterrupt:
            print("python -m anatomy all: interrupted; what was finished is kept", file=sys.stderr)
            return 130
    if name.replace("_", "-") not in known:
        print(f"python -m anatomy: error: no experiment is named {name!r}: {', '.join([*known, 'all'])}",
              file=sys.stderr)  # fmt: skip
        return 2
    return run_one(name.replace("_", "-"), rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
