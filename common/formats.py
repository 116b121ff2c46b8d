"""What a data file is, by its content: tokens, text, or plainly something else.

What is read: a text as bytes; raw uint16 tokens, as nanoGPT writes them, whose name ends in .bin; files of
llm.c, which begin with a header of 256 int32 whose first is a date, 20240520 before uint16 tokens and
20240801 before uint32 tokens; a one-dimensional array of whole numbers, as numpy.save writes it. Source:
llm.c, dev/data/data_common.py.
"""

import codecs
from pathlib import Path

import numpy as np

from common.text import one_line

MOST_BYTES = 2**30  # of a file: what follows is not read
HEAD_BYTES = 2**16  # by which a file is recognized
LLMC_HEADER_BYTES = 1024
LLMC_TOKENS = {20240520: "<u2", 20240801: "<u4"}  # by the header's first number
LLMC_DATES = range(20240101, 20241232)  # of its other files: checkpoints, evaluations
NUMPY = b"\x93NUMPY"
PRINTED = "\t\n\r\f\v\b\x1b"  # control characters that texts have
SMALL = 3  # at most, in the upper half of a 32-bit token
UNPACK = "unpack it first"
CONVERT = "write its text to a file, or its tokens with numpy.save"
SAVE_TEXT = "save it as UTF-8"
OTHER = {  # how files begin that are plainly no text and no tokens: what they are, and what to do
    b"\x1f\x8b": ("a gzip archive", UNPACK),
    b"PK\x03\x04": ("a zip archive", UNPACK),
    b"\xfd7zXZ\x00": ("an xz archive", UNPACK),
    b"BZh": ("a bzip2 archive", UNPACK),
    b"\x28\xb5\x2f\xfd": ("a zstandard archive", UNPACK),
    b"\x04\x22\x4d\x18": ("an lz4 archive", UNPACK),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", UNPACK),
    b"Rar!\x1a\x07": ("a rar archive", UNPACK),
    b"PAR1": ("a Parquet file", CONVERT),
    b"ARROW1": ("an Arrow file", CONVERT),
    b"\xff\xff\xff\xff": ("an Arrow stream", CONVERT),
    b"ORC": ("an ORC file", CONVERT),
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file", CONVERT),
    b"SQLite format 3\x00": ("a SQLite database", CONVERT),
    b"%PDF-": ("a PDF", CONVERT),
    b"\x80\x02": ("a Python pickle", CONVERT),
    b"\x80\x04\x95": ("a Python pickle", CONVERT),
    b"\x80\x05\x95": ("a Python pickle", CONVERT),
    b"\xff\xfe": ("UTF-16 or UTF-32 text", SAVE_TEXT),
    b"\xfe\xff": ("UTF-16 text", SAVE_TEXT),
    b"\x00\x00\xfe\xff": ("UTF-32 text", SAVE_TEXT),
}
TAR_AT, TAR = 257, b"ustar"


def read_tokens(path: Path) -> np.ndarray:
    """The tokens of a file: 1-D, uint8 (bytes of a text), uint16 or uint32; of its first GiB.

    Raises OSError for a file that cannot be read, and ValueError, one line, for one that is neither text nor
    tokens.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"--data {path}: not a regular file")
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(NUMPY):
        return _numpy_array(path)
    date = int.from_bytes(head[:4], "little")
    if date in LLMC_TOKENS:
        return _numbers(path, LLMC_TOKENS[date], LLMC_HEADER_BYTES)
    is_raw = path.suffix.lower() == ".bin" and not _is_text(head)
    if path.suffix.lower() == ".npy" and not _is_text(head):
        raise ValueError(
            f"--data {path} looks like no array of NumPy, as its name says: {SAVE_TEXT}, or numpy.save it"
        )
    if what := _what_else(head, date, is_raw):
        looks_like, advice = what
        raise ValueError(f"--data {path} looks like {looks_like}: {advice}")
    return _numbers(path, "<u2" if is_raw else "u1", 0)


def _what_else(head: bytes, date: int, is_raw: bool) -> tuple[str, str] | None:
    """What a file is that is neither text nor tokens, and what to do; None where nothing speaks for that."""
    if date in LLMC_DATES:
        return f"another file of llm.c ({date})", "take its .bin of tokens"
    for begin, what in OTHER.items():
        # A text may begin with a few of these letters, and tokens with any two bytes.
        if head.startswith(begin) and not _is_text(head) and not (is_raw and len(begin) < 4):
            return what
    if head[TAR_AT:].startswith(TAR):
        return "a tar archive", UNPACK
    if is_raw and _is_32_bit(head):
        return "tokens of 32 or 64 bits", "save them with numpy.save, whose .npy is read"
    if not is_raw and head.count(0) > len(head) / 5:
        return "UTF-16 text, UTF-32 text or binary numbers", f"{SAVE_TEXT}; tokens with numpy.save"
    return None


def _is_text(head: bytes) -> bool:
    """Whether bytes are UTF-8 without control characters; the last character may be cut."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    controls = [character for character in text if ord(character) < 32 and character not in PRINTED]
    return bool(text) and not controls


def _is_32_bit(head: bytes) -> bool:
    """Whether numbers of 16 bits are the halves of larger ones: every second one is almost nothing, and most
    others are not."""
    halves = np.frombuffer(head[: len(head) // 8 * 8], "<u2")
    lower, upper = halves[::4], halves[1::2]
    return len(lower) > 64 and bool(upper.max() <= SMALL and np.mean(lower > SMALL) > 0.5)


def _numbers(path: Path, dtype: str, offset: int) -> np.ndarray:
    return np.fromfile(path, dtype, count=MOST_BYTES // np.dtype(dtype).itemsize, offset=offset)


def _numpy_array(path: Path) -> np.ndarray:
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
