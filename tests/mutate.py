"""Which mistakes would the tests miss? Draws changes of the code from a seed, and runs the tests on each.

python tests/mutate.py [SEED [COUNT]]    each takes up to a minute; slow tests are left out
"""

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
WORDS = {"say", "progress", "add", "add_argument", "max", "min"}  # calls that only tell, or take any order


def changed(node: ast.AST, text: str) -> str | None:
    """The text of a node with another constant or operator, swapped arguments, or dropped; None without
    any."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return str(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return str(node.value + 1 if isinstance(node.value, int) else 2 * node.value)
    if isinstance(node, (ast.Compare, ast.BinOp, ast.BoolOp)) and " not " not in text:
        marks = [mark for mark in OTHER if f" {mark} " in text]
        return text.replace(f" {marks[0]} ", f" {OTHER[marks[0]]} ", 1) if marks else None
    if isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
        return f"{ast.unparse(node.func)}({ast.unparse(node.args[1])}, {ast.unparse(node.args[0])})"
    stores = isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple))
    drops = isinstance(node, (ast.AugAssign, ast.Expr)) and text[0] not in "\"'"  # no docstring
    return "pass" if stores or drops else None


def cut(path: Path, node: ast.AST) -> tuple[bytes, bytes, bytes]:
    """A file before, in and after a node."""
    lines = path.read_bytes().splitlines(keepends=True)
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return before, b"".join(lines)[len(before) : -len(after) or None], after


def candidates(path: Path) -> list[tuple[Path, ast.AST, str, str]]:
    found, told = [], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in WORDS:
            told |= set(ast.walk(node))
        if isinstance(node, (ast.expr, ast.stmt)) and not {node, getattr(node, "value", None)} & told:
            text = cut(path, node)[1].decode()
            if new := changed(node, text):
                found.append((path, node, text, new))
    return found


def survives(path: Path, node: ast.AST, new: str) -> bool:
    before, _, after = cut(path, node)
    with tempfile.TemporaryDirectory() as folder:
        leave_out = shutil.ignore_patterns(".venv", ".git", ".te", ".dev", "__pycache__")
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=leave_out)
        (Path(folder) / path.relative_to(ROOT)).write_bytes(before + new.encode() + after)
        command = [sys.executable, "-m", "pytest", "-qx", "-n", "2", "-m", "not slow", "tests"]
        return not subprocess.run(command, cwd=folder, capture_output=True).returncode


if __name__ == "__main__":
    seed, count = [*map(int, sys.argv[1:]), *(1, 80)[len(sys.argv) - 1 :]]
    rooms = ("[0-4]_*.py", "common/*.py", "ladder/*.py", "report/*.py")
    files = sorted(path for room in rooms for path in ROOT.glob(room))
    every = [candidate for path in files for candidate in candidates(path)]
    for path, node, text, new in random.Random(seed).sample(every, count):
        verdict = "SURVIVED" if survives(path, node, new) else "killed"
        print(f"{verdict} {path.relative_to(ROOT)}:{node.lineno}: {text!r} -> {new!r}", flush=True)
