"""The routes. What they answer is computed elsewhere; here it gets its form, its status and its headers."""

import asyncio
import base64
import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail import __version__
from vitrail.errors import UsageError
from vitrail.serve.api_page import render_api
from vitrail.serve.batching import BusyError
from vitrail.serve.limits import RefusedError
from vitrail.serve.models import explained
from vitrail.serve.service import Service

DRAIN = 2.0  # seconds for the rest of a body, after it was refused and before its connection is closed
PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/script.js": ("script.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/window.svg": ("window.svg", "image/svg+xml"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_BINARY = {"type": "string", "format": "binary"}
_FORM = {"type": "object", "properties": {"image": {"type": "array", "items": _BINARY}}}
_IMAGES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"image/*": {"schema": _BINARY}, "multipart/form-data": {"schema": _FORM}},
    }
}


# --- what answers look like, for the schema --------------------------------------------------------------------------


class Prediction(BaseModel):
    label: str
    probability: float


class Answer(BaseModel):
    """What a model says of one image. `seen` is the part it saw: left, top, right, bottom, from 0 to 1."""

    model: str
    predictions: list[Prediction]
    unsure: bool
    seen: tuple[float, float, float, float]


class Answers(BaseModel):
    answers: list[Answer]


class Embedding(BaseModel):
    model: str
    embedding: list[float]


class Embeddings(BaseModel):
    answers: list[Embedding]


class Attention(BaseModel):
    """One layer's attention: `maps` is base64 of bytes (heads, 1 + patches, patches), the class token's row first."""

    model: str
    layer: int
    heads: int
    grid: tuple[int, int]
    maps: str


class Model(BaseModel):
    name: str
    classes: int
    input: tuple[int, int]
    parameters: int
    grid: tuple[int, int] | None
    layers: int
    heads: int
    several: bool
    threshold: float


class Classes(BaseModel):
    """What a model can answer, in the order of its outputs."""

    model: str
    classes: list[str]


class Models(BaseModel):
    models: list[Model]


class Problem(BaseModel):
    error: str


# --- routes ----------------------------------------------------------------------------------------------------------


def _service(request: Request) -> Service:
    found = request.app.state.service
    assert isinstance(found, Service)
    return found


def _permitted(request: Request) -> Service:
    found = _service(request)
    found.check_key(request)
    return found


Open = Annotated[Service, Depends(_service)]
Locked = Annotated[Service, Depends(_permitted)]
Name = Annotated[str | None, Query(alias="model", description="one of /v1/models; the first unless given")]

_problems: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": sentence}
    for status, sentence in {
        400: "no image, or a damaged one",
        401: "the key is missing or wrong",
        403: "a page of another site asks",
        404: "no such model",
        408: "the body came too slowly",
        413: "too many bytes, pixels or images, or too long to decode",
        415: "a type that is no image",
        421: "a name that is not this server's",
        422: "an option that cannot be meant",
        503: "too busy: come again after Retry-After seconds",
    }.items()
}
router = APIRouter(responses=_problems)
health = APIRouter()


@router.post("/v1/predict", response_model=Answers, openapi_extra=_IMAGES)
async def predict(
    request: Request, service: Locked, model: Name = None, top: Annotated[int, Query(ge=1, le=1000)] = 5
) -> Response:
    """The likeliest labels of each image."""
    served = service.model(model)
    views, rows = await service.computed(request, served, "predict", served.classifier.probabilities)
    said = [{**served.answer(row, top), "seen": view.within} for row, view in zip(rows, views, strict=True)]
    return JSONResponse({"answers": said})


@router.post("/v1/embed", response_model=Embeddings, openapi_extra=_IMAGES)
async def embed(request: Request, service: Locked, model: Name = None) -> Response:
    """What the head reads of each image, as numbers."""
    served = service.model(model)
    _, rows = await service.computed(request, served, "embed", served.classifier.features)
    return JSONResponse({"answers": [{"model": served.name, "embedding": row.tolist()} for row in rows]})


@router.post(
    "/v1/explain",
    response_class=Response,
    responses={200: {"content": {"image/png": {"schema": _BINARY}}}},
    openapi_extra=_IMAGES,
)
async def explain(
    request: Request, service: Locked, model: Name = None, background: Literal["image", "none"] = "image"
) -> Response:
    """Attention rollout as a PNG: over what the model saw of the image, or alone, to be laid over it."""
    served = service.model(model)
    [view], [found] = await service.computed(request, served, "explain", served.rollouts, single=True)
    png = await service.aside(partial(explained, view.pixels, found, over_image=background == "image"))
    return Response(png, media_type="image/png")


@router.post("/v1/attention", response_model=Attention, openapi_extra=_IMAGES)
async def attention(request: Request, service: Locked, layer: int, model: Name = None) -> Response:
    """What the class token and each patch attend to in one layer, head by head; each row's greatest value is 255."""
    served = service.model(model)
    work = partial(served.attention, layer=layer)
    _, [maps] = await service.computed(request, served, ("attention", layer), work, single=True)
    described = served.described()
    encoded = await service.aside(lambda: base64.b64encode(maps.tobytes()).decode())
    found = {"model": served.name, "layer": layer, "heads": len(maps), "grid": described["grid"], "maps": encoded}
    return JSONResponse(found)


@router.get("/v1/models", response_model=Models)
async def models(service: Locked) -> Response:
    """The models there are."""
    return JSONResponse({"models": [served.described() for served in service.models.values()]})


