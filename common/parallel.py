"""How a training step is divided: over micro-batches in one process.

A script asks for it in three lines that are the same in every step: `distribute`, and the loop over `micro_batches`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from common.arguments import Arguments


def compile_units(model: torch.nn.Module, args: Arguments) -> list[torch.nn.Module]:
    """The modules that are compiled one by one: the whole model."""
    return [model]


def distribute(model: torch.nn.Module, args: Arguments) -> torch.nn.Module:
    """The model that trains: alone, it is the model itself."""
    return model


def micro_batches(
    tokens: torch.Tensor, targets: torch.Tensor, model: torch.nn.Module, args: Arguments
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`args.accumulate` equal parts of a batch, each (B / accumulate, T) of `tokens` and of `targets`, both (B, T).

    Their gradients add up to those of the whole batch where each part's loss is divided by `args.accumulate`.
    """
    yield from zip(tokens.chunk(args.accumulate), targets.chunk(args.accumulate), strict=True)
