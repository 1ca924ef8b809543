"""Host and Origin: who calls this server, and from where."""

from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from tests.serving import serving
from tests.serving.serving import make_image_file
from vitrail.serving import routes
from vitrail.serving.limits import AllowedHosts, RefusedError

LOOPBACK, ANYWHERE = AllowedHosts("127.0.0.1", ()), AllowedHosts("0.0.0.0", ())
NAMED = AllowedHosts("127.0.0.1", ("Vitrail.example",))


def find_status(hosts: AllowedHosts, host: str | None, origin: str | None = None, *, path: str = "/v1/predict") -> int:
    pairs = ((b"host", host), (b"origin", origin))
    try:
        hosts.check_request(path, "POST", [(name, value.encode()) for name, value in pairs if value is not None])
    except RefusedError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    ("hosts", "host", "status"),
    [
        (LOOPBACK, "127.0.0.1:8000", 200),
        (LOOPBACK, "LOCALHOST", 200),
        (LOOPBACK, "[::1]:1", 200),
        (AllowedHosts("127.0.0.2", ()), "127.0.0.2", 200),
        (AllowedHosts("::1", ()), "[::1]:8000", 200),
        (LOOPBACK, "evil.example:8000", 421),
        (LOOPBACK, "localhost.evil.example", 421),
        (LOOPBACK, "localhost@evil.example", 421),
        (LOOPBACK, "127.0.0.1:80:80", 421),
        (LOOPBACK, "", 421),
        (LOOPBACK, None, 421),
        (NAMED, "vitrail.EXAMPLE", 200),
        (NAMED, "localhost:80", 200),
        (NAMED, "other.example", 421),
        (ANYWHERE, "whatever.example", 200),
        (AllowedHosts("0.0.0.0", ("vitrail.example",)), "whatever.example", 421),
    ],
)
def test_a_server_answers_to_its_own_names(hosts: AllowedHosts, host: str | None, status: int) -> None:
    assert find_status(hosts, host) == status
    assert find_status(hosts, host, path="/healthz") == 200


@pytest.mark.parametrize(
    ("hosts", "host", "origin", "status"),
    [
        (LOOPBACK, "localhost:8000", "http://localhost:8000", 200),
        (LOOPBACK, "localhost:8000", "http://localhost:9000", 403),
        (LOOPBACK, "localhost:8000", "https://evil.example", 403),
        (LOOPBACK, "localhost:8000", "null", 403),
        (LOOPBACK, "localhost:8000", "", 403),
        (NAMED, "127.0.0.1:8000", "https://vitrail.example", 200),
        (NAMED, "vitrail.example", "https://vitrail.example", 200),
        (NAMED, "127.0.0.1:8000", "https://vitrail.example.evil.example", 403),
        (ANYWHERE, "box:8000", "http://box:8000", 200),
        (ANYWHERE, "box:8000", "http://evil.example", 403),
    ],
)
def test_a_page_of_another_site_is_refused(hosts: AllowedHosts, host: str, origin: str, status: int) -> None:
    assert find_status(hosts, host, origin) == status
    assert find_status(hosts, host, origin, path="/") == status  # every POST


@pytest.mark.attack
def test_a_foreign_host_or_origin_gets_one_line(attacked: Callable[[str, str], None]) -> None:
    served = serving.build_service(hosts=LOOPBACK)
    client = TestClient(routes.build_app(served), base_url="http://localhost:8000")
    kind = {"content-type": "image/png"}
    assert client.post("/v1/predict", content=make_image_file(), headers=kind).status_code == 200
    assert client.get("/").status_code == 200
    for headers, status in (({"host": "evil.example"}, 421), ({"origin": "http://evil.example"}, 403)):
        for answer in (
            client.post("/v1/predict", content=make_image_file(), headers=headers | kind),
            client.get("/v1/models", headers=headers),
        ):
            assert (answer.status_code, list(answer.json())) == (status, ["error"])
            assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get("/metrics", headers={"host": "evil.example"}).status_code == 421
    assert client.get("/", headers={"host": "evil.example"}).status_code == 421
    served.close()
    attacked("DNS rebinding, and a form on another site", "421 and 403, in one line")


def test_no_redirect_leads_to_the_host_a_request_names() -> None:
    served = serving.build_service()
    client = TestClient(routes.build_app(served), follow_redirects=False)
    for path in ("/v1/models/", "/healthz/", "/v1/predict/"):
        answer = client.get(path, headers={"host": "evil.example"})
        assert (answer.status_code, answer.headers.get("location")) == (404, None)
    served.close()
