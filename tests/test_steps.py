"""The five scripts: they compute the same, train, and read as four short diffs."""

import ast
import difflib
import io
import re
import sys
import tokenize
from types import SimpleNamespace

import pytest
import torch
from conftest import CPU_STEPS, ROOT, STEPS, built, load_step

from common.model import GPTConfig

BUDGETS = [14, 18, 8, 70]
ORDER = ["CausalSelfAttention", "MLP", "Block", "Head", "main"]


def source(step):
    return (ROOT / f"{step}.py").read_text()


def code_lines(step):
    text = source(step)
    docstring = ast.parse(text).body[0]
    return text.splitlines()[docstring.end_lineno :]


def test_there_are_five_steps():
    assert [step[:2] for step in STEPS] == ["0_", "1_", "2_", "3_", "4_"]


@pytest.mark.parametrize("index", range(4))
def test_a_diff_stays_within_its_budget(index):
    lines = difflib.unified_diff(code_lines(STEPS[index]), code_lines(STEPS[index + 1]), n=0, lineterm="")
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= BUDGETS[index]


@pytest.mark.parametrize("step", STEPS)
def test_a_script_has_the_common_order_and_length(step):
    tree = ast.parse(source(step))
    names = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    assert names == [name for name in ORDER if not (name == "MLP" and step == STEPS[4])]
    assert isinstance(tree.body[-1], ast.If), "the guard comes last"
    assert 70 <= len(source(step).splitlines()) <= (130 if step == STEPS[4] else 110)


@pytest.mark.parametrize("step", STEPS)
def test_a_docstring_says_change_why_and_how_but_no_speedup(step):
    docstring = ast.get_docstring(ast.parse(source(step)))
    assert all(word in docstring for word in ("Change:", "Why:", "Run:", "Read:"))
    assert not re.search(r"\d\s*(x\b|ms\b|%|TFLOP)", docstring), "figures live in generated tables"
    assert f"python {step}.py" in docstring


def test_common_names_no_step():
    names = [re.escape(step) for step in STEPS] + [r"\bstep [0-4]\b", "sdpa_kernel", r"torch\.compile\("]
    for path in (ROOT / "common").glob("*.py"):
        found = re.search("|".join(names), path.read_text())
        assert not found, (path.name, found)


@pytest.mark.parametrize("step", STEPS)
def test_no_private_torch_names(step):
    tokens = tokenize.generate_tokens(io.StringIO(source(step)).readline)
    assert not [t.string for t in tokens if t.type == tokenize.NAME and re.match(r"_[a-z]", t.string)]


def reference_attention(attention, x):
    """Causal attention in float64, one query at a time, from the definition."""
    B, T, C = x.shape
    H = attention.n_head
    x64 = x.double()
    qkv = x64 @ attention.qkv.weight.double().T + attention.qkv.bias.double()
    q, k, v = (t.view(B, T, H, C // H).transpose(1, 2) for t in qkv.split(C, dim=-1))
    y = torch.zeros(B, H, T, C // H, dtype=torch.float64)
    for t in range(T):
        scores = (k[:, :, : t + 1] @ q[:, :, t].unsqueeze(-1)).squeeze(-1) / (C // H) ** 0.5
        y[:, :, t] = (scores.softmax(-1).unsqueeze(-1) * v[:, :, : t + 1]).sum(-2)
    y = y.transpose(1, 2).reshape(B, T, C)
    return y @ attention.proj.weight.double().T + attention.proj.bias.double()


@pytest.mark.parametrize("step", CPU_STEPS)
@pytest.mark.parametrize("seq_len", [1, 7, 32])
def test_attention_matches_a_float64_reference(step, seq_len):
    config = GPTConfig(n_layer=1, n_head=4, n_embd=32, seq_len=32, vocab_size=16)
    attention = load_step(step).CausalSelfAttention(config)
    x = torch.randn(2, seq_len, config.n_embd)
    with torch.no_grad():
        torch.testing.assert_close(attention(x).double(), reference_attention(attention, x), rtol=1e-4, atol=1e-5)


def train(step, monkeypatch, n_steps=8, **overrides):
    run = built(step, monkeypatch, steps=n_steps, **overrides)
    return [run.train_step(*batch).item() for batch in run.batches[:n_steps]]


def test_all_steps_follow_the_same_losses(monkeypatch):
    baseline = train(STEPS[0], monkeypatch)
    assert baseline[-1] < baseline[0] - 0.1, "the loss falls on real text"
    for step in CPU_STEPS[1:]:
        losses = train(step, monkeypatch)
        assert losses[0] == pytest.approx(baseline[0], rel=1e-5), step
        assert losses == pytest.approx(baseline, rel=2e-3), step


def test_mixed_precision_follows_the_baseline(monkeypatch):
    baseline = train(STEPS[0], monkeypatch)
    for step in STEPS[1:3]:
        losses = train(step, monkeypatch, amp_dtype=torch.bfloat16)
        assert losses == pytest.approx(baseline, rel=0.02), step
        assert losses != baseline, "BF16 must really be in use"


def test_step_4_says_why_it_is_skipped_on_a_cpu(monkeypatch):
    with pytest.raises(load_step(STEPS[4]).benchmark.Skip, match="needs an NVIDIA GPU"):
        built(STEPS[4], monkeypatch)


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError", "AssertionError", "AttributeError"])
def test_a_transformer_engine_that_breaks_on_import_is_no_crash(error, tmp_path, monkeypatch):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error}('does not fit')\n")
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = load_step(STEPS[4])
    assert module.te is None and "does not fit" in str(module.te_error)
    with pytest.raises(module.benchmark.Skip, match="pip install"):
        module.main(SimpleNamespace(device=torch.device("cuda")))
