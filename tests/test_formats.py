"""What a data file is, by its content: what is read, what is refused, and that good files are not."""

import gzip
import io
import os
import random
import tarfile
import zipfile

import numpy as np
import pytest

from common import data
from common.formats import read_tokens

RANDOM = random.Random(0)
TOKENS = np.arange(3000) * 17 % 50000
LANGUAGES = (  # ten scripts, in UTF-8 and where there is one in an older encoding
    ("The quick brown fox. ", "ascii"),
    ("Über größere Maßstäbe ja! ", "latin-1"),
    ("Здравствуй, мир. ", "koi8-r"),
    ("Γειά Κόσμε, ζήτω. ", "iso8859-7"),
    ("שלום עולם. ", "iso8859-8"),
    ("مرحبا بالعالم. ", "iso8859-6"),
    ("你好世界。", "gb18030"),
    ("こんにちは世界。", "shift-jis"),
    ("안녕하세요 세계. ", "euc-kr"),
    ("नमस्ते दुनिया। ", "utf-8"),
)


def header(date, count):
    numbers = np.zeros(256, "<i4")
    numbers[:3] = date, 1, count
    return numbers.tobytes()


@pytest.mark.parametrize(
    ("name", "content", "dtype"),
    [
        ("raw.bin", TOKENS.astype("<u2").tobytes(), np.uint16),
        ("gpt2.bin", header(20240520, 3000) + TOKENS.astype("<u2").tobytes(), np.uint16),
        ("gpt2.dat", header(20240520, 3000) + TOKENS.astype("<u2").tobytes(), np.uint16),
        ("llama.bin", header(20240801, 3000) + (TOKENS * 2).astype("<u4").tobytes(), np.uint32),
    ],
)
def test_tokens_are_read(name, content, dtype, tmp_path):
    (tmp_path / name).write_bytes(content)
    tokens = read_tokens(tmp_path / name)
    assert tokens.dtype == dtype and (tokens == TOKENS * (2 if name == "llama.bin" else 1)).all()


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<i4", "<i8", ">u2"])
def test_an_array_of_numpy_is_read_as_the_smallest_type_that_holds_it(dtype, tmp_path):
    small = (TOKENS % 256).astype(dtype)
    np.save(tmp_path / "x.npy", small)
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


def archives():
    text = b"The quick brown fox. " * 500
    packed, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.txt", text)
    with tarfile.open(fileobj=tarred, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    yield "a.txt.gz", gzip.compress(text), "a gzip archive: unpack it first"
    yield "a.zip", packed.getvalue(), "a zip archive"
    yield "a.tar", tarred.getvalue(), "a tar archive"
    yield "a.parquet", b"PAR1\x15\x04" + RANDOM.randbytes(500), "a Parquet file: write its text to a file"
    yield "a.npy", RANDOM.randbytes(500), "no array of NumPy, as its name says"
    yield "a.bin", b"PAR1\x15\x04" + RANDOM.randbytes(500), "a Parquet file"
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"):
        yield "a.txt", text.decode().encode(encoding), "UTF-"
    yield "model.bin", header(20240326, 5) + RANDOM.randbytes(5000), "another file of llm.c .20240326."
    for dtype in ("<u4", "<i8"):
        yield "a.bin", TOKENS.astype(dtype).tobytes(), "tokens of 32 or 64 bits: save them with numpy.save"
        yield "a.tokens", (TOKENS % 90).astype(dtype).tobytes(), "binary numbers"


ARCHIVES = [*archives()]  # their bytes hold the time of day, so names of tests leave them out


@pytest.mark.parametrize(
    ("name", "content", "said"), ARCHIVES, ids=[f"{k} {name}" for k, (name, *_) in enumerate(ARCHIVES)]
)
def test_what_is_plainly_something_else_gets_one_line(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} looks like .*{said}") as raised:
        read_tokens(tmp_path / name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("words", "encoding"), LANGUAGES)
def test_a_text_in_any_language_is_read_as_its_bytes(words, encoding, tmp_path):
    for name in ("a.txt", "a"):
        for content in (
            (words * 9000).encode(),
            (words * 9000).encode(encoding),
            b"\xef\xbb\xbf" + words.encode(),
        ):
            (tmp_path / name).write_bytes(content)
            assert read_tokens(tmp_path / name).tobytes() == content
    (tmp_path / "named.bin").write_bytes((words * 9000).encode())
    assert read_tokens(tmp_path / "named.bin").dtype == np.uint8, "a text, whatever its name"


@pytest.mark.parametrize("vocabulary", [3, 65, 256, 50257])
def test_raw_tokens_of_any_vocabulary_are_read(vocabulary, tmp_path):
    tokens = np.random.default_rng(vocabulary).integers(vocabulary, size=40_000).astype("<u2")
    for begin in (tokens, np.array([0x8B1F, 8], "<u2"), np.array([0xFEFF], "<u2")):
        (tmp_path / "x.bin").write_bytes(begin.tobytes() + tokens.tobytes())
        assert len(read_tokens(tmp_path / "x.bin")) == len(begin) + len(tokens)


def test_the_standard_library_would_be_read_as_it_is(tmp_path):
    text = data.standard_library_text().tokens.tobytes()
    (tmp_path / "x").write_bytes(text)
    assert read_tokens(tmp_path / "x").tobytes() == text


def test_only_a_regular_file_is_data(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="not a regular file"):
            read_tokens(path)


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (100,), ",
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (%d,)}" % 2**62,
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (True,)}",
    ],
)
def test_a_damaged_header_of_numpy_is_one_line(header, tmp_path):
    path = tmp_path / "x.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(200))
    with pytest.raises(ValueError, match=r"no array that NumPy can read|holds ") as refused:
        read_tokens(path)
    assert "\n" not in str(refused.value)


def test_tokens_are_known_whatever_the_case_of_their_ending(tmp_path):
    tokens = np.arange(5000, dtype=np.uint16) * 7 % 50000
    for name in ("x.bin", "x.BIN"):
        tokens.tofile(tmp_path / name)
        assert np.array_equal(read_tokens(tmp_path / name), tokens)
