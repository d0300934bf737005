"""Every family and every rope variant against transformers in float32, on tiny random models of the real architectures.

Logits, not only tokens: a prompt and then tokens one by one with the cache, several sequences of different lengths in
one step, beyond the window and beyond the original context, through the compiled step and through torch's operators.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.family_logits import BLOCK, differences
from benchmarks.tiny_families import FAMILIES, FIRST_CALL, ORIGINAL, ROPES, WINDOW, greedy, make, prompts, reference
from calib.checkpoint import QuantizedCheckpoint
from engines.build.builder import build, plan_for
from engines.errors import EngineError
from engines.llm import LLM
from engines.models.families import model_facts
from engines.plan import EngineSpec
from engines.request import SamplingParams

STEPS = 6
#: Largest difference of a logit, relative to the largest logit: float32 sums in another order.
BOUND = 3e-5
LONG = [name for name, tiny in (FAMILIES | ROPES).items() if tiny.changes.get("original_max_position_embeddings")]


def compare(tmp_path: Path, folder: Path, lengths: list[int], *, feed: int | None = None, **spec: int) -> None:
    texts = prompts(lengths, seed=2)
    following = prompts([STEPS] * len(texts), seed=3)
    found = differences(folder, tmp_path / "weights", texts, following, feed=feed, **spec)
    assert {part.split()[0] for part in found} == {"NativeBackend", "CpuBackend"}
    assert max(found.values()) < BOUND, found


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    lengths = [1, 5, WINDOW, WINDOW + 1, 60, 90]
    lengths = [length + ORIGINAL for length in lengths] if name in LONG else lengths
    compare(tmp_path, make(tmp_path / "model", FAMILIES[name], seed=1), lengths)


@pytest.mark.parametrize("name", ROPES)
def test_rope_variants_equal_transformers_beyond_the_original_context(tmp_path: Path, name: str) -> None:
    """dynamic against transformers fed token by token from the original context on (``models/rope.py`` says why)."""
    lengths = [ORIGINAL + 1, ORIGINAL + 30, 2 * ORIGINAL + 9]
    lengths = lengths if name in LONG else [3, *lengths, ORIGINAL - 3]
    compare(tmp_path, make(tmp_path / "model", ROPES[name], seed=1), lengths, feed=FIRST_CALL.get(name))


@pytest.mark.parametrize("name", LONG)
def test_longrope_engines_for_short_texts_take_the_short_factors(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "model", (FAMILIES | ROPES)[name], seed=1)
    compare(tmp_path, folder, [1, 30, ORIGINAL - STEPS], max_seq_len=ORIGINAL)
    notes = [plan_for(QuantizedCheckpoint.open(folder), EngineSpec(tune="none", max_seq_len=length))[0].notes[-1]
             for length in (ORIGINAL, ORIGINAL + 1)]
    assert "short factors for every text" in notes[0]
    assert "long factors for every text" in notes[1]


@pytest.mark.parametrize("name", [name for name in FAMILIES | ROPES if name not in LONG])
def test_greedy_tokens_equal_transformers(tmp_path: Path, name: str) -> None:
    """Across the window and the original context while generating, in chunks, in one batch of different lengths."""
    folder = make(tmp_path / "model", (FAMILIES | ROPES)[name], seed=1)
    model = reference(folder)
    batch = prompts([2, WINDOW - 3, 50, 60], seed=4)
    spec = EngineSpec(tune="none", max_num_tokens=17, max_batch_size=4, block_size=BLOCK)
    with LLM(build(QuantizedCheckpoint.open(folder), spec, tmp_path / "engine")) as llm:
        found = llm.generate(batch, SamplingParams(max_tokens=24, ignore_eos=True))
        assert [out.outputs[0].token_ids for out in found] == [greedy(model, prompt, 24) for prompt in batch]
        again = llm.generate(batch, SamplingParams(max_tokens=24, ignore_eos=True))  # their prefixes are kept now
        assert [out.outputs[0].token_ids for out in again] == [out.outputs[0].token_ids for out in found]
        assert llm.stats()["prefix_hit_tokens"] > 0


def test_plans_say_what_windows_and_ropes_mean(tmp_path: Path) -> None:
    folder = make(tmp_path / "gemma", FAMILIES["Gemma 3"])
    plan, _ = plan_for(QuantizedCheckpoint.open(folder), EngineSpec(tune="none"))
    assert plan.notes == (f"3 of 4 layers attend to the last {WINDOW} tokens; their KV cache is kept at full length "
                          "all the same",)
    short, _ = plan_for(QuantizedCheckpoint.open(folder), EngineSpec(tune="none", max_seq_len=WINDOW))
    assert short.notes == ()
    folder = make(tmp_path / "llama", FAMILIES["Llama"], head_dim=8)
    plan, _ = plan_for(QuantizedCheckpoint.open(folder), EngineSpec(tune="none"))
    assert "needs a head_dim that is a multiple of 16, not 8" in plan.notes[-1]


BASE = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(("architecture", "changes", "error"), [
    ("MistralForCausalLM", {"layer_types": ["sliding_attention", "full_attention"]}, "Ministral"),
    ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "bidirectional"),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
    ("Gemma2ForCausalLM", {"hidden_activation": "relu"}, "'relu' is not supported in a Gemma 2"),
    ("Qwen2ForCausalLM", {"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
    ("Qwen3ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window"),
    ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "llama3"}, "max_position_embeddings": 9}, "rope .* has no 'factor'"),
    ("Phi3ForCausalLM", {"rope_scaling": {"type": "su", "long_factor": [1.0]}, "max_position_embeddings": 9},
     "longrope rope of config.json has no 'short_factor'"),
    ("LlamaForCausalLM", {"head_dim": 3}, "head_dim is 3: .* 3 are no pairs"),
    ("LlamaForCausalLM", {"head_dim": 1}, "1 are no pairs"),
    ("Phi3ForCausalLM", {"partial_rotary_factor": 0.2}, "head_dim is 16, of which partial_rotary_factor 0.2 rotates 3"),
    ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window is 0, not a number of tokens above 0"),
    ("Phi3ForCausalLM", {"sliding_window": -5}, "sliding_window is -5"),
    ("Gemma2ForCausalLM", {"sliding_window": 24.5}, "sliding_window is 24.5"),
    ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, not a number above 0"),
    ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping must be above 0, not 0.0"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": -1}}, "factor must be above 0, not -1"),
    ("LlamaForCausalLM", {"rope_theta": 1.0, "max_position_embeddings": 9, "rope_scaling": {
        "type": "yarn", "factor": 2.0}}, "rope_theta 1.0, which must be above 1"),
    ("LlamaForCausalLM", {"head_dim": 2, "max_position_embeddings": 9, "rope_scaling": {
        "type": "dynamic", "factor": 2.0}}, "dynamic rope of config.json has no exponent for head_dim 2"),
    ("LlamaForCausalLM", {"max_position_embeddings": 9, "original_max_position_embeddings": 1, "rope_scaling": {
        "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}}, "reckoned with: .*division"),
    ("Phi3ForCausalLM", {"max_position_embeddings": 9000, "rope_scaling": {
        "type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}}, "7 factors in long_factor, a head has 8"),
    ("Phi3ForCausalLM", {"max_position_embeddings": 9000, "rope_scaling": {
        "type": "su", "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}}, "the factor 0.0 in short_factor"),
    ("LlamaForCausalLM", {"max_position_embeddings": 1}, "max_position_embeddings is 1"),
    ("LlamaForCausalLM", {"is_causal": False}, "is_causal is false in config.json"),
    ("Gemma3ForCausalLM", {"layer_types": ["full_attention"] * 3}, "layer_types is .* not a list of 2 entries"),
    ("Qwen3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types is .* not a list of 2 entries"),
    ("Gemma2ForCausalLM", {"layer_types": []}, r"layer_types is \[\], not a list of 2 entries"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn"}, "max_position_embeddings": 9}, "yarn rope .* no 'factor'"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "linear"}}, "linear rope of config.json has no 'factor'"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "dynamic"}}, "dynamic rope of config.json has no 'factor'"),
    ("Gemma2ForCausalLM", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is None, not a number above 0"),
    ("Gemma3ForCausalLM", {"query_pre_attn_scalar": "9"}, "query_pre_attn_scalar is '9', not a number above 0"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_settings_that_are_not_computed_are_refused(architecture: str, changes: dict, error: str) -> None:
    with pytest.raises(EngineError, match=error):
        model_facts(BASE | {"architectures": [architecture]} | changes)


@pytest.mark.parametrize("named", [{"architectures": None}, {"architectures": []}, {}])
def test_a_config_that_names_no_architecture_is_told_the_supported_ones(named: dict) -> None:
    with pytest.raises(EngineError, match=r"names no architectures \(its model_type is 'llama'\)") as error:
        model_facts(BASE | {"model_type": "llama"} | named)
    assert 'Add "architectures": ["LlamaForCausalLM"]' in error.value.hint
    assert "Supported: Gemma2ForCausalLM" in error.value.hint


def test_facts_follow_the_defaults_of_older_files() -> None:
    """Published config.json files leave out what transformers has defaults for."""
    gemma = model_facts(BASE | {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4})
    assert (gemma.head_dim, gemma.windows, gemma.attention_softcap, gemma.logit_softcap) == (
        256, (4096, 0, 4096, 0), 50.0, 30.0)
    assert gemma.tied_embeddings
    three = model_facts(BASE | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "rope_theta": 5e5,
                                "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert [bool(window) for window in three.windows] == [True] * 5 + [False, True]
    assert three.local_rope is not None
    assert (three.rope.theta, three.rope.factor, three.local_rope.theta, three.max_position) == (5e5, 8.0, 1e4, 131072)
    mistral = model_facts(BASE | {"architectures": ["MistralForCausalLM"], "sliding_window": None})
    assert mistral.windows == ()
    phi = model_facts(BASE | {"architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 131072, "rope_scaling": {
        "type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}})
    assert (phi.rope.kind, phi.rope.original, phi.rope.factor) == ("longrope", 4096, 32.0)
    stretched = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    qwen = model_facts(BASE | {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768,
                               "rope_scaling": stretched})
    assert (qwen.max_position, qwen.qkv_bias, qwen.output_bias) == (131072, True, False)
