"""What a step computes, moves and holds, counted from its shape."""

import json

import pytest
import torch
from conftest import ROOT, STEPS, load_step
from torch.utils.flop_counter import FlopCounterMode

from common import flops
from common.model import GPT, PRESETS, GPTConfig

CONFIG = GPTConfig(n_layer=3, n_head=2, n_embd=48, seq_len=80, vocab_size=400)


def test_flops_match_torch_on_step_0_but_for_the_half_square():
    module, config = load_step(STEPS[0]), CONFIG
    model = GPT(config, module.Block, module.Head, seed=0)
    tokens = torch.randint(config.vocab_size, (2, config.seq_len))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    hidden_half = 6 * config.n_layer * config.seq_len * config.n_embd * tokens.numel()
    assert counter.get_total_flops() == flops.flops_per_step(config, batch_size=2) + hidden_half
    assert flops.parameters(config) == sum(p.numel() for p in model.parameters())


def test_the_products_are_all_of_a_step_outside_attention():
    config = PRESETS["gpt3-xl"].config
    total = sum(2 * m * n * k * count for (m, n, k), count in flops.matrix_products(config, tokens=128).items())
    assert total == 6 * flops.matmul_parameters(config) * 128


def test_least_bytes_are_the_operands_of_every_product_and_adamw():
    config, tokens = CONFIG, 2 * 80
    C, V = config.n_embd, config.vocab_size
    products = [(C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)] * config.n_layer + [(C, V)]
    activations = sum(3 * 2 * tokens * (inputs + outputs) for inputs, outputs in products)
    assert flops.least_bytes_per_step(config, batch_size=2) == activations + 40 * flops.parameters(config)


def test_known_sizes():
    assert flops.parameters(PRESETS["gpt2"].config) == pytest.approx(124e6, rel=0.01)
    assert flops.parameters(PRESETS["gpt3-xl"].config) == pytest.approx(1.3e9, rel=0.03)


def test_the_estimate_of_memory_fits_the_recorded_peaks():
    recorded = 0
    for path in (ROOT / "docs" / "results").glob("*/*/results.json"):
        run = json.loads(path.read_text())
        shape = run["workload"]
        config = GPTConfig(*(shape[name] for name in ("n_layer", "n_head", "n_embd", "seq_len", "vocab_size")))
        for row in (row for row in run["steps"] if row["step"] == STEPS[0] and row["peak_allocated_bytes"]):
            estimate = flops.unfused_peak_bytes(config, shape["batch_size"])
            assert 0.99 <= row["peak_allocated_bytes"] / estimate < 1.03, path.parent.name
            recorded += 1
    assert recorded
