"""A client of its own: requests sent when they are due, whether or not the earlier ones are answered."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

RESET = 0  # in place of a status: the connection ended without an answer


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float


class Client:
    """Connections to one server, kept open and used again."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, path: str, body: bytes = b"", *, headers: str = "content-type: image/jpeg\r\n") -> Reply:
        """One request, timed from before it is sent until its answer is whole."""
        start = time.monotonic()
        try:
            reader, writer = await self._connection()
            method = "POST" if body else "GET"
            head = f"{method} {path} HTTP/1.1\r\nhost: {self.host}\r\n{headers}content-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status, found = _head(await reader.readuntil(b"\r\n\r\n"))
            content = await reader.readexactly(int(found["content-length"]))
        except (OSError, asyncio.IncompleteReadError):
            return Reply(RESET, {}, b"", time.monotonic() - start)
        if found.get("connection") == "close":
            writer.close()
        else:
            self.idle.append((reader, writer))
        return Reply(status, found, content, time.monotonic() - start)

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self.idle:
            reader, writer = self.idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self.host, self.port)

    async def close(self) -> None:
        for _, writer in self.idle:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _head(text: bytes) -> tuple[int, dict[str, str]]:
    first, *rest = text.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.split(":", 1) for line in rest)
    return int(first.split()[1]), {name.lower(): value.strip() for name, value in pairs}


async def offer_load(
    host: str, port: int, bodies: Sequence[bytes], *, rate: float, seconds: float
) -> tuple[list[Reply], list[Reply]]:
    """The replies to so many images a second, and to /healthz meanwhile, twenty times a second."""
    client, watch = Client(host, port), Client(host, port)
    start = time.monotonic()

    async def paced(client: Client, path: str, rate: float, images: Sequence[bytes]) -> list[Reply]:
        asked = []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
            asked.append(asyncio.create_task(client.ask(path, images[number % len(images)])))
        return list(await asyncio.gather(*asked))

    replies, health = await asyncio.gather(
        paced(client, "/v1/predict", rate, bodies), paced(watch, "/healthz", 20, [b""])
    )
    await client.close()
    await watch.close()
    return replies, health


def quantile(replies: Sequence[Reply], share: float) -> float:
    """The seconds below which this share of the replies came."""
    ordered = sorted(reply.seconds for reply in replies)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
