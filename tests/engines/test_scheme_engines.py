"""Every scheme of the table against calibration's own oracle: a Hugging Face module with dequantized weights and
fake-quantized activations, which shares no code with the engines. Shapes are multiples of neither 128 nor each other.

Stated bound on logits, relative to the largest one. Where both do the same arithmetic only the order of float32 sums
differs: 1e-5, which schemes without quantized activations keep in every row. A value on the edge between two codes may
round either way, and moves a logit by one step of its activation; in a random network everything after it follows. So
of many short prompts the median row keeps 1e-5 and every row keeps one coarse step, 0.1. Greedy tokens are the oracle's
wherever its margin is more than twice the bound. Where q, k and v have column orders of their own nothing can be
stacked, so torch's operators run, which round int4 weights to fp16: 2e-3.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_steps import logits_of, open_backends, steps
from memory_checkpoint import FP8, FP8_KV, INT8, MemoryCheckpoint
from tiny_models import VOCAB, tiny_llama

from calib.model import load_model
from calib.scheme import BF16, Grid, PerBlock, PerChannel, PerGroup, PerTensor, PerToken, Scheme
from engines.build.builder import build
from engines.build.impls import TABLE, row_for
from engines.errors import EngineError
from engines.kernels.cpu.native.grids import integer_rows
from engines.llm import LLM
from engines.plan import EngineSpec
from engines.request import SamplingParams

FP8_TOKEN = Grid(dtype="fp8_e4m3", granularity=PerToken(), dynamic=True)
FP8_GROUP = Grid(dtype="fp8_e4m3", granularity=PerGroup(size=128), dynamic=True)
FP8_BLOCK = Grid(dtype="fp8_e4m3", granularity=PerBlock(rows=128, cols=128))
FP8_CHANNEL = Grid(dtype="fp8_e4m3", granularity=PerChannel())
INT8_TOKEN, INT8_TENSOR = INT8.activation, Grid(dtype="int8")
INT8_KV = Grid(dtype="int8")
ROUNDED, EXACT, HALF = 0.1, 1e-5, 2e-3


def int4(size: int, symmetric: bool = True) -> Grid:
    return Grid(dtype="int4", granularity=PerGroup(size=size), symmetric=symmetric)


@dataclass(frozen=True)
class Case:
    scheme: Scheme
    kv: Grid = BF16
    kv_heads: int = 0
    head: Scheme | None = None
    orders: str = "shared"

    @property
    def rounded(self) -> bool:
        """Whether anything is rounded at run time."""
        schemes = [self.scheme] + ([] if self.head is None else [self.head])
        return self.kv.quantized or any(scheme.activation is not None for scheme in schemes)

    def of(self, folder: Path) -> MemoryCheckpoint:
        return MemoryCheckpoint.of(folder, self.scheme, self.head, kv=self.kv, kv_heads=self.kv_heads,
                                   orders=self.orders, input_scale=0.05)


def w(weight: Grid, activation: Grid | None = None, *, pre_quant_scale: bool = False, act_order: bool = False) -> Case:
    return Case(Scheme(weight=weight, activation=activation, pre_quant_scale=pre_quant_scale, act_order=act_order))


CASES = {
    "bf16": w(BF16), "fp8": Case(FP8), "fp8_dynamic": w(FP8_CHANNEL, FP8_TOKEN), "fp8_weight_only": w(FP8_CHANNEL),
    "fp8_tensor_weight_only": w(FP8.weight), "fp8_block": w(FP8_BLOCK, FP8_GROUP), "fp8_block_16": w(FP8_BLOCK),
    "int8": Case(INT8), "int8_static": w(INT8.weight, INT8_TENSOR), "int8_weight_only": w(INT8.weight),
    "int8_groups": w(Grid(dtype="int8", granularity=PerGroup(size=128))),
    "int4": w(int4(32), pre_quant_scale=True), "int4_ragged": w(int4(128)),
    "int4_channel": w(Grid(dtype="int4", granularity=PerChannel())),
    "int4_asym": w(int4(32, False)), "int4_asym_ragged": w(int4(128, False), pre_quant_scale=True),
    "int4_order": w(int4(32), act_order=True), "int4_order_ragged": w(int4(128), act_order=True),
    "int4_orders_apart": Case(Scheme(weight=int4(32), act_order=True), orders="own"),
    "int4_asym_order": w(int4(32, False), act_order=True),
    "int4_a8": w(int4(32), Grid(dtype="int8", granularity=PerGroup(size=32), dynamic=True)),
    "int4_a8_ragged": w(int4(128), Grid(dtype="int8", granularity=PerGroup(size=128), dynamic=True)),
    "int4_a8_token": w(int4(32), INT8_TOKEN), "w4a8_fp8": w(int4(32), FP8_TOKEN),
    "w4a8_fp8_static": w(int4(32), FP8.activation, pre_quant_scale=True),
    "kv_int8": Case(INT8, INT8_KV), "kv_int8_heads": Case(Scheme(), Grid(dtype="int8", granularity=PerChannel()), 2),
    "kv_fp8": Case(FP8, FP8_KV), "kv_fp8_heads": Case(Scheme(), Grid(dtype="fp8_e4m3", granularity=PerChannel()), 2),
    "head_fp8": Case(INT8, head=w(FP8_CHANNEL, FP8_TOKEN).scheme), "head_int8": Case(INT8, head=INT8),
    "head_int4": Case(Scheme(weight=int4(32)), head=Scheme(weight=int4(32, False))),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of 192 and 320 (one and a half and two and a half blocks), q, k and v of 192, 64 and 64 rows."""
    return tiny_llama(tmp_path_factory.mktemp("schemes") / "model", seed=7, hidden_size=192, intermediate_size=320,
                      num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=2, initializer_range=0.08,
                      tie_word_embeddings=False)


