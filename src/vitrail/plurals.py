"""Counts in messages: 1 image, 2 images."""


def plural(number: int, noun: str) -> str:
    """1 image, 2 images, 3 classes."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "sh", "ch", "x")) else "s"
    return f"{number:,} {noun}{ending}"
