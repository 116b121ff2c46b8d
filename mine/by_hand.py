"""Attention that a file writes by hand, as one call of PyTorch's: only where its lines are plain.

Plain is, in the statements of one function: `a = q @ k.transpose(-2, -1)`, scaled, perhaps filled with minus
infinity where a mask says so, `a = softmax(a, dim=-1)`, perhaps with dropout, and `a @ v` at the end. That a
mask is causal is observed (mine/replace.py), at the lengths that are trained. So where there is a mask, the
call stands under a condition, and the file's own lines run at other lengths, as with a cache of keys.
"""

import ast
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from mine.masks import may_differ, parameters_of

FILLS = ("masked_fill", "masked_fill_")  # methods
INFINITE = ("float('inf')", "float('infinity')", "math.inf", "torch.inf", "np.inf")
LARGE = 1e4  # to subtract as much hides a score, too
CASTS = ("float", "to", "type_as")  # methods that only cast, which the fused kernel does itself
TRANSPOSED = ("transpose(-2, -1)", "transpose(-1, -2)", "transpose(2, 3)", "transpose(3, 2)", "mT")
FUNCTIONS = ("F", "functional", "torch", "nn.functional", "torch.nn.functional")
ATOMS = (ast.Name, ast.Constant, ast.Attribute, ast.Call)  # need no brackets
WIDTH = 96  # of a line


class NotPlainError(Exception):
    """Something else than the pattern."""


class Fused(NamedTuple):
    text: str  # of the file, with the call
    place: str  # `CausalSelfAttention.forward`
    rows: frozenset[int]  # the numbers of the lines that it replaces
    lines: str  # the same for a person: `31 to 35`, `31 to 33, 35`
    call: str  # the statement that makes it
    dropout: str  # the attribute of its class that is the dropout; empty without one
    is_scaled: bool  # its scores, by more than the product
    is_masked: bool


def fuse(text: str, scales_query: bool = False, lengths: tuple[int, ...] = ()) -> Fused | None:
    """The file with its attention as one call; None where it has none that is plain, or more than one. A
    scale that is a tensor has to scale the query: PyTorch's call takes a number. A mask is known to be causal
    at these `lengths` of a sequence."""
    tree = ast.parse(text)
    functional, edits = functional_of(tree), []
    for name, function in functions_of(tree) if functional else ():
        own = parameters_of(function) | parts_of(function, ast.Store)
        for at, statement in enumerate(function.body):
            if softmax_of(statement) and functional.partition(".")[0] not in own:
                try:
                    attention = Attention(function, at, tree)
                    edits.append(attention.fused(text, name, functional, scales_query, lengths))
                except NotPlainError:
                    continue
    return edits[0] if len(edits) == 1 else None


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """All functions and methods, with their names."""
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                yield inner.name if inner is node else f"{node.name}.{inner.name}", inner


