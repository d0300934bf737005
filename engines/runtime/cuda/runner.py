"""The GPU runner: launches steps ahead of the host, and hands their tokens over when they are there.

``launch`` writes one record, copies it, starts the step's graphs and asks for the sampled tokens to be copied back; it
waits for nothing. ``Pending.result`` waits for that copy. In between, the loop has launched the next step: tokens never
have to visit the host to be the next step's input, as ``kernels/prepare`` takes them from where the sampler left them.

    host     launch n+1 | read n, stop checks, text | launch n+2 | read n+1 ...
    device   ... step n | step n+1                  | step n+2 ...

**Prompts beside decoding rows.** A mixed step has no graph, and Python launches its kernels more slowly than the device
runs a short one. So where the new chunks are short, such a step is two launches (``parts``): the graph of the decoding
rows, then that of the chunks, behind which the rows' tokens are read. The weights are read once more, but nobody waits
for Python: a prompt of 128 tokens that joined 7 rows cost the step 39 ms, and costs 4 (an H200, 8B at fp8).

A sequence that stops in step n is in step n+1 already: that token is dropped. Its blocks may be given away at once, as
whatever comes to lie in them is written by a later step.

Scoring sequences are computed and read within ``launch``: the next step of a scoring run needs nothing from the host,
but its logits buffer is the same one.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from contextlib import AbstractContextManager, nullcontext

import torch

from engines.plan import Plan
from engines.runtime.cuda.arena import Arena
from engines.runtime.cuda.graphs import PREFILL_ROWS, PREFILL_TOKENS, Graphs, Key, decode_sizes, smallest
from engines.runtime.cuda.pending import Pending, Ring
from engines.runtime.cuda.record import HostRecord, RowWriter, Slots
from engines.runtime.cuda.shape import Shape
from engines.runtime.cuda.steps import Steps
from engines.runtime.sampler import Fault, adjust, adjusts
from engines.runtime.scheduler import Chunk
from engines.runtime.scores import score_rows
from engines.runtime.sequence import Sequence


class CudaRunner:
    """Runs chunks of one engine. One owner calls it; all device work is on ``stream``."""

    #: Steps that may be launched before the oldest one is read.
    lookahead = 1
    #: Up to this many new tokens beside decoding rows are a launch of their own (beyond, the device takes so long that
    #: reading the weights once more costs more than launching kernel by kernel).
    apart_tokens = 2048
    adjusts_logits = True

    def __init__(self, plan: Plan, arena: Arena, steps: Steps, graphs: Graphs,
                 stream: torch.cuda.Stream | None) -> None:
        self._plan, self._arena, self._steps, self._graphs, self._stream = plan, arena, steps, graphs, stream
        self._slots = Slots(plan.limits.max_batch_size)
        self._ring = Ring(arena, stream is not None, self.lookahead + 2)
        self._sizes = decode_sizes(plan.limits.max_batch_size)
        self._unmasked: torch.Tensor | None = None
        self._faults: dict[int, Fault] = {}
        self.graph_steps = self.eager_steps = 0

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def parts(self, chunks: Ordered[Chunk]) -> list[Ordered[Chunk]]:
        """A step's launches: decoding rows, and short prompts beside them, have graphs of their own."""
        others = [chunk for chunk in chunks if not self._decodes(chunk)]
        decodes = [chunk for chunk in chunks if self._decodes(chunk)]
        apart = (len(others) <= PREFILL_ROWS[-1] and sum(chunk.count for chunk in others) <= self.apart_tokens
                 and all(chunk.sequence.score is None for chunk in others))
        return [decodes, others] if decodes and others and apart else [chunks]

    @torch.inference_mode()
    def launch(self, chunks: Ordered[Chunk]) -> Pending:
        """Start a step, or a part of one; ``Sequence.computed`` is advanced here."""
        with self._on_stream():
            record, tokens, logprobs, event = self._ring.next()
            decodes = [chunk for chunk in chunks if self._decodes(chunk)]
            others = [chunk for chunk in chunks if not self._decodes(chunk)]
            samplers = self._mixed(record, decodes, others) if others else self._decode(record, decodes)
            pending = self._fetch([chunk.sequence if chunk else None for chunk in samplers], tokens, logprobs, event)
            at = len(decodes)
            for chunk in others:
                if chunk.sequence.score is not None:
                    self._score(chunk, at)
                at += chunk.count
            for chunk in chunks:
                chunk.sequence.computed += chunk.count
            return pending

    def _decodes(self, chunk: Chunk) -> bool:
        """Whether decode kernels compute the chunk. One token of a prompt may be all that a step has room for: in
        deterministic mode it is computed as if it were among others, as its batch must not show."""
        if chunk.count > 1 or chunk.sequence.score is not None:
            return False
        return not (self._plan.deterministic and chunk.sequence.computed < chunk.sequence.prompt_len)

    def _decode(self, record: HostRecord, chunks: list[Chunk]) -> list[Chunk | None]:
        """One token each; every row is sampled, and one whose prompt goes on is not read."""
        writer = RowWriter(record, self._plan.limits.block_size)
        self._rows(writer, chunks)
        size = smallest(self._sizes, len(chunks))
        assert size is not None
        sequences = [chunk.sequence for chunk in chunks]
        record.selected[:len(chunks)] = range(len(chunks))
        record.write_sampling(sequences)
        self._send(record, writer.finish(size))
        masks = _adjusted(sequences)
        begin = self._steps.long_from(size)
        long = begin is not None and any(chunk.sequence.computed + 1 >= begin for chunk in chunks)
        replayed = self._replay(Key("body" if masks else "decode", size, size, long))
        if not replayed:
            self._steps.body(Shape(size, decodes=size, long=long))
        if masks or not replayed:
            self._head(size, masks)
        return [chunk if _ends(chunk) else None for chunk in chunks]

    def _mixed(self, record: HostRecord, decodes: list[Chunk], others: list[Chunk]) -> list[Chunk | None]:
        """Prefill chunks, and decoding rows in front of them."""
        writer = RowWriter(record, self._plan.limits.block_size)
        self._rows(writer, decodes)
        base = 0
        if decodes:
            base = next(size for size in self._sizes if size >= len(decodes) and size % 4 == 0)
        writer.pad_to(base)
        chunks, last = [*decodes, *others], []
        for chunk in others:
            self._rows(writer, [chunk])
            last.append(writer.tokens - 1)
        ends = [*range(len(decodes)), *last]
        samplers = [(chunk, at) for chunk, at in zip(chunks, ends, strict=True)
                    if _ends(chunk) and chunk.sequence.score is None]
        sequences = [chunk.sequence for chunk, _ in samplers]
        record.selected[:len(samplers)] = [at for _, at in samplers]
        record.write_sampling(sequences)
        self._body(record, writer, base, others)
        if samplers:
            size = smallest(self._sizes, len(samplers))
            assert size is not None
            masks = _adjusted(sequences)
            if masks or not self._replay(Key("head", size, size)):
                self._head(size, masks)
        return [chunk for chunk, _ in samplers]

    def _body(self, record: HostRecord, writer: RowWriter, base: int, others: list[Chunk]) -> None:
        tokens = smallest(PREFILL_TOKENS, writer.tokens)
        rows = smallest(PREFILL_ROWS, len(others))
        whole = not any(chunk.sequence.computed for chunk in others)
        if base == 0 and tokens is not None and rows is not None:
            kinds = ("prompt", "prefill") if whole else ("prefill",)
            for key in (Key(kind, tokens, rows) for kind in kinds):
                if self._graphs.has(key):
                    self._send(record, writer.finish(rows))
                    self._replay(key)
                    return
        self._send(record, writer.finish(base + len(others)))
        self.eager_steps += 1
        self._steps.body(Shape(writer.tokens, decodes=base, prefills=len(others),
                               longest=max(chunk.count for chunk in others), whole=whole))

    def _replay(self, key: Key) -> bool:
        if not self._graphs.replay(key):
            return False
        self.graph_steps += key.kind != "head"
        return True

    def _rows(self, writer: RowWriter, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            writer.add(self._slots.of(chunk.sequence), chunk.count)

    def _send(self, record: HostRecord, words: int) -> None:
        self._arena.record.words[:words].copy_(record.words[:words], non_blocking=True)

    def _head(self, size: int, masks: dict[int, Sequence]) -> None:
        """The head without a graph: where logits are adjusted (stop tokens masked, penalties, bias, a grammar), or
        where there are no graphs. Reported log-probabilities are the model's own, before that."""
        if not masks:
            self._steps.head(size)
            return
        arena = self._arena

        def mask(logits: torch.Tensor) -> None:
            self._unmasked = logits.float()
            if self._unmasked is logits:
                self._unmasked = logits.clone()
            for row, sequence in masks.items():
                if fault := adjust(logits[row], sequence):
                    self._faults[row] = fault
        self._steps.head(size, mask)
        assert self._unmasked is not None
        chosen = self._unmasked.gather(1, arena.sampled[:size, None].long().clamp(min=0)).squeeze(1)
        for row in masks:  # one by one: how torch adds up rows depends on their number
            arena.logprobs[row] = chosen[row] - torch.logsumexp(self._unmasked[row], 0)

    def _fetch(self, samplers: list[Sequence | None], tokens: torch.Tensor, logprobs: torch.Tensor,
               event: torch.cuda.Event | None) -> Pending:
        """Ask for the sampled tokens; they are read when ``event`` has happened."""
        count = len(samplers)
        tops: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for index, sequence in enumerate(samplers):
            if sequence is None:
                continue
            self._slots.of(sequence).sample = index
            if sequence.params.logprobs:
                tops[index] = self._top(index, sequence)
        self._unmasked = None
        if count:
            tokens[:count].copy_(self._arena.sampled[:count], non_blocking=True)
            logprobs[:count].copy_(self._arena.logprobs[:count], non_blocking=True)
        if event is not None:
            event.record()
        faults, self._faults = self._faults, {}
        return Pending(samplers, tokens.numpy(), logprobs.numpy(), event, tops, faults)

    def _top(self, index: int, sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
        """The most probable tokens of a row, under the model's own distribution."""
        row = (self._arena.logits if self._unmasked is None else self._unmasked)[index].float()
        best = torch.topk(row, min(sequence.params.logprobs or 0, row.numel()))
        values = best.values - torch.logsumexp(row, 0)
        return values.to("cpu", non_blocking=True), best.indices.to("cpu", non_blocking=True)

    def _score(self, chunk: Chunk, at: int) -> None:
        """Row i of the chunk (token ``at`` + i of the step) predicts token computed + i + 1; the prompt's last row
        predicts nothing."""
        sequence, selected = chunk.sequence, self._arena.record.selected
        assert sequence.score is not None
        last = min(sequence.computed + chunk.count, len(sequence.tokens) - 1)
        for start in range(sequence.computed, last, self._sizes[-1]):
            stop = min(start + self._sizes[-1], last)
            size = smallest(self._sizes, stop - start)
            assert size is not None
            first = at + start - sequence.computed
            selected[:size] = torch.arange(first, first + size, device=selected.device, dtype=torch.int32).clamp(
                max=self._arena.layout.tokens - 1)
            logits = self._steps.head.logits(size)[:stop - start]
            score_rows(logits, torch.tensor(sequence.tokens[start + 1:stop + 1]), sequence.score, start)


def _ends(chunk: Chunk) -> bool:
    """Whether the chunk reaches the end of its sequence's tokens, so that the next one is sampled."""
    return chunk.sequence.computed + chunk.count == len(chunk.sequence.tokens)


def _adjusted(sequences: list[Sequence]) -> dict[int, Sequence]:
    """Row -> sequence, for the rows whose logits are changed before sampling."""
    return {row: sequence for row, sequence in enumerate(sequences) if adjusts(sequence)}
