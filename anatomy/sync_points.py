"""What does `.item()` cost?

Predict: how long does `.item()` take when the GPU has nothing to do, and how long right after a product of two (4096,
4096) matrices in FP32? Does `print` of a number cost the same? What share of a loop's time is `.item()`?

Prediction. The host queues kernels ahead of the GPU. An operation that needs a value on the host waits until the queue
is empty. So it takes its own time, about 10 us, plus the time of all that was queued before it. After one product of
two (4096, 4096) FP32 matrices, 2 x 4096^3 = 0.14 TFLOP, that is 3 ms more at 50 TFLOP/s. A copy from pinned memory with
`non_blocking=True` only adds to the queue, so it takes its own time in every case. The clock starts when the launch of
the product has returned, so that a wait can be a little shorter than the product. In a loop with a short kernel, every
iteration pays for `.item()`, and the GPU is idle meanwhile. The loop takes longer by the number of iterations x the
time of `.item()` with an empty queue. A CPU has no queue, so `.item()` costs only the call. The times with an empty
queue are measured first; the others are predicted from them.

`if tensor.any():` is the same wait in a condition: `.any()` makes a kernel, and `if` calls `.item()` on its result.

Change: --work 64. How much of what `.item()` takes after that product is the wait? --numbers 67108864: which
operations grow with the bytes?
Source: the PyTorch documentation on asynchronous execution (CUDA semantics) and on set_sync_debug_mode.
Run:    python -m anatomy sync-points --work 4096 --numbers 262144 --loop 1000
"""

import argparse
import contextlib
import io
import time
from collections.abc import Callable
from functools import partial

import torch

from anatomy.experiment import (
    Check,
    Result,
    Seconds,
    default_size,
    differ,
    host_seconds,
    ms,
    near,
    one_thread,
    seconds,
    size_argument,
    table,
    us,
)
from anatomy.misses import changed_cause, unsteady_cause
from common import profile
from common.hardware import synchronize

NO_WAIT = ("a kernel, for comparison", ".to(), pinned and non-blocking")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size_argument(
        parser, "--work N", "edge of the matrices of the large kernel (default: 4096 on a GPU, 1024 on a CPU)"
    )
    numbers = "numbers to copy or search (default: 262144, which are 1 MiB in FP32)"
    size_argument(parser, "--numbers N", numbers, default=2**18)
    size_argument(parser, "--loop N", "iterations (default: 1000)", default=1000)


def run(args: argparse.Namespace) -> Result:
    device, dtype = args.device, args.dtype or torch.float32
    edge = args.work or default_size(args, quick=512, cpu=1024, gpu=4096)
    left, right = torch.randn(2, edge, edge, device=device, dtype=dtype)
    value, vector = torch.ones((), device=device, dtype=dtype), torch.ones(args.numbers, device=device, dtype=dtype)
    queues = {"empty queue": None, "after a small kernel": lambda: value * 2,
              "after a large kernel": lambda: left @ right}  # fmt: skip
    large_s = seconds(queues["after a large kernel"], args.iters)
    operations = {  # name: function, and whether it waits for the queue
        "a kernel, for comparison": (lambda: value * 2, False),
        ".item()": (value.item, True),
        ".cpu()": (vector.cpu, True),
        "print": (lambda: printed(value), True),
        "nonzero": (vector.nonzero, True),
        "if tensor.any()": (lambda: 1 if vector.any() else 0, True),
        ".to(), blocking": (None, True),
        ".to(), pinned and non-blocking": (None, False),
    }
    if gpu := device.type == "cuda":
        pageable = torch.ones(args.numbers, dtype=dtype)
        pinned = pageable.pin_memory()
        operations[".to(), blocking"] = (lambda: pageable.to(device), True)
        operations[".to(), pinned and non-blocking"] = (lambda: pinned.to(device, non_blocking=True), False)
    results, rows, checks = {}, [], []
    for name, (operation, waits) in operations.items():
        if operation is None:
            rows.append({"operation": name} | {f"{queue} us": "needs a GPU" for queue in queues})
            continue
        host_s = {queue: host_seconds(operation, args.iters, before=work) for queue, work in queues.items()}
        # An operation that waits is predicted as its own time plus that of the queued kernel.
        predicted = host_s["empty queue"] + (large_s if waits and gpu else 0)
        before = waits_and_products(large_s, left[:16, :16]) if gpu else by_one_thread(edge)
        again = partial(host_seconds, operation, args.iters, queues["after a large kernel"])
        find = partial(cause_by_what_ran, operation=operation, before=before, iters=args.iters, again=again)
        checks.append(
            Check(f"{name} after a large kernel", predicted, host_s["after a large kernel"], "us", find_cause=find)
        )
        syncs = profile.count_host_syncs(operation) if gpu else None
        results[name] = {"host_s": host_s, "waits": waits and gpu, "predicted_large_s": predicted, "host_syncs": syncs}
        rows.append({"operation": name} | {f"{queue} us": us(s) for queue, s in host_s.items()})
        rows[-1] |= {"predicted after large us": us(predicted), "host syncs": syncs}
    loop = loop_seconds(value, args.loop, device, item_s=results[".item()"]["host_s"]["empty queue"])
    checks += [Check(f"loop {name} .item()", loop[f"{name}_predicted_s"], loop[f"{name}_s"], "ms")
               for name in ("without", "with")]  # fmt: skip
    loops = [{".item()": name, "ms": ms(loop[f"{name}_s"]), "predicted ms": ms(loop[f"{name}_predicted_s"])}
             for name in ("without", "with")]  # fmt: skip
    title = f"Time on the host. The large kernel is a ({edge}, {edge}) product, {us(large_s)} us, {dtype}"
    loop_title = f"{args.loop} iterations of one small kernel, without and with .item() in each"
    figures = {"large_kernel_s": large_s, "operations": results, "loop": loop}
    return Result([table(title, rows), table(loop_title, loops)], sentences(figures, gpu), figures, checks)


