"""The HTTP routes: schemas, status codes and headers. What they return is computed in `request_handling`."""

import asyncio
import base64
import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail import __version__
from vitrail.config import Precision
from vitrail.errors import UsageError
from vitrail.serving.api_page import render_api_page
from vitrail.serving.index_search import MAX_NEIGHBORS
from vitrail.serving.limits import BusyError, RefusedError
from vitrail.serving.request_handling import Service
from vitrail.serving.served_model import render_rollout, render_thumbnail

DRAIN_SECONDS = 2.0  # seconds for the rest of a body, after it was refused and before its connection is closed
PAGE_FOLDER = Path(__file__).parent / "page"
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/script.js": ("script.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/window.svg": ("window.svg", "image/svg+xml"),
}
CONTENT_SECURITY_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
RESPONSE_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"content-security-policy", CONTENT_SECURITY_POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
_ROW_TEXT = "a row that /v1/search returned"
_BINARY_SCHEMA = {"type": "string", "format": "binary"}
_FORM_SCHEMA = {"type": "object", "properties": {"image": {"type": "array", "items": _BINARY_SCHEMA}}}
_IMAGE_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"image/*": {"schema": _BINARY_SCHEMA}, "multipart/form-data": {"schema": _FORM_SCHEMA}},
    }
}


# --- response schemas -----------------------------------------------------------------------------------------------


class LabelProbability(BaseModel):
    """A label; a multi-label model with thresholds says whether it is predicted: its probability is above its own."""

    label: str
    probability: float
    threshold: float | None = None
    predicted: bool | None = None


class ImagePredictions(BaseModel):
    """A model's predictions for one image. `crop` is the part it saw: left, top, right, bottom, from 0 to 1."""

    model: str
    predictions: list[LabelProbability]
    unsure: bool
    crop: tuple[float, float, float, float]


class PredictResponse(BaseModel):
    results: list[ImagePredictions]


class ImageEmbedding(BaseModel):
    model: str
    embedding: list[float]


class EmbedResponse(BaseModel):
    results: list[ImageEmbedding]


class IndexedImage(BaseModel):
    """An image of the index; `/v1/thumbnail` shows its row where `thumbnail` is true."""

    row: int
    image: str
    similarity: float
    thumbnail: bool


class ImageNeighbors(BaseModel):
    """The images of the index most similar to one image, by the cosine of the model's features."""

    model: str
    neighbors: list[IndexedImage]


class SearchResponse(BaseModel):
    results: list[ImageNeighbors]


class AttentionResponse(BaseModel):
    """One layer's attention: `maps` is base64 of bytes (heads, 1 + patches, patches), the class token's row first."""

    model: str
    layer: int
    heads: int
    grid: tuple[int, int]
    maps: str


class ModelInfo(BaseModel):
    name: str
    classes: int
    input: tuple[int, int]
    parameters: int
    grid: tuple[int, int] | None
    layers: int
    heads: int
    multi_label: bool
    threshold: float
    has_label_thresholds: bool
    precision: Precision
    indexed_images: int


class ClassesResponse(BaseModel):
    """A model's classes, in the order of its outputs."""

    model: str
    classes: list[str]


class ModelsResponse(BaseModel):
    models: list[ModelInfo]


class ErrorResponse(BaseModel):
    error: str


# --- routes ----------------------------------------------------------------------------------------------------------


def _get_service(request: Request) -> Service:
    return cast(Service, request.app.state.service)


def _get_permitted_service(request: Request) -> Service:
    service = _get_service(request)
    service.check_key(request)
    return service


OpenService = Annotated[Service, Depends(_get_service)]
LockedService = Annotated[Service, Depends(_get_permitted_service)]
ModelName = Annotated[str | None, Query(alias="model", description="one of /v1/models; the first unless given")]

_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": sentence}
    for status, sentence in {
        400: "no image, or a damaged one",
        401: "the key is missing or wrong",
        403: "a request from another site's page",
        404: "no such model, no index, or no thumbnail",
        408: "the body arrived too slowly",
        413: "too many bytes, pixels or images, or too long to decode",
        415: "a content type that is no image",
        421: "a host name that is not this server's",
        422: "an invalid option",
        503: "too busy: retry after Retry-After seconds",
    }.items()
}
router = APIRouter(responses=_ERROR_RESPONSES)
health_router = APIRouter()


@router.post("/v1/predict", response_model=PredictResponse, openapi_extra=_IMAGE_BODY)
async def predict(
    request: Request, service: LockedService, model: ModelName = None, top: Annotated[int, Query(ge=1, le=1000)] = 5
) -> Response:
    """The most probable labels of each image; of a multi-label model with thresholds also all others above theirs."""
    served = service.get_model(model)
    inputs, rows = await service.compute_request(request, served, "predict", served.classifier.predict_proba)
    results = [{**served.rank_labels(row, top), "crop": each.crop} for row, each in zip(rows, inputs, strict=True)]
    return JSONResponse({"results": results})


