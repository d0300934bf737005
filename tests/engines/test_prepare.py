"""Engines prepared for a device that is not here: the weights of a build there, refusals in words, and a first open."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from memory_checkpoint import FP8, INT8, MemoryCheckpoint

from calib.artifact import ArtifactWriter
from calib.checkpoint import QuantizedCheckpoint
from calib.errors import ToolkitError, UnknownNameError
from engines.build.builder import build
from engines.build.prepare import Prepared, device_here, finish, prepare
from engines.device import NoDeviceError
from engines.errors import EngineError, EngineMismatchError
from engines.llm import LLM
from engines.plan import EngineSpec
from engines.request import SamplingParams

LIMITS = {"max_seq_len": 128, "max_batch_size": 4, "max_num_tokens": 64, "tune": "none"}
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


@pytest.mark.parametrize(("target", "scheme", "spec", "kind", "words"), [
    ("tpu", INT8, {}, UnknownNameError, "tpu"), ("sm_9", INT8, {}, UnknownNameError, "sm_9"),
    ("sm_75", INT8, {}, NoDeviceError, "7.5; the kernels need 8.0"),
    ("sm_80", FP8, {}, EngineError, "needs compute capability 8.9"),
    ("sm_90", INT8, {"compute_dtype": "fp32"}, EngineError, "no GPU kernels"),
    ("sm_90", INT8, {"max_seq_len": 10**6}, EngineError, "beyond the model's"),
    ("cpu", INT8, {"compute_dtype": "bf16"}, EngineError, "emulated on this CPU")], ids=str)
def test_what_the_target_cannot_do_is_refused_before_anything_is_written(
        llama_folder: Path, tmp_path: Path, target: str, scheme, spec, kind: type[ToolkitError], words: str) -> None:
    with pytest.raises(kind, match=words):
        prepare(MemoryCheckpoint.of(llama_folder, scheme), EngineSpec(**(LIMITS | spec)), target, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_changed_weights_and_other_programs_are_not_finished(llama_folder: Path, tmp_path: Path) -> None:
    prepared = prepare(QuantizedCheckpoint.open(llama_folder), EngineSpec(**LIMITS), "cpu", tmp_path / "prepared")
    record = prepared.record.model_copy(update={"program": prepared.record.program.model_copy(update={
        "ops": prepared.record.program.ops[1:]})})
    with ArtifactWriter(tmp_path / "other", "prepared-engine", 1, prepared.artifact.parents) as writer:
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
