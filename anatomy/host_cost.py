"""What does the host pay to run an operator, before the device does any work?

Predict: how many operators on one number does Python run in a millisecond? What does gradient tracking add to one, what
a view, and what a compiled function for each tensor that it must check before it runs? Does it matter on which core?

Prediction. An operator passes through Python, PyTorch's dispatcher and the allocator, and on a GPU through the driver's
launch. On one number, that is its whole time, a few microseconds. The plain operator is measured first; what follows is
predicted from it:

- a chain of 10 operators takes 10 times as long as one (gradient tracking is measured, not predicted);
- a view (transpose, reshape, slice) makes a tensor but no kernel: on a GPU less than the launch of a kernel;
- a loop over the elements of a vector takes the number of elements x (indexing one + adding two tensors). The vector
  form is one operator;
- a compiled function first runs its guards, which check that every tensor is still what it was compiled for. With
  33 inputs there are 32 more guards on tensors than with one. A guard is a comparison in C++, so 32 cost at most one
  operator;
- the first call of a compiled function takes more than 1000 times as long as the later ones. That is why a benchmark
  without a warm-up measures something else;
- all cores of the host are alike: an operator takes as long on the slowest as on the fastest;
- a profiler that has ended costs nothing any more.

Change: --elements 4096: does the loop stay on its prediction? --chain 100: does an operator become cheaper in company?
Source: Horace He, Making Deep Learning Go Brrrr From First Principles (overhead); the documentation of torch.compile
(guards); github.com/pytorch/pytorch/issues/144455 (a profiler that stays attached).
Run:    python -m anatomy host-cost [--elements N] [--chain N]
"""

import argparse
import math
import os
import time
from collections.abc import Callable

import torch

from anatomy.experiment import Check, Result, Seconds, launches, less, near, seconds, size_argument, table, us, wait

INPUTS, MOST_CORES = 33, 32  # of the function whose guards are timed; cores that are compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size_argument(parser, "--elements N", "elements of the vector that a loop adds up (default: 256)", default=256)
    size_argument(parser, "--chain N", "operators of a chain (default: 10)", default=10)


def chained(x: torch.Tensor, n: int) -> torch.Tensor:
    for _ in range(n):
        x = x * 2
    return x


def loop(vector: torch.Tensor) -> torch.Tensor:
    total = vector[0]
    for i in range(1, len(vector)):
        total = total + vector[i]
    return total


def guarded(tensors: list[torch.Tensor]) -> Callable:
    """A function whose graph multiplies the first tensor, compiled for a list of tensors; nothing is generated."""

    def function(tensors: list[torch.Tensor]) -> torch.Tensor:
        for t in tensors[1:]:
            assert t.dim() == 1  # so that Dynamo looks at the tensor and guards it
        return tensors[0] * 2

    return torch.compile(function, backend="eager", dynamic=False)


def run(args: argparse.Namespace) -> Result:
    device, dtype = args.device, args.dtype or torch.float32
    one, matrix = torch.ones(1, device=device, dtype=dtype), torch.ones(4, 4, device=device, dtype=dtype)
    tracked, vector = one.clone().requires_grad_(), torch.ones(args.elements, device=device, dtype=dtype)
    many = [torch.ones(1, device=device, dtype=dtype) for _ in range(INPUTS)]
    torch._dynamo.reset()
    first_s, few_guards = first_call(guarded, many[:1])
    _, many_guards = first_call(guarded, many)
    forms = {
        "an empty Python function": lambda: None,
        "x * 2": lambda: one * 2,
        f"{args.chain} times x * 2": lambda: chained(one, args.chain),
        "x * 2 with gradient tracking": lambda: tracked * 2,
        "x.t()": matrix.t,
        "x.reshape(2, 8)": lambda: matrix.reshape(2, 8),
        "x[1:3]": lambda: matrix[1:3],
        "x[1]": lambda: vector[1],
        "x + x": lambda: one + one,
        f"a loop over {args.elements} elements": lambda: loop(vector),
        "vector.sum()": vector.sum,
        "x * 2 compiled, 1 input": lambda: few_guards(many[:1]),
        f"x * 2 compiled, {INPUTS} inputs": lambda: many_guards(many),
    }
    times = {name: seconds(form, args.iters) for name, form in forms.items()}
    figures = {"times": times, "first_call_s": first_s, "elements": args.elements, "chain": args.chain}
    figures |= cores_and_profiler(forms["x * 2"], args.iters, device)
    rows = [{"call": name, "us": us(s), "times x * 2": f"{s / times['x * 2']:.2f}"} for name, s in times.items()]
    rows.append({"call": "first call of a compiled x * 2", "us": us(first_s)})
    title = f"Time of a call on one number, {dtype}; the compiled form runs x * 2 as eager does, behind its guards"
    where = [{"x * 2": name, "us": us(s)} for name, s in places(figures).items()]
    tables = [table(title, rows), table("Time of x * 2 by where it runs, and before and after a profile", where)]
    return Result(tables, sentences(figures), figures, checks(figures))


