"""`vitrail serve MODEL [MODEL...]`: a page for people and an HTTP API for programs."""

import os
from pathlib import Path

from vitrail.cli import output
from vitrail.cli.arguments.models import ServeArguments
from vitrail.errors import UsageError
from vitrail.inference import compute

try:
    from vitrail.serve import decoder_processes, hosts, server
    from vitrail.serve.limits import RequestLimits
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("fastapi", "python_multipart", "uvicorn"):
        raise
    raise UsageError(f"serving needs {error.name}: pip install 'vitrail[serve]'") from None

API_KEY_VARIABLE = "VITRAIL_API_KEY"
_POSITIVE_OPTIONS = ("batch", "queue", "deadline", "max_megabytes", "max_megapixels")


def run(arguments: ServeArguments) -> None:
    """Serve the models until a signal, and print the address."""
    if not arguments.models:
        raise UsageError("name the models: vitrail serve MODEL [MODEL...]")
    for name in _POSITIVE_OPTIONS:
        if not getattr(arguments, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be above 0")
    key = _read_api_key(arguments.api_key_file)
    compute.keep_freed_memory()
    with server.open_listener(arguments.host, arguments.port) as listener:
        decoder_processes.start_forkserver()  # while models are loaded
        service = server.load_service(
            arguments.models,
            device=arguments.device,
            precision=arguments.precision,
            max_batch=arguments.batch,
            capacity=arguments.queue,
            deadline=arguments.deadline,
            limits=RequestLimits(arguments.max_megabytes, arguments.max_megapixels),
            key=key,
            hosts=hosts.make_allowed_hosts(listener.getsockname()[0], arguments.host_name),
        )
        service.decoders.start()
        compute.lower_thread_priority()
        for served in service.models.values():
            where = f"{served.classifier.device} in {served.classifier.precision}"
            output.print_note(f"model: {output.strip_control_characters(served.name)} on {where}")
        listener.listen()  # whoever reads the address may send requests at once
        print(server.get_url(listener), flush=True)
        server.serve_until_stopped(service, listener)
    if service.unanswered_requests:
        requests = output.pluralize(service.unanswered_requests, "request")
        output.print_note(f"stopped; {requests} not answered within {server.GRACE_SECONDS} s")
    else:
        output.print_note("stopped; all accepted requests were answered")


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
