"""Limits of a request, and the error that refuses one."""

from typing import NamedTuple


class RefusedError(Exception):
    """A refused request: the status code and the message of its response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestLimits(NamedTuple):
    """The most that is read and decoded."""

    max_megabytes: float = 20.0
    """Of one request."""
    max_megapixels: float = 50.0
    """Of one image."""
    max_images: int = 32
    """Of one request."""
    upload_seconds: float = 30.0
    """In which a body must arrive."""
    decode_seconds: float = 10.0
    """To decode one image: 50 megapixels took 0.9 to 3.8 s on one core."""

    @property
    def max_bytes(self) -> int:
        """Of one request."""
        return int(self.max_megabytes * 2**20)
