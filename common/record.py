"""Writing and reading records without torch: reports are rebuilt on any machine, by commands that parse here, too.

The schema stands in common/benchmark.py, whose runs fill it in.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from pathlib import Path

SCHEMA_VERSION = 1
LARGEST_RECORD_BYTES = 50_000_000  # a record with the profile of a deep model has less than one
STATUSES = ("ok", "skipped", "oom", "failed", "timeout")


class RecordError(ValueError):
    """A file is not a record this version can read; the message is one line that says why."""


class NewerSchemaError(RecordError):
    """A record of a later version of this benchmark, which must not be overwritten."""


def empty_step_record(step: str, source: str | None) -> dict:
    """A step record with every field, nothing measured."""
    return {
        "step": step,
        "source": source,
        "status": None,
        "reason": None,
        "note": None,
        "settings": {},
        "timing": {"warmup_s": None, "step_ms": [], "median_ms": None, "p25_ms": None, "p75_ms": None},
        "tokens_per_s": None,
        "model_flops_per_s": None,
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "peak_rss_bytes": None,
        "loss": [],
        "host_syncs": None,
        "gpu_state": None,
        "profile": None,
        "bytes_per_step": None,
    }


def check_writable(path: Path, *keys: str) -> None:
    """Raises ValueError, one line, where `path` cannot become a record; makes its folder.

    A file that is there is replaced only if it is an object with one of `keys` and, if it has steps, just one of them:
    a whole run that was put away stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise ValueError(f"--output {path} is not a regular file")
        if path.exists() and not _is_replaceable(path.read_bytes(), keys):
            raise ValueError(f"--output {path} exists and is no record of this kind: it stays as it is")
        if len(os.fsencode(path.name)) > 255:
            raise ValueError(f"--output {path.name[:20]}... is too long for a file name")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write --output {path}: {error.strerror or error}") from None


def _is_replaceable(content: bytes, keys: tuple[str, ...]) -> bool:
    try:
        found = json.loads(content) if content.strip() else dict.fromkeys(keys)
        return any(key in found for key in keys) and len([*(found.get("steps") or []), *found.get("peers", [])]) <= 1
    except (ValueError, RecursionError, TypeError, AttributeError):
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def write_json(path: Path, content: dict) -> None:
    """`write_bytes` of an object as JSON."""
    write_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write by temporary file and rename: a reader sees the old file or the new, never half of one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".record-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_text(path: Path) -> str:
    """The text of a regular file of at most LARGEST_RECORD_BYTES. Raises RecordError where it is none, or larger."""
    try:
        if not path.is_file():
            raise RecordError(f"{path.name} is not a regular file")
        size = path.stat().st_size
        if size > LARGEST_RECORD_BYTES:
            raise RecordError(f"{path.name} has {size / 1e6:,.0f} MB, more than any record")
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise RecordError(f"{path.name} cannot be read ({error.strerror or error})") from None


