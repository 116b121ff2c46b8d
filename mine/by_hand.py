"""Attention that a file writes by hand, as one call of PyTorch's: only where its lines are plain.

Plain is, in the statements of one function: `a = q @ k.transpose(-2, -1)`, scaled, perhaps masked, `a =
softmax(a, dim=-1)`, perhaps with dropout, and `a @ v` at the end. Any mask is taken to be causal: the loss,
and the gradients of the row with the call, show whether that was right."""

import ast
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

CASTS = ("float", "to", "type_as")  # methods, which fused attention does inside
MASKS = ("masked_fill", "masked_fill_")
TRANSPOSED = ("transpose(-2, -1)", "transpose(-1, -2)", "transpose(2, 3)", "transpose(3, 2)", "mT")
FUNCTIONS = ("F", "torch", "nn.functional", "torch.nn.functional")
WIDTH = 100  # of a line


class Fused(NamedTuple):
    text: str  # of the file, with the call
    place: str  # `CausalSelfAttention.forward`
    lines: tuple[int, int]  # the first and the last that it replaces
    call: str  # the statement that makes it


class NotPlainError(Exception):
    """Something else than the pattern."""


def fused(text: str) -> Fused | None:
    """The file with its attention as one call; None where it has none that is plain, or more than one."""
    tree, found = ast.parse(text), []
    for name, body in functions_of(tree):
        at = next((k for k, statement in enumerate(body) if softmax_of(statement)), None)
        if at is not None:
            try:
                found.append(Attention(body, at).fused(text, name, functional_of(tree)))
            except NotPlainError:
                return None
    return found[0] if len(found) == 1 else None


def functions_of(tree: ast.Module) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The statements of all functions and methods, with their names."""
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                yield inner.name if inner is node else f"{node.name}.{inner.name}", inner.body


def functional_of(tree: ast.Module) -> str:
    """How a file calls torch.nn.functional."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.asname for alias in node.names if alias.name == "torch.nn.functional"]
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.nn":
            names = [alias.asname or alias.name for alias in node.names if alias.name == "functional"]
        else:
            continue
        if names and names[0]:
            return names[0]
    return "torch.nn.functional"


class Attention:
    """The pattern in the statements of a function, whose softmax is the one `at`. Raises NotPlainError."""

    def __init__(self, body: list[ast.stmt], at: int):
        self.removed, self.dropout, self.scale, self.is_masked = [body[at]], "", "", False
        self.weights = body[at].targets[0].id
        name = self.peel(softmax_of(body[at]))
        for statement in reversed(body[:at]):
            if name and mentions(statement, name):
                if not is_assignment(statement, name):
                    raise NotPlainError
                self.removed.append(statement)
                name = self.peel(statement.value)
        if name:
            raise NotPlainError
        after = body[at + 1 :]
        if after and is_assignment(after[0], self.weights):
            self.dropout = dropout_of(after[0].value, self.weights)
            self.removed.append(after.pop(0))
        self.last = self.weighing(after)

    def peel(self, node: ast.expr) -> str:
        """Take scale and mask off the scores, down to their product, or to the name returned, which an
        earlier statement assigns."""
        node = uncast(node)
        if isinstance(node, ast.Name):
            return node.id
        if product := operands_of(node):
            self.query, self.key = ast.unparse(product[0]), transposed(ast.unparse(product[1]))
            return ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MASKS:
            self.is_masked = True
            return self.peel(node.func.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)) and not self.scale:
            factor = ast.unparse(node.right)
            divisor = f"({factor})" if isinstance(node.right, ast.BinOp) else factor
            self.scale = factor if isinstance(node.op, ast.Mult) else f"1 / {divisor}"
            return self.peel(node.left)
        raise NotPlainError

    def weighing(self, statements: list[ast.stmt]) -> ast.expr:
        """The product `a @ v`, the only use of the weights `a`."""
        nodes = [node for statement in statements for node in ast.walk(statement)]
        uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == self.weights]
        products = [node for node in nodes if (pair := operands_of(node)) and pair[0] in uses]
        if len(uses) != 1 or not products:
            raise NotPlainError
        return products[0]

    def fused(self, text: str, name: str, functional: str) -> Fused:
        words = [self.query, self.key, ast.unparse(operands_of(self.last)[1])]
        words += ["is_causal=True"] if self.is_masked else []
        words += [f"dropout_p={self.dropout}"] if self.dropout else []
        words.append(f"scale={self.scale or 1.0}")
        call = f"{functional}.scaled_dot_product_attention({', '.join(words)})"
        lines = min(each.lineno for each in self.removed), self.last.end_lineno
        text, statement = replaced(text, self.removed, self.last, call)
        return Fused(text, name, lines, statement)


def replaced(text: str, removed: list[ast.stmt], node: ast.expr, call: str) -> tuple[str, str]:
    """The text without these statements and with the call in place of an expression, and the lines of that
    call. Raises NotPlainError where a line holds more than its statement."""
    rows = text.split("\n")
    for statement in removed:
        behind = rows[statement.end_lineno - 1].encode()[statement.end_col_offset :].decode().strip()
        before = rows[statement.lineno - 1].encode()[: statement.col_offset]
        if before.strip() or (behind and behind[0] != "#"):
            raise NotPlainError
    before = rows[node.lineno - 1].encode()[: node.col_offset].decode()
    behind = rows[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    if before.endswith("(") and behind.startswith(")"):  # (a @ v).transpose(1, 2)
        before, behind = before[:-1], behind[1:]
    if len(before + call + behind) > WIDTH:
        indent = before[: len(before) - len(before.lstrip())]
        head, words = call.removesuffix(")").split("(", 1)
        call = f"{head}(\n{indent}    {words}\n{indent})"
    statement = before + call + behind
    rows[node.lineno - 1 : node.end_lineno] = [statement]
    for each in sorted(removed, key=lambda each: -each.lineno):
        del rows[each.lineno - 1 : each.end_lineno]
    return "\n".join(rows), textwrap.dedent(statement)


# --- parts of the pattern -------------------------------------------------------------------------


def mentions(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement))


def is_assignment(statement: ast.stmt, name: str) -> bool:
    """Whether it assigns to this name alone."""
    return isinstance(statement, ast.Assign) and [*map(ast.unparse, statement.targets)] == [name]


def uncast(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CASTS:
        node = node.func.value
    return node


def softmax_of(statement: ast.stmt) -> ast.expr | None:
    """The scores of `a = softmax(scores, dim=-1)`, a function or a method, cast or not."""
    if not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)):
        return None
    call = uncast(statement.value)
    if not (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "softmax"
    ):
        return None
    is_function = ast.unparse(call.func.value) in FUNCTIONS
    scores, *rest = call.args if is_function else [call.func.value, *call.args]
    rest += [each.value for each in call.keywords if each.arg == "dim"]
    return scores if [*map(ast.unparse, rest)] == ["-1"] else None


def transposed(key: str) -> str:
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


def dropout_of(call: ast.expr, weights: str) -> str:
    """The probability of `self.dropout(a)`, or of F.dropout."""
    if not (isinstance(call, ast.Call) and [*map(ast.unparse, call.args)] == [weights]):
        raise NotPlainError
    function = ast.unparse(call.func)
    if function.startswith("self.") and not call.keywords:
        return f"{function}.p if self.training else 0.0"
    if function.removesuffix(".dropout") in FUNCTIONS:
        words = {each.arg: ast.unparse(each.value) for each in call.keywords}
        return f"{words.get('p', 0.5)} if {words.get('training', True)} else 0.0"
    raise NotPlainError
