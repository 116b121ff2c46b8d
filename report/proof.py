"""Whether all rows do the same work: the gradients of each are compared with those of the first row.

A record lies next to samples of its row's weights and sketches of their gradients (common/proof.py). A matrix
is compared with one of the other model whose numbers are the same before the step, whatever its name, or with
a half or a third of one. The cosine of their gradients is 1 where they point the same way.
"""

import itertools
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import numpy as np

from common.record import IN_TRAINING, NUMBERS, PART, PASS, ROUNDED, Proof, Row, sketches_of
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
# Of the largest gradient: what counts as none, and what another row's rounding may make of it.
ZERO, ROUNDING = 1e-6, 1e-2
# Where random numbers alone turn the gradients: times their spread, below which rows differ, and the least
# limit from which a weight proves something.
SPREADS, BLUNT = 2.0, 0.5
# Where rounding alone turns them, because a router sends a token to another expert: times the distance that
# weights rounded to BF16 make, by which a row's own rounding may lower the limit. AMP made 0.7 to 1.9 times
# that distance in a Mixtral of 8 layers. FP8 keeps four bits less.
ROUNDINGS, COARSER = 4.0, 16.0

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


def level(in_fp8: bool, is_of_ladder: bool) -> float:
    """The least cosine of two rows that agree, random numbers aside."""
    if is_of_ladder:
        return AGREES_IN_FP8 if in_fp8 else AGREES
    return OTHERS_AGREE_IN_FP8 if in_fp8 else OTHERS_AGREE


def limit(proof: Proof) -> float:
    """The least cosine at which the rows of a proof agree; an older record does not hold it."""
    return level(proof.in_fp8, proof.repeated is None) if proof.limit is None else proof.limit


def verdict(proof: Proof | None) -> str:
    """agrees, differs or not proven; an empty text for a row that was not compared."""
    if proof is None:
        return ""
    if proof.cosine is None:
        return "not proven"
    return "agrees" if proof.cosine >= limit(proof) else "differs"


def prove(rows: list[tuple[Row, Samples]]) -> None:
    """Compare every row that has samples with the first one that has."""
    sampled = [(row, samples) for row, samples in rows if samples and row.status == "ok"]
    for row, samples in sampled[1:]:
        row.proof = compare(*sampled[0], row, samples)


def compare(first: Row, ours: Samples, other: Row, theirs: Samples) -> Proof:
    """The cosine between the gradients of two rows, of that weight of the first one that lies nearest to its
    limit or furthest below it. A weight whose gradient random numbers or rounding turn too far is not
    paired. Gradients of zero show nothing: where most are zero, as of a model that begins with matrices of
    zeros, they are not left out. Nothing is paired where one row alone was compared in training mode."""
    partners: dict[bytes, list[str]] = defaultdict(list)  # names by the numbers of the weight
    for name in sorted(theirs, key=lambda name: PART in name):  # whole matrices before parts
        if not name.startswith(PASS):
            partners[theirs[name][0].tobytes()].append(name)
    whole = [name for name in ours if PART not in name and not name.startswith(PASS)]
    total, in_fp8 = len(whole), bool(first.settings.fp8_recipe or other.settings.fp8_recipe)
    if (IN_TRAINING in (first.note or "")) != (IN_TRAINING in (other.note or "")):
        return Proof(first.step, in_fp8, 0.0, repeated=repeatability(ours))
    least = level(in_fp8, is_of_ladder=repeatability(ours) is None)
    cosines: dict[str, tuple[float, float]] = {}  # and its limit
    largest = [max(map(length, samples.values()), default=0.0) for samples in (ours, theirs)]
    for name in [*whole]:
        if names := partners[ours[name][0].tobytes()]:
            partner = names.pop(0)  # weights that begin with equal numbers are paired in their order
            if length(ours[name]) <= ZERO * largest[0] and length(theirs[partner]) <= ROUNDING * largest[1]:
                whole.remove(name)  # a gradient of zero, of which another row has rounding errors
                continue
            tolerance = ROUNDINGS * (COARSER if in_fp8 else 1.0) * rounding_distance(ours, name)
            cosines[partner] = agreement(passes_of(ours, name), passes_of(theirs, partner), least - tolerance)
    sharp, zeros = {name: pair for name, pair in cosines.items() if pair[1] >= BLUNT}, total - len(whole)
    weights = total if zeros > len(whole) else len(whole)
    proof = Proof(first.step, in_fp8, len(sharp) / max(1, weights), repeated=repeatability(ours))
    if proof.paired >= PAIRED:
        proof.weight = min(sharp, key=lambda name: sharp[name][0] - sharp[name][1])
        proof.cosine, proof.limit = (round(number, 6) for number in sharp[proof.weight])
    return proof


def length(sample: np.ndarray) -> float:
    """Of a sketch: that of its gradient, roughly."""
    return float(np.linalg.norm(sample[1].astype(np.float64)))


def passes_of(samples: Samples, name: str) -> list[np.ndarray]:
    """The sketches of a weight's gradient, of each pass."""
    names = [name, *(f"{PASS}{k} {name}" for k in range(1, len(samples)))]
    return [samples[each][1].astype(np.float64) for each in names if each in samples]


def rounding_distance(samples: Samples, name: str) -> float:
    """One less the cosine of a weight's gradient with that of the same step with weights in BF16; 0 where the
    record does not hold it."""
    rounded = samples.get(f"{PASS}{ROUNDED} {name}")
    return 0.0 if rounded is None else 1 - cosine(samples[name][1], rounded[1])


def agreement(ours: list[np.ndarray], theirs: list[np.ndarray], least: float) -> tuple[float, float]:
    """The cosine of two rows' gradients of a weight, and its limit.

    Passes of the same number draw the same random numbers in rows that draw alike: then these are compared,
    pass by pass. Otherwise their means are, and the limit is lower by SPREADS times what random numbers alone
    are expected to turn such means: by the cosines between the means of one half of the first row's passes
    and those of the other half.
    """
    paired = min(cosine(a, b) for a, b in zip(ours, theirs, strict=False))
    half = len(ours) // 2
    if paired >= least or half < 2:
        return paired, least
    halves = [list(chosen) for chosen in itertools.combinations(range(len(ours)), half)]
    rest = [[k for k in range(len(ours)) if k not in chosen] for chosen in halves]
    sums = ([np.sum([ours[k] for k in chosen], axis=0) for chosen in each] for each in (halves, rest))
    apart = fmean(1 - cosine(a, b) for a, b in zip(*sums, strict=True))
    expected = apart * half * (1 / len(ours) + 1 / len(theirs)) / 2
    return cosine(np.mean(ours, axis=0), np.mean(theirs, axis=0)), least - SPREADS * expected


def repeatability(samples: Samples) -> float | None:
    """The least cosine between the gradients of two passes of one row; None where there was one pass."""
    others = {name: f"{PASS}1 {name}" for name in samples if f"{PASS}1 {name}" in samples}
    cosines = [cosine(samples[name][1], samples[other][1]) for name, other in others.items()]
    return round(min(cosines), 6) if cosines else None


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of two vectors: 1 where both are zero, and 0 where one is zero or not finite."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not a.any() and not b.any():
        return 1.0
    length = float(np.sqrt(a @ a) * np.sqrt(b @ b))
    return float(a @ b) / length if length and np.isfinite(length) else 0.0