def oracle_of(checkpoint: MemoryCheckpoint) -> torch.nn.Module:
    model = load_model(checkpoint)
    for layer in model.model.layers if checkpoint.kv_heads else ():
        for name in ("k_scale", "v_scale"):
            setattr(layer.self_attn, name, getattr(layer.self_attn, name).view(-1, 1, 1))
    return model


def test_the_cases_are_the_whole_table() -> None:
    rows = {row_for(case.scheme.weight, case.scheme.activation) for case in CASES.values()}
    assert rows == set(TABLE)


@pytest.mark.parametrize("name", CASES)
def test_scores_and_greedy_tokens_are_the_oracles(folder: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    checkpoint = case.of(folder)
    oracle = oracle_of(checkpoint)
    engine = build(checkpoint, EngineSpec(tune="none", max_num_tokens=64), tmp_path / name)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCAB, length).tolist() for length in (*[3] * 40, 90)]
    every = np.arange(VOCAB)
    with LLM(engine) as llm:
        scores = llm.loglikelihood(prompts, at_ids=[np.tile(every, (len(prompt) - 1, 1)) for prompt in prompts])
        greedy = [out.outputs[0].token_ids for out in llm.generate(
            prompts[:12], SamplingParams(max_tokens=6, ignore_eos=True))]
        alone = llm.generate([prompts[5]], SamplingParams(max_tokens=6, ignore_eos=True))[0].outputs[0].token_ids
    assert alone == greedy[5], "a row depends on its mates"
    errors = []
    for prompt, score in zip(prompts, scores, strict=True):
        logits = logits_by(oracle, prompt)[:-1]
        errors.append(np.abs(score.at_logprobs - logits.log_softmax(-1).numpy()).max(-1) / float(logits.abs().max()))
    rows = np.concatenate(errors)
    usual = HALF if case.orders == "own" else EXACT
    bound = ROUNDED if case.rounded else usual
    assert np.median(rows[:80]) < usual, np.quantile(rows, [0.1, 0.5, 0.9])
    assert rows.max() < bound, rows.max()
    clear = 0
    for prompt, tokens in zip(prompts, greedy, strict=False):
        logits = logits_by(oracle, [*prompt, *tokens])[len(prompt) - 1:-1]
        best, second = logits.topk(2).values.unbind(-1)
        decided = best - second > 2 * bound * logits.abs().amax(-1)
        clear += int(decided.sum())
        assert torch.equal(logits.argmax(-1)[decided], torch.tensor(tokens)[decided])
    assert clear >= (4 if case.rounded else 70), clear


