"""Whether attention by hand is causal: by how its mask is made, and by what its lines do in training.

What training shows is exact, but of one length: a window as long as the batch hides no more than a causal
mask, and a cache of keys, which needs the last rows of a mask, is of generation. So both are asked.
"""

import ast
from collections import defaultdict
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mine.attention import calling_frame

FILLS = ("masked_fill", "masked_fill_")  # methods
ABOUT = ("shape", "size", "device", "dtype")  # of a tensor, which say nothing of its numbers
INFINITE = ("float('inf')", "float('infinity')", "math.inf", "torch.inf", "np.inf")
LARGE = 1e4  # to subtract as much hides a score, too
TRIANGLES = ("tril", "triu")
MADE_BY = ("ones", "ones_like", "full", "arange")  # functions of torch
TAKEN_BY = (*TRIANGLES, "logical_not", "Parameter", "Buffer")  # the same, of one that is made
KEPT_BY = ("bool", "to", "type", "view", "reshape", "unsqueeze", "expand", "contiguous")  # methods
KEPT_BY += ("clone", "detach", "logical_not", "eq", "ne", *TRIANGLES)
MOST_DIMENSIONS = 4  # that a fused kernel takes


class NotPlainError(Exception):
    """Something else than the pattern."""


# --- how a mask is made ---------------------------------------------------------------------------


def check_mask(call: ast.Call, given: set[str], values: dict[str, list[ast.AST]]) -> None:
    """Raises NotPlainError for a masked_fill by what an input decides, by more than a triangle, and with
    another number than minus infinity. `values` as `values_of` gives them."""
    if len(call.args) != 2 or call.keywords or numbers_of(call.args[0]) & given:
        raise NotPlainError
    check_triangle(call.args[0], dict(values))
    filled = ast.unparse(call.args[1]).lower()
    if filled in ("float('-inf')", "float('-infinity')") or (filled[0] == "-" and filled[1:] in INFINITE):
        return
    if filled.endswith(".min") and "finfo" in filled:
        return
    try:
        is_large = ast.literal_eval(call.args[1]) <= -LARGE
    except (ValueError, TypeError):
        is_large = False
    if not is_large:
        raise NotPlainError


def check_triangle(node: ast.AST, values: dict[str, list[ast.AST]]) -> None:
    """Raises NotPlainError unless a mask is a triangle, of ones or by comparing positions, from the first row
    and key on. What is made outside of the class is not looked at."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        for value in values.pop(ast.unparse(node), []):
            check_triangle(value, values)
    elif isinstance(node, ast.Subscript):
        slices = [each for each in ast.walk(node.slice) if isinstance(each, ast.Slice)]
        if any(each.step or (each.lower and ast.unparse(each.lower) != "0") for each in slices):
            raise NotPlainError
        check_triangle(node.value, values)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        check_triangle(node.left, values)
        check_triangle(node.comparators[0], values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Invert, ast.Not)):
        check_triangle(node.operand, values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and is_number(node.left):  # 1 - mask
        check_triangle(node.right, values)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        check_call(node, values)
    elif not isinstance(node, ast.Constant):
        raise NotPlainError


def check_call(call: ast.Call, values: dict[str, list[ast.AST]]) -> None:
    """The same of a call: of torch's functions or a tensor's methods, those that make or keep a triangle."""
    name, is_function = call.func.attr, ast.unparse(call.func.value) in ("torch", "nn", "torch.nn")
    if name not in ((*MADE_BY, *TAKEN_BY) if is_function else KEPT_BY):
        raise NotPlainError
    rest = call.args[1:] if is_function else call.args
    if name in TRIANGLES and not all(map(is_number, [*rest, *(each.value for each in call.keywords)])):
        raise NotPlainError  # a diagonal that depends on the length, as with a cache
    if name == "arange" and rest:
        raise NotPlainError
    if is_function and name in TAKEN_BY:
        check_triangle(call.args[0], values)
    elif not is_function:
        check_triangle(call.func.value, values)


def is_number(node: ast.AST) -> bool:
    try:
        return isinstance(ast.literal_eval(node), (int, float))
    except ValueError:
        return False


def values_of(scope: ast.AST) -> dict[str, list[ast.AST]]:
    """What each name, and each attribute of self, is assigned anywhere in a class or a function; a statement
    where it is changed in part."""
    values = defaultdict(list)
    for node in ast.walk(scope):
        if isinstance(node, ast.AugAssign):
            values[ast.unparse(node.target)].append(node)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                in_part = isinstance(target, ast.Subscript)
                values[ast.unparse(target.value if in_part else target)].append(
                    node if in_part else node.value
                )
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.register_buffer" and node.args[1:]:
            values[f"self.{getattr(node.args[0], 'value', '')}"].append(node.args[1])
    return values


def inputs_of(function: ast.FunctionDef) -> set[str]:
    """The names whose numbers come from what a function is given, self aside: not those of shapes."""
    inputs = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)} - {"self"}
    before = set()
    while inputs != before:
        before = set(inputs)
        for node in ast.walk(function):
            value = getattr(node, "iter", None) or getattr(node, "value", None)
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            if value is not None and targets != [None] and numbers_of(value) & inputs:
                inputs |= {
                    name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
                }
    return inputs


def numbers_of(node: ast.AST) -> set[str]:
    """The names in an expression, but for those of which it takes the shape or the device."""
    if isinstance(node, ast.Attribute) and node.attr in ABOUT:
        return set()
    names = {node.id} if isinstance(node, ast.Name) else set()
    return names.union(*map(numbers_of, ast.iter_child_nodes(node)))


# --- what the lines do when the model trains ------------------------------------------------------


class Scores(TorchDispatchMode):
    """What these lines of a file do to attention's scores inside the context: whether they hold the largest
    softmax, and what keeps PyTorch's call from doing the same."""

    def __init__(self, path: Path, lines: frozenset[int]):
        super().__init__()
        self.path, self.lines = str(path), lines
        self.largest, self.is_largest, self.faults, self.softmax_line = 0, False, [], 0
        self.scales: dict[int, torch.Tensor] = {}  # tensors by which a line multiplies or divides

    @property
    def scale(self) -> torch.Tensor | None:
        """The tensor that scales the scores: dropout, behind the softmax, multiplies too."""
        return next((scale for line, scale in self.scales.items() if line <= self.softmax_line), None)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._overloadpacket.__name__
        if name in ("_softmax", "mul", "div", *FILLS) and (frame := calling_frame()):
            is_here = frame.f_code.co_filename == self.path and frame.f_lineno in self.lines
            if name == "_softmax" and args[0].numel() > self.largest:
                self.largest, self.is_largest = args[0].numel(), is_here
            if is_here:
                self.look(name, *args[:2], frame.f_lineno)
        return function(*args, **(kwargs or {}))

    def look(self, name: str, scores: torch.Tensor, other: object, line: int) -> None:
        if name == "_softmax":
            self.softmax_line = line
            if scores.dim() > MOST_DIMENSIONS:
                self.faults.append(f"has scores of {scores.dim()} dimensions, which no fused kernel takes")
        elif name in FILLS:
            rows, keys = scores.shape[-2:]
            causal = torch.ones(rows, keys, dtype=torch.bool, device=other.device).triu(1)
            if rows != keys or not (other == causal).all():
                self.faults.append("is not causal")
        elif isinstance(other, torch.Tensor):
            self.scales[line] = other
