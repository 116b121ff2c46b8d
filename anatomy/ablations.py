"""What does each choice inside a step give? One script with a small patch, everything else as it is.

    python -m anatomy.ablations [--causes | --gpus N] [--only NAME ...] [--output FILE] [ARGUMENT ...]

The ARGUMENTs are those of a step (--preset gpt2 --steps 30 --profile). Each file of anatomy/variants/ is a patch of one
script or peer, with its name and its predicted effect above the diff. A variant runs on the step's benchmark, in a
process of its own, after the unchanged script; the table gives the differences. An ablation takes away what the script
has, a try adds what it has not. A mutation is a fault, put in to see whether `python -m anatomy.parity` notices it: it
runs here only where --only has a part of its name, or as a cause. A FILE that exists keeps its other variants, each
with the unchanged script that ran beside it. With --profile it also has the times of both by kernel category.

Some variants stand between a script and the one before. They have only one cause of the gain, or all but one: their
headers name the later script (Rung) and the cause. --causes runs these, and the variants of the peers, whose heads they
bring to one format. docs/performance.md shows what they say of each gain. With --gpus N, the variants of how N
processes share the model run instead, each with the Parallel that its header names; docs/scaling.md shows them.
Predictions are arithmetic for gpt3-6.7b-slice on an H200 unless they say otherwise: bytes over copy bandwidth, FLOPs
over the measured roof.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common.record import check_writable, write_json
from common.text import OneLineParser, aligned, one_line, portable_command, positive_int, say
from ladder import process

ROOT = Path(__file__).resolve().parent.parent
MUTATION = "mutation"
VARIANTS = Path(__file__).resolve().parent / "variants"
LIMIT_S = 900
KEPT = ("status", "reason", "note", "settings", "loss", "timing", "peak_allocated_bytes")  # of a row


class VariantError(ValueError):
    """A variant cannot be made or recorded; the message is one line."""


@dataclass(frozen=True)
class Variant:
    """A patch of one script, or of common/ for one script. `kind` is `ablation`, `try` or `mutation`.

    Of a cause, `rung` is the script whose gain it is about, and `cause` begins with `only` or `without`. `parallel` is
    how several processes share the model, where the variant is about that.
    """

    name: str
    script: str
    kind: str
    predicted: str
    patch: Path
    rung: str | None = None
    cause: str | None = None
    parallel: str | None = None
    needs: str | None = None  # begins with the module that it imports beside the script's


def variants(folder: Path = VARIANTS) -> list[Variant]:
    """The patches of a folder, by script and name. Above the diff, each has the lines Variant, Script, Kind, Predicted,
    a cause also Rung and Cause, one for several processes also Parallel, one that imports more also Needs."""
    listed = []
    for path in sorted(folder.glob("*.patch")):
        head = path.read_text().partition("\n--- ")[0]
        fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
        needed = (fields[name] for name in ("Variant", "Script", "Kind", "Predicted"))
        listed.append(Variant(*needed, path, *map(fields.get, ("Rung", "Cause", "Parallel", "Needs"))))
    return sorted(listed, key=lambda variant: (variant.script, variant.name))


def chosen_variants(
    listed: list[Variant], words: list[str] | None, causes: bool = False, several: bool = False
) -> list[Variant]:
    """The variants whose name or script contains one of the words; without words all. `causes`: of the causes alone;
    `several`: of those for several processes, which are left out otherwise.

    A mutation that is not asked for as a cause is chosen by its name only.
    """
    listed = [variant for variant in listed if bool(variant.parallel) == several]
    if causes:
        listed = [variant for variant in listed if variant.rung or variant.script.startswith("peers/")]
    shown = [variant for variant in listed if causes or variant.kind != MUTATION]
    if words is None:
        return shown
    return [v for v in listed if any(word in v.name or (word in v.script and v in shown) for word in words)]


def describe_variants(listed: list[Variant]) -> str:
    """A line per variant with its script, its kind, and its cause or its parallel, for a --help."""
    width = max(len(variant.name) for variant in listed)
    about = {v.name: f": {v.rung} {v.cause}" if v.rung else f", {v.parallel}" * bool(v.parallel) for v in listed}
    return "variants:\n" + "\n".join(f"  {v.name:{width}}  {v.script}, {v.kind}{about[v.name]}" for v in listed)


def write_script(variant: Variant, folder: Path) -> Path:
    """The script in `folder`, patched or beside a patched common/. Raises VariantError where the patch does not fit, or
    git is missing."""
    patched = re.findall(r"^\+\+\+ b/(\S+)", variant.patch.read_text(), re.MULTILINE)
    # A script imports what lies beside it. common/ is linked, so that its files know the working copy and its commit.
    for path in [*ROOT.glob("common/*.py"), *ROOT.glob("[0-9]_*.py"), ROOT / f"{variant.script}.py"]:
        name = str(path.relative_to(ROOT))
        copy = folder / name
        copy.parent.mkdir(exist_ok=True)
        copy.unlink(missing_ok=True)
        if name.startswith("common/") and name not in patched:
            copy.symlink_to(path)
        else:
            shutil.copy(path, copy)
    script = folder / f"{variant.script}.py"
    try:
        command = ["git", "-C", str(folder), "apply", "--unsafe-paths", str(variant.patch)]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise VariantError("git is not installed: it applies the variants") from None
    except subprocess.CalledProcessError as error:
        raise VariantError(f"{variant.patch.name} does not fit {script.name}: {one_line(error.stderr)}") from None
    return script


def run_script(script: Path, arguments: list[str], folder: Path, limit_s: float, stop: process.Stop,
               environment: dict[str, str] | None = None, gpus: int = 1) -> tuple[dict | None, dict]:  # fmt: skip
    """The run that a script recorded, and its row. Where it left no record: None, and a row of status and reason.

    Its record and its log are written to `folder`. Raises VariantError where it refuses the arguments.
    """
    record, log = folder / "record.json", folder / f"{script.stem}.log"
    record.unlink(missing_ok=True)
    command = process.script_command(script, [*arguments, "--output", str(record)], gpus)
    environment = process.share_of_threads(gpus) | (environment or {})
    ended = process.run(command, log, limit_s, stop, environment=environment)
    if ended.code == 2:
        raise VariantError(process.last_line(log).partition("error: ")[2])
    if record.exists():
        run = json.loads(record.read_text())
        return run, run["steps"][0]
    status, reason = process.describe(ended, limit_s, log)
    if gpus == 1 and ended.code > 0:  # the last line of several processes is torchrun's, and says nothing
        reason = process.last_line(log) or reason
    return None, {"status": status, "reason": reason, "timing": {"median_ms": None}}


def check(arguments: list[str], folder: Path, gpus: int = 1) -> dict:
    """What the arguments mean on this machine, from `python -m ladder.check`. Raises VariantError."""
    command = process.module_command("ladder.check", *arguments, "--output", str(folder / "check.json"))
    done = subprocess.run(command, env=os.environ | process.first_of(gpus), capture_output=True, text=True)
    if done.returncode:
        said = one_line(done.stderr.strip().rpartition("error: ")[2])
        raise VariantError(said or f"the check of the arguments ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


# --- the file of figures --------------------------------------------------------------------------


def recorded(output: Path | None) -> dict:
    """What an earlier call wrote, or the same without content. Raises VariantError for any other file."""
    empty = {"command": "", "environment": None, "workload": None, "variants": []}
    if output is None or not output.exists():
        return empty
    try:
        content = json.loads(output.read_text())
        table(content["variants"])
        same_work(content["workload"])
        return empty | {key: content[key] for key in empty if key in content}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise VariantError(f"--output {output} exists and holds no ablations ({type(error).__name__})") from None


def same_work(workload: dict | None) -> dict:
    """What the variants of one file share. Steps and batches each shares with the unchanged script beside it."""
    return {key: value for key, value in (workload or {}).items() if key not in ("steps", "data", "parallel")}


def table(rows: list[dict]) -> str:
    """A row of cells per variant, for a terminal."""
    cells = []
    for row in rows:
        ms, unchanged = row["timing"]["median_ms"], row["baseline"]["timing"]["median_ms"]
        measured = ms is not None and unchanged is not None
        cells.append({
            "script": row["script"], "kind": row["kind"], "variant": row["name"], "predicted": row["predicted"],
            "unchanged, ms": "-" if unchanged is None else f"{unchanged:.1f}",
            "varied, ms": "-" if ms is None else f"{ms:.1f}",
            "difference": f"{ms - unchanged:+.1f} ms" if measured
            else row["reason"] or row["baseline"]["reason"] or row["status"],
        })  # fmt: skip
    return aligned(cells, n_left=4)


# --- the command ----------------------------------------------------------------------------------


class Measurements:
    """Runs scripts on one workload and keeps what they record."""

    def __init__(self, arguments: list[str], output: Path | None, folder: Path, stop: process.Stop, gpus: int):
        self.arguments, self.output, self.folder, self.stop, self.gpus = arguments, output, folder, stop, gpus
        self.before = recorded(output)
        self.environment, self.workload = self.before["environment"], self.before["workload"]
        command = portable_command(["python", "-m", "anatomy.ablations", *sys.argv[1:]])
        self.commands = dict.fromkeys([*self.before["command"].splitlines(), command])

    def measure(self, script: Path, parallel: str | None) -> dict:
        """What is kept of a script's row. Raises VariantError where its workload or machine is another."""
        arguments = [*self.arguments, *(["--parallel", parallel] if parallel else [])]
        run, row = run_script(script, arguments, self.folder, LIMIT_S, self.stop, gpus=self.gpus)
        if run is None:
            return row
        if self.workload and same_work(self.workload) != same_work(run["workload"]):
            raise VariantError(f"--output {self.output} holds ablations of another workload")
        if self.environment and self.environment["device"] != run["environment"]["device"]:
            raise VariantError(f"--output {self.output} holds ablations of another machine")
        self.environment, self.workload = run["environment"], run["workload"] | {"parallel": None}  # each has its own
        kept = {key: row[key] for key in KEPT} | {"started_at": run["started_at"]}
        if row["profile"]:  # the times of its kernels would be most of the file
            kept["profile"] = row["profile"] | {"kernels": [], "block": None}
        return kept | {key: run["environment"][key] for key in ("commit", "gpu_uuid")}

    def write(self, rows: list[dict]) -> None:
        """Write these rows and those of an earlier call; of the same name, the new one. Each command is a line."""
        by_name = {row["name"]: row for row in [*self.before["variants"], *rows]}
        merged = sorted(by_name.values(), key=lambda row: (row["script"], row["name"]))
        if self.output:
            known = {"environment": self.environment, "workload": self.workload}
            write_json(self.output, {"command": "\n".join(self.commands)} | known | {"variants": merged})


