"""`vitrail serve MODEL [MODEL...]`: a page for people and an HTTP API for programs."""

import os
from pathlib import Path
from typing import Annotated

import tyro

from vitrail.cli import output
from vitrail.config import Precision
from vitrail.errors import UsageError

API_KEY_VARIABLE = "VITRAIL_API_KEY"


def main(
    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, tyro.conf.arg(metavar="N")] = 8000,
    host_name: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")] = (),
    batch: Annotated[int, tyro.conf.arg(metavar="N")] = 32,
    queue: Annotated[int, tyro.conf.arg(metavar="N")] = 64,
    deadline: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 1.0,
    max_megabytes: Annotated[float, tyro.conf.arg(metavar="N")] = 20.0,
    max_megapixels: Annotated[float, tyro.conf.arg(metavar="N")] = 50.0,
    api_key_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    device: str | None = None,
    precision: Precision | None = None,
) -> None:
    """Serve models until interrupted. What was accepted by then is answered, and the exit code is 0.

    Args:
        models: Files or folders of any known format, hf:ORG/NAME, timm:NAME, or presets; the page compares two.
        host: Where to listen; others than this machine reach it only when told so, at 0.0.0.0.
        port: Where to listen; 0 takes any that is free and prints it.
        host_name: A name by which others call this server, as in a browser's address; may be repeated. Requests that
            name another host are refused. Without it, a server on loopback answers to loopback's names alone.
        batch: Images computed at once, at most.
        queue: Images of a model that may be accepted and not yet answered; beyond that the answer is 503.
        deadline: Seconds that an image may wait; where it would be more the answer is 503, at once.
        max_megabytes: Larger requests are refused before they are read.
        max_megapixels: Larger images are refused before they are decoded.
        api_key_file: A file with the key that requests must carry; or the environment variable VITRAIL_API_KEY.
        device: cpu, cuda or mps; the best there is unless told otherwise.
        precision: In which to compute; unless told otherwise float32, or on a CPU what a model's file says is faster
            there and answers alike.
    """
    if not models:
        raise UsageError("say which models: vitrail serve MODEL [MODEL...]")
    for name, value in (("--batch", batch), ("--queue", queue), ("--deadline", deadline),
                        ("--max-megabytes", max_megabytes), ("--max-megapixels", max_megapixels)):  # fmt: skip
        if not value > 0:
            raise UsageError(f"{name} is {value}; it must be above 0")
    key = _read_api_key(api_key_file)
    try:
        from vitrail.runtime import cpu_threads
        from vitrail.serve import decoder_processes, hosts, server
        from vitrail.serve.limits import RequestLimits
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "python_multipart", "uvicorn"):
            raise
        raise UsageError(f"serving needs {error.name}: pip install 'vitrail[serve]'") from None
    cpu_threads.keep_freed_memory()
    with server.open_listener(host, port) as listener:
        decoder_processes.start_forkserver()  # while models are loaded
        service = server.load_service(
            models,
            device=device,
            precision=precision,
            max_batch=batch,
            capacity=queue,
            deadline=deadline,
            limits=RequestLimits(max_megabytes, max_megapixels),
            key=key,
            hosts=hosts.make_allowed_hosts(listener.getsockname()[0], host_name),
        )
        service.decoders.start()
        cpu_threads.lower_thread_priority()
        for served in service.models.values():
            where = f"{served.classifier.device} in {served.classifier.precision}"
            output.print_note(f"model: {output.strip_control_characters(served.name)} on {where}")
        listener.listen()  # whoever reads the address may ask at once
        print(server.get_url(listener), flush=True)
        server.serve_until_stopped(service, listener)
    unanswered = (
        f"{output.pluralize(service.unanswered_requests, 'request')} without an answer within {server.GRACE_SECONDS} s"
    )
    output.print_note(f"stopped; {unanswered if service.unanswered_requests else 'all that was accepted is answered'}")


def _read_api_key(file: Path | None) -> str | None:
    """The key, if there is to be one. It is in no option: those can be read by every user of the machine."""
    key = os.environ.get(API_KEY_VARIABLE) if file is None else file.read_bytes().decode("latin-1").strip()
    if key is None:
        return None
    if not key:
        raise UsageError(
            f"the key in {file or API_KEY_VARIABLE} is empty; write one, or leave it away to serve without"
        )
    if not key.isascii() or not key.isprintable():
        raise UsageError(
            f"the key in {file or API_KEY_VARIABLE} has characters that a header cannot carry; use printable ASCII"
        )
    return key
