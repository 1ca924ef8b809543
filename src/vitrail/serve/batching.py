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

Work = Callable[[Sequence[Tensor]], Iterable[Any]]
"""Views, uint8 (C, S, S) -> what was computed of each."""

_MEMORY = 0.7  # of the measured pace, how much of the earlier one stays with each batch
_LEAST = 1.0  # seconds: Retry-After counts whole ones


class BusyError(Exception):
    """There is no room, or no time, for a request: the seconds after which to come again."""

    def __init__(self, sentence: str, seconds: float) -> None:
        super().__init__(sentence)
        self.seconds = max(_LEAST, seconds)


@dataclasses.dataclass(frozen=True, eq=False)
class _Entry:
    """The images of one request, which are computed together."""

    kind: Hashable
    work: Work
    views: Sequence[Tensor]
    future: Future[Sequence[Any]]
    since: float = dataclasses.field(default_factory=time.monotonic)


class Place:
    """Room in a queue for the images of one request, to be given back when it is answered."""

    def __init__(self, queue: "Queue", images: int) -> None:
        self.queue, self.images = queue, images
        self.until = time.monotonic() + queue.deadline

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.leave(self.images)

    async def computed(self, kind: Hashable, work: Work, views: Sequence[Tensor]) -> Sequence[Any]:
        """What the work makes of the views. What has not begun when the deadline passes is not begun any more."""
        entry = _Entry(kind, work, views, Future())
        self.queue.put(entry)
        answer = asyncio.wrap_future(entry.future)
        try:
            await asyncio.wait({answer}, timeout=max(0.0, self.until - time.monotonic()))
            if not answer.done() and entry.future.cancel():
                raise BusyError(f"no answer within {self.queue.deadline:g} s", self.queue.wait)
            return await answer
        finally:
            entry.future.cancel()  # who asked may have gone
            self.queue.finish(len(views))


class Queue:
    """What waits for one model, and the thread that computes it."""

    def __init__(self, *, batch: int, room: int, deadline: float, counted: Callable[[int], None] | None = None) -> None:
        self.batch, self.room, self.deadline, self._counted = batch, room, deadline, counted
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._lock = threading.Lock()
        self._waiting: collections.deque[_Entry] = collections.deque()
        self._since = time.monotonic()  # when the last batch was done
        self.inside = 0
        """Images that were let in and are not answered: being decoded, waiting, or computed."""
        self.decoded = 0
        """Those of them that wait or are computed."""
        self.pace = 0.0
        """Seconds for one image while there is work."""

    @property
    def wait(self) -> float:
        """Seconds until what waits now will have been computed; what is being decoded may never come to that."""
        return self.decoded * self.pace

    def check(self, images: int = 1) -> None:
        """A `BusyError` where so many images would not be let in: known before they are read and decoded."""
        if self.inside + images > self.room:
            raise BusyError(f"all {self.room} places are taken", self.wait)
        if self.wait > self.deadline:
            raise BusyError(f"there is more to do than {self.deadline:g} s suffice for", self.wait)

    def enter(self, images: int) -> Place:
        """A place for so many images, or a `BusyError`."""
        with self._lock:
            self.check(images)
            self.inside += images
        return Place(self, images)

    def leave(self, images: int) -> None:
        """Give places back."""
        with self._lock:
            self.inside -= images

    def put(self, entry: _Entry) -> None:
        """Let the thread find an entry. Of its turns, one for each entry, most find that it was taken with another."""
        with self._lock:
            self._waiting.append(entry)
            self.decoded += len(entry.views)
        self._thread.submit(self._turn)

    def finish(self, images: int) -> None:
        """Count images that were put as computed, or given up."""
        with self._lock:
            self.decoded -= images

    def run(self, work: Callable[[], Any]) -> Future[Any]:
        """Let the thread do something else, such as a first pass, which takes longer than those that follow."""
        return self._thread.submit(work)

    def close(self) -> None:
        """Compute what waits, and end the thread."""
        self._thread.shutdown(wait=True)

    def _turn(self) -> None:
        entries = self._taken()
        if not entries:
            return
        views = [view for entry in entries for view in entry.views]
        try:
            found = iter(entries[0].work(views))
        except BaseException as error:  # noqa: BLE001  # raised again where the answer is awaited
            for entry in entries:
                entry.future.set_exception(error)
            return
        self._paced(len(views), entries[0].since)
        for entry in entries:
            entry.future.set_result([next(found) for _ in entry.views])

    def _taken(self) -> list[_Entry]:
        """The first that waits, and all of its kind that fit into a batch with it; those given up are dropped."""
        with self._lock:
            taken: list[_Entry] = []
            left: list[_Entry] = []
            room = self.batch
            while self._waiting and (room > 0 or not taken):
                entry = self._waiting.popleft()
                if taken and (entry.kind != taken[0].kind or len(entry.views) > room):
                    left.append(entry)
                elif entry.future.set_running_or_notify_cancel():
                    taken.append(entry)
                    room -= len(entry.views)
            self._waiting.extendleft(reversed(left))
        return taken

    def _paced(self, images: int, since: float) -> None:
        """Measure from when there was something to compute: decoders know themselves how long they take."""
        with self._lock:
            now = time.monotonic()
            each, self._since = (now - max(self._since, since)) / images, now
            self.pace = each if not self.pace else _MEMORY * self.pace + (1 - _MEMORY) * each
        if self._counted is not None:
            self._counted(images)