def with_their_modules(chosen: list[Variant]) -> list[Variant]:
    """The variants whose modules are there; a line says what others need. Raises VariantError where all need one."""
    lacking = [v for v in chosen if v.needs and importlib.util.find_spec(v.needs.partition(".")[0]) is None]
    if lacking == chosen:
        raise VariantError(f"{chosen[0].name} needs {chosen[0].needs}")
    for variant in lacking:
        say(f"{variant.name} is left out: it needs {variant.needs}")
    return [variant for variant in chosen if variant not in lacking]


def run_variants(chosen: list[Variant], arguments: list[str], output: Path | None, gpus: int = 1) -> int:
    """Run each variant after the script that it changes; returns 1 where one failed, 130 where interrupted."""
    stop, baselines, rows = process.Stop(), {}, []
    with tempfile.TemporaryDirectory() as temporary:
        measurements = Measurements(arguments, output, Path(temporary), stop, gpus)
        check(arguments, Path(temporary), gpus)
        stop.listen()
        for variant in chosen:
            script, unchanged = write_script(variant, Path(temporary)), (variant.script, variant.parallel)
            if unchanged not in baselines:
                baselines[unchanged] = measurements.measure(ROOT / f"{variant.script}.py", variant.parallel)
            row = {key: value for key, value in vars(variant).items() if key not in ("patch", "needs")}
            row |= measurements.measure(script, variant.parallel) | {"baseline": baselines[unchanged]}
            if stop.requests and not (row.get("started_at") and row["baseline"].get("started_at")):
                break
            rows.append(row)
            measurements.write(rows)  # after each one: what is measured is kept
            say(f"{variant.script}, {variant.name}: {row['reason'] or 'ok'}")
            if stop.requests:
                break
    if rows:
        say(f"\n{table(rows)}")
    if stop.requests:
        sys.stderr.write("python -m anatomy.ablations: interrupted\n")
        return 130
    return int(any(row["status"] not in ("ok", "skipped") for row in [*rows, *baselines.values()]))


