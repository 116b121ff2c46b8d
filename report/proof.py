"""Whether all rows do the same work: the gradients of each are compared with those of the first row.

A record lies next to samples of its row's weights and sketches of their gradients (common/proof.py). A matrix
is compared with one of the other model whose numbers are the same before the step, whatever its name, or with
a half or a third of one. The cosine of their gradients is 1 where they point the same way.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np

from common.record import AGAIN, NUMBERS, PART, Proof, Row, sketches_of
from common.text import one_line

PAIRED = 0.9  # of the weights, at least: with fewer nothing is proven
# The least cosine of a row that does the same work. These levels were tried on an H200 at six shapes, by 512
# numbers of each gradient in place of a sketch. TF32 and BF16 had 0.9997 or more, FP8 had 0.972 or more, and
# Transformer Engine's whole layer 0.960. A dead MLP had 0.00, no mask 0.32 to 0.66, no mask in one block
# 0.966 to 0.993, FP8 with all scales at 1, where they begin, had 0.44 or less. A wrong scale of attention in
# one block had 0.934 to 0.9998: at the first step attention is nearly even, so it is not always seen. By
# sketches, at three shapes: BF16 and FP16 0.9999 or more, FP8 0.991 or more, a dead MLP 0.00, no mask 0.35.
AGREES, AGREES_IN_FP8 = 0.999, 0.95
# The same of a model that is not ours, which may be deeper: on the same card a Llama of 24 layers had 0.999
# in BF16 and 0.83 in FP8, the weights of its keys, while its losses agreed.
OTHERS_AGREE, OTHERS_AGREE_IN_FP8 = 0.95, 0.75
BLUNT = 0.5  # cosine of two passes of the first row, below which random numbers leave nothing to prove

# (2, NUMBERS) by the name of a weight: numbers of the weight, and the sketch of its gradient
Samples = dict[str, np.ndarray]


def read(record: Path) -> Samples:
    """The samples next to a record; empty where there are none that can be used."""
    path = sketches_of(record)
    try:
        with np.load(path, allow_pickle=False) as file:
            samples = {one_line(name): file[name] for name in file.files}
        usable = [part.dtype == np.float32 and part.shape == (2, NUMBERS) for part in samples.values()]
    except Exception:  # a damaged archive raises errors of many kinds
        return {}
    return samples if all(usable) else {}


def limit(proof: Proof) -> float:
    """The least cosine of two rows that agree. Of a model that is not ours, random numbers, as those of
    dropout, lower it as far as they lower the cosine of two passes of the first row."""
    if proof.repeated is None:
        return AGREES_IN_FP8 if proof.in_fp8 else AGREES
    level = OTHERS_AGREE_IN_FP8 if proof.in_fp8 else OTHERS_AGREE
    return round(level * max(0.0, proof.repeated), 4)


def verdict(proof: Proof | None) -> str:
    """agrees, differs or not proven; an empty text for a row that was not compared."""
    if proof is None:
        return ""
    if proof.cosine is None or (proof.repeated is not None and proof.repeated < BLUNT):
        return "not proven"
    return "agrees" if proof.cosine >= limit(proof) else "differs"


def prove(rows: list[tuple[Row, Samples]]) -> None:
    """Compare every row that has samples with the first one that has."""
    sampled = [(row, samples) for row, samples in rows if samples and row.status == "ok"]
    for row, samples in sampled[1:]:
        row.proof = compare(*sampled[0], row, samples)


def compare(first: Row, ours: Samples, other: Row, theirs: Samples) -> Proof:
    """The least cosine between the gradients of two rows, over the weights of the first one that both
    have."""
    partners: dict[bytes, list[str]] = defaultdict(list)  # names by the numbers of the weight
    for name in sorted(theirs, key=lambda name: PART in name):  # whole matrices before parts
        if not name.startswith(AGAIN):
            partners[theirs[name][0].tobytes()].append(name)
    whole = [name for name in ours if PART not in name and not name.startswith(AGAIN)]
    cosines: dict[str, float] = {}
    for name in whole:
        if names := partners[ours[name][0].tobytes()]:
            partner = names.pop(0)  # weights that begin with equal numbers are paired in their order
            cosines[partner] = cosine(ours[name][1], theirs[partner][1])
    in_fp8 = bool(first.settings.fp8_recipe or other.settings.fp8_recipe)
    proof = Proof(first.step, in_fp8, len(cosines) / max(1, len(whole)), repeated=repeated(ours))
    if proof.paired >= PAIRED:
        proof.weight = min(cosines, key=cosines.get)
        proof.cosine = round(cosines[proof.weight], 6)
    return proof


def repeated(samples: Samples) -> float | None:
    """The least cosine between the gradients of two passes of one row; None where there was one pass."""
    cosines = []
    for name, (_, gradient) in samples.items():
        if f"{AGAIN}{name}" in samples:
            cosines.append(cosine(gradient, samples[f"{AGAIN}{name}"][1]))
    return round(min(cosines), 6) if cosines else None


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of two vectors: 1 where both are zero, and 0 where one is zero or not finite."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not a.any() and not b.any():
        return 1.0
    length = float(np.sqrt(a @ a) * np.sqrt(b @ b))
    return float(a @ b) / length if length and np.isfinite(length) else 0.0