@router.post("/v1/embed", response_model=EmbedResponse, openapi_extra=_IMAGE_BODY)
async def embed(request: Request, service: LockedService, model: ModelName = None) -> Response:
    """The features of each image: what the head reads."""
    served = service.get_model(model)
    _, rows = await service.compute_request(request, served, "embed", served.classifier.extract_features)
    return JSONResponse({"results": [{"model": served.name, "embedding": row.tolist()} for row in rows]})


@router.post(
    "/v1/explain",
    response_class=Response,
    responses={200: {"content": {"image/png": {"schema": _BINARY_SCHEMA}}}},
    openapi_extra=_IMAGE_BODY,
)
async def explain(
    request: Request, service: LockedService, model: ModelName = None, background: Literal["image", "none"] = "image"
) -> Response:
    """Attention rollout as a PNG: over the crop that the model saw, or alone, as an overlay for it."""
    served = service.get_model(model)
    [crop], [rollout] = await service.compute_request(request, served, "explain", served.compute_rollouts, single=True)
    png = await service.run_in_thread(partial(render_rollout, crop.pixels, rollout, over_image=background == "image"))
    return Response(png, media_type="image/png")


@router.post("/v1/attention", response_model=AttentionResponse, openapi_extra=_IMAGE_BODY)
async def get_attention(request: Request, service: LockedService, layer: int, model: ModelName = None) -> Response:
    """What the class token and each patch attend to in one layer, head by head; each row's greatest value is 255."""
    served = service.get_model(model)
    compute = partial(served.compute_attention, layer=layer)
    _, [maps] = await service.compute_request(request, served, ("attention", layer), compute, single=True)
    grid = served.describe()["grid"]
    encoded = await service.run_in_thread(lambda: base64.b64encode(maps.tobytes()).decode())
    return JSONResponse({"model": served.name, "layer": layer, "heads": len(maps), "grid": grid, "maps": encoded})


@router.post("/v1/search", response_model=SearchResponse, openapi_extra=_IMAGE_BODY)
async def search(
    request: Request, service: LockedService, top: Annotated[int, Query(ge=1, le=MAX_NEIGHBORS)] = 20
) -> Response:
    """The images of the served index most similar to each image, the most similar first."""
    found = await service.search_index(request)
    model = service.get_index().model
    return JSONResponse({"results": [{"model": model, "neighbors": neighbors[:top]} for neighbors in found]})


@router.get(
    "/v1/thumbnail", response_class=Response, responses={200: {"content": {"image/png": {"schema": _BINARY_SCHEMA}}}}
)
async def get_thumbnail(service: LockedService, row: Annotated[int, Query(ge=0, description=_ROW_TEXT)]) -> Response:
    """An image of the served index as a PNG: the crop that the model saw."""
    decoded = await service.decode_thumbnail(row)
    png = await service.run_in_thread(partial(render_thumbnail, decoded.pixels))
    return Response(png, media_type="image/png")


@router.get("/v1/models", response_model=ModelsResponse)
async def list_models(service: LockedService) -> Response:
    """The served models."""
    models = service.models.values()
    rows = [{**served.describe(), "indexed_images": service.count_indexed_images(served)} for served in models]
    return JSONResponse({"models": rows})


@router.get("/v1/classes", response_model=ClassesResponse)
async def list_classes(service: LockedService, model: ModelName = None) -> Response:
    """The names of a model's classes."""
    served = service.get_model(model)
    return JSONResponse({"model": served.name, "classes": list(served.classifier.labels)})


@health_router.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> str:
    """200 while the process is alive."""
    return "ok\n"


@health_router.get(
    "/readyz", response_class=PlainTextResponse, responses={503: {"description": "a model is warming up"}}
)
async def readyz(service: OpenService) -> Response:
    """200 once every model is warmed up."""
    waiting = [served.name for served in service.models.values() if not served.is_ready]
    text = f"not ready: {', '.join(waiting)}\n" if waiting else "ready\n"
    return PlainTextResponse(text, 503 if waiting else 200)


@health_router.get("/metrics", response_class=PlainTextResponse)
async def get_metrics(service: LockedService) -> Response:
    """Counts and times for Prometheus."""
    return PlainTextResponse(service.metrics.render(service.read_gauges()), media_type="text/plain; version=0.0.4")


# --- errors ----------------------------------------------------------------------------------------------------------


def _make_error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


