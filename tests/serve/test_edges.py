"""The raw edges over plain HTTP and sockets: bodies, hosts, keys, sizes, paths."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engines.llm import LLM
from toolkit.serve.wire import BlockingWire
from toolkit.serve.worker import Worker

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def raw(server, request: bytes) -> bytes:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as end:
        end.sendall(request)
        data = b""
        while part := end.recv(65536):
            data += part
    return data


@pytest.mark.parametrize(("body", "words"), [
    (b"", "not JSON"), (b"{", "not JSON"), (b'{"model": "\xff"}', "not UTF-8"),
    (b"[" * 100_000, "nested deeper|not JSON"),
    (b"[" * 100 + b"]" * 100, "nested deeper"), (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested deeper"),
    (b'{"model": "tiny", "temperature": NaN}', "NaN"),
    (b'{"model": "tiny", "seed": ' + b"9" * 10_000 + b"}", "not JSON"),
    (b'[]', "object|dictionary"), (b'"x"', "object|dictionary"),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate"),
    (b'{"model": "tiny", "messages": []}', "messages"), (b'{"model": "tiny", "messages": [{"role": "king"}]}', "role"),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "image_url|content"),
    (b'{"model": "tiny", "messages": [{"role": "user"}]}', "message 0")])
def test_bodies_that_are_no_requests_are_400_in_words(http, body: bytes, words: str) -> None:
    found = http.post("/v1/chat/completions", content=body)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert any(word in error["message"] for word in words.split("|")), error


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", b'{"model": "tiny", "prompt": "a", "stop": ["\\ud800"]}'),
    ("/v1/completions", b'{"model": "tiny", "prompt": "a", "bad_words": ["\\udfff"]}'),
    ("/v1/chat/completions", b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stop": "x\\ud800"}'),
    ("/v2/models/tiny/generate", b'{"text_input": "a", "max_tokens": 2, "stop_words": ["\\ud800"]}')])
def test_halves_of_surrogate_pairs_are_refused_and_the_server_lives(http, path: str, body: bytes) -> None:
    found = http.post(path, content=body)
    assert found.status_code == 400, found.text
    assert "surrogate" in found.text or "unicode string" in found.text
    assert http.get("/health").status_code == 200


def test_what_admission_did_not_foresee_ends_that_request_only(tiny_engine, monkeypatch) -> None:
    ours, theirs = socket.socketpair()
    with LLM(tiny_engine) as llm, ours, theirs:
        worker = Worker(llm, BlockingWire(theirs))
        monkeypatch.setattr(llm.loop, "admit_all", lambda *_: 1 // 0)
        worker._submit({"id": 7, "stream": False, "score": None, "terms": {}, "params": {}, "prompt": [1]})
        [said] = BlockingWire(ours).receive()
    assert (said["ev"], said["id"], said["code"]) == ("refused", 7, "engine_fault")
    assert "ZeroDivisionError" in said["message"]


def test_sizes_and_encodings_are_capped(http) -> None:
    assert http.post("/tokenize", content=b"x" * (9 << 20)).status_code == 413
    assert http.post("/tokenize", content=iter([b"x" * (1 << 20)] * 9)).status_code == 413
    assert http.post("/tokenize", content=b"{}", headers={"Content-Encoding": "gzip"}).status_code == 400


def test_foreign_hosts_are_refused_and_origins_get_nothing(http, server) -> None:
    assert http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert http.get("/health", headers={"Host": "evil.example"}).status_code == 200
    found = http.options("/v1/chat/completions", headers={"Origin": "http://evil.example",
                                                          "Access-Control-Request-Method": "POST"})
    assert found.status_code == 405
    assert not [name for name in found.headers if name.startswith("access-control")]
    assert b" 403 " in raw(server, b"GET /v1/models HTTP/1.1\r\nHost: [::2]:80\r\nConnection: close\r\n\r\n")
    assert b" 400 " in raw(server, b"NONSENSE\r\n\r\n")


def test_wishes_for_other_protocols_are_ignored(server) -> None:
    """Java's HttpClient has the first of them with every request."""
    body = json.dumps(CHAT).encode()
    request = b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close, Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\n" \
              b"HTTP2-Settings: AAMAAABkAAQAAP__\r\nContent-Length: %d\r\n\r\n%b"
    for path, wish, status in (("/v1/chat/completions", b"h2c", b"200"), ("/v1/chat/completions", b"websocket", b"200"),
                               ("/health", b"websocket", b"405"), ("/v1/nothing", b"websocket", b"404")):
        found = raw(server, request % (path.encode(), wish, len(body), body))
        assert found.startswith(b"HTTP/1.1 " + status), found
    assert "pgrade" not in "".join(server.log)
    assert "WebSocket" not in "".join(server.log)


