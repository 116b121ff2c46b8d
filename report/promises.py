"""Whether a row ran what its name says, by the settings that were observed."""

from common.record import AMP, AS_IT_IS, COMPILE, FP8, GRAPH, SDPA, Row, Settings

TF32, NO_BF16 = "TF32", "does not multiply BF16"  # in the note of a row that common/benchmark.py measured
OWN_DOING = {  # what a model does that no row asked for
    AMP: "the model or its loss uses autocast itself",
    COMPILE: "model() returns a compiled model",
    TF32: "the file switches it on",
}
# The words of a script's name, and what each promises.
SCRIPT_WORDS = {"cublas": AMP, "sdpa": SDPA, "compile": COMPILE, "transformer_engine": FP8}


def contradiction(
    row: Row, is_of_ladder: bool, variables: dict[str, str], own: Settings | None = None
) -> str:
    """How a row's settings deny its name, in a clause with the cause where it is known; empty where they do
    not. `variables` of the environment change what runs. What a user's file does itself, `own`, may run in
    all rows.

    A step of the ladder promises what its own name says. A row of another model promises all of its changes,
    and no other.
    """
    if is_of_ladder:
        own = SCRIPT_WORDS.get(row.step.partition("_")[2])
        promised, denied = [own] if own else [], ()
    else:
        promised = row.changes
        denied = [change for change in (AMP, COMPILE, GRAPH, FP8) if change not in promised]
        denied = [change for change in denied if own is None or not own.has_run(change)]
    missing = [change for change in promised if row.settings.has_run(change) is False]
    if NO_BF16 in (row.note or "") and AMP in missing:
        missing.remove(AMP)  # which the note tells
    if missing:
        causes = [cause_of_missing(change, row, variables) for change in missing]
        return f"its name is not what ran: {' and '.join(missing)} did not run{''.join(causes)}"
    added = [change for change in denied if row.settings.has_run(change)]
    is_fp32 = row.step == "0_baseline" or (not is_of_ladder and AMP not in promised)
    is_fp32 &= row.step != AS_IT_IS
    if is_fp32 and row.settings.float32_matmul_precision not in (None, "highest"):
        added.append(TF32)
    causes = "".join(
        f" ({OWN_DOING[change]})" for change in added if not is_of_ladder and change in OWN_DOING
    )
    return f"its name is not what ran: {' and '.join(added)} ran too{causes}" if added else ""


def cause_of_missing(change: str, row: Row, variables: dict[str, str]) -> str:
    """Why a change did not run, in brackets; empty where that is not known."""
    switches = [name for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE") if name in variables]
    if change == COMPILE and switches:
        return f" ({switches[0]}={variables[switches[0]]} switches the compiler off)"
    breaks = row.symptoms.graph_breaks if row.symptoms else []
    if change == COMPILE and breaks:
        return f" ({breaks[-1]}; TORCH_LOGS=graph_breaks says why)"
    if change == SDPA and row.settings.attention_kernel:
        kernel, why = row.settings.attention_kernel, "whatever was asked"
        if kernel == "math":
            why = "perhaps because of dropout or a mask"
        return f" (attention ran as {kernel}, {why})"
    return ""