class OneLineParser(argparse.ArgumentParser):
    """argparse without the usage block: bad input gets one line and exit code 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def printable(text: object, longest: int = 300) -> str:
    """One line of a text that anybody may have written: without control characters, cut where it is long."""
    line = "".join(c if c.isprintable() else " " for c in str(text))
    return line if len(line) <= longest else line[: longest - 1] + "…"


def read_envelope(path: Path) -> dict:
    """Read and check an envelope. Raises RecordError for a file that is corrupt, foreign, newer or too large."""
    text = read_text(path)
    try:
        envelope = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path.name} is not readable JSON ({type(error).__name__})") from None
    version = envelope.get("schema_version") if isinstance(envelope, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise RecordError(f"{path.name} is not a record of this benchmark")
    if version > SCHEMA_VERSION:
        raise NewerSchemaError(f"{path.name} has schema version {version}; this report reads up to {SCHEMA_VERSION}")
    steps, workload, environment = (envelope.get(key) for key in ("steps", "workload", "environment"))
    if not (isinstance(steps, list) and steps and isinstance(workload, dict) and isinstance(environment, dict)):
        raise RecordError(f"{path.name} is not a record of this benchmark")
    envelope["steps"] = [_checked_step(step, path) for step in steps]
    peers = envelope.get("peers") or []
    if not isinstance(peers, list):
        raise RecordError(f"{path.name} holds peers that are no list")
    envelope["peers"] = [_checked_step(peer, path) for peer in peers]
    names = [row["step"] for row in envelope["steps"] + envelope["peers"]]
    if len(set(names)) < len(names):
        raise RecordError(f"{path.name} holds two rows of one name")
    try:
        envelope["roofs"] = checked_roofs(envelope["roofs"]) if envelope.get("roofs") else None
    except ValueError:
        raise RecordError(f"{path.name} holds roofs that are not numbers") from None
    return envelope


def checked_roofs(roofs: object) -> dict:
    """The roofs as they are. Raises ValueError where a rate is neither null nor a positive number."""
    if not isinstance(roofs, dict):
        raise ValueError("roofs are not an object")
    for name, rate in roofs.items():
        number = isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 < rate < math.inf
        if name.endswith("_per_s") and rate is not None and not number:
            raise ValueError(f"{name} is not a rate")
    return roofs


def _checked_step(step: object, path: Path) -> dict:
    """A step record with every field; RecordError where an ok step lacks the numbers reports are made of."""
    if not (isinstance(step, dict) and isinstance(step.get("step"), str) and step.get("status") in STATUSES):
        raise RecordError(f"{path.name} holds a step without a name or a known status")
    record = empty_step_record(step["step"], None) | step
    record["step"] = printable(record["step"], 100)
    for field in ("reason", "note"):
        record[field] = None if record[field] is None else printable(record[field])
    if record["status"] != "ok":
        return record | {"profile": None}
    try:
        timing = record["timing"]
        _check(timing["median_ms"], record["tokens_per_s"], record["model_flops_per_s"], above=0)
        _check(timing["warmup_s"], *(record[name] or 0 for name in ("peak_allocated_bytes", "peak_rss_bytes")))
        _check(*(timing.get("step_ms") or []), *(timing.get(key) or 1 for key in ("p25_ms", "p75_ms")), above=0)
        _check(*record["loss"], above=-math.inf)
        if record["profile"] is not None:
            _check_profile(record["profile"])
        if record["bytes_per_step"] is not None:
            _check(record["bytes_per_step"]["value"], above=0)
        if not (
            record["loss"] and isinstance(record["settings"], dict) and isinstance(record["gpu_state"] or {}, dict)
        ):
            raise ValueError
    except (TypeError, KeyError, ValueError, OverflowError, AttributeError):
        raise RecordError(f"{path.name} holds an ok step without its numbers") from None
    return record


def _check(*numbers: object, above: float | None = None) -> None:
    """Raises ValueError unless all are finite numbers, above a bound where one is given, else 0 or more."""
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ValueError
        if not (number >= 0 if above is None else number > above) or abs(number) > 1e30 or 0 < abs(number) < 1e-30:
            raise ValueError


def _check_profile(profile: dict) -> None:
    """Raises what a field of another kind raises."""
    shares = profile["shares"]
    if profile["bound_by"] is not None and profile["bound_by"] not in shares:
        raise ValueError
    entries = [*profile["categories"].values(), *profile["kernels"]]
    if not all(
        isinstance(kernel["name"], str) and isinstance(kernel["category"], str) for kernel in profile["kernels"]
    ):
        raise ValueError
    counts = (profile.get(name) or 0 for name in ("gpu_idle_ms", "kernels_per_step", "autograd_nodes_attention"))
    _check(profile["step_ms"], *(shares.values() if shares else ()), *counts)
    _check(*(entry[name] for entry in entries for name in ("ms", "launches")))


def describe_shape(shape: dict) -> str:
    """The fields that make a shape, by name: `n_layer 2, n_head 4, ...`."""
    fields = ("n_layer", "n_head", "n_embd", "seq_len", "vocab_size", "batch_size")
    return ", ".join(f"{field} {shape.get(field)}" for field in fields)


def smaller_batch(batch_size: int) -> str:
    """What to try when a step ran out of memory."""
    if batch_size > 1:
        return f"try --batch-size {2 ** int(math.log2(batch_size - 1))}"
    return "batch size 1 is already the smallest; try a smaller --seq-len, --n-layer or --n-embd"
