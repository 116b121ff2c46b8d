"""Record, from its source and without importing it, the signatures of a Transformer Engine release that scripts use.

    pip download --no-deps transformer-engine==2.9.0 && unzip transformer_engine-2.9.0-*.whl -d te
    python tests/te_signatures.py te > tests/data/te-2.9.0.json

Writes {name: {"parameters": [...], "keyword_only": [...], "forward": [...], "attributes": [...]}} for the names that
SCRIPTS call. Of a module, `forward` are the parameters of its call, `attributes` what its constructor sets on itself.
"""

import ast
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("4_transformer_engine.py", "peers/te_layer.py")
SOURCES = {
    "transformer_engine.pytorch": ("pytorch/module/*.py", "pytorch/quantization.py", "pytorch/transformer.py"),
    "transformer_engine.common.recipe": ("common/recipe/__init__.py",),
}


def te_name(function: ast.AST, imported: dict[str, str]) -> str | None:
    """The full name of what a call calls, where it is Transformer Engine's."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "te":
        return f"transformer_engine.pytorch.{function.attr}"
    return imported.get(function.id) if isinstance(function, ast.Name) else None


def te_calls(script: str) -> list[tuple[str, ast.Call]]:
    """Every call of a script to Transformer Engine, by full name."""
    nodes = list(ast.walk(ast.parse((ROOT / script).read_text())))
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("transformer_engine")]
    imported = {alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    calls = [(te_name(node.func, imported), node) for node in nodes if isinstance(node, ast.Call)]
    return [(name, call) for name, call in calls if name]


def signature(node: ast.AST) -> dict | None:
    """Parameters of a function, of a class's __init__, or of a dataclass's fields."""
    if isinstance(node, ast.ClassDef):
        init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if init is None:
            fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]
            return {"parameters": fields, "keyword_only": []}
        node = init
    if not isinstance(node, ast.FunctionDef):
        return None
    parameters = [a.arg for a in node.args.args if a.arg != "self"]
    return {"parameters": parameters, "keyword_only": [a.arg for a in node.args.kwonlyargs]}


def module_members(node: ast.ClassDef) -> dict:
    """What a module's forward takes, and what its __init__ sets on self."""
    methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    if not {"forward", "__init__"} <= methods.keys():
        return {}
    stores = (n for n in ast.walk(methods["__init__"]) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    attributes = {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}
    return {"forward": signature(methods["forward"])["parameters"], "attributes": sorted(attributes)}


def record(root: Path) -> dict:
    used = {name for script in SCRIPTS for name, _ in te_calls(script)}
    names = {}
    for module, patterns in SOURCES.items():
        for path in sorted(p for pattern in patterns for p in (root / "transformer_engine").glob(pattern)):
            for node in ast.parse(path.read_text()).body:
                name = f"{module}.{getattr(node, 'name', '')}"
                if name in used and (found := signature(node)) is not None:
                    names[name] = found | (module_members(node) if isinstance(node, ast.ClassDef) else {})
    return names


if __name__ == "__main__":
    json.dump(record(Path(sys.argv[1])), sys.stdout, indent=1, sort_keys=True)
    print()
