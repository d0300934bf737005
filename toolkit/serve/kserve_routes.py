"""The routes of the KServe v2 protocol: health of the one model, its metadata, and three ways to ask it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from toolkit.serve import kserve, tensors
from toolkit.serve.answers import Json
from toolkit.serve.faults import ApiError, bad
from toolkit.serve.gate import load_json, read_body
from toolkit.serve.routes import Cut, answered, body_of, caller_of, streamed
from toolkit.serve.service import Service
from toolkit.version import __version__ as VERSION  # noqa: N812

Handler = Callable[..., Coroutine[Any, Any, Response]]


class KserveRoutes:
    """Handlers of one served engine; a model's routes are there with and without a version."""

    def __init__(self, service: Service, cut: Cut) -> None:
        self._service, self._cut = service, cut

    def all(self) -> Iterator[tuple[str, str, Handler]]:
        """(path, method, handler) of each route."""
        yield "/v2", "GET", self.server
        yield "/v2/repository/index", "POST", self.index
        for path, method, handler in (("", "GET", self.metadata), ("/ready", "GET", self.ready),
                                      ("/config", "GET", self.config), ("/infer", "POST", self.infer),
                                      ("/generate", "POST", self.generate),
                                      ("/generate_stream", "POST", self.generate_stream)):
            for prefix in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
                yield prefix + path, method, handler

    def _checked(self, name: str, version: str) -> str:
        served = self._service.options.model
        if name != served or version != tensors.VERSION:
            raise ApiError(404, f"model {name[:200]!r} version {version[:20]!r} is not served here; this is "
                                f"{served!r} version {tensors.VERSION}")
        return name

    async def server(self) -> Response:
        return Json({"name": "toolkit", "version": VERSION, "extensions": kserve.EXTENSIONS})

    async def index(self) -> Response:
        trouble = self._service.trouble
        return Json([{"name": self._service.options.model, "version": tensors.VERSION,
                      "state": "READY" if trouble is None else "UNAVAILABLE", "reason": trouble or ""}])

    async def metadata(self, name: str, version: str = tensors.VERSION) -> Response:
        return Json(kserve.metadata(self._checked(name, version)))

    async def ready(self, name: str, version: str = tensors.VERSION) -> Response:
        self._checked(name, version)
        return Json({"ready": self._service.trouble is None}, 200 if self._service.trouble is None else 503)

    async def config(self, name: str, version: str = tensors.VERSION) -> Response:
        return Json(kserve.configuration(self._checked(name, version)))

    async def infer(self, request: Request, name: str, version: str = tensors.VERSION) -> Response:
        """Tensors in, tensors out: JSON, or JSON with their bytes behind it."""
        self._checked(name, version)
        options = self._service.options
        body = await read_body(request, options, self._service.patience)
        header = request.headers.get("inference-header-content-length")
        if header is not None and (not header.isdecimal() or len(header) > 18):
            raise bad(f"Inference-Header-Content-Length is {header[:40]!r}")

        async def work() -> Response:
            asked = tensors.parse(body, None if header is None else int(header), lambda data: load_json(data, options))
            admitted = await kserve.Inference.admit(self._service, asked.values, caller_of(request))
            data, end = tensors.answer(name, asked, await admitted.tensors())
            if end is None:
                return Response(data, media_type="application/json")
            return Response(data, media_type="application/octet-stream",
                            headers={"Inference-Header-Content-Length": str(end)})
        return await answered(request, self._service, work())

    async def _inference(self, request: Request) -> kserve.Inference:
        """What both ``generate`` routes take: plain JSON values, beside ``parameters`` or in it."""
        body = await body_of(request, self._service)
        if not isinstance(body, dict) or not isinstance(body.get("parameters", {}), dict):
            raise bad("the request is not an object of inputs and parameters")
        values = {key: value for key, value in body.items() if key not in ("parameters", "id")}
        values |= body.get("parameters", {})
        tensors.known(values, tensors.INPUTS, "input")
        return await kserve.Inference.admit(self._service, values, caller_of(request))

    async def generate(self, request: Request, name: str, version: str = tensors.VERSION) -> Response:
        self._checked(name, version)
        asked = await self._inference(request)

        async def work() -> Response:
            found = {key: value[0] if len(value) == 1 else value for key, value in (await asked.tensors()).items()}
            return Json({"model_name": name, "model_version": version, **found})
        return await answered(request, self._service, work())

    async def generate_stream(self, request: Request, name: str, version: str = tensors.VERSION) -> Response:
        self._checked(name, version)
        asked = await self._inference(request)

        async def work() -> Response:
            return await streamed(self._service, asked.pieces(name), None, self._cut)
        return await answered(request, self._service, work())
