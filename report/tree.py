"""docs/tree.md: every Python file with the first sentence of its docstring, room by room."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from report.table import markdown, pipe_table

ROOMS = (".", "common", "ladder", "report", "peers", "anatomy", "tests")


def tree(root: Path) -> str:
    """A heading and a table per room of the working copy at `root`."""
    parts = []
    for room in ROOMS:
        paths = (path for path in sorted((root / room).glob("*.py")) if path.name != "__init__.py")
        cells = [(f"`{path.name}`", markdown(first_sentence(path))) for path in paths]
        heading = "The five steps" if room == "." else f"`{room}/`"
        parts += [f"## {heading}", pipe_table(("file", "what it is"), cells, n_left=2)]
    return "\n\n".join(parts)


def first_sentence(path: Path) -> str:
    """The first sentence of a file's docstring."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    text = " ".join(paragraph.split())
    found = re.match(r".+?(?<!\.\.)[.?](?= [A-Z]|$)", text)
    return found[0] if found else text or "a file without a docstring"
