"""An HTML page, parsed with the standard library: its text by section, and whether its tags are closed."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br"}


class ParsedPage(HTMLParser):
    """The contents of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.errors: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.sections: dict[str, str] = {}
        self.ids: list[str] = []
        self.words: list[str] = []
        self._section = ""
        self.feed(page)
        self.close()
        self.errors += [f"{tag} is not closed" for tag in self.open]

    @property
    def text(self) -> str:
        """All words, in order."""
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        attributes = dict(attrs)
        self.addresses += [value for name in ("src", "href", "action", "data") if (value := attributes.get(name))]
        if section_id := attributes.get("id"):
            self.ids.append(section_id)
            self._section = section_id if tag == "section" else self._section
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.errors.append(f"{tag} is closed out of turn")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)
            self.sections[self._section] = self.sections.get(self._section, "") + " " + data
