"""The server's parts that need no server: tool calls in text, keys, messages between the processes, names of tokens."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engines.request import SamplingParams
from toolkit.errors import UsageError
from toolkit.serve.cork import Corked
from toolkit.serve.direct import Direct
from toolkit.serve.faults import ApiError
from toolkit.serve.gate import load_json
from toolkit.serve.options import ServeOptions, read_keys
from toolkit.serve.parts import validated
from toolkit.serve.patience import Patience
from toolkit.serve.protocol import ChatRequest, CompletionRequest
from toolkit.serve.server import _listen
from toolkit.serve.ticket import Ticket
from toolkit.serve.tools import CallReader, Plan, plan_tools, style_of
from toolkit.serve.wire import BlockingWire, pack

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {
    "x": {"type": "integer"}}}}} for name in ("add", "sub")]


def asked(**more) -> ChatRequest:
    return validated(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS} | more)


def read(style: str, text: str, size: int) -> tuple[str, list[tuple[str, dict]]]:
    """Content and calls of a text that streams in pieces of ``size``."""
    reader = CallReader(Plan(tuple(asked().tools), style))
    content = ""
    for at in range(0, len(text), size):
        content += reader.push(text[at:at + size])[0]
    content += reader.finish()[0]
    return content, [(call.name, json.loads(call.arguments)) for call in reader.calls]


CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
OTHER = '<tool_call>{"name": "sub", "arguments": {"x": 2}}</tool_call>'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(("text", "content", "calls"), [
    ("plain words", "plain words", []), ("a < b <tool", "a < b <tool", []),
    (CALL, "", [("add", {"x": 1})]), (f"Let me see.{CALL}", "Let me see.", [("add", {"x": 1})]),
    (f"{CALL}\n{OTHER}\n", "", [("add", {"x": 1}), ("sub", {"x": 2})]),
    (CALL.removesuffix("</tool_call>"), "", [("add", {"x": 1})]),
    ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
     []),
    ('<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu', []),
    ('<tool_call>{"name": "add", "arguments": {"x": "</tool_call> \\\" </tool_call>"}}</tool_call> and', "and",
     [("add", {"x": '</tool_call> " </tool_call>'})]),
    (f'<tool_call>{{"name": "add", "arguments": {{"x": "y}}}}</tool_call> again:\n{CALL}',
     '<tool_call>{"name": "add", "arguments": {"x": "y}}</tool_call> again:\n', [("add", {"x": 1})]),
    (f'<tool_call>5" pipe</tool_call> or {OTHER}', '<tool_call>5" pipe</tool_call> or ', [("sub", {"x": 2})]),
    ('<tool_call>{"x": "y</tool_call> bye', '<tool_call>{"x": "y</tool_call> bye', [])])
def test_tagged_calls_are_read_however_the_text_is_cut(text, content, calls, size) -> None:
    assert read("tagged", text, size) == (content, calls)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "content", "calls"), [
    ('{"name": "add", "parameters": {"x": 3}}', "", [("add", {"x": 3})]), ("words {", "words {", []),
    ('{"name": "rm", "parameters": {}}', '{"name": "rm", "parameters": {}}', []), ('  {"a": 1}', '  {"a": 1}', [])])
def test_bare_calls_are_whole_answers(text, content, calls, size) -> None:
    assert read("bare", text, size) == (content, calls)


def test_no_piece_of_the_markup_is_shown_while_it_streams() -> None:
    reader = CallReader(Plan(tuple(asked().tools), "tagged"))
    shown = "".join(reader.push(char)[0] for char in "see <tool_cal")
    assert shown == "see "
    assert reader.push("x")[0] == "<tool_calx"


def test_end_tags_in_an_argument_are_looked_at_once() -> None:
    """Each piece of the text looked through all of it once more for each: 8 s for a thousand."""
    reader = CallReader(Plan(tuple(asked().tools), "tagged"))
    text = f'<tool_call>{json.dumps({"name": "add", "arguments": {"x": "</tool_call>" * 1000}})}</tool_call>'
    begin = time.process_time()
    for at in range(0, len(text), 4):
        assert reader.push(text[at:at + 4])[0] == ""
    assert time.process_time() - begin < 2.0
    assert len(reader.calls) == 1


def test_how_a_template_asks_for_calls() -> None:
    assert style_of("... <tool_call> ...") == "tagged"
    assert style_of('respond with {"name": f, "parameters": p}') == "bare"
    assert style_of("[TOOL_CALLS]") is None


@pytest.mark.parametrize(("more", "words"), [
    ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, "'mul', which is not among"),
    ({"response_format": {"type": "json_object"}}, "exclude each other"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {
        "name": "add", "parameters": {"type": "string"}}}]}, "arguments of a function are an object")])
def test_plans_that_cannot_be_are_refused(more, words) -> None:
    with pytest.raises(ApiError, match=words):
        plan_tools(asked(**more), "<tool_call>", True)


def test_models_without_tools_say_so() -> None:
    with pytest.raises(ApiError, match="takes no tools"):
        plan_tools(asked(), "<tool_call>", False)
    with pytest.raises(ApiError, match="not understood"):
        plan_tools(asked(), "[TOOL_CALLS]", True)
    assert plan_tools(asked(tool_choice="none"), "", False) is None


def test_key_files(tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_text("# who\n\nann:0123456789abcdef\nbo:fedcba9876543210\n")
    options = ServeOptions(model="m", keys=read_keys(path))
    assert options.key_of("fedcba9876543210").name == "bo"
    assert options.key_of("0123456789abcde") is None
    assert "0123456789abcdef" not in repr(options)
    for text in ("ann:short", "no colon at all here", "a:0123456789abcdef\na:fedcba9876543210", ""):
        path.write_text(text)
        with pytest.raises(UsageError):
            read_keys(path)


def test_which_addresses_are_loopback() -> None:
    loopback = {host: ServeOptions(model="m", host=host).is_loopback
                for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "example")}
    assert [host for host, its in loopback.items() if its] == ["127.0.0.1", "::1", "localhost"]
    with pytest.raises(ValueError, match="model"):
        ServeOptions(model="a/b")


def test_accepted_connections_send_at_once() -> None:
    """A body behind its head must not wait for the client's delayed acknowledgement (40 ms a request)."""
    with _listen(ServeOptions(model="m", port=0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_messages_cross_in_order_and_end_with_the_connection() -> None:
    ours, theirs = socket.socketpair()
    wire, other = BlockingWire(ours), BlockingWire(theirs)
    big = {"op": "submit", "prompt": list(range(200_000)), "text": "漢字"}
    sender = threading.Thread(target=lambda: [wire.send(big), wire.send({"op": "abort"}), ours.close()])
    sender.start()
    found = []
    while messages := other.receive():
        found += messages
    assert found == [big, {"op": "abort"}]
    sender.join()


def test_messages_that_came_together_are_received_together() -> None:
    ours, theirs = socket.socketpair()
    sent = [{"op": "abort", "id": number} for number in range(5)]
    data = b"".join(map(pack, sent))
    with ours, theirs:
        wire = BlockingWire(theirs)
        ours.sendall(data[:-3])  # the last one is cut
        assert wire.receive() == sent[:4]
        ours.sendall(data[-3:])
        assert wire.receive() == sent[4:]
        ours.shutdown(socket.SHUT_WR)
        assert wire.receive() == []


@pytest.mark.parametrize(("prompt", "prompts"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]),
                                                 ([[1], [2, 3]], [[1], [2, 3]])])
