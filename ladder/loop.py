"""What does each change of the guide give, in a training loop as people have it?

    python -m ladder.loop [--output FOLDER]

The loop is examples/loop/loop.py: GPT-2 of 124 M parameters on a GPU, 16 sequences of 1,024 tokens a step,
and a toy on a CPU. It runs as it is, and then with one patch of its folder after the other, each on top of
those before. Every state is a row of its own and trains on the same batches.
"""

import datetime
import hashlib
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a row is started by the path of this file

from common.fingerprint import row_sha256  # noqa: E402
from common.record import Row, Run, Workload, write_json  # noqa: E402
from common.text import OneLineParser, Skip, explain, portable_command, run_command  # noqa: E402
from ladder import patches, rows, running  # noqa: E402

LOOP = ROOT / "examples" / "loop"
NAME, FIRST = "loop.py", "0-as-it-is"
COMMAND = "python -m ladder.loop"


def state_names() -> list[str]:
    return [FIRST, *sorted(path.stem for path in LOOP.glob("*.patch"))]


def make_states(folder: Path) -> dict[str, Path]:
    """The loop as it is and after each patch, by name, each in a folder of its own. Raises Skip where a patch
    does not fit."""
    states = {FIRST: folder / FIRST / NAME}
    states[FIRST].parent.mkdir(parents=True)
    shutil.copy(LOOP / NAME, states[FIRST])
    for name in state_names()[1:]:
        before, after = [*states.values()][-1].parent, folder / name
        shutil.copytree(before, after)
        patches.apply(LOOP / f"{name}.patch", after, NAME)
        states[name] = after / NAME
    return states


def run_state(name: str, output: Path) -> int:
    """Run a state in this process, and write its record. Returns the exit code."""
    from common import hardware

    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    changes = [state.partition("-")[2] for state in state_names()[1 : state_names().index(name) + 1]]
    row, work = Row(name, changes=changes), None
    with tempfile.TemporaryDirectory() as folder:
        try:
            script = make_states(Path(folder))[name]
            row.source = script.read_text()
            row.code_sha256 = row_sha256(row.source, ROOT, ())
            os.chdir(script.parent)  # where it keeps its checkpoint
            work = record(row, runpy.run_path(str(script)))
        except ModuleNotFoundError as error:
            row.status, row.reason = "skipped", f"not installed: {error}"
        except Exception as error:  # whatever a state does, it stays a row
            row.status, row.reason = explain(error)
    environment = hardware.describe(hardware.resolve_device("auto"))
    write_json(output, Run(COMMAND, started_at, environment, work, [row]))
    return int(row.status not in ("ok", "skipped"))


def record(row: Row, ended: dict) -> Workload:
    """Fill a row with what a state has left in its variables; returns what it trained."""
    import torch

    from common import flops
    from common.model import GPTConfig

    L, H, C, T, V = (ended[name] for name in "LHCTV")
    config, batch_size = GPTConfig(L, H, C, T, V), ended["B"] * ended["micro_steps"]
    row.status, row.step_ms, row.loss = "ok", ended["times"], ended["losses"]
    row.peak_bytes = torch.cuda.max_memory_allocated() if ended["device"] == "cuda" else None
    attention = flops.attention_flops(L * batch_size * H, T, C // H)  # the whole (T, T) square counts
    return Workload(
        preset="custom",
        model=NAME,
        parameters=flops.parameters(config),
        tokens_per_step=batch_size * T,
        flops_per_step=flops.flops_per_step(config, batch_size) + attention,
        text="the standard library",
        text_sha256=hashlib.sha256((LOOP / NAME).read_bytes()).hexdigest()[:16],
        seed=1,
        lr=ended["top_rate"],
        warmup=0,
        steps=len(row.loss),
    )


def main() -> int:
    parser = OneLineParser(prog=COMMAND, description=__doc__)
    running.add_options(parser)
    options = parser.parse_args()
    facts = rows.check([], name=COMMAND) | {"workload": None, "needed_bytes": {}}
    planned = [rows.Planned(rows.LOOP_SCRIPT, [name], f"{name}.json") for name in state_names()]
    command = portable_command(COMMAND, sys.argv[1:])
    plan = running.plan_of("ladder", planned, facts, options.step_timeout, command)
    try:
        return running.execute(running.Job(plan, planned, facts, COMMAND), options.output)
    except Skip as error:
        parser.error(str(error))


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in state_names():
        sys.exit(run_state(sys.argv[1], Path(sys.argv[3])))
    run_command(main, COMMAND)
