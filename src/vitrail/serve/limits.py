"""What a request may cost, and how it is refused."""

from typing import NamedTuple


class RefusedError(Exception):
    """A request that is answered with a status and a sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestLimits(NamedTuple):
    """What is read and decoded at most."""

    max_megabytes: float = 20.0
    """Of one request."""
    max_megapixels: float = 50.0
    """Of one image."""
    max_images: int = 32
    """Of one request."""
    upload_seconds: float = 30.0
    """In which a body must have come."""
    decode_seconds: float = 10.0
    """For one image, once its decoding has begun: 50 megapixels took 0.9 to 3.8 on one core."""

    @property
    def max_bytes(self) -> int:
        """Of one request."""
        return int(self.max_megabytes * 2**20)
