"""Experiments about graphs, compilation, techniques and input: what holds by arithmetic or semantics, never a time."""

from unittest.mock import Mock

import torch
from conftest import quick

from anatomy import graph_breaks, technique_forms, techniques


def test_node_counts_do_not_change_with_batch_and_length_and_only_fused_has_its_node():
    result = quick("autograd", "--dmodel", "32", "--nhead", "2", "--seq", "16", "--picture")
    hand, fused, compiled = (result.figures["variants"][name] for name in ("by hand", "fused", "compiled"))
    (hand_nodes,), (fused_nodes,) = ({cell["nodes"] for cell in each["cells"][:3]} for each in (hand, fused))
    assert result.figures["more_nodes"][1] == hand_nodes - fused_nodes >= 18 and compiled["cells"][0]["nodes"] == 1
    ((name, count),) = result.figures["sdpa_nodes"].items()
    assert count == 1 and name in result.attachments["autograd-fused.dot"] and name not in hand["kinds"]


def test_by_hand_saves_the_scores_and_fused_does_not():
    words = ("autograd", "--dmodel", "8", "--nhead", "2", "--seq")
    small, large = (quick(*words, length).figures["more_saved_bytes"] for length in ("128", "256"))
    assert all(predicted <= measured < 1.5 * predicted for predicted, measured in (small, large)), "the mask aside"
    assert large[0] == 4 * small[0]


def test_compile_modes_count_graphs_and_use_the_cache(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes for two kernels
    result = quick("compile_modes", "--lengths", "4", "--dmodel", "16", "--batch", "8")
    assert result.figures["graphs"] == {
        "same length": (1, 1),
        "changing, dynamic=False": (4, 4),
        "changing, default": (2, 2),
        "changing, dynamic=True": (1, 1),
    }
    cold, warm = (result.figures["modes"]["default"][kind] for kind in ("cold", "warm"))
    assert cold["cache_hits"] == 0 and warm["cache_hits"] >= 2, "forward and backward"
    assert [row[0] for row in result.tables[0].rows] == ["eager", "default"]


def test_graph_breaks_are_counted_named_and_mended(monkeypatch):
    no_compiler = torch._dynamo.exc.TorchDynamoException("No working C++ compiler")
    monkeypatch.setattr(graph_breaks, "timed", Mock(side_effect=no_compiler))
    result = quick("graph_breaks", "--n", "100")
    cases = [result.figures["cases"][name] for name in graph_breaks.CASES]
    assert all((case["breaks"], case["breaks_mended"], case["same_result"]) == (1, 0, True) for case in cases)
    for case, part in zip(cases, ("print(", ".item()", "if y.sum() > 0", "perf_counter"), strict=True):
        assert part in case["line"]
    assert "There are no times: No working C++ compiler." in result.sentences


def test_only_trace_is_wrong_on_the_other_branch_and_a_tool_that_is_gone_is_a_row(monkeypatch):
    result = quick("graph_capture")
    assert {name: (tool["first"], tool["other"]) for name, tool in result.figures["tools"].items()} == {
        "torch.jit.trace": (True, False),
        "torch.jit.script": (True, True),
        "torch.fx.symbolic_trace": (None, None),
        "torch.compile (Dynamo)": (True, True),
        "torch.export": (None, None),
        "torch.export of torch.cond": (True, True),
    }
    monkeypatch.delattr(torch.jit, "trace")
    said = quick("graph_capture").sentences
    assert any("torch.jit.trace" in sentence and "AttributeError" in sentence for sentence in said)


def test_techniques_have_a_speed_and_a_memory_over_their_plain_form():
    names = [name for name in techniques.TECHNIQUES if "torch.compile" not in name]
    result = quick("techniques", "--dmodel", "32", "--seq", "32", "--batch", "4", "--only", *names)
    assert list(cells := result.figures["techniques"]) == names and "reason" in cells["CUDA graphs"]
    assert cells["checkpointing"]["memory"] < 0.6 and cells["gradient accumulation"]["memory"] < 0.4
    blocks = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)))
    x, weights = torch.randn(4, 8), list(blocks.parameters())
    plain = torch.autograd.grad(blocks(x).square().mean(), weights)
    again = torch.autograd.grad(technique_forms.checkpointed(blocks, x).square().mean(), weights)
    torch.testing.assert_close(plain, again)


def test_input_pipeline_predicts_what_it_measures():
    result = quick("input_pipeline", "--batches", "12", "--load", "8", "--step", "4")
    regular, alone = result.figures["regular"], result.figures["step_alone_s"]
    assert regular[0]["predicted_s"] == 8e-3 + alone and regular[1]["predicted_s"] == max(alone, 8e-3)
    assert regular[0]["measured_s"] >= 12e-3, "loading and step wait one after the other"
    predicted = [cell["predicted_s"] for cell in result.figures["irregular"]]
    assert predicted == sorted(predicted, reverse=True), "the more is prefetched, the shorter"
