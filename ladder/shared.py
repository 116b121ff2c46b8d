"""What every kind of ladder shares: the steps that --only names, its folder, the roofs, the row of a record."""

from __future__ import annotations

import argparse
import datetime
import tempfile
from pathlib import Path

from common.record import PLAN, read_object, write_json
from common.text import OneLineParser, say
from ladder import process

GIB = 2**30
NOT_TRIED = "not tried"
SWEEP_MINUTES = 30  # the longest that a sweep takes, unless the user says so


def step_names(root: Path) -> list[str]:
    """The scripts of the steps that are there."""
    return sorted(path.stem for path in root.glob("[0-9]_*.py"))


def steps_named(only: str | None, names: list[str], parser: OneLineParser) -> list[str]:
    """Of these steps those that --only names by their numbers, or all. Exits where it names another."""
    numbers = {name[0] for name in names}
    wanted = numbers if only is None else set(only.split(","))
    if wanted - numbers:
        parser.error(f"--only {only!r} names a step that is not there: give some of {','.join(sorted(numbers))}")
    return [name for name in names if name[0] in wanted]


def refuse_others(given: argparse.Namespace, parser: OneLineParser, taken: set[str], why: str) -> None:
    """Exits where an option was given that is none of those which are taken: nobody's option is ignored."""
    others = [name for name, value in vars(given).items() if name not in taken and value != parser.get_default(name)]
    if others:
        parser.error(f"{why}: leave out --{others[0].replace('_', '-')}")


def new_folder(root: Path, kind: str, plans: dict[str, dict], parser: OneLineParser) -> Path:
    """A new folder below results/, named by the time and its kind, that others may read, with a plan in each place.

    Exits where it cannot be written.
    """
    now, results = datetime.datetime.now(datetime.timezone.utc), root / "results"
    try:
        results.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{now:%Y%m%d-%H%M%S}-{kind}", dir=results))
        folder.chmod(0o755)
        for place, plan in plans.items():
            (folder / place).mkdir(exist_ok=True)
            write_json(folder / place / PLAN, plan)
    except OSError as error:
        parser.exit(1, f"run_all.sh: error: cannot write to results/: {error.strerror or error}\n")
    return folder


def shown(folder: Path, root: Path) -> str:
    """A folder as a message names it: short where it is in results/."""
    return f"results/{folder.name}" if folder.parent == root / "results" else str(folder)


def too_large(needed: int, free: int) -> str:
    """Why a row is not tried that needs so many bytes of those that are free."""
    return f"needs about {needed / GIB:.0f} GiB of {free / GIB:.0f} free: {NOT_TRIED}"


def row_of(record: Path) -> dict:
    """The row of a script's record, unchecked; empty where there is none that can be read."""
    rows = read_object(record).get("steps")
    return rows[0] if rows and isinstance(rows, list) and isinstance(rows[0], dict) else {}


def measure_roofs(
    roofs: Path, words: list[str], limit_s: float, stop: process.Stop, environment: dict[str, str]
) -> str | None:
    """Measure the roofs; why they could not be, as one line, and None where the user ended it. Raises OSError."""
    say("measuring the roofs of this machine")
    log = roofs.with_suffix(".log")
    roofs.unlink(missing_ok=True)
    command = process.module_command("common.roofs", *words, "--output", str(roofs))
    ended = process.run(command, log, limit_s, stop, environment=environment)
    if ended.stopped or (ended.code == 0 and roofs.exists()):
        return None
    said = process.last_line(log) if ended.code > 0 else ""
    return said or process.describe(ended, limit_s, log)[1]
