"""The five scripts: they compute the same, train, and read as four short diffs."""

import ast
import io
import math
import re
import sys
import tokenize

import pytest
import torch
from conftest import CPU_STEPS, ROOT, SMALL, STEPS, arguments, built, load_step
from torch.utils.flop_counter import FlopCounterMode

from common import flops
from common.model import GPT, PRESETS, GPTConfig
from common.options import default_rate
from common.text import Skip

SOURCES = {step: (ROOT / f"{step}.py").read_text() for step in STEPS}


@pytest.mark.parametrize("step", STEPS)
def test_a_script_has_the_common_order_and_no_private_name_of_torch(step):
    tree = ast.parse(SOURCES[step])
    names = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    order = ["CausalSelfAttention", "MLP", "Block", "Head", "main"]
    assert names == [name for name in order if not (name == "MLP" and step == STEPS[4])]
    assert isinstance(tree.body[-1], ast.If), "the guard comes last"
    assert tree.body[0].end_lineno <= 7 and ast.get_docstring(tree).startswith(f"Step {step[0]}: ")
    tokens = tokenize.generate_tokens(io.StringIO(SOURCES[step]).readline)
    assert not [t.string for t in tokens if t.type == tokenize.NAME and re.match(r"_[a-z]", t.string)]


def test_common_names_no_step():
    names = [re.escape(step) for step in STEPS] + [r"\bstep [0-4]\b", "sdpa_kernel", r"torch\.compile\("]
    words_in = [(path, re.search("|".join(names), path.read_text())) for path in ROOT.glob("common/*.py")]
    assert not [pair for pair in words_in if pair[1]]


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
            torch.testing.assert_close(
                attention(x).double(), reference_attention(attention, x), rtol=1e-4, atol=1e-5
            )


def losses(step, **overrides):
    run = built(step, **overrides)
    return [run.train_step(*batch).item() for batch in run.batches]


def test_all_steps_follow_the_same_losses_and_mixed_precision_stays_near():
    baseline = losses(STEPS[0])
    assert baseline[-1] < baseline[0] - 0.1, "the loss falls on real text"
    for step in CPU_STEPS[1:]:
        assert losses(step) == pytest.approx(baseline, rel=1e-4), step
    for step in STEPS[1:3]:
        these = losses(step, amp_dtype=torch.bfloat16)
        assert baseline != these == pytest.approx(baseline, rel=0.02), "BF16 is in use, and near"


@pytest.mark.parametrize("step", CPU_STEPS)
def test_the_optimizer_is_the_same_fused_adamw(step):
    run = built(step, lr=0.005)
    (group,) = run.optimizer.param_groups
    arguments_of_adamw = {
        name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "fused", "amsgrad", "maximize")
    }
    expected = {"lr": 0.005, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1, "fused": True}
    assert arguments_of_adamw == expected | {"amsgrad": False, "maximize": False}
    assert group["capturable"] == (run.capture is not None), "a graph needs it"


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128, 512])
def test_a_model_of_any_width_learns_at_the_default_rate(width):
    config = GPTConfig(n_layer=2, n_head=4, n_embd=width, seq_len=64, vocab_size=256)
    these = losses(STEPS[2], config=config, steps=20, lr=default_rate(config), batch_size=4)
    assert max(these) <= 1.1 * these[0] and sum(these[-5:]) / 5 <= 0.75 * these[0], these


def logits_of(model, tokens):
    caught = []
    hook = model.head.lm_head.register_forward_hook(lambda module, inputs, output: caught.append(output))
    model(tokens, tokens)
    hook.remove()
    return caught[0]


@pytest.mark.parametrize("step", CPU_STEPS)
def test_a_changed_future_token_moves_no_earlier_logit(step):
    module = load_step(step)
    model = GPT(SMALL, module.Block, module.Head, 1337)
    tokens = torch.randint(SMALL.vocab_size, (2, SMALL.seq_len))
    changed, position = tokens.clone(), SMALL.seq_len // 2
    changed[:, position] = (changed[:, position] + 1) % SMALL.vocab_size
    before, after = logits_of(model, tokens), logits_of(model, changed)
    torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=0)
    assert (after[:, position:] != before[:, position:]).any(dim=-1).all(), "later logits must see the change"


@torch.no_grad()
def test_initial_weights_follow_gpt2_and_are_the_same_in_all_steps():
    config = GPTConfig(n_layer=8, n_head=4, n_embd=128, seq_len=64, vocab_size=512)
    models = [GPT(config, module.Block, module.Head, 1337) for module in map(load_step, CPU_STEPS)]
    other, x = (
        GPT(config, load_step(STEPS[0]).Block, load_step(STEPS[0]).Head, 7),
        5 * torch.randn(1, 64, 128),
    )
    assert all(torch.equal(models[0].blocks[0].mlp(x), model.blocks[0].mlp(x)) for model in models)
    for name, parameter in models[0].named_parameters():
        assert all(torch.equal(parameter, model.get_parameter(name)) for model in models)
        if parameter.dim() == 2:
            residual = name.endswith(("attn.proj.weight", "mlp.proj.weight"))
            expected = 0.02 / math.sqrt(2 * config.n_layer) if residual else 0.02
            assert (
                pytest.approx(expected, rel=0.05)
                == float(parameter.std())
                != float(other.get_parameter(name).std())
            )
        else:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name


def test_flops_match_torch_on_step_0_but_for_the_half_square():
    config = GPTConfig(n_layer=3, n_head=2, n_embd=48, seq_len=80, vocab_size=400)
    module = load_step(STEPS[0])
    model = GPT(config, module.Block, module.Head, seed=0)
    tokens = torch.randint(config.vocab_size, (2, config.seq_len))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    hidden_half = 6 * config.n_layer * config.seq_len * config.n_embd * tokens.numel()
    assert counter.get_total_flops() == flops.flops_per_step(config, batch_size=2) + hidden_half
    assert flops.parameters(config) == sum(p.numel() for p in model.parameters())
    xl = PRESETS["gpt3-xl"][0]
    products = flops.matrix_products(xl, tokens=128)
    assert products[128, 2048, 50304] == products[50304, 2048, 128] == 1, (
        "the head's input and weight gradient"
    )
    assert (
        sum(2 * m * n * k * count for (m, n, k), count in products.items())
        == 6 * flops.matmul_parameters(xl) * 128
    )


def test_a_transformer_engine_that_breaks_on_import_and_a_cpu_are_no_crash(tmp_path, monkeypatch):
    (package := tmp_path / "transformer_engine").mkdir()
    (package / "__init__.py").write_text("raise OSError('does not fit')\n")
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = load_step(STEPS[4])
    with pytest.raises(Skip, match="needs an NVIDIA GPU"):
        module.main(arguments(STEPS[4]))
    monkeypatch.setattr("common.hardware.compute_capability", lambda _: (9, 0))
    with pytest.raises(Skip, match="--vocab-size divisible by 16, not 50257"):
        arguments(STEPS[4], config=GPTConfig(2, 2, 32, 32, 50257)).require_fp8()
    with pytest.raises(Skip, match=r"does not fit.*transformer-engine\[pytorch\]"):
        module.te.Linear(8, 8)
