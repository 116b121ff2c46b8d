"""An exception becomes a status and one line that says what to do."""

import pytest
import torch

from common import errors


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB"), "oom", "try --batch-size 8"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "oom", "try --batch-size 8"),
        (MemoryError(), "oom", "try --batch-size 8"),
        (errors.Skip("no GPU"), "skipped", "no GPU"),
        (RuntimeError("InvalidCxxCompiler: No working C++ compiler found in cpp.cxx"), "failed", "apt-get install g++"),
        (RuntimeError("fatal error: Python.h: No such file or directory"), "failed", "python3-dev"),
        (RuntimeError("TritonMissing: Cannot find a working triton installation"), "failed", "pip install triton"),
        (RuntimeError("line one\nline two"), "failed", "line one"),
    ],
)
def test_an_exception_becomes_a_row(error, status, said):
    found, reason = errors.explain(error, batch_size=9)
    assert found == status and said in reason and "\n" not in reason


def test_a_smaller_batch_is_really_smaller_and_at_1_something_else_is_named():
    said = [errors.smaller_batch(batch_size) for batch_size in (2, 8, 100)]
    assert said == [f"try --batch-size {smaller}" for smaller in (1, 4, 64)]
    assert "--seq-len" in errors.smaller_batch(1) and "--batch-size" not in errors.smaller_batch(1)
