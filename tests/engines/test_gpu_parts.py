"""The GPU runtime's parts that need no GPU: buffers, records, slots, graph sizes, plans, loading, compiling ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memory_checkpoint import FP8, INT4, INT8
from tiny_models import tiny_llama

from calib.checkpoint import QuantizedCheckpoint
from calib.errors import ArtifactError
from calib.scheme import BF16, Grid, PerGroup, Scheme
from engines.build.buffers import assign, body_and_head
from engines.build.gpu_linears import impl_for
from engines.build.impls import TABLE
from engines.build.kernel_table import default_table
from engines.build.plan_gpu import make_gpu_plan
from engines.build.tune_gpu import sizes_for, tune_gpu
from engines.device import Device, NoDeviceError, detect
from engines.errors import EngineError
from engines.kernels.impl import KernelConfig
from engines.kernels.linear.impls import IMPLS
from engines.models.decoder import decoder_program
from engines.models.facts import ModelFacts
from engines.models.rope import RopeFacts
from engines.plan import EngineSpec, fused_program, linear_shape
from engines.program import AddNorm, Attention, Program, RopeKV, reads, writes
from engines.request import SamplingParams
from engines.runtime.cuda.graphs import PREFILL_TOKENS, decode_sizes, keys, smallest
from engines.runtime.cuda.neighbours import attention_groups, fences
from engines.runtime.cuda.record import HostRecord, Layout, RowWriter, Slots
from engines.runtime.sequence import Sequence

A8 = Scheme(weight=INT4.weight, pre_quant_scale=True,
            activation=Grid(dtype="int8", granularity=PerGroup(size=32), dynamic=True))
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
          "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


class Offline(Device):
    """An H200 that is not here."""

    @property
    def memory_bytes(self) -> int:
        return 8 << 30


H200 = Offline(kind="cuda", name="NVIDIA H200", isa="sm_90", torch="2", triton="3", num_sms=132, l2_bytes=60 << 20)
A100 = Offline(kind="cuda", name="NVIDIA A100", isa="sm_80", torch="2", triton="3", num_sms=108, l2_bytes=40 << 20)


def schemes_for(scheme: Scheme | None) -> tuple[dict[str, Scheme], dict[str, str]]:
    names = [f"model.layers.{layer}.{part}" for layer in range(3) for part in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj")]
    readers = {"q_proj": "in", "k_proj": "in", "v_proj": "in", "gate_proj": "in", "up_proj": "in"}
    keys = {name: f"{name.rpartition('.')[0]}.{readers.get(name.rpartition('.')[2], name)}" for name in names}
    return ({} if scheme is None else dict.fromkeys(names, scheme)), keys


def program_for(scheme: Scheme | None) -> Program:
    return fused_program(CONFIG, *schemes_for(scheme))[2]


@pytest.mark.parametrize("scheme", [None, INT8, FP8, INT4, A8], ids=["bf16", "int8", "fp8", "int4", "int4_a8"])
def test_no_two_live_values_share_a_buffer(scheme: Scheme | None) -> None:
    program = program_for(scheme)
    body, head = body_and_head(program)
    assignment = assign(program)
    last = {name: index for index, op in enumerate(body) for name in (*writes(op), *reads(op))}
    for op in head:
        last.update(dict.fromkeys(set(reads(op)) & set(last), len(body)))
    owner: dict[int, str] = {}
    for index, op in enumerate(body):
        for name in reads(op):
            value = assignment.values[name]
            assert owner[value.buffer] == name, f"{op.op} reads {name}, whose buffer now holds {owner[value.buffer]}"
            assert value.scales is None or owner[value.scales] == name
        for name in writes(op):
            value = assignment.values[name]
            held = owner.get(value.buffer)
            in_place = isinstance(op, AddNorm) and name == op.residual_out and held == op.residual
            assert held is None or in_place or last[held] < index, f"{name} overwrites {held}, which is read later"
            assert assignment.bytes_per_token[value.buffer] >= value.width * (1 if value.grid else 2)
            owner[value.buffer] = name
            if value.scales is not None:
                owner[value.scales] = name
    assert len(assignment.bytes_per_token) <= 8, "layers are alike: their buffers must be the same"


@pytest.mark.parametrize("scheme", [None, FP8, INT4], ids=["bf16", "fp8", "int4"])
def test_a_fused_attention_writes_into_nothing_it_reads(scheme: Scheme | None) -> None:
    """One kernel reads the qkv rows (and, with prefill rows beside it, q) and writes what its Quantize would."""
    program = program_for(scheme)
    values = assign(program).values
    groups = [group for group in attention_groups(program.ops) if isinstance(group.op, Attention)]
    assert len(groups) == 3
    for group in groups:
        assert group.rope is not None
        target = group.op.out if group.quant is None else group.quant.out
        read = {values[group.rope.qkv].buffer, values[group.rope.out].buffer}
        assert not read & {values[target].buffer, values[target].scales}


def test_the_norm_before_a_qkv_linear_is_the_fence() -> None:
    ops = program_for(None).ops
    fenced = fences(ops)
    assert len(fenced) == 3, "one a layer"
    assert set(fenced.values()) == {op.qkv for op in ops if isinstance(op, RopeKV)}


def test_layers_need_no_more_buffers_than_one() -> None:
    facts = {"family": "Llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4,
             "num_kv_heads": 2, "head_dim": 16, "norm_eps": 1e-5, "rope": RopeFacts(theta=1e4), "max_position": 64}
    programs = [decoder_program(ModelFacts(num_layers=layers, **facts), {}, {}) for layers in (2, 9)]
    sizes = [assign(program).bytes_per_token for program in programs]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("scheme", "name"), [(None, "bf16"), (INT8, "int8"), (FP8, "fp8"), (INT4, "int4_a16"),
                                              (A8, "int4_a8")])
def test_impl_by_grids(scheme: Scheme | None, name: str) -> None:
    assert impl_for(program_for(scheme).linears()[0]).name == name


def test_grids_without_a_kernel_are_refused_by_name() -> None:
    odd = Scheme(weight=Grid(dtype="int4", granularity=PerGroup(size=64), symmetric=False))
    with pytest.raises(EngineError, match=r"q_proj: int4 g64 asym weights with 16-bit activations"):
        impl_for(program_for(odd).linears()[0])


def test_step_sizes_and_graph_sizes() -> None:
    assert decode_sizes(1) == (1,)
    assert decode_sizes(6) == (1, 2, 4, 8)
    assert decode_sizes(256)[-1] == 256
    assert smallest((1, 2, 4), 3) == 4
    assert smallest((1, 2, 4), 5) is None
    assert all(smallest(PREFILL_TOKENS, tokens) < tokens + 256 for tokens in range(1, 2049)), "what padding may cost"
    found = keys(8, 64)
    assert found == sorted(found, key=lambda key: -key.tokens), "largest first: later graphs reuse the pool"
    assert {key.tokens for key in found if key.kind == "decode"} == {1, 2, 4, 8}
    head = program_for(None).linears()[-1]
    assert sizes_for(program_for(None).linears()[0], head, 600)[-1] == 1024
    assert sizes_for(head, head, 16384)[-1] == 256, "the output layer sees sampled rows only"


def test_plan_divides_memory_under_the_cap() -> None:
    spec = EngineSpec(device="cuda", max_seq_len=512, max_batch_size=8, max_num_tokens=256, memory=2 << 30, tune="none")
    schemes, by = schemes_for(INT8)
    program = fused_program(CONFIG, schemes, by)[2]
    linears = tune_gpu(program, H200, "none", 256, False, None, lambda event: None).choices
    plan = make_gpu_plan(CONFIG, schemes, BF16, spec, H200, by, linears)
    memory = plan.memory
    assert memory.total <= 2 << 30
    assert plan.limits.num_blocks == 8 * 32, "the cache is no larger than full sequences can use"
    assert {choice.impl for choice in plan.kernels if choice.op == "linear"} == {"int8", "bf16"}
    tight = spec.model_copy(update={"memory": memory.total - memory.kv_cache})
    with pytest.raises(EngineError, match=r"(?s)512 tokens needs .*weights .*GiB"):
        make_gpu_plan(CONFIG, schemes, BF16, tight, H200, by, linears)


def test_fp8_is_refused_below_sm89() -> None:
    schemes, by = schemes_for(FP8)
    with pytest.raises(EngineError, match=r"is fp8, which needs compute capability 8.9; NVIDIA A100 has 8.0"):
        make_gpu_plan(CONFIG, schemes, BF16, EngineSpec(device="cuda", tune="none"), A100, by, [])


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
                                   {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                                    "num_key_value_heads": 8, "head_dim": 128}], ids=["tiny", "small", "8b"])
@pytest.mark.parametrize("scheme", [None, INT8, FP8, INT4, A8], ids=["bf16", "int8", "fp8", "int4", "int4_a8"])
def test_deterministic_sums_a_linear_in_one_way(scheme: Scheme | None, sizes: dict[str, int]) -> None:
    """Where nothing is timed, too: each size's own first choice is not the same pair."""
    program = fused_program(CONFIG | sizes, *schemes_for(scheme))[2]
    tuned = tune_gpu(program, H200, "none", 4096, True, None, lambda event: None)
    for shape in {linear_shape(op) for op in program.linears()}:
        configs = [KernelConfig.from_json(choice.config or {}) for choice in tuned.choices if choice.shape == shape]
        assert {config.kernel for config in configs} == {"dot"}
        assert len({(config["BLOCK_K"], config["SPLIT_K"], dict(config.meta).get("FOLD")) for config in configs}) == 1