def test_the_four_forms_of_a_prompt(prompt, prompts) -> None:
    assert validated(CompletionRequest, {"model": "m", "prompt": prompt}, strict=True).prompts == prompts


@pytest.mark.parametrize("prompt", [[1, "a"], ["a", 1], [[1], [2, "a"]], [[1], 2], [1, -2], [1, 2.5], {"a": 1}])
def test_what_is_none_of_the_four_is_refused(prompt) -> None:
    with pytest.raises(ApiError, match="prompt: must be a string, a list of strings") as caught:
        validated(CompletionRequest, {"model": "m", "prompt": prompt}, strict=True)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(("given", "param", "words"), [
    ({"stop": [""]}, "stop", "a stop must not be empty"),
    ({"logit_bias": {"3": 200.0}}, "logit_bias", "a logit_bias of 200.0 is outside -100..100"),
    ({"min_tokens": 5}, "min_tokens", "min_tokens 5 is larger than max_tokens 4")])
def test_a_refusal_of_several_parameters_names_one_and_lists_none(given, param, words) -> None:
    with pytest.raises(ApiError) as caught:
        validated(SamplingParams, {"max_tokens": 4} | given)
    assert caught.value.param == param
    assert caught.value.message.startswith(words)
    assert "found" not in caught.value.message


