"""Prometheus' text."""

from vitrail.serving.metrics import SECONDS_BOUNDS, ServerMetrics


def test_the_text_is_what_prometheus_reads() -> None:
    metrics = ServerMetrics()
    metrics.increment("vitrail_requests_total", route="/v1/predict", status="200")
    metrics.increment("vitrail_requests_total", route="/v1/predict", status="200")
    metrics.increment("vitrail_images_total", 5, model='odd "name"\\\n')
    lines = metrics.render({("vitrail_queue_images", (("model", "m"),)): 3}).splitlines()
    assert "# TYPE vitrail_requests_total counter" in lines
    assert 'vitrail_requests_total{route="/v1/predict",status="200"} 2' in lines
    assert r'vitrail_images_total{model="odd \"name\"\\\n"} 5' in lines
    assert 'vitrail_queue_images{model="m"} 3' in lines


def test_buckets_are_cumulative_and_include_their_bound() -> None:
    metrics = ServerMetrics()
    for seconds in (0.001, 0.005, 0.0051, 99.0):
        metrics.observe("vitrail_request_seconds", seconds, route="/")
    lines = metrics.render({}).splitlines()
    counts = [int(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vitrail_request_seconds_bucket")]
    assert counts == [2, *[3] * (len(SECONDS_BOUNDS) - 1), 4]
    assert 'vitrail_request_seconds_bucket{route="/",le="+Inf"} 4' in lines
    assert 'vitrail_request_seconds_count{route="/"} 4' in lines
    assert any(line.startswith('vitrail_request_seconds_sum{route="/"} 99.01') for line in lines)
