"""Dynamic batching: a bounded queue of requests, and one thread that computes what waits in it.

A request is refused at once if the queue is full, or if what is queued would take longer than the deadline: the queue
measures its own pace. So accepted requests are answered in time, and the others know at once. Nothing waits for a batch
to fill: the thread takes whatever is there when it is free.
"""

import asyncio
import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from vitrail.serving.limits import BusyError

BatchFunction = Callable[[Sequence[Tensor]], Iterable[Any]]
"""Model inputs, uint8 (C, S, S) -> a result for each."""

_PACE_MOMENTUM = 0.7  # weight of the earlier pace in its moving average, at each batch


@dataclasses.dataclass(frozen=True, eq=False)
class _QueuedRequest:
    """The images of one request, computed together."""

    kind: Hashable
    function: BatchFunction
    inputs: Sequence[Tensor]
    future: Future[Sequence[Any]]
    queued_at: float = dataclasses.field(default_factory=time.monotonic)


class QueueSlot:
    """Room in a queue for the images of one request."""

    def __init__(self, queue: "BatchQueue") -> None:
        self.queue, self.deadline = queue, time.monotonic() + queue.deadline

    async def compute(self, kind: Hashable, function: BatchFunction, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """Compute the function on the inputs; work that has not started by the deadline is dropped."""
        entry = _QueuedRequest(kind, function, inputs, Future())
        self.queue.enqueue(entry)
        result = asyncio.wrap_future(entry.future)
        try:
            await asyncio.wait({result}, timeout=max(0.0, self.deadline - time.monotonic()))
            if not result.done() and entry.future.cancel():
                raise BusyError(f"no answer within {self.queue.deadline:g} s", self.queue.expected_wait)
            return await result
        finally:
            entry.future.cancel()  # the client may be gone
            self.queue.finish(len(inputs))


class BatchQueue:
    """The requests that wait for one model, and the thread that computes them."""

    def __init__(
        self, *, max_batch: int, capacity: int, deadline: float, on_batch: Callable[[int], None] | None = None
    ) -> None:
        self.max_batch, self.capacity, self.deadline, self._on_batch = max_batch, capacity, deadline, on_batch
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._lock = threading.Lock()
        self._waiting: collections.deque[_QueuedRequest] = collections.deque()
        self._last_batch_at = time.monotonic()  # when the last batch ended
        self.accepted_images = 0  # and not answered yet: being decoded, waiting, or computed
        self.queued_images = 0  # those that wait or are being computed
        self.seconds_per_image = 0.0  # under load

    @property
    def expected_wait(self) -> float:
        """Seconds until what waits now is computed; images that are being decoded do not count."""
        return self.queued_images * self.seconds_per_image

    def check_capacity(self, images: int = 1) -> None:
        """Raise `BusyError` if so many images would be refused: known before they are read and decoded."""
        if self.accepted_images + images > self.capacity:
            raise BusyError(f"all {self.capacity} slots are taken", self.expected_wait)
        if self.expected_wait > self.deadline:
            raise BusyError(f"what is queued takes longer than {self.deadline:g} s", self.expected_wait)

    @contextlib.contextmanager
    def acquire(self, images: int) -> Iterator[QueueSlot]:
        """A slot for so many images within the block, or a `BusyError`."""
        with self._lock:
            self.check_capacity(images)
            self.accepted_images += images
        try:
            yield QueueSlot(self)
        finally:
            with self._lock:
                self.accepted_images -= images

    def enqueue(self, request: _QueuedRequest) -> None:
        """Queue a request. The thread gets a turn for each; most find that theirs went with an earlier batch."""
        with self._lock:
            self._waiting.append(request)
            self.queued_images += len(request.inputs)
        self.thread.submit(self._run_batch)

    def finish(self, images: int) -> None:
        """Count queued images as computed or dropped."""
        with self._lock:
            self.queued_images -= images

    def close(self) -> None:
        """Compute what waits, then end the thread."""
        self.thread.shutdown(wait=True)

    def _run_batch(self) -> None:
        entries = self._take_batch()
        if not entries:
            return
        inputs = [each for entry in entries for each in entry.inputs]
        try:
            results = iter(entries[0].function(inputs))
        except BaseException as error:  # noqa: BLE001  # raised again where the result is awaited
            for entry in entries:
                entry.future.set_exception(error)
            return
        self._update_pace(len(inputs), entries[0].queued_at)
        for entry in entries:
            entry.future.set_result([next(results) for _ in entry.inputs])

    def _take_batch(self) -> list[_QueuedRequest]:
        """The oldest request and all others of its kind that fit into one batch; canceled ones are dropped."""
        with self._lock:
            taken, left, room = list[_QueuedRequest](), list[_QueuedRequest](), self.max_batch
            while self._waiting and (room > 0 or not taken):
                entry = self._waiting.popleft()
                if taken and (entry.kind != taken[0].kind or len(entry.inputs) > room):
                    left.append(entry)
                elif entry.future.set_running_or_notify_cancel():
                    taken.append(entry)
                    room -= len(entry.inputs)
            self._waiting.extendleft(reversed(left))
        return taken

    def _update_pace(self, images: int, queued_at: float) -> None:
        """Update the pace, measured from when there was something to compute; decoders measure their own."""
        with self._lock:
            now = time.monotonic()
            each, self._last_batch_at = (now - max(self._last_batch_at, queued_at)) / images, now
            before = self.seconds_per_image or each
            self.seconds_per_image = _PACE_MOMENTUM * before + (1 - _PACE_MOMENTUM) * each
        if self._on_batch is not None:
            self._on_batch(images)
