"""What do the modes of torch.compile trade: seconds of compilation, milliseconds of a step, memory?

Predict: is a step of one small MLP faster in mode `default` than in eager? Which of `default`, `reduce-overhead` and
`max-autotune` compiles longest, and which step is fastest? How many graphs do five lengths of an input make?

Prediction: torch.compile traces the function, plans its kernels and compiles each kernel. It keeps plans and kernels on
disk. So a warm cache, which has them already, takes under half the seconds of a cold one. A step takes as long as its
kernels keep the GPU busy, or as long as the host needs to launch them, whichever is longer. The profiler tells the time
of the kernels and their number, and a kernel on one number tells the time of a launch. Eager launches a kernel for each
operator, forward and backward. `reduce-overhead` and `max-autotune` replay their kernels as CUDA graphs, so only the
kernels' own time counts. `max-autotune` also tries several kernels for each product, so it compiles longest. Where
lengths change, dynamic=False compiles one graph for each, up to Dynamo's limit. The default compiles two, the second
for any length. dynamic=True compiles one.

Change: --batch 8192 --dmodel 1024. Now the kernels are longer than their launches: which modes still differ? --layers 1
against --layers 16: what does a launch cost in each mode?
Source: the documentation of torch.compile (modes, dynamic) and of CUDA graphs.
Run:    python -m anatomy compile-modes [--modes MODE ...] [--layers N] [--batch B] [--dmodel C] [--lengths N]
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn as nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from anatomy.experiment import (
    NEAR,
    Check,
    Refused,
    Result,
    Seconds,
    busy_seconds,
    differ,
    expected,
    host_seconds,
    launches,
    ms,
    seconds,
    size_argument,
    table,
    us,
)
from common.hardware import synchronize
from ladder.process import module_command

MODES = ("default", "reduce-overhead", "max-autotune")
CAPTURING = MODES[1:]  # they replay CUDA graphs
LIMIT_S = 900


def measure(work: dict) -> dict:
    """Compile and time one mode. The process must be a fresh one, so that nothing is compiled before."""
    device, dtype = torch.device(work["device"]), getattr(torch, work["dtype"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    C = work["dmodel"]
    block = [nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C)]  # the MLP of a transformer block
    model = nn.Sequential(*(copy.deepcopy(part) for part in block * work["layers"])).to(device, dtype)
    x = torch.randn(work["batch"], C, device=device, dtype=dtype)  # (B, C)
    compiled = model if work["mode"] == "eager" else torch.compile(model, mode=work["mode"])

    def step():
        return torch.autograd.grad(compiled(x).square().mean(), tuple(model.parameters()))

    started = time.perf_counter()
    for _ in range(3):  # with CUDA graphs the first call warms up, the second records
        step()
    synchronize(device)
    result = {"first_steps_s": time.perf_counter() - started, "cache_hits": counters["inductor"]["fxgraph_cache_hit"]}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    result["step_s"] = step_s = seconds(step, work["iters"])
    one = torch.ones(1, device=device)
    result |= {"quartiles": step_s.quartiles, "launch_s": seconds(lambda: one * 2, work["iters"])}
    result["host_s"] = host_seconds(step, work["iters"])
    result |= {"busy_s": busy_seconds(step, device), "launches": launches(step, device)}
    return result | {"reserved_bytes": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None}


def in_fresh_process(work: dict, cache: str) -> dict:
    bypasses = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_FORCE_DISABLE_CACHES")
    environment = {name: value for name, value in os.environ.items() if name not in bypasses}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    command = module_command("anatomy.compile_modes", json.dumps(work))
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"reason": f"it took longer than {LIMIT_S} s"}
    failed = {"reason": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return failed if done.returncode else json.loads(done.stdout.splitlines()[-1])


def graphs_compiled(lengths: list[int], dynamic: bool | None) -> int:
    """How many graphs Dynamo makes of one function for inputs of these lengths. No backend changes that number."""
    torch._dynamo.reset()
    counter, layer = CompileCounter(), nn.Linear(8, 8)
    function = torch.compile(lambda x: layer(x).relu(), backend=counter, dynamic=dynamic)
    for length in lengths:
        function(torch.randn(length, 8))
    return counter.frame_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", nargs="+", choices=MODES, help="modes (default: all; quick on a CPU: default)")
    size_argument(parser, "--layers", "MLPs (default 8 on a GPU, 2 on a CPU, 1 in quick form)")
    size_argument(parser, "--batch", "rows of the input (default 256)", default=256)
    size_argument(parser, "--dmodel", "channels (default 256)", default=256)
    size_argument(parser, "--lengths", "lengths that a changing input has (default 5)", default=5)


def run(args: argparse.Namespace) -> Result:
    gpu = args.device.type == "cuda"
    layers = args.layers or (1 if args.quick else 8 if gpu else 2)
    work = {"layers": layers, "batch": args.batch, "dmodel": args.dmodel, "iters": args.iters}
    work |= {"device": str(args.device), "dtype": str(args.dtype or torch.float32).removeprefix("torch.")}
    with tempfile.TemporaryDirectory(prefix="inductor-") as cache:
        eager = in_fresh_process(work | {"mode": "eager"}, cache)
    if "reason" in eager:
        raise Refused(f"the process that runs eager steps failed: {eager['reason']}")
    rows = [{"mode": "eager"} | cells(eager)]
    results, sentences, checks = {}, [], []
    checks += step_checks("eager", eager, args.device)
    for mode in args.modes or (MODES[:1] if args.quick and not gpu else MODES):
        with tempfile.TemporaryDirectory(prefix="inductor-") as cache:
            cold, warm = (in_fresh_process(work | {"mode": mode}, cache) for _ in range(2))
        results[mode] = {"cold": cold, "warm": warm}
        if reason := cold.get("reason") or warm.get("reason"):
            rows.append({"mode": mode})
            sentences.append(f"{mode} did not run: {reason}.")
            continue
        cold_s, warm_s = cold["first_steps_s"], warm["first_steps_s"]
        rows.append({"mode": mode} | cells(warm) | {"cold, s": f"{cold_s:.1f}", "warm, s": f"{warm_s:.1f}"}
                    | {"cache hits cold / warm": f"{cold['cache_hits']} / {warm['cache_hits']}"})  # fmt: skip
        checks.append(Check(f"seconds with a warm cache, {mode}", cold_s / 2, warm_s, "s", at_most=True))
        checks += step_checks(mode, warm, args.device)
        ratio = f"takes {warm['step_s'] / eager['step_s']:.2f} of the time in eager"
        if not differ(step_of(warm), step_of(eager)):
            ratio = "takes as long as in eager, within the spread"
        sentences.append(f"{mode}: a step {ratio}. A warm cache takes {warm_s / cold_s:.0%} of the cold seconds.")
    graphs = graph_counts(args.lengths)
    checks += [Check(f"graphs of {args.lengths} calls, {case}", *counts, "") for case, counts in graphs.items()]
    title = f"Forward and backward, MLPs: {layers}. Cold and warm: compilation and first steps, fresh processes"
    figures = {"work": work, "eager": eager, "modes": results, "graphs": graphs}
    return Result([table(title, rows)], sentences, figures, checks)


def step_of(result: dict) -> Seconds:
    step_s = Seconds(result["step_s"])
    step_s.quartiles = tuple(result["quartiles"])
    return step_s


def cells(result: dict) -> dict:
    busy = result["busy_s"] and ms(result["busy_s"])
    reserved = result["reserved_bytes"] and f"{result['reserved_bytes'] / 1e6:.0f}"
    shown = {"step, ms": ms(step_of(result)), "launches": result["launches"], "kernels busy, ms": busy}
    shown |= {"host, ms": ms(result["host_s"]), "a launch, us": us(result["launch_s"])}
    return shown | {"reserved, MB": reserved}


def step_checks(mode: str, result: dict, device: torch.device) -> list[Check]:
    """The step's time by its kernels and launches. Without a GPU nobody knows how long kernels run: no prediction."""
    if device.type != "cuda":
        return []
    launching = 0 if mode in CAPTURING else result["launches"] * result["launch_s"]
    check = Check(f"step, {mode}", expected(launching, result["busy_s"], device), step_of(result), "ms")
    share, host_s = result["busy_s"] / check.measured, result["host_s"]
    longer = check.measured > check.predicted
    if longer and not check.hit and share * NEAR < 1 and host_s * NEAR >= check.measured:
        returns = f"the host needs {ms(host_s)} ms until the step returns"
        check.cause = f"{returns}, and its kernels run {share:.0%} of the time"
    return [check]


def graph_counts(n_calls: int) -> dict[str, tuple[int, int]]:
    """How many graphs `n_calls` calls compile: case -> (predicted, compiled)."""
    lengths, limit = [16 * (i + 2) for i in range(n_calls)], torch._dynamo.config.recompile_limit
    return {
        "same length": (1, graphs_compiled(lengths[:1] * n_calls, None)),
        "changing, dynamic=False": (min(n_calls, limit), graphs_compiled(lengths, False)),
        "changing, default": (min(n_calls, 2), graphs_compiled(lengths, None)),
        "changing, dynamic=True": (1, graphs_compiled(lengths, True)),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # ends without the exit handlers of the compiler and CUDA, which can hang or crash
