"""Do the rows learn the same? Each row trains with several seeds, long enough to learn more than a histogram of bytes.

    python -m anatomy.parity [--seeds 1 2 3] [--rows NAME ...] [--at-once N] --output FILE [ARGUMENT ...]

The ARGUMENTs are those of a step (--preset gpt2 --batch-size 8 --steps 1000). A row is a script by its name or number,
a peer (peers/te_layer), or a variant of a script by its name. A variant of kind mutation is a fault: a study that
does not see it proves nothing about the other rows. Every run is a process of its own, and FILE is written after it.
A FILE that exists is continued: what is ok in it is not run again. Losses do not depend on what else the machine does,
so several runs may train at the same time. At the end it says what docs/parity.md explains: which rows differ from the
first, and which faults were seen. The same command says it again, and trains nothing that is there.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from anatomy.ablations import ROOT, Variant, VariantError, check, describe_variants, run_script, variants, write_script
from common.arguments import seed_int
from common.record import check_writable, write_bytes
from common.text import OneLineParser, aligned, one_line, portable_command, positive_int, say
from ladder import process
from report.load import RecordError
from report.parity import read_study, summary

LIMIT_S = 7200
DEFAULT_STEPS, DEFAULT_VARIANTS = ("0_baseline", "3_compile", "4_transformer_engine"), ("fused AdamW, step 3",)
OF_A_SEED = {"seed", "batches_sha256"}  # what differs between the seeds of one workload


@dataclass(frozen=True)
class Trained:
    """What is trained: a script, or a variant of it. `kind` is `step`, `peer`, or the variant's kind."""

    row: str
    script: str
    kind: str
    variant: Variant | None = None

    def path(self, folder: Path) -> Path:
        """The script to run; a variant's is written to `folder`. Raises VariantError."""
        return write_script(self.variant, folder) if self.variant else ROOT / f"{self.script}.py"


def every_row() -> list[Trained]:
    """Steps, peers, variants."""
    steps = [Trained(path.stem, path.stem, "step") for path in sorted(ROOT.glob("[0-9]_*.py"))]
    peers = [Trained(f"peers/{path.stem}", f"peers/{path.stem}", "peer") for path in sorted(ROOT.glob("peers/*.py"))]
    return steps + peers + [Trained(v.name, v.script, v.kind, v) for v in variants() if not v.parallel]


def rows_named(names: list[str] | None) -> list[Trained]:
    """The rows of these names, each once and in the order given. None gives the default rows. Raises VariantError."""
    rows = every_row()
    if names is None:
        return [one for one in rows if one.kind == "peer" or one.row in DEFAULT_STEPS + DEFAULT_VARIANTS]
    by_name = {one.row: one for one in rows}
    by_name |= {one.row.removeprefix("peers/"): one for one in rows if one.kind == "peer"}
    by_name |= {one.row[0]: one for one in rows if one.kind == "step"}
    for name in names:
        if name not in by_name:
            raise VariantError(f"--rows: no step, peer or variant is named {one_line(name, 60)!r}; --help lists them")
    return list(dict.fromkeys(by_name[name] for name in names))


def same_work(workload: dict) -> dict:
    """What the runs of one study share of their workloads: all but the seed and what follows from it."""
    data = {key: value for key, value in workload["data"].items() if key not in OF_A_SEED}
    return {key: value for key, value in workload.items() if key not in OF_A_SEED} | {"data": data}


class Study:
    """The runs of one workload on one machine, and the file that holds them."""

    def __init__(self, output: Path, workload: dict, device: str, command: str):
        """Raises VariantError where the file holds something else."""
        self.output, self.device, self.environment, self.runs = output, device, None, {}
        self.workload, self.command = same_work(workload), command
        self.read()

    def read(self) -> None:
        """What an earlier call wrote, or one beside this. Raises VariantError where the file holds something else."""
        if not (self.output.exists() and self.output.read_bytes().strip()):
            return
        try:
            read_study(self.output)
        except RecordError as error:
            raise VariantError(f"{self.output} holds no study: it stays as it is ({error})") from None
        content = json.loads(self.output.read_text())
        if content["workload"] != self.workload:
            raise VariantError(f"{self.output} holds a study of another workload")
        if content["environment"] and content["environment"]["device"] != self.device:
            raise VariantError(f"{self.output} holds a study of another machine")
        self.environment = content["environment"]
        self.runs = {(run["row"], run["seed"]): run for run in content["runs"]}

    def is_done(self, one: Trained, seed: int) -> bool:
        return self.runs.get((one.row, seed), {}).get("status") == "ok"

    def add(self, one: Trained, seed: int, run: dict | None, row: dict) -> dict:
        """Keep a run and write the file, which another call may have written to. Raises VariantError, OSError."""
        self.read()
        kept = {"row": one.row, "script": one.script, "kind": one.kind, "seed": seed}
        kept |= {key: row.get(key) for key in ("status", "reason", "note", "settings", "heldout_loss")}
        if run is not None:
            if same_work(run["workload"]) != self.workload:
                raise VariantError(f"{one.row} trained another workload than the study's")
            self.environment = run["environment"]
            kept |= {"started_at": run["started_at"]} | {key: self.environment[key] for key in ("commit", "gpu_uuid")}
        kept |= {"loss": [round(loss, 4) for loss in row.get("loss", [])]}
        self.runs[one.row, seed] = kept
        self.write()
        return kept

    def write(self) -> None:
        """Write the file: a line a run, in the order of seeds and of `every_row`. Raises OSError."""
        order = {one.row: k for k, one in enumerate(every_row())}
        runs = sorted(self.runs.values(), key=lambda run: (run["seed"], order.get(run["row"], len(order))))
        lines = ",\n".join(json.dumps(run, allow_nan=False) for run in runs)
        head = {"command": self.command, "environment": self.environment, "workload": self.workload}
        write_bytes(self.output, f'{json.dumps(head, indent=1)[:-2]},\n "runs": [\n{lines}\n]}}\n'.encode())


