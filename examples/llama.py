"""The lesson carried to a model that is not ours: Hugging Face's LlamaForCausalLM, from FP32 to FP8, line by line.

    python examples/llama.py [--batch-size N] [--seq-len N] [--steps N] [--output FILE]

The model is built from a configuration, with nothing downloaded: 1.3 B parameters, RMSNorm, rotary positions, grouped
heads, SwiGLU. Each row adds one change to the row before. All rows begin with the same weights and train on the same
batches. The last row puts Transformer Engine's whole layer in the place of Llama's, as its tutorial on Llama 2 and 3
does. On a CPU the model is tiny, and the last two rows are skipped. Needs: pip install transformers.
"""

import contextlib
import gc
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import data, hardware, timing
from common.benchmark import explain, optional
from common.cuda_graph import CapturedStep
from common.record import write_json
from common.text import OneLineParser, Skip, aligned, positive_int, progress, run_command, say

transformers = optional("transformers", "transformers")
os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")  # Transformer Engine would silently take it where cuDNN does not load
te = optional("transformer_engine.pytorch", "transformer-engine[pytorch]")
SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "vocab_size": 32000}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}
TINY = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "vocab_size": 256}
WARMUP, LR = 3, {"cuda": 5e-6, "cpu": 1e-3}  # the ladder's rule for the rate, at these shapes
COLUMNS = ("ms", "tokens/s", "x before", "x first", "GiB", "loss")
CHANGES = {  # a row each, with all changes before it
    "FP32, attention by hand": None,
    "BF16 by autocast, TF32": "amp",
    "fused attention": "sdpa",
    "compiled layers and loss, fused AdamW": "compile",
    "captured as a CUDA graph": "graph",
    "FP8 by Transformer Engine's layer": "fp8",
}