@pytest.mark.parametrize(("changes", "fused"), [
    ({}, 1), ({"architectures": ["Qwen3ForCausalLM"]}, 0), ({"partial_rotary_factor": 0.5,
                                                             "architectures": ["Phi3ForCausalLM"]}, 0)],
    ids=["llama", "norms of heads", "half a head"])
def test_few_sequences_take_the_kernel_that_rotates_itself_where_it_can(changes: dict[str, Any], fused: int) -> None:
    """Elsewhere they take one warp a program like everybody: wide tiles of many warps are that kernel's."""
    facts, _, program, _ = fused_program(CONFIG | changes, {}, {})
    table = default_table(facts, program, 16, BF16, H200.facts, deterministic=False)
    found = {(choice.shape, choice.max_tokens): KernelConfig.from_json(choice.config or {})
             for choice in table if choice.op == "attention_decode"}
    assert found["split", 4]["FUSED"] == fused
    assert found["split", 16]["FUSED"] == 0
    assert (found["split", 4].num_warps == 1) == (not fused)
    assert [key for key in found if key[0] == "long"] == [("long", 4)] * fused, "where a long context takes another"


def sequence(number: int, tokens: int, computed: int, blocks: list[int]) -> Sequence:
    return Sequence(number, list(range(tokens)), tokens, SamplingParams(), 0, frozenset(), computed=computed,
                    table=blocks)


