"""The table of claims: verdicts by arithmetic, and nothing where nothing is recorded."""

import json
import re
from functools import partial

import pytest
import runs
from conftest import ROOT

from report import causal_claims, claims, findings, kernels, questions, recordings, symptom_examples, traffic
from report.claims import Claim
from report.findings import Finding
from report.load import RecordError
from report.records import CPU, GPU, Records


def test_a_range_holds_for_all_for_some_or_lies_beside():
    assert findings.within({"a": 1.6, "b": 1.9}, 1.5, 2).verdict == "holds"
    assert findings.within({"a": 1.6, "b": 7.0}, 1.5, 2) == Finding("a 1.60x, b 7.00x", "holds for a; more for b")
    assert findings.within({"a": 3.0, "b": 7.0}, 1.5, 2).verdict == "more here"
    assert findings.within({"a": 1.0}, 1.5, 2).verdict == "less here"
    assert findings.within({"a": 1.0, "b": 3.0}, 1.5, 2).verdict == "more for b; less for a"


def test_a_machine_without_records_says_so_and_machines_that_differ_are_named(tmp_path):
    empty = Records.read(tmp_path)
    found = [claims.found(claim, empty) for claim in claims.CLAIMS]
    assert {one.verdict for one in found} == {claims.NO_RECORD, claims.NOT_TESTED}
    assert found[-1].verdict == claims.NOT_TESTED, "no function"
    good, bad, none = Finding("1", "holds"), Finding("2", "less here"), Finding("-", claims.NO_RECORD)
    assert claims.verdict({"H200": good, "CPU": none}) == "H200: holds"
    assert claims.verdict({"H200": good, "CPU": good}) == "holds"
    assert claims.verdict({"H200": good, "CPU": bad}) == "H200: holds; CPU: less here"
    assert claims.verdict({"H200": none, "CPU": none}) == claims.NO_RECORD
    assert "nothing is recorded" in questions.path(tmp_path / "docs" / "results")


def test_a_claim_links_to_the_page_that_makes_it():
    assert all(claim.source.startswith("https://") for claim in claims.CLAIMS)
    assert claims.source_link(Claim("x", "https://www.a.org/b", "y")) == "[a.org](https://www.a.org/b)"
    assert claims.source_link(Claim("x", "https://github.com/a/b/c", "y")) == "[a/b](https://github.com/a/b/c)"


def test_verdicts_follow_the_figures():
    operations = {".item()": {"host_s": {"empty queue": 12e-6}, "waits": True},
                  "print": {"host_s": {"empty queue": 270e-6}, "waits": True}}  # fmt: skip
    records = Records({"sync-points": {"operations": operations}})
    assert findings.constant_sync(records).verdict == "holds for .item(); more for print"
    shares = findings.sync_share(records)
    assert shares == Finding("`.item()` takes 12.0 us: 0.05% of 25 ms, 66.67% of 18 us", findings.FAILS)
    operations[".item()"]["host_s"]["empty queue"] = 10e-6
    assert findings.sync_share(records).verdict == "holds only for 18 us"
    del operations["print"]
    assert findings.constant_sync(records).verdict == "holds"
    claim = Claim("x", "https://x", "sync-points", findings.any_waits)
    assert claims.found(claim, records).verdict == claims.NO_RECORD, "an older record lacks the case"


def test_what_could_not_be_counted_or_run_is_not_recorded():
    counters = {"by hand": {"counters": None}, "fused": {"counters": 1e9, "copies": 0}}
    records = Records({"attention-traffic": {"bytes": counters}, "attention": {"attention": {"SDPA flash": {}}}})
    for finding in (partial(findings.attention_traffic, 8, 10), findings.attention_memory):
        assert claims.found(Claim("x", None, "attention", finding), records).verdict == claims.NO_RECORD


def test_a_ratio_with_a_serious_doubt_is_left_out():
    def ladder(*last_ms):
        rows = [runs.step("0_a", 300.0), runs.step("1_b", 100.0)]
        rows[1].timing.step_ms = [100.0] * 10 + [*last_ms]
        return runs.run(*rows)

    records = Records(runs={"fair": ladder(*[100.0] * 10), "doubted": ladder(*[120.0] * 10)})
    assert records.faster("0", "1") == {"fair": 3.0}


def test_a_technique_inside_the_spread_has_no_verdict():
    def verdict(**cell):
        records = Records({"techniques": {"techniques": {"x": {"speed": 1.2} | cell}}})
        return findings.technique("x", 1, 1.3, records).verdict

    assert verdict(inside_spread=False) == "holds" and verdict(inside_spread=True) == "hidden by the spread"