def test_heads_that_break_http_are_refused_in_words_before_any_key(server) -> None:
    for request, status in ((b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (1 << 20), b"431"),
                            (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", b"400"),
                            (b"NONSENSE\r\n\r\n", b"400")):
        found = raw(server, request)
        assert found.startswith(b"HTTP/1.1 " + status), found
        assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_other_paths_and_methods_answer_in_words(http) -> None:
    assert "there is no /v1/nothing" in http.get("/v1/nothing").json()["error"]["message"]
    assert http.get("/v1/completions").status_code == 405
    for path in ("/v1/embeddings", "/v1/responses"):
        found = http.post(path, json={})
        assert found.status_code == 501
        assert "not supported" in found.json()["error"]["message"]
    assert isinstance(http.get("/v2/trace/setting").json()["error"], str)
    for path in ("/docs", "/openapi.json", "/redoc"):
        assert http.get(path).status_code == 404


def test_methods_that_are_not_for_a_path_are_the_requests_fault(http) -> None:
    found = http.get("/v1/completions")
    assert (found.status_code, found.json()["error"]["type"]) == (405, "invalid_request_error")


def test_a_path_with_a_slash_behind_it_is_another_one(http) -> None:
    found = http.post("/v1/completions/", json={"model": "tiny", "prompt": "a"})
    assert found.status_code == 404
    assert "there is no /v1/completions/ here" in found.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/v1/health/ready", "/v1/health/live", "/v2/health/ready",
                                  "/v2/health/live"])
def test_health_may_be_asked_for_without_a_body(http, path: str) -> None:
    found = http.head(path)
    assert (found.status_code, found.content) == (200, b"")


TYPES = {"text/plain": 415, "text/plain;charset=UTF-8": 415, "application/x-www-form-urlencoded": 415,
         "multipart/form-data; boundary=x": 415, "": 415, "text/plain; application/json": 415,
         "application/json": 200, "Application/JSON; charset=utf-8": 200, "application/vnd.api+json": 200,
         "application/octet-stream": 200}


@pytest.mark.parametrize("path", ["/v1/completions", "/v2/models/tiny/generate", "/v2/models/tiny/infer", "/tokenize"])
def test_what_a_page_may_send_unasked_is_not_taken(http, path: str) -> None:
    """A browser sends these types, or none, to any server without asking it first; its answer would be hidden only."""
    body = {"/v1/completions": b'{"model": "tiny", "prompt": "a", "max_tokens": 1}', "/tokenize": b'{"prompt": "a"}',
            "/v2/models/tiny/generate": b'{"text_input": "a", "max_tokens": 1}', "/v2/models/tiny/infer":
            b'{"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}'}[path]
    for given, status in TYPES.items():
        found = http.post(path, content=body, headers={"Content-Type": given})
        assert found.status_code == status, (given, found.text)
        if status == 415:
            assert "is not taken: send application/json" in found.text
    assert http.post(path, content=body).status_code == 200
    found = http.post(path, content=body, headers={"Origin": "http://evil.example"})
    assert (found.status_code, "needs a Content-Type" in found.text) == (415, True)


def test_status_routes(http) -> None:
    for path in ("/health", "/v1/health/live", "/v1/health/ready", "/version", "/v1/metadata", "/v1/models"):
        assert http.get(path).status_code == 200
    about = http.get("/v1/metadata").json()
    assert about["limits"]["max_seq_len"] == 1024
    assert len(about["digest"]) == 64


def test_metrics_parse_and_count(http, server) -> None:
    before = server.metric("toolkit_generation_tokens_total")
    http.post("/v1/chat/completions", json=CHAT | {"ignore_eos": True})
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    assert {"toolkit_requests_running", "toolkit_requests_waiting", "toolkit_ttft_seconds", "toolkit_queue_seconds",
            "toolkit_kv_blocks", "toolkit_prefix_hit_tokens"} <= set(families)
    assert all(name.startswith("toolkit_") for name in families)
    assert server.metric("toolkit_generation_tokens_total") == before + 2
    blocks = {sample.labels["state"]: sample.value for sample in families["toolkit_kv_blocks"].samples}
    assert sum(blocks.values()) == 512
    assert server.metric("toolkit_requests_running") == 0