@router.get("/v1/classes", response_model=Classes)
async def classes(service: Locked, model: Name = None) -> Response:
    """The names of a model's classes."""
    served = service.model(model)
    return JSONResponse({"model": served.name, "classes": list(served.classifier.labels)})


@health.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> str:
    """200 while the process answers."""
    return "ok\n"


@health.get("/readyz", response_class=PlainTextResponse, responses={503: {"description": "a model is warming up"}})
async def readyz(service: Open) -> Response:
    """200 when every model has computed once."""
    waiting = [served.name for served in service.models.values() if not served.ready]
    text = f"not ready: {', '.join(waiting)}\n" if waiting else "ready\n"
    return PlainTextResponse(text, 503 if waiting else 200)


@health.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Locked) -> Response:
    """Counts and times for Prometheus."""
    return PlainTextResponse(service.metrics.text(service.gauges()), media_type="text/plain; version=0.0.4")


# --- errors ----------------------------------------------------------------------------------------------------------


def _problem(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": sentence}, status, headers)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _problem(error.status, str(error), {"www-authenticate": "Bearer"} if error.status == 401 else None)


async def _busy(_: Request, error: Exception) -> Response:
    assert isinstance(error, BusyError)
    return _problem(503, f"too busy: {error}", {"retry-after": str(round(error.seconds + 0.5))})


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return _problem(422, f"{first['loc'][-1]}: {first['msg']}")


async def _unknown(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _problem(error.status_code, str(error.detail), dict(error.headers or {}))


async def _unusable(_: Request, error: Exception) -> Response:
    return _problem(422, str(error))


async def _gone(_: Request, error: Exception) -> Response:  # noqa: ARG001
    return _problem(400, "the request ended too early")  # nobody hears it; the log need not, either


async def _failed(_: Request, error: Exception) -> Response:  # noqa: ARG001
    return _problem(500, "the server failed; its log says why")


# --- the whole -------------------------------------------------------------------------------------------------------


def build(service: Service) -> ASGIApp:
    """The application of a service."""
    app = FastAPI(
        title="vitrail",
        version=__version__,
        docs_url=None,  # theirs load from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # to whatever host a request names
    )
    app.state.service = service
    app.include_router(router)
    app.include_router(health)
    described = render_api(app.openapi()).encode()
    app.add_route("/docs", _file(described, "text/html; charset=utf-8"), include_in_schema=False)
    for path, (name, kind) in FILES.items():
        app.add_route(path, _file((PAGE / name).read_bytes(), kind), include_in_schema=False)
    for error, handler in (
        (RefusedError, _refused),
        (BusyError, _busy),
        (RequestValidationError, _invalid),
        (HTTPException, _unknown),
        (UsageError, _unusable),
        (ClientDisconnect, _gone),
        (Exception, _failed),
    ):
        app.add_exception_handler(error, handler)
    return _drain_refused(_measured(_check_hosts(app, service), service), service.limits.bytes)


def _file(content: bytes, kind: str) -> Any:
    async def file(_: Request) -> Response:
        return Response(content, media_type=kind)

    return file


def _check_hosts(app: ASGIApp, service: Service) -> ASGIApp:
    """The application for those who call the server by its name."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and service.hosts is not None:
            try:
                service.hosts.check(scope["path"], scope["method"], scope["headers"])
            except RefusedError as error:
                await _problem(error.status, str(error))(scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


def _measured(app: ASGIApp, service: Service) -> ASGIApp:
    """The application, its answers counted and given the headers that all have."""

    async def measured(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        start, status, seconds = time.monotonic(), 0, 0.0

        async def sent(message: Message) -> None:
            nonlocal status, seconds
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            seconds = time.monotonic() - start
            await send(message)

        try:
            await app(scope, receive, sent)
        except asyncio.CancelledError:  # by the server, whose grace is over
            service.unanswered += 1
            if not status:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):  # who does not read does not keep us
                        await _problem(503, "the server stops", {"retry-after": "1"})(scope, receive, sent)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            service.metrics.count("vitrail_requests_total", route=route, status=str(status))
            service.metrics.observe("vitrail_request_seconds", seconds, route=route)

    return measured


def _drain_refused(app: ASGIApp, most: int) -> ASGIApp:
    """The application; where it answers before a body has come, the connection is closed a little later.

    Closed at once it would be reset, and the answer lost on its way. A connection that stays open is drained by
    uvicorn.
    """

    async def drained(scope: Scope, receive: Receive, send: Send) -> None:
        closes = scope["type"] == "http" and (
            scope["http_version"] == "1.0" or (b"connection", b"close") in {(k, v.lower()) for k, v in scope["headers"]}
        )
        more = scope["type"] == "http" and not any(k == b"expect" for k, _ in scope["headers"])

        async def received() -> Message:
            nonlocal more
            message = await receive()
            more = message.get("more_body", False)
            return message

        async def sent(message: Message) -> None:
            ends = message["type"] == "http.response.body" and not message.get("more_body", False)
            if ends and closes and more:
                await send({**message, "more_body": True})
                await _drain(received, most)
                message = {"type": "http.response.body"}
            await send(message)

        await app(scope, received, sent)

    return drained


async def _drain(receive: Receive, most: int) -> None:
    """Read the rest of a body, so much of it and for so long as is reasonable."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN):
            while most > 0 and (message := await receive()).get("more_body", False):
                most -= len(message.get("body", b""))