def test_a_technique_and_its_steps_are_judged_together_and_either_may_be_missing():
    def found(speed=None, steps=None, hidden=False):
        cells = {"x": {"speed": speed, "inside_spread": hidden}} if speed else {}
        ladder = {"run": runs.run(runs.step("0_a", 300.0), runs.step("1_b", 300.0 / steps))} if steps else {}
        records = Records({"techniques": {"techniques": cells}}, ladder)
        return claims.found(Claim("x", None, "y", partial(findings.technique_and_steps, "x", "0", "1", 2, 3)), records)

    assert found(2.5, 5.0) == Finding(
        "x in the experiment 2.50x, run 5.00x", "holds for x in the experiment; faster for run"
    )
    assert found(2.5).verdict == "holds" and found(steps=5.0).verdict == "faster here"
    assert found(1.0, 5.0, hidden=True) == Finding("x 1.00x (hidden by the spread), run 5.00x", "faster here")
    assert found().verdict == claims.NO_RECORD


def test_guards_cost_nothing_that_is_shown_where_their_times_overlap():
    def verdict(few, many):
        names = ("x * 2 compiled, 1 input", "x * 2 compiled, 33 inputs")
        times = {name: sum(us) / 2e6 for name, us in zip(names, (few, many), strict=True)}
        times |= {f"{name}_p25_p75": [each / 1e6 for each in us] for name, us in zip(names, (few, many), strict=True)}
        return findings.guards(Records({"host-cost": {"times": times}})).verdict

    assert verdict((10, 11), (14, 15)) == "holds" and verdict((10, 15), (14, 16)) == findings.HIDDEN
    assert verdict((10.0, 10.1), (10.2, 10.3)) == findings.FAILS


def test_attention_by_hand_is_compared_with_the_fastest_kernel_of_each_length():
    def cells(*seconds):
        return {length: {"seconds": s} for length, s in zip(("256", "512"), seconds, strict=False)}

    attention = {"by hand": cells(6.0, 8.0), "SDPA math": cells(1.0, 1.0), "SDPA flash": cells(2.0, 1.0),
                 "SDPA cuDNN": cells(4.0), "SDPA efficient": {}}  # fmt: skip
    found = findings.attention_speeds(Records({"attention": {"attention": attention}}))
    assert found == Finding("T 256 3.00x, T 512 8.00x", "holds for T 256; faster for T 512")


def test_modes_of_the_compiler_are_judged_by_clear_differences_and_by_both_processes():
    def verdict(default, reduce_overhead, autotune, **claimed):
        """Each mode: seconds to compile, and milliseconds of a step in either process."""
        named = {"default": default, "reduce-overhead": reduce_overhead, "max-autotune": autotune}
        rows = {name: {"cold": {"first_steps_s": s, "step_s": cold}, "warm": {"step_s": warm}}
                for name, (s, cold, warm) in named.items()}  # fmt: skip
        record = {"modes": rows, "eager": {"step_s": 1}}
        return findings.compile_modes(Records({"compile-modes": record}), **claimed).verdict

    claimed = {"compiles": "default", "fastest": "max-autotune"}
    assert verdict((2, 3, 3), (3, 2, 2), (90, 1, 1), **claimed) == "holds"
    assert verdict((3, 3, 3), (2, 1, 1), (90, 2, 2), **claimed) == findings.FAILS
    assert verdict((2, 3, 3), (3, 1, 1), (90, 2, 2), **claimed) == f"compilation: holds; code: {findings.FAILS}"
    close = verdict((3, 3, 3), (3.1, 1, 2), (90, 2, 1), **claimed)
    assert close == "compilation: default and reduce-overhead are about as fast; code: two processes disagree"
    assert verdict((3, 1, 1), (2, 3, 3), (90, 2, 2), compiles="reduce-overhead", slowest="reduce-overhead") == "holds"


def test_the_node_of_fused_attention_is_that_of_one_format_where_mixed_precision_runs_another_kernel():
    def verdict(node, kernel):
        row = runs.step("2_b")
        row.settings.attention_kernel, row.settings.amp_dtype = kernel, "bfloat16"
        records = Records({"autograd": {"sdpa_nodes": {node: 1}}}, {"x": runs.run(runs.step("0_a"), row)})
        return findings.marks_fusion(records).verdict

    efficient = "ScaledDotProductEfficientAttentionBackward0"
    assert verdict(efficient, "cudnn") == "holds only in FP32" and verdict(efficient, "efficient") == "holds"
    assert verdict("ScaledDotProductFlashAttentionForCpuBackward0", "flash (CPU)") == findings.FAILS


