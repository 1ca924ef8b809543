"""A page read as a browser would, by the standard library: its text, and whether its tags are closed."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br"}


class Reading(HTMLParser):
    """What is in a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.parts: dict[str, str] = {}
        self.identities: list[str] = []
        self.words: list[str] = []
        self._part = ""
        self.feed(page)
        self.close()
        self.wrong += [f"{tag} is not closed" for tag in self.open]

    @property
    def text(self) -> str:
        """All words, in order."""
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self.addresses += [value for name in ("src", "href", "action", "data") if (value := found.get(name))]
        if identity := found.get("id"):
            self.identities.append(identity)
            self._part = identity if tag == "section" else self._part
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"{tag} is closed out of turn")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)
            self.parts[self._part] = self.parts.get(self._part, "") + " " + data
