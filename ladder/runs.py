"""What is to run, as a list of rows: a ladder, its repetitions, peers, a scaling over GPUs, a sweep over shapes.

`python -m ladder.runs ARGUMENT ...` prints what a step's arguments mean on this machine, as JSON: it imports torch, and
the process of the ladder does not.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace

from common.record import PlannedRow
from common.text import run_command
from ladder import process
from ladder.process import ROOT

PARALLEL = ("ddp", "fsdp")
SHARDED = "34"  # the steps that --scaling also runs with FSDP2, unless the user chose
LAUNCHED = "1-launched"  # on one GPU without capture: what FSDP2, which cannot be captured, is compared with
BY_HAND = "01"  # steps that keep the (T, T) scores of attention
WIDTHS = {"cuda": (320, 768, 2048, 4096, 8192), "cpu": (64, 128, 256)}  # of a sweep, in channels
LENGTHS = {"cuda": (1024, 4096, 16384, 32768), "cpu": (256, 1024)}  # of a sweep, in tokens, at one width
OF_LENGTHS = {"cuda": (1024, 32768), "cpu": (128, 2048)}  # channels, tokens a step
OF_WIDTHS = {"cuda": (2048, 16384), "cpu": (512, 1024)}  # sequence length, tokens a step
HEAD_DIM = {"cuda": 64, "cpu": 32}


def scripts() -> list[str]:
    return sorted(path.name for path in ROOT.glob("[0-9]_*.py"))


def check(arguments: list[str], gpus: int = 1) -> dict:
    """What the arguments mean here. Exits with the one line and the code of a step where they are wrong."""
    several = dict.fromkeys(("RANK", "LOCAL_RANK"), str(gpus - 1)) | {"WORLD_SIZE": str(gpus)} if gpus > 1 else {}
    command = process.module_command("ladder.runs", *arguments)
    done = subprocess.run(
        command, env=os.environ | several, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])  # a sitecustomize may print before it


def ladder(arguments: list[str], names: list[str], only: str | None, gpus: int = 1) -> list[PlannedRow]:
    """A row for each script, of which --only leaves some out."""
    outputs = ((name, name.replace(".py", ".json")) for name in names)
    return [PlannedRow(name, arguments, output, gpus, _is_left_out(name, only)) for name, output in outputs]


def _is_left_out(name: str, only: str | None) -> bool:
    return only is not None and name[0] not in only.split(",")


def repeated(rows: list[PlannedRow], times: int) -> list[PlannedRow]:
    """The rows again and again: all in one pass before the next begins."""
    later = range(2, times + 1)
    return rows + [replace(row, output=f"pass-{k}/{row.output}") for k in later for row in rows if not row.left_out]


def at(place: str, rows: list[PlannedRow], more: list[str], gpus: int = 1) -> list[PlannedRow]:
    """The rows that are not left out, in a place of a study, with more arguments."""
    return [
        replace(row, output=f"{place}/{row.output}", arguments=[*row.arguments, *more], gpus=gpus)
        for row in rows
        if not row.left_out
    ]


def scaling(
    rows: list[PlannedRow], most: int, parallel: str | None, only: str | None, device_type: str
) -> list[PlannedRow]:
    """Every row on 1, 2, 4, ... and `most` GPUs, by DDP and for some also by FSDP2."""
    counts = sorted({most, *(2**k for k in range(most.bit_length()))})
    found, sharded = at("1", rows, []), []
    for gpus in counts[1:]:
        for how in PARALLEL if parallel is None else [parallel]:
            everywhere = how == "ddp" or parallel or only
            chosen = [row for row in rows if everywhere or row.script[0] in SHARDED]
            found += at(f"{gpus}-{how}", chosen, ["--parallel", how], gpus)
            sharded += [row for row in chosen if how == "fsdp" and row.script[0] in SHARDED and row not in sharded]
    return found + at(LAUNCHED, sharded if device_type == "cuda" else [], ["--no-capture"])


def sweep(rows: list[PlannedRow], device_type: str) -> list[PlannedRow]:
    """Every row at several widths, and at one width at several lengths, two blocks each."""
    (length, tokens), (width, of_lengths) = OF_WIDTHS[device_type], OF_LENGTHS[device_type]
    shapes = [(channels, length, tokens) for channels in WIDTHS[device_type]]
    shapes += [(width, n, of_lengths) for n in LENGTHS[device_type]]
    found = []
    for channels, length, tokens in shapes:
        heads = channels // HEAD_DIM[device_type]
        words = f"--n-layer 2 --n-embd {channels} --n-head {heads} --seq-len {length} --batch-size {tokens // length}"
        found += at(f"{channels}-channels-{length}-tokens", rows, words.split())
    return found


def is_safe(row: PlannedRow) -> bool:
    """Whether a plan's row runs a script of this project, and writes its record where a plan of this project does."""
    known = {*scripts(), *(f"peers/{path.name}" for path in ROOT.glob("peers/*.py"))}
    record = rf"([\w-]+/)?{re.escape(row.script.removesuffix('.py'))}\.json"
    safe_words = not any(word.startswith("--output") for word in row.arguments)
    return row.script in known and bool(re.fullmatch(record, row.output)) and safe_words and 0 < row.gpus < 2**20


def main() -> None:
    import torch

    from common import flops, hardware
    from common.arguments import parse_args

    args = parse_args(ROOT / "run_all.sh", None)
    pinned = ["--preset", args.preset, "--batch-size", str(args.batch_size)] if args.notes else []
    peaks = {by_hand: flops.peak_bytes(args.config, args.batch_size, by_hand) for by_hand in (True, False)}
    facts = {
        "notes": args.notes,
        "pinned": pinned,  # auto's choice: the free memory may change from row to row
        "device_type": args.device.type,
        "gpus": torch.cuda.device_count() if args.device.type == "cuda" else 0,
        "workload": asdict(args.workload()),
        "free_bytes": hardware.free_memory_bytes(args.device),
        "needed_bytes": {name: peaks[name[0] in BY_HAND] * args.world.size for name in scripts()},
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    run_command(main, "run_all.sh")