class FP8Layer(torch.nn.Module):
    """Transformer Engine's layer with the weights of a LlamaDecoderLayer, called as that one is."""

    def __init__(self, layer, config):
        super().__init__()
        self.layer = te.TransformerLayer(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            num_gqa_groups=config.num_key_value_heads,
            layernorm_epsilon=config.rms_norm_eps,
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attn_input_format="bshd",
            fuse_qkv_params=False,
            device=next(layer.parameters()).device,
        )
        theirs, attention, mlp = self.layer.self_attention, layer.self_attn, layer.mlp
        ours = {
            theirs.layernorm_qkv.layer_norm_weight: layer.input_layernorm.weight,
            theirs.layernorm_qkv.query_weight: attention.q_proj.weight,
            theirs.layernorm_qkv.key_weight: attention.k_proj.weight,
            theirs.layernorm_qkv.value_weight: attention.v_proj.weight,
            theirs.proj.weight: attention.o_proj.weight,
            self.layer.layernorm_mlp.layer_norm_weight: layer.post_attention_layernorm.weight,
            self.layer.layernorm_mlp.fc1_weight: torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            self.layer.layernorm_mlp.fc2_weight: mlp.down_proj.weight,
        }
        with torch.no_grad():
            for parameter, value in ours.items():
                parameter.copy_(value)
        rotary = te.attention.RotaryPositionEmbedding(config.hidden_size // config.num_attention_heads)
        self.register_buffer("angles", rotary(config.max_position_embeddings), persistent=False)

    def forward(self, x, **_):
        return self.layer(x, self_attn_mask_type="causal", rotary_pos_emb=self.angles)


def build(changes: set, options, device: torch.device):
    """`train_step(tokens, targets)`, each (B, T) int64, of the model with these changes. Raises Skip."""
    if "fp8" in changes and hardware.compute_capability(device) < hardware.FP8_CAPABILITY:
        raise Skip("FP8 needs an NVIDIA GPU of the generation Ada, Hopper or newer")
    torch.manual_seed(1337)
    torch.set_float32_matmul_precision("high" if "amp" in changes else "highest")
    shape = (SHAPE if device.type == "cuda" else TINY) | HEADS
    config = transformers.LlamaConfig(**shape, max_position_embeddings=options.seq_len, use_cache=False)
    # Under a name of our own, sdpa gets no mask: transformers makes one while a step is captured.
    transformers.AttentionInterface.register("sdpa-alone", transformers.AttentionInterface()["sdpa"])
    attention = "sdpa-alone" if "sdpa" in changes else "eager"
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    loss_of = F.cross_entropy
    if "fp8" in changes:
        model.model.layers = torch.nn.ModuleList(FP8Layer(layer, config) for layer in model.model.layers)
    if "compile" in changes:
        loss_of = torch.compile(loss_of)
        for layer in model.model.layers if "fp8" not in changes else ():  # Transformer Engine's is not compiled
            layer.compile()
    if "graph" in changes and device.type != "cuda":
        raise Skip("only a GPU has CUDA graphs")
    captured, fused = "graph" in changes, {"fused": True} if "compile" in changes else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR[device.type], eps=1e-5, capturable=captured, **fused)

    def train_step(tokens, targets):
        fp8 = te.autocast() if "fp8" in changes else contextlib.nullcontext()
        with torch.autocast(device.type, torch.bfloat16, enabled="amp" in changes), fp8:
            logits = model(tokens, use_cache=False).logits  # (B, T, V)
            loss = loss_of(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return CapturedStep(train_step, optimizer, None) if captured else train_step


def run(name: str, changes: set, options, device: torch.device, batches: list) -> dict:
    """Train with these changes: times of the steps after WARMUP in ms, peak memory in bytes, losses in nats."""
    on_gpu = device.type == "cuda"
    train_step = build(changes, options, device)
    steps = timing.Steps(train_step, batches)
    for _ in steps.run(WARMUP, f"{name}: warm-up"):
        torch.get_device_module(device).synchronize()
    if isinstance(train_step, CapturedStep):
        train_step.record(*batches[0])
    ms = steps.timed(options.steps, f"{name}: timed", device)[0]
    progress("")
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    return {"step_ms": ms, "peak_bytes": peak, "loss": [loss.item() for loss in steps.losses]}


def cells(rows: list[dict], tokens: int) -> Iterator[dict[str, str]]:
    """A line a row; a row without a time has its status."""
    first = before = None
    for row in rows:
        values = [row["status"], *"-----"]
        if row["step_ms"]:
            ms, peak = statistics.median(row["step_ms"]), row["peak_bytes"]
            first, before = first or ms, before or ms
            values = [f"{ms:,.1f}", f"{tokens / ms * 1e3:,.0f}", f"{before / ms:.2f}", f"{first / ms:.2f}"]
            values += [f"{peak / 2**30:.1f}" if peak else "-", f"{row['loss'][-1]:.2f}"]
            before = ms
        yield {"": row["change"]} | dict(zip(COLUMNS, values, strict=True))


def main() -> int:
    parser = OneLineParser(prog="python examples/llama.py", description=__doc__)
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the rows, as JSON")
    device = hardware.resolve_device("auto")
    for name, default in (("--batch-size", 1), ("--seq-len", 4096 if device.type == "cuda" else 256), ("--steps", 20)):
        parser.add_argument(name, type=positive_int, default=default, metavar="N", help=f"default: {default}")
    options = parser.parse_args()
    if options.output and options.output.exists():
        parser.error(f"--output {options.output} exists: it stays as it is")
    text = data.load_text(None, options.seq_len, 256)
    starts = data.draw_starts(text, WARMUP + options.steps, options.batch_size, options.seq_len, seed=1337)
    batches, rows, changes = data.stage_batches(text, starts, options.seq_len, device), [], set()
    for name, change in CHANGES.items():
        changes = changes | {change}
        row = {"change": name, "status": "ok", "reason": None, "step_ms": [], "peak_bytes": None, "loss": []}
        try:
            row |= run(name, changes, options, device, batches)
        except Exception as error:  # whatever happened, the other rows stand
            row["status"], row["reason"] = explain(error)
            say(f"{name}: {row['status']}: {row['reason']}")
        rows.append(row)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    say(aligned(list(cells(rows, options.batch_size * options.seq_len))))
    if options.output:
        made = {"options": vars(options) | {"output": None}, "environment": hardware.describe(device), "rows": rows}
        write_json(options.output, made)
    return int(any(row["status"] not in ("ok", "skipped") for row in rows))


if __name__ == "__main__":
    run_command(main, "python examples/llama.py")
