"""Who may import whom, and how long a file or a function may be."""

import ast
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT

PACKAGES = ("common", "report", "ladder", "anatomy", "peers")
FILES = {path: ast.parse(path.read_text()) for package in PACKAGES for path in ROOT.glob(f"{package}/*.py")}
FILES |= {path: ast.parse(path.read_text()) for path in ROOT.glob("*.py")}
MODULES = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in FILES}
ALLOWED = {"report": {"report", "common.record", "common.text", "common.errors"}, "common": {"common"}}


def imported(tree):
    """Full names that a file imports of this project, at the top or in a function."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {
                whole if (whole := f"{node.module}.{alias.name}") in MODULES else node.module for alias in node.names
            }
    return {name for name in names if name.split(".")[0] in PACKAGES}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package):
    for path in ROOT.glob(f"{package}/*.py"):
        for name in imported(FILES[path]):
            allowed = ALLOWED[package]
            assert name in allowed or name.split(".")[0] in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_no_import_goes_in_a_circle():
    graph = {name: {other for other in imported(FILES[path]) if other != name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_files_and_functions_are_short():
    long = []
    for path, tree in FILES.items():
        lines = len(path.read_text().splitlines())
        long += [f"{path.relative_to(ROOT)}: {lines} lines"] if lines > 400 else []
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= 50:
                long.append(f"{path.relative_to(ROOT)}: {node.name}, {node.end_lineno - node.lineno + 1} lines")
    assert long == []
