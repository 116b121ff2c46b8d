"""Variants of a script: patches of anatomy/variants/, each applied to a copy."""

import shutil
import subprocess
from pathlib import Path

from common.text import Skip, one_line
from ladder.process import ROOT
from ladder.rows import peers, scripts

HEAD = {"Variant", "Script", "Predicted"}


def variants() -> dict[str, dict[str, str]]:
    """The patches by their file name without its ending; each has the lines Variant, Script and Predicted.
    Raises Skip, one line, for one that lacks a line."""
    heads = {}
    for path in sorted(ROOT.glob("anatomy/variants/*.patch")):
        head = path.read_text().partition("\n--- ")[0]
        heads[path.stem] = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
        if missing := HEAD - heads[path.stem].keys():
            raise Skip(f"{path.name} lacks the line {min(missing)}: at its head")
    return heads


def write_script(key: str, script: str, folder: Path) -> Path:
    """A script (`3_compile.py`, `peers/te_layer.py`) with a patch, in an empty `folder`, next to all other
    scripts and a link to common/. Raises Skip where the patch does not fit."""
    (folder / "peers").mkdir()
    (folder / "common").symlink_to(ROOT / "common")
    for name in [*scripts(), *peers()]:
        shutil.copy(ROOT / name, folder / name)
    apply(ROOT / f"anatomy/variants/{key}.patch", folder, script)
    return folder / script


def apply(patch: Path, folder: Path, script: str) -> None:
    """Patch the files in a folder, of which `script` is the one that a message names. Raises Skip where the
    patch does not fit."""
    command = ["git", "-C", folder, "apply", "--unsafe-paths", patch]
    try:
        applied = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise Skip(f"git cannot apply {patch.name} ({error.strerror}): install git") from None
    if applied.returncode:
        raise Skip(f"{patch.name} does not fit {script}: {one_line(applied.stderr)}")
