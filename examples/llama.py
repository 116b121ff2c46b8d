"""The lesson carried to a model that is not ours: Hugging Face's LlamaForCausalLM, from FP32 to FP8, line by
line.

Built from a configuration, with nothing downloaded; on a GPU 24 layers of 2,048 channels by default. All rows
begin with the same weights and train on the same batches. A CPU skips the last two. Needs: pip install
transformers.
"""

import contextlib
import gc
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import benchmark, hardware
from common.arguments import Arguments, parse_args
from common.record import Row, Run, Workload, write_json
from common.text import Skip, portable_command, run_command, say
from report.documents import as_markdown
from report.figures import derive

transformers = benchmark.import_or_skip("transformers", "transformers")
# Where cuDNN does not load, Transformer Engine would silently take attention that is not fused.
os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")
te = benchmark.import_or_skip("transformer_engine.pytorch", "transformer-engine[pytorch]")
# With a GPU, and without one.
DEFAULTS = {True: "--preset gpt3-xl --seq-len 4096 --batch-size 1", False: "--preset tiny --seq-len 256"}
CHANGES = {  # a row each, with all changes before it
    "0_fp32": "attention by hand",
    "1_amp": "BF16 by autocast, TF32",
    "2_sdpa": "fused attention",
    "3_compile": "layers and loss compiled",
    "4_graph": "the step captured as a CUDA graph",
    "5_fp8": "Transformer Engine's layer in FP8",
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


def model_of(args: Arguments, attention: str) -> torch.nn.Module:
    """A Llama of the ladder's layers, heads and channels. Two query heads, where even, share keys and
    values."""
    config = transformers.LlamaConfig(
        hidden_size=args.config.n_embd,
        intermediate_size=args.config.n_embd * 11 // 4,
        num_hidden_layers=args.config.n_layer,
        num_attention_heads=args.config.n_head,
        num_key_value_heads=args.config.n_head // (1 if args.config.n_head % 2 else 2),
        vocab_size=args.config.vocab_size,
        max_position_embeddings=args.config.seq_len,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def build(changes: list[str], args: Arguments):
    """What `main` of a script returns, with these changes. Raises Skip."""
    amp, sdpa, compiled, graph, fp8 = (name in changes for name in list(CHANGES)[1:])
    if graph and args.device.type != "cuda":
        raise Skip("CUDA graphs and FP8 need a GPU")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high" if amp else "highest")
    # Under a name of our own, sdpa gets no mask: transformers makes one while a step is captured.
    transformers.AttentionInterface.register("sdpa-alone", transformers.AttentionInterface()["sdpa"])
    with args.device:
        model = model_of(args, "sdpa-alone" if sdpa else "eager")
    if fp8:
        args.require_fp8()
        model.model.layers = torch.nn.ModuleList(
            FP8Layer(layer, model.config) for layer in model.model.layers
        )
    for layer in model.model.layers if compiled and not fp8 else ():  # Transformer Engine's is not compiled
        layer.compile()
    loss_of = torch.compile(F.cross_entropy) if compiled else F.cross_entropy
    adamw = {"lr": args.lr, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=graph, **adamw)

    def train_step(tokens, targets):
        autocast = torch.autocast(args.device.type, torch.bfloat16, enabled=amp)
        with autocast, te.autocast() if fp8 else contextlib.nullcontext():
            logits = model(tokens, use_cache=False).logits  # (B, T, V)
            loss = loss_of(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def capture(tokens, targets):
        batch, recorded = [tokens.clone(), targets.clone()], torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, stream=torch.cuda.current_stream()):
            loss = train_step(*batch)

        def replay(tokens, targets):
            batch[0].copy_(tokens)
            batch[1].copy_(targets)
            recorded.replay()
            return loss.clone()

        return replay

    return (train_step, model, optimizer, capture) if graph else (train_step, model, optimizer)


def workload(args: Arguments) -> Workload:
    """The record's workload: FLOPs by the ladder's convention, of Llama's own matrices."""
    with torch.device("meta"):
        model = model_of(args, "eager")
    # The first matrix is the embedding.
    _, *matrices = [weight.numel() for weight in model.parameters() if weight.dim() == 2]
    work, attention = args.workload(), args.config.n_layer * args.config.seq_len * args.config.n_embd
    flops = 6 * (sum(matrices) + attention) * work.tokens_per_step
    return replace(work, preset="llama", parameters=model.num_parameters(), flops_per_step=flops)


def main() -> int:
    args = parse_args(Path(__file__), __doc__, [*DEFAULTS[torch.cuda.is_available()].split(), *sys.argv[1:]])
    try:
        if args.heldout_every:
            raise Skip("--heldout-every is for the ladder's own model")
        rows, work = [], workload(args)
    except Skip as error:
        say(f"python examples/llama.py: error: {error}", sys.stderr)
        return 2
    for name, change in CHANGES.items():
        rows.append(row := Row(name))
        say(f"{name}: {change}")
        try:
            benchmark.run(partial(build, [row.step for row in rows]), args, row)
        except Exception as error:  # whatever happened, the other rows stand
            row.status, row.reason = benchmark.explain(error)
        gc.collect()
        torch.cuda.empty_cache()
    command = portable_command("python examples/llama.py", sys.argv[1:])
    record = Run(command, None, hardware.describe(args.device), work, rows)
    write_json(args.output, record)
    say(f"{as_markdown(derive(record))}\nrecord: {args.output}")
    return int(any(row.status not in ("ok", "skipped") for row in rows))


if __name__ == "__main__":
    run_command(main, "python examples/llama.py")
