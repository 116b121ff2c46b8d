"""DRAM bytes of attention: the analytic ones stand where no counters can be read."""

import json

import pytest
import torch

from anatomy import attention_traffic


def test_without_counters_the_analytic_bytes_stand(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(attention_traffic.shutil, "which", lambda _: None)
    monkeypatch.setattr("sys.argv", ["x", "--output", str(tmp_path / "x.json")])
    attention_traffic.main()
    printed = capsys.readouterr().out
    assert "ncu) is not installed" in printed and "43.75" in printed
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["bytes"]["by hand"] == {"analytic": 43_754_979_328, "counters": None}


def test_a_bad_shape_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x", "--shape", "8", "0", "4", "4"])
    with pytest.raises(SystemExit) as caught:
        attention_traffic.main()
    assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_both_attentions_compute_the_same():
    q, k, v = (torch.randn(2, 3, 16, 8) for _ in range(3))
    expected = attention_traffic.attention_fused(q, k, v)
    torch.testing.assert_close(attention_traffic.attention_by_hand(q, k, v), expected)
