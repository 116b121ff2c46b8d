"""The five scripts: they compute the same, train, and read as four short diffs."""

import ast
import difflib
import io
import re
import sys
import tokenize

import pytest
import torch
from conftest import COMPILED, CPU_STEPS, ROOT, STEPS, arguments, built, load_step, trace_only

from common import parallel
from common.errors import Skip
from common.model import GPTConfig

BUDGETS = [15, 17, 8, 46]
SOURCES = {step: (ROOT / f"{step}.py").read_text() for step in STEPS}


def code_lines(step):
    return SOURCES[step].splitlines()[ast.parse(SOURCES[step]).body[0].end_lineno :]


def test_five_steps_differ_by_four_diffs_within_their_budgets():
    assert [step[:2] for step in STEPS] == ["0_", "1_", "2_", "3_", "4_"]
    for k, budget in enumerate(BUDGETS):
        lines = difflib.unified_diff(code_lines(STEPS[k]), code_lines(STEPS[k + 1]), n=0, lineterm="")
        changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        assert 0 < len(changed) <= budget, STEPS[k + 1]


@pytest.mark.parametrize("step", STEPS)
def test_a_script_has_the_common_order_length_and_docstring_and_no_private_name_of_torch(step):
    tree, lines = ast.parse(SOURCES[step]), SOURCES[step].splitlines()
    names = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    order = ["CausalSelfAttention", "MLP", "Block", "Head", "main"]
    assert names == [name for name in order if not (name == "MLP" and step == STEPS[4])]
    assert isinstance(tree.body[-1], ast.If), "the guard comes last"
    assert 80 <= len(lines) <= 112 and max(map(len, lines)) <= 95
    tokens = tokenize.generate_tokens(io.StringIO(SOURCES[step]).readline)
    docstring = ast.get_docstring(tree)
    assert all(word in docstring for word in ("Change:", "Why:", "Run:", "Read:", f"python {step}.py"))
    assert not re.search(r"\d\s*(x\b|ms\b|%|TFLOP)", docstring), "figures live in generated tables"
    assert not [t.string for t in tokens if t.type == tokenize.NAME and re.match(r"_[a-z]", t.string)]


def test_common_names_no_step():
    names = [re.escape(step) for step in STEPS] + [r"\bstep [0-4]\b", "sdpa_kernel", r"torch\.compile\("]
    for path in set((ROOT / "common").glob("*.py")) - {ROOT / "common" / "passes.py"}:  # it measures the machine
        found = re.search("|".join(names), path.read_text())
        assert not found, (path.name, found)


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
def test_attention_matches_a_float64_reference(step):
    config = GPTConfig(n_layer=1, n_head=4, n_embd=32, seq_len=32, vocab_size=16)
    attention = load_step(step).CausalSelfAttention(config)
    for seq_len in (1, 7, 32):
        x = torch.randn(2, seq_len, config.n_embd)
        with torch.no_grad():
            torch.testing.assert_close(attention(x).double(), reference_attention(attention, x), rtol=1e-4, atol=1e-5)


def train(step, monkeypatch, **overrides):
    run = built(step, monkeypatch, config=COMPILED, steps=8, **overrides)
    return [run.train_step(*batch).item() for batch in run.batches[:8]]


def test_all_steps_follow_the_same_losses_and_mixed_precision_stays_near(monkeypatch):
    baseline = train(STEPS[0], monkeypatch)
    assert baseline[-1] < baseline[0] - 0.1, "the loss falls on real text"
    for step in CPU_STEPS[1:]:
        losses = train(step, monkeypatch)
        assert losses[0] == pytest.approx(baseline[0], rel=1e-5), step
        assert losses == pytest.approx(baseline, rel=2e-3), step
    for step in STEPS[1:3]:
        losses = train(step, monkeypatch, amp_dtype=torch.bfloat16)
        assert losses == pytest.approx(baseline, rel=0.02), step
        assert losses != baseline, "BF16 must really be in use"


@pytest.mark.parametrize("step", CPU_STEPS)
def test_micro_batches_and_recomputed_blocks_train_as_one_batch(step, monkeypatch):
    trace_only(monkeypatch)
    losses, weights = [], []
    for choices in ({}, {"accumulate": 2, "checkpoint": True}):
        run = built(step, monkeypatch, config=COMPILED, steps=3, batch_size=4, **choices)
        assert parallel.is_checkpointed(run.model) is bool(choices)
        losses.append([run.train_step(*batch).item() for batch in run.batches[:3]])
        weights.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-5)


def test_a_transformer_engine_that_breaks_on_import_and_a_cpu_are_no_crash(tmp_path, monkeypatch):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('does not fit')\n")
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = load_step(STEPS[4])
    with pytest.raises(Skip, match="needs an NVIDIA GPU"):
        module.main(arguments(STEPS[4]))
    with pytest.raises(Skip, match=r"does not fit.*transformer-engine\[pytorch\]"):
        module.main(arguments(STEPS[4], device="cuda", amp_dtype=torch.bfloat16))