def cores_and_profiler(call: Callable[[], object], samples: int, device: torch.device) -> dict:
    """Seconds of a call on each core that the process may use, of at most MOST_CORES, the slowest `again`, and on the
    fastest `before` a profile, `after` it and `later`. Where a process cannot choose its core, only these three."""
    every = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []

    def on(allowed: list[int]) -> Seconds:
        if allowed:
            os.sched_setaffinity(0, allowed)
        return seconds(call, samples)

    cores = {core: on([core]) for core in every[:: math.ceil(len(every) / MOST_CORES) or 1]}
    by_time = sorted(cores, key=cores.get)
    again, before = on(by_time[-1:]) if cores else None, on(by_time[:1])
    on(every)  # the profiler's threads may run on the cores that are allowed when they start
    launches(call, device)  # under a profiler
    found = {"again": again, "before": before, "after": on(by_time[:1]), "later": on(by_time[:1])}
    on(every)
    return {"cores": {str(core): s for core, s in cores.items()}} | found


def first_call(compile_for: Callable, tensors: list[torch.Tensor]) -> tuple[float, Callable]:
    function = compile_for(tensors)
    wait()
    began = time.perf_counter()
    function(tensors)
    wait()
    return time.perf_counter() - began, function


def places(figures: dict) -> dict[str, Seconds]:
    """What is compared of the cores, by name, and the times around a profile."""
    by_time = sorted(cores := figures["cores"], key=cores.get)
    named = {"on the fastest core": by_time[:1], "on the slowest core": by_time[-1:]}
    found = {f"{name}, {core}": cores[core] for name, some in named.items() for core in some}
    found |= {"on the slowest core again": figures["again"]} if cores else {}
    return found | {"before a profile": figures["before"], "after it": figures["after"]}


def of_guards(times: dict[str, Seconds]) -> Seconds:
    """What all guards but one take."""
    return times[f"x * 2 compiled, {INPUTS} inputs"].minus(times["x * 2 compiled, 1 input"])


def checks(figures: dict) -> list[Check]:
    times, chain, elements = figures["times"], figures["chain"], figures["elements"]
    plain, later = times["x * 2"], times["x * 2 compiled, 1 input"]
    views = [Check(f"{view} at most", plain, times[view], "us", at_most=True) for view in
             ("x.t()", "x.reshape(2, 8)", "x[1:3]")]  # fmt: skip
    looped = f"a loop over {elements} elements"
    return [
        Check(f"{chain} times x * 2", chain * plain, times[f"{chain} times x * 2"], "us"),
        *views,
        Check(looped, elements * (times["x[1]"] + times["x + x"]), times[looped], "us"),
        Check(f"{INPUTS - 1} guards more", plain, of_guards(times), "us", at_most=True),
        Check("a later call of a compiled function", figures["first_call_s"] / 1000, later, "us", at_most=True),
        *on_cores(figures),
        Check("x * 2 after a profile", figures["before"], figures["after"], "us", cause=stays(figures)),
    ]


def on_cores(figures: dict) -> list[Check]:
    """That the slowest core is as fast as the fastest; and if not, whether it was still slow a moment later."""
    if not (cores := figures["cores"]):
        return []
    fastest, slowest, again = min(cores.values()), max(cores.values()), figures["again"]
    slow = f"it took {us(again)} us a moment later, too: the core, or what shares it with us, is slow"
    passed = f"it took {us(again)} us a moment later: what slowed it had passed"
    cause = passed if near(again, fastest) else slow if near(again, slowest) else None
    return [Check("x * 2 on the slowest core", fastest, slowest, "us", cause=cause)]


def stays(figures: dict) -> str:
    lasts = figures["after"] > figures["before"] and near(figures["later"], figures["after"])
    end = "on the same core, and only a profile lies before it" if lasts else "so the machine changed its speed"
    return f"a moment later it took {us(figures['later'])} us, {end}"


def sentences(figures: dict) -> list[str]:
    times = figures["times"]
    plain, later = times["x * 2"], times["x * 2 compiled, 1 input"]
    looped = times[f"a loop over {figures['elements']} elements"]
    return [
        f"The host runs {1e-3 / plain:.0f} operators on one number in a millisecond.",
        f"Gradient tracking makes an operator {times['x * 2 with gradient tracking'] / plain:.2f} times as long, "
        f"and a transpose takes {times['x.t()'] / plain:.2f} of it.",
        f"The loop takes {looped / times['vector.sum()']:.0f} times as long as vector.sum().",
        *guard_costs(times),
        f"Behind its guards the compiled operator takes {later / plain:.1f} times as long as the plain one.",
        f"The first call of the compiled function takes {figures['first_call_s'] / later:.0f} times as long "
        "as a later one.",
        *cores_apart(figures),
    ]


def guard_costs(times: dict[str, Seconds]) -> list[str]:
    guards = of_guards(times)
    each, low, high = (s / (INPUTS - 1) * 1e9 for s in (guards, *guards.quartiles))
    return [f"A guard on a tensor costs {each:.0f} ns ({low:.0f} to {high:.0f} by the quartiles)."] if low > 0 else []


def cores_apart(figures: dict) -> list[str]:
    """Where the slowest core stays slower than the fastest by more than their spread: by how much."""
    cores, again = figures["cores"].values(), figures["again"]
    if not cores or not less(fastest := min(cores), again):
        return []
    return [f"The slowest of {len(cores)} cores stays slow: {again / fastest:.2f} times as long as the fastest."]
