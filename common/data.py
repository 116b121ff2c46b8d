"""Real text to batches of tokens, all staged on the device before anything is timed."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

# llm.c writes 256 int32 before the tokens: magic, version, number of tokens, zeros.
LLMC_MAGIC = 20240520
LLMC_HEADER_TOKENS = 256 * 4 // 2  # the room of this many uint16
HELDOUT_SHARE = 0.05  # of the text, at its end
HELDOUT_SEQUENCES = 16


class DataError(ValueError):
    """The text cannot be trained on; the message is one line that says why."""


@dataclass(frozen=True)
class Text:
    """A tokenized text: `tokens` is 1-D, uint8 (bytes) or uint16 (token ids). `path` is None for the default text."""

    tokens: np.ndarray
    name: str
    path: Path | None = None


def standard_library_text() -> Text:
    """Source of this Python's standard library as bytes: about 10 MB, on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    files = sorted(f for f in root.rglob("*.py") if not skipped & set(f.relative_to(root).parts))
    if not files:
        raise DataError(f"no Python source found under {root}; name a text with --data FILE")
    source = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
    return Text(source, f"Python {platform.python_version()} standard library")


def load_text(path: Path | None, n_tokens: int | None = None) -> Text:
    """A file as bytes, or a `.bin` of uint16 tokens as nanoGPT's and llm.c's scripts write it; at most `n_tokens`.

    None gives the default text. Raises DataError for a file that is missing, unreadable, empty or shorter than
    `n_tokens`, and for a `.bin` whose size fits no whole number of tokens.
    """
    if path is None:
        text = standard_library_text()
    else:
        try:
            text = Text(_file_tokens(path), os.fsencode(path.name).decode(errors="replace"), path)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    if n_tokens is not None and n_tokens > len(text.tokens):
        raise DataError(f"{text.name} has {len(text.tokens)} tokens, fewer than --data-tokens {n_tokens}")
    return replace(text, tokens=text.tokens[:n_tokens])


def _file_tokens(path: Path) -> np.ndarray:
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"{path} is empty")
    if path.suffix != ".bin":
        return np.memmap(path, dtype=np.uint8, mode="r")
    if size % 2:
        raise DataError(f"{path} has an odd number of bytes, so it holds no uint16 tokens")
    tokens = np.memmap(path, dtype="<u2", mode="r")
    magic, version, count = tokens[:6].view("<i4") if len(tokens) >= 6 else (None, None, None)
    if magic != LLMC_MAGIC:
        return tokens
    n_tokens = max(len(tokens) - LLMC_HEADER_TOKENS, 0)
    if version != 1 or count != n_tokens:
        raise DataError(
            f"{path} has an llm.c header of version {version} for {count} tokens, "
            f"but version 1 for {n_tokens} tokens was expected from its size"
        )
    if n_tokens == 0:
        raise DataError(f"{path} is empty: an llm.c header and no tokens")
    return tokens[LLMC_HEADER_TOKENS:]


def check_text(text: Text, seq_len: int, vocab_size: int) -> None:
    """Raise DataError unless `text` holds one sequence and its targets, and fits the vocabulary."""
    name, n_tokens, need = text.name, len(text.tokens), seq_len + 1
    if n_tokens < need:
        raise DataError(f"{name} has {n_tokens} tokens; one sequence and its targets need {need} (--seq-len {seq_len})")
    if (largest := int(text.tokens.max())) >= vocab_size:
        outside = f"{name} has token id {largest}, outside the vocabulary"
        raise DataError(f"{outside}: --vocab-size must be at least {largest + 1}")


def trained_tokens(text: Text, seq_len: int) -> int:
    """How many tokens training may draw from: all but the last 5 %, or all where those hold no sequence."""
    heldout = int(len(text.tokens) * HELDOUT_SHARE)
    return len(text.tokens) - (heldout if heldout > seq_len else 0)


def draw_starts(text: Text, n_batches: int, batch_size: int, seq_len: int, seed: int) -> np.ndarray:
    """Where the random excerpts of each batch begin: int64 (n_batches, batch_size).

    Batch k depends on `seed` and k alone, not on how many are drawn.
    """
    n_starts = trained_tokens(text, seq_len) - seq_len
    return np.random.default_rng(seed).integers(n_starts, size=(n_batches, batch_size))


def heldout_starts(text: Text, seq_len: int) -> np.ndarray:
    """Where HELDOUT_SEQUENCES excerpts of the held-out part begin, evenly spaced, whatever the seed: int64 (n, 1).

    Empty where the text is too short to have such a part.
    """
    first, last = trained_tokens(text, seq_len), len(text.tokens) - seq_len - 1
    n = HELDOUT_SEQUENCES if first <= last else 0
    return np.linspace(first, last, n).astype(np.int64)[:, None]


def read_batches(text: Text, starts: np.ndarray, seq_len: int) -> np.ndarray:
    """The excerpts at `starts` with one token more, as int64 (n_batches, batch_size, seq_len + 1)."""
    return text.tokens[starts[..., None] + np.arange(seq_len + 1)].astype(np.int64)


def stage_batches(batches: np.ndarray, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copy drawn batches to the device as (tokens, targets) pairs, each (B, T) int64 and contiguous."""
    excerpts = torch.from_numpy(batches)
    return [(excerpt[:, :-1].contiguous().to(device), excerpt[:, 1:].contiguous().to(device)) for excerpt in excerpts]


def fingerprint(text: Text, starts: np.ndarray, seq_len: int) -> str:
    """16 hex digits that two runs share when they train on the same batches.

    SHA-256 of all `starts` and of the tokens of the first 256 excerpts: the text itself may be too large for this.
    """
    digest = hashlib.sha256(starts.tobytes())
    for start in starts.flat[:256]:
        digest.update(text.tokens[start : start + seq_len + 1].astype(np.int64).tobytes())
    return digest.hexdigest()[:16]