def test_lost_gradients_are_judged_only_where_the_logits_are_many_enough():
    lost = {"BF16": {"zero_share": 0.0}, "FP16": {"zero_share": 1.0}, "FP16, loss scaled": {"zero_share": 0.0}}

    def verdict(vocab_size):
        learning = {"config": {"vocab_size": vocab_size}, "tokens": 1024, "trained": lost}
        return claims.found(
            Claim("x", None, "learning", findings.loss_scaling), Records({"learning": learning})
        ).verdict

    assert verdict(50304) == "holds" and verdict(256) == claims.NO_RECORD


def test_occupancy_stops_helping_where_less_of_it_gives_nearly_all_of_the_bandwidth():
    def verdict(rates):
        rows = {str(k): {"bytes_per_s": rate} for k, rate in rates.items()}
        return findings.occupancy(Records({"memory-hierarchy": {"occupancy": rows}})).verdict

    assert verdict({4: 1e12, 8: 3.9e12, 16: 4e12}) == "holds"
    assert verdict({4: 1e12, 8: 2e12, 16: 4e12}) == findings.FAILS


def test_counted_bytes_are_shares_of_a_copy_and_a_step_that_was_not_counted_is_no_record(tmp_path):
    assert traffic.sections(tmp_path) == []
    named = {"softmax|fused": 2e9, "nvjet_sm90_tst_128x256_64x4": 1e9, "x::LoadWithCast<1>": 1.8e9}
    longest = [{"name": name, "launches": 12, "bytes": moved, "seconds": 1e-3} for name, moved in named.items()]
    longest.append({"name": "y::LoadWithCast<2>", "launches": 6, "bytes": 5e9, "seconds": 1e-3})
    steps = {"0_baseline": {"kernels": longest, "bytes": 14e9, "seconds": 14e-3}}
    record = {"copy_bytes_per_s": 4e12, "steps": steps, "environment": {"commit": "abcdef012345", "dirty": False}}
    (tmp_path / "card").mkdir()
    path = tmp_path / "card" / "step-traffic-gpt2.json"
    path.write_text(json.dumps(record))
    recordings.check(path)
    _, _, title, lines, table = traffic.sections(tmp_path)
    assert title == "### gpt2, recorded in `card`, commit abcdef0" and lines.startswith("- 0")
    assert "0_baseline moves 14 GB. At memory's limit for 2.0 ms: cast (85%). Below" in lines
    assert lines.endswith("memory's limit for 1.0 ms: softmax\\|fused (50%)."), (
        "a matrix product is compared with no memory"
    )
    (cast,) = (line for line in table.splitlines() if "cast" in line)
    assert [cell.strip() for cell in cast.split("|")][3:-1] == ["18", "2.00", "6.80", "85%"]
    assert traffic.of_run(tmp_path / "card" / "gpt2") and not traffic.of_run(tmp_path / "card" / "gpt3-xl")
    path.write_text(json.dumps(record | {"steps": steps | {"1_cublas": {"reason": "no counters"}}}))
    with pytest.raises(RecordError, match="lacks 1_cublas: no counters"):
        recordings.check(path)


def test_kernels_that_multiply_are_known_on_other_gpus_and_the_passes_around_attention_are_none_of_them():
    names = ("ampere_bf16_s16816gemm_bf16_128x64", "nvjet_tst_192x192", "cutlass::Kernel2<cutlass_80_tensorop_s16816",
             "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "pytorch_flash::flash_bwd_kernel")  # fmt: skip
    assert all(re.match(traffic.MULTIPLIES, kernels.readable(name)) for name in names)
    passes = ("void at::native::softmax_warp_forward<float>", "x::convert_dq_to_16bits", "y::dot_do_o", "masked_fill")
    assert not any(re.match(traffic.MULTIPLIES, kernels.readable(name)) for name in passes)


def test_only_what_is_not_recorded_has_no_figure(monkeypatch):
    """A misspelled name would look like a missing record: what is missing is listed here, by machine."""
    only_on_a_gpu = {"3 and 4", "attention-traffic", "occupancy", "on_chip", "speed", "reduce-overhead",
                     "BF16, by hand in Triton", "a CPU does not wait"}  # fmt: skip
    missing = {CPU: set(), GPU: set()}

    def measured(records, figure, otherwise=None):
        try:
            return figure(records)
        except KeyError as error:
            missing[records.folder.name].add(error.args[0])
            return otherwise

    monkeypatch.setattr(Records, "measured", measured)
    for table in (claims.claims_table, causal_claims.claims_table, questions.path, symptom_examples.examples_table):
        table(ROOT / "docs" / "results")
    assert missing == {CPU: only_on_a_gpu, GPU: set()}
