"""Packages that a CPU cannot run, played by plain PyTorch: what scripts call, with parameters in the same
order."""

import contextlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
import torch.nn as nn
import torch.nn.functional as F


class LayerNormLinear(nn.Module):
    def __init__(self, inputs, outputs, bias=True):
        super().__init__()
        self.layer_norm_weight, self.layer_norm_bias = (
            nn.Parameter(torch.ones(inputs)),
            nn.Parameter(torch.zeros(inputs)),
        )
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x):
        x = F.layer_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.layer_norm_bias)
        return F.linear(x, self.weight, self.bias)


class LayerNormMLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.layer_norm_weight, self.layer_norm_bias = (
            nn.Parameter(torch.ones(width)),
            nn.Parameter(torch.zeros(width)),
        )
        self.fc1_weight, self.fc1_bias = (
            nn.Parameter(torch.empty(hidden, width)),
            nn.Parameter(torch.zeros(hidden)),
        )
        self.fc2_weight, self.fc2_bias = (
            nn.Parameter(torch.empty(width, hidden)),
            nn.Parameter(torch.zeros(width)),
        )

    def forward(self, x):
        x = F.layer_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.layer_norm_bias)
        x = F.gelu(F.linear(x, self.fc1_weight, self.fc1_bias), approximate="tanh")
        return F.linear(x, self.fc2_weight, self.fc2_bias)


class TransformerLayer(nn.Module):
    def __init__(
        self, width, hidden, heads, hidden_dropout, attention_dropout, self_attn_mask_type, **others
    ):
        super().__init__()
        assert hidden_dropout == attention_dropout == 0.0 and self_attn_mask_type == "causal"
        assert others == {
            "attn_input_format": "bshd",
            "fuse_qkv_params": True,
            "qkv_weight_interleaved": False,
        }
        self.heads, self.qkv = heads, LayerNormLinear(width, 3 * width)
        self.proj, self.mlp = nn.Linear(width, width), LayerNormMLP(width, hidden)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.qkv(x).split(C, dim=-1)
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(x)


ENTERED = []  # a mark for each step under te.autocast


@contextlib.contextmanager
def autocast():
    ENTERED.append("autocast")
    yield


class NanoGPTConfig:
    def __init__(self, block_size, vocab_size, n_layer, n_head, n_embd, dropout, bias):
        assert dropout == 0.0 and bias and n_head and n_layer
        self.vocab_size, self.n_embd = vocab_size, n_embd


class NanoGPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte, self.lm_head = (
            nn.Embedding(config.vocab_size, config.n_embd),
            nn.Linear(config.n_embd, config.vocab_size),
        )

    def forward(self, tokens, targets):
        logits = self.lm_head(self.wte(tokens))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Float8LinearConfig:
    @staticmethod
    def from_recipe_name(name):
        assert name == "tensorwise"
        return name


class Float8Linear(nn.Linear):
    pass


def convert_to_float8_training(module, config="tensorwise", module_filter_fn=lambda part, name: True):
    """Inside `module` in place, as torchao does."""
    assert config == "tensorwise"
    for name, part in module.named_modules():
        if name and type(part) is nn.Linear and module_filter_fn(part, name):
            part.__class__ = Float8Linear
    return module


def install(monkeypatch) -> None:
    """Let scripts import these in place of Transformer Engine, nanoGPT and torchao, on a CPU that multiplies
    FP8."""
    modules = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {
            "Linear": nn.Linear,
            "LayerNormLinear": LayerNormLinear,
            "LayerNormMLP": LayerNormMLP,
            "TransformerLayer": TransformerLayer,
            "autocast": autocast,
        },
        "model": {"GPT": NanoGPT, "GPTConfig": NanoGPTConfig, "__file__": __file__},
        "torchao": {},
        "torchao.float8": {
            "Float8LinearConfig": Float8LinearConfig,
            "convert_to_float8_training": convert_to_float8_training,
        },
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("common.hardware.compute_capability", lambda device: (9, 0))
