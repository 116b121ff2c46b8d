"""How large a room may be: lines of Python, words of prose, the diffs of the scripts, and who may import whom."""

import ast
import difflib
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES = {"*.py": 440, "common/*.py": 1420, "ladder/*.py": 1000, "report/*.py docs/*.py": 1700, "anatomy/*.py": 1630}
LINES |= {
    "report/*.html report/*.css": 240,
    "anatomy/variants/*.patch": 260,
    "peers/*.py examples/*.py": 340,
    "tests/*.py": 2400,
}
WORDS = {"README.md": 900, "README.md docs/*.md": 17000}
IMPORTS = {"common": "common", "ladder": "common|ladder", "report": r"report|common\.(record|text)$"}


def files(patterns):
    return [path for pattern in patterns.split() for path in sorted(ROOT.glob(pattern))]


def test_rooms_and_words():
    lines = {room: sum(len(path.read_text().splitlines()) for path in files(room)) for room in LINES}
    assert all(lines[room] <= LINES[room] for room in LINES), lines
    prose = r"(?s)<!-- \[\[\[cog.*?\[\[\[end\]\]\].*?-->|```.*?```"
    words = {room: sum(len(re.sub(prose, "", path.read_text()).split()) for path in files(room)) for room in WORDS}
    assert all(words[room] <= WORDS[room] for room in WORDS), words


def test_scripts_and_their_diffs():
    texts = [path.read_text() for path in files("[0-9]_*.py")]
    code = [[x for x in t.splitlines()[ast.parse(t).body[0].end_lineno :] if x.strip()] for t in texts]
    for (before, after), most in zip(itertools.pairwise(code), (8, 8, 8, 40), strict=True):
        assert 0 < sum(line[0] in "-+" for line in list(difflib.unified_diff(before, after, n=0))[2:]) <= most
    assert all(len(t.splitlines()) <= 95 and max(map(len, t.splitlines())) <= 92 for t in texts)


def test_imports_run_one_way():
    for room, allowed in IMPORTS.items():
        text = "\n".join(path.read_text() for path in files(f"{room}/*.py"))
        names = re.findall(r"(?m)^\s*(?:from|import) ((?:common|ladder|report|anatomy|peers)\b[\w.]*)", text)
        assert names and not [name for name in names if not re.match(allowed, name)]
