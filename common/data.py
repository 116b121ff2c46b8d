"""Real text to batches of tokens, all staged on the device before anything is timed."""

import codecs
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.text import one_line

MOST_BYTES, HEAD_BYTES = 2**30, 2**16  # of a file: what is read, and what it is recognized by
LLMC_TOKENS = {20240520: "<u2", 20240801: "<u4"}  # by the first number of the header of an llm.c file
LLMC_HEADER_BYTES, LLMC_DATES = 1024, range(20240101, 20241232)  # of all its files
PRINTED = "\t\n\r\f\v\b\x1b"  # control characters that texts have
ACCEPTED = (
    "give a text in UTF-8, tokens of 16 bits in a .bin as nanoGPT writes them, a .bin of llm.c, or a .npy of "
    "whole numbers of one dimension. Unpack an archive first, and save tokens of 8 or 32 bits with numpy.save"
)
VOCABULARY_UNIT = 64  # of a vocabulary that is advised
HELDOUT_SHARE, HELDOUT_SEQUENCES = 0.05, 128  # of the text, and sequences, at most


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


def read_tokens(path: Path) -> np.ndarray:
    """The tokens of a file: 1-D, uint8 (bytes of a text), uint16 or uint32; of its first GiB.

    Raises OSError for a file that cannot be read, and ValueError, one line, for one that is neither text nor
    tokens. Source of the header: llm.c, dev/data/data_common.py.
    """
    if not str(path).isprintable():
        raise ValueError(f"--data {str(path)!a}: no record can hold this name, rename the file")
    if path.exists() and not path.is_file():
        raise ValueError(f"--data {path}: not a regular file")
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(b"\x93NUMPY"):
        return numpy_array(path)
    dtype, offset, first = "<u2", 0, int.from_bytes(head[:4], "little")
    if first in LLMC_TOKENS:
        dtype, offset = LLMC_TOKENS[first], LLMC_HEADER_BYTES
    elif is_text(head):
        dtype = "u1"
    elif path.suffix.lower() != ".bin" or first in LLMC_DATES or not are_tokens(head):
        raise ValueError(f"--data {path} is neither text nor tokens: {ACCEPTED}")
    return np.fromfile(path, dtype, count=MOST_BYTES // np.dtype(dtype).itemsize, offset=offset)


def is_text(head: bytes) -> bool:
    """Whether bytes are UTF-8 without control characters; the last character may be cut."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return not any(ord(character) < 32 and character not in PRINTED for character in text)


def are_tokens(head: bytes) -> bool:
    """Whether bytes are token ids of 16 bits, and nothing before them.

    The upper bytes of token ids are mostly small, so they are distributed unlike the lower ones. Those of
    compressed data and of tokens of 8 bits are not. Of tokens of 32 bits every second half is almost zero. A
    header begins with a word.
    """
    halves = np.frombuffer(head[: len(head) // 4 * 4], "<u2")
    counts = [np.bincount(part, minlength=256) / max(1, len(part)) for part in (halves & 255, halves >> 8)]
    unlike = np.abs(counts[0] - counts[1]).sum() / 2
    in_32_bits = np.mean(halves > 3) > 0.1 and any(np.mean(halves[k::2] <= 3) > 0.9 for k in (0, 1))
    # Of few numbers also those of one distribution lie apart.
    return (
        unlike > min(0.15 + 8 / np.sqrt(len(halves) + 1), 0.8) and not in_32_bits and not head[:6].isalnum()
    )


def numpy_array(path: Path) -> np.ndarray:
    """Whole numbers of one dimension, as the smallest type that holds them. Raises ValueError for others."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # a damaged header raises errors of many kinds
        raise ValueError(f"--data {path} is no array that NumPy can read: {one_line(error)}") from None
    if array.ndim != 1 or array.dtype.kind not in "ui":
        kind = f"{array.dtype} of {array.ndim} dimensions"
        raise ValueError(f"--data {path} holds {kind}: give whole numbers of one dimension")
    array = array[: MOST_BYTES // array.itemsize]
    if len(array) and (array.min() < 0 or array.max() >= 2**32):
        raise ValueError(f"--data {path} holds numbers that are no token ids")
    return array.astype(np.uint16 if not len(array) or array.max() < 2**16 else np.uint32)


def load_text(path: Path | None, seq_len: int, vocab_size: int) -> Text:
    """The tokens of a file, see `read_tokens`. None gives the default text.

    Raises ValueError, one line, for a file that cannot be read or holds neither text nor tokens, one that
    does not hold two sequences with their targets, one of them held out, and a token outside the vocabulary.
    """
    try:
        text = Text(read_tokens(path), one_line(path.name, 100)) if path else standard_library_text()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    if len(text.tokens) < (needed := 2 * (seq_len + 1)):
        raise ValueError(f"{text.name} has {len(text.tokens)} tokens, but --seq-len {seq_len} needs {needed}")
    if (largest := int(text.tokens.max())) >= vocab_size:
        enough = (largest // VOCABULARY_UNIT + 1) * VOCABULARY_UNIT
        advice = f"--vocab-size {enough}, a multiple of {VOCABULARY_UNIT}, since the head is slower at others"
        raise ValueError(f"{text.name} has the token id {largest}: give {advice}")
    return text


def stretches(text: Text, seq_len: int) -> tuple[int, int]:
    """Into how many equal stretches a text is divided, and how many tokens each has. The last sequence of
    each, with its target, is held out: 5 % of the text at most, or one sequence."""
    held_out = int(len(text.tokens) * HELDOUT_SHARE) // (seq_len + 1)
    count = max(1, min(HELDOUT_SEQUENCES, held_out))
    return count, len(text.tokens) // count


def draw_starts(text: Text, n_batches: int, batch_size: int, seq_len: int, seed: int) -> np.ndarray:
    """Where the random excerpts of each batch begin: int64 (n_batches, batch_size). None touches a sequence
    that is held out.

    Batch k depends on `seed` and k alone, not on how many are drawn.
    """
    count, length = stretches(text, seq_len)
    n_starts = length - 2 * (seq_len + 1) + 1  # in a stretch
    drawn = np.random.default_rng(seed).integers(count * n_starts, size=(n_batches, batch_size))
    return drawn // n_starts * length + drawn % n_starts


def heldout_starts(text: Text, seq_len: int) -> np.ndarray:
    """Where the held-out sequences begin, whatever the seed: int64 (n, 1)."""
    count, length = stretches(text, seq_len)
    return (np.arange(1, count + 1, dtype=np.int64) * length - (seq_len + 1))[:, None]


def stage_batches(text: Text, starts: np.ndarray, seq_len: int, device: torch.device) -> list[tuple]:
    """The excerpts at `starts` (n_batches, batch_size), copied to the device as pairs of tokens and targets,
    each (batch_size, seq_len) int64 and contiguous."""
    batches = []
    for of_batch in starts:
        excerpts = torch.from_numpy(text.tokens[of_batch[:, None] + np.arange(seq_len + 1)].astype(np.int64))
        batches.append((excerpts[:, :-1].contiguous().to(device), excerpts[:, 1:].contiguous().to(device)))
    return batches
