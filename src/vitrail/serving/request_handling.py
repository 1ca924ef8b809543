"""From a request to its results: read the upload, take a queue slot, decode the images, compute."""

import asyncio
import dataclasses
import hmac
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request

from vitrail.serving.batching import BatchFunction, QueueSlot
from vitrail.serving.decoder_processes import SLICE_SECONDS, DecoderPool
from vitrail.serving.index_search import MAX_OPEN_THUMBNAILS, ServedIndex
from vitrail.serving.limits import AllowedHosts, BusyError, RefusedError, RequestLimits
from vitrail.serving.metrics import MetricKey, ServerMetrics
from vitrail.serving.served_model import ServedModel
from vitrail.serving.upload_decoding import ModelInput
from vitrail.serving.uploads import Uploads, check_content_type

ResultT = TypeVar("ResultT")


@dataclasses.dataclass
class Service:
    """The models and what all requests share. Only the event loop's thread uses it."""

    models: Mapping[str, ServedModel]
    limits: RequestLimits
    metrics: ServerMetrics
    uploads: Uploads
    decoders: DecoderPool
    thread_pool: ThreadPoolExecutor  # that draws and encodes responses
    key: str | None = None
    hosts: AllowedHosts | None = None  # any if None
    index: ServedIndex | None = None
    open_thumbnails: int = 0  # being read or decoded
    unanswered_requests: int = 0  # dropped when the server stopped

    def check_key(self, request: Request) -> None:
        """Refuse a request without the key, in constant time."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.key is not None and not hmac.compare_digest(token.encode(), self.key.encode()):
            raise RefusedError(401, "this server needs a key: Authorization: Bearer KEY")

    def get_model(self, name: str | None) -> ServedModel:
        """The model of that name; the first if no name is given."""
        model = next(iter(self.models.values())) if name is None else self.models.get(name)
        if model is None:
            raise RefusedError(404, f"there is no model {name!r:.80}; /v1/models lists them")
        return model

    def get_index(self) -> ServedIndex:
        """The served index."""
        if self.index is None:
            raise RefusedError(404, "no index is served; --index adds one")
        return self.index

    def count_indexed_images(self, model: ServedModel) -> int:
        """The images that can be searched by a model's features; 0 where there is no index of them."""
        return len(self.index.index.rows) if self.index is not None and self.index.model == model.name else 0

    async def search_index(self, request: Request) -> list[Any]:
        """The neighbors of each image of a request."""
        index = self.get_index()
        index.queue.check_capacity()
        model = self.models[index.model]
        _, features = await self.compute_request(request, model, "search", index.extract_features)
        with index.queue.acquire(len(features)) as slot:
            return list(await slot.compute("search", index.search, features))

    async def decode_thumbnail(self, row: int) -> ModelInput:
        """The image of a row of the index, as its model saw it."""
        index = self.get_index()
        model = self.models[index.model]
        self.decoders.check_capacity(model.queue.deadline)
        if self.open_thumbnails >= MAX_OPEN_THUMBNAILS:
            raise BusyError(f"{self.open_thumbnails} thumbnails are being made", 1)
        self.open_thumbnails += 1
        try:
            content = await self.run_in_thread(lambda: index.read_file(row, self.limits.max_bytes))
            name, deadline = f"the image of row {row}", model.queue.deadline
            decoded, _ = await self.decoders.decode(memoryview(content), model.input_spec, name, deadline)
            return decoded
        finally:
            self.open_thumbnails -= 1

    async def compute_request(
        self, request: Request, model: ServedModel, kind: Hashable, function: BatchFunction, *, single: bool = False
    ) -> tuple[list[ModelInput], list[Any]]:
        """The model inputs of a request's images, and what `function` computes from them."""
        content_type = check_content_type(request)
        model.queue.check_capacity()
        self.decoders.check_capacity(model.queue.deadline)
        with self.uploads.open(request) as upload:
            await upload.read_body(request)
            files = upload.split_files(content_type)
            if single and len(files) > 1:
                raise RefusedError(422, f"this route takes one image, and the form has {len(files)}")
            with model.queue.acquire(len(files)) as slot:
                inputs = await self._decode_files(files, model, slot)
                upload.close()  # only pixels wait for the model
                results = await slot.compute(kind, function, [each.pixels for each in inputs])
        return inputs, list(results)

    async def run_in_thread(self, function: Callable[[], ResultT]) -> ResultT:
        """Run a function in another thread, so that the event loop stays free."""
        return await asyncio.get_running_loop().run_in_executor(self.thread_pool, function)

    async def _decode_files(self, files: Sequence[memoryview], model: ServedModel, slot: QueueSlot) -> list[ModelInput]:
        """Decode a request's files, several at a time; after a failure no other is started."""
        inputs, failures = dict[int, ModelInput](), list[RefusedError | BusyError]()
        numbered_files = iter(enumerate(files, 1))

        async def decode_next() -> float:
            spent = 0.0
            for number, file in numbered_files:
                name = "the image" if len(files) == 1 else f"image {number}"
                try:
                    decoded, seconds = await self.decoders.decode(file, model.input_spec, name, model.queue.deadline)
                except (RefusedError, BusyError) as error:
                    failures.append(error)
                if failures:
                    break
                inputs[number] = decoded
                spent += seconds
            return spent

        spent = await asyncio.gather(*(decode_next() for _ in files[: self.decoders.count]))
        if failures:
            raise failures[0]
        slot.deadline += max(0.0, max(spent) - SLICE_SECONDS)  # it is of waiting, not of decoding large images
        return [inputs[number] for number in sorted(inputs)]

    def read_gauges(self) -> dict[MetricKey, float]:
        """Current values of the gauges."""
        gauges: dict[MetricKey, float] = {("vitrail_upload_bytes", ()): self.uploads.held_bytes}
        for served in self.models.values():
            labels = (("model", served.name),)
            gauges["vitrail_queue_images", labels] = served.queue.accepted_images
            gauges["vitrail_queue_places", labels] = served.queue.capacity
        return gauges

    def close(self) -> None:
        """End the decoders and the threads; pending work is dropped."""
        self.decoders.close()
        for served in self.models.values():
            served.queue.close()
        if self.index is not None:
            self.index.queue.close()
        self.thread_pool.shutdown(cancel_futures=True)
