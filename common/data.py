"""Real text to batches of tokens, all staged on the device before anything is timed."""

import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

MOST_BYTES = 2**30  # of a file: what follows is not read
# What llm.c writes begins with 256 int32, which are 512 uint16; the first is this magic number.
LLMC_MAGIC, LLMC_HEADER = (20240520, 512)
HELDOUT_SHARE, HELDOUT_SEQUENCES = 0.05, 16  # of the text, at its end; excerpts of that part


@dataclass(frozen=True)
class Text:
    """A tokenized text: `tokens` is 1-D, uint8 (bytes) or uint16 (token ids)."""

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
    """A file as bytes, or a `.bin` of uint16 tokens as nanoGPT's and llm.c's scripts write it; its first GiB.

    None gives the default text. Raises ValueError, one line, for a file that cannot be read, one that does
    not hold two sequences with their targets, one of them held out, and a token outside the vocabulary.
    """
    try:
        text = Text(_file_tokens(path), path.name) if path else standard_library_text()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    if len(text.tokens) < (needed := 2 * (seq_len + 1)):
        raise ValueError(f"{text.name} has {len(text.tokens)} tokens, but --seq-len {seq_len} needs {needed}")
    if (largest := int(text.tokens.max())) >= vocab_size:
        raise ValueError(
            f"{text.name} has the token id {largest}: --vocab-size must be at least {largest + 1}"
        )
    return text


def _file_tokens(path: Path) -> np.ndarray:
    if path.suffix != ".bin":
        return np.fromfile(path, dtype=np.uint8, count=MOST_BYTES)
    tokens = np.fromfile(path, dtype="<u2", count=MOST_BYTES // 2)
    return tokens[LLMC_HEADER if tokens[:2].tobytes() == LLMC_MAGIC.to_bytes(4, "little") else 0 :]


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
