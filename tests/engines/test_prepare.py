"""Engines prepared for a device that is not here: the weights of a build there, refusals in words, and a first open."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_checkpoint import FP8, INT8, MemoryCheckpoint

from calib.artifact_writer import ArtifactWriter
from calib.checkpoint import QuantizedCheckpoint
from calib.errors import ArtifactError, ToolkitError, UnknownNameError
from engines.build import prepare as preparing
from engines.build.builder import build, foresee
from engines.build.prepare import FORMAT, KIND, Prepared, device_here, finish, prepare
from engines.device import CAPABILITIES, Device, NoDeviceError
from engines.errors import EngineError, EngineMismatchError
from engines.llm import LLM
from engines.plan import EngineSpec
from engines.request import SamplingParams

LIMITS: dict[str, Any] = {"max_seq_len": 128, "max_batch_size": 4, "max_num_tokens": 64, "tune": "none"}
WEIGHTS = "weights/rank0/"


def weights_of(files) -> dict[str, str]:
    return {name: entry.sha256 for name, entry in files.items() if name.startswith(WEIGHTS)}


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_finished_it_is_the_engine_that_is_built_here(llama_folder: Path, tmp_path: Path, precision: str) -> None:
    source = (QuantizedCheckpoint.open(llama_folder) if precision == "bf16" else
              MemoryCheckpoint.of(llama_folder, INT8))
    built = build(source, EngineSpec(**LIMITS), tmp_path / "built")
    prepared = prepare(source, EngineSpec(**LIMITS), "cpu", tmp_path / "prepared")
    made = finish(prepared, tmp_path / "made")
    assert made.digest == built.digest
    assert made.artifact.verify() == []
    assert made.timings()["prepared"] == prepared.artifact.digest, "where it came from is evidence"
    assert "prepared" not in built.timings()
    name = next(iter(weights_of(made.artifact.manifest.files)))
    assert made.artifact.file(name).stat().st_ino == prepared.artifact.file(name).stat().st_ino, "stored once"
    answers = []
    for engine in (built, made):
        with LLM(engine) as llm:
            answers.append(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8))[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
def test_for_a_gpu_weights_lie_as_its_kernels_read_them(llama_folder: Path, tmp_path: Path) -> None:
    source = MemoryCheckpoint.of(llama_folder, INT8)
    prepared = prepare(source, EngineSpec(**LIMITS), "sm_90", tmp_path / "prepared")
    interpreted = build(source, EngineSpec(device="interpreter", **LIMITS), tmp_path / "interpreted")
    assert weights_of(prepared.artifact.manifest.files) == weights_of(interpreted.artifact.manifest.files)
    assert weights_of(prepared.artifact.manifest.files)
    assert prepared.record.program == interpreted.plan.program
    assert (prepared.record.target, prepared.record.spec.device) == ("sm_90", "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
def test_finished_by_the_gpu_path_it_is_the_engine_that_is_built_there(llama_folder: Path, tmp_path: Path) -> None:
    """The interpreter stands in for the card: the same packing, plan, record and runner."""
    source = MemoryCheckpoint.of(llama_folder, INT8)
    limits: dict[str, Any] = {"max_seq_len": 24, "max_batch_size": 1, "max_num_tokens": 8, "tune": "none",
                              "memory": 64 << 20}
    built = build(source, EngineSpec(device="interpreter", **limits), tmp_path / "built")
    prepared = prepare(source, EngineSpec(**limits), "interpreter", tmp_path / "prepared")
    for_a_card = prepare(source, EngineSpec(**limits | {"memory": None}), "sm_90", tmp_path / "card")
    assert weights_of(prepared.artifact.manifest.files) == weights_of(for_a_card.artifact.manifest.files)
    made = finish(prepared, tmp_path / "made")
    assert made.digest == built.digest != prepared.artifact.digest
    answers = []
    for engine in (built, made):
        with LLM(engine) as llm:
            answers.append(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_the_same_checkpoint_gives_the_same_digest(llama_folder: Path, tmp_path: Path) -> None:
    source = QuantizedCheckpoint.open(llama_folder)
    first, second = (prepare(source, EngineSpec(**LIMITS), "sm_90", tmp_path / name) for name in "ab")
    other = prepare(source, EngineSpec(**LIMITS), "sm_80", tmp_path / "c")
    assert first.artifact.digest == second.artifact.digest != other.artifact.digest


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_elsewhere_it_refuses_in_one_sentence(llama_folder: Path, tmp_path: Path) -> None:
    prepared = prepare(QuantizedCheckpoint.open(llama_folder), EngineSpec(**LIMITS), "sm_90", tmp_path / "prepared")
    for attempt in (lambda: device_here(prepared), lambda: finish(prepared, tmp_path / "made")):
        with pytest.raises(EngineMismatchError) as refused:
            attempt()
        assert refused.value.message == (f"{prepared.artifact.path} was prepared for sm_90, and this machine has no "
                                         "CUDA device that torch can use")
        assert "toolkit build" in refused.value.hint
    assert not (tmp_path / "made").exists()


def test_another_card_refuses_in_one_sentence(llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                              ) -> None:
    prepared = prepare(QuantizedCheckpoint.open(llama_folder), EngineSpec(**LIMITS), "sm_90", tmp_path / "prepared")
    other = Device(kind="cuda", name="NVIDIA A100", isa="sm_80", torch="2.13.0", triton="3.6.0", num_sms=108)
    monkeypatch.setattr(preparing, "detect", lambda kind: other)
    with pytest.raises(EngineMismatchError) as refused:
        finish(prepared, tmp_path / "made")
    assert refused.value.message == f"{prepared.artifact.path} was prepared for sm_90, and this is {other}"
    assert refused.value.hint.endswith("--target sm_80 --out DIR")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("target", "scheme", "spec", "kind", "words"), [
    ("tpu", INT8, {}, UnknownNameError, "tpu"), ("sm_9", INT8, {}, UnknownNameError, "sm_9"),
    ("sm_75", INT8, {}, NoDeviceError, "7.5; the kernels need 8.0"),
    ("sm_999", INT8, {}, UnknownNameError, "unknown target 'sm_999'"),
    ("sm_90", INT8, {"memory": 1}, EngineError, "a cap of 1 bytes is less than weights of"),
    ("cpu", INT8, {"memory": 1}, EngineError, "bytes of KV cache; 0 are left"),
    ("cpu", INT8, {"max_batch_size": 10**11}, EngineError, "64 is less than max_batch_size 100,000,000,000"),
    ("sm_90", INT8, {"max_batch_size": 65}, EngineError, "max_num_tokens 64 is less than max_batch_size 65"),
    ("sm_90", INT8, {"max_batch_size": 6, "max_num_tokens": 6}, EngineError, "less than 8, the largest decode step of"),
    ("sm_80", FP8, {}, EngineError, "needs compute capability 8.9"),
    ("sm_90", INT8, {"compute_dtype": "fp32"}, EngineError, "no GPU kernels"),
    ("sm_90", INT8, {"max_seq_len": 10**6}, EngineError, "beyond the model's"),
    ("cpu", INT8, {"compute_dtype": "bf16"}, EngineError, "emulated on this CPU")], ids=str)
def test_what_the_target_cannot_do_is_refused_before_anything_is_written(
        llama_folder: Path, tmp_path: Path, target: str, scheme, spec, kind: type[ToolkitError], words: str) -> None:
    with pytest.raises(kind, match=words):
        prepare(MemoryCheckpoint.of(llama_folder, scheme), EngineSpec(**(LIMITS | spec)), target, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_targets_are_those_that_tritons_assembler_knows(llama_folder: Path, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    [assembler] = Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas-blackwell")
    known = subprocess.run([assembler, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(f"'sm_{capability}'" in known for capability in CAPABILITIES)
    with pytest.raises(UnknownNameError) as refused:
        prepare(QuantizedCheckpoint.open(llama_folder), EngineSpec(**LIMITS), "sm_91", tmp_path / "out")
    assert all(f"sm_{capability}" in refused.value.hint for capability in CAPABILITIES)


@pytest.mark.parametrize(("spec", "words"), [
    ({"max_batch_size": 10**11}, "max_num_tokens 64 is less than max_batch_size 100,000,000,000"),
    ({"max_batch_size": 10**11, "max_num_tokens": 10**12}, "a step of 1,000,000,000,000 tokens works in"),
    ({"max_num_tokens": 2049}, "max_num_tokens 2,049 is more than a step can hold: 4 sequences of 128 tokens are 512"),
    ({"memory": 10**17}, "a cap of 100,000,000,000,000,000 bytes is more than"),
    ({"memory": 1}, "bytes of KV cache; 0 are left"), ({"max_seq_len": 10**12}, "is beyond the model's 256 positions"),
    ({"block_size": 10**12}, "bytes of KV cache")], ids=str)
def test_what_no_build_can_be_is_refused_before_there_is_a_checkpoint(llama_folder: Path, spec, words: str) -> None:
    source = QuantizedCheckpoint.open(llama_folder)
    foresee(source, EngineSpec(**LIMITS))
    with pytest.raises(EngineError, match=words):
        foresee(source, EngineSpec(**(LIMITS | spec)))


def test_a_place_that_is_taken_is_refused_before_the_work(engine, llama_folder: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    source = QuantizedCheckpoint.open(llama_folder)
    prepared = prepare(source, EngineSpec(**LIMITS), "cpu", tmp_path / "prepared")
    monkeypatch.setattr(preparing, "write_weights", None)  # work would be a TypeError
    monkeypatch.setattr(preparing, "plan_on", None)
    for attempt in (lambda: prepare(source, EngineSpec(**LIMITS), "cpu", engine.path),
                    lambda: finish(prepared, engine.path), lambda: finish(prepared, prepared.artifact.path / "inside")):
        with pytest.raises(ArtifactError, match=r"already exists|lies inside the artifact"):
            attempt()


def test_records_that_do_not_hold_together_are_refused(llama_folder: Path, tmp_path: Path) -> None:
    prepared = prepare(QuantizedCheckpoint.open(llama_folder), EngineSpec(**LIMITS), "cpu", tmp_path / "prepared")
    whole = prepared.artifact.record
    for number, (record, parents, words) in enumerate((
            (whole | {"target": "sm_90"}, ["0" * 64], "prepared for sm_90, and its spec is for cpu"),
            (whole | {"kv": None}, ["0" * 64], "a record that cannot be read"),
            (whole, [], "does not say which checkpoint"))):
        with ArtifactWriter(tmp_path / str(number), KIND, FORMAT, parents) as writer:
            writer.record = record
        with pytest.raises(EngineError, match=words):
            Prepared.open(tmp_path / str(number))


def test_changed_weights_and_other_programs_are_not_finished(llama_folder: Path, tmp_path: Path) -> None:
    prepared = prepare(QuantizedCheckpoint.open(llama_folder), EngineSpec(**LIMITS), "cpu", tmp_path / "prepared")
    record = prepared.record.model_copy(update={"program": prepared.record.program.model_copy(update={
        "ops": prepared.record.program.ops[1:]})})
    with ArtifactWriter(tmp_path / "other", KIND, FORMAT, prepared.artifact.parents) as writer:
        writer.record = record.model_dump(mode="json")
        (writer.folder / "tokenizer").mkdir()
        prepared.tokenizer().save(writer.folder / "tokenizer")
    with pytest.raises(EngineError, match="another fused program"):
        finish(Prepared.open(tmp_path / "other"), tmp_path / "made")
    place = prepared.artifact.file(next(iter(weights_of(prepared.artifact.manifest.files))))
    data = bytearray(place.read_bytes())
    data[-1] ^= 1
    place.write_bytes(data)
    with pytest.raises(EngineError, match="was changed after it was made"):
        finish(prepared, tmp_path / "made")
