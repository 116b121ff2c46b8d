"""What a data file is, by its content: what is read, what is refused, and that good files are not."""

import gzip
import random

import numpy as np
import pytest

from common.data import load_text, read_tokens

RANDOM = random.Random(0)
ZIPF = np.random.default_rng(0).zipf(1.3, 40_000)
TOKENS = ZIPF[ZIPF < 50_000][:30_000]
TEXT = "The quick brown fox. Здравствуй, мир. 你好世界。 مرحبا بالعالم. नमस्ते दुनिया। " * 100


def header(date, count):
    numbers = np.zeros(256, "<i4")
    numbers[:3] = date, 1, count
    return numbers.tobytes()


@pytest.mark.parametrize(
    ("name", "content", "tokens", "dtype"),
    [
        ("raw.bin", TOKENS.astype("<u2").tobytes(), TOKENS, np.uint16),
        ("few.bin", TOKENS[:400].astype("<u2").tobytes(), TOKENS[:400], np.uint16),
        ("characters.bin", (TOKENS % 65).astype("<u2").tobytes(), TOKENS % 65, np.uint16),
        ("gpt2.bin", header(20240520, 3) + TOKENS.astype("<u2").tobytes(), TOKENS, np.uint16),
        ("gpt2.dat", header(20240520, 3) + TOKENS.astype("<u2").tobytes(), TOKENS, np.uint16),
        ("llama.bin", header(20240801, 3) + (TOKENS * 2).astype("<u4").tobytes(), TOKENS * 2, np.uint32),
        ("a.bin", TEXT.encode(), np.frombuffer(TEXT.encode(), np.uint8), np.uint8),
        ("a book", TEXT.encode()[:-1], np.frombuffer(TEXT.encode()[:-1], np.uint8), np.uint8),
    ],
)
def test_text_and_tokens_are_read(name, content, tokens, dtype, tmp_path):
    (tmp_path / name).write_bytes(content)
    read = read_tokens(tmp_path / name)
    assert read.dtype == dtype and (read == tokens).all()


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<i4", "<i8", ">u2"])
def test_an_array_of_numpy_is_read_as_the_smallest_type_that_holds_it(dtype, tmp_path):
    np.save(tmp_path / "x.npy", (TOKENS % 256).astype(dtype))
    tokens = read_tokens(tmp_path / "x.npy")
    assert tokens.dtype == np.uint16 and (tokens == TOKENS % 256).all()
    np.save(tmp_path / "x.npy", TOKENS * 2)
    assert read_tokens(tmp_path / "x.npy").dtype == np.uint32


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((2, 3), int), "int64 of 2 dimensions: give whole numbers of one dimension"),
        (np.zeros(3), "float64 of 1 dimensions"),
        (np.array([-1, 3]), "no token ids"),
        (np.array([2**40]), "no token ids"),
    ],
)
def test_other_arrays_are_refused(array, said, tmp_path):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ValueError, match=said):
        read_tokens(tmp_path / "x.npy")
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:70])
    with pytest.raises(ValueError, match="no array that NumPy can read"):
        read_tokens(tmp_path / "x.npy")


RAW = TOKENS.astype("<u2").tobytes()
OTHERS = {
    "an archive": ("a.txt.gz", gzip.compress(TEXT.encode() * 9)),
    "an archive as .bin": ("a.bin", gzip.compress(RANDOM.randbytes(9000))),
    "a zip of few bytes": ("a.bin", b"PK\x03\x04" + RANDOM.randbytes(500)),
    "latin-1": ("a.txt", "Über größere Maßstäbe. ".encode("latin-1") * 90),
    "utf-16": ("a.txt", TEXT.encode("utf-16")),
    "tokens without .bin": ("train.ds", RAW),
    "tokens of 32 bits": ("a.bin", TOKENS.astype("<u4").tobytes()),
    "tokens of 64 bits": ("a.bin", TOKENS.astype("<i8").tobytes()),
    "tokens of 8 bits": ("a.bin", (TOKENS % 200).astype("u1").tobytes()),
    "a header before tokens": ("a.bin", b"LITPKDS\x00\x01\x00\x00\x00" + RAW),
    "a header before tokens of 32 bits": ("a.bin", b"\x01\x05LI\x00\x09" + TOKENS.astype("<u4").tobytes()),
    "another file of llm.c": ("model.bin", header(20240326, 5) + RANDOM.randbytes(5000)),
    "a damaged .npy": ("a.npy", RANDOM.randbytes(500)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_neither_is_refused_with_what_is_accepted(kind, tmp_path):
    name, content = OTHERS[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="neither text nor tokens: give a text in UTF-8") as raised:
        read_tokens(tmp_path / name)
    assert "\n" not in str(raised.value)


def test_a_folder_and_a_short_text_are_one_line(tmp_path):
    with pytest.raises(ValueError, match="not a regular file"):
        read_tokens(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="empty has 0 tokens"):
        load_text(tmp_path / "empty", 8, 256)
