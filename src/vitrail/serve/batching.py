"""Work of many requests computed together: a bounded queue, and one thread that takes from it what waits.

A request is refused at once where the queue is full, or where what is before it would take longer than it may wait:
the queue measures its own pace. So those who are accepted are answered in time, and the others know it immediately.
Nothing waits for a batch to fill: when the thread is free it takes what is there.
"""

import asyncio
import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

BatchFunction = Callable[[Sequence[Tensor]], Iterable[Any]]
"""Views, uint8 (C, S, S) -> what was computed of each."""

_PACE_MOMENTUM = 0.7  # of the measured pace, how much of the earlier one stays with each batch
_MIN_RETRY_SECONDS = 1.0  # seconds: Retry-After counts whole ones


class BusyError(Exception):
    """There is no room, or no time, for a request: the seconds after which to come again."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = max(_MIN_RETRY_SECONDS, retry_seconds)


@dataclasses.dataclass(frozen=True, eq=False)
class _QueuedRequest:
    """The images of one request, which are computed together."""

    kind: Hashable
    function: BatchFunction
    inputs: Sequence[Tensor]
    future: Future[Sequence[Any]]
    queued_at: float = dataclasses.field(default_factory=time.monotonic)


class QueueSlot:
    """Room in a queue for the images of one request, to be given back when it is answered."""

    def __init__(self, queue: "BatchQueue", num_images: int) -> None:
        self.queue, self.num_images = queue, num_images
        self.deadline = time.monotonic() + queue.deadline

    def __enter__(self) -> "QueueSlot":
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.release(self.num_images)

    async def compute(self, kind: Hashable, function: BatchFunction, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """What the work makes of the views. What has not begun when the deadline passes is not begun any more."""
        entry = _QueuedRequest(kind, function, inputs, Future())
        self.queue.put(entry)
        answer = asyncio.wrap_future(entry.future)
        try:
            await asyncio.wait({answer}, timeout=max(0.0, self.deadline - time.monotonic()))
            if not answer.done() and entry.future.cancel():
                raise BusyError(f"no answer within {self.queue.deadline:g} s", self.queue.expected_wait)
            return await answer
        finally:
            entry.future.cancel()  # who asked may have gone
            self.queue.finish(len(inputs))


class BatchQueue:
    """What waits for one model, and the thread that computes it."""

    def __init__(
        self, *, max_batch: int, capacity: int, deadline: float, on_batch: Callable[[int], None] | None = None
    ) -> None:
        self.max_batch, self.capacity, self.deadline, self._on_batch = max_batch, capacity, deadline, on_batch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._lock = threading.Lock()
        self._waiting: collections.deque[_QueuedRequest] = collections.deque()
        self._last_batch_at = time.monotonic()  # when the last batch was done
        self.accepted_images = 0
        """Images that were let in and are not answered: being decoded, waiting, or computed."""
        self.queued_images = 0
        """Those of them that wait or are computed."""
        self.seconds_per_image = 0.0
        """Seconds for one image while there is work."""

    @property
    def expected_wait(self) -> float:
        """Seconds until what waits now will have been computed; what is being decoded may never come to that."""
        return self.queued_images * self.seconds_per_image

    def check_capacity(self, images: int = 1) -> None:
        """A `BusyError` where so many images would not be let in: known before they are read and decoded."""
        if self.accepted_images + images > self.capacity:
            raise BusyError(f"all {self.capacity} places are taken", self.expected_wait)
        if self.expected_wait > self.deadline:
            raise BusyError(f"there is more to do than {self.deadline:g} s suffice for", self.expected_wait)

    def acquire(self, images: int) -> QueueSlot:
        """A place for so many images, or a `BusyError`."""
        with self._lock:
            self.check_capacity(images)
            self.accepted_images += images
        return QueueSlot(self, images)

    def release(self, images: int) -> None:
        """Give places back."""
        with self._lock:
            self.accepted_images -= images

    def put(self, request: _QueuedRequest) -> None:
        """Let the thread find an entry. Of its turns, one for each entry, most find that it was taken with another."""
        with self._lock:
            self._waiting.append(request)
            self.queued_images += len(request.inputs)
        self._thread.submit(self._run_batch)

    def finish(self, images: int) -> None:
        """Count images that were put as computed, or given up."""
        with self._lock:
            self.queued_images -= images

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Let the thread do something else, such as a first pass, which takes longer than those that follow."""
        return self._thread.submit(function)

    def close(self) -> None:
        """Compute what waits, and end the thread."""
        self._thread.shutdown(wait=True)

    def _run_batch(self) -> None:
        entries = self._take_batch()
        if not entries:
            return
        views = [view for entry in entries for view in entry.inputs]
        try:
            found = iter(entries[0].function(views))
        except BaseException as error:  # noqa: BLE001  # raised again where the answer is awaited
            for entry in entries:
                entry.future.set_exception(error)
            return
        self._update_pace(len(views), entries[0].queued_at)
        for entry in entries:
            entry.future.set_result([next(found) for _ in entry.inputs])

    def _take_batch(self) -> list[_QueuedRequest]:
        """The first that waits, and all of its kind that fit into a batch with it; those given up are dropped."""
        with self._lock:
            taken: list[_QueuedRequest] = []
            left: list[_QueuedRequest] = []
            room = self.max_batch
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
        """Measure from when there was something to compute: decoders know themselves how long they take."""
        with self._lock:
            now = time.monotonic()
            each, self._last_batch_at = (now - max(self._last_batch_at, queued_at)) / images, now
            self.seconds_per_image = (
                each
                if not self.seconds_per_image
                else _PACE_MOMENTUM * self.seconds_per_image + (1 - _PACE_MOMENTUM) * each
            )
        if self._on_batch is not None:
            self._on_batch(images)
