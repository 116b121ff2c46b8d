"""Whether inputs, or something that changes between steps, may decide the mask of attention by hand: then the
batches that were seen do not show what it is in a later one. In doubt they may."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

SHAPES = ("shape", "size", "device", "dtype")  # attributes of a tensor that say nothing of its numbers
SHAPED = ("len", "ones_like", "zeros_like", "new_ones", "new_zeros")  # functions that take no more of it
LIBRARIES = ("torch", "nn", "F", "functional", "math", "np")
CHANGING = (".rand", ".randn", ".randint", ".randperm", ".random", ".bernoulli", ".is_grad_enabled")
BUILDERS = ("__init__", "model")  # functions that run before training
ANY_OF_SELF = "self.*"  # what a method of its own may change


class Change(NamedTuple):
    """What a statement may change, by names: `self.mask` and `.mask` for an attribute."""

    changed: set[str]
    numbers: set[str]  # what decides how
    source: str = ""  # of `rows = hidden[0]`, hidden, which a change of rows changes


def may_differ(mask: ast.expr, function: ast.FunctionDef, tree: ast.Module, pattern: list[ast.stmt]) -> bool:
    """Whether the numbers of a mask in a function of a file may be others in a later batch. `pattern` are the
    statements that use it."""
    changes = [*changes_of(function.body, pattern)]
    inputs, deciding = parameters_of(function) - {"self"}, numbers_of(mask)
    for known, follows in ((inputs, forward), (deciding, backward)):
        before = None
        while before != known:
            before = set(known)
            for change in changes:
                known |= follows(change, known)
    return bool(overlap(deciding, inputs) or deciding & {*CHANGING, *changed_elsewhere(tree, function)})


def forward(change: Change, known: set[str]) -> set[str]:
    """What is decided by known names."""
    return change.changed if overlap(change.numbers, known) else set()


def backward(change: Change, known: set[str]) -> set[str]:
    """What decides known names."""
    if overlap(change.changed, known):
        return change.numbers
    return change.changed if change.source in known else set()


def overlap(names: set[str], others: set[str]) -> bool:
    """Whether two sets share a name, or one may be any attribute of self and the other has one."""
    if names & others:
        return True
    pairs = ((names, others), (others, names))
    return any(ANY_OF_SELF in a and any(name.startswith("self.") for name in b) for a, b in pairs)


def changes_of(
    statements: list[ast.stmt], pattern: list[ast.stmt], around: frozenset[str] = frozenset()
) -> Iterator[Change]:
    """What the statements of a block change. Conditions and loops around one decide it, too."""
    for statement in statements:
        bodies = [getattr(statement, name, None) for name in ("body", "orelse", "handlers", "finalbody")]
        bodies = [body for body in bodies if isinstance(body, list)]
        if not bodies:
            if statement not in pattern:
                yield change_of(statement, around)
            continue
        inside = {id(part) for body in bodies for part in body}
        head = [part for part in ast.iter_child_nodes(statement) if id(part) not in inside]
        decides = around.union(*map(numbers_of, head))
        yield Change({name for part in head for name in stored_names(part)}, {*decides})
        for body in bodies:
            yield from changes_of(body, pattern, decides)


def change_of(statement: ast.stmt, around: frozenset[str]) -> Change:
    changed = {*stored_names(statement)}
    for call in ast.walk(statement):
        in_place = isinstance(statement, ast.Expr) or any(
            word.arg == "out" for word in getattr(call, "keywords", ())
        )
        if isinstance(call, ast.Call) and in_place:
            changed |= {name for name in numbers_of(call) if name[0] != "." and name not in LIBRARIES}
            if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self":
                changed.add(ANY_OF_SELF)
    source = root_of(statement.value) if isinstance(statement, ast.Assign) else ""
    return Change(changed, numbers_of(statement) | around, source)


def stored_names(node: ast.AST) -> Iterator[str]:
    """The names that an assignment changes, also of a part."""
    for part in ast.walk(node):
        if isinstance(getattr(part, "ctx", None), (ast.Store, ast.Del)) and (root := root_of(part)):
            yield root


def root_of(node: ast.AST) -> str:
    """The name, or the attribute of self, that an expression is a part or a view of: empty without one."""
    last = ""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.Starred)):
        last = node.attr if isinstance(node, ast.Attribute) else last
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        return f"self.{last}" if node.id == "self" and last else node.id
    return ""


def numbers_of(node: ast.AST) -> set[str]:
    """The names in an expression, but for those of which it takes the shape or the device."""
    if isinstance(node, ast.Attribute) and node.attr in SHAPES:
        return set()
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in SHAPED:
        return set()
    names = {node.id} if isinstance(node, ast.Name) and node.id != "self" else set()
    if isinstance(node, ast.Attribute):
        names |= {f".{node.attr}"}
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            names |= {f"self.{node.attr}"}
    return names.union(*map(numbers_of, ast.iter_child_nodes(node)))


def parameters_of(function: ast.FunctionDef) -> set[str]:
    return {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}


def changed_elsewhere(tree: ast.Module, function: ast.FunctionDef) -> set[str]:
    """The attributes, and the names of the file, that change while the model trains: other functions set
    them, or this one counts with them."""
    names = set()
    for other in ast.walk(tree):
        if isinstance(other, ast.FunctionDef) and other.name not in BUILDERS:
            nodes = [
                node for node in ast.walk(other) if other is not function or isinstance(node, ast.AugAssign)
            ]
            names |= {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
            targets = [getattr(node, "target", node) for node in nodes]
            names |= {part_of(node) for node in targets if isinstance(getattr(node, "ctx", None), ast.Store)}
    return names - {""}


def part_of(target: ast.AST) -> str:
    """The attribute, or the name, of which an assignment changes a part; empty for a whole name."""
    whole = target
    while isinstance(target, ast.Subscript):
        target = target.value
    if isinstance(target, ast.Attribute):
        return f".{target.attr}"
    return target.id if isinstance(target, ast.Name) and target is not whole else ""
