"""What does each choice inside a step give? One line of a script changed, everything else as it is.

    python -m anatomy.ablations [--only NAME ...] [--output FILE] [ARGUMENT ...]

The ARGUMENTs are those of a step (--preset gpt2 --steps 30). Each variant is the script of a step with a few
replacements, run in a process of its own on the step's benchmark; the unchanged scripts run beside them, and the table
gives the differences. A FILE that is there keeps its other variants, each with the unchanged script that ran beside it.
Predictions are arithmetic: bytes over copy bandwidth, FLOPs over the measured roof, at the shape of gpt3-6.7b-slice
on an H200 unless the line says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common.documents import PREDICTED_FOR, ablation_table
from common.record import OneLineParser, RecordError, check_writable, describe_shape, read_envelope, write_json

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 900


class VariantError(ValueError):
    """A replacement does not fit its script any more."""


@dataclass(frozen=True)
class Variant:
    """A script with `replacements` (old, new), each of which must fit.

    `kind` is `ablation` where they take away what the script has, `try` where they add what it does not.
    """

    name: str
    script: str
    predicted: str
    kind: str
    replacements: tuple[tuple[str, str], ...]

    def source(self) -> str:
        text = (ROOT / f"{self.script}.py").read_text()
        for old, new in self.replacements:
            if old not in text:
                raise VariantError(f"{self.name}: {self.script}.py has no line {old.strip()!r}")
            text = text.replace(old, new)
        return text


COMPILED_ADAMW = "**args.adamw)\n    optimizer.step = torch.compile(optimizer.step)"
FP32_RESIDUAL = ((", residual_dtype=args.amp_dtype", ""),)
FUSED_WGRAD = ", fuse_wgrad_accumulation=True"
HOOK = "        self.register_full_backward_pre_hook(Block.allocate_gradients)\n"
PRECISION = '    torch.set_float32_matmul_precision("high")  # TF32\n'
CUDNN_NORMS = "    import os\n\n    os.environ |= {f'NVTE_NORM_{way}_USE_CUDNN': '1' for way in ('FWD', 'BWD')}\n"
HEAD = "self.lm_head = te.LayerNormLinear(config.n_embd, config.vocab_size, bias=False"
LOSS = 'options={"coordinate_descent_tuning": True, "online_softmax": False}'
RECIPE = "(DelayedScaling(amax_history_len=16), None) if available"
MMPARAMS = ("import DelayedScaling", "import DelayedScaling, MMParams")  # attributes: the recipe takes no such keyword
FAST_ACCUMULATION = "    if recipe:\n        recipe.fp8_gemm_{} = MMParams(use_split_accumulator=False)\n"
TE_SDPA = (
    "        self.sdpa = te.DotProductAttention("
    'config.n_head, config.head_dim, qkv_format="bshd", attn_mask_type="causal")\n'
)
SPLIT = "    from transformer_engine.pytorch.utils import SplitAlongDim\n"
COMPILE = "torch.compile(model, fullgraph=True)"
LOSS_WITH_GRADIENT = (
    ("return F.cross_entropy(logits.flatten(0, 1), targets.flatten())", "return logits.flatten(0, 1)"),
    (
        "    def train_step(",
        f"""    differentiate = torch.func.grad_and_value(lambda x, targets: F.cross_entropy(x.float(), targets))
    differentiate = torch.compile(differentiate, {LOSS})

    def train_step(""",
    ),
    (
        "            loss = model(tokens, targets)\n        scaler.scale(loss).backward()\n",
        """            logits = model(tokens, targets)
        gradient, loss = differentiate(logits.detach(), targets.flatten())
        logits.backward(scaler.scale(gradient))
        del logits, gradient
""",
    ),
)
RUN = "    return benchmark.run(\n        train_step,"
CUDA_GRAPH = """    graph, static, calls = torch.cuda.CUDAGraph(), [], iter(range(10**9))

    def graphed_step(*batch):
        if next(calls) < args.warmup + 3:  # those that prime, and three that train
            return train_step(*batch)
        if not static:
            static.extend(tensor.clone() for tensor in batch)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                static.append(train_step(*static))
        for tensor, new in zip(static, batch):
            tensor.copy_(new)
        graph.replay()
        return static[-1]

"""

VARIANTS = (
    Variant(
        "fused AdamW without compile", "2_sdpa",
        "foreach AdamW makes about 3 passes over 40 GB where one is enough: -18 ms", "ablation",
        (("**args.adamw)", "**args.adamw, fused=True)"),),
    ),
    Variant(
        "FP32 residual stream, step 1", "1_cublas",
        "twice the bytes of adds and LayerNorm: +10 ms", "ablation", FP32_RESIDUAL,
    ),
    Variant(
        "FP32 residual stream, step 2", "2_sdpa",
        "+10 ms", "ablation", FP32_RESIDUAL,
    ),
    Variant(
        "FP32 residual stream, step 3", "3_compile",
        "about 2 bytes more per element in 12 fused kernels, forward and backward: +3 ms", "ablation", FP32_RESIDUAL,
    ),
    Variant(
        "compile without its optimizer", "3_compile",
        "foreach AdamW takes 30 ms where 40 GB at 4.25 TB/s take 9.4: +20 ms", "ablation",
        ((COMPILED_ADAMW, "**args.adamw)"),),
    ),
    Variant(
        "fused AdamW, step 3", "3_compile",
        "it reaches 3.4 of 4.25 TB/s: +2.3 ms", "ablation", ((COMPILED_ADAMW, "**args.adamw, fused=True)"),),
    ),
    Variant(
        "CUDA graphs, step 3", "3_compile",
        "0.7 ms of gaps: -0.5 ms; and the allocator no longer sees the memory", "try",
        ((COMPILE, 'torch.compile(model, fullgraph=True, mode="reduce-overhead")'),),
    ),
    Variant(
        "loss without online softmax, step 3", "3_compile",
        "-0.2 ms, gpt2 -0.5 ms", "try",
        ((COMPILE, 'torch.compile(model, fullgraph=True, options={"online_softmax": False})'),),
    ),
    Variant(
        "loss and kernels tuned, step 3", "3_compile",
        "pointwise kernels nearer to copy bandwidth: -1 ms, gpt2 -1.5 ms; a minute more of compilation", "try",
        ((COMPILE, f"torch.compile(model, fullgraph=True, {LOSS})"),),
    ),
    Variant(
        "loss and its gradient in one kernel, step 3", "3_compile",
        "logits read once from DRAM, not three times: -0.8 ms, gpt2 -1.6 ms", "try", LOSS_WITH_GRADIENT,
    ),
    Variant(
        "BF16 head", "4_transformer_engine",
        "10 TFLOP x 3 at 680 instead of 1290 TFLOP/s, less the cast of its gradient: +13 ms", "ablation",
        (("logits = self.lm_head(x)", "with te.autocast(enabled=False):\n            logits = self.lm_head(x)"),),
    ),
    Variant(
        "BF16 instead of FP8", "4_transformer_engine",
        "matrix products 206 instead of 100 ms, no casts: +95 ms", "ablation",
        ((RECIPE, "(None, None) if available"),),
    ),
    Variant(
        "weight gradients cast from BF16", "4_transformer_engine",
        "1.2 G weights read as 2 and written as 4 bytes more: +1.7 ms", "ablation", ((FUSED_WGRAD, ""), (HOOK, "")),
    ),
    Variant(
        "head's weight gradient in FP32 too", "4_transformer_engine",
        "-0.4 ms, but 0.4 GiB more at the peak, which lies there", "try",
        (
            (HEAD, HEAD + FUSED_WGRAD), ("        self.loss =", HOOK + "        self.loss ="),
            ("self.lm_head(x)", "self.lm_head(x, is_first_microbatch=True)"),
        ),
    ),
    Variant(
        "no split accumulator for input gradients", "4_transformer_engine",
        "10 % of the input gradients' 32 ms: -3 ms; fewer bits in their sums", "try",
        (MMPARAMS, (PRECISION, FAST_ACCUMULATION.format("dgrad") + PRECISION)),
    ),
    Variant(
        "no split accumulator for weight gradients", "4_transformer_engine",
        "-3 ms; sums over 16 384 tokens lose digits", "try",
        (MMPARAMS, (PRECISION, FAST_ACCUMULATION.format("wgrad") + PRECISION)),
    ),
    Variant(
        "fused AdamW, step 4", "4_transformer_engine",
        "+2.3 ms", "ablation", ((COMPILED_ADAMW, "**args.adamw, fused=True)"),),
    ),
    Variant(
        "loss as the compiler makes it", "4_transformer_engine",
        "a second pass from cache instead of an online softmax: +0.5 ms, gpt2 +1 ms", "ablation",
        ((", " + LOSS, ""),),
    ),
    Variant(
        "GELU apart from its product", "4_transformer_engine",
        "2.5 ms of kernels, gpt2 1.7 ms, less what the product's epilogue takes: +1.5 ms, gpt2 +1 ms", "ablation",
        (("gemm_gelu_fusion = torch.cuda.get_device_capability() == (9, 0)", "gemm_gelu_fusion = False"),),
    ),
    Variant(
        "LayerNorm by cuDNN", "4_transformer_engine",
        "Transformer Engine's forward kernel reads and writes at 1.7 of 4.25 TB/s: -0.8 ms", "try",
        ((PRECISION, PRECISION + CUDNN_NORMS),),
    ),
    Variant(
        "current scaling", "4_transformer_engine",
        "one more pass over every tensor to find its largest value: +8 ms", "ablation",
        (
            ("import DelayedScaling", "import Float8CurrentScaling"),
            (RECIPE, "(Float8CurrentScaling(), None) if available"),
        ),
    ),
    Variant(
        "Transformer Engine's attention", "4_transformer_engine",
        "the same cuDNN kernels, but no concatenation of the gradients of q, k and v: -1.2 ms", "try",
        (
            ("    import transformer_engine", SPLIT + "    import transformer_engine"),
            ("        self.proj = te", TE_SDPA + "        self.proj = te"),
            ("self.qkv(x, is_first_microbatch=True).split(C, dim=-1)",
             "SplitAlongDim.apply(self.qkv(x, is_first_microbatch=True), -1, [C, C, C])"),
            (".transpose(1, 2) for t in", " for t in"), ("y.transpose(1, 2).reshape(B, T, C)", "y"),
            ("y = F.scaled_dot_product_attention(q, k, v, is_causal=True)", "y = self.sdpa(q, k, v)"),
        ),
    ),
    Variant(
        "whole step as one CUDA graph", "4_transformer_engine",
        "0.8 ms of gaps between kernels, gpt2 1.3 ms: as much less", "try",
        (
            ("**args.adamw)", "**args.adamw, capturable=True)"),
            (RUN, CUDA_GRAPH + RUN.replace("train_step", "graphed_step")),
        ),
    ),
)  # fmt: skip


def run_script(name: str, text: str, arguments: list[str], folder: Path) -> dict:
    """The record of one script text: its step record, or one that says how it ended."""
    script, output = folder / f"{name}.py", folder / "record.json"
    script.write_text(text)
    output.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(script), *arguments, "--output", str(output)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode == 2:
            raise ValueError(done.stderr.strip().splitlines()[-1].partition("error: ")[2])
        return read_envelope(output)
    except subprocess.TimeoutExpired:
        raise RecordError(f"took longer than {LIMIT_S} s") from None
    except RecordError:  # the process left no record: what it said last is the reason
        killed = f"killed by signal {-done.returncode} (9 is often a lack of memory)"
        said = done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode} and no record"]
        raise RecordError(killed if done.returncode < 0 else said[-1]) from None


def recorded(output: Path | None) -> dict:
    """{environment, workload, variants} of an earlier call, or empty. Raises ValueError for what is none."""
    if output is None or not output.exists():
        return {"environment": None, "workload": None, "variants": []}
    try:
        found = json.loads(output.read_text())
        # What is done with it after the measurement must work before it.
        ablation_table(found["variants"])
        merged(found["variants"], [])
        _model_and_batch(found["workload"] or {})
        return {key: found[key] for key in ("environment", "workload", "variants")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"--output {output} is there and holds no ablations ({type(error).__name__})") from None


def _model_and_batch(workload: dict) -> dict:
    """What the variants of one file share; steps and batches each shares with the baseline beside it."""
    return {key: value for key, value in workload.items() if key not in ("steps", "data")}


def merged(old: list[dict], new: list[dict]) -> list[dict]:
    """The variants of two calls, in the order of VARIANTS; of the same name, the new one."""
    by_name = {variant["name"]: variant for variant in [*old, *new]}
    order = [variant.name for variant in VARIANTS]
    return sorted(
        by_name.values(), key=lambda variant: order.index(variant["name"]) if variant["name"] in order else -1
    )


def run_variants(variants: list[Variant], arguments: list[str], output: Path | None) -> int:
    """Run each variant and, once, the script it changes; writes {environment, workload, variants}.

    Returns the command's exit code: 1 where one failed. Raises ValueError where `output` holds something else, or
    ablations of another workload or machine.
    """
    before, baselines, rows = recorded(output), {}, []
    found = before | {"variants": rows}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def measure(name: str, text: str) -> dict:
            try:
                envelope = run_script(name, text, arguments, folder)
            except RecordError as error:
                return {"status": "failed", "reason": str(error), "median_ms": None, "peak_bytes": None, "loss": None}
            found["environment"], found["workload"] = envelope["environment"], envelope["workload"]
            if before["workload"] and _model_and_batch(before["workload"]) != _model_and_batch(found["workload"]):
                raise ValueError(f"--output {output} holds ablations of another workload")
            if before["environment"] and before["environment"].get("device") != found["environment"]["device"]:
                raise ValueError(f"--output {output} holds ablations of another machine")
            (step,) = envelope["steps"]
            kept = {key: step[key] for key in ("status", "reason", "loss", "timing")}
            kept |= {key: envelope["environment"].get(key) for key in ("commit", "gpu_uuid")}
            kept["started_at"] = envelope["started_at"]
            return kept | {"median_ms": step["timing"]["median_ms"], "peak_bytes": step["peak_allocated_bytes"]}

        for variant in variants:
            if variant.script not in baselines:
                baselines[variant.script] = measure(variant.script, (ROOT / f"{variant.script}.py").read_text())
            described = {key: getattr(variant, key) for key in ("name", "script", "predicted", "kind")}
            rows.append(described | measure("variant", variant.source()) | {"baseline": baselines[variant.script]})
            print(f"{variant.script}, {variant.name}: {rows[-1]['reason'] or 'ok'}", flush=True)
            if output:  # after each: what is measured is kept
                write_json(output, found | {"variants": merged(before["variants"], rows)})
    if found["workload"]:
        print(f"\n{found['environment']['device']}, {describe_shape(found['workload'])}; {PREDICTED_FOR}\n")
    print(ablation_table(rows))
    return int(any(each["status"] == "failed" for each in [*rows, *baselines.values()]))


def main() -> None:
    width = max(len(variant.name) for variant in VARIANTS)
    parser = OneLineParser(
        prog="python -m anatomy.ablations",
        usage="%(prog)s [-h] [--only NAME ...] [--output FILE] [ARGUMENT ...]",
        description=__doc__,
        epilog="variants:\n" + "\n".join(f"  {v.name:{width}}  {v.script}, {v.kind}" for v in VARIANTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants whose name or script contains one of these")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    given, arguments = parser.parse_known_args()
    try:
        if given.output:
            check_writable(given.output, "variants")
    except ValueError as error:
        parser.error(str(error))
    wanted = given.only or [""]
    variants = [v for v in VARIANTS if any(word in v.name or word in v.script for word in wanted)]
    if not variants:
        parser.error(f"no variant is named like {', '.join(wanted)}")
    try:
        sys.exit(run_variants(variants, arguments, given.output))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted; what was finished is kept\n")


if __name__ == "__main__":
    main()
