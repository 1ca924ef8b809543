"""From a request to what a model says of its images: read, let in, decoded, computed."""

import asyncio
import dataclasses
import hmac
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from vitrail.serve import reading
from vitrail.serve.batching import BusyError, Work
from vitrail.serve.metrics import Labels, Metrics
from vitrail.serve.models import Served, find
from vitrail.serve.reading import Limits, RefusedError, View

Result = TypeVar("Result")


@dataclasses.dataclass
class Service:
    """The models, and what is shared by all requests. Only the event loop's thread uses it."""

    models: Mapping[str, Served]
    limits: Limits
    metrics: Metrics
    threads: ThreadPoolExecutor
    """They decode images and draw; Pillow and simplejpeg let others work meanwhile."""
    key: str | None = None
    arriving: int = 0
    """Requests whose body is being read."""

    def check_key(self, request: Request) -> None:
        """Refuse a request without the key, in a time that does not depend on what it has in its place."""
        if self.key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            raise RefusedError(401, "this server wants a key: Authorization: Bearer KEY")

    def model(self, name: str | None) -> Served:
        found = find(self.models, name)
        if found is None:
            raise RefusedError(404, f"there is no model {name!r:.80}; /v1/models lists those there are")
        return found

    async def computed(
        self, request: Request, served: Served, kind: Hashable, work: Work, *, single: bool = False
    ) -> tuple[list[View], list[Any]]:
        """What a model sees of a request's images, and what the work makes of them."""
        said = reading.kind(request)
        served.queue.check()
        with self._arriving(served):
            content = await reading.body(request, self.limits)
        files = await self.aside(partial(reading.images, content, said, self.limits))
        if single and len(files) > 1:
            raise RefusedError(422, f"one image at a time is explained, and the form has {len(files)}")
        with served.queue.enter(len(files)) as place:
            views = await asyncio.gather(*(self._view(file, served, n, len(files)) for n, file in enumerate(files, 1)))
            found = await place.computed(kind, work, [view.pixels for view in views])
        return views, list(found)

    async def aside(self, work: Callable[[], Result]) -> Result:
        """Something done by another thread, so that this one goes on answering."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    async def _view(self, file: bytes, served: Served, number: int, images: int) -> View:
        name = "the image" if images == 1 else f"image {number}"
        return await self.aside(partial(reading.view, file, served.classifier, self.limits, name))

    @contextmanager
    def _arriving(self, served: Served) -> Iterator[None]:
        """As many bodies may be on their way as images may wait: memory is bounded by that."""
        if self.arriving >= served.queue.room:
            raise BusyError(f"{self.arriving} requests are being read", served.queue.wait)
        self.arriving += 1
        try:
            yield
        finally:
            self.arriving -= 1

    def gauges(self) -> dict[tuple[str, Labels], float]:
        """What is so at this moment."""
        found: dict[tuple[str, Labels], float] = {}
        for served in self.models.values():
            labels = (("model", served.name),)
            found["vitrail_queue_images", labels] = served.queue.inside
            found["vitrail_queue_places", labels] = served.queue.room
        return found

    def close(self) -> None:
        """End the threads when they have done what was accepted."""
        for served in self.models.values():
            served.queue.close()
        self.threads.shutdown()
