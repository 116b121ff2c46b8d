"""The kernels of one transformer block, cut out of the timeline of a profiled step."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

from common.traced import Block, Launch

# What the names of attention's backward kernels contain: of cuDNN, FlashAttention, CUTLASS, softmax by hand, a CPU.
BACKWARD = r"bprop|bwd|[Bb]ackward|cutlassB|dot_do_o|convert_dq"


def one_block(launches: list[Launch], n_steps: int = 1) -> Block | None:
    """The block of the last of `n_steps` whose kernels are `launches`, by start, in ms since any moment.

    A block is what lies between the longest kernels of two consecutive attentions, the first of the two included: once
    in forward, once in backward. None where a step has fewer than two of either.
    """
    halves = []
    for backward in (False, True):
        attention = [k for k, launch in enumerate(launches) if _is_attention(launch, backward)]
        total = defaultdict(float)
        for k in attention:
            total[launches[k].name] += launches[k].ms
        main = [k for k in attention if launches[k].name == max(total, key=total.get)]
        first = len(main) // n_steps * (n_steps - 1)
        if len(main) < first + 2:
            return None
        begin, end = main[first], main[first + 1]
        start_ms = launches[begin].start_ms
        halves.append([replace(launch, start_ms=launch.start_ms - start_ms) for launch in launches[begin:end]])
        halves.append(launches[end].start_ms - start_ms)
    return Block(*halves)


def _is_attention(launch: Launch, backward: bool) -> bool:
    return launch.category == "attention" and bool(re.search(BACKWARD, launch.name)) == backward
