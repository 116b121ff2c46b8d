"""Which mistakes would the tests miss? python tests/mutate.py [SEED [COUNT]] tries some."""

import ast
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OTHER = {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "==", "in": "not in", "is": "is not"}
OTHER |= {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "and": "or", "or": "and"}
IGNORED_CALLS = {
    "say",
    "progress",
    "add",
    "add_argument",
    "max",
    "min",
}  # calls that only tell, or take any order


def changed(node: ast.AST, text: str) -> str | None:
    """The text of a node with another constant or operator, swapped arguments, or none; None without any."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        larger = not node.value if isinstance(node.value, bool) else node.value + 1
        return repr(larger if isinstance(node.value, int) else 2 * node.value + 1)
    if isinstance(node, (ast.Compare, ast.BinOp, ast.BoolOp)) and " not " not in text:
        marks = [mark for mark in OTHER if f" {mark} " in text]
        return text.replace(f" {marks[0]} ", f" {OTHER[marks[0]]} ", 1) if marks else None
    if isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
        return f"{ast.unparse(node.func)}({ast.unparse(node.args[1])}, {ast.unparse(node.args[0])})"
    stores = isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple))
    drops = isinstance(node, (ast.AugAssign, ast.Expr)) and text[0] not in "\"'"  # no docstring
    return "pass" if stores or drops else None


def mutations(path: Path) -> list[tuple[Path, str, bytes]]:
    """Every change of a file: what it is, and the file with it."""
    found, told, lines = [], set(), path.read_bytes().splitlines(keepends=True)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in IGNORED_CALLS:
            told |= set(ast.walk(node))
        if isinstance(node, (ast.expr, ast.stmt)) and not {node, getattr(node, "value", None)} & told:
            before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
            after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
            text = b"".join(lines)[len(before) : -len(after) or None].decode()
            if new := changed(node, text):
                found.append((path, f"{node.lineno}: {text!r} -> {new!r}", before + new.encode() + after))
    return found


if __name__ == "__main__":
    seed, count = [*map(int, sys.argv[1:]), *(1, 80)[len(sys.argv) - 1 :]]
    rooms = map(
        ROOT.glob, ("[0-4]_*.py", "common/*.py", "ladder/*.py", "mine/*.py", "report/*.py", "docs/*.py")
    )
    every = [mutation for room in rooms for file in sorted(room) for mutation in mutations(file)]
    for path, what, content in random.Random(seed).sample(every, count):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git", ".venv"))
            (Path(folder) / path.relative_to(ROOT)).write_bytes(content)
            tests = Path(folder).glob("tests/test_*.py")  # first those that name the module most often
            tests = sorted(tests, key=lambda test: -test.read_text().count(path.stem))
            command = [sys.executable, "-m", "pytest", "-qx", "-n", "2", *tests]
            fails = subprocess.run(command, cwd=folder, capture_output=True).returncode
        print("killed" if fails else "SURVIVED", path.relative_to(ROOT), what, flush=True)
