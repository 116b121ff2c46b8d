"""What a row leaves for the proof that all rows do the same work: samples of its weights, and sketches of its
gradients.

Losses hardly show a fault: a block without its MLP changes them by less than one per cent. Gradients show it.
So every row goes back to its initial weights, and one training step on the first batch, launched and not a
replay, leaves 509 numbers of every matrix, and 509 sums of its gradient. report/proof.py compares them with
those of the first row. Halves and thirds of a matrix leave theirs too, because a layer may hold several
weights of another one as one matrix: queries, keys and values, for example. Vectors are left out. The bias of
the keys, for example, adds the same to all scores of a query, which softmax cancels: its true gradient is
zero, and what is computed is rounding.

Why sums, and not numbers of a gradient: the tokens of a batch are a few rows of the embedding, and hold
nearly all of its gradient. Two or three of 500 places lie in these rows, and their rounding would decide.
"""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from common.record import NUMBERS, PART, PASS, sketches_of, write_bytes

PARTS = (1, 2, 3)  # in which a matrix is sampled: whole, as halves, as thirds
CHUNK = NUMBERS * 2**15  # of a gradient: what a sketch sums up at a time, so that it needs little memory


def sample(
    train_step: Callable, optimizer: torch.optim.Optimizer, model: torch.nn.Module, batch: tuple
) -> dict:
    """Run one training step, and sample before its update. Returns float32 arrays by the name of a weight:
    (2, NUMBERS) numbers of the weight, the same places in all rows, and the sketch of its gradient; those of
    a part by `NAME part 1/2`. Of several updates in one training step, the last is sampled. A weight that got
    no gradient has one of zeros; a sparse gradient is left out."""
    samples: dict[str, np.ndarray] = {}

    def keep(*_) -> None:
        for name, weight in model.named_parameters():
            is_sampled = weight.dim() > 1 and weight.numel() and weight.requires_grad
            if is_sampled and (weight.grad is None or weight.grad.layout == torch.strided):
                samples.update(samples_of(name, weight))

    model.zero_grad()  # also weights that the optimizer does not have
    hook = optimizer.register_step_pre_hook(keep)
    try:
        train_step(*batch)
    finally:
        hook.remove()
    return samples


def samples_of(name: str, weight: torch.nn.Parameter) -> dict[str, np.ndarray]:
    """The sample of a matrix and the sketch of its gradient: of the whole, and of each of its halves and
    thirds."""
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    values, gradients = (part.detach().flatten() for part in (weight, gradient))
    samples = {}
    for parts in PARTS:
        numbers, rest = divmod(weight.numel(), parts)
        places = torch.from_numpy(places_of(max(1, numbers))).to(weight.device)
        for k in range(0 if rest else parts):
            part = slice(k * numbers, (k + 1) * numbers)
            both = torch.stack([values[part][places].float(), sketch(gradients[part])])
            samples[name if parts == 1 else f"{name}{PART}{k + 1}/{parts}"] = both.cpu().numpy()
    return samples


def sketch(gradient: torch.Tensor) -> torch.Tensor:
    """NUMBERS sums, float32, of a flat gradient: each of its numbers gets a random sign, and is added to one
    of them. On one device with one PyTorch, signs depend on the place and the length alone. The cosine of two
    sketches is close to that of the gradients: what is missing to 1 is off by a tenth (one standard
    deviation), and for the worst of many matrices by a quarter. Source: the count sketch of Charikar, Chen
    and Farach-Colton, 2002."""
    generator = torch.Generator(gradient.device).manual_seed(len(gradient))
    sums = torch.zeros(NUMBERS, device=gradient.device)
    for chunk in gradient.split(CHUNK):
        rows = torch.nn.functional.pad(chunk.float(), (0, -len(chunk) % NUMBERS)).view(-1, NUMBERS)
        signs = torch.randint(2, rows.shape, generator=generator, device=rows.device, dtype=torch.int8)
        sums += (rows * (2 * signs - 1)).sum(0)
    return sums


def renamed(samples: dict[str, np.ndarray], k: int | str) -> dict[str, np.ndarray]:
    """The samples of whole matrices of a further pass, by the names that they have beside those of the
    first."""
    return {f"{PASS}{k} {name}": numbers for name, numbers in samples.items() if PART not in name}


def distance(samples: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> float:
    """How far the gradients of two passes lie apart, by the weight that differs most: one less the cosine."""
    apart = [0.0]
    for name, (_, gradient) in samples.items():
        a, b = (sketch.astype(np.float64) for sketch in (gradient, others[name][1]))
        if length := np.linalg.norm(a) * np.linalg.norm(b):
            apart.append(1 - a @ b / length)
    return float(max(apart))


def places_of(numbers: int) -> np.ndarray:
    """The places in a matrix that are sampled. They depend on its size alone."""
    return np.random.default_rng(numbers).integers(numbers, size=NUMBERS)


def write(samples: dict[str, np.ndarray], record: Path) -> None:
    """Write samples next to a record, or take away those of an earlier run. Raises OSError."""
    path = sketches_of(record)
    path.unlink(missing_ok=True)
    if samples:
        archive = io.BytesIO()
        np.savez(archive, **samples)
        write_bytes(path, archive.getvalue())
