"""Why a prediction missed: further measurements of a call that took longer or shorter than a check predicted."""

from collections import defaultdict
from collections.abc import Callable

import torch

from anatomy.experiment import (
    AGAIN,
    NEAR,
    Cause,
    Check,
    Seconds,
    copy_seconds,
    differ,
    host_seconds,
    near,
    on_one_thread,
    seconds,
    us,
)
from common import profile
from report.kernels import readable


def cause_of_miss(
    check: Check,
    call: Callable[[], object],
    device: torch.device,
    n_bytes: float = 0,
    slow_kernels: Callable[[], str | None] = lambda: None,
) -> Cause:
    """Why a call took longer or shorter than a check predicted, as `Check.find_cause` says it; None if nothing tells.

    Measured are, in this order, the call once more, a copy of `n_bytes`, what `slow_kernels` asks, on a GPU the host's
    time and the kernels, and on a CPU the call on one thread.
    """
    longer = check.measured > check.predicted
    if changed := changed_cause(check, again_s := seconds(call, AGAIN)):
        return changed
    if n_bytes:
        copy_s = copy_seconds(n_bytes, device)
        if longer and near(check.measured, copy_s):
            return f"a copy of as many bytes takes {us(copy_s)} us: so few are slower than many"
        if not longer and copy_s * NEAR < check.predicted:
            return f"a copy of as many bytes takes {us(copy_s)} us: a cache holds a part of them"
    if not longer:
        return unsteady_cause(check, again_s)
    why = slow_kernels()
    if device.type == "cuda":
        host_s = host_seconds(call, AGAIN)
        return lambda: kernels_cause(check, call, device, host_s, why)  # the profiler comes last
    return why or one_thread_cause(check, call) or unsteady_cause(check, again_s)


def changed_cause(check: Check, again_s: Seconds) -> str | None:
    """Whether a call that took longer or shorter than predicted takes as long as predicted when it is timed again."""
    if not near(again_s, check.predicted) or near(again_s, check.measured) or not differ(again_s, check.measured):
        return None
    return f"a moment later the same call took {us(again_s)} us: the machine's speed had changed"


def unsteady_cause(check: Check, again_s: Seconds) -> str | None:
    """Whether two times of one call lie further apart than a prediction may miss."""
    if near(again_s, check.measured) or not differ(again_s, check.measured):
        return None
    return f"a moment later the same call took {us(again_s)} us: its own times are more than 25 % apart"


def kernels_cause(
    check: Check, call: Callable[[], object], device: torch.device, host_s: float, why: str | None
) -> str:
    """What a GPU does while a call takes longer than predicted: it waits for the host, which needs `host_s` until the
    call returns; or there are gaps between kernels; or the kernels are slow, and `why`, or which take longest."""
    call()  # what compiles at first is no work of the call
    by_name = kernel_seconds(call, device)
    busy_s = sum(by_name.values())
    if busy_s * NEAR < check.measured:
        share = f"its kernels run {busy_s / check.measured:.0%} of the time"
        if host_s * NEAR >= check.measured:
            return f"the host needs {us(host_s)} us until the call returns, and {share}"
        if busy_s <= NEAR * check.predicted:
            return f"{share}, and the host needs only {us(host_s)} us: the rest are gaps between kernels"
    longest = (f"{name} {us(by_name[name])}" for name in sorted(by_name, key=by_name.get, reverse=True)[:2])
    alone = f"its kernels alone take {us(busy_s)} us, the longest of them: {', '.join(longest)}"
    return f"{alone}; {why or 'why they take longer than predicted was not measured'}"


def kernel_seconds(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """How long the kernels of one call run on the GPU, by their names in words."""
    by_name: dict[str, float] = defaultdict(float)
    for kernel in profile.trace_step(call, device).kernels:
        by_name[readable(kernel["name"])] += kernel["dur"] / 1e6
    return by_name


def one_thread_cause(check: Check, call: Callable[[], object]) -> str | None:
    alone_s = on_one_thread(call, AGAIN)
    if alone_s * NEAR >= check.measured:
        return None
    return f"on one thread it takes {us(alone_s)} us: sharing so little among threads costs more than it saves"
