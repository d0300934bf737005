"""Sampling in plain torch: the rules by their definition, the same random stream, the same draws. See ``sample``."""

from __future__ import annotations

import torch


def philox(key: int, counter: torch.Tensor, position: int, turn: int) -> torch.Tensor:
    """Philox4x32-10 (Salmon et al., 2011) in int64 arithmetic: ``counter`` [n] -> four 32-bit words each, [n, 4]."""
    mask = 0xFFFFFFFF
    words = [counter.long(), *(torch.full_like(counter, w & mask).long() for w in (position, turn, 0))]
    keys = [key & mask, (key >> 32) & mask]

    def multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = a * (b & 0xFFFF), a * (b >> 16)
        middle = high + (low >> 16)
        return middle >> 16, ((middle << 16) | (low & 0xFFFF)) & mask

    for _ in range(10):
        high0, low0 = multiply(words[0], 0xD2511F53)
        high2, low2 = multiply(words[2], 0xCD9E8D57)
        words = [high2 ^ words[1] ^ keys[0], low2, high0 ^ words[3] ^ keys[1], low0]
        keys = [(keys[0] + 0x9E3779B9) & mask, (keys[1] + 0xBB67AE85) & mask]
    return torch.stack(words, -1)


def exponential(seed: int, position: int, turn: int, vocab: int, device: torch.device) -> torch.Tensor:
    """q ~ Exp(1) of a row's whole vocabulary, as the kernels draw it."""
    quads = torch.arange(-(-vocab // 4), device=device)
    bits = philox(seed, quads, position, turn).reshape(-1)[:vocab]
    v = ((bits.float() + 0.5) * 2.0**-32).clamp(max=0.99999994)
    return torch.where(v < 1e-3, v + 0.5 * v * v, -torch.log(1.0 - v))


def kept(x: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The rules' definition, by sorting: a mask over one row ``x`` [vocab] float32."""
    mask = x > float("-inf")
    vocab = x.shape[0]
    if 0 < top_k < vocab:
        mask &= x >= torch.topk(x, top_k).values[-1]
    if top_p < 1.0:
        mass = torch.where(mask, torch.softmax(torch.where(mask, x, float("-inf")) / temperature, 0), 0.0).double()
        order = torch.argsort(x, descending=True, stable=True)
        before = torch.cumsum(mass[order], 0) - mass[order]
        first = torch.searchsorted(-x[order], -x)  # where each value's run of ties begins
        mask &= before[first] < top_p
        mask |= x == x.max()
    if min_p > 0.0:
        mask &= (x - x.max()) / temperature >= torch.log(torch.tensor(min_p))
    return mask


def draw(x: torch.Tensor, heat: float, allowed: torch.Tensor, floor: torch.Tensor, seed: int, position: int) -> int:
    """Draw until the token is ``allowed``, each time among those above the last one and not under ``floor``."""
    live = torch.ones_like(allowed)
    turn = 0
    while True:
        score = x / heat - torch.log(exponential(seed, position, turn, x.shape[0], x.device))
        token = int(torch.argmax(torch.where(live, score, float("-inf"))))
        if bool(allowed[token]):
            return token
        live = (x > x[token]) & (x >= floor)
        turn += 1
