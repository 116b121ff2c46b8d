"""Variants of a script: patches of anatomy/variants/, each applied to a copy."""

import shutil
import subprocess
from pathlib import Path

from common.text import Skip, one_line
from ladder.process import ROOT
from ladder.runs import scripts


def variants() -> dict[str, dict[str, str]]:
    """The patches by their file name without its ending; each has the lines Variant, Script and Predicted."""
    heads = {
        path.stem: path.read_text().partition("\n--- ")[0] for path in ROOT.glob("anatomy/variants/*.patch")
    }
    return {
        key: dict(line.split(": ", 1) for line in heads[key].splitlines() if ": " in line)
        for key in sorted(heads)
    }


def write_script(key: str, script: str, folder: Path) -> Path:
    """A script (`3_compile.py`, `peers/te_layer.py`) with a patch, in an empty `folder`, next to all other
    scripts and a link to common/. Raises Skip where the patch does not fit."""
    (folder / "peers").mkdir()
    (folder / "common").symlink_to(ROOT / "common")
    for name in [*scripts(), *(f"peers/{path.name}" for path in ROOT.glob("peers/[a-z]*.py"))]:
        shutil.copy(ROOT / name, folder / name)
    command = ["git", "-C", folder, "apply", "--unsafe-paths", ROOT / f"anatomy/variants/{key}.patch"]
    applied = subprocess.run(command, capture_output=True, text=True)
    if applied.returncode:
        raise Skip(f"{key}.patch does not fit {script}: {one_line(applied.stderr)}")
    return folder / script
