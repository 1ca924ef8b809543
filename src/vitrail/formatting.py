"""Text for people: durations, sizes, and names without control characters."""


def strip_control_characters(text: str) -> str:
    """The text without control characters: names in model files are anyone's."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def format_duration(seconds: float) -> str:
    """93784 -> 26 h 3 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60:,} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes / 1440:,.1f} days"
