"""One script at many shapes, in one process: Python, torch and the GPU's context start once.

python -m ladder.cells SCRIPT CELLS SECONDS

CELLS is a JSON list of cells: the `words` of the script's command line, the `output` of its record, and the `seconds`
that it is expected to take. A cell that would end after SECONDS is not begun. What a cell held is given back before
the next one. Where that fails, the exit code is RENEW: the next cell needs a new process, since what is left over
would count in its peak.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from common import benchmark
from common.arguments import Arguments, parse_args
from common.record import Row, Run, write_json, write_run
from common.text import portable_command, say
from ladder import process
from ladder.shared import row_of

RENEW = 75
SLACK_S = 60  # that a process may take beyond its share of the time
KEPT_BYTES, MORE_BYTES = 2**30, 2**26  # of a GPU: libraries' workspaces after the first cell, and what a later adds
TE_STATE = "transformer_engine.pytorch.module.base"  # holds the state of FP8 that outlives a model


# --- the process that starts it ---------------------------------------------------------------------


def run_cells(
    script: Path, todo: list[dict], log: Path, seconds: float, stop: process.Stop, environment: dict[str, str]
) -> None:
    """Run a script at all shapes of `todo` within about so many seconds, with these variables. Raises OSError.

    Every cell that was begun leaves a record: where its process dies, of how it died, and the next cells run in a new
    one.
    """
    until, listed = time.monotonic() + seconds, log.with_suffix(".todo.json")
    while todo and not stop.requests and (left_s := until - time.monotonic()) > 0:
        write_json(listed, todo)
        command = process.module_command("ladder.cells", str(script), str(listed), str(left_s))
        ended = process.run(command, log, left_s + SLACK_S, stop, environment=environment, show=_show)
        rest = [cell for cell in todo if not Path(cell["output"]).exists()]
        if ended.code == 0 or ended.stopped or not rest:
            break
        if ended.code != RENEW or len(rest) == len(todo):  # the first without a record was at work
            status, reason = process.describe(ended, left_s + SLACK_S, log)
            row = Row(script.stem, status=status, reason=reason)
            output, command = Path(rest[0]["output"]), portable_command(["python", script.name, *rest[0]["words"]])
            output.parent.mkdir(exist_ok=True)
            write_run(output, Run(command, None, None, None, [row]))
            say(f"{script.stem}, {rest[0]['name']}: {status}: {reason}")
            rest = rest[1:]
        todo = rest
    listed.unlink(missing_ok=True)


def _show(data: bytes) -> None:
    say(data.decode(errors="replace"), end="")


# --- the process that runs the cells ------------------------------------------------------------------


def load_script(script: Path) -> ModuleType:
    """A script as a module: its file name is not an identifier."""
    spec = importlib.util.spec_from_file_location(f"step_{script.stem}", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_cell(main: Callable[[Arguments], Row], script: Path, cell: dict) -> dict:
    """Run a script's `main` with the words of a cell, leave its record, and give back what it held. Returns the row.

    Exits with code 1 where the record could not be written: the log says why.
    """
    sys.argv = [script.name, *cell["words"], "--output", cell["output"]]  # the record names it as its command
    with contextlib.redirect_stdout(sys.stderr):
        benchmark.run_and_record(main, parse_args(script, None, sys.argv[1:]))
    if not Path(cell["output"]).exists():
        sys.exit(1)
    give_back()
    return row_of(Path(cell["output"]))


def give_back() -> None:
    """Forget what was compiled for a shape, what FP8 remembers of a model, and the memory of both."""
    torch.compiler.reset()
    if TE_STATE in sys.modules:
        sys.modules[TE_STATE].FP8GlobalStateManager.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def works() -> bool:
    """Whether the GPU works as before: a failed capture breaks its random numbers."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.empty(1, device="cuda").normal_()
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def describe(row: dict) -> str:
    return f"{row['timing']['median_ms']:.1f} ms" if row["status"] == "ok" else f"{row['status']}: {row['reason']}"


def main() -> int:
    script, until = Path(sys.argv[1]), time.monotonic() + float(sys.argv[3])
    todo, run, most = json.loads(Path(sys.argv[2]).read_text()), load_script(script).main, None
    for cell in todo:
        if time.monotonic() + cell["seconds"] > until:
            break
        row = run_cell(run, script, cell)
        say(f"{script.stem}, {cell['name']}: {describe(row)}")
        held = torch.cuda.memory_allocated()  # 0 on a CPU
        if row["status"] == "failed" or not works() or held > (most or KEPT_BYTES):
            return RENEW
        most = most or held + MORE_BYTES
    return 0


if __name__ == "__main__":
    sys.exit(main())
