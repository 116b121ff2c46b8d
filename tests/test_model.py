"""The model around the scripts' blocks: the same weights, no look at the future, GPT-2's initialization."""

import math

import pytest
import torch
from conftest import CPU_STEPS, SMALL, load_step

from common.model import GPT, GPTConfig


def build(step, config=SMALL, seed=1337, **options):
    module = load_step(step)
    return GPT(config, module.Block, module.Head, seed, **options)


def logits_of(model, tokens):
    caught = []
    hook = model.head.lm_head.register_forward_hook(lambda module, inputs, output: caught.append(output))
    model(tokens, tokens)
    hook.remove()
    return caught[0]


@pytest.mark.parametrize("step", CPU_STEPS)
def test_a_changed_future_token_moves_no_earlier_logit(step):
    model = build(step)
    tokens = torch.randint(SMALL.vocab_size, (2, SMALL.seq_len))
    changed, position = tokens.clone(), SMALL.seq_len // 2
    changed[:, position] = (changed[:, position] + 1) % SMALL.vocab_size
    before, after = logits_of(model, tokens), logits_of(model, changed)
    torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=0)
    assert (after[:, position:] != before[:, position:]).any(dim=-1).all(), "later logits must see the change"


def test_initial_weights_are_the_same_in_all_steps_and_a_seed_decides_them():
    reference = build(CPU_STEPS[0]).state_dict()
    for step in CPU_STEPS:
        weights = build(step).state_dict()
        assert weights.keys() == reference.keys()
        assert all(torch.equal(weight, reference[name]) for name, weight in weights.items()), step
    assert not torch.equal(build(CPU_STEPS[0], seed=7).wte.weight, reference["wte.weight"])


def test_initialization_follows_gpt2():
    config = GPTConfig(n_layer=8, n_head=4, n_embd=128, seq_len=64, vocab_size=512)
    for name, parameter in build(CPU_STEPS[0], config).named_parameters():
        if parameter.dim() == 2:
            residual = name.endswith(("attn.proj.weight", "mlp.proj.weight"))
            expected = 0.02 / math.sqrt(2 * config.n_layer) if residual else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        else:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
