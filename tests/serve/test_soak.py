"""The soak's short form: benchmarks/serve_soak.py on a tiny engine, where everything must hold."""

from __future__ import annotations

import asyncio

from benchmarks.serve_soak import Server, soak
from benchmarks.soak_load import make_mix


def test_a_short_soak_holds(tiny_engine, tmp_path) -> None:
    server = Server(tiny_engine, tmp_path)
    try:
        result = asyncio.run(soak(server, tiny_engine, requests=80, in_flight=24, rounds=2))
    finally:
        code = server.stop()
    assert result.faults == []
    assert code == 0
    assert result.ends["right"] + result.ends["right but for a tie"] > 60
    assert result.ends["dropped"] > 4
    assert result.queue_p99_s < 60


def test_the_mix_is_seeded_and_has_every_kind() -> None:
    assert make_mix(300, 512, 1) == make_mix(300, 512, 1)
    assert len({ask.kind for ask in make_mix(300, 512, 1)}) == 9
