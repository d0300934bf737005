"""The application and OpenAI's routes. Each reads its body within the caps, has it checked, and answers while its
client is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from toolkit.serve import kserve
from toolkit.serve.answers import Json, error_answer
from toolkit.serve.direct import Direct
from toolkit.serve.faults import ApiError, bad, settled
from toolkit.serve.kserve_routes import KserveRoutes
from toolkit.serve.metrics import CONTENT_TYPE
from toolkit.serve.openai import Chat, Completions
from toolkit.serve.parts import validated
from toolkit.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, Sampled, TokenizeRequest
from toolkit.serve.routes import Cut, answered, body_of, caller_of, route_of, streamed
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
Asked = TypeVar("Asked", bound=Sampled)
#: Token ids that are written at once: milliseconds.
_STRETCH = 1 << 16
Admit = Callable[[Service, Asked, str], Awaitable[Completions | Chat]]


def make_app(service: Service, cut: Cut) -> ASGIApp:
    """The application of one served engine."""
    app = FastAPI(title="toolkit serve", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None,
                  redirect_slashes=False)  # (a client that posts does not follow, and the answer had no words)
    busy = _openai_routes(service, cut)
    app.router.routes.extend(busy)
    _status_routes(app, service)
    _text_routes(app, service)
    for path, method, handler in KserveRoutes(service, cut).all():
        app.add_api_route(path, handler, methods=[method])
    for path, why in NOT_SERVED.items():
        app.add_api_route(path, _refuser(why), methods=["GET", "POST"])
    return Direct(app, busy, _error_handlers(app, service))


def _refuser(why: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def refuse() -> Response:
        raise ApiError(501, f"not supported here: {why}", code="not_supported")
    return refuse


def _error_handlers(app: FastAPI, service: Service) -> Callable[[Request, ApiError], Response]:
    """Errors become answers in the protocol's shape; returns what does it for an ApiError."""
    def shaped(request: Request, error: ApiError) -> Response:
        if request.url.path.startswith("/v2"):
            return Json(kserve.fault_document(error), error.status, headers=error.headers)
        return error_answer(error)

    def counted(request: Request, error: ApiError) -> Response:
        service.metrics.answers.labels(route_of(request), error.status).inc()
        return shaped(request, error)

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return counted(request, settled(error))

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        words = {404: f"there is no {request.url.path[:200]} here", 405: f"{request.method} is not for "
                 f"{request.url.path[:200]}"}.get(error.status_code, str(error.detail))
        return shaped(request, ApiError(error.status_code, words, headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:  # (its traceback is logged by the server)
        return shaped(request, ApiError(500, "the server failed; its log says how", code="internal"))
    return counted


def _status_routes(app: FastAPI, service: Service) -> None:
    info = service.client.info

    async def ready() -> Response:
        trouble = service.trouble
        return Json({"status": trouble or "ok"}, 200 if trouble is None else 503)

    async def live() -> Response:
        trouble = "the engine process has ended" if service.client.ended.is_set() else None
        return Json({"status": trouble or "ok"}, 200 if trouble is None else 503)

    for path in ("/health", "/v1/health/ready", "/v2/health/ready"):
        app.add_api_route(path, ready, methods=["GET", "HEAD"])  # (load balancers ask without wanting a body)
    for path in ("/v1/health/live", "/v2/health/live"):
        app.add_api_route(path, live, methods=["GET", "HEAD"])

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


def _openai_routes(service: Service, cut: Cut) -> list[Route]:
    async def generation(request: Request, record: type[Asked], admit: Admit[Asked]) -> Response:
        """One document, or a stream that ends in [DONE]."""
        body = await body_of(request, service)

        async def work() -> Response:
            asked = validated(record, body, strict=True)
            admitted = await admit(service, asked, caller_of(request))
            if not asked.stream:
                return Json(await admitted.whole())
            return await streamed(service, admitted.pieces(), "[DONE]", cut)
        return await answered(request, service, work())

    async def completions(request: Request) -> Response:
        return await generation(request, CompletionRequest, Completions.admit)

    async def chat(request: Request) -> Response:
        return await generation(request, ChatRequest, Chat.admit)
    return [Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"])]


def _text_routes(app: FastAPI, service: Service) -> None:
    texts = service.texts

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        asked = validated(TokenizeRequest, await body_of(request, service), strict=True)
        if (asked.prompt is None) == (asked.messages is None):
            raise bad("give prompt or messages", "prompt")
        ids = (await texts.ids(asked.prompt, bos=asked.add_special_tokens, any_length=True) if asked.prompt is not None
               else await texts.chat_ids(asked.messages or [], None))
        written = []
        for at in range(0, len(ids), _STRETCH):  # the ids of some megabytes of text take a second: others have turns
            written.append(json.dumps(ids[at:at + _STRETCH], separators=(",", ":"))[1:-1])
            await asyncio.sleep(0)
        return Response(f'{{"tokens":[{",".join(written)}],"count":{len(ids)},"max_model_len":{texts.longest}}}',
                        media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        asked = validated(DetokenizeRequest, await body_of(request, service), strict=True)
        if asked.tokens and (strange := max(asked.tokens)) >= texts.tokenizer.vocab_size:
            raise bad(f"token id {strange} is outside the vocabulary of {texts.tokenizer.vocab_size}", "tokens")
        return Json({"prompt": await texts.decode(asked.tokens)})
