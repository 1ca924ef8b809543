"""A service of two small models and its client, one for each module of tests."""

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from tests.serving import serving
from vitrail.serving import routes
from vitrail.serving.request_handling import Service


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = serving.build_service()
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(service: Service) -> TestClient:
    return TestClient(routes.build_app(service))
