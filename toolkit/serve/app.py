"""The routes. Each reads its body within the caps, has it checked, and answers while its client is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from toolkit.serve import kserve, tensors
from toolkit.serve.answers import EventStream, Json, error_answer, while_there
from toolkit.serve.faults import ApiError, bad
from toolkit.serve.gate import load_json, read_body
from toolkit.serve.metrics import CONTENT_TYPE
from toolkit.serve.openai import Chat, Completions
from toolkit.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, validated
from toolkit.serve.service import Service
from toolkit.version import __version__ as VERSION  # noqa: N812

#: Parts of the two protocols that are known and not served, with the reason.
NOT_SERVED = {
    "/v1/embeddings": "this is a text generation engine; it gives no embeddings",
    "/v1/responses": "use /v1/chat/completions", "/v1/assistants": "use /v1/chat/completions",
    "/v1/images/generations": "this engine makes text only", "/v1/audio/transcriptions": "this engine takes text only",
    "/v1/audio/speech": "this engine makes text only", "/v1/moderations": "no moderation model is served",
    "/v1/files": "nothing is stored on this server", "/v1/batches": "send the requests; they are batched as they come",
    "/v1/fine_tuning/jobs": "engines are built ahead of time and do not change",
    "/v2/systemsharedmemory/status": "tensors travel in the request; there is no shared memory",
    "/v2/cudasharedmemory/status": "tensors travel in the request; there is no shared memory",
    "/v2/trace/setting": "there is no tracing", "/v2/logging": "the log's level is set at start",
    "/v2/models/stats": "figures are at /metrics"}
Cut = Callable[[Scope], None]


def make_app(service: Service, cut: Cut) -> FastAPI:
    """The application of one served engine. ``cut`` ends a connection whose client takes nothing."""
    app = FastAPI(title="toolkit serve", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    _status_routes(app, service)
    _openai_routes(app, service, cut)
    _text_routes(app, service)
    _kserve_routes(app, service, cut)
    for path, why in NOT_SERVED.items():
        app.add_api_route(path, _refuser(why), methods=["GET", "POST"])
    _error_handlers(app, service)
    return app


def _refuser(why: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def refuse() -> Response:
        raise ApiError(501, f"not supported here: {why}", code="not_supported")
    return refuse


def _error_handlers(app: FastAPI, service: Service) -> None:
    def shaped(request: Request, error: ApiError) -> Response:
        if request.url.path.startswith("/v2"):
            return Json(kserve.fault_document(error), error.status, headers=error.headers)
        return error_answer(error)

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        service.metrics.answers.labels(_route(request), error.status).inc()
        return shaped(request, error)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        words = {404: f"there is no {request.url.path[:200]} here", 405: f"{request.method} is not for "
                 f"{request.url.path[:200]}"}.get(error.status_code, str(error.detail))
        return shaped(request, ApiError(error.status_code, words, headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:  # (its traceback is logged by the server)
        return shaped(request, ApiError(500, "the server failed; its log says how", code="internal"))


def _route(request: Request) -> str:
    return getattr(request.scope.get("route"), "path", "none")


def _status_routes(app: FastAPI, service: Service) -> None:
    info = service.client.info

    async def ready() -> Response:
        trouble = service.trouble
        return Json({"status": trouble or "ok"}, 200 if trouble is None else 503)

    async def live() -> Response:
        trouble = "the engine process has ended" if service.client.ended.is_set() else None
        return Json({"status": trouble or "ok"}, 200 if trouble is None else 503)

    for path in ("/health", "/v1/health/ready", "/v2/health/ready"):
        app.add_api_route(path, ready, methods=["GET"])
    for path in ("/v1/health/live", "/v2/health/live"):
        app.add_api_route(path, live, methods=["GET"])

    @app.get("/version")
    async def version() -> Response:
        return Json({"version": VERSION})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(await service.client.stats()), media_type=CONTENT_TYPE)

    @app.get("/v1/metadata")
    async def metadata() -> Response:
        return Json({"model": service.options.model, "version": VERSION,
                     **{name: value for name, value in info.items() if name != "ev"}})

    def model() -> dict[str, Any]:
        return {"id": service.options.model, "object": "model", "created": service.started, "owned_by": "toolkit",
                "max_model_len": info["limits"]["max_seq_len"]}

    @app.get("/v1/models")
    async def models() -> Response:
        return Json({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}")
    async def one(name: str) -> Response:
        if name != service.options.model:
            raise ApiError(404, f"model {name[:200]!r} is not served here; this is {service.options.model!r}",
                           param="model", code="model_not_found")
        return Json(model())


def _openai_routes(app: FastAPI, service: Service, cut: Cut) -> None:
    async def run(request: Request, work: Any, streamed: bool) -> Response:
        """``work`` is an admitted request: as one document, or as a stream that ends in [DONE]."""
        if not streamed:
            return Json(await work.whole())
        return await _streamed(service, work.pieces(), "[DONE]", cut)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _body(request, service)

        async def work() -> Response:
            asked = validated(CompletionRequest, body, strict=True)
            return await run(request, await Completions.admit(service, asked, _caller(request)), asked.stream)
        return await _answered(request, service, work())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await _body(request, service)

        async def work() -> Response:
            asked = validated(ChatRequest, body, strict=True)
            return await run(request, await Chat.admit(service, asked, _caller(request)), asked.stream)
        return await _answered(request, service, work())


async def _body(request: Request, service: Service) -> Any:
    return load_json(await read_body(request, service.options), service.options)


def _caller(request: Request) -> str:
    return request.scope["state"]["caller"]


async def _answered(request: Request, service: Service, work: Coroutine[Any, Any, Response]) -> Response:
    response = await while_there(request, work, service.metrics.dropped.inc)
    service.metrics.answers.labels(_route(request), response.status_code).inc()
    return response


async def _streamed(service: Service, pieces: AsyncGenerator[str, None], end: str | None, cut: Cut) -> Response:
    """A stream that has begun: what the engine refuses is still an answer with its own status."""
    first = await anext(pieces)
    return EventStream(first, pieces, end=end, write_timeout_s=service.options.write_timeout_s, cut=cut,
                       gone=service.metrics.dropped.inc)


def _text_routes(app: FastAPI, service: Service) -> None:
    texts = service.texts

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        asked = validated(TokenizeRequest, await _body(request, service), strict=True)
        if (asked.prompt is None) == (asked.messages is None):
            raise bad("give prompt or messages", "prompt")
        ids = (await texts.ids(asked.prompt, bos=asked.add_special_tokens) if asked.prompt is not None
               else await texts.chat_ids(asked.messages or [], None))
        return Json({"tokens": ids, "count": len(ids), "max_model_len": texts.longest})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        asked = validated(DetokenizeRequest, await _body(request, service), strict=True)
        if strange := next((index for index in asked.tokens if index >= texts.tokenizer.vocab_size), None):
            raise bad(f"token id {strange} is outside the vocabulary of {texts.tokenizer.vocab_size}", "tokens")
        return Json({"prompt": await asyncio.to_thread(texts.tokenizer.decode, asked.tokens, skip_special=False)})


def _kserve_routes(app: FastAPI, service: Service, cut: Cut) -> None:
    def checked(name: str, version: str) -> str:
        if name != service.options.model or version != tensors.VERSION:
            raise ApiError(404, f"model {name[:200]!r} version {version[:20]!r} is not served here; this is "
                                f"{service.options.model!r} version {tensors.VERSION}")
        return name

    def both(path: str, method: str, handler: Callable[..., Coroutine[Any, Any, Response]]) -> None:
        for prefix in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            app.add_api_route(prefix + path, handler, methods=[method])

    @app.get("/v2")
    async def server() -> Response:
        return Json({"name": "toolkit", "version": VERSION, "extensions": kserve.EXTENSIONS})

    @app.post("/v2/repository/index")
    async def index() -> Response:
        return Json([{"name": service.options.model, "version": tensors.VERSION,
                      "state": "READY" if service.trouble is None else "UNAVAILABLE", "reason": service.trouble or ""}])

    async def metadata(name: str, version: str = tensors.VERSION) -> Response:
        return Json(kserve.metadata(checked(name, version)))

    async def ready(name: str, version: str = tensors.VERSION) -> Response:
        checked(name, version)
        return Json({"ready": service.trouble is None}, 200 if service.trouble is None else 503)

    async def config(name: str, version: str = tensors.VERSION) -> Response:
        return Json(kserve.configuration(checked(name, version)))

    async def infer(request: Request, name: str, version: str = tensors.VERSION) -> Response:
        checked(name, version)
        body, header = await read_body(request, service.options), request.headers.get("inference-header-content-length")
        if header is not None and not header.isdigit():
            raise bad(f"Inference-Header-Content-Length is {header[:40]!r}")

        async def work() -> Response:
            asked = tensors.parse(body, None if header is None else int(header),
                                  lambda data: load_json(data, service.options))
            found = await (await kserve.Inference.admit(service, asked.values, _caller(request))).tensors()
            data, end = tensors.answer(name, asked, found)
            if end is None:
                return Response(data, media_type="application/json")
            return Response(data, media_type="application/octet-stream",
                            headers={"Inference-Header-Content-Length": str(end)})
        return await _answered(request, service, work())

    async def inference(request: Request) -> kserve.Inference:
        body = await _body(request, service)
        if not isinstance(body, dict) or not isinstance(body.get("parameters", {}), dict):
            raise bad("the request is not an object of inputs and parameters")
        values = {key: value for key, value in body.items() if key not in ("parameters", "id")}
        values |= body.get("parameters", {})
        tensors.known(values, tensors.INPUTS, "input")
        return await kserve.Inference.admit(service, values, _caller(request))

    async def generate(request: Request, name: str, version: str = tensors.VERSION) -> Response:
        checked(name, version)
        asked = await inference(request)

        async def work() -> Response:
            found = {key: value[0] if len(value) == 1 else value for key, value in (await asked.tensors()).items()}
            return Json({"model_name": name, "model_version": version, **found})
        return await _answered(request, service, work())

    async def generate_stream(request: Request, name: str, version: str = tensors.VERSION) -> Response:
        checked(name, version)
        asked = await inference(request)

        async def work() -> Response:
            return await _streamed(service, asked.pieces(name), None, cut)
        return await _answered(request, service, work())

    for path, method, handler in (("", "GET", metadata), ("/ready", "GET", ready), ("/config", "GET", config),
                                  ("/infer", "POST", infer), ("/generate", "POST", generate),
                                  ("/generate_stream", "POST", generate_stream)):
        both(path, method, handler)
