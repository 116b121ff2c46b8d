"""Why predictions of anatomy/ missed: each cause is said where its measurement shows it, and only there."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from anatomy import (
    attention_forms,
    compile_modes,
    contiguity,
    experiment,
    fusion,
    host_cost,
    learning,
    memory_hierarchy,
    misses,
    sync_points,
)
from anatomy.experiment import Check, Result, Seconds
from common.model import GPTConfig


def exactly(seconds: float) -> Seconds:
    return Seconds.of([seconds] * 2)


def test_a_miss_is_explained_by_a_time_that_changed_by_a_copy_or_by_one_thread_and_a_hit_by_nothing(monkeypatch):
    def cause(predicted, measured, again, n_bytes=0):
        taken = misses.Again(Seconds.of(again if isinstance(again, list) else [again] * 2), exactly(again_host))
        find = partial(misses.cause_of_miss, call=print, device=torch.device("cpu"), n_bytes=n_bytes, again=taken)
        check = Check("x", predicted, measured, "us", find_cause=find)
        Result([], [], {}, [check]).explain()
        return check.cause

    again_host = 1e-6
    monkeypatch.setattr(misses, "copy_seconds", lambda n_bytes, device: 1e-6 * n_bytes)
    monkeypatch.setattr(misses, "on_one_thread", lambda call, samples: 3e-6)
    assert cause(1e-6, 1.1e-6, 9e-6) is None, "a hit"
    assert "speed had changed" in cause(1e-6, 9e-6, 1.1e-6) and "its own times are" in cause(1e-6, 9e-6, 4e-6)
    assert cause(1e-6, 1.26e-6, [1.1e-6, 1.2e-6, 1.4e-6]) is None, "the same time within its spread"
    assert "so few are slower" in cause(1e-6, 4e-6, 4e-6, 4) and "so few are faster" in cause(4e-6, 2e-6, 2e-6, 2)
    assert "one thread" in cause(1e-6, 4e-6, 4e-6, 1), "a copy that takes as long as predicted explains nothing"
    assert cause(4e-6, 2e-6, 2e-6, 40) is None
    assert "on one thread it takes 3.0 us" in cause(1e-6, 9e-6, 9e-6) and cause(1e-6, 3.5e-6, 3.5e-6) is None


def test_a_mask_that_saves_no_time_explains_a_factor_of_2():
    unmasked = attention_forms.cause_by_mask(1.2e-3, 2e-3, full_s=2.2e-3)
    assert unmasked == "without a mask it takes 2.2 ms: it saves no time on the scores above the diagonal"
    assert "a factor of 2 and not more" in attention_forms.cause_by_mask(0.7e-3, 2e-3, full_s=2.2e-3)
    for full_s in (1e-3, 4e-3):
        assert attention_forms.cause_by_mask(1.2e-3, 2e-3, full_s) is None


def test_calls_are_timed_again_and_copies_and_threads_are_real():
    again = misses.time_again(lambda: torch.ones(8))
    assert 0 < again.seconds < 0.1 and 0 < again.host_s < 0.1
    assert experiment.copy_seconds(2**20, torch.device("cpu")) > 0
    threads = torch.get_num_threads()
    assert experiment.on_one_thread(torch.get_num_threads, 2) > 0 and torch.get_num_threads() == threads


def test_what_needs_the_profiler_is_asked_last_and_a_failed_search_keeps_the_times():
    asked = []

    def search(check):
        asked.append(check.what)
        return (lambda: asked.append("profile") or "idle") if check.what == "a" else None

    checks = [Check(name, 1.0, 9.0, "us", find_cause=search) for name in "ab"]
    checks.append(Check("c", 1.0, 9.0, "us", find_cause=lambda check: 1 / 0))
    Result([], [], {}, checks).explain()
    assert asked == ["a", "b", "profile"]
    assert [check.cause for check in checks[:2]] == ["idle", None]
    assert checks[2].cause.startswith("missed, and the search for its cause failed: ")


def test_a_copy_beyond_a_cache_and_an_operation_after_the_caches_are_taken_are_explained_by_a_measurement(monkeypatch):
    copies = memory_hierarchy.Copies(torch.device("cpu"), torch.float32, 2**16, {"L2": 300}, 2)
    copies.empty_s, taken = 0.0, {"half": 1e-6, "cold": 2e-6, "again": 9e-6}
    monkeypatch.setattr(copies, "seconds", lambda size, cold=False: exactly(
        taken["cold" if cold else "half" if size == 100 else "again"]))  # fmt: skip

    def cause(predicted, measured, level="L2"):
        return copies.cause_of_miss(Check("x", predicted, measured, "us"), size=200, level=level, rate=1e8)

    assert "half as many bytes take 1.0 us, as predicted: L2 does" in cause(2e-6, 4e-6)
    assert cause(2e-6, 4e-6, level="DRAM") is None
    assert "not touched lately" in cause(2e-6, 1e-6, "DRAM") and cause(2e-6, 1e-6) is None
    assert "a moment later" in cause(9e-6, 2e-6) and cause(4e-6, 1e-6, "DRAM") is None
    copies.levels = {"L2": 3000}
    assert cause(2e-6, 4e-6) is None, "so small a part of a cache is not too much for it"

    took = {"write": 5e-6, "product": 2e-6, "idle": 3e-6, "both": 7e-6}
    monkeypatch.setattr(sync_points, "host_seconds", lambda _, iters, work: work() or exactly(took[work.__name__]))

    def after(before, measured, again=None):
        timed_again = partial(exactly, again or measured)
        return sync_points.cause_by_what_ran(Check("x", 1e-6, measured, "us"), print, before, 2, timed_again)

    written = partial(after, sync_points.by_one_thread(512))
    assert "one thread has written 3 MiB, as much as the product touches, it takes 5.0 us" in written(6e-6)
    assert written(3e-6) is None and written(9e-6) is None and written(0.5e-6) is None
    gpu = partial(after, sync_points.waits_and_products(1e-3, torch.ones(2, 2)))
    assert "spun for 1.0 ms and launched a small product, it takes 7.0" in gpu(6e-6)
    assert "spun for 1.0 ms, it takes 3.0" in gpu(3e-6) and gpu(9e-6) is None and gpu(0.5e-6) is None
    assert "apart" in gpu(6e-6, again=3e-6) and "had changed" in gpu(6e-6, again=1.1e-6)
    took["product"] = 1.1e-6
    assert gpu(1.3e-6) is None, "near what was predicted, too"


def test_a_slow_sum_and_a_slow_quotient_explain_what_is_slower_by_both(monkeypatch):
    monkeypatch.setattr(fusion, "seconds", lambda *_: exactly(5e-6))
    monkeypatch.setattr(fusion, "copy_seconds", lambda *_: exactly(2e-6))
    case = fusion.Case(fusion.QUOTIENT, "eager", print, (torch.ones(8),), 0, print)
    said = fusion.parts_alone(Check("x", 3e-6, 10e-6, "us"), case)
    assert said == "alone, its sum takes 5.0 us and its quotient 5.0; a copy of x takes 2.0"
    assert fusion.parts_alone(Check("x", 3e-6, 20e-6, "us"), case) is None
    assert fusion.parts_alone(Check("x", 3e-6, 5e-6, "us"), case) is None


def test_exponentials_explain_attention_above_its_roof_only_if_they_take_long(monkeypatch):
    monkeypatch.setattr(attention_forms, "exponential_rate", lambda device: 1e12)
    q = torch.empty(1, 2, 1000, 8)
    said = attention_forms.cause_by_exponentials(q, 2e-6)
    assert said == "its exponentials, which a roof leaves out, alone take 1.0 us: 3.0 with its FLOPs"
    assert attention_forms.cause_by_exponentials(q, 5e-6) is None
    monkeypatch.setattr(attention_forms, "exponential_rate", lambda device: None)
    assert attention_forms.cause_by_exponentials(q, 2e-6) is None


def test_the_direction_of_a_sum_explains_it_if_the_contiguous_base_takes_as_long(monkeypatch):
    monkeypatch.setattr(contiguity, "seconds", lambda *_: exactly(5e-6))
    said = contiguity.by_direction(Check("x", 3e-6, 5.2e-6, "us"), torch.ones(2, 2))
    assert said == "over the first dimension of the contiguous base the same sum takes 5.0 us, too"
    assert contiguity.by_direction(Check("x", 3e-6, 9e-6, "us"), torch.ones(2, 2)) is None
    assert contiguity.by_direction(Check("x", 4.5e-6, 6e-6, "us"), torch.ones(2, 2)) is None


def test_few_heads_explain_a_fused_kernel_if_more_take_as_long_as_predicted():
    check = Check("x", 3e-3, 5e-3, "ms")
    said = attention_forms.cause_by_heads(check, more_s=13e-3)
    assert said == "4 times as many heads take 13 ms, 3.25 for as many as here: so few leave idle parts"
    assert attention_forms.cause_by_heads(check, more_s=20e-3) is None, "as slow with many"
    assert attention_forms.cause_by_heads(check, more_s=6e-3) is None, "faster than predicted"


def test_slow_passes_explain_attention_by_hand_if_what_they_lose_is_what_it_takes_longer(monkeypatch):
    monkeypatch.setattr(attention_forms, "seconds", lambda *_: exactly(8e-6))
    scores = torch.zeros(1, 2, 4, 4)  # of 128 bytes: at 64 MB/s a pass takes 2 us

    def said(measured, autocast):
        return attention_forms.cause_by_passes(Check("x", 10e-6, measured, "us"), scores, 64e6, autocast)

    both = "alone, filling in the mask reaches 50% and a cast to FP32 reaches 75% of a copy's bandwidth"
    assert said(22e-6, autocast=True) == f"{both}, and with what they lose 0.022 ms are predicted"
    assert said(18e-6, autocast=False).endswith("0.018 ms are predicted") and said(40e-6, autocast=True) is None
    assert said(10e-6, autocast=True) is None


def test_a_core_that_was_slow_for_a_moment_and_a_profiler_that_stays_are_said_only_beyond_the_spread():
    def said(slowest, again, after):
        fast, slow, later, last = (Seconds.of([s, s * 1.01]) for s in (1e-6, slowest, again, after))
        figures = {"cores": {"0": fast, "3": slow}, "again": later, "before": fast, "after": last, "later": fast}
        (check,) = host_cost.on_cores(figures)
        return check, host_cost.cores_apart(figures), host_cost.stays(figures)

    check, sentences, lasts = said(1e-6, 1e-6, 1.1e-6)
    assert check.hit and not sentences and "only a profile lies before it" in lasts
    check, sentences, lasts = said(2e-6, 1e-6, 1.4e-6)
    assert "a moment later: what slowed it had passed" in check.row()["verdict"] and not sentences
    assert lasts == "a moment later it took 1.0 (1.0-1.0) us, so the machine changed its speed"
    assert "says why" in said(9e-6, 2e-6, 1e-6)[0].row()["verdict"], "neither as slow as before nor as the fastest"
    assert "changed its speed" in said(1e-6, 1e-6, 0.5e-6)[2], "a profile makes nothing faster"
    check, sentences, _ = said(2e-6, 2e-6, 1e-6)
    assert "a moment later, too: the core" in check.row()["verdict"] and "2.00 times" in sentences[0]


def test_a_gpu_waits_for_the_host_is_idle_or_slow_itself(monkeypatch):
    def said(host_s, *kernels_s, why=None, measured=20e-6):
        work = [{"name": f"k{i}", "dur": s * 1e6} for i, s in enumerate(kernels_s)]
        monkeypatch.setattr(misses, "gpu_work", lambda *_: work)
        again = misses.Again(exactly(measured), exactly(host_s))
        return misses.kernels_cause(Check("x", 10e-6, measured, "us"), print, torch.device("cuda"), again, why)

    waits = said(19e-6, 5e-6, 5e-6)
    assert waits == "the host needs 19.0 us until the call returns, and its kernels run 50% of the time"
    assert "needs only 4.0 us: why the GPU is idle else was not measured" in said(4e-6, 5e-6, 5e-6)
    slow = said(4e-6, 2e-6, 7e-6, 9e-6)
    assert slow.startswith("its kernels alone take 18.0 us, the longest of them: k2 9.0, k1 7.0; why they take longer")
    assert said(19e-6, 18e-6, why="a tile is").endswith("k0 18.0; a tile is"), "the host is as long, but not the limit"
    assert said(4e-6, 12e-6, measured=13e-6) is None, "kernels near the prediction that fill the time"
    assert said(4e-6) is None, "the profiler saw no kernel"


def test_copies_on_a_gpu_are_its_work_too(monkeypatch):
    events = [{"name": name, "dur": 2, "cat": name} for name in ("kernel", "gpu_memcpy", "cpu_op")] + [{"name": "x"}]
    trace = SimpleNamespace(chrome=json.dumps({"traceEvents": events}))
    monkeypatch.setattr(experiment.profile, "trace_step", lambda *_: trace)
    assert experiment.busy_seconds(print, torch.device("cuda")) == pytest.approx(4e-6)


def test_a_step_of_a_mode_waits_for_the_host_only_where_it_was_seen_to():
    def said(host_s, step_s=4e-3):
        result = {"step_s": step_s, "quartiles": (step_s, step_s), "busy_s": 1e-3, "host_s": host_s, "launches": 400}
        (check,) = compile_modes.step_checks("default", result | {"launch_s": 5e-6}, torch.device("cuda"))
        return check.cause

    assert said(3.9e-3) == "the host needs 3.9 ms until the step returns, and its kernels run 25% of the time"
    assert said(1e-3) is None and said(3.9e-3, step_s=1.2e-3) is None, "a step shorter than predicted"


def test_a_loss_that_ends_elsewhere_is_explained_by_skipped_steps_or_by_training_that_does_not_repeat_itself():
    def said(again, skipped=(), without=None):
        def train_again(name, skip=()):
            return without if skip else again

        check = Check("last loss", 0.05, 0.09, "nats", at_most=True)
        return learning.cause_of_end(check, "FP16, loss scaled", {"last": 2.0, "skipped": [*skipped]}, train_again)

    assert "it ends 0.0500 from its first end" in said(2.05) and said(2.01) is None and said(None) is None
    explained = said(2.0, skipped=(0, 3), without=2.03)
    assert explained == "the scaler skipped steps 0, 3: FP32 without these ends 0.0300 from it"
    assert said(2.0, skipped=(0, 3), without=2.1) is None and said(2.0, skipped=(0,)) is None


def test_learning_counts_the_steps_that_its_scaler_skips_and_trains_without_them(monkeypatch):
    scaled = partial(torch.amp.GradScaler, init_scale=2.0**40)
    monkeypatch.setattr(torch.amp, "GradScaler", scaled)
    config = GPTConfig(n_layer=1, n_head=1, n_embd=8, seq_len=8, vocab_size=256)
    batches = [tuple(torch.randint(256, (2, 1, 8)))] * 3
    skipped = learning.train(learning.FORMS["FP16, loss scaled"], config, batches, torch.device("cpu"))["skipped"]
    assert skipped[:2] == [0, 1], "gradients times 2^40 and 2^39 are infinite in FP16"
    plain, without = (
        learning.train(learning.FORMS["FP32"], config, batches, torch.device("cpu"), skip) for skip in ((), (0, 1, 2))
    )
    assert len({*without["losses"]}) == 1 < len({*plain["losses"]}) and plain["skipped"] == []
