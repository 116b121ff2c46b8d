"""Record, from its source and without importing it, the signatures of a Transformer Engine release that
scripts use.

    pip download --no-deps transformer-engine==2.9.0 && unzip transformer_engine-2.9.0-*.whl -d te
    python tests/te_signatures.py te > tests/data/te-2.9.0.json

Writes {name: {"parameters": [...], "keyword_only": [...]}} for the names te.NAME that SCRIPTS and the guide
call.
"""

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("4_transformer_engine.py", "peers/te_layer.py", "examples/llama.py")
SOURCES = ("pytorch/module/*.py", "pytorch/quantization.py", "pytorch/transformer.py")


def te_calls(source: str) -> list[tuple[str, ast.Call]]:
    """Every call `te.NAME(...)` of a source, by name."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
    ]
    return [(call.func.attr, call) for call in named if call.func.value.id == "te"]


def signature(node: ast.AST) -> dict | None:
    """Parameters of a function, or of a class's __init__; None of anything else."""
    if isinstance(node, ast.ClassDef):
        node = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if not isinstance(node, ast.FunctionDef):
        return None
    parameters = [a.arg for a in node.args.args if a.arg != "self"]
    return {"parameters": parameters, "keyword_only": [a.arg for a in node.args.kwonlyargs]}


def record(root: Path) -> dict:
    used = {name for script in SCRIPTS for name, _ in te_calls((ROOT / script).read_text())}
    used |= {*re.findall(r"\bte\.(\w+)\(", (ROOT / "docs" / "guide.md").read_text())}
    paths = sorted(path for pattern in SOURCES for path in (root / "transformer_engine").glob(pattern))
    nodes = [node for path in paths for node in ast.parse(path.read_text()).body]
    found = {node.name: signature(node) for node in nodes if getattr(node, "name", None) in used}
    return {name: its for name, its in found.items() if its}


if __name__ == "__main__":
    json.dump(record(Path(sys.argv[1])), sys.stdout, indent=1, sort_keys=True)
    print()
