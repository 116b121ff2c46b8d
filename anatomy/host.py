"""What does the host pay to run an operator, and to wait for the GPU?

Prediction. An operator passes through Python, PyTorch's dispatcher and the allocator, and on a GPU the
driver's launch: on one number that is its whole time, a few microseconds. x * 2 is measured first. Ten of
them take 10 times as long. A view makes a tensor but no kernel: at most as long. Python's sum over a vector
adds as often as it is long; vector.sum() is one operator. A compiled function first runs guards, comparisons
in C++ of each tensor with what it was compiled for: 32 more cost at most one operator. Its first call takes
over 1000 times as long as later ones.

The host queues kernels ahead of the GPU. What needs a value on the host waits until the queue is empty: its
own time with an empty queue, measured first, plus all that is queued. A copy from pinned memory with
non_blocking=True only joins the queue. On a CPU nothing is queued. In a loop each `.item()` costs what it
does with an empty queue.

Change: --edge 64. How much of `.item()` after that product is the wait?
Source: Horace He, Making Deep Learning Go Brrrr From First Principles; the documentation of torch.compile
(guards).
"""

import contextlib
import io
import statistics
import time
from functools import partial

import torch

INPUTS, ELEMENTS, LOOP = 33, 256, 1000


def host_seconds(lab, call, before=lambda: None):
    """Time until one call returns to the host, where the GPU has nothing queued but what `before` queued."""
    times = []
    for _ in range(20 if lab.quick else 50):
        torch.get_device_module(lab.device).synchronize()
        before()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def guarded(tensors):
    """A compiled function that multiplies the first of these tensors and guards all; the seconds of its first
    call."""

    @torch.compile(backend="eager", dynamic=False)
    def function(tensors):
        for t in tensors[1:]:
            assert t.dim() == 1  # so that Dynamo looks at the tensor
        return tensors[0] * 2

    torch._dynamo.reset()
    began = time.perf_counter()
    function(tensors)
    return partial(function, tensors), time.perf_counter() - began


def calls(lab, x, plain_s):
    """Rows of calls on one number or few, against `plain_s`, the seconds of a plain one."""
    matrix, tracked, vector = x.new_ones(4, 4), x.clone().requires_grad_(), x.new_ones(ELEMENTS)
    lab.title = "A call on one number"
    lab.row("x * 2", plain_s)
    lab.row("10 times x * 2", lab.seconds(lambda: [x * 2 for _ in range(10)]), 10 * plain_s)
    lab.row("x * 2 with gradient tracking", lab.seconds(lambda: tracked * 2))
    lab.row("x.t(), a view", lab.seconds(matrix.t), plain_s, at_most=True)
    lab.row(
        f"sum(vector) of {ELEMENTS}", lab.seconds(lambda: sum(vector)), ELEMENTS * lab.seconds(lambda: x + x)
    )
    lab.row(f"vector.sum() of {ELEMENTS}", lab.seconds(vector.sum), plain_s)
    few_s, (guards, first_s) = (
        lab.seconds(guarded([x.clone()])[0]),
        guarded([x.clone() for _ in range(INPUTS)]),
    )
    later_s = lab.seconds(guards)
    lab.row(f"{INPUTS - 1} guards", later_s - few_s, plain_s, at_most=True)
    lab.row("a later call of a compiled x * 2", later_s, first_s / 1000, at_most=True)


def waits(lab, x, edge):
    """Rows of what waits for the queue; returns the time of .item() with an empty one."""
    (left, right), vector = torch.randn(2, edge, edge, device=lab.device), x.new_ones(2**18)
    operations = {
        ".item()": x.item,
        ".cpu()": vector.cpu,
        "print": lambda: print(x),
        "nonzero": vector.nonzero,
    }
    operations["if tensor.any()"] = lambda: 1 if vector.any() else 0
    if lab.gpu:
        operations[".to(), blocking"] = partial(torch.ones(2**18).to, lab.device)
        operations["no wait: .to(), pinned"] = partial(
            vector.cpu().pin_memory().to, lab.device, non_blocking=True
        )
    product_s, kernel_s = lab.seconds(lambda: left @ right), lab.seconds(lambda: x * 2)
    lab.title = (
        f"Until the host goes on, after a ({edge}, {edge}) product of {product_s * 1e3:.2f} ms is launched"
    )
    for name, call in operations.items():
        with contextlib.redirect_stdout(io.StringIO()):
            alone_s, after_s = host_seconds(lab, call), host_seconds(lab, call, lambda: left @ right)
        waits_s = product_s if lab.gpu and "no wait" not in name else 0.0
        lab.row(name, after_s, alone_s + waits_s)
    item_s, loop_s = host_seconds(lab, x.item), lab.seconds(lambda: [(x * 2).item() for _ in range(LOOP)])
    lab.row(f"{LOOP} (x * 2).item()", loop_s, LOOP * (kernel_s + item_s))
    return item_s


def run(lab, edge=None, dtype=None):
    x = torch.ones(1, device=lab.device, dtype=dtype or torch.float32)
    calls(lab, x, lab.seconds(lambda: x * 2))
    item_s = waits(lab, x, edge or lab.pick(512, 1024, 4096))
    return f"With an empty queue .item() takes {item_s * 1e6:.1f} us."
