"""Metrics in Prometheus' text format. By hand: it is forty lines, and the client library a dependency."""

import bisect
import collections
import itertools
import threading
from collections.abc import Iterator, Mapping

SECONDS_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
METRICS = {
    "vitrail_requests_total": ("counter", "Requests, by route and status."),
    "vitrail_request_seconds": ("histogram", "From the request's first line to the response's last byte."),
    "vitrail_images_total": ("counter", "Images computed, by model."),
    "vitrail_batch_images": ("histogram", "Images computed together, by model."),
    "vitrail_decoders_replaced_total": ("counter", "Decoders killed or lost, by reason."),
    "vitrail_upload_bytes": ("gauge", "Bytes of uploads not decoded yet."),
    "vitrail_queue_images": ("gauge", "Images accepted and not answered yet, by model."),
    "vitrail_queue_places": ("gauge", "Capacity of the queue in images, by model."),
}
_BOUNDS: dict[str, tuple[float, ...]] = {
    "vitrail_request_seconds": SECONDS_BOUNDS,
    "vitrail_batch_images": (1, 2, 4, 8, 16, 32, 64, 128),
}

MetricLabels = tuple[tuple[str, str], ...]
MetricKey = tuple[str, MetricLabels]


class ServerMetrics:
    """Counters and histograms; any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[MetricKey, float] = collections.defaultdict(float)
        self._buckets: dict[MetricKey, list[int]] = {}
        self._sums: dict[MetricKey, float] = collections.defaultdict(float)

    def increment(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name, tuple(labels.items())] += amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a histogram."""
        key, bounds = (name, tuple(labels.items())), _BOUNDS[name]
        with self._lock:
            buckets = self._buckets.setdefault(key, [0] * (len(bounds) + 1))
            buckets[bisect.bisect_left(bounds, value)] += 1
            self._sums[key] += value

    def render(self, gauges: Mapping[MetricKey, float]) -> str:
        """The text that Prometheus scrapes."""
        with self._lock:
            counts = {**self._counts, **gauges}
            lines = [line for name in METRICS for line in self._render_metric(name, counts)]
        return "\n".join(lines) + "\n"

    def _render_metric(self, name: str, counts: Mapping[MetricKey, float]) -> Iterator[str]:
        kind, description = METRICS[name]
        yield f"# HELP {name} {description}"
        yield f"# TYPE {name} {kind}"
        for (each, labels), value in counts.items():
            if each == name:
                yield f"{name}{_format_labels(labels)} {value:.17g}"
        for (each, labels), buckets in self._buckets.items():
            if each == name:
                bounds = (*(f"{bound:g}" for bound in _BOUNDS[name]), "+Inf")
                for bound, count in zip(bounds, itertools.accumulate(buckets), strict=True):
                    yield f"{name}_bucket{_format_labels((*labels, ('le', bound)))} {count}"
                yield f"{name}_sum{_format_labels(labels)} {self._sums[each, labels]:.17g}"
                yield f"{name}_count{_format_labels(labels)} {sum(buckets)}"


def _format_labels(labels: MetricLabels) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    pairs = ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels)
    return f"{{{pairs}}}" if pairs else ""
