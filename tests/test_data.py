"""The text, its tokens, and the batches drawn from it."""

import numpy as np
import pytest
import torch

from common import data


def write_llmc(path, tokens, version=1, count=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = data.LLMC_MAGIC, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())


def test_text_is_the_standard_library_any_file_as_bytes_or_uint16_tokens(tmp_path):
    text = data.load_text(None)
    assert len(text.tokens) > 5_000_000 and b"import os" in text.tokens.tobytes()
    (tmp_path / "story.txt").write_bytes("née 𝄞".encode())
    text = data.load_text(tmp_path / "story.txt")
    assert text.tokens.tobytes() == "née 𝄞".encode() and text.name == "story.txt"
    np.array([1, 50256, 7], dtype="<u2").tofile(tmp_path / "train.bin")
    assert data.load_text(tmp_path / "train.bin").tokens.tolist() == [1, 50256, 7]
    write_llmc(tmp_path / "train.bin", [50256, 3, 2, 1])
    assert data.load_text(tmp_path / "train.bin").tokens.tolist() == [50256, 3, 2, 1], "llm.c's header is left out"


def test_a_file_that_is_broken_or_missing_is_refused(tmp_path):
    path = tmp_path / "train.bin"
    for content, said in ((b"", "is empty"), (b"abc", "odd number of bytes")):
        path.write_bytes(content)
        with pytest.raises(data.DataError, match=said):
            data.load_text(path)
    for tokens, version, count, said in (([1], 7, None, r"llm\.c"), ([1], 1, 99, r"llm\.c"), ([], 1, None, "is empty")):
        write_llmc(path, tokens, version, count)
        with pytest.raises(data.DataError, match=said):
            data.load_text(path)
    for path in (tmp_path / "absent.txt", tmp_path):
        with pytest.raises(data.DataError, match="cannot read"):
            data.load_text(path)


def test_a_text_must_hold_one_sequence_its_target_and_ids_of_the_vocabulary():
    text = data.Text(np.arange(65, dtype=np.uint8), "exact")
    data.check_text(text, seq_len=64, vocab_size=65)
    assert (data.read_batches(text, data.draw_starts(text, 3, 2, 64, seed=0), 64) == np.arange(65)).all()
    with pytest.raises(data.DataError, match="need 66"):
        data.check_text(text, seq_len=65, vocab_size=65)
    with pytest.raises(data.DataError, match="--vocab-size must be at least 65"):
        data.check_text(text, seq_len=4, vocab_size=64)


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


def test_the_last_twentieth_is_never_trained_on_and_is_the_same_for_every_seed():
    text = data.Text(np.arange(2000, dtype=np.uint16), "count")
    drawn = [data.read_batches(text, data.draw_starts(text, 9, 9, 64, seed), 64) for seed in range(3)]
    heldout = data.read_batches(text, data.heldout_starts(text, 64), 64)
    assert np.max(drawn) < 1900 <= heldout.min() and heldout.max() == 1999
    assert heldout.shape == (data.HELDOUT_SEQUENCES, 1, 65)
    assert max(data.draw_starts(text, 200, 9, 99, seed=0).flat) < 1900 - 99
    assert len(data.heldout_starts(text, 100)) == 0, "100 tokens hold no sequence of 100 and its target"
    assert data.trained_tokens(text, 100) == 2000