def main() -> None:
    listed = variants()
    parser = OneLineParser(
        prog="python -m anatomy.ablations",
        usage="%(prog)s [-h] [--causes | --gpus N] [--only NAME ...] [--output FILE] [ARGUMENT ...]",
        description=__doc__,
        epilog=describe_variants(listed),
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants whose name or script contains one of these")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--causes", action="store_true", help="the variants that divide each gain among its causes")
    text = "the variants of how so many processes share the model, one a GPU (or on a CPU)"
    kinds.add_argument("--gpus", type=positive_int, default=1, metavar="N", help=text)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    given, arguments = parser.parse_known_args()
    several = given.gpus > 1
    chosen = chosen_variants(listed, given.only, given.causes, several)
    if not chosen:
        named = f"named like {', '.join(given.only)}"
        if elsewhere := chosen_variants(listed, given.only, several=not several):
            how = "without" if several else "with"
            parser.error(f"what is {named}, as {elsewhere[0].name}, runs {how} --gpus N")
        parser.error(f"no variant is {named}")
    try:
        if given.output:
            check_writable(given.output, "variants")
        sys.exit(run_variants(with_their_modules(chosen), arguments, given.output, given.gpus))
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.exit(1, f"{parser.prog}: error: {error.strerror or error}\n")


if __name__ == "__main__":
    main()
