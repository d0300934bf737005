"""Gather of embedding rows."""

from __future__ import annotations

import pytest
import torch

from engines.kernels import embedding


@pytest.mark.parametrize(("tokens", "n", "scale", "first", "dtype"), [
    (1, 64, 1.0, 0, torch.int32), (5, 96, 9.8, 0, torch.int64),
                                                        (0, 64, 1.0, 0, torch.int32), (7, 576, 1.0, 20, torch.int64)])
def test_gather(device, facts, tokens, n, scale, first, dtype):
    torch.manual_seed(tokens)
    table = torch.randn(50, n, device=device)
    ids = torch.randint(0, 70, (tokens,), device=device, dtype=dtype)
    outs = [torch.full((tokens, n), float("nan"), device=device) for _ in range(2)]
    embedding.launch(ids, table, outs[0], embedding.candidates(n, facts)[0], scale=scale, first_row=first)
    embedding.twin(ids, table, outs[1], scale=scale, first_row=first)
    assert torch.allclose(outs[0], outs[1])


def test_foreign_ids_read_nothing(device, facts):
    table = torch.ones(8, 64, device=device)
    out = torch.full((3, 64), float("nan"), device=device)
    ids = torch.tensor([-5, 8, 2**31 - 1], device=device, dtype=torch.int32)
    embedding.launch(ids, table, out, embedding.candidates(64, facts)[0])
    assert out.eq(0).all()
