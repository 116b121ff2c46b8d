"""What is to run, as a list of rows: a ladder, its repetitions, peers, a scaling over GPUs, a sweep over
shapes.

A step is a file: NUMBER_name.py in the folder of the project.
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from common import record
from common.record import AS_IT_IS, read_object
from common.text import one_line, say, without
from ladder import process
from ladder.process import ROOT

LIMIT_S = 1800  # of a row, by default
PARALLEL = ("ddp", "fsdp")
LAUNCHED = "1-launched"  # on one GPU without capture: what FSDP2, which cannot be captured, is compared with
SWEEP = {  # channels, sequence length and tokens a step: several widths, and several lengths at one width
    "cuda": (
        *((C, 2048, 16384) for C in (320, 768, 2048, 4096, 8192)),
        *((1024, T, 32768) for T in (1024, 4096, 16384, 32768)),
    ),
    "cpu": ((64, 512, 1024), (128, 512, 1024), (256, 512, 1024), (128, 256, 2048), (128, 1024, 2048)),
}
HEAD_DIM = {"cuda": 64, "cpu": 32}
MODEL_SCRIPT, LOOP_SCRIPT = "mine/row.py", "ladder/loop.py"
AMP, SDPA, COMPILE, GRAPH, FP8 = "1_amp", "2_sdpa", "3_compile", "4_graph", "5_fp8"
FP32 = "0_fp32"  # the file unchanged, or AS_IT_IS
MODEL_ROWS = {  # of a model that is not ours, and what each adds, in words
    FP32: "",
    AS_IT_IS: "",
    AMP: record.AMP,
    SDPA: record.SDPA,
    COMPILE: record.COMPILE,
    GRAPH: record.GRAPH,
    FP8: record.FP8,
}
FROM = {"fp32": [], "amp": [AMP], "sdpa": [AMP, SDPA], "compile": [AMP, SDPA, COMPILE]}  # of --from
STEP = re.compile(r"\d+_\w+\.py")


class Planned(NamedTuple):
    """One script to run."""

    script: str  # relative to the project: x.py, peers/x.py
    arguments: list[str]
    output: str  # of its record, relative to the run folder: x.json, pass-2/x.json, 2-ddp/x.json
    gpus: int = 1  # processes
    patch: str | None = None  # of anatomy/variants, applied to a copy of the script


def scripts(only: str | None = None) -> list[str]:
    """The steps in the order of their numbers, or those whose numbers `only` names: `3,4`."""
    names = [path.name for path in ROOT.glob("*.py") if STEP.fullmatch(path.name) and path.is_file()]
    if only is not None:
        wanted = {int(number) for number in only.split(",")}
        names = [name for name in names if number_of(name) in wanted]
    return sorted(names, key=lambda name: (number_of(name), name))


def misnamed_scripts() -> list[str]:
    """Files that begin as a step does, and are none."""
    return sorted(path.name for path in ROOT.glob("[0-9]*.py") if not STEP.fullmatch(path.name))


def number_of(script: str) -> int:
    return int(script.partition("_")[0])


def peers() -> list[str]:
    """Other implementations of the same training."""
    return sorted(f"peers/{path.name}" for path in ROOT.glob("peers/[a-z]*.py"))


def captures(script: str) -> bool:
    """Whether a step can be captured as a CUDA graph: it defines `capture`."""
    return re.search(rb"(?m)^    def capture\(", (ROOT / script).read_bytes()) is not None


def check(
    arguments: list[str],
    gpus: int = 1,
    model: str | None = None,
    limit_s: int = LIMIT_S,
    name: str = "run_all.sh",
    roofs: bool = False,
) -> dict:
    """What the arguments mean here, by a process that imports torch: see ladder/facts.py, and of a `model`
    that is not ours mine/check.py. With `roofs` it measures what the machine reaches, too. Exits with
    one line where they are wrong, with code 2, and where the user stops it, with that of the signal. `name`
    is of the command that the user gave."""
    variables, stop = {}, process.Stop()
    stop.listen()
    if gpus > 1:  # as torchrun tells the last of the processes
        last = {"RANK": gpus - 1, "WORLD_SIZE": gpus, "LOCAL_RANK": gpus - 1}
        variables |= {name: str(value) for name, value in last.items()} | {"TORCHELASTIC_RUN_ID": "check"}
    if model:
        say(f"Loading {Path(model).name}, and watching its first training steps")
    module = ["mine.check", model] if model else ["ladder.facts"]
    if roofs:
        module.append("--roofs")
    with tempfile.TemporaryDirectory() as folder:
        log, facts = Path(folder) / "log", Path(folder) / "facts.json"
        command = [sys.executable, "-m", *module, *arguments, "--output", str(facts)]
        try:
            ended = process.run(command, log, limit_s, stop, "checking the arguments", variables)
        finally:
            stop.listen_no_more()
        if stop.requests:
            say(f"{name}: interrupted: nothing has run yet", sys.stderr)
            sys.exit(stop.code)
        if ended or not facts.exists():
            refuse(ended[1] if ended else "it gave no answer", log, name)
        return read_object(facts)


def refuse(reason: str, log: Path, name: str) -> None:
    """Exit with one line: that of the check, of a package that cannot be imported, or where it broke, how it
    ended after all that it has said."""
    said = log.read_text(errors="replace").strip().splitlines()
    if said and said[-1].startswith(("ImportError", "ModuleNotFoundError", "OSError")):
        say(f"{name}: error: {sys.executable}: {one_line(said[-1])}", sys.stderr)
        sys.exit(2)
    if reason != process.last_line(log, ": error: "):
        say(log.read_text(errors="replace").rstrip(), sys.stderr)
        reason = f"the check of the arguments broke: {reason.partition(': see ')[0]}"
    say(f"{name}: error: {reason}", sys.stderr)
    sys.exit(2)


def with_pinned(arguments: list[str], pinned: dict[str, str]) -> list[str]:
    """The arguments with these options in place of the user's, which may have left them to this machine."""
    return [*without(arguments, pinned), *(word for option in pinned.items() for word in option)]