def test_record_sends_blocks_once_and_names_sampled_tokens() -> None:
    record = HostRecord(Layout.of(4, 64, 32, 16), pinned=False)
    slots = Slots(4)
    first = sequence(0, 20, 0, [5, 6])
    writer = RowWriter(record, 16)
    writer.add(slots.of(first), 20)
    assert writer.finish(1) == record.used(2, 20)
    assert record.rows[:, 0].tolist() == [0, 0, 20, 0, -1, 0, 0, 2, 0]
    assert record.new_blocks[:2].tolist() == [5, 6]
    first.computed = 20
    first.reserve()
    slots.of(first).sample = 3
    writer = RowWriter(record, 16)
    writer.add(slots.of(first), 1)
    assert record.rows[:, 0].tolist() == [0, 20, 1, 0, 3, 0, 2, 0, 0], "no ids, no blocks: the device has both"


def test_slots_are_taken_back_and_preempted_sequences_start_anew() -> None:
    slots = Slots(2)
    one, two, three = (sequence(number, 4, 0, [number]) for number in range(3))
    assert (slots.of(one).slot, slots.of(two).slot) == (0, 1)
    slots.of(two).sent = 1
    two.preemptions = 1
    assert slots.of(two).sent == 0
    one.table.clear()
    assert slots.of(three).slot == 0
    with pytest.raises(EngineError, match="more sequences run"):
        slots.of(sequence(9, 4, 0, [9]))


def test_loading_finds_a_changed_byte(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from calib.artifact import file_sha256
    from engines.runtime.cuda.weights import _FileReader

    tensors = {"a": torch.arange(7, dtype=torch.int8), "b.weight": torch.randn(33, 5, dtype=torch.bfloat16),
               "c": torch.tensor(2.5)}
    path = tmp_path / "layer.safetensors"
    save_file(tensors, path)
    reader = _FileReader(torch.device("cpu"), path.stat().st_size)
    found = reader.read(path, file_sha256(path))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    digest = file_sha256(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match="is not the file that was built"):
        reader.read(path, digest)


def test_unknown_and_missing_devices_are_refused() -> None:
    with pytest.raises(Exception, match="unknown device 'gpu'"):
        detect("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(NoDeviceError, match="no CUDA device"):
            detect("cuda")


def test_every_impl_is_reachable() -> None:
    assert set(IMPLS) == {row.cuda for row in TABLE if row.cuda is not None}


def test_checkpoint_of_another_layout_is_packed_once(tmp_path: Path) -> None:
    """What ``pack_gpu`` stores unpacks to the stacked codes."""
    from memory_checkpoint import MemoryCheckpoint

    from engines.build.pack_gpu import pack_gpu
    from engines.kernels.impl import Packed

    folder = tiny_llama(tmp_path / "model")
    checkpoint = MemoryCheckpoint.of(folder, INT8)
    tensors = dict(checkpoint.tensors())
    program = fused_program(QuantizedCheckpoint.open(folder).config, checkpoint.schemes, {
        name: name.rpartition(".")[0] for name in checkpoint.schemes})[2]
    op = program.linears()[0]
    parts = [{field: tensors[f"{part}.{field}"] for field in ("weight", "weight_scale")} for part in op.parts]
    stored = pack_gpu(op, parts)
    codes, scale = impl_for(op).unpack(Packed(stored, op.n, op.k, facts={"per_tensor": 0}))
    assert torch.equal(codes, torch.cat([part["weight"] for part in parts]))
    assert scale is not None
    assert torch.equal(scale, torch.cat([part["weight_scale"] for part in parts]))