def run_study(rows: list[Trained], seeds: list[int], arguments: list[str], output: Path, at_once: int) -> int:
    """Train every row with every seed, `at_once` of them at a time; returns 1 where one failed, 130 where interrupted.

    What `output` holds is not trained again. The seeds begin one after the other, so that a study which ends early
    holds whole seeds. Raises VariantError, OSError.
    """
    if any(word.partition("=")[0] == "--seed" for word in arguments):
        raise VariantError("--seed: name the seeds by --seeds")
    if at_once > 1 and any("cuda:" in word for word in arguments):
        raise VariantError("--device: several runs at a time divide the GPUs of CUDA_VISIBLE_DEVICES")
    stop = process.Stop()
    with tempfile.TemporaryDirectory() as temporary:
        facts = check(arguments, Path(temporary))
    stop.listen()
    arguments = [*arguments, *facts["pinned"]]
    command = f"python -m anatomy.parity {portable_command(arguments)}"
    study = Study(output, facts["workload"], facts["device"], command)
    todo = [(one, seed) for seed in seeds for one in rows if not study.is_done(one, seed)]
    at_once, failed = max(1, min(at_once, len(todo))), False
    free = places(at_once, facts)
    with ThreadPoolExecutor(at_once) as pool:
        try:
            begun = {pool.submit(train, *each, arguments, free, stop): each for each in todo}
            for ended in as_they_end(begun):
                run, row = ended.result()
                if stop.requests and run is None:
                    continue
                kept = study.add(*begun[ended], run, row)
                failed |= kept["status"] not in ("ok", "skipped")
                said = kept["reason"] or f"held-out loss {kept['heldout_loss'] or math.nan:.4f}"
                say(f"seed {kept['seed']}, {kept['row']}: {kept['status']}, {said}")
        finally:  # where one raised, the others end
            interrupted, stop.requests = stop.requests > 0, 1
    if study.runs:
        say("\n".join(["", *summary(read_study(output))]))
    if interrupted:
        sys.stderr.write("python -m anatomy.parity: interrupted\n")
    return 130 if interrupted else int(failed)


def as_they_end(futures: Iterable[Future]) -> Iterator[Future]:
    """Futures as they end. A wait without a limit would miss a Ctrl-C that comes just before it."""
    rest = set(futures)
    while rest:
        ended, rest = wait(rest, process.POLL_S, FIRST_COMPLETED)
        yield from ended


def places(count: int, facts: dict) -> queue.SimpleQueue:
    """For so many runs at a time, the environment variables of each: its GPU, and its share of the cores."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(facts["gpus"])))
    gpus, several = visible.split(",")[: facts["gpus"]], min(count, facts["gpus"]) > 1
    shared, free = process.passive_waits(facts["device_type"]) | process.share_of_threads(count), queue.SimpleQueue()
    for k in range(count):
        free.put(shared | ({"CUDA_VISIBLE_DEVICES": gpus[k % len(gpus)]} if several else {}))
    return free


def train(
    one: Trained, seed: int, arguments: list[str], free: queue.SimpleQueue, stop: process.Stop
) -> tuple[dict | None, dict]:
    """The run that a row recorded, and its row, trained in one of the `free` places. Raises VariantError."""
    environment = free.get()
    try:
        if stop.requests:
            return None, {}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            words = [*arguments, "--seed", str(seed)]
            return run_script(one.path(folder), words, folder, LIMIT_S, stop, environment)
    finally:
        free.put(environment)


def build_parser() -> OneLineParser:
    others = aligned([{"rows": one.row, "kind": one.kind} for one in every_row() if not one.variant], "plain", 2)
    parser = OneLineParser(
        prog="python -m anatomy.parity",
        usage="%(prog)s [-h] [--seeds N ...] [--rows NAME ...] [--at-once N] --output FILE [ARGUMENT ...]",
        description=__doc__,
        epilog=f"{others}\n{describe_variants([one.variant for one in every_row() if one.variant])}",
    )
    parser.add_argument("--seeds", nargs="+", type=seed_int, default=[1, 2, 3], metavar="N", help="default: 1 2 3")
    names = ", ".join((*DEFAULT_STEPS, "the peers", *DEFAULT_VARIANTS))
    parser.add_argument("--rows", nargs="+", metavar="NAME", help=f"default: {names}")
    text = "runs that train at the same time; several GPUs divide them (default: 1)"
    parser.add_argument("--at-once", type=positive_int, default=1, metavar="N", help=text)
    parser.add_argument("--output", type=Path, metavar="FILE", required=True, help="the study; written or continued")
    return parser


def main() -> None:
    parser = build_parser()
    given, arguments = parser.parse_known_args()
    try:
        rows = rows_named(given.rows)
        check_writable(given.output, "runs")
        sys.exit(run_study(rows, list(dict.fromkeys(given.seeds)), arguments, given.output, given.at_once))
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.exit(1, f"{parser.prog}: error: {error.strerror or error}\n")


if __name__ == "__main__":
    main()
