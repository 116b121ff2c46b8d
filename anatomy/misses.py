"""Why a prediction missed: further measurements of a call that took longer or shorter than a check predicted."""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch

from anatomy.experiment import (
    AGAIN,
    NEAR,
    Cause,
    Check,
    Seconds,
    copy_seconds,
    differ,
    gpu_work,
    host_seconds,
    near,
    on_one_thread,
    seconds,
    us,
)
from report.kernels import readable


class Again(NamedTuple):
    """A call timed once more: with the GPU's work, and until it returns to the host. Take it before any profile."""

    seconds: Seconds
    host_s: Seconds


def time_again(call: Callable[[], object]) -> Again:
    return Again(seconds(call, AGAIN), host_seconds(call, AGAIN))


def cause_of_miss(
    check: Check,
    call: Callable[[], object],
    device: torch.device,
    n_bytes: float = 0,
    slow_kernels: Callable[[], str | None] = lambda: None,
    again: Again | None = None,
) -> Cause:
    """Why a call took longer or shorter than a check predicted, as `Check.find_cause` says it; None if nothing tells.

    Measured are, in this order, the call once more (`again`, where that was done before), a copy of `n_bytes`, what
    `slow_kernels` asks, on a GPU its kernels, and on a CPU the call on one thread.
    """
    longer, again = check.measured > check.predicted, again or time_again(call)
    if changed := changed_cause(check, again.seconds) or unsteady_cause(check, again.seconds):
        return changed
    if n_bytes:
        copy_s = copy_seconds(n_bytes, device)
        if near(copy_s, check.measured) and not near(copy_s, check.predicted):
            few = "so few are slower than many" if longer else "so few are faster than many"
            return f"a copy of as many bytes takes {us(copy_s)} us, too: {few}"
    if not longer:
        return None
    why = slow_kernels()
    if device.type == "cuda":
        return lambda: kernels_cause(check, call, device, again, why)  # the profiler comes last
    return why or one_thread_cause(check, call, again)


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
    check: Check, call: Callable[[], object], device: torch.device, again: Again, why: str | None
) -> str | None:
    """What a GPU does while a call takes longer than predicted: it waits for the host, or is idle without that; or its
    kernels are slow, and `why`, or which take longest. None if none of this is so, or the profiler sees no kernel."""
    call()  # what compiles at first is no work of the call
    by_name = kernel_seconds(call, device)
    busy_s = sum(by_name.values())
    if busy_s > NEAR * check.predicted:
        longest = (f"{name} {us(by_name[name])}" for name in sorted(by_name, key=by_name.get, reverse=True)[:2])
        alone = f"its kernels alone take {us(busy_s)} us, the longest of them: {', '.join(longest)}"
        return f"{alone}; {why or 'why they take longer than predicted was not measured'}"
    if not by_name or busy_s * NEAR >= again.seconds:
        return why
    share = f"its kernels run {busy_s / again.seconds:.0%} of the time"
    if again.host_s * NEAR >= again.seconds:
        return f"the host needs {us(again.host_s)} us until the call returns, and {share}"
    return f"{share}, and the host needs only {us(again.host_s)} us: why the GPU is idle else was not measured"


def kernel_seconds(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """How long the kernels and copies of one call run on the GPU, by their names in words."""
    by_name: dict[str, float] = defaultdict(float)
    for event in gpu_work(call, device):
        by_name[readable(event["name"])] += event["dur"] / 1e6
    return by_name


def one_thread_cause(check: Check, call: Callable[[], object], again: Again) -> str | None:
    alone_s = on_one_thread(call, AGAIN)
    if alone_s * NEAR >= min(check.measured, again.seconds):
        return None
    return f"on one thread it takes {us(alone_s)} us: sharing so little among threads costs more than it saves"