def functional_of(tree: ast.Module) -> str:
    """How a file calls torch.nn.functional; empty where it imports no torch."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.asname for alias in node.names if alias.name == "torch.nn.functional"]
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.nn":
            names = [alias.asname or alias.name for alias in node.names if alias.name == "functional"]
        else:
            continue
        if names and names[0]:
            return names[0]
    return "torch.nn.functional" if imports_torch(tree) else ""


def imports_torch(tree: ast.Module) -> bool:
    """Whether the name `torch` is torch."""
    imported = [alias for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    as_itself = any(alias.asname is None and alias.name.partition(".")[0] == "torch" for alias in imported)
    return as_itself and not any(alias.asname == "torch" for alias in imported)


class Attention:
    """The pattern in the statements of a function, whose softmax is the one `at`. Raises NotPlainError."""

    def __init__(self, function: ast.FunctionDef, at: int, tree: ast.Module):
        body = function.body
        self.removed, self.dropout, self.module = [body[at]], "", ""
        self.scale, self.masks = "", []
        self.weights = body[at].targets[0].id
        name, first = self.peel(softmax_of(body[at])), at
        for first in range(at - 1, -1, -1):
            if not name:
                first += 1
                break
            if name in names_of(body[first]):
                self.removed.append(body[first])
                name = self.peel(value_of(body[first], name))
        if name:
            raise NotPlainError
        after = body[at + 1 :]
        if after and is_assignment(after[0], self.weights):
            self.dropout, self.module = dropout_of(after[0].value, self.weights)
            self.removed.append(after.pop(0))
        self.gone = {each.targets[0].id for each in self.removed if isinstance(each, ast.Assign)}
        self.last = self.weighing(after)
        self.check_between(body[first : body.index(self.last_statement)])
        pattern = [*self.removed, self.last_statement]
        if any(may_differ(mask, function, tree, pattern) for mask in self.masks):
            raise NotPlainError

    def peel(self, node: ast.expr) -> str:
        """Take scale and mask off the scores, down to their product, or to the name returned, which an
        earlier statement assigns."""
        node = uncast(node)
        if isinstance(node, ast.Name):
            return node.id
        if product := operands_of(node):
            query, key = map(uncast, product)
            key = uncast(ast.parse(transpose(ast.unparse(key)), mode="eval").body)
            self.query, self.key = ast.unparse(query), ast.unparse(key)
            return ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FILLS:
            check_fill(node)
            self.masks.append(node.args[0])
            return self.peel(node.func.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)) and not self.scale:
            is_product = isinstance(node.op, ast.Mult)
            self.scale = ast.unparse(node.right) if is_product else f"1 / {bracket(node.right)}"
            return self.peel(node.left)
        raise NotPlainError

    def weighing(self, statements: list[ast.stmt]) -> ast.expr:
        """The product `a @ v` in a simple statement, the only use of what is removed."""
        uses = [node for each in statements for node in names_in(each) if node.id in self.gone]
        for statement in statements:
            for node in ast.walk(statement) if isinstance(statement, (ast.Assign, ast.Return)) else ():
                if (pair := operands_of(node)) and [pair[0]] == uses and uses[0].id == self.weights:
                    self.last_statement = statement
                    return node
        raise NotPlainError

    def check_between(self, statements: list[ast.stmt]) -> None:
        """Between these, what the call reads must not be assigned, and what is removed must not be read."""
        texts = (self.query, self.key, self.scale, self.dropout)
        read = {part for text in texts if text for part in parts_of(ast.parse(text, mode="eval"), ast.Load)}
        if read & self.gone:
            raise NotPlainError
        for statement in statements:
            is_removed = statement in self.removed
            assigned = parts_of(statement, (ast.Store, ast.Del))
            for node in ast.walk(statement):  # a part of it, or in place whatever it names
                is_part = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
                assigned |= names_of(node) if is_part or isinstance(node, ast.Expr) else set()
                if isinstance(getattr(node, "value", None), str) and node.lineno < node.end_lineno:
                    raise NotPlainError  # its lines would move
            if not is_removed and (read & assigned or self.gone & names_of(statement)):
                raise NotPlainError
            if is_removed and any(isinstance(node, ast.NamedExpr) for node in ast.walk(statement)):
                raise NotPlainError

    def fused(self, text: str, name: str, functional: str, scales_query: bool, lengths: tuple) -> Fused:
        query, scale = self.query, self.scale or "1.0"
        if scales_query:
            query, scale = f"{bracket(query)} * {bracket(scale)}", "1.0"
        words = [query, self.key, ast.unparse(operands_of(self.last)[1])]
        words += ["is_causal=True"] if self.masks else []
        words += [f"dropout_p={self.dropout}"] if self.dropout else []
        words.append(f"scale={scale}")
        call = f"{functional}.scaled_dot_product_attention({', '.join(words)})"
        condition = ""
        if self.masks:
            condition = f"{require_name(self.query)}.size(-2) == {require_name(self.key)}.size(-2) "
            condition += f"== {lengths[0]}" if len(lengths) == 1 else f"in {lengths}"
        edited, statement = replace_lines(text, self.removed, self.last_statement, self.last, call, condition)
        lines, rows = line_numbers([*self.removed, self.last_statement])
        return Fused(edited, name, rows, lines, statement, self.module, bool(self.scale), bool(self.masks))


def replace_lines(
    text: str, removed: list[ast.stmt], last: ast.stmt, node: ast.expr, call: str, condition: str
) -> tuple[str, str]:
    """The text without the statements `removed` and with the call in place of an expression of the `last`
    one, and the new lines. With a condition the old lines stay, for where it does not hold. Raises
    NotPlainError where a line holds more than its statement."""
    rows = text.split("\n")
    for statement in removed:
        behind = rows[statement.end_lineno - 1].encode()[statement.end_col_offset :].decode().strip()
        before = rows[statement.lineno - 1].encode()[: statement.col_offset]
        if before.strip() or (behind and behind[0] != "#"):
            raise NotPlainError
    statement = with_call(rows, last, node, call)
    first = min(each.lineno for each in [*removed, last]) - 1
    gone = {row for each in removed for row in range(each.lineno, each.end_lineno + 1)}
    between = [rows[at - 1] for at in range(first + 1, last.lineno) if at not in gone]
    if not condition:
        rows[first : last.end_lineno] = [*between, *statement]
        return "\n".join(rows), textwrap.dedent("\n".join(statement))
    indent = statement[0][: len(statement[0]) - len(statement[0].lstrip())]
    code = [row for row in between if row.strip() and row.lstrip()[0] != "#"]
    new = [f"{indent}if {condition}:", *deeper([*code, *statement], indent), f"{indent}else:"]
    shown = [*new, *deeper([f"{indent}...  # these lines"], indent)]
    rows[first : last.end_lineno] = new + deeper(rows[first : last.end_lineno], indent)
    return "\n".join(rows), textwrap.dedent("\n".join(shown))


def with_call(rows: list[str], last: ast.stmt, node: ast.expr, call: str) -> list[str]:
    """The lines of the `last` statement with the call in place of its expression `node`."""
    before = rows[node.lineno - 1].encode()[: node.col_offset].decode()
    behind = rows[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    if before.endswith(("= (", "return (")) and behind.startswith(")"):  # (a @ v).transpose(1, 2)
        before, behind = before[:-1], behind[1:]
    if len(before + call + behind) > WIDTH:
        indent = before[: len(before) - len(before.lstrip())]
        head, words = call.removesuffix(")").split("(", 1)
        call = f"{head}(\n{indent}    {words}\n{indent})"
    lines = (before + call + behind).split("\n")
    return [*rows[last.lineno - 1 : node.lineno - 1], *lines, *rows[node.end_lineno : last.end_lineno]]


def deeper(rows: list[str], indent: str) -> list[str]:
    """Lines of a block that is indented so, one level deeper."""
    level = indent + ("\t" if "\t" in indent else "    ")
    return [level + row.removeprefix(indent) if row.strip() else row for row in rows]


def line_numbers(statements: list[ast.stmt]) -> tuple[str, frozenset[int]]:
    """The lines of statements: `31 to 33, 35`, and their numbers."""
    spans = []
    for each in sorted(statements, key=lambda each: each.lineno):
        if spans and each.lineno == spans[-1][1] + 1:
            spans[-1][1] = each.end_lineno
        else:
            spans.append([each.lineno, each.end_lineno])
    rows = frozenset(row for first, last in spans for row in range(first, last + 1))
    return ", ".join(f"{first} to {last}" if first < last else f"{first}" for first, last in spans), rows


# --- parts of the pattern -------------------------------------------------------------------------


def check_fill(call: ast.Call) -> None:
    """Raises NotPlainError unless a masked_fill hides scores."""
    if len(call.args) != 2 or call.keywords:
        raise NotPlainError
    filled = ast.unparse(call.args[1]).lower()
    is_infinite = filled[0] == "-" and filled[1:] in INFINITE
    is_infinite |= filled in ("float('-inf')", "float('-infinity')")
    is_least = filled.endswith(".min") and "finfo" in filled
    if not (is_infinite or is_least or is_large(call.args[1])):
        raise NotPlainError


def is_large(node: ast.AST) -> bool:
    try:
        return ast.literal_eval(node) <= -LARGE
    except (ValueError, TypeError):  # no number
        return False


def names_in(node: ast.AST) -> list[ast.Name]:
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]


def names_of(node: ast.AST) -> set[str]:
    return {name.id for name in names_in(node)}


def parts_of(node: ast.AST, context: type | tuple[type, ...]) -> set[str]:
    """The names and attributes that a statement reads or assigns, as they are written."""
    parts = (part for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute)))
    return {ast.unparse(part) for part in parts if isinstance(part.ctx, context)}


def value_of(statement: ast.stmt, name: str) -> ast.expr:
    """What a statement makes of a name: it assigns to it, or is `name.masked_fill_(...)`."""
    if is_assignment(statement, name):
        return statement.value
    fills = isinstance(statement, ast.Expr) and ast.unparse(statement).startswith(f"{name}.masked_fill_(")
    if not fills:
        raise NotPlainError
    return statement.value


def is_assignment(statement: ast.stmt, name: str) -> bool:
    """Whether it assigns to this name alone."""
    return isinstance(statement, ast.Assign) and [*map(ast.unparse, statement.targets)] == [name]


def uncast(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CASTS:
        node = node.func.value
    return node


def softmax_of(statement: ast.stmt) -> ast.expr | None:
    """The scores of `a = softmax(scores, dim=-1)`, a function or a method, cast or not."""
    if not (isinstance(statement, ast.Assign) and [*map(type, statement.targets)] == [ast.Name]):
        return None
    call = uncast(statement.value)
    if not (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "softmax"
    ):
        return None
    is_function = ast.unparse(call.func.value) in FUNCTIONS
    scores, *rest = [*call.args, None] if is_function else [call.func.value, *call.args, None]
    dims = [*rest[:-1], *(each.value for each in call.keywords if each.arg == "dim")]
    return scores if scores and [*map(ast.unparse, dims)] == ["-1"] else None


def transpose(key: str) -> str:
    """The key of its transpose."""
    for ending in TRANSPOSED:
        if key.endswith(f".{ending}"):
            return key.removesuffix(f".{ending}")
    raise NotPlainError


def operands_of(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """Of a matrix product."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.left, node.right
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.matmul" and len(node.args) == 2:
        return node.args[0], node.args[1]
    return None


