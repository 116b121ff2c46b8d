"""What a recorded time depends on, as a hash: the code that a row's timed step runs through.

That is, in order, the statements of the row's own script, and every definition in common/ that the script,
the rehearsal, the timed region and the batches reach by name; statements of common/ that define nothing count
for every row. A definition counts the same in whatever module
it stands and however it is imported. What a name of another package stands for counts too: F.gelu is
torch.nn.functional.gelu. Docstrings, comments, annotations, and statements that only raise an error or print
a message do not count.

The code is written by a serializer of our own, since ast.dump and ast.unparse differ between Pythons.
"""

import ast
import contextlib
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# What `measure_row` in common/benchmark.py uses for a time and its losses. What it calls to observe is not
# here.
ROOTS = (
    "start",
    "WARMUP",
    "TIMED_S",
    "Training",
    "InitialState.__init__",
    "InitialState.restore",
    "rehearse",
)
ROOTS += ("train_and_time", "Arguments.batches")
CLOCKS = ("mean_seconds", "steady_seconds")  # for what is no row: bare products, an experiment
IMPORTERS = ("import_module", "import_or_skip")  # functions whose first argument is a module's name
MESSAGES = ("progress", "say")
LEFT_OUT = ("annotation", "returns", "ctx", "kind", "type_comment", "type_params")  # fields of syntax nodes
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, *COMPREHENSIONS)  # with names of their own
OUTSIDE = ("args", "decorator_list")  # fields of a function whose expressions belong to the scope around it


class Module(NamedTuple):
    """A parsed source, and what each of its names stands for."""

    name: str  # dotted; empty for a row's own script
    statements: list[ast.stmt]  # that do something, in order
    definitions: dict[str, list[ast.stmt]]  # by name
    imports: dict[str, str]  # by local name: F is torch.nn.functional


def row_sha256(source: str, root: Path, measured_by: tuple[str, ...] = ROOTS) -> str:
    """16 hex digits over the script `source` and the definitions of the checkout `root` that it reaches, with
    those that measure it. Raises ValueError where `root` lacks one of these, and SyntaxError for what is no
    Python."""
    modules, script = read_modules(root), parse("", source)
    queue = [find(name, modules) for name in measured_by]
    code = [write(statement, script, modules, queue) for statement in script.statements]
    reached: dict[tuple[str, str], str] = {}
    while queue:
        home, name = place = queue.pop()
        if place not in reached:
            module = modules[home]
            reached[place] = name + "".join(
                write(part, module, modules, queue) for part in module.definitions[name]
            )
    for module in modules.values():
        effects = [part for part in module.statements if module.name[:7] == "common." and not names_of(part)]
        reached |= {(module.name, str(k)): write(part, module, modules, []) for k, part in enumerate(effects)}
    code += sorted(reached.values())
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


@functools.cache
def read_modules(root: Path) -> dict[str, Module]:
    """The modules whose definitions a row may run through, by their names: common/, the steps, which peers
    import, and what lies beside them."""
    paths = {f"common.{path.stem}": path for path in root.glob("common/[!.]*.py")}
    paths |= {path.stem: path for path in root.glob("[!.]*.py")}  # .#x.py is an editor's lock
    modules = {}
    for name, path in sorted(paths.items()):
        with contextlib.suppress(SyntaxError, ValueError):  # of a step that is being written: its row says so
            modules[name] = parse(name, path.read_text())
    return modules


def find(name: str, modules: dict[str, Module]) -> tuple[str, str]:
    """The module in common/ that defines a name, or the class of a method, and the name."""
    homes = [home for home in modules if home.startswith("common.") and name in modules[home].definitions]
    if len(homes) != 1:
        raise ValueError(f"common/ has {len(homes)} definitions of {name}, and not one")
    return homes[0], name


def parse(name: str, source: str) -> Module:
    tree = ast.parse(source)
    imports = dict(binding for node in ast.walk(tree) for binding in bindings_of(node))
    statements = [node for node in tree.body if not (is_silent(node) or is_guard(node))]
    definitions: dict[str, list[ast.stmt]] = {}
    for statement in statements:
        for defined in names_of(statement):
            definitions.setdefault(defined, []).append(statement)
        for method in statement.body if isinstance(statement, ast.ClassDef) else ():
            if isinstance(method, DEFINITIONS):
                definitions[f"{statement.name}.{method.name}"] = [method]
    return Module(name, statements, definitions, imports)


