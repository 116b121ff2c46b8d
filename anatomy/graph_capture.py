"""How do trace, script, FX and Dynamo differ on a branch that depends on data?

Predict: five tools turn a function with `if x.sum() > 0` into a graph. Which refuse, which make several graphs, and
which one is wrong on the other side of the branch without an error?

Prediction: a compiler needs a graph of operators, and these tools make one of a Python function in different ways.
`torch.jit.trace` records the operators of one call. It takes in 1 of the 2 sides of the branch and is wrong on the
other side, without an error. `torch.jit.script` compiles the source with both sides. FX calls the function without
numbers, so it cannot choose a side and refuses. Dynamo, the front end of torch.compile, captures the graph before the
branch, lets Python choose, and captures one more graph for each side: 1 + 2 graphs, right on both sides.
`torch.export` must return one whole graph. It refuses unless the branch is `torch.cond`, an operator that contains
both sides.

Change: make the branch depend on x.shape[0] in Branching. Which tools take it now, and why is that right?
Source: the documentation of torch.jit.trace, torch.jit.script, torch.fx (limits of symbolic tracing), torch.compile
(graph breaks) and torch.export (control flow).
Run:    python -m anatomy graph-capture [--n N]
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.fx
import torch.nn as nn
from torch._dynamo.testing import EagerAndRecordGraphs

from anatomy.experiment import Check, Result, quiet, size_argument, table
from common.text import one_line


class Branching(nn.Module):
    """Two pointwise functions. The sign of a sum chooses between them, which no shape tells in advance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x - 3


class BranchingByCond(nn.Module):
    """The same function with the branch as an operator, which a graph can contain."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 3, (x,))


def by_trace(x: torch.Tensor) -> tuple[Callable, Callable]:
    traced = torch.jit.trace(Branching(), x, check_trace=False)
    return traced, lambda: sides(traced.inlined_graph)


def by_script(x: torch.Tensor) -> tuple[Callable, Callable]:
    scripted = torch.jit.script(Branching())
    return scripted, lambda: sides(scripted.inlined_graph)


def by_fx(x: torch.Tensor) -> tuple[Callable, Callable]:
    traced = torch.fx.symbolic_trace(Branching())
    return traced, lambda: f"1 graph of {len(traced.graph.nodes)} nodes"


def by_dynamo(x: torch.Tensor) -> tuple[Callable, Callable]:
    torch._dynamo.reset()
    recorder = EagerAndRecordGraphs()
    return torch.compile(Branching(), backend=recorder), lambda: f"{len(recorder.graphs)} graphs"


def by_export(x: torch.Tensor, model: type[nn.Module] = Branching) -> tuple[Callable, Callable]:
    exported = torch.export.export(model(), (x,))
    inside = [module for module in exported.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    return exported.module(), lambda: f"1 graph, {len(inside) - 1} inside it"


def sides(graph: torch.Graph) -> str:
    captured = [kind for kind in JIT_SIDES if graph.findAllNodes(kind)]
    return f"1 graph, {len(captured)} of 2 sides ({', '.join(captured)})"


JIT_SIDES = ("aten::mul", "aten::sub")  # the operator of either side
TOOLS = {  # tool -> (capture; predictions: the graphs, right on the side shown, right on the other side)
    "torch.jit.trace": (by_trace, "1 graph, 1 of 2 sides", True, False),
    "torch.jit.script": (by_script, "1 graph, 2 of 2 sides", True, True),
    "torch.fx.symbolic_trace": (by_fx, "refuses", None, None),
    "torch.compile (Dynamo)": (by_dynamo, "3 graphs", True, True),
    "torch.export": (by_export, "refuses", None, None),
    "torch.export of torch.cond": (partial(by_export, model=BranchingByCond), "1 graph, 2 inside it", True, True),
}
VERDICT = {True: "right", False: "WRONG", None: "-"}


def capture(tool: str, x: torch.Tensor) -> dict:
    """What `tool` makes of the function. The tool gets x; the result is tried on x and on -x, the other side."""
    model, outcome = Branching(), {"captured": "refuses", "first": None, "other": None, "reason": None}
    with quiet() as caught:  # a tool that refuses prints its unfinished graph
        try:
            captured, describe = TOOLS[tool][0](x)
            outcome["first"], outcome["other"] = (torch.equal(captured(t), model(t)) for t in (x, -x))
            outcome["captured"] = describe()
        except Exception as error:  # every tool has its own exceptions, and a refusal is a result
            outcome["reason"] = f"{type(error).__name__}: {one_line(error)}"
    deprecated = (str(w.message) for w in caught if issubclass(w.category, (DeprecationWarning, FutureWarning)))
    outcome["deprecated"] = next((text.splitlines()[0] for text in deprecated if tool in text), None)
    outcome["warned"] = any(w.category.__name__ == "TracerWarning" for w in caught)
    return outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size_argument(parser, "--n", "numbers in the input (default 8)", default=8)


def run(args: argparse.Namespace) -> Result:
    x = torch.ones(args.n, device=args.device, dtype=args.dtype or torch.float32)
    outcomes, rows, notes = {}, [], []
    for tool, (_, captured, first, other) in TOOLS.items():
        cell = outcomes[tool] = capture(tool, x)
        right = (cell["first"], cell["other"])
        cell["as_predicted"] = cell["captured"].startswith(captured) and right == (first, other)
        rows.append({
            "tool": tool,
            "captured": f"{captured} / {cell['captured']}",
            "on the side shown": f"{VERDICT[first]} / {VERDICT[cell['first']]}",
            "on the other side": f"{VERDICT[other]} / {VERDICT[cell['other']]}",
        })  # fmt: skip
        if cell["reason"]:
            notes.append(f"{tool} refuses with {cell['reason'].rstrip('.')}.")
        if cell["deprecated"]:
            notes.append(f"{tool} warns that it is deprecated: {cell['deprecated'].rstrip('.')}.")
    wrong = [f"{tool} ({'with' if cell['warned'] else 'without'} a warning at capture)"
             for tool, cell in outcomes.items() if cell["other"] is False]  # fmt: skip
    surprises = [tool for tool, cell in outcomes.items() if not cell["as_predicted"]]
    sentences = [
        f"These tools are wrong on the other side without an error: {', '.join(wrong) or 'none'}.",
        f"These tools are not as predicted: {', '.join(surprises) or 'none'}.",
    ]
    checks = [
        Check(f"{tool}: 1 if all is as predicted", 1, int(cell["as_predicted"]), "") for tool, cell in outcomes.items()
    ]
    return Result([table("Predicted / measured, by tool", rows)], sentences + notes, {"tools": outcomes}, checks)
