"""What does each choice inside a step give? One script with a small patch, everything else as it is.

    python -m anatomy.ablations [--only NAME ...] [--output FOLDER] [ARGUMENT ...]

The ARGUMENTs are those of a step: --preset gpt2 --steps 30. Each file of anatomy/variants/ is a patch of a script, with
what arithmetic predicts for gpt3-6.7b-slice on an H200. A script runs unchanged and with each of its patches.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common.record import MERGED, Study, read_object, write_json
from common.text import OneLineParser, Skip, aligned, one_line, portable_command, run_command, say

ROOT = Path(__file__).resolve().parent.parent


def variants() -> dict[str, dict[str, str]]:
    """The patches by their file name without its ending; each has the lines Variant, Script and Predicted."""
    heads = {path.stem: path.read_text().partition("\n--- ")[0] for path in ROOT.glob("anatomy/variants/*.patch")}
    return {key: dict(line.split(": ", 1) for line in heads[key].splitlines() if ": " in line) for key in sorted(heads)}


def write_script(key: str, script: str, folder: Path) -> Path:
    """The patched script in an empty `folder`, next to all other scripts and a link to common/. Raises Skip."""
    (folder / "peers").mkdir()
    (folder / "common").symlink_to(ROOT / "common")
    for path in [*ROOT.glob("[0-9]_*.py"), *ROOT.glob("peers/*.py")]:
        shutil.copy(path, folder / path.relative_to(ROOT))
    command = ["git", "-C", folder, "apply", "--unsafe-paths", ROOT / f"anatomy/variants/{key}.patch"]
    applied = subprocess.run(command, capture_output=True, text=True)
    if applied.returncode:
        raise Skip(f"{key}.patch does not fit {script}.py: {one_line(applied.stderr)}")
    return folder / f"{script}.py"


def same_work(run: dict) -> dict:
    """What all runs of a study share: the machine, the code, and the workload but for its seed."""
    machine = run["environment"]
    return run["workload"] | {"seed": None, "device": machine["device"], "code": machine["code_sha256"]}


def option_pairs(command: str) -> list[tuple[str, str]]:
    """The options of a command, each with the word that follows it, in one order."""
    words = command.split()
    return sorted(pair for pair in zip(words, [*words[1:], ""], strict=True) if pair[0].startswith("-"))


class Runs:
    """What scripts recorded, by name, and the folder with the study that keeps it."""

    def __init__(self, kind: str, folder: Path | None):
        """Continues the study in a folder. Raises Skip where that holds other things or is read-only, and OSError."""
        self.path = folder / MERGED if folder else None
        content = read_object(self.path) if folder else {}
        if folder and self.path.exists() and content.get("kind") != kind:
            raise Skip(f"--output {folder} holds another record than a study of {kind}")
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            if (not self.path.exists() and any(folder.iterdir())) or not os.access(folder, os.W_OK):
                raise Skip(f"--output {folder} is read-only, or holds files that are of no study")
        self.kind, self.by_name, self.tried = kind, content.get("runs", {}), set()
        own = portable_command(f"python -m anatomy.{kind} --output {kind}", sys.argv[1:])
        self.command = " && ".join(dict.fromkeys([*filter(None, content.get("command", "").split(" && ")), own]))

    def row(self, name: str) -> dict:
        failed = {"status": "failed", "reason": "it left no record", "step_ms": []}
        return self.by_name[name]["rows"][0] if name in self.by_name else failed

    def add(self, name: str, script: Path, arguments: list[str]) -> None:
        """Run a script and keep its record, unless it is there and ok. Raises Skip, one line."""
        known = self.by_name.get(name, {}).get("command", "")
        if known and option_pairs(known) != option_pairs(portable_command("", arguments)):
            raise Skip(f"--output {self.path} holds runs with other arguments: {known}")
        if self.row(name)["status"] == "ok" or name in self.tried:
            return
        self.tried.add(name)
        say(f"{name} ...", sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "record.json"
            command = [sys.executable, script, *arguments, "--output", output]
            code, run = subprocess.run(command, stdout=subprocess.DEVNULL).returncode, read_object(output)
        if code == 130:
            raise KeyboardInterrupt
        if code == 2:
            raise Skip(f"{script.stem} refuses these arguments, see above")
        if run and any(same_work(run) != same_work(other) for other in self.by_name.values()):
            raise Skip(f"--output {self.path} holds runs of another workload, machine or code")
        self.by_name |= {name: run} if run else {}
        if self.path:
            write_json(self.path, Study(self.kind, self.command, None, self.by_name))  # each run has its own time


def cells(runs: Runs, key: str, variant: dict[str, str]) -> dict[str, str]:
    unchanged, varied = runs.row(Path(variant["Script"]).name), runs.row(key)
    ms = [statistics.median(row["step_ms"]) if row["step_ms"] else None for row in (unchanged, varied)]
    shown = [f"{one:.1f}" if one else "-" for one in ms]
    found = {"script": variant["Script"], "variant": variant["Variant"], "predicted": variant["Predicted"]}
    found |= {"unchanged, ms": shown[0], "varied, ms": shown[1]}
    return found | {"difference": f"{ms[1] - ms[0]:+.1f}" if all(ms) else unchanged["reason"] or varied["reason"]}


def main() -> int:
    known = variants()
    parser = OneLineParser(prog="python -m anatomy.ablations", description=f"{__doc__}\nVariants: {', '.join(known)}")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants whose name or script contains one of these")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the study, new or continued")
    options, arguments = parser.parse_known_args()
    names = {key: f"{key} {variant['Script']}" for key, variant in known.items()}
    if strangers := [word for word in options.only or [] if not any(word in name for name in names.values())]:
        parser.error(f"no variant is named like {one_line(strangers[0])}")
    chosen = [key for key in known if any(word in names[key] for word in options.only or [""])]
    try:
        runs = Runs("ablations", options.output)
        for key in chosen:
            script = known[key]["Script"]
            with tempfile.TemporaryDirectory() as folder:
                runs.add(Path(script).name, ROOT / f"{script}.py", arguments)
                runs.add(key, write_script(key, script, Path(folder)), arguments)
    except Skip as error:
        parser.error(str(error))
    say(aligned([cells(runs, key, known[key]) for key in chosen], n_left=3))
    return int(any(runs.row(key)["status"] not in ("ok", "skipped") for key in chosen))


if __name__ == "__main__":
    run_command(main, "python -m anatomy.ablations")
