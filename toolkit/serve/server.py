"""One server from start to stop.

**Stop.** SIGTERM (or SIGINT) closes the port and turns readiness to 503. A request whose body is not here yet is 503 at
once; those under way have ``drain_s`` seconds. What is not finished then ends with an error: a plain request as 503, a
stream with a last event that says so. Connections that are still open a moment later are cut. The engine process ends,
and ``serve`` returns; the command exits 0. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import uvicorn

from calib.text import Tokenizer
from toolkit.errors import UsageError
from toolkit.serve import pauses
from toolkit.serve.app import make_app
from toolkit.serve.client import EngineClient, EngineProcessError
from toolkit.serve.connections import Connections
from toolkit.serve.cork import Corked
from toolkit.serve.faults import STOPPING, unavailable
from toolkit.serve.gate import Gate
from toolkit.serve.metrics import Metrics
from toolkit.serve.options import ServeOptions
from toolkit.serve.service import Service
from toolkit.serve.stalled import Stalled
from toolkit.serve.text import Texts

_LOG = logging.getLogger(__name__)
_TOKENIZER = "tokenizer"
#: After the drain: for last events to be taken. Then connections are cut.
_LAST_WORDS_S = 1.0
#: And then: for requests to see that they were cut, before their tasks are cancelled (which is logged as a fault).
_CUT_S = 4.0


class _Server(uvicorn.Server):
    """uvicorn, with a drain before its shutdown."""

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[int], None]) -> None:
        super().__init__(config)
        self._service, self._on_ready = service, on_ready
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the signals here; uvicorn would raise them again at the end, and the exit code would not be 0."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        _LOG.info("stopping: %d prompts have %g s", self._service.client.waiting_or_running,
                  self._service.options.drain_s)
        self.should_exit = True
        self._service.drain()
        self._tasks.append(asyncio.create_task(self._drain()))

    async def _drain(self) -> None:
        await asyncio.sleep(self._service.options.drain_s)
        self._service.client.fail_all(unavailable(STOPPING))
        await self._cut_all()

    async def _cut_all(self) -> None:
        """Whoever has not taken its last words by now takes none."""
        await asyncio.sleep(_LAST_WORDS_S)
        for connection in self._open_connections():
            connection.abort()

    def _open_connections(self) -> list[Corked]:
        return [cast(Corked, connection.transport) for connection in self.server_state.connections]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        stalled = Stalled(self._open_connections, self._service.options.write_timeout_s)
        self._tasks += [asyncio.create_task(self._mourn()), asyncio.create_task(stalled.run())]
        pauses.begin()
        self._on_ready(self.servers[0].sockets[0].getsockname()[1])

    async def _mourn(self) -> None:
        """The engine process has ended: nothing can be served any more. Its requests have been answered."""
        await self._service.client.ended.wait()
        self._service.patience.end()
        await asyncio.sleep(1.0)
        self.should_exit = True
        await self._cut_all()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def serve(engine: Path, options: ServeOptions, on_ready: Callable[[int, dict[str, Any]], None]) -> None:
    """Serve an engine folder until a signal. ``on_ready`` gets the port and what the engine says of itself.

    EngineProcessError when the engine cannot start, or ended by itself.
    """
    if not options.is_loopback and not options.keys:
        raise UsageError(f"{options.host} can be reached from other machines, and no API keys are given",
                         "Give --api-keys FILE, or bind to 127.0.0.1.")
    listener = _listen(options)
    client = EngineClient(engine, options.watchdog_s)
    try:
        await client.start()
        texts = Texts(Tokenizer.open(engine / _TOKENIZER), client.info["vocab_size"],
                      client.info["limits"]["max_seq_len"])
        service = Service(client, texts, options, Metrics(options.model, client.info))
        connections = Connections(options)
        app = Gate(make_app(service, connections.cut), options)
        config = uvicorn.Config(app, host=options.host, port=options.port, http=connections.protocol(), ws="none",
                                lifespan="off", access_log=False, server_header=False, log_config=None,
                                timeout_keep_alive=30, proxy_headers=False,
                                timeout_graceful_shutdown=int(options.drain_s + _LAST_WORDS_S + _CUT_S) + 1)
        server = _Server(config, service, lambda port: on_ready(port, client.info))
        await server.serve(sockets=[listener])
        if client.ended.is_set() and not service.draining:
            raise EngineProcessError("the engine process ended while serving", "Its messages stand above.")
    finally:
        listener.close()
        await client.close()


def _listen(options: ServeOptions) -> socket.socket:
    """The port, taken before anything is loaded. UsageError when somebody has it.

    Its connections send at once (TCP_NODELAY is inherited): a head and a body are two writes, and the second would wait
    for the client's delayed acknowledgement, 40 ms a request. asyncio sets that itself only where a socket names its
    protocol, which ``create_server``'s does not.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=1024)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise UsageError(f"{options.host}:{options.port} cannot be listened on: {error.strerror or error}",
                         "Take another --port or --host.") from error
