"""How well do the last bytes alone foretell the next one?

The ladder trains on text as bytes, and its losses are nats: what is to be beaten? A table of the text's pairs
of bytes gives each next byte a probability after each byte before it, and needs no training. A table of
triples knows two bytes before it.

Prediction. Without any knowledge 256 bytes are equally likely: ln 256 = 5.55 nats. A table's loss on the text
that it was counted on is about the entropy of the next byte given those before it. On text that was held out
it is more, because some triples never occurred. Every table is mixed with the one that looks back one byte
less, which counts as one more occurrence. So a triple that never occurred still has a probability.

Change: --vocab 64 maps bytes to fewer kinds. Which table's loss falls most?
Source: Shannon, Prediction and Entropy of Printed English (1951).
"""

import numpy as np

from common import data

MOST = 256  # values of a byte
FEWEST = 1000  # bytes, of which a twentieth is held out
WEIGHT = 1  # of the shorter table, in occurrences
NAMES = ("single bytes", "pairs", "triples")


def tables(tokens: np.ndarray, vocab: int):
    """Of 0, 1 and 2 tokens before it, the probability of each token: float64 (vocab, ..., vocab), whose last
    axis is the token."""
    shorter = np.full(vocab, 1 / vocab)
    for before in range(len(NAMES)):
        counts = np.bincount(places(tokens, before, vocab), minlength=vocab ** (before + 1)).astype(float)
        counts = counts.reshape((vocab,) * (before + 1))
        shorter = (counts + WEIGHT * shorter) / (counts.sum(-1, keepdims=True) + WEIGHT)
        yield shorter


def places(tokens: np.ndarray, before: int, vocab: int) -> np.ndarray:
    """Where each token and the `before` tokens before it stand in the flat table of their probabilities."""
    place, last = np.zeros(len(tokens) - before, dtype=np.int64), before + 1
    for k in range(last):
        place = place * vocab + tokens[k : len(tokens) - before + k]
    return place


def loss(table: np.ndarray, tokens: np.ndarray) -> float:
    """Mean cross entropy of the tokens in nats."""
    return -float(np.log(table.ravel()[places(tokens, table.ndim - 1, table.shape[-1])]).mean())


def run(lab, length=None, vocab=None):
    vocab = vocab or MOST
    if vocab > MOST:
        raise ValueError(f"--vocab {vocab} is more than the {MOST} values of a byte")
    if length is not None and length < FEWEST:
        raise ValueError(f"--length {length} is too short: give {FEWEST} or more")
    text = data.standard_library_text()
    tokens = text.tokens[: length or lab.pick(2**20, None, None)].astype(np.int64) % vocab
    trained = len(tokens) - int(len(tokens) * data.HELDOUT_SHARE)
    lab.title = f"{text.name}, {len(tokens) / 1e6:.1f} MB; loss on held-out text in nats"
    for name, table in zip(NAMES, tables(tokens[:trained], vocab), strict=True):
        heldout = loss(table, tokens[trained:])
        lab.row(f"a table of {name}", heldout, loss(table, tokens[:trained]), "")
    return f"A model that ends above {heldout:.2f} nats foretells no better than the table of triples."