def require_name(tensor: str) -> str:
    """A name with the length of a query or a key: another expression would be computed twice."""
    node = ast.parse(tensor, mode="eval").body
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):  # scaled
        node = node.left if isinstance(node.left, ast.Name) else node.right
    if not isinstance(node, (ast.Name, ast.Attribute)):
        raise NotPlainError
    return ast.unparse(node)


def bracket(node: ast.expr | str) -> str:
    node = ast.parse(node, mode="eval").body if isinstance(node, str) else node
    return ast.unparse(node) if isinstance(node, ATOMS) else f"({ast.unparse(node)})"


def dropout_of(call: ast.expr, weights: str) -> tuple[str, str]:
    """The probability of `self.dropout(a)`, and its attribute; or of F.dropout, which has none."""
    if not (isinstance(call, ast.Call) and [*map(ast.unparse, call.args)] == [weights]):
        raise NotPlainError
    function, words = ast.unparse(call.func), {each.arg: each.value for each in call.keywords}
    attribute = function.removeprefix("self.")
    if not words and attribute.isidentifier() and attribute != function:
        return f"{function}.p if {function}.training else 0.0", attribute
    is_function = function.removesuffix(".dropout") in set(FUNCTIONS) - {"torch"}
    if is_function and "p" in words and "training" in words and len(words) == 2:
        return f"{bracket(words['p'])} if {bracket(words['training'])} else 0.0", ""
    raise NotPlainError
