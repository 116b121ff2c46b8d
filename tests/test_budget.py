"""How long the scripts, their diffs, README and the guide may be, and which folder may import which."""

import ast
import difflib
import io
import itertools
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = {
    "common": "common",
    "ladder": "common|ladder",
    "mine": "common|ladder|mine",
    "predict": "common|ladder|predict",
    "report": r"report|common\.(kernels|record|text)$",
}


ROOMS = ("common", "ladder", "mine", "predict", "report", "anatomy", "peers", "examples", "docs")


def files(pattern):
    return sorted(ROOT.glob(pattern))


def code_lines(source):
    """The lines of a script that hold code, without its docstring and comments."""
    lines, ends = source.splitlines(), ast.parse(source).body[0].end_lineno
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return [line.rstrip() for line in lines[ends:] if line.strip()]


def by_hand(name):
    """A document without what cog writes into it."""
    return re.sub(r"(?s)<!-- \[\[\[cog.*?\[\[\[end\]\]\].*?-->", "", (ROOT / name).read_text())


def test_readme_is_short():
    assert len(re.sub(r"(?s)```.*?```", "", by_hand("README.md")).split()) <= 900


def test_the_guide_with_its_examples_is_short():
    assert len(by_hand("docs/guide.md").split()) <= 3400


def test_scripts_and_their_diffs_are_short():
    sources = [path.read_text() for path in files("[0-4]_*.py")]
    for most, (before, after) in zip(
        (8, 8, 20, 40), itertools.pairwise(map(code_lines, sources)), strict=True
    ):
        changed = [line for line in list(difflib.unified_diff(before, after, n=0))[2:] if line[0] in "-+"]
        assert 0 < len(changed) <= most, changed
    assert all(len(source.splitlines()) <= 120 for source in sources)
    assert max(len(line) for source in sources for line in source.splitlines()) <= 92


def imports_of_project() -> dict[str, set[str]]:
    """What every module of the project imports of it, also inside functions."""
    modules = {}
    for room in ROOMS:
        modules |= {f"{room}.{path.stem}": path for path in files(f"{room}/*.py")}
    imports = {}
    for name, path in modules.items():
        imports[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imports[name] |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                imports[name] |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        imports[name] &= modules.keys()
    return imports


def test_imports_run_one_way():
    imports = imports_of_project()
    for room, allowed in IMPORTS.items():
        names = set().union(*(found for name, found in imports.items() if name.startswith(f"{room}.")))
        assert names and not [name for name in names if not re.match(allowed, name)]


def test_nothing_but_the_documents_imports_predictions():
    others = {
        name: {it for it in needed if it.startswith("predict.")}
        for name, needed in imports_of_project().items()
    }
    assert {name for name in others if others[name] and not name.startswith("predict.")} == {"docs.tables"}


def test_no_module_imports_itself_by_way_of_others():
    imports = imports_of_project()
    assert sum(map(len, imports.values())) > 100
    while leaves := [name for name, needed in imports.items() if not needed & imports.keys()]:
        for name in leaves:
            del imports[name]
    assert not imports, "these import each other in a circle"