@pytest.mark.parametrize("text", ["plain words", "Grüße 漢字 🙂", "<|special_1|> is text", " leading", "a\u0000b"])
def test_tokenize_and_detokenize_are_inverse(http, text: str) -> None:
    found = http.post("/tokenize", json={"prompt": text}).json()
    assert found["count"] == len(found["tokens"])
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"] == text


def test_tokenize_chat_and_its_faults(http) -> None:
    ids = http.post("/tokenize", json={"messages": CHAT["messages"]}).json()["tokens"]
    assert http.post("/v1/chat/completions", json=CHAT).json()["usage"]["prompt_tokens"] == len(ids)
    for body in ({}, {"prompt": "a", "messages": CHAT["messages"]}, {"prompt": ""}, {"prompt": "a", "x": 1}):
        assert http.post("/tokenize", json=body).status_code == 400
    assert http.post("/detokenize", json={"tokens": [9999]}).status_code == 400


def test_echo_with_log_probabilities_scores_a_prompt(http) -> None:
    body = {"model": "tiny", "prompt": "score these words", "max_tokens": 0, "echo": True, "logprobs": 2}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (body["prompt"], "length")
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == body["prompt"]
    assert len(logprobs["top_logprobs"]) == len(body["prompt"])
    for wrong in ({"echo": False}, {"stream": True}, {"logprobs": 99}, {"prompt": []}, {"prompt": [[1, 2], "x"]}):
        assert http.post("/v1/completions", json=body | wrong).status_code == 400


def test_a_prompt_alone_is_there_n_times(http) -> None:
    body = {"model": "tiny", "prompt": ["a b", "c"], "max_tokens": 0, "echo": True, "n": 3, "logprobs": 1}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices] == [
        (index, "a b" if index < 3 else "c", "length") for index in range(6)]
    assert choices[0]["logprobs"] == choices[2]["logprobs"]


def test_a_long_prompt_is_refused_with_the_numbers(http) -> None:
    found = http.post("/v1/completions", json={"model": "tiny", "prompt": "x" * 10_000, "max_tokens": 5})
    assert found.status_code == 400
    assert "10000 prompt tokens + 5 max_tokens exceed this engine's max_seq_len of 1024" in found.json()["error"][
        "message"]


def _when_refused(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """The first answer of a server whose engine stands still: one that was let in before the others gets none."""
    for _ in range(10):
        with contextlib.suppress(httpx.ReadTimeout):
            return ask()
    raise AssertionError("every request was let in")


def test_keys_part_callers_and_are_never_logged(serve, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# callers\nann:aaaaaaaaaaaaaaaaaaaa\nbo:bbbbbbbbbbbbbbbbbbbbbb\n")
    server = serve("--api-keys", str(keys), "--max-queue", "0", "--allow-host", "api.example")
    text = "the same beginning for both of them, long enough"
    body = {"model": "tiny", "prompt": text, "max_tokens": 2}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic aaaaaaaaaaaaaaaaaaaa"}):
            found = http.post("/v1/completions", json=body, headers=headers)
            assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
        assert http.get("/metrics").status_code == 401
        assert http.get("/health").status_code == 200
        cached = []
        for secret in ("a" * 20, "b" * 22, "a" * 20):
            found = http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {secret}",
                                                                     "Host": "api.example:1"})
            cached.append(found.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, (len(text) - 1) // 16 * 16]
        many = body | {"prompt": [text] * 8, "ignore_eos": True}
        key = {"Authorization": "Bearer " + "a" * 20}
        os.kill(server.engine_process, signal.SIGSTOP)  # nothing ends while the others ask
        first = threading.Thread(target=http.post, args=("/v1/completions",), kwargs={"json": many, "headers": key})
        first.start()
        try:
            busy = _when_refused(lambda: httpx.post(f"{server.url}/v1/completions", json=body, headers=key, timeout=1))
        finally:
            os.kill(server.engine_process, signal.SIGCONT)
            first.join()
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
    assert server.stop() == 0
    assert "aaaaaaaa" not in "".join(server.log)


def test_other_addresses_need_keys(serve) -> None:
    refused = serve("--host", "0.0.0.0")
    assert "no API keys are given" in refused.info["error"]["message"]
    assert refused.process.wait(20) == 2
