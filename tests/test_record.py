"""docs/record.sh: a piece that was interrupted, however hard, goes on; one that loses a row is not kept."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from common.fingerprint import row_sha256

# Makes a run folder as run_all.sh does. KILL=yes ends the recording by kill -9 before the run is whole.
RUN_ALL = r"""#!/usr/bin/env bash
[[ $* == *--output* ]] || exit 2
folder="${*: -1}"
mkdir -p "$folder"
echo "$*" | tee -a asked >>"$folder/asked"
[ "$KILL" != yes ] || { kill -9 $PPID; exit; }
cp made.json "$folder/results.json"
"""


@pytest.fixture
def record(tmp_path):
    """Records pieces in a copy of the project whose run_all.sh trains nothing; returns how it ended, its last
    line, and the copy."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "results", "__pycache__"))
    (copy / "run_all.sh").write_text(RUN_ALL)
    (copy / "docs" / "renew.sh").write_text("")
    made = json.loads((ROOT / "docs" / "results" / "epyc-2-cores" / "tiny" / "results.json").read_text())
    # This machine is called as the record says, whatever it is, and the record is of the present code.
    with (copy / "common" / "hardware.py").open("a") as module:
        module.write(f"\n\ndef device_name(device):\n    return {made['environment']['device']!r}\n")
    for row in made["rows"]:
        row["code_sha256"] = row_sha256((copy / f"{row['step']}.py").read_text(), copy)
    (copy / "made.json").write_text(json.dumps(made))
    of_git = ["git", "-c", "user.name=x", "-c", "user.email=x"]
    (copy / ".gitignore").write_text("results/\nmade.json\nasked\n__pycache__/\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*of_git, *words], cwd=copy, check=True)

    def recorded(*words, kill="no"):
        ended = subprocess.run(
            ["bash", "docs/record.sh", *words],
            cwd=copy,
            env=os.environ | {"PYTHON": sys.executable, "KILL": kill},
            capture_output=True,
            text=True,
        )
        return ended.returncode, ended.stderr.splitlines()[-1:], copy

    return recorded


@pytest.mark.slow
def test_a_piece_goes_on_is_left_alone_once_present_and_never_loses_a_row(record):
    """A kill ends the first try. Another card is refused."""
    code, _, copy = record("trial", "gpt3-xl", kill="yes")
    going_on = copy / "results" / "trial-gpt3-xl" / "asked"
    words = "--preset gpt3-xl --output results/trial-gpt3-xl"
    assert code and going_on.read_text().split("\n")[:-1] == [words]
    assert not (copy / "docs" / "results" / "trial").exists()
    assert record("trial", "gpt3-xl")[:2] == (0, [])
    kept = copy / "docs" / "results" / "trial" / "gpt3-xl"
    assert [path.name for path in kept.iterdir()] == ["results.json"] and not going_on.exists()
    assert record("trial", "gpt3-xl")[:2] == (0, [])
    assert (copy / "asked").read_text() == f"{words}\n" * 2, "what is of the present code is left alone"
    kept /= "results.json"
    content = json.loads(kept.read_text())
    content["rows"][0]["code_sha256"] = "of other code"
    kept.write_text(before := json.dumps(content))
    content["rows"][0] |= {"status": "skipped", "reason": "not installed", "step_ms": [], "passes": []}
    (copy / "made.json").write_text(json.dumps(content))
    here = content["environment"]["device"]
    code, (said,), _ = record("trial", "gpt3-xl")
    name = content["rows"][0]["step"]
    assert code == 2 and said.startswith(
        "docs/record.sh: error: rows of docs/results/trial/gpt3-xl have no time"
    )
    assert name in said and kept.read_text() == before
    content["environment"]["device"] = "NVIDIA H200"
    kept.write_text(json.dumps(content))
    code, (said,), _ = record("trial", "gpt2")
    assert code == 2 and f"trial has records of NVIDIA H200, and this is {here}: give another MACHINE" in said
