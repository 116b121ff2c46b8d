"""The recommended changes as a patch of the user's own file, where each can be placed by name: in model(),
before it returns, and as decorators of loss(). Nothing but a copy in memory is changed."""

import ast
import difflib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from torch import nn

from ladder.rows import AMP, COMPILE, FP8, SDPA
from mine import lines
from mine.attention import switch_of
from mine.file import called


def patched(text: str, names: list[str], model: nn.Module, lists: list[str], args) -> tuple[str, list[str]]:
    """The text of a file with the changes of these rows that can be placed, and which rows these are."""
    tree = ast.parse(text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "model" not in functions or not imports_torch(tree):
        return text, []
    returns = functions["model"].body[-1]
    placed, setup, decorators = [], [], []
    if AMP in names and "loss" in functions:
        placed.append(AMP)
        setup.append('torch.set_float32_matmul_precision("high")')
        decorators.append(f'@torch.autocast("{args.device.type}", torch.bfloat16)')
    if isinstance(returns, ast.Return) and returns.value:
        if SDPA in names and switch_of(model):
            placed.append(SDPA)
            setup += lines.attention_lines(model, args)
        if FP8 in names and not hasattr(args.file, "fp8"):
            placed.append(FP8)
            setup += lines.fp8_lines(lists, args)
        if COMPILE in names and ("loss" in functions or not hasattr(args.file, "loss")):
            placed.append(COMPILE)
            setup += lines.compile_lines(model, lists)
            decorators += ["@torch.compile"] if "loss" in functions else lines.compiled_loss_lines(model)
    if decorators and "loss" not in functions:
        setup, decorators = setup + decorators, []
    rows = text.splitlines()
    changes = {functions["loss"].lineno - 1: decorators} if decorators else {}
    changes[returns.lineno - 1] = setup
    for at in sorted(changes, reverse=True):
        if changes[at] is setup:
            rows[at : returns.end_lineno] = before_return(returns, rows, setup)
        else:
            rows[at:at] = decorators
    return "\n".join(rows) + "\n", placed


def imports_torch(tree: ast.Module) -> bool:
    """Whether the name `torch` is torch."""
    imported = [alias for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    return any((alias.asname or alias.name.partition(".")[0]) == "torch" for alias in imported)


def before_return(returns: ast.Return, rows: list[str], setup: list[str]) -> list[str]:
    """The lines of a `return`, with these before it; they say `model` of what it returns."""
    indent, value = " " * returns.col_offset, returns.value
    name = value.id if isinstance(value, ast.Name) else "net"
    own = [indent + (line if line[0] == "#" else re.sub(r"(?<![\w.])model\b", name, line)) for line in setup]
    whole = rows[returns.lineno - 1 : returns.end_lineno]
    if isinstance(value, ast.Name):
        return own + whole
    whole[0] = whole[0].replace("return", f"{name} =", 1)
    return [*whole, *own, f"{indent}return {name}"]


def difference(path: Path, text: str) -> str:
    """The patch, for `patch -p1` or `git apply` in the folder of the file."""
    before = path.read_text().splitlines(keepends=True)
    names = f"a/{path.name}", f"b/{path.name}"
    return "".join(difflib.unified_diff(before, text.splitlines(keepends=True), *names))


def load(path: Path, text: str) -> ModuleType:
    """A patched text as the module of its file, whose folder and data it finds as before."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    called(lambda: exec(compile(text, str(path), "exec"), vars(module)), path)
    return module
