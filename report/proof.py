"""Whether all rows do the same work: the gradients of each are compared with those of the first row.

A record lies next to samples of its row's weights and gradients (common/proof.py). Two weights are the same
where their samples are equal before the step: those are paired, in the order in which their models list them.
The cosine of their gradients is 1 where they point the same way.
"""

from pathlib import Path

import numpy as np

from common.record import GRADIENTS, Proof, Row

LARGEST_FILE = 2**26  # bytes
PAIRED = 0.9  # of the weights, at least: with fewer nothing is proven
# The least cosine of a row that does the same work. On an H200, at six shapes, TF32 and BF16 had 0.9997 or
# more, FP8 had 0.972 or more, and Transformer Engine's whole layer 0.960. A dead MLP had 0.00, no mask 0.32
# to 0.66, no mask in one block 0.966 to 0.993, FP8 with unknown scales 0.44 or less. A wrong scale of
# attention in one block had 0.934 to 0.9998: at the first step attention is nearly even, so it is not always
# seen.
AGREES, AGREES_IN_FP8 = 0.999, 0.95

Samples = dict[str, np.ndarray]  # (2, N) by the name of a weight: numbers of the weight, and of its gradient


def read(record: Path) -> Samples:
    """The samples next to a record; empty where there are none that can be used."""
    path = record.with_suffix(GRADIENTS)
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_FILE:
            return {}
        with np.load(path, allow_pickle=False) as file:
            samples = {name: file[name] for name in file.files}
    except Exception:  # a damaged archive raises errors of many kinds
        return {}
    usable = [part.dtype == np.float32 and part.ndim == 2 and len(part) == 2 for part in samples.values()]
    return samples if all(usable) else {}


def verdict(row: Row) -> str:
    """agrees, differs, or not proven; empty of a row that was not compared."""
    if row.proof is None:
        return ""
    if row.proof.cosine is None:
        return "not proven"
    least = AGREES_IN_FP8 if row.settings.fp8_recipe else AGREES
    return "agrees" if row.proof.cosine >= least else "differs"


def prove(rows: list[tuple[Row, Samples]]) -> None:
    """Give every row but the first its proof: rows without samples, and a first one without, get none."""
    with_samples = [(row, samples) for row, samples in rows if samples and row.status == "ok"]
    for row, samples in with_samples[1:]:
        row.proof = compare(with_samples[0][1], samples)


def compare(first: Samples, other: Samples) -> Proof:
    """The least cosine between the gradients of two rows, over the weights that both have."""
    cosines: dict[str, float] = {}
    for (_, ours), (name, theirs) in zip(first.items(), other.items(), strict=False):
        if ours.shape == theirs.shape and np.array_equal(ours[0], theirs[0]):
            cosines[name] = cosine(ours[1], theirs[1])
    paired = len(cosines) / max(len(first), len(other))
    if paired < PAIRED:
        return Proof(paired)
    least = min(cosines, key=cosines.get)
    return Proof(paired, round(cosines[least], 6), least)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of two vectors; 0 where one of them is zero or not finite, and 1 where both are zero."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not a.any() and not b.any():
        return 1.0
    length = float(np.sqrt(a @ a) * np.sqrt(b @ b))
    return float(a @ b) / length if length and np.isfinite(length) else 0.0
