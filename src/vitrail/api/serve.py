"""Serve models over HTTP from Python: `vitrail.serve`."""

import contextlib
import dataclasses
import importlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from vitrail.api import notebook
from vitrail.api.keyword_errors import name_keywords
from vitrail.api.models import AnyModel, get_model_name, list_models, load_trained
from vitrail.api.options import build_options, document_options
from vitrail.api.progress import NoteCollector
from vitrail.config import Precision
from vitrail.errors import UsageError
from vitrail.formatting import pluralize, strip_control_characters
from vitrail.inference.feature_index import open_index
from vitrail.runtime import cpu_threads
from vitrail.runtime.workers import Notify
from vitrail.serving import decoder_processes
from vitrail.serving.limits import AllowedHosts, RequestLimits

if TYPE_CHECKING:
    from vitrail.serving.request_handling import Service

__all__ = ["ServeKeywords", "Server", "serve"]
API_KEY_VARIABLE = "VITRAIL_API_KEY"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How models are served."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free one."""
    host_name: Sequence[str] = ()
    """Names of this server; requests to another host are refused."""
    batch: int = 32
    """Images per batch, at most."""
    queue: int = 64
    """Accepted images of a model that may wait for an answer; beyond that the response is 503."""
    deadline: float = 1.0
    """Seconds that an image may wait; where it would wait longer the response is 503."""
    max_megabytes: float = 20.0
    max_megapixels: float = 50.0
    api_key_file: Path | None = None
    """A file with the key that requests must carry; or the environment variable VITRAIL_API_KEY."""
    index: Path | None = None
    """An index of a served model's features, to search."""
    image_root: Path | None = None
    """The folder below which thumbnails of the index's images are read."""
    device: str | None = None
    precision: Precision | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "queue", "deadline", "max_megabytes", "max_megapixels"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")
        if self.image_root is not None and self.index is None:
            raise UsageError(f"--image-root {self.image_root} is for the images of an index: add --index INDEX")


class ServeKeywords(TypedDict, total=False):
    """What `serve` takes by keyword."""

    host: str
    """Address to listen on; other machines reach it only at 0.0.0.0 or an address of the network."""
    port: int
    """0 takes any free one."""
    host_name: Sequence[str]
    """Names of this server; requests to another host are refused."""
    batch: int
    """Images per batch, at most."""
    queue: int
    """Accepted images of a model that may wait for an answer; beyond that the response is 503."""
    deadline: float
    """Seconds that an image may wait; where it would wait longer the response is 503."""
    max_megabytes: float
    """Size of an upload, at most."""
    max_megapixels: float
    """Size of an image, at most."""
    api_key_file: str | Path | None
    """A file with the key that requests must carry; or the environment variable VITRAIL_API_KEY."""
    index: str | Path | None
    """An index of a served model's features, to search: a folder that `vitrail.index` wrote."""
    image_root: str | Path | None
    """The folder below which thumbnails of the index's images are read; without it there are none."""
    device: str | None
    """cpu, cuda or mps; the best device available by default."""
    precision: Precision | None
    """Of the computation; float32 by default, or on a CPU the faster one that the model's file records."""


class Server:
    """A server in the background: `stop` ends it, as the end of a `with` block does.

    `vitrail.serve` returns it.

        server = vitrail.serve("model.safetensors", port=0)
        print(server.url)
        server.stop()
    """

    def __init__(self, service: "Service", listener: socket.socket) -> None:
        from vitrail.serving import server

        self.url = server.get_url(listener)
        self._service, self._listener, self._uvicorn = service, listener, server.make_server(service)
        self._thread = threading.Thread(target=self._run, daemon=True, name="vitrail serve")
        self._thread.start()

    def _run(self) -> None:
        with contextlib.closing(self._service), self._listener:
            self._uvicorn.run(sockets=[self._listener])

    def stop(self) -> None:
        """Stop listening, answer what was accepted, and end."""
        self._uvicorn.should_exit = True
        self._thread.join()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Server({self.url!r}, {self._describe_state()})"

    def _repr_html_(self) -> str:
        return notebook.wrap_html(notebook.render_link(self.url, f" is {self._describe_state()}"))

    def _describe_state(self) -> str:
        return "running" if self._thread.is_alive() else "stopped"