def ladder(arguments: list[str], names: list[str], gpus: int = 1) -> list[Planned]:
    """A row for each script."""
    return [Planned(name, arguments, name.replace(".py", ".json"), gpus) for name in names]


def of_model(model: str, arguments: list[str], only: str | None, seen: dict) -> list[Planned]:
    """The rows of a model that is not ours, or those whose numbers `only` names: the file unchanged, and each
    change that it does not make itself, as the check has `seen`."""
    names = [seen["first"], *(name for name in list(MODEL_ROWS)[2:] if name not in seen["rows_in_file"])]
    names = [name for name in names if only is None or str(number_of(name)) in only.split(",")]
    return [Planned(MODEL_SCRIPT, [name, model, *arguments], f"{name}.json") for name in names]


def repeat(rows: list[Planned], times: int) -> list[Planned]:
    """The rows again and again: all in one pass before the next begins."""
    return rows + [row._replace(output=f"pass-{k}/{row.output}") for k in range(2, times + 1) for row in rows]


def at(place: str, rows: list[Planned], more: list[str], gpus: int = 1) -> list[Planned]:
    """The rows in a place of a study, with more arguments."""
    return [Planned(row.script, [*row.arguments, *more], f"{place}/{row.output}", gpus) for row in rows]


def scaling(rows: list[Planned], most: int, parallel: str | None, device_type: str) -> list[Planned]:
    """Every row on 1, 2, 4, ... and `most` GPUs, by DDP and FSDP2 or one of them."""
    counts = sorted({most, *(2**k for k in range(most.bit_length()))})
    planned = at("1", rows, [])
    for gpus in counts[1:]:
        for how in PARALLEL if parallel is None else [parallel]:
            planned += at(f"{gpus}-{how}", rows, ["--parallel", how], gpus)
    if device_type == "cuda" and parallel != "ddp":
        planned += at(LAUNCHED, [row for row in rows if captures(row.script)], ["--no-capture"])
    return planned


def sweep(rows: list[Planned], device_type: str) -> list[Planned]:
    """Every row at several widths, and at one width at several lengths, two blocks each."""
    planned = []
    for channels, length, tokens in SWEEP[device_type]:
        heads = channels // HEAD_DIM[device_type]
        words = f"--n-layer 2 --n-embd {channels} --n-head {heads}"
        words += f" --seq-len {length} --batch-size {tokens // length}"
        planned += at(f"{channels}-channels-{length}-tokens", rows, words.split())
    return planned
