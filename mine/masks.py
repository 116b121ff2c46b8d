"""Whether attention by hand is causal: by how its mask is made, and by what its lines do in training.

What training shows is exact, but of one length: a window as long as the batch hides no more than a causal
mask, and a cache of keys, which needs the last rows of a mask, is of generation. So both are asked.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mine.attention import calling_frame

FILLS = ("masked_fill", "masked_fill_")  # methods
DESCRIPTIONS = ("shape", "size", "device", "dtype")  # of a tensor, which say nothing of its numbers
INFINITE = ("float('inf')", "float('infinity')", "math.inf", "torch.inf", "np.inf")
LARGE = 1e4  # to subtract as much hides a score, too
TRIANGLES = ("tril", "triu")
MAKERS = ("ones", "ones_like", "full", "arange")  # functions of torch
WRAPPERS = (*TRIANGLES, "logical_not", "Parameter", "Buffer")  # functions of torch and classes of torch.nn
RESHAPERS = ("bool", "to", "type", "view", "reshape", "unsqueeze", "expand", "contiguous")  # methods
RESHAPERS += ("clone", "detach", "logical_not", "eq", "ne", *TRIANGLES)
DIMENSIONS = 4  # that a fused kernel takes


class NotPlainError(Exception):
    """Something else than the pattern."""


# --- how a mask is made ---------------------------------------------------------------------------


def masks_of_fill(call: ast.Call, given: set[str], values: dict[str, list[ast.AST]]) -> dict[str, bool]:
    """The names that the mask of a masked_fill is made of, and whether each has a value here. Raises
    NotPlainError unless the fill hides a triangle that no input decides. `given` are the names that inputs
    decide, `values` as `values_of` gives them."""
    if len(call.args) != 2 or call.keywords or numbers_of(call.args[0]) & given:
        raise NotPlainError
    filled = ast.unparse(call.args[1]).lower()
    is_infinite = filled[0] == "-" and filled[1:] in INFINITE
    is_infinite |= filled in ("float('-inf')", "float('-infinity')")
    is_least = filled.endswith(".min") and "finfo" in filled
    is_large = is_number(call.args[1]) and ast.literal_eval(call.args[1]) <= -LARGE
    if not (is_infinite or is_least or is_large):
        raise NotPlainError
    names: dict[str, bool] = {}
    if follow_mask(call.args[0], values, names) > 1:  # two triangles leave a window
        raise NotPlainError
    return names


def follow_mask(node: ast.AST, values: dict[str, list[ast.AST]], names: dict[str, bool]) -> int:
    """Add the names that a mask is made of to `names`, and return how many triangles. Raises NotPlainError
    unless it is made of ones or by comparing positions, from the first row and key on."""
    triangles = 0
    if isinstance(node, (ast.Name, ast.Attribute)):
        if (name := ast.unparse(node)) in names:
            return 0
        parts = values.get(name, [])
        names[name] = bool(parts)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        parts, triangles = masks_of_call(node), int(node.func.attr in TRIANGLES)
    else:
        parts = [] if isinstance(node, ast.Constant) else operands_of(node)
        triangles = int(isinstance(node, ast.Compare) and not any(map(is_number, node.comparators)))
    return triangles + sum(follow_mask(part, values, names) for part in parts)


def operands_of(node: ast.AST) -> list[ast.expr]:
    """What an index, a comparison or `1 - mask` makes a mask of. Raises NotPlainError for anything else."""
    if isinstance(node, ast.Subscript):
        places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if all(map(is_from_the_start, places)):
            return [node.value]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return [node.left, *node.comparators]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Invert, ast.Not)):
        return [node.operand]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and is_number(node.left):
        return [node.right]
    raise NotPlainError


def masks_of_call(call: ast.Call) -> list[ast.AST]:
    """What a call makes a mask of: of torch's functions or a tensor's methods, one that makes or keeps a
    triangle. Raises NotPlainError for any other."""
    name, is_function = call.func.attr, ast.unparse(call.func.value) in ("torch", "nn", "torch.nn")
    wraps = is_function and name in WRAPPERS
    if name not in ((*MAKERS, *WRAPPERS) if is_function else RESHAPERS) or (wraps and not call.args):
        raise NotPlainError
    inner, rest = (call.args[0], call.args[1:]) if wraps else (call.func.value, call.args)
    words = [each.value for each in call.keywords if each.arg not in ("device", "dtype", "requires_grad")]
    if name in TRIANGLES and not all(map(is_number, [*rest, *words])):
        raise NotPlainError  # a diagonal that depends on the length, as with a cache
    if name in ("eq", "ne") and not all(map(is_number, rest)):
        raise NotPlainError
    if name == "arange" and (rest[1:] or words):
        raise NotPlainError
    return [inner] if wraps or not is_function else []


def is_from_the_start(place: ast.expr) -> bool:
    """Whether an index takes the first rows or keys, or adds a dimension."""
    if isinstance(place, ast.Slice):
        return place.step is None and (place.lower is None or ast.unparse(place.lower) == "0")
    return isinstance(place, ast.Constant)


def is_number(node: ast.AST) -> bool:
    try:
        return isinstance(ast.literal_eval(node), (int, float))
    except ValueError:
        return False


def is_triangle(tensor: torch.Tensor) -> bool:
    """Whether a tensor marks the keys behind each row, or those up to it, and nothing else, in all its rows:
    a batch may take the first ones."""
    rows, keys = tensor.shape[-2:]
    above = torch.ones(rows, keys, dtype=torch.bool, device=tensor.device).triu(1)
    return rows == keys and any(bool((tensor.bool() == each).all()) for each in (above, ~above))


def faults_of_masks(masks: dict[str, bool], owners: list[torch.nn.Module], file: ModuleType) -> Iterator[str]:
    """Why a mask that is made of these names is not the causal one: a tensor is no triangle, or is not found,
    among attributes of the modules with this attention, `owners`, and what the file defines."""
    for name, is_made_here in masks.items():
        of_self = name.startswith("self.")
        if is_made_here and not of_self:  # a local name
            continue
        places = owners if of_self else [file]
        own = name.removeprefix("self.").partition(".")[0]
        if any(isinstance(getattr(type(place), own, None), property) for place in places):
            yield f"has a mask that a property makes ({name}): make it in __init__()"
        tensors = [tensor for place in places for tensor in tensors_in(values_along(place, name)[-1])]
        if not (tensors or is_made_here):
            yield f"has a mask that is made elsewhere ({name}): make it beside its attention"
        for tensor in tensors:
            has_rows = tensor.dim() > 1 and min(tensor.shape[-2:]) > 1  # and no positions, (1, T)
            if has_rows and not is_triangle(tensor):
                yield "is not causal in longer batches, by its whole mask"


def values_along(place: object, name: str) -> list[object]:
    """The values of a dotted name from its first part to the whole, in a module or in a file; of what is
    missing, None."""
    values = []
    for part in name.removeprefix("self.").split("."):
        values.append(place := getattr(place, part, None))
    return values


def tensors_in(value: object) -> list[torch.Tensor]:
    """A tensor, or those of a list, a dict or a module."""
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, dict):
        value = [*value.values()]
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in parts if isinstance(each, torch.Tensor)]


def values_of(scope: ast.AST) -> dict[str, list[ast.AST]]:
    """What each name, and each attribute of self, is anywhere in a class or a function: an expression, or the
    statement that changes it in another way than by a plain assignment."""
    values = defaultdict(list)
    for node in ast.walk(scope):
        for target in getattr(node, "targets", None) or [getattr(node, "target", None)]:
            is_plain = isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr))
            if isinstance(target, (ast.Name, ast.Attribute)) and is_plain:
                values[ast.unparse(target)] += [node.value] if node.value else []
            elif target is not None:
                for part in getattr(target, "elts", [getattr(target, "value", target)]):
                    values[ast.unparse(part)].append(ast.Pass())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "register_buffer":
                name, value = [*node.args, *(each.value for each in node.keywords)][:2]
                values[f"self.{getattr(name, 'value', '')}"].append(value)
            elif node.func.attr.endswith("_"):  # in place, perhaps of a part
                changed = node.func.value
                while isinstance(changed, ast.Subscript):
                    changed = changed.value
                values[ast.unparse(changed)].append(ast.Pass())
    return values


def inputs_of(function: ast.FunctionDef) -> set[str]:
    """The names whose numbers come from what a function is given, self aside: not those of shapes."""
    assigned, inputs, before = assignments_of(function), given_to(function), set()
    while inputs != before:
        before = set(inputs)
        for target, value in assigned:
            if numbers_of(value) & inputs:
                inputs |= names_of(target)
    return inputs


def given_to(function: ast.FunctionDef) -> set[str]:
    return {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)} - {"self"}


def assignments_of(function: ast.FunctionDef) -> list[tuple[ast.AST, ast.AST]]:
    """What a function assigns to, and what it is made of: of a loop, what it runs over."""
    pairs = []
    for node in ast.walk(function):
        value = getattr(node, "iter", None) or getattr(node, "value", None)
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if value is not None and targets != [None]:
            pairs += [(target, value) for target in targets]
    return pairs


def numbers_of(node: ast.AST) -> set[str]:
    """The names in an expression, but for those of which it takes the shape or the device."""
    if isinstance(node, ast.Attribute) and node.attr in DESCRIPTIONS:
        return set()
    names = {node.id} if isinstance(node, ast.Name) else set()
    return names.union(*map(numbers_of, ast.iter_child_nodes(node)))


def names_in(node: ast.AST) -> list[ast.Name]:
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]


def names_of(node: ast.AST) -> set[str]:
    return {name.id for name in names_in(node)}


# --- what the lines do when the model trains ------------------------------------------------------


class Scores(TorchDispatchMode):
    """What these lines of a file do to attention's scores inside the context: `faults`, which PyTorch's call
    does not have, and whether a tensor scales them."""

    def __init__(self, path: Path, lines: frozenset[int]):
        super().__init__()
        self.path, self.lines = str(path), lines
        self.faults: list[str] = []
        self.has_tensor_scale = False
        self.are_scores = self.are_weights = False  # what was computed last: before the softmax, behind it

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._overloadpacket.__name__
        frame = calling_frame() if name in ("bmm", "_softmax", "mul", "div", *FILLS) else None
        if frame and frame.f_code.co_filename == self.path and frame.f_lineno in self.lines:
            self.look(name, *args[:2])
        return function(*args, **(kwargs or {}))

    def look(self, name: str, scores: torch.Tensor, other: object) -> None:
        if name == "bmm":  # of queries and keys, then of weights and values
            self.are_scores, self.are_weights = not self.are_weights, False
        elif not self.are_scores:  # such as dropout of the weights, or a norm of the queries
            return
        elif name == "_softmax":
            self.are_scores, self.are_weights = False, True
            if scores.dim() != DIMENSIONS:
                kernels = "fused kernels take (batch, heads, length, width)"
                self.faults.append(f"has scores of {scores.dim()} dimensions: {kernels}")
        elif name in FILLS:
            rows, keys = scores.shape[-2:]
            causal = torch.ones(rows, keys, dtype=torch.bool, device=other.device).triu(1)
            if rows != keys or not (other == causal).all():
                self.faults.append("is not causal: pass its mask to F.scaled_dot_product_attention")
        elif isinstance(other, torch.Tensor):
            self.has_tensor_scale = True
            if other.shape[-2:].numel() > 1:
                self.faults.append(
                    "scales its scores one by one, which F.scaled_dot_product_attention cannot"
                )
