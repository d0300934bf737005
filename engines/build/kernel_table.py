"""The KernelTable's entries for everything but linears, on a GPU: first candidates, by step size where that matters.

These kernels are bound by latency at decode and by bytes at prefill, and their spaces are small: the first candidate of
each list is what won on the devices it was timed on (docs/kernels). Tuning replaces an entry when another one is
faster in the chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calib.scheme import Grid
from engines.build.gpu_linears import activation_mode
from engines.build.impls import group_of
from engines.kernels import (
    attention_decode,
    attention_prefill,
    embedding,
    norm,
    quantize,
    read_ahead,
    rope_kv,
    sample,
    silu_mul,
)
from engines.kernels.impl import DeviceFacts, KernelConfig
from engines.kernels.jit import ActQuant as Mode
from engines.models.facts import ModelFacts
from engines.plan import KernelChoice
from engines.program import GatedSilu, Program, RopeKV

#: The largest step that any table has an entry for.
MOST_TOKENS = 1 << 30
#: The most sequences that are few for decode attention: latency counts, and long contexts have graphs of their own.
FEW = 4


def silu_shape(op: GatedSilu) -> str:
    """The key of a gated activation in the KernelTable."""
    return f"n={op.width} quant={None if op.quant is None else op.quant.grid}"


def entry(op: str, shape: str, tokens: int, config: KernelConfig) -> KernelChoice:
    return KernelChoice(op=op, shape=shape, max_tokens=tokens, impl="triton", config=config.to_json())


def mode_of(grid: Grid | None) -> Mode:
    """The kernels' mode of an activation grid that ``impls`` has accepted."""
    name = None if grid is None else activation_mode(grid)
    return Mode.NONE if name is None else Mode[name]


def rotate_themselves(facts: ModelFacts, program: Program) -> bool:
    """Whether decoding rows of every layer can take the attention kernel that rotates and stores its own token: whole
    heads are rotated, and without a norm of theirs."""
    return all(op.norms is None and facts.rope_of(op.local).rotary_dim(op.head_dim) == op.head_dim
               for op in program.ops if isinstance(op, RopeKV))


def taken(choice: KernelChoice, max_seq_len: int) -> bool:
    """Whether an engine takes the entry: attention for long contexts may begin beyond its longest sequence."""
    return choice.shape != "long" or (choice.config or {})["meta"]["FROM"] <= max_seq_len


def default_table(facts: ModelFacts, program: Program, block_size: int, kv: Grid, device: DeviceFacts,
                  deterministic: bool) -> tuple[KernelChoice, ...]:
    """One entry an Op and shape, or several where few and many tokens differ."""
    return tuple(_defaults(facts, program, block_size, kv, device, deterministic))


def _defaults(facts: ModelFacts, program: Program, block_size: int, kv: Grid, device: DeviceFacts,
              deterministic: bool) -> Iterator[KernelChoice]:
    hidden, kv_bytes = facts.hidden_size, 1 if kv.quantized else 2
    yield entry("embed", f"n={hidden}", MOST_TOKENS, embedding.candidates(hidden, device)[0])
    yield entry("norm", f"n={hidden}", MOST_TOKENS, norm.candidates(hidden, device)[0])
    yield entry("quantize", "any", MOST_TOKENS, quantize.candidates(hidden, device)[0])
    for tokens, most in ((1, 8), (16, MOST_TOKENS)):
        heads = rope_kv.candidates(facts.num_heads, facts.num_kv_heads, device, tokens)
        yield entry("rope_kv", "heads", most, heads[0])
    for op in {silu_shape(op): op for op in program.ops if isinstance(op, GatedSilu)}.values():
        grid = None if op.quant is None else op.quant.grid
        tiles = silu_mul.candidates(op.width, mode_of(grid), 0 if grid is None else group_of(grid), device)
        yield entry("silu_mul", silu_shape(op), MOST_TOKENS, tiles[0])
        yield entry("quantize", f"n={op.width}", MOST_TOKENS, quantize.candidates(op.width, device)[0])
    gqa, fused = facts.num_heads // facts.num_kv_heads, rotate_themselves(facts, program)
    for batch, most in ((8, MOST_TOKENS),) if deterministic else ((1, FEW), (8, 16), (32, 64), (128, MOST_TOKENS)):
        decode = attention_decode.candidates(facts.head_dim, block_size, kv_bytes, device, deterministic=deterministic,
                                             batch=batch, fused=fused)
        yield entry("attention_decode", "split", most, decode[0])
    if fused and not deterministic:
        for config in attention_decode.long_candidates(facts.head_dim, kv_bytes, device)[:1]:
            yield entry("attention_decode", "long", FEW, config)
    for batch, most in ((1, FEW), (8, MOST_TOKENS)):
        yield entry("read_ahead", "weights", most, read_ahead.candidates(device, batch)[0])
    tiles = attention_prefill.candidates(facts.head_dim, gqa, kv_bytes, device)
    yield from _prefill("tile", tiles, deterministic)
    rows = [] if deterministic or kv.quantized else attention_prefill.rows_candidates(facts.head_dim, gqa, device)
    if rows:
        yield from _prefill("rows", [*rows, *tiles], deterministic)
    yield entry("sample", f"n={facts.vocab_size}", MOST_TOKENS, sample.candidates(facts.vocab_size, device)[0])


def _prefill(shape: str, tiles: Sequence[KernelConfig], deterministic: bool) -> Iterator[KernelChoice]:
    """Small tiles for short chunks; one tile for all where a row's sum must not depend on its chunk."""
    small = min(tiles, key=lambda config: config["ROWS"])
    if not deterministic and small["ROWS"] < tiles[0]["ROWS"]:
        yield entry("attention_prefill", shape, small["ROWS"], small)
    yield entry("attention_prefill", shape, MOST_TOKENS, tiles[0])
