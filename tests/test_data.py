import numpy as np
import pytest
import torch

from common import data


def write_llmc(path, tokens, version=1, count=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = data.LLMC_MAGIC, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())


def test_the_default_text_is_real_source_code():
    text = data.load_text(None)
    assert len(text.tokens) > 5_000_000
    assert b"import os" in text.tokens.tobytes()


def test_any_file_is_read_as_bytes(tmp_path):
    path = tmp_path / "story.txt"
    path.write_bytes("née 𝄞".encode())
    text = data.load_text(path)
    assert text.tokens.tobytes() == "née 𝄞".encode()
    assert text.name == "story.txt"


def test_a_nanogpt_bin_holds_uint16_tokens(tmp_path):
    path = tmp_path / "train.bin"
    np.array([1, 50256, 7], dtype="<u2").tofile(path)
    assert data.load_text(path).tokens.tolist() == [1, 50256, 7]


def test_an_llmc_header_is_recognized_and_left_out(tmp_path):
    path = tmp_path / "train.bin"
    write_llmc(path, [50256, 3, 2, 1])
    assert data.load_text(path).tokens.tolist() == [50256, 3, 2, 1]


@pytest.mark.parametrize(("content", "said"), [(b"", "is empty"), (b"abc", "odd number of bytes")])
def test_a_broken_bin_is_refused(tmp_path, content, said):
    path = tmp_path / "train.bin"
    path.write_bytes(content)
    with pytest.raises(data.DataError, match=said):
        data.load_text(path)


@pytest.mark.parametrize(
    ("tokens", "version", "count", "said"),
    [([1, 2], 7, None, r"llm\.c header"), ([1, 2], 1, 99, r"llm\.c header"), ([], 1, None, "is empty")],
)
def test_an_llmc_header_that_does_not_fit_is_refused(tmp_path, tokens, version, count, said):
    write_llmc(tmp_path / "train.bin", tokens, version, count)
    with pytest.raises(data.DataError, match=said):
        data.load_text(tmp_path / "train.bin")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "absent.txt", tmp_path, tmp_path / "absent.bin"):
        with pytest.raises(data.DataError, match="cannot read"):
            data.load_text(path)


def test_a_text_must_hold_one_sequence_and_its_target():
    text = data.Text(np.arange(64, dtype=np.uint8), "short")
    data.check_text(text, seq_len=63, vocab_size=64)
    with pytest.raises(data.DataError, match="need 65"):
        data.check_text(text, seq_len=64, vocab_size=64)


def test_token_ids_outside_the_vocabulary_are_refused():
    text = data.Text(np.array([0, 9] * 9, dtype=np.uint16), "ids")
    with pytest.raises(data.DataError, match="--vocab-size must be at least 10"):
        data.check_text(text, seq_len=4, vocab_size=9)


def test_a_text_of_exactly_one_sequence_can_be_drawn():
    text = data.Text(np.arange(65, dtype=np.uint8), "exact")
    assert (data.read_batches(text, data.draw_starts(text, 3, 2, 64, seed=0), 64) == np.arange(65)).all()


def test_batches_are_excerpts_and_their_successors():
    text = data.Text(np.arange(200, dtype=np.uint8), "count")
    drawn = data.read_batches(text, data.draw_starts(text, 2, 4, 16, seed=0), 16)
    (tokens, targets), *_ = data.stage_batches(drawn, torch.device("cpu"))
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous() and targets.is_contiguous()
    assert torch.equal(targets, tokens + 1)


def test_batch_k_does_not_depend_on_how_many_are_drawn():
    text = data.load_text(None)
    few, many = (data.draw_starts(text, n, 2, 32, seed=5) for n in (3, 9))
    assert (many[:3] == few).all()
    assert data.fingerprint(text, few, 32) == data.fingerprint(text, many[:3], 32)
    assert data.fingerprint(text, few, 32) != data.fingerprint(text, data.draw_starts(text, 3, 2, 32, seed=6), 32)
