"""Counts in messages: 1 image, 2 images."""


def pluralize(number: float, noun: str) -> str:
    """1 image, 2 images, 3 classes, 1.5 epochs."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "batch")) else "s"
    count = f"{number:.4g}" if isinstance(number, float) else f"{number:,}"
    return f"{count} {noun}{ending}"