def printed(value: torch.Tensor) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        print(value)


def cause_by_what_ran(
    check: Check, operation: Callable, before: dict, iters: int, again: Callable[[], Seconds]
) -> str | None:
    """Whether an operation's time is another when it is measured `again`; else the first of `before`, sentence -> work,
    right after which it takes as long as measured, and not as long as predicted."""
    if changed := changed_cause(check, again_s := again()) or unsteady_cause(check, again_s):
        return changed
    for what, work in before.items() if check.measured > check.predicted else ():
        after_s = host_seconds(operation, iters, work)
        if near(after_s, check.measured) and not near(after_s, check.predicted):
            return f"with nothing large queued, but after {what}, it takes {us(after_s)} us"
    return None


def by_one_thread(edge: int) -> dict[str, Callable]:
    """What a product of (edge, edge) matrices does to a CPU's caches, and no more than that."""
    written = torch.ones(3, edge, edge)

    def write() -> None:
        with one_thread():
            written.add_(1)

    return {f"one thread has written {written.nbytes / 2**20:.3g} MiB, as much as the product touches": write}


def waits_and_products(large_s: float, matrix: torch.Tensor) -> dict[str, Callable]:
    """What a large product does to the host: it is launched, and the host waits for it, awake, before the next one."""

    def idle() -> None:
        until = time.perf_counter() + large_s
        while time.perf_counter() < until:
            pass

    def both() -> None:
        idle()
        product()

    def product() -> None:
        matrix @ matrix

    spun = f"the host has spun for {large_s * 1e3:.1f} ms"
    return {"the launch of a small product": product, spun: idle, f"{spun} and launched a small product": both}


def loop_seconds(value: torch.Tensor, iterations: int, device: torch.device, item_s: float) -> dict:
    """Seconds of either loop, of five runs, with the device's work; and their predictions."""

    def loop(body: Callable[[], object]) -> Seconds:
        times = []
        for _ in range(5):
            synchronize(device)
            begin = time.perf_counter()
            for _ in range(iterations):
                body()
            synchronize(device)
            times.append(time.perf_counter() - begin)
        return Seconds.of(times)

    kernel_s = seconds(lambda: value * 2, 20)
    without, with_item = loop(lambda: value * 2), loop(lambda: (value * 2).item())
    predicted = iterations * kernel_s
    return {"iterations": iterations, "without_s": without, "without_predicted_s": predicted,
            "with_s": with_item, "with_predicted_s": predicted + iterations * item_s}  # fmt: skip


def sentences(figures: dict, gpu: bool) -> list[str]:
    results, loop = figures["operations"], figures["loop"]
    item = results[".item()"]["host_s"]
    empty, large = item["empty queue"], item["after a large kernel"]
    own = [float(row["host_s"]["empty queue"]) for name, row in results.items() if name not in NO_WAIT]
    item_s = (loop["with_s"] - loop["without_s"]) / loop["iterations"]
    return [
        f".item() took {us(empty)} us with an empty queue and {us(large)} us after a large kernel of "
        f"{us(figures['large_kernel_s'])} us"
        + ("." if gpu else ". A CPU has finished that kernel before it goes on, so `.item()` waits for nothing."),
        f"With an empty queue the operations{' that wait' * gpu} take {us(min(own))} to {us(max(own))} us.",
        f"In the loop .item() makes an iteration {us(item_s)} us longer ({us(empty)} us predicted). The loop takes "
        f"{loop['with_s'] / loop['without_s']:.1f} times as long as without it."
        if item_s > 0 and differ(loop["with_s"], loop["without_s"])
        else "In the loop .item() costs less than the noise of this machine.",
    ]
