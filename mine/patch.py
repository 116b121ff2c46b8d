"""The recommended changes as a patch of the user's own file, where each can be placed by name: in model(),
before it returns, and as decorators of loss(). Nothing but a copy in memory is changed."""

import ast
import difflib
import re
from pathlib import Path

from torch import nn

from common.text import Skip, one_line
from ladder.rows import AMP, COMPILE, FP8, SDPA
from mine import changes, program
from mine.attention import switch_of
from mine.by_hand import imports_torch


def read(path: Path) -> str:
    """The text of a file. Raises Skip for one that a patch could not carry as it is."""
    try:
        text = path.read_bytes().decode()
        ast.parse(text)
    except (UnicodeError, SyntaxError) as error:
        raise Skip(f"{path.name} cannot be patched ({one_line(error, 100)})") from error
    if not all(letter.isprintable() or letter in "\n\t" for letter in text):
        raise Skip(f"{path.name} cannot be patched: it holds line ends or letters that are no plain text")
    return text


def edit(text: str, names: list[str], model: nn.Module, lists: list[str], args) -> tuple[str, list[str]]:
    """The text of a file with the changes of these rows that can be placed, and which rows these are."""
    tree, rows = ast.parse(text), text.split("\n")
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    returns = only_return(functions["model"]) if "model" in functions else None
    if not (imports_torch(tree) and returns and returns.value):
        return text, []
    indent = rows[returns.lineno - 1].encode()[: returns.col_offset].decode()
    if indent.strip():  # a function in one line
        return text, []
    placed, setup, decorators = [], [], []
    if AMP in names and "loss" in functions:
        placed.append(AMP)
        setup.append(program.PRECISION)
        decorators.append(f'@torch.autocast("{args.device.type}", torch.bfloat16)')
    if SDPA in names and switch_of(model) is not None:
        placed.append(SDPA)
        setup += changes.switch_lines(model, args)
    if FP8 in names and not hasattr(args.file, "fp8"):
        placed.append(FP8)
        setup += program.fp8_lines(model, lists)
    if COMPILE in names and ("loss" in functions or not hasattr(args.file, "loss")):
        placed.append(COMPILE)
        setup += changes.block_lines(model, args) if args.is_called else []
        setup += changes.own_loss_lines(model, args)
        decorators += ["@torch.compile"] if args.loss_module else []
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = before_return(returns, rows, indent, setup, used)
    edits = [(returns.lineno - 1, returns.end_lineno, own)] if setup else []
    if decorators:
        at = functions["loss"].lineno - 1
        edits.append((at, at, decorators))
    for begin, end, new in sorted(edits, reverse=True):  # the lower one first
        rows[begin:end] = new
    return "\n".join(rows), placed


def only_return(function: ast.FunctionDef) -> ast.Return | None:
    """The last statement of a function, if it is a `return` and no other one may end it before."""
    nodes, own = [*function.body], []
    while nodes:
        node = nodes.pop()
        own += [node] if isinstance(node, ast.Return) else []
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            nodes += ast.iter_child_nodes(node)
    return own[0] if own == [function.body[-1]] else None


def before_return(
    returns: ast.Return, rows: list[str], indent: str, setup: list[str], used: set[str]
) -> list[str]:
    """The lines of a `return`, with those of `setup`, which say `model` of what it returns, before it."""
    has_name = isinstance(returns.value, ast.Name)
    if has_name and re.search(rf"\b(for|def|import) {returns.value.id}\b", "\n".join(setup)):
        has_name = False  # a loop of the lines takes a name such as `block` for its own
    free = (name for name in ("net", "network", "the_model") if name not in used)
    name = returns.value.id if has_name else next(free, "_model")
    own = [line if line[0] == "#" else re.sub(r"(?<![\w.'\"])model\b", name, line) for line in setup]
    own = [indent + line for line in own]
    whole = rows[returns.lineno - 1 : returns.end_lineno]
    if has_name:
        return own + whole
    whole[0] = whole[0].replace("return", f"{name} =", 1)
    return [*whole, *own, f"{indent}return {name}"]


def difference(name: str, before: str, after: str) -> str:
    """The patch, for `patch -p1` or `git apply` in the folder of the file. A tab ends a name with spaces."""
    name += "\t" if " " in name else ""
    texts = (text.splitlines(keepends=True) for text in (before, after))
    changed = difflib.unified_diff(*texts, f"a/{name}", f"b/{name}")
    endless = "\n\\ No newline at end of file\n"
    return "".join(line if line[-1] == "\n" else line + endless for line in changed)
