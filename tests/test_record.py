"""docs/record.sh: a piece that was interrupted, however hard, goes on in its own folder."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

# Makes a run folder as run_all.sh does, with a record of these options. KILL names the moment in which a
# kill -9 ends the recording.
RUN_ALL = r"""#!/usr/bin/env bash
[ "$KILL" != before ] || { kill -9 $PPID; exit; }
folder="results/20$(date +%s%N)" command="./run_all.sh $*"
if [ "$1" = --resume ]; then
  folder="$2" command="$(sed -n 's/.*"command": "\(.*\)".*/\1/p' "$2/plan.json")"
fi
mkdir -p "$folder"
echo "{ \"command\": \"$command\" }" >"$folder/plan.json"
[ "$KILL" != during ] || { kill -9 $PPID; exit; }
sed "s|\"command\": .*|\"command\": \"$command\",|" docs/results/record.json >"$folder/results.json"
"""


@pytest.fixture
def record(tmp_path):
    """Records pieces in a copy of the project whose run_all.sh trains nothing. Returns a function; it returns
    the command of each piece's record, None where there is none."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "results"))
    (copy / "run_all.sh").write_text(RUN_ALL)
    (copy / "docs" / "renew.sh").write_text("")
    (copy / "docs" / "results").mkdir()
    tiny = ROOT / "docs" / "results" / "epyc-2-cores" / "tiny" / "results.json"
    shutil.copy(tiny, copy / "docs" / "results" / "record.json")
    of_git = ["git", "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*of_git, *words], cwd=copy, check=True)

    def recorded(*pieces, kill=""):
        with (tmp_path / "said").open("w") as said:
            subprocess.run(
                ["bash", "docs/record.sh", "trial", *pieces],
                cwd=copy,
                env=os.environ | {"PYTHON": sys.executable, "KILL": kill},
                stdout=said,
                stderr=said,
            )
        paths = [copy / "docs" / "results" / "trial" / piece / "results.json" for piece in pieces]
        return [json.loads(path.read_text())["command"] if path.exists() else None for path in paths]

    return recorded


GPT2, GPT3_XL = "./run_all.sh --preset gpt2 --repeat 3 --peers", "./run_all.sh --preset gpt3-xl"


@pytest.mark.slow
def test_a_piece_goes_on_in_its_own_folder_after_a_hard_end(record):
    assert record("gpt3-xl", kill="before") == [None]
    assert record("gpt2", kill="during") == [None]
    assert record("gpt2", "gpt3-xl") == [GPT2, GPT3_XL], "and not the other's run, which is newer"


@pytest.mark.slow
def test_a_piece_that_is_recorded_again_runs_again_and_loses_no_row(record, tmp_path):
    copy = tmp_path / "copy"
    kept, made = copy / "docs" / "results" / "trial" / "gpt3-xl", copy / "docs" / "results" / "record.json"
    assert record("gpt3-xl") == [GPT3_XL]
    shutil.move(kept, tmp_path / "before")
    assert record("gpt3-xl") == [GPT3_XL]
    assert len([*copy.glob("results/20*")]) == 2, "the first run was whole: it is not resumed"

    content = json.loads((kept / "results.json").read_text())
    content["environment"]["code_sha256"] = "of other code"
    (kept / "results.json").write_text(before := json.dumps(content))
    content = json.loads(made.read_text())
    content["rows"][0] |= {"status": "skipped", "reason": "not installed", "step_ms": [], "passes": []}
    made.write_text(json.dumps(content, indent=1))
    record("gpt3-xl")
    said = (tmp_path / "said").read_text().splitlines()[-1]
    name = content["rows"][0]["step"]
    assert said.startswith("docs/record.sh: error: rows of docs/results/trial/gpt3-xl have no time now: ")
    assert name in said and (kept / "results.json").read_text() == before
