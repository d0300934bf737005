"""A Hugging Face module judged as it lies in memory.

It is the fake-quantized model right after calibration (so that an engine's own loss can be told from the
quantization's), or the unquantized model as a baseline: an oracle that shares no code with the engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from calib.text import Tokenizer, check_vocabulary
from engines.request import CompletionOutput, PromptScore, RequestOutput, SamplingParams
from evals.errors import EvalError
from evals.target import Choices


class ModuleScorer:
    """Scores with ``model(input_ids=[b, s], attention_mask=[b, s], use_cache=False).logits`` [b, s, vocab].

    Prompts are sorted by length and padded on the right within batches of at most ``max_tokens`` tokens; causal
    attention means that padding behind a token cannot reach it. Log-softmax is taken in float32.
    """

    def __init__(self, model: torch.nn.Module, tokenizer: Tokenizer, *, max_tokens: int = 1024) -> None:
        """``tokenizer`` is only checked: CalibError when it cannot belong to this model."""
        embedding: torch.nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        check_vocabulary(tokenizer, next(embedding.parameters()).shape[0])
        self._model, self._tokenizer, self._max_tokens = model, tokenizer, max_tokens

    @torch.inference_mode()
    def loglikelihood(self, prompts: Sequence[Sequence[int]], *, top_k: int = 0,
                      at_ids: Sequence[np.ndarray] | None = None) -> list[PromptScore]:
        if short := [prompt for prompt in prompts if len(prompt) < 2]:
            raise EvalError(f"a prompt of {len(short[0])} tokens has nothing to predict", "Give at least two tokens.")
        device = next(self._model.parameters()).device
        training, results = self._model.training, {}
        self._model.eval()
        try:
            for batch in self._batches(prompts):
                width = max(len(prompts[i]) for i in batch)
                ids = torch.zeros(len(batch), width, dtype=torch.long)
                mask = torch.zeros(len(batch), width, dtype=torch.long)
                for row, i in enumerate(batch):
                    ids[row, :len(prompts[i])] = torch.tensor(prompts[i], dtype=torch.long)
                    mask[row, :len(prompts[i])] = 1
                logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
                for row, i in enumerate(batch):
                    results[i] = score_of(logits[row, :len(prompts[i]) - 1], prompts[i], top_k,
                                          None if at_ids is None else at_ids[i])
        finally:
            self._model.train(training)
        return [results[i] for i in range(len(prompts))]

    @torch.inference_mode()
    def score_choices(self, questions: Sequence[Choices]) -> list[list[PromptScore]]:
        """Each question in one row: its context once, then every continuation, seeing the context and itself only."""
        results: dict[int, list[PromptScore]] = {}
        training = self._model.training
        self._model.eval()
        try:
            for batch in self._batches([[*context, *(t for one in each for t in one)] for context, each in questions]):
                inputs = _tree_inputs([questions[i] for i in batch])
                weight = next(self._model.parameters())
                inputs["attention_mask"] = inputs["attention_mask"].to(weight.dtype)
                logits = self._model(**{name: value.to(weight.device) for name, value in inputs.items()},
                                     use_cache=False).logits
                for row, i in enumerate(batch):
                    results[i] = _tree_scores(logits[row], *questions[i])
        finally:
            self._model.train(training)
        return [results[i] for i in range(len(questions))]

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
        """Greedy continuations by the module's own ``generate``; prompts of one length go together, so none is padded.

        EvalError for anything but plain greedy decoding.
        """
        greedy = SamplingParams(max_tokens=params.max_tokens, min_tokens=params.min_tokens,
                                ignore_eos=params.ignore_eos)
        if params != greedy or not params.max_tokens:
            raise EvalError(f"a module in memory only continues greedily, not with {params!r}", "Judge an engine.")
        results: dict[int, RequestOutput] = {}
        ends = [] if params.ignore_eos else list(self._tokenizer.eos_ids)
        for length in sorted({len(prompt) for prompt in prompts}):
            same = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            step = max(1, self._max_tokens // (length + params.max_tokens))
            for batch in (same[begin:begin + step] for begin in range(0, len(same), step)):
                for i, ids in zip(batch, self._continued([prompts[i] for i in batch], params, ends), strict=True):
                    done = CompletionOutput(0, self._tokenizer.decode(ids), ids, None,
                                            "stop" if ids and ids[-1] in ends else "length")
                    results[i] = RequestOutput(list(prompts[i]), [done])
        return [results[i] for i in range(len(prompts))]

    def _continued(self, prompts: Sequence[Sequence[int]], params: SamplingParams, ends: list[int]
                   ) -> Iterator[list[int]]:
        """New ids of prompts of one length, each cut behind its first end token."""
        ids = torch.tensor([list(prompt) for prompt in prompts], device=next(self._model.parameters()).device)
        generate: Any = self._model.generate
        found = generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, use_cache=True,
                         max_new_tokens=params.max_tokens, min_new_tokens=params.min_tokens or None,
                         eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0)
        for row in found[:, ids.shape[1]:].tolist():
            stop = next((at for at, token in enumerate(row) if token in ends), len(row))
            yield row[:stop + 1]

    def _batches(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        batch: list[int] = []
        for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
            if batch and len(prompts[i]) * (len(batch) + 1) > self._max_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch


def score_of(logits: torch.Tensor, prompt: Sequence[int], top_k: int, at_ids: np.ndarray | None) -> PromptScore:
    """The PromptScore of logits [n-1, vocab] that predict ``prompt[1:]``."""
    logprobs = torch.log_softmax(logits.float(), dim=-1).cpu()
    targets = torch.tensor(prompt[1:], dtype=torch.long)
    top = torch.topk(logprobs, top_k, dim=-1) if top_k else None
    at = None if at_ids is None else logprobs.gather(1, torch.from_numpy(np.asarray(at_ids, dtype=np.int64)))
    return PromptScore(
        logprobs=logprobs.gather(1, targets[:, None])[:, 0].numpy(),
        greedy=(logprobs.argmax(dim=-1) == targets).numpy(),
        top_ids=None if top is None else top.indices.to(torch.int32).numpy(),
        top_logprobs=None if top is None else top.values.numpy(),
        at_logprobs=None if at is None else at.numpy())


def _tree_inputs(questions: Sequence[Choices]) -> dict[str, torch.Tensor]:
    """ids and positions [b, s], padded on the right, and an additive mask [b, 1, s, s]: 0 where a row sees a column.

    A continuation begins at the context's end by position; a padded row sees itself, so that no softmax is empty.
    """
    width = max(len(context) + sum(map(len, each)) for context, each in questions)
    ids, positions = (torch.zeros(len(questions), width, dtype=torch.long) for _ in range(2))
    seen = torch.eye(width, dtype=torch.bool).repeat(len(questions), 1, 1)
    for row, (context, each) in enumerate(questions):
        shared = len(context)
        ids[row, :shared], positions[row, :shared] = torch.tensor(context), torch.arange(shared)
        seen[row, :shared, :shared] = torch.ones(shared, shared, dtype=torch.bool).tril_()
        at = shared
        for one in each:
            own = slice(at, at + len(one))
            ids[row, own], positions[row, own] = torch.tensor(one), torch.arange(shared, shared + len(one))
            seen[row, own, :shared] = True
            seen[row, own, own] = torch.ones(len(one), len(one), dtype=torch.bool).tril_()
            at += len(one)
    mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
    return {"input_ids": ids, "position_ids": positions, "attention_mask": mask[:, None]}


def _tree_scores(logits: torch.Tensor, context: Sequence[int], each: Sequence[Sequence[int]]) -> list[PromptScore]:
    """Scores of each continuation from one row's logits [s, vocab]; its first token is predicted by the context."""
    scores, at = [], len(context)
    for one in each:
        rows = torch.tensor([len(context) - 1, *range(at, at + len(one) - 1)])
        scores.append(score_of(logits[rows], [context[-1], *one], 0, None))
        at += len(one)
    return scores
