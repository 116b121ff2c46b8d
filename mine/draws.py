"""Where a step draws from a random.Random of its own: the compiler reads the number while it traces, and
never again. It knows the functions of `random` itself, and breaks its graph at numpy's."""

import contextlib
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import nn

from mine.blocks import blocks_of, parts_of

DRAWS = ("random", "getrandbits")  # what all other methods call


@contextlib.contextmanager
def watch_draws(model: nn.Module, lists: list[str]) -> Iterator[list[str]]:
    """The lines that draw so inside of the context, `net.py line 31`, where row 3_compile compiles: in the
    loss, and in the blocks of these lists, or without any in the whole model."""
    lines, compiles = [], [True]

    def enter(is_compiled: bool) -> Callable:
        return lambda *_: compiles.append(is_compiled)

    def leave(*_) -> None:
        compiles.pop()

    def watch(draw: Callable) -> Callable:
        def drawn(generator: random.Random, *arguments: int) -> float:
            if type(generator) is random.Random and generator is not random._inst and compiles[-1]:
                lines.extend(drawing_lines())
            return draw(generator, *arguments)

        return drawn

    calls = [(model, not lists), *((part, True) for part in parts_of(blocks_of(model, lists)))]
    with contextlib.ExitStack() as undo:
        for part, is_compiled in calls:
            undo.callback(part.register_forward_pre_hook(enter(is_compiled)).remove)
            undo.callback(part.register_forward_hook(leave).remove)
        for name in DRAWS:
            setattr(random.Random, name, watch(getattr(random.Random, name)))
            undo.callback(delattr, random.Random, name)
        yield lines


def drawing_lines() -> list[str]:
    """The line that called a method of a generator; none while a module is imported, which happens once."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(2))]
    if any(file.startswith("<frozen importlib") for file, _ in places):
        return []
    file, line = next(place for place in places if place[0] != random.__file__)
    return [f"{Path(file).name} line {line}"]
