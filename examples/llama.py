"""Hugging Face's Llama, 1.3 billion weights: ./run_all.sh --model examples/llama.py

Its FP8 is Transformer Engine's whole layer. Without a GPU the model is small.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

ON_GPU = torch.cuda.is_available()
T = 4096 if ON_GPU else 64
SHAPE = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8}
if not ON_GPU:
    SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = LlamaConfig(
    **SHAPE,
    intermediate_size=SHAPE["hidden_size"] * 11 // 4,
    vocab_size=50304,
    max_position_embeddings=T,
    use_cache=False,
)


def model():
    return LlamaForCausalLM(CONFIG)


def batches():
    text = torch.tensor(list(Path(F.__file__).read_bytes()))  # a byte is a token
    while True:
        start = torch.randint(len(text) - T, ())
        tokens = text[start : start + T + 1].unsqueeze(0)
        yield tokens[:, :-1], tokens[:, 1:]


def loss(model, batch):
    tokens, targets = batch
    logits = model(tokens).logits  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def fp8(model):
    import transformer_engine.pytorch as te

    class FP8Layer(torch.nn.Module):
        """Transformer Engine's layer with the weights of a LlamaDecoderLayer, called as that one is."""

        def __init__(self, layer, angles):
            super().__init__()
            self.angles = angles  # of rotary positions
            self.layer = te.TransformerLayer(
                CONFIG.hidden_size,
                CONFIG.intermediate_size,
                CONFIG.num_attention_heads,
                num_gqa_groups=CONFIG.num_key_value_heads,
                layernorm_epsilon=CONFIG.rms_norm_eps,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                attn_input_format="bshd",
                fuse_qkv_params=False,
            )
            attention, mlp = self.layer.self_attention, self.layer.layernorm_mlp
            attention.layernorm_qkv.layer_norm_weight.data = layer.input_layernorm.weight.data
            attention.layernorm_qkv.query_weight.data = layer.self_attn.q_proj.weight.data
            attention.layernorm_qkv.key_weight.data = layer.self_attn.k_proj.weight.data
            attention.layernorm_qkv.value_weight.data = layer.self_attn.v_proj.weight.data
            attention.proj.weight.data = layer.self_attn.o_proj.weight.data
            mlp.layer_norm_weight.data = layer.post_attention_layernorm.weight.data
            mlp.fc1_weight.data = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]).data
            mlp.fc2_weight.data = layer.mlp.down_proj.weight.data

        def forward(self, x, **_):
            return self.layer(x, self_attn_mask_type="causal", rotary_pos_emb=self.angles)

    rotary = te.attention.RotaryPositionEmbedding(CONFIG.hidden_size // CONFIG.num_attention_heads)
    angles = rotary(T)
    model.model.layers = torch.nn.ModuleList(FP8Layer(layer, angles) for layer in model.model.layers)
    return te.autocast  # which makes the context of each step
