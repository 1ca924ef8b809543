"""JSON objects that come with weights, read without trusting them."""

import json
from pathlib import Path
from typing import Any

from vitrail.errors import ModelError

MAX_JSON_BYTES = 32 * 2**20  # 21,843 labels take 1 MiB


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    if not path.is_file():
        raise ModelError(f"{path} is missing")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    return parse_json(path.read_bytes(), path)


def parse_json(text: str | bytes, path: Path) -> dict[str, Any]:
    """Parse the object in `text`, which came from `path`."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is valid JSON and cannot be printed
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: not JSON ({summarize_error(error)})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is damaged: its JSON is not an object")
    return value


def get_section(settings: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """Return the object under `key`, empty where there is none."""
    section = settings.get(key) or {}
    if not isinstance(section, dict):
        raise ModelError(f"{path} is damaged: {key!r} in its JSON is not an object")
    return section


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object, indented for people."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def summarize_error(error: Exception) -> str:
    """Return the first line of a library's error, cut to 200 characters."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