def test_parameters_at_their_defaults_need_not_be_given() -> None:
    """The two records' defaults differ (temperature, max_tokens): what is left out of one is not what the other has."""
    asked = validated(CompletionRequest, {"model": "m", "prompt": "a"}, strict=True)
    assert asked.params(max_tokens=16, logprobs=None) == SamplingParams(max_tokens=16, temperature=1.0)
    given = {"n": 2, "min_tokens": 1, "temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 0,
             "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5, "ignore_eos": True}
    lists = {"stop": ["x"], "stop_token_ids": [4], "bad_words": ["b"]}
    asked = validated(CompletionRequest, {"model": "m", "prompt": "a", "logit_bias": {"7": 1.5}} | given | lists,
                      strict=True)
    assert asked.params(max_tokens=128, logprobs=0) == SamplingParams(
        max_tokens=128, logprobs=0, logit_bias={7: 1.5}, **given, **{name: tuple(its) for name, its in lists.items()})


def test_json_is_read_strictly() -> None:
    options = ServeOptions(model="m")
    assert load_json(b'{"a": [1, {"b": null}]}', options) == {"a": [1, {"b": None}]}
    deep = b"[" * options.max_json_depth + b"]" * options.max_json_depth
    assert load_json(deep, options)
    with pytest.raises(ApiError, match="nested deeper than 64"):
        load_json(b"[" + deep + b"]", options)


def test_bodies_are_waited_for_until_a_limit_or_the_end() -> None:
    async def waits(patience: Patience, work) -> bool:
        try:
            async with patience.wait():
                await work
        except TimeoutError:
            return False
        return True

    async def run() -> list[bool]:
        short, long = Patience(0.01), Patience(60)
        asyncio.get_running_loop().call_later(0.05, long.end)
        found = [*await asyncio.gather(waits(short, asyncio.sleep(60)), waits(long, asyncio.sleep(60)),
                                       waits(long, asyncio.sleep(0)))]
        there = asyncio.Event()
        there.set()
        return [*found, await waits(long, there.wait()), await waits(long, asyncio.sleep(60))]
    assert asyncio.run(run()) == [False, False, True, True, False]


class Closed:
    """What a Ticket needs of its client."""

    def open(self, ticket: Ticket, message: dict) -> None: ...

    def shut(self, ticket: Ticket, *, finished: bool) -> None: ...


def test_what_a_slow_reader_has_not_taken_is_one_message_a_continuation() -> None:
    """No text is lost or moved between continuations, and log-probabilities stay token by token."""
    async def read() -> list[dict]:
        ticket = Ticket(Closed(), 1, {}, 2)  # type: ignore[arg-type]
        async with ticket:
            for text in "abc":
                ticket.put_token(0, ord(text), text, None, None, None)
            for text in "xy":
                ticket.put_token(1, ord(text), text, [-1.0, []], None, None)
            first = [ticket.take() for _ in range(3)]
            assert ticket.take() is None
            ticket.put_token(0, 100, "d", None, None, None)
            ticket.put_token(0, 101, "e", None, "stop", None)
            for index in range(2):
                ticket.put({"kind": "done", "index": index})
            return [*first, *[message async for message in ticket]]
    found = asyncio.run(read())
    assert [(one.get("index"), one.get("text"), one.get("finish")) for one in found] == [
        (0, "abc", None), (1, "x", None), (1, "y", None), (0, "de", "stop"), (0, None, None), (1, None, None)]


def test_writes_of_one_turn_leave_as_one() -> None:
    async def run() -> list[bytes]:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        _, writer = await asyncio.open_connection(sock=ours)
        out, found = Corked(writer.transport), []
        out.write(b"head ")
        out.write(bytearray(b"body"))
        with pytest.raises(BlockingIOError):
            theirs.recv(100)
        assert out.get_write_buffer_size() == 9
        await asyncio.sleep(0)
        found.append(theirs.recv(100))
        out.write(b"last")
        out.close()  # what is written before the end arrives
        await writer.wait_closed()
        found += [theirs.recv(100), theirs.recv(100)]
        theirs.close()
        return found
    assert asyncio.run(run()) == [b"head body", b"last", b""]


def test_a_long_turn_sends_before_its_end() -> None:
    async def run() -> list[bytes]:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        out, found = Corked(writer.transport, longest_s=0.01), []
        theirs.setblocking(False)
        out.write(b"one ")
        with pytest.raises(BlockingIOError):
            theirs.recv(100)
        time.sleep(0.02)  # the turn goes on
        out.write(b"two")
        found.append(theirs.recv(100))
        out.write(b"three")
        await asyncio.sleep(0)
        found.append(theirs.recv(100))
        out.close()
        theirs.close()
        return found
    assert asyncio.run(run()) == [b"one two", b"three"]


def test_a_cut_connection_sends_nothing_more() -> None:
    async def run() -> bytes:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        out = Corked(writer.transport)
        out.write(b"never")
        out.abort()
        await asyncio.sleep(0.01)
        with theirs:
            return theirs.recv(100)
    assert asyncio.run(run()) == b""


def test_nothing_is_written_behind_the_end() -> None:
    """uvicorn sends 100 Continue also for a request that was refused meanwhile."""
    async def run() -> list[bytes]:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        out = Corked(writer.transport)
        out.write(b"refused")
        out.write_eof()
        out.write(b"100 Continue")
        await asyncio.sleep(0)
        with theirs:
            found = [theirs.recv(100), theirs.recv(100)]
        out.close()
        return found
    assert asyncio.run(run()) == [b"refused", b""]


def test_busy_routes_go_past_the_application_and_the_rest_does_not() -> None:
    async def fails(request: Request) -> Response:
        fault = request.query_params["fault"]
        if fault == "known":
            raise ApiError(400, "not so", code="bad")
        raise ZeroDivisionError(fault)

    async def other(scope, receive, send) -> None:
        await Response("the application's")(scope, receive, send)

    def failed(request: Request, error: ApiError) -> Response:
        return Response(f"{request.scope['route'].path} {error.message}", error.status)

    async def run() -> list[tuple[int, str]]:
        app = Direct(other, [Route("/busy", fails, methods=["POST"])], failed)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            answers = [await client.post("/busy?fault=known"), await client.post("/busy?fault=unknown"),
                       await client.get("/busy"), await client.post("/busy/more")]
        return [(answer.status_code, answer.text) for answer in answers]
    assert asyncio.run(run()) == [
        (400, "/busy not so"), (500, "/busy the server failed; its log says how"),
        (200, "the application's"), (200, "the application's")]
