"""Real text to batches of tokens, all staged on the device before anything is timed."""

import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common import formats
from common.text import one_line

VOCABULARY_UNIT = 64  # of a vocabulary that is advised
HELDOUT_SHARE, HELDOUT_SEQUENCES = 0.05, 16  # of the text, at its end; excerpts of that part


@dataclass(frozen=True)
class Text:
    """A tokenized text: `tokens` is 1-D, uint8 (bytes), or uint16 or uint32 (token ids)."""

    tokens: np.ndarray
    name: str


def standard_library_text() -> Text:
    """Source of this Python's standard library as bytes: about 10 MB, on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    files = sorted(f for f in root.rglob("*.py") if not skipped & set(f.relative_to(root).parts))
    source = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
    return Text(source, f"Python {platform.python_version()} standard library")


def load_text(path: Path | None, seq_len: int, vocab_size: int) -> Text:
    """The tokens of a file, see common/formats.py. None gives the default text.

    Raises ValueError, one line, for a file that cannot be read or holds neither text nor tokens, one that
    does not hold two sequences with their targets, one of them held out, and a token outside the vocabulary.
    """
    try:
        text = Text(formats.read_tokens(path), one_line(path.name, 100)) if path else standard_library_text()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    if len(text.tokens) < (needed := 2 * (seq_len + 1)):
        raise ValueError(f"{text.name} has {len(text.tokens)} tokens, but --seq-len {seq_len} needs {needed}")
    if (largest := int(text.tokens.max())) >= vocab_size:
        enough = (largest // VOCABULARY_UNIT + 1) * VOCABULARY_UNIT
        advice = f"--vocab-size {enough}, a multiple of {VOCABULARY_UNIT}, since the head is slower at others"
        raise ValueError(f"{text.name} has the token id {largest}: give {advice}")
    return text


def trained_tokens(text: Text, seq_len: int) -> int:
    """How many tokens training may draw from: all but the last 5 %, and at least one sequence, which are held
    out."""
    return len(text.tokens) - max(int(len(text.tokens) * HELDOUT_SHARE), seq_len + 1)


def draw_starts(text: Text, n_batches: int, batch_size: int, seq_len: int, seed: int) -> np.ndarray:
    """Where the random excerpts of each batch begin: int64 (n_batches, batch_size).

    Batch k depends on `seed` and k alone, not on how many are drawn.
    """
    n_starts = trained_tokens(text, seq_len) - seq_len
    return np.random.default_rng(seed).integers(n_starts, size=(n_batches, batch_size))


def heldout_starts(text: Text, seq_len: int) -> np.ndarray:
    """Where excerpts of the held-out part begin, evenly spaced, whatever the seed: int64 (HELDOUT_SEQUENCES,
    1)."""
    first, last = trained_tokens(text, seq_len), len(text.tokens) - seq_len - 1
    return np.linspace(first, last, HELDOUT_SEQUENCES).astype(np.int64)[:, None]


def stage_batches(text: Text, starts: np.ndarray, seq_len: int, device: torch.device) -> list[tuple]:
    """The excerpts at `starts` (n_batches, batch_size), copied to the device as pairs of tokens and targets,
    each (batch_size, seq_len) int64 and contiguous."""
    batches = []
    for of_batch in starts:
        excerpts = torch.from_numpy(text.tokens[of_batch[:, None] + np.arange(seq_len + 1)].astype(np.int64))
        batches.append((excerpts[:, :-1].contiguous().to(device), excerpts[:, 1:].contiguous().to(device)))
    return batches
