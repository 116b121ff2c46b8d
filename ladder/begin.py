"""How every kind of ladder begins: the steps that --only names, a folder of its own, the roofs of the machine."""

from __future__ import annotations

import datetime
import tempfile
from pathlib import Path

from common.text import OneLineParser, say
from ladder import process


def steps_named(only: str | None, root: Path, parser: OneLineParser) -> list[str]:
    """The scripts of the steps that --only names, or all. Exits where it names one that is not there."""
    names = sorted(path.stem for path in root.glob("[0-9]_*.py"))
    numbers = only.split(",") if only else [name[0] for name in names]
    if not set(numbers) <= {name[0] for name in names}:
        parser.error(f"--only {only!r} names a step that is not there")
    return [name for name in names if name[0] in numbers]


def new_folder(results: Path, kind: str = "", now: datetime.datetime | None = None) -> Path:
    """A new folder, named by the time and its kind, that others may read. Raises OSError."""
    now = now or datetime.datetime.now(datetime.timezone.utc)
    results.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{now:%Y%m%d-%H%M%S}-{kind}", dir=results))
    folder.chmod(0o755)
    return folder


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
