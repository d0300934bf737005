"""Log-probabilities of given tokens from logits, on any device."""

from __future__ import annotations

import numpy as np
import torch

from engines.runtime.sequence import ScoreRequest


def _host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()


def score_rows(logits: torch.Tensor, targets: torch.Tensor, score: ScoreRequest, start: int) -> None:
    """Fill rows ``start``... of a score from logits [r, vocabulary] and the tokens that followed [r]."""
    logits = logits.float()
    stop = start + targets.numel()
    targets = targets.to(logits.device)
    total = torch.logsumexp(logits, -1, keepdim=True)
    chosen = logits.gather(1, targets[:, None])
    score.logprobs[start:stop] = _host((chosen - total).squeeze(1))
    score.greedy[start:stop] = _host(logits.argmax(-1) == targets)
    if score.top_ids is not None and score.top_logprobs is not None:
        best = torch.topk(logits, score.top_k, -1)
        score.top_ids[start:stop] = _host(best.indices)
        score.top_logprobs[start:stop] = _host(best.values - total)
    if score.at_ids is not None and score.at_logprobs is not None:
        ids = score.at_ids[start:stop].to(logits.device)
        score.at_logprobs[start:stop] = _host(logits.gather(1, ids) - total)
