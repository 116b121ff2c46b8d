"""One block cut out of a timeline, and a CPU's operators as one."""

import pytest
from conftest import STEPS, built

from common import profile
from common.block import one_block
from common.model import GPTConfig
from common.traced import Launch

FORWARD, BACKWARD = "cudnn_sdpa_flash_fprop_wgmma", "cudnn_sdpa_flash_bprop_wgmma"


def timeline(names):
    """Launches that begin 1.5 ms after each other; attention's own kernels are the longest."""
    return [Launch(name, profile.categorize(name), 1.5 * k + 7.0, 1.2 if "sdpa" in name else 1.0)
            for k, name in enumerate(names)]  # fmt: skip


def test_a_block_lies_between_two_attentions_in_forward_and_in_backward():
    forward = ["embedding", FORWARD, "nvjet_a", "layer_norm", FORWARD, "nvjet_b", FORWARD, "nvjet_c"]
    backward = ["dot_do_o", BACKWARD, "convert_dq", "nvjet_d", "dot_do_o", BACKWARD, "convert_dq", "adam"]
    found = one_block(timeline(forward + backward))
    assert [launch.name for launch in found.forward] == forward[1:4] and found.forward_ms == 4.5
    assert [launch.start_ms for launch in found.forward] == [0.0, 1.5, 3.0]
    assert [launch.name for launch in found.backward] == [BACKWARD, "convert_dq", "nvjet_d", "dot_do_o"]
    assert found.backward_ms == 6.0


def test_the_last_of_several_steps_is_taken_and_softmax_by_hand_is_an_attention():
    one = ["softmax_warp_forward", "gemm{}", "softmax_warp_forward", *["cunn_SoftMaxBackwardSmem"] * 2]
    launches = timeline([name.format(step) for step in range(3) for name in one])
    assert one_block(launches, 3).forward[1].name == "gemm2" and one_block(launches, 1).forward[1].name == "gemm0"


@pytest.mark.parametrize("names", [[], ["gemm"], [FORWARD, BACKWARD], [FORWARD, FORWARD, BACKWARD]])
def test_without_two_attentions_each_way_there_is_no_block(names):
    assert one_block(timeline(names)) is None


@pytest.mark.parametrize("step", STEPS[:3])
def test_a_cpu_profile_holds_a_block_of_the_scripts(step, monkeypatch):
    wide = GPTConfig(n_layer=2, n_head=2, n_embd=64, seq_len=512, vocab_size=256)  # operators of milliseconds
    run = built(step, monkeypatch, config=wide)
    profiled = (profile.profile_cpu(lambda: run.train_step(*run.batches[0]), 2).block for _ in range(15))
    found = next(filter(None, profiled))  # an operator that loses its processor meanwhile is not recognized
    for half, took in ((found.forward, found.forward_ms), (found.backward, found.backward_ms)):
        assert half[0].category == "attention" and half[0].start_ms == 0
        assert "matrix products" in {launch.category for launch in half}
        ends = [launch.start_ms + launch.ms for launch in half]
        assert all(end <= launch.start_ms + 1e-6 for end, launch in zip(ends, half[1:], strict=False)), "no overlap"
        assert ends[-1] <= took + 1e-6


def test_the_profile_of_a_gpu_holds_the_block_of_its_last_step():
    events = [(FORWARD, 100), ("gemm", 200), (FORWARD, 300), (BACKWARD, 400), (BACKWARD, 600)]
    marker = {"name": "Memcpy DtoD", "dur": 1, "args": {"bytes": profile.MARKER_BYTES}}
    kernels = [{"name": name, "ts": ts, "dur": 50} for name, ts in events]
    found = profile.summarize_timeline([{**marker, "ts": 0}, *kernels, {**marker, "ts": 700}], 1).block
    assert [launch.ms for launch in found.forward] == [0.05, 0.05] and found.backward_ms == pytest.approx(0.2)
