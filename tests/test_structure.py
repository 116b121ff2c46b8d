"""Who may import whom, and how long a file or a function may be."""

import ast
from graphlib import TopologicalSorter

from conftest import ROOT

PACKAGES = ("common", "report", "ladder", "anatomy", "peers")
FILES = {path: ast.parse(path.read_text()) for package in PACKAGES for path in ROOT.glob(f"{package}/*.py")}
FILES |= {path: ast.parse(path.read_text()) for path in ROOT.glob("*.py")}
MODULES = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in FILES}
ALLOWED = {"report": {"report", "common.record", "common.traced", "common.text", "common.errors"}, "common": {"common"}}


def imported(tree):
    """Full names that a file imports of this project, at the top or in a function."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            wholes = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {whole if whole in MODULES else node.module for whole in wholes}
    return {name for name in names if name.split(".")[0] in PACKAGES}


def test_imports_point_one_way_and_in_no_circle():
    for package, allowed in ALLOWED.items():
        for path in ROOT.glob(f"{package}/*.py"):
            for name in imported(FILES[path]):
                assert {name, name.split(".")[0]} & allowed, f"{path.relative_to(ROOT)} imports {name}"
    graph = {name: {other for other in imported(FILES[path]) if other != name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_files_and_functions_are_short():
    long = []
    for path, tree in FILES.items():
        lengths = {"file": len(path.read_text().splitlines()) / 400}
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        lengths |= {node.name: (node.end_lineno - node.lineno + 1) / 50 for node in functions}
        long += [f"{path.relative_to(ROOT)}: {name}" for name, length in lengths.items() if length > 1]
    assert long == []
