"""How large a room may be: lines of Python, words of prose, the diffs of the scripts, and who may import whom."""

import ast
import difflib
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES = {  # these go down, and never up without a reason
    "*.py": 460, "common/*.py": 1850, "ladder/*.py": 1250, "report/*.py docs/*.py": 1800, "report/*.html report/*.css": 250,
    "anatomy/*.py": 1900, "anatomy/variants/*.patch": 400, "peers/*.py examples/*.py": 340, "tests/*.py": 2400,
}  # fmt: skip
WORDS = {"README.md": 900, "README.md docs/*.md": 20000}
DIFFS, SCRIPT_LINES, SCRIPT_WIDTH = (8, 8, 8, 40), 95, 92
IMPORTS = {"common": {"common"}, "ladder": {"common", "ladder"}, "report": {"report", "common.record", "common.text"}}


def files(patterns):
    return [path for pattern in patterns.split() for path in sorted(ROOT.glob(pattern))]


def test_rooms_and_words():
    lines = {room: sum(len(path.read_text().splitlines()) for path in files(room)) for room in LINES}
    assert all(lines[room] <= LINES[room] for room in LINES), lines
    prose = r"(?s)<!-- \[\[\[cog.*?\[\[\[end\]\]\].*?-->|```.*?```"
    words = {room: sum(len(re.sub(prose, "", path.read_text()).split()) for path in files(room)) for room in WORDS}
    assert all(words[room] <= WORDS[room] for room in WORDS), words


def test_scripts_and_their_diffs():
    code = [(t := path.read_text()).splitlines()[ast.parse(t).body[0].end_lineno :] for path in files("[0-9]_*.py")]
    for (before, after), most in zip(itertools.pairwise(code), DIFFS, strict=True):
        changed = [
            line[1:] for line in difflib.unified_diff(before, after, n=0) if line[:3] not in ("---", "+++", "@@ ")
        ]
        assert 0 < len([line for line in changed if line.strip() and not line.startswith("@ ")]) <= most
    for lines in (path.read_text().splitlines() for path in files("[0-9]_*.py")):
        assert len(lines) <= SCRIPT_LINES and max(map(len, lines)) <= SCRIPT_WIDTH


def test_imports_run_one_way():
    for room, allowed in IMPORTS.items():
        for path in files(f"{room}/*.py"):
            for name in re.findall(
                r"^\s*(?:from|import) ((?:common|ladder|report|anatomy|peers)[\w.]*)", path.read_text(), re.M
            ):
                assert {name, name.split(".")[0]} & allowed or name == "common", f"{path} imports {name}"
