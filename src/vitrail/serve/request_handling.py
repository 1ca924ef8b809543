"""From a request to what a model says of its images: read, let in, decoded, computed."""

import asyncio
import dataclasses
import hmac
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request

from vitrail.serve.batching import BatchFunction, BusyError, QueueSlot
from vitrail.serve.decoder_processes import SLICE_SECONDS, DecoderPool
from vitrail.serve.hosts import AllowedHosts
from vitrail.serve.limits import RefusedError, RequestLimits
from vitrail.serve.metrics import MetricLabels, ServerMetrics
from vitrail.serve.served_model import ServedModel, find_model
from vitrail.serve.upload_decoding import ModelInput
from vitrail.serve.uploads import Uploads, check_content_type

ResultT = TypeVar("ResultT")


@dataclasses.dataclass
class Service:
    """The models, and what is shared by all requests. Only the event loop's thread uses it."""

    models: Mapping[str, ServedModel]
    limits: RequestLimits
    metrics: ServerMetrics
    uploads: Uploads
    decoders: DecoderPool
    thread_pool: ThreadPoolExecutor
    """They draw and encode what is answered."""
    key: str | None = None
    hosts: AllowedHosts | None = None
    """By which names the server may be called; by any unless given."""
    unanswered_requests: int = 0
    """Requests that were given up when the server stopped."""

    def check_key(self, request: Request) -> None:
        """Refuse a request without the key, in a time that does not depend on what it has in its place."""
        if self.key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            raise RefusedError(401, "this server wants a key: Authorization: Bearer KEY")

    def get_model(self, name: str | None) -> ServedModel:
        found = find_model(self.models, name)
        if found is None:
            raise RefusedError(404, f"there is no model {name!r:.80}; /v1/models lists those there are")
        return found

    async def compute_request(
        self, request: Request, model: ServedModel, kind: Hashable, function: BatchFunction, *, single: bool = False
    ) -> tuple[list[ModelInput], list[Any]]:
        """What a model sees of a request's images, and what the work makes of them."""
        content_type = check_content_type(request)
        model.queue.check_capacity()
        self.decoders.check_capacity(model.queue.deadline)
        with self.uploads.open(request) as upload:
            await upload.read_body(request)
            files = upload.split_files(content_type)
            if single and len(files) > 1:
                raise RefusedError(422, f"one image at a time is explained, and the form has {len(files)}")
            with model.queue.acquire(len(files)) as place:
                inputs = await self._decode_files(files, model, place)
                upload.close()  # only pixels wait for the model
                found = await place.compute(kind, function, [each.pixels for each in inputs])
        return inputs, list(found)

    async def run_in_thread(self, function: Callable[[], ResultT]) -> ResultT:
        """Something done by another thread, so that this one goes on answering."""
        return await asyncio.get_running_loop().run_in_executor(self.thread_pool, function)

    async def _decode_files(self, files: Sequence[memoryview], model: ServedModel, slot: QueueSlot) -> list[ModelInput]:
        """The model inputs of a request's files, decoded several at a time; after a failure no other is begun."""
        inputs: dict[int, ModelInput] = {}
        failures: list[RefusedError | BusyError] = []
        coming = iter(enumerate(files, 1))

        async def decode_next() -> float:
            spent = 0.0
            for number, file in coming:
                name = "the image" if len(files) == 1 else f"image {number}"
                try:
                    found = await self.decoders.decode(file, model.input_spec, name, model.queue.deadline)
                except (RefusedError, BusyError) as error:
                    failures.append(error)
                if failures:
                    break
                inputs[number] = found[0]
                spent += found[1]
            return spent

        spent = await asyncio.gather(*(decode_next() for _ in files[: self.decoders.count]))
        if failures:
            raise failures[0]
        slot.deadline += max(
            0.0, max(spent) - SLICE_SECONDS
        )  # the deadline is for those who wait: large images need time
        return [inputs[number] for number in sorted(inputs)]

    def read_gauges(self) -> dict[tuple[str, MetricLabels], float]:
        """What is so at this moment."""
        found: dict[tuple[str, MetricLabels], float] = {("vitrail_upload_bytes", ()): self.uploads.held_bytes}
        for served in self.models.values():
            labels = (("model", served.name),)
            found["vitrail_queue_images", labels] = served.queue.accepted_images
            found["vitrail_queue_places", labels] = served.queue.capacity
        return found

    def close(self) -> None:
        """End the decoders and the threads. What is still waiting has nobody who waits for it."""
        self.decoders.close()
        for served in self.models.values():
            served.queue.close()
        self.thread_pool.shutdown(cancel_futures=True)