def test_layers_of_two_schemes_run_in_one_engine(folder: Path, tmp_path: Path) -> None:
    """Layer 1 raised from int4 to int8: each layer has its own tiles, and scores are the oracle's."""
    checkpoint = MemoryCheckpoint.of(folder, Scheme(weight=int4(32), pre_quant_scale=True))
    raised = Scheme(weight=Grid(dtype="int8", granularity=PerChannel()))
    checkpoint.schemes |= {name: raised for name in checkpoint.schemes if ".layers.1." in name}
    _, one, _ = open_backends(tmp_path, checkpoint)
    kinds = {(".layers.1." in op.parts[0], one._tiles[op.out].kind.name) for op in one._plan.program.linears()
             if op.parts != ("lm_head",)}
    assert kinds == {(False, "INT4"), (True, "INT8_WIDE")}
    oracle, prompts = load_model(checkpoint), [np.random.default_rng(0).integers(0, VOCAB, n).tolist() for n in (3, 90)]
    engine = build(checkpoint, EngineSpec(tune="none", max_num_tokens=64), tmp_path / "engine")
    with LLM(engine) as llm:
        scores = llm.loglikelihood(prompts, at_ids=[np.tile(np.arange(VOCAB), (len(prompt) - 1, 1))
                                                    for prompt in prompts])
    for prompt, score in zip(prompts, scores, strict=True):
        logits = logits_by(oracle, prompt)[:-1]
        assert np.abs(score.at_logprobs - logits.log_softmax(-1).numpy()).max() < EXACT * float(logits.abs().max())


def logits_by(oracle: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].orders == "shared"])
def test_both_backends_agree_and_keep_the_memory_promise(folder: Path, tmp_path: Path, name: str) -> None:
    """The torch backend within rounding of the compiled one; one thread and two bit for bit; codes stay narrow."""
    case = CASES[name]
    reference, one, two = open_backends(tmp_path, case.of(folder))
    with torch.inference_mode():
        for batch in steps():
            wanted, found = logits_of(reference, batch), logits_of(one, batch)
            assert torch.equal(found, logits_of(two, batch)), "the number of threads changed a bit"
            assert (wanted - found).abs().max() <= (0.3 if case.rounded else 2e-5) * wanted.abs().max()
    row = row_for(case.scheme.weight, case.scheme.activation)
    assert row is not None
    for op in one._plan.program.linears():
        tiles = one._tiles[op.out]
        if op.parts != ("lm_head",):
            assert tiles.kind.name == ("INT4_INDEX" if case.scheme.act_order else row.cpu)
        assert (tiles.kind.name == "INT8") == integer_rows(op.weight, op.activation)
    held = sum(tiles.nbytes for tiles in one._tiles.values())
    assert held <= 1.05 * one._plan.memory.weights
    narrow = {"int4": 6, "int8": 9, "fp8_e4m3": 9, "bf16": 16}[case.scheme.weight.dtype]
    body = [op for op in one._plan.program.linears() if op.parts != ("lm_head",)]
    assert sum(one._tiles[op.out].nbytes for op in body) * 8 <= narrow * sum(op.n * op.k for op in body)


@pytest.mark.parametrize(("scheme", "kv", "found"), [
    (Scheme(weight=int4(32, False), activation=INT8_TOKEN), BF16, r"int4 g32 asym weights with int8 token dynamic"),
    (Scheme(weight=FP8.weight, activation=Grid(dtype="fp8_e4m3", dynamic=True)), BF16, "fp8_e4m3 tensor dynamic"),
    (Scheme(weight=FP8.weight, act_order=True), BF16, "in act_order"),
    (Scheme(weight=Grid(dtype="nvfp4", granularity=PerGroup(size=16))), BF16, "nvfp4 g16 weights"),
    (Scheme(weight=INT8.weight, activation=Grid(dtype="int8", symmetric=False)), BF16, "int8 tensor asym"),
    (INT8, Grid(dtype="int8", granularity=PerToken(), dynamic=True), "KV cache on int8 token dynamic"),
], ids=str)
def test_what_nobody_implements_is_refused_by_name_before_a_weight_is_read(folder, tmp_path, scheme, kv, found) -> None:
    checkpoint = MemoryCheckpoint.of(folder, INT8)
    checkpoint.schemes = {"model.layers.0.mlp.up_proj": scheme}
    checkpoint.kv = kv
    checkpoint.tensors = lambda: iter(())
    with pytest.raises(EngineError, match=found) as error:
        build(checkpoint, EngineSpec(tune="none"), tmp_path / "engine")
    assert "Implemented: " in str(error.value.hint)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("weight", [PerTensor(), PerChannel()], ids=str)
def test_wrong_scales_are_errors_that_name_them(folder: Path, tmp_path: Path, weight) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale"
    checkpoint = MemoryCheckpoint.of(folder, Scheme(weight=Grid(dtype="int8", granularity=weight)))
    checkpoint.extra[name] = torch.ones(7)
    with pytest.raises(EngineError, match=r"up_proj.weight_scale is \[7\], int8 (tensor|channel) wants \["):
        build(checkpoint, EngineSpec(tune="none"), tmp_path / "engine")
