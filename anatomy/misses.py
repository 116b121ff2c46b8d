"""Why a prediction missed: further measurements of a call that took longer or shorter than a check predicted."""

from collections.abc import Callable

import torch

from anatomy.experiment import (
    AGAIN,
    NEAR,
    Cause,
    Check,
    Seconds,
    busy_seconds,
    copy_seconds,
    differ,
    near,
    on_one_thread,
    seconds,
    us,
)


def cause_of_miss(
    check: Check,
    call: Callable[[], object],
    device: torch.device,
    n_bytes: float = 0,
    slow_kernels: Callable[[], str | None] = lambda: None,
    launch: Callable[[], object] | None = None,
) -> Cause:
    """Why a call took longer or shorter than a check predicted, as `Check.find_cause` says it; None if nothing tells.

    Measured are, in this order, the call once more, `launch` (the same call on so little that only the host's work
    counts) once more, a copy of `n_bytes`, what `slow_kernels` asks, the GPU's idle time, and on a CPU the call on one
    thread.
    """
    longer = check.measured > check.predicted
    if changed := changed_cause(check, again_s := seconds(call, AGAIN)):
        return changed
    if launch and near(launch_s := seconds(launch, AGAIN), check.measured):
        return f"the host needs as long to launch it: {us(launch_s)} us a moment later"
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
        slow = "the GPU is busy all the time: its kernels are slower than the model's rates"
        return lambda: idle_cause(check, call, device) or why or slow  # the profiler comes last
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


def idle_cause(check: Check, call: Callable[[], object], device: torch.device) -> str | None:
    """How long the GPU worked during a call, where it waited for the host."""
    call()  # what compiles at first is no work of the call
    share = busy_seconds(call, device) / check.measured
    return f"kernels run {share:.0%} of the time, else the GPU waits for the host" if share * NEAR < 1 else None


def one_thread_cause(check: Check, call: Callable[[], object]) -> str | None:
    alone_s = on_one_thread(call, AGAIN)
    if alone_s * NEAR >= check.measured:
        return None
    return f"on one thread it takes {us(alone_s)} us: sharing so little among threads costs more than it saves"
