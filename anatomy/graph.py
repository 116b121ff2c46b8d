"""What does a launch cost, and what does a CUDA graph save?

Prediction. A kernel on one number takes a GPU 1 or 2 us, and the host about 5 us to launch. N of them take N
launches, because the GPU waits. A CUDA graph holds all N and is launched once: they take a launch and the
GPU's own time, which is measured where they were launched ahead. So it is for forward and backward of 16
small layers with ReLU, where the host also runs autograd. On a CPU there is nothing to capture.

Change: --width 4096. Where does the graph save nothing?
Source: PyTorch's notes on CUDA semantics, "CUDA Graphs"; Nguyen et al., Accelerating PyTorch with CUDA Graphs
(2021).
"""

import torch
import torch.nn as nn

LAYERS = 16


def captured(work):
    """A call that replays `work`, recorded after it ran on another stream, as PyTorch asks for."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def run(lab, chain=None, width=None):
    N, width = chain or 100, width or 64
    x, y = torch.ones(2, 1, device=lab.device)

    def many():
        for _ in range(N):
            torch.mul(x, 2, out=y)

    with lab.device:
        mlp = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())))
        rows = torch.randn(width, width)

    def step():
        mlp.zero_grad(set_to_none=False)
        mlp(rows).square().mean().backward()

    launch_s = lab.seconds(lambda: torch.mul(x, 2, out=y))
    lab.title = f"Launched and captured; the linear layers are {width} wide"
    lab.row("one launch", launch_s)
    lab.row(f"{N} launches", lab.seconds(many), N * launch_s)
    step_s = lab.seconds(step)
    lab.row(f"{LAYERS} linear layers, forward and backward", step_s)
    graphs = {f"{N} launches as a CUDA graph": many, f"{LAYERS} linear layers as a CUDA graph": step}
    for what, work in graphs.items():
        measured = lab.seconds(captured(work)) if lab.gpu else "needs a GPU"
        lab.row(
            what, measured, launch_s + lab.device_seconds(work, calls=1, launches=200) if lab.gpu else None
        )
    if lab.gpu:
        return f"Captured, {LAYERS} linear layers run {step_s / measured:.1f} times as fast as launched."
    return f"An operator on one number takes this CPU {launch_s * 1e6:.1f} us."