async def _handle_error(_: Request, error: Exception) -> Response:
    match error:
        case RefusedError():
            headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
            return _make_error_response(error.status, str(error), headers)
        case BusyError():
            headers = {"retry-after": str(round(error.retry_seconds + 0.5))}
            return _make_error_response(503, f"too busy: {error}", headers)
        case RequestValidationError():
            first = error.errors()[0]
            return _make_error_response(422, f"{first['loc'][-1]}: {first['msg']}")
        case HTTPException():
            return _make_error_response(error.status_code, str(error.detail), dict(error.headers or {}))
        case UsageError():
            return _make_error_response(422, str(error))
        case ClientDisconnect():  # nothing to log
            return _make_error_response(400, "the request ended too early")
    return _make_error_response(500, "the server failed; its log says why")


# --- application -----------------------------------------------------------------------------------------------------


def build_app(service: Service) -> ASGIApp:
    """Build the ASGI application of a service, for HTTP alone: no websockets, no lifespan."""
    app = FastAPI(
        title="vitrail",
        version=__version__,
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # it would redirect to any host that a request names
    )
    app.state.service = service
    app.include_router(router)
    app.include_router(health_router)
    api_page = render_api_page(app.openapi()).encode()
    app.add_route("/docs", _serve_bytes(api_page, "text/html; charset=utf-8"), include_in_schema=False)
    for path, (name, kind) in PAGE_FILES.items():
        app.add_route(path, _serve_bytes((PAGE_FOLDER / name).read_bytes(), kind), include_in_schema=False)
    handled = (RefusedError, BusyError, RequestValidationError, HTTPException, UsageError, ClientDisconnect, Exception)
    for error in handled:
        app.add_exception_handler(error, _handle_error)
    return _drain_refused(_measure_requests(_check_hosts(app, service), service), service.limits.max_bytes)


def _serve_bytes(content: bytes, media_type: str) -> Any:
    async def respond(_: Request) -> Response:
        return Response(content, media_type=media_type)

    return respond


def _check_hosts(app: ASGIApp, service: Service) -> ASGIApp:
    """Wrap the application to refuse requests with a foreign Host or Origin."""

    async def handle_request(scope: Scope, receive: Receive, send: Send) -> None:
        handler = app
        if service.hosts is not None:
            try:
                service.hosts.check_request(scope["path"], scope["method"], scope["headers"])
            except RefusedError as error:
                handler = _make_error_response(error.status, str(error))
        await handler(scope, receive, send)

    return handle_request


def _measure_requests(app: ASGIApp, service: Service) -> ASGIApp:
    """Wrap the application to count and time its responses, and to add the headers of every response."""

    async def measure_request(scope: Scope, receive: Receive, send: Send) -> None:
        start, status, seconds = time.monotonic(), 0, 0.0

        async def send_measured(message: Message) -> None:
            nonlocal status, seconds
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *RESPONSE_HEADERS]
            seconds = time.monotonic() - start
            await send(message)

        try:
            await app(scope, receive, send_measured)
        except asyncio.CancelledError:  # by the server: the grace period is over
            service.unanswered_requests += 1
            if not status:
                with contextlib.suppress(TimeoutError):
                    response = _make_error_response(503, "the server is stopping", {"retry-after": "1"})
                    async with asyncio.timeout(1):  # a client that does not read must not delay the stop
                        await response(scope, receive, send_measured)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            service.metrics.increment("vitrail_requests_total", route=route, status=str(status))
            service.metrics.observe("vitrail_request_seconds", seconds, route=route)

    return measure_request


def _drain_refused(app: ASGIApp, max_bytes: int) -> ASGIApp:
    """Wrap the application to read the rest of a body that it refused, before the connection is closed.

    Closed at once, the connection would be reset and the response lost. uvicorn drains connections that stay open.
    """

    async def drain_request(scope: Scope, receive: Receive, send: Send) -> None:
        headers = {(name, value.lower()) for name, value in scope["headers"]}
        closes = scope["http_version"] == "1.0" or (b"connection", b"close") in headers
        more = all(name != b"expect" for name, _ in headers)

        async def receive_tracked() -> Message:
            nonlocal more
            message = await receive()
            more = message.get("more_body", False)
            return message

        async def send_drained(message: Message) -> None:
            ends = message["type"] == "http.response.body" and not message.get("more_body", False)
            if ends and closes and more:
                await send({**message, "more_body": True})
                await _drain_body(receive_tracked, max_bytes)
                message = {"type": "http.response.body"}
            await send(message)

        await app(scope, receive_tracked, send_drained)

    return drain_request


async def _drain_body(receive: Receive, max_bytes: int) -> None:
    """Read the rest of a body, up to `max_bytes` and for `DRAIN_SECONDS`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while max_bytes > 0 and (message := await receive()).get("more_body", False):
                max_bytes -= len(message.get("body", b""))
