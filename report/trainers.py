"""The changes of a recommended row as settings of what people train with: Hugging Face, accelerate,
Lightning."""

from common.record import AMP, COMPILE, FP8, GRAPH, SDPA

FUSED = "a fused optimizer"  # of every row
SETTINGS = {  # of each trainer, by change
    "transformers.TrainingArguments": {
        FUSED: 'optim="adamw_torch_fused"',
        AMP: "bf16=True, tf32=True",
        COMPILE: "torch_compile=True",
    },
    "accelerate.Accelerator": {
        AMP: 'mixed_precision="bf16"',
        FP8: 'mixed_precision="fp8"',
        COMPILE: 'dynamo_plugin=TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)',
    },
    "lightning.Trainer": {AMP: 'precision="bf16-mixed"', FP8: 'precision="transformer-engine"'},
}
ELSEWHERE = {  # what is no setting of a trainer
    SDPA: 'fused attention is in the model; with Hugging Face, from_pretrained(attn_implementation="sdpa")',
    COMPILE: "TrainingArguments compiles the whole model, and Lightning what configure_model compiles",
    GRAPH: "no trainer captures the whole step as a CUDA graph",
    FP8: "TrainingArguments has no FP8",
}


def settings_of(changes: list[str], optimizer: str | None) -> list[str]:
    """A line for each trainer, and what is left. `optimizer` is the one that ran: `AdamW, fused`."""
    made = [FUSED, *changes] if (optimizer or "AdamW").startswith("AdamW") else changes
    lines = []
    for trainer, settings in SETTINGS.items():
        own = {change: settings[change] for change in made if change in settings}
        if AMP in own and FP8 in own and trainer != "transformers.TrainingArguments":
            del own[AMP]  # one setting has both
        if own:
            lines.append(f"{trainer}({', '.join(own.values())})")
    return lines + [f"But {ELSEWHERE[change]}" for change in made if change in ELSEWHERE]