@document_options(ServeOptions)
@name_keywords
def serve(
    model: AnyModel | Sequence[AnyModel], *, notify: Notify | None = None, **options: Unpack[ServeKeywords]
) -> Server:
    """Serve one or several models over HTTP in the background, as `vitrail serve` does.

        with vitrail.serve("model.safetensors", port=0) as server:
            print(server.url)

    Arguments:

    - `model`: A name, a path, a `Run` or a `Trained`, or a list of these.
    - `notify`: Called with each note; by default they go to the logger `vitrail`.
    """
    models = list_models(model)
    service, listener = start_service(models, build_options(ServeOptions, options), NoteCollector(notify))
    return Server(service, listener)


def serve_until_stopped(
    models: Sequence[AnyModel], options: ServeOptions, notify: Notify, on_ready: Callable[[str], None]
) -> None:
    """Serve models until SIGINT or SIGTERM; `on_ready` is called with the address."""
    service, listener = start_service(models, options, notify)
    from vitrail.serving import server

    with listener:
        on_ready(server.get_url(listener))
        server.serve_until_stopped(service, listener)
    if service.unanswered_requests:
        requests = pluralize(service.unanswered_requests, "request")
        notify(f"stopped; {requests} not answered within {server.GRACE_SECONDS} s")
    else:
        notify("stopped; all accepted requests were answered")


def start_service(models: Sequence[AnyModel], options: ServeOptions, notify: Notify) -> tuple["Service", socket.socket]:
    """Load the models and listen; requests wait until the server runs."""
    if not models:
        raise UsageError("name the models to serve, at least one")
    _check_installed()
    from vitrail.serving import server

    key = _read_api_key(options.api_key_file)
    index = None if options.index is None else open_index(options.index)
    cpu_threads.keep_freed_memory()
    listener = server.open_listener(options.host, options.port)
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)  # closed unless all is well
        decoder_processes.start_forkserver()  # while models are loaded
        names = [get_model_name(model) for model in models]
        classifiers = server.build_classifiers(
            names,
            (load_trained(model, notify) for model in models),
            device=options.device,
            batch_size=options.batch,
            precision=options.precision,
        )
        service = server.make_service(
            classifiers,
            capacity=options.queue,
            deadline=options.deadline,
            limits=RequestLimits(options.max_megabytes, options.max_megapixels),
            key=key,
            hosts=AllowedHosts(listener.getsockname()[0], options.host_name),
            index=index,
            image_root=options.image_root,
        )
        service.decoders.start()
        cpu_threads.lower_thread_priority()
        for served in service.models.values():
            where = f"{served.classifier.device} in {served.classifier.precision}"
            notify(f"model: {strip_control_characters(served.name)} on {where}")
        if service.index is not None:
            images = pluralize(len(service.index.index.rows), "image")
            notify(f"index: {images}, by the features of {strip_control_characters(service.index.model)}")
        listener.listen()  # whoever reads the address may send requests at once
        stack.pop_all()
    return service, listener


def _check_installed() -> None:
    """Refuse to serve without the packages of the extra; without them `vitrail.serve` can still be looked at."""
    try:
        importlib.import_module("vitrail.serving.server")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("fastapi", "python_multipart", "uvicorn"):
            raise
        raise UsageError(f"serving needs {package}: pip install 'vitrail[serve]'") from None


def _read_api_key(file: Path | None) -> str | None:
    """The key, if there is to be one. It is no option: every user of the machine can read those."""
    key = os.environ.get(API_KEY_VARIABLE) if file is None else file.read_bytes().decode("latin-1").strip()
    if key is None:
        return None
    source = file or API_KEY_VARIABLE
    if not key:
        raise UsageError(f"the key in {source} is empty; write one, or omit it to serve without")
    if not key.isascii() or not key.isprintable():
        raise UsageError(f"the key in {source} has characters that a header cannot carry; use printable ASCII")
    return key
