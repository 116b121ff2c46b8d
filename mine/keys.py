"""Whether attention by hand may have more keys than queries, as with a cache: by what its keys are made of.

Training shows nothing of a cache, whose single query sees all keys. With is_causal=True it would see the
first one alone.
"""

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable
from types import ModuleType, NoneType

import torch

from mine.masks import DESCRIPTIONS, assignments_of, given_to, values_along

JOINS = ("cat", "concat", "concatenate")  # functions that can add keys
OF_WIDTH = ("-1", "3")  # the dimension along which they add none
CACHES = ("cache", "past")  # parts of names of inputs


def more_keys(
    function: ast.FunctionDef, scope: ast.stmt, query: str, key: str, value: str
) -> tuple[str, set[str]]:
    """By which input or function there may be more keys than queries, empty if by none; and what else makes
    keys or values, and no queries, which only a model can tell: attributes of self, and names of the file."""
    methods = {f"self.{each.name}": each for each in ast.walk(scope) if isinstance(each, ast.FunctionDef)}
    local, given = values_in(function), given_to(function)
    of_queries, of_keys, of_values = (
        origins(ast.parse(text), local, methods) for text in (query, key, value)
    )
    parts = of_keys + of_values
    joins = {ast.unparse(part.func) for part in parts if adds_keys(part)}
    joins |= {ast.unparse(part) for part in of_queries if takes_last(part)} - {*map(ast.unparse, parts)}
    names = {ast.unparse(part) for part in parts if isinstance(part, (ast.Name, ast.Attribute))}
    own = names - {ast.unparse(part) for part in of_queries}
    caches = {name for name in names & given if any(word in name.lower() for word in CACHES)}
    return min(joins | caches | own & given, default=""), own - {*local} - {*methods}


def values_in(function: ast.FunctionDef) -> dict[str, list[ast.AST]]:
    """What each local name of a function is made of; of what it is given, nothing."""
    values = {name: [] for name in given_to(function)}
    for target, value in assignments_of(function):
        for name in names_assigned(target):
            values.setdefault(name, []).append(value)
    return values


def names_assigned(target: ast.AST) -> set[str]:
    """The local names that an assignment to this target changes: of `a[i] = b`, a."""
    while isinstance(target, ast.Subscript):
        target = target.value
    if isinstance(target, (ast.Tuple, ast.List, ast.Starred)):
        return {name for part in ast.iter_child_nodes(target) for name in names_assigned(part)}
    return {target.id} if isinstance(target, ast.Name) else set()


def origins(
    node: ast.AST, local: dict[str, list[ast.AST]], methods: dict[str, ast.FunctionDef]
) -> list[ast.AST]:
    """What an expression is made of: calls, indices, names, and attributes of self and of the file as a
    whole, also those of local names, and of the methods that it calls."""
    parts, queue, seen = [], [node], set()
    while queue:
        part = queue.pop()
        if isinstance(part, ast.Attribute) and part.attr in DESCRIPTIONS:
            continue
        base = part
        while isinstance(base, ast.Attribute):
            base = base.value
        if not isinstance(base, ast.Name):  # of `x.view(B)(y)`, the call and what is in it
            parts += [part] if isinstance(part, (ast.Call, ast.Subscript)) else []
            queue += ast.iter_child_nodes(part)
            continue
        text = base.id if base.id in local else ast.unparse(part)
        if text not in seen:
            seen.add(text)
            parts.append(base if base.id in local else part)
            queue += local.get(text, [])
            if text in methods:
                inner = values_in(methods[text])
                parts += [each for each in origins(methods[text], inner, {}) if not is_local(each, inner)]
    return parts


def is_local(part: ast.AST, local: dict[str, list[ast.AST]]) -> bool:
    return isinstance(part, ast.Name) and (part.id in local or part.id == "self")


def adds_keys(part: ast.AST) -> bool:
    """Whether a call joins tensors along another dimension than their last."""
    if not (isinstance(part, ast.Call) and ast.unparse(part.func).rpartition(".")[2] in JOINS):
        return False
    words = [*part.args[1:2], *(each.value for each in part.keywords if each.arg in ("dim", "axis"))]
    return ast.unparse(words[0] if words else ast.Constant(0)) not in OF_WIDTH


def takes_last(part: ast.AST) -> bool:
    """Whether an index takes the last ones along another dimension than a tensor's last."""
    if not (isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Tuple)):
        return False
    places = part.slice.elts
    has_dots = any(isinstance(place, ast.Constant) and place.value is ... for place in places)
    places = places[:-1] if has_dots else places[:3]
    return any(isinstance(place, ast.Slice) and isinstance(place.lower, ast.UnaryOp) for place in places)


def name_of_more(more: tuple[str, set[str]], owners: list[torch.nn.Module], file: ModuleType) -> str:
    """By what a model has more keys than queries, of what `more_keys` told of its file; empty if by nothing.
    `owners` are the modules with this attention."""
    adding, names = more
    for name in sorted(names) if not adding else ():
        places = [file if hasattr(file, name.partition(".")[0]) else builtins]
        if name.startswith("self."):
            places = owners
        if not all(keeps_length(values_along(place, name)) for place in places):
            return name
    return adding


def keeps_length(values: list[object]) -> bool:
    """Whether what makes keys leaves their number alone, by the values along its name: a size, a scale, a
    weight, a layer or a function that joins nothing, and no other tensor or list."""
    value, owner = values[-1], getattr(values[-1], "__self__", None)
    if any(isinstance(each, torch.nn.Parameter) for each in values):
        return True
    if isinstance(value, torch.nn.Module):
        return not joins_keys(value.forward)
    if callable(value) and isinstance(owner, (NoneType, ModuleType)):
        return not joins_keys(value)
    if isinstance(value, torch.Tensor) and value.numel():
        return value.dim() < 2 or value.shape[-2] == 1
    known = (bool, int, float, str, ModuleType, torch.dtype, torch.device, torch.memory_format)
    return all(isinstance(part, known) for part in (value if isinstance(value, tuple) else [value]))


def joins_keys(function: Callable) -> bool:
    """Whether a function of the user's joins tensors as a cache does."""
    if getattr(function, "__module__", None) is None or function.__module__.startswith("torch."):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # of a builtin, or a lambda
        return False
    return any(map(adds_keys, ast.walk(tree)))
