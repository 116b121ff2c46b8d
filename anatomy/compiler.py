"""What do the modes of torch.compile trade: seconds of compilation against milliseconds of a step?

Prediction. torch.compile traces a function, plans its kernels, compiles them, and keeps all that on disk:
what is there already takes under half as long. The mode `default` launches fewer kernels than eager: a step
takes at most as long. `reduce-overhead` replays its kernels as CUDA graphs: a step takes a launch and the
GPU's own time, measured on the mode before where it was launched ahead. `max-autotune` also tries several
kernels for each product, so it compiles longest, and takes at most as long as `reduce-overhead`. A CPU has
the first mode.

Where an input's length changes, dynamic=False compiles a graph for each length, up to Dynamo's limit; the
default compiles two, the second for any length; dynamic=True compiles one.

Change: --rows 8192 --width 1024. Now kernels take longer than launches: which modes still differ?
Source: the documentation of torch.compile (modes, dynamic).
"""

import time

import torch
import torch.nn as nn
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import fresh_cache

FIVE_LENGTHS = [
    (f"five lengths, dynamic={d}", d, 16, graphs) for d, graphs in ((False, 5), (None, 2), (True, 1))
]
FEW_TILINGS = {"test_configs.max_mm_configs": 4}  # of each product; all, about 20, take minutes


def run(lab, layers=None, rows=None, width=None):
    layers, C = layers or 2, width or 256
    blocks = ((nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C)) for _ in range(layers))
    model = nn.Sequential(*(part for block in blocks for part in block)).to(lab.device)
    x, number = torch.randn(rows or 256, C, device=lab.device), torch.ones(1, device=lab.device)
    modes = ("default", "reduce-overhead", "max-autotune") if lab.gpu else ("default",)

    def step_of(call):
        return lambda: torch.autograd.grad(call(x).square().mean(), tuple(model.parameters()))

    def first_steps(mode):
        """A step in a mode, and the seconds of its first three: with CUDA graphs the second one records."""
        torch._dynamo.reset()
        step, began = step_of(torch.compile(model, mode=mode)), time.perf_counter()
        for _ in range(3):
            step()
        torch.get_device_module(lab.device).synchronize()
        return step, time.perf_counter() - began

    lab.title = f"Forward and backward of {layers} MLPs, {tuple(x.shape)}"
    first_steps("default")  # imports the compiler
    launch_s, eager_s = lab.seconds(lambda: number * 2), lab.seconds(step_of(model))
    lab.row("eager: a step", eager_s)
    predicted = eager_s
    for mode in modes:
        with fresh_cache(), torch._inductor.config.patch(FEW_TILINGS):
            _, cold_s = first_steps(mode)
            step, warm_s = first_steps(mode)
            measured = lab.seconds(step)
            lab.row(f"{mode}: a step", measured, predicted, at_most=mode != "reduce-overhead")
            lab.row(f"{mode}: first steps, nothing on disk", cold_s)
            lab.row(f"{mode}: first steps, kernels on disk", warm_s, cold_s / 2, at_most=True)
            predicted = (
                launch_s + lab.device_seconds(step, calls=1, launches=200) if mode == "default" else measured
            )
    lab.title = "Graphs that five calls compile"
    for what, dynamic, step, graphs in (("the same length", None, 0, 1), *FIVE_LENGTHS):
        torch._dynamo.reset()
        counter = CompileCounter()
        function = torch.compile(lambda x: x.relu() * 2, backend=counter, dynamic=dynamic)
        for k in range(5):
            function(torch.ones(32 + k * step))
        lab.row(what, counter.frame_count, graphs, "")
    return f"In mode {modes[-1]} a step takes {measured / eager_s:.2f} of the time in eager."
