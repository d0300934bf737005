"""The artifact and its face: strict opening, digests, limits in numbers, LLM's behaviour."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from memory_checkpoint import FP8, FP8_KV, INT8, MemoryCheckpoint
from tiny_models import greedy, reference, tiny_llama

from calib.artifact import ArtifactError, digest_of
from calib.checkpoint import QuantizedCheckpoint
from calib.errors import UnknownNameError
from calib.scheme import Grid, PerBlock, PerGroup, Scheme
from engines.build import weights
from engines.build.builder import build
from engines.engine import Engine
from engines.errors import EngineError, EngineMismatchError, LimitError
from engines.llm import LLM
from engines.models.families import model_facts
from engines.plan import EngineSpec
from engines.request import SamplingParams

NONE = EngineSpec(tune="none")


def test_the_same_inputs_give_the_same_digest(engine: Engine, llama_folder: Path, tmp_path: Path) -> None:
    again = build(QuantizedCheckpoint.open(llama_folder), NONE, tmp_path / "again")
    assert again.digest == engine.digest
    assert again.checkpoint_digest == QuantizedCheckpoint.open(llama_folder).digest
    other = build(QuantizedCheckpoint.open(llama_folder), NONE.model_copy(update={"max_batch_size": 2}),
                  tmp_path / "other")
    assert other.digest != engine.digest
    assert again.artifact.verify() == []


def changed(engine: Engine, folder: Path, **device: str) -> Path:
    """A copy that says it was built on another device, with a manifest that is right in itself."""
    shutil.copytree(engine.path, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["record"]["plan"]["device"] |= device
    artifact = engine.artifact.manifest
    manifest["digest"] = digest_of(artifact.kind, artifact.format, artifact.parents, manifest["record"], artifact.files)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("device", [{"name": "Imaginary CPU"}, {"isa": "AVX1024"}, {"torch": "1.0.0"}], ids=str)
def test_elsewhere_it_refuses_in_one_sentence(engine: Engine, tmp_path: Path, device: dict[str, str]) -> None:
    folder = changed(engine, tmp_path / "moved", **device)
    with pytest.raises(EngineMismatchError) as error:
        Engine.open(folder)
    assert next(iter(device.values())) in error.value.message  # what was expected
    assert torch.__version__ in error.value.message  # what was found
    assert "toolkit build" in error.value.hint
    assert error.value.exit_code == 4


def test_truncated_or_foreign_folders_are_refused(engine: Engine, llama_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(engine.path, folder)
    file = next((folder / "weights").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=file.name):
        Engine.open(folder)
    with pytest.raises(ArtifactError, match="not an artifact"):
        Engine.open(llama_folder)


def test_a_checkpoint_that_lacks_or_adds_a_tensor_is_named(llama_folder: Path, tmp_path: Path) -> None:
    gone = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(EngineError, match=r"layers\.1\.mlp\.up_proj"):
        build(MemoryCheckpoint.of(llama_folder, INT8, drop=frozenset({gone})), NONE, tmp_path / "a")
    with pytest.raises(EngineError, match=r"no model\.norm\.weight"):
        build(MemoryCheckpoint.of(llama_folder, INT8, drop=frozenset({"model.norm.weight"})), NONE, tmp_path / "b")
    with pytest.raises(EngineError, match=r"layers\.0\.self_attn\.k_scale"):
        build(MemoryCheckpoint.of(llama_folder, FP8, kv=FP8_KV,
                                  drop=frozenset({"model.layers.0.self_attn.k_scale"})), NONE, tmp_path / "c")
    bad = {"model.layers.2.input_layernorm.weight": torch.full((64,), torch.nan)}
    with pytest.raises(EngineError, match=r"layers\.2\.input_layernorm\.weight holds NaN"):
        build(MemoryCheckpoint.of(llama_folder, INT8, extra=bad), NONE, tmp_path / "d")
    codes = {"model.norm.weight": torch.ones(64, dtype=torch.int8)}
    with pytest.raises(EngineError, match=r"model\.norm\.weight is torch\.int8; unquantized weights are"):
        build(MemoryCheckpoint.of(llama_folder, INT8, extra=codes), NONE, tmp_path / "e")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]  # nothing half-written


def test_an_error_waits_for_the_files_that_are_being_written(llama_folder: Path, tmp_path: Path, monkeypatch) -> None:
    """A layer that was still being written came back into the folder that the failed build had removed."""
    begun: list[Path] = []
    ended: list[Path] = []

    def slow(tensors: dict[str, torch.Tensor], path: Path) -> None:
        begun.append(path)
        time.sleep(0.3)
        ended.append(path)

    monkeypatch.setattr(weights, "_save", slow)
    broken = {"model.layers.2.input_layernorm.weight": torch.full((64,), torch.nan)}
    with pytest.raises(EngineError, match="holds NaN"):
        build(MemoryCheckpoint.of(llama_folder, INT8, extra=broken), NONE, tmp_path / "engine")
    assert begun
    assert sorted(begun) == sorted(ended)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_config_of_another_model_is_named(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(EngineError, match=r"64 x 96, config\.json says 64 x 80"):
        build(QuantizedCheckpoint.open(folder), NONE, tmp_path / "e")
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(("change", "error"), [
    ({"tp": 2}, "2 ranks"), ({"compute_dtype": "bf16"}, "bf16"),
    ({"max_seq_len": 999}, "256 positions"), ({"memory": 1000}, "one sequence of 256 tokens needs"),
], ids=str)
def test_specs_that_cannot_be_met_are_refused(llama_folder: Path, tmp_path: Path, change: dict, error: str) -> None:
    with pytest.raises(EngineError, match=error):
        build(QuantizedCheckpoint.open(llama_folder), NONE.model_copy(update=change), tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_grids_without_an_operator_are_refused(llama_folder: Path, tmp_path: Path) -> None:
    block = Scheme(weight=Grid(dtype="int8", granularity=PerBlock(rows=8, cols=8)))
    with pytest.raises(EngineError, match="8x8"):
        build(MemoryCheckpoint.of(llama_folder, block), NONE, tmp_path / "a")
    grouped = INT8.model_copy(update={"activation": Grid(dtype="int8", granularity=PerGroup(size=8), dynamic=True)})
    with pytest.raises(EngineError, match="int8 g8 dynamic activations"):
        build(MemoryCheckpoint.of(llama_folder, grouped), NONE, tmp_path / "b")


def test_unknown_architectures_devices_and_rope_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="MixtralForCausalLM"):
        model_facts({"architectures": ["MixtralForCausalLM"]})
    base = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 1}
    assert model_facts(base).num_kv_heads == 1
    with pytest.raises(EngineError, match="'proportional' is not supported"):
        model_facts(base | {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}})
    with pytest.raises(EngineError, match="gelu"):
        model_facts(base | {"hidden_act": "gelu"})


def test_limits_are_checked_at_admission_with_the_numbers(engine: Engine) -> None:
    with LLM(engine) as llm:
        with pytest.raises(LimitError, match="0 tokens"):
            llm.generate([[]])
        with pytest.raises(LimitError, match=r"250 prompt tokens \+ 10 max_tokens .* 256"):
            llm.generate([[1], [1] * 250], SamplingParams(max_tokens=10))
        with pytest.raises(LimitError, match="token id 272"):
            llm.generate([[272]])
        with pytest.raises(LimitError, match="nothing to score"):
            llm.loglikelihood([[1]])
        with pytest.raises(LimitError, match=r"at_ids has shape \[3, 1\] for a prompt of 3"):
            llm.loglikelihood([[1, 2, 3]], at_ids=[np.zeros((3, 1), int)])
        with pytest.raises(EngineError, match="2 sampling parameters for 1"):
            llm.generate([[1]], [SamplingParams(), SamplingParams()])
        stats = llm.stats()
        assert stats["free_blocks"] + stats["cached_blocks"] == stats["blocks"]
        assert stats["running"] == stats["waiting"] == 0


def test_text_streams_and_stops(engine: Engine) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with LLM(engine) as llm:
        [whole] = llm.generate("hello", params)
        assert whole.prompt_token_ids == llm.tokenizer.encode("hello")
        text = whole.outputs[0].text
        assert text == llm.tokenizer.decode(whole.outputs[0].token_ids)
        deltas = list(llm.stream("hello", params))
        assert "".join(delta.outputs[0].text for delta in deltas) == text
        assert [delta.outputs[0].token_ids[0] for delta in deltas] == whole.outputs[0].token_ids
        assert [delta.outputs[0].finish_reason for delta in deltas] == [None] * 39 + ["length"]
        stop = next(char for char in text if char.isascii() and char.isprintable())
        [stopped] = llm.generate("hello", SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,)))
        assert stopped.outputs[0].finish_reason == "stop"
        assert stopped.outputs[0].text == text[:text.find(stop)]
        third = whole.outputs[0].token_ids[2]
        [ended] = llm.generate("hello", SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(third,)))
        count = len(ended.outputs[0].token_ids)
        assert ended.outputs[0].token_ids == whole.outputs[0].token_ids[:count]
        assert ended.outputs[0].token_ids[-1] == third
        [later] = llm.generate("hello", SamplingParams(max_tokens=40, min_tokens=count + 3, ignore_eos=True,
                                                       stop_token_ids=(third,)))
        assert third not in later.outputs[0].token_ids[:count + 3]


def test_an_abandoned_stream_gives_its_blocks_back(engine: Engine, llama_folder: Path) -> None:
    with LLM(engine) as llm:
        stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
        stream.close()
        assert llm.stats()["used_blocks"] == 0
        expected = greedy(reference(llama_folder), [4, 5], 5)
        assert llm.generate([[4, 5]], SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids == expected


def test_seeds_do_not_know_their_batch(engine: Engine) -> None:
    params = [SamplingParams(max_tokens=15, temperature=1.0, top_p=0.9, seed=seed, ignore_eos=True)
              for seed in range(4)]
    prompts = [[seed + 1, seed + 2] for seed in range(4)]
    with LLM(engine) as llm:
        together = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
        alone = [llm.generate([prompt], its)[0].outputs[0].token_ids
                 for prompt, its in zip(prompts, params, strict=True)]
        assert together == alone
        assert llm.generate([prompts[0]], params[1])[0].outputs[0].token_ids != alone[0]


def test_logprobs_of_a_generation_are_those_of_its_score(engine: Engine) -> None:
    with LLM(engine) as llm:
        [out] = llm.generate([[7, 8, 9]], SamplingParams(max_tokens=10, ignore_eos=True, logprobs=2))
        completion = out.outputs[0]
        assert completion.logprobs is not None
        score = llm.loglikelihood([[7, 8, 9, *completion.token_ids]])[0]
        found = [report.logprob for report in completion.logprobs]
        assert np.abs(score.logprobs[2:] - found).max() < 1e-4
        assert all(report.logprob == max(report.top.values()) for report in completion.logprobs)
        assert llm.generate([[1]], SamplingParams(max_tokens=0))[0].outputs[0].token_ids == []


def test_a_closed_engine_says_so_and_an_open_one_describes_itself(engine: Engine) -> None:
    llm = LLM(engine.path)
    assert llm.numerics.startswith("cpu ")
    assert "tiles" in llm.numerics
    assert (llm.peak_memory_bytes or 1) > 0
    assert engine.size_bytes > 2 * sum(op.n * op.k for op in engine.plan.program.linears()) // 2
    assert (engine.recipe, engine.source_grid, engine.emulated) == ("bf16", None, False)
    llm.close()
    with pytest.raises(EngineError, match="was closed"):
        llm.generate([[1]])


def test_the_memory_cap_sizes_the_cache(llama_folder: Path, tmp_path: Path) -> None:
    probe = build(QuantizedCheckpoint.open(llama_folder), NONE, tmp_path / "probe").plan
    cap = probe.memory.weights + probe.memory.activations + 20 * probe.memory.kv_cache // probe.limits.num_blocks
    plan = build(QuantizedCheckpoint.open(llama_folder), NONE.model_copy(update={"memory": cap}), tmp_path / "e").plan
    assert plan.limits.num_blocks == 20
    assert plan.memory.total <= cap
