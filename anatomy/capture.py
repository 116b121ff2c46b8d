"""What can be captured as a graph, and what does a break cost?

Prediction. A compiler needs a graph of operators. Of a branch that depends on data, trace records the
operators of one call: wrong on the other side, without an error. script compiles both sides. FX calls the
function without numbers, so it refuses; export refuses what is not one whole graph, unless the branch is
torch.cond. Dynamo, the front end of torch.compile, captures up to the branch, lets Python choose, and goes
on: right on both sides.

Such a break, as those by print or `.item()`, cuts a graph in two. The kernels before it read N numbers, write
N and add them up, those after it read and write N: 16 N bytes in FP32. Mended by torch.where it is a pass for
the sum and one for the result: 12 N. A break also returns to Python, where this one waits for the GPU: the
time on 64 numbers, measured first, adds to that of the bytes. Without a break the longer one counts.

Change: --numbers 65536. Which ratio is now far from that of the bytes?
Source: the documentation of torch.jit, torch.fx, torch.export (control flow) and torch.compile (graph
breaks).
"""

import contextlib
import io
import logging
import warnings
from functools import partial

import torch


class Branching(torch.nn.Module):
    def forward(self, x):
        y = x * 2 + 1
        if y.sum() > 0:
            return y.abs() * 3 - 1
        return 1 - y.abs() * 3


class Mended(torch.nn.Module):
    def forward(self, x):
        y = x * 2 + 1
        return torch.where(y.sum() > 0, y.abs() * 3 - 1, 1 - y.abs() * 3)


class Conditional(torch.nn.Module):
    def forward(self, x):
        y = x * 2 + 1
        return torch.cond(y.sum() > 0, lambda y: y.abs() * 3 - 1, lambda y: 1 - y.abs() * 3, (y,))


TOOLS = {  # tool: (how it captures, on how many of 2 sides it is right; 0: it refuses)
    "torch.jit.trace": (lambda x: torch.jit.trace(Branching(), x, check_trace=False), 1),
    "torch.jit.script": (lambda x: torch.jit.script(Branching()), 2),
    "torch.fx.symbolic_trace": (lambda x: torch.fx.symbolic_trace(Branching()), 0),
    "torch.compile (Dynamo)": (lambda x: torch.compile(Branching(), backend="eager"), 2),
    "torch.export": (lambda x: torch.export.export(Branching(), (x,)).module(), 0),
    "torch.export of torch.cond": (lambda x: torch.export.export(Conditional(), (x,)).module(), 2),
}
# By form: the function, its breaks, and bytes it moves for a number.
FORMS = {"with the branch": (Branching(), 1, 16), "mended": (Mended(), 0, 12)}


def right_sides(capture, x):
    """On how many sides of the branch a captured form is right; 0 where the tool refuses."""
    torch._dynamo.reset()
    try:
        captured = capture(x)
        return sum(torch.equal(captured(side), Branching()(side)) for side in (x, -x))
    except Exception:  # each tool has its own, and a refusal is a result
        return 0


def measure(lab, N):
    x, times = torch.randn(N, device=lab.device), {}
    lab.title = "Sides of a branch, of 2, on which a captured form is right; 0: the tool refuses"
    for tool, (capture, sides) in TOOLS.items():
        lab.row(tool, right_sides(capture, torch.ones(8, device=lab.device)), sides, "")
    lab.title = f"Compiled, {N} numbers in FP32"
    for what, (form, count, n_bytes) in FORMS.items():
        breaks = torch._dynamo.explain(form)(x[:64]).graph_break_count
        torch._dynamo.reset()
        fast = torch.compile(form, dynamic=False)
        host_s, times[what] = lab.seconds(partial(fast, x[:64].clone())), lab.seconds(partial(fast, x))
        moving_s = lab.copy_seconds(n_bytes * N)
        lab.row(f"{what}: breaks", breaks, count, "")
        lab.row(f"{what}: time", times[what], host_s + moving_s if count else lab.expected(host_s, moving_s))
    return times["with the branch"] / times["mended"]


def run(lab, numbers=None):
    logging.disable(logging.WARNING)  # a tool that refuses says so several times
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ratio = measure(lab, numbers or lab.pick(2**20, 2**23, 2**26))
    logging.disable(logging.NOTSET)
    return f"With the break the function takes {ratio:.1f} times as long."
