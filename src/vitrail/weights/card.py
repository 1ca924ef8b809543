"""The licence in a folder's model card."""

import re
from pathlib import Path

LIMIT = 2**20


def licence(folder: Path) -> str | None:
    """The licence in the front matter of README.md, as the Hub writes it, where there is one."""
    path = folder / "README.md"
    if not path.is_file() or path.stat().st_size > LIMIT:
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    stated = re.search(r"^licen[sc]e:[ \t]*(\S.*?)[ \t]*$", front[1], re.MULTILINE) if front else None
    return stated[1].strip("'\"") if stated else None


def front_matter(stated: str) -> str:
    """A card that says the licence and nothing else."""
    return f"---\nlicense: {' '.join(stated.split())}\n---\n"