def bindings_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The local names that a node binds to what it imports, and what they stand for."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            package = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (package, package)
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if alias.name == "*":
                raise ValueError(f"from {node.module} import *: what it binds is not known")
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
        target, module = node.targets[0], node.value.args[0]
        is_import = dotted(node.value.func)[-1:] in [[name] for name in IMPORTERS]
        if is_import and isinstance(target, ast.Name) and isinstance(module, ast.Constant):
            yield target.id, module.value


def is_silent(node: ast.stmt) -> bool:
    """Whether a statement does nothing that is timed: an import, a docstring, an error, a message."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Raise)) or {*bindings_of(node)}:
        return True
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Call):
        name = ".".join(dotted(node.value.func))
        return name in MESSAGES or name == "sys.path.insert"
    return isinstance(node.value, ast.Constant)


def is_guard(node: ast.stmt) -> bool:
    """Whether a statement is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and any(dotted(part) == ["__name__"] for part in ast.walk(node.test))


def names_of(statement: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    if isinstance(statement, DEFINITIONS):
        return [statement.name]
    nodes = list(ast.walk(statement))
    inside = [node.name for node in nodes if isinstance(node, DEFINITIONS)]  # of `if` or `try`
    return inside + [node.id for node in nodes if is_stored(node)]


def is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def dotted(node: ast.AST) -> list[str]:
    """The parts of a name like torch.nn.functional; empty for any other expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    before = dotted(node.value) if isinstance(node, ast.Attribute) else []
    return [*before, node.attr] if before else []


def write(node: object, module: Module, modules: dict[str, Module], queue: list, local=frozenset()) -> str:
    """A syntax node of a module as text. The definitions that it uses go to the queue; `local` are names of
    the functions around it."""
    if isinstance(node, list):
        kept = [part for part in node if not (isinstance(part, ast.stmt) and is_silent(part))]
        return f"[{' '.join(write(part, module, modules, queue, local) for part in kept)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    path = dotted(node)
    if path and path[0] not in local and not is_stored(node):
        return write_name(path, module, modules, queue)
    inside = local | own_names(node) if isinstance(node, SCOPES) else local
    fields = [f"{type(node).__name__}"]
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.JoinedStr):  # some Pythons end a format with an empty text
            value = [part for part in value if not (isinstance(part, ast.Constant) and part.value == "")]
        if name not in LEFT_OUT and value is not None and value != []:
            scope = local if name in OUTSIDE else inside
            fields.append(f"{name}={write(value, module, modules, queue, scope)}")
    return f"({' '.join(fields)})"


def own_names(scope: ast.AST) -> frozenset[str]:
    """The names that are local to a function or a comprehension, and not to one inside it."""
    names, nodes = set(), [part.target for part in getattr(scope, "generators", ())]
    if not isinstance(scope, COMPREHENSIONS):
        nodes = [scope.args, *(scope.body if isinstance(scope.body, list) else [scope.body])]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif is_stored(node):
            names.add(node.id)
        elif isinstance(node, DEFINITIONS):
            names.add(node.name)
        elif not isinstance(node, SCOPES):
            nodes += ast.iter_child_nodes(node)
    return frozenset(names)


def write_name(path: list[str], module: Module, modules: dict[str, Module], queue: list) -> str:
    """A name as what it stands for: one of the project's by its definition alone, wherever that stands."""
    if path[0] in module.definitions:
        if module.name:
            queue.append((module.name, path[0]))
        return ".".join(path)
    whole = [*module.imports.get(path[0], path[0]).split("."), *path[1:]]
    for end in range(len(whole) - 1, 0, -1):
        home = modules.get(".".join(whole[:end]))
        if home and whole[end] in {**home.definitions, **home.imports}:
            return write_name(whole[end:], home, modules, queue)
    return ".".join(whole)
