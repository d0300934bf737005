"""A completions server on loopback for tests: healthy, slow, truncated, failing."""

import asyncio
import contextlib
import json
import threading

TTFT, GAP = 0.02, 0.004


class Server:
    """A tiny completions server on a free port, in a thread of its own; ``mode`` says how it misbehaves."""

    def __init__(self, mode="good", framing="chunked"):
        self.mode, self.framing, self.running, self.peak, self.seen = mode, framing, 0, 0, []

    def __enter__(self):
        ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve(ready)), daemon=True)
        self.thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(10)
        assert not self.thread.is_alive()

    async def serve(self, ready):
        self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        async with server:
            await self.stop.wait()

    async def handle(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            size = int(head.lower().split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(size))
            self.seen.append((head, body))
            self.running += 1
            self.peak = max(self.peak, self.running)
            await self.answer(writer, body)
            await writer.drain()
        self.running -= 1
        writer.close()

    def send(self, writer, data):
        piece = f"data: {data}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if self.framing == "chunked" else piece)

    async def answer(self, writer, body):
        if self.mode == "garbage":
            writer.write(b"what?\r\n")
            return
        if self.mode == "500" or (self.mode == "some500" and len(self.seen) % 4 == 0):
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
            return
        kind = "Transfer-Encoding: chunked" if self.framing == "chunked" else "X-Framing: close"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{kind}\r\n\r\n".encode())
        await asyncio.sleep(TTFT)
        count = 0 if self.mode == "empty" else body["max_tokens"] - (self.mode == "short")
        for number in range(count):
            if self.mode == "truncated" and number == 2:
                return
            if self.mode == "error" and number == 2:
                self.send(writer, json.dumps({"error": {"message": "out of memory"}}))
                return
            self.send(writer, "{nonsense" if self.mode == "malformed" else json.dumps({"choices": [{"text": "a"}]}))
            await writer.drain()
            await asyncio.sleep(5 if self.mode == "slow" else GAP)
        if self.mode == "nodone":  # as servers do that end with a finish reason and close
            self.send(writer, json.dumps({"choices": [{"text": "", "finish_reason": "length"}]}))
        if self.mode != "silent":
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count,
                     "prompt_tokens_details": {"cached_tokens": len(body["prompt"]) // 4}}
            self.send(writer, json.dumps({"choices": [], "usage": usage}))
        if self.mode != "nodone":
            self.send(writer, "[DONE]")
        if self.framing == "chunked":
            writer.write(b"0\r\n\r\n")
