"""The license in a model card: read from a folder's README.md, and written in the Hub's terms."""

import json
import re
from pathlib import Path

MAX_README_BYTES = 2**20
# Identifiers of the Hub's list that vision models use; any other is written as "other" with its own name beside.
HUB_LICENSES = {
    "agpl-3.0", "apache-2.0", "bsd", "bsd-2-clause", "bsd-3-clause", "cc", "cc-by-4.0", "cc-by-nc-4.0",
    "cc-by-nc-nd-4.0", "cc-by-nc-sa-4.0", "cc-by-sa-4.0", "cc0-1.0", "gpl-2.0", "gpl-3.0", "isc", "lgpl-3.0", "mit",
    "mpl-2.0", "openrail", "other", "unknown", "unlicense",
}  # fmt: skip


def read_license(folder: Path) -> str | None:
    """Read the license in the front matter of README.md, if there is one."""
    path = folder / "README.md"
    if not path.is_file() or path.stat().st_size > MAX_README_BYTES:
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    line = re.search(r"^licen[sc]e:[ \t]*(\S.*?)[ \t]*$", front[1], re.MULTILINE) if front else None
    return line[1].strip("'\"") if line else None


def format_front_matter(license_name: str) -> str:
    """Format a card that states the license and nothing else."""
    return f"---\nlicense: {' '.join(license_name.split())}\n---\n"


def format_license_lines(license_name: str | None) -> list[str]:
    """Format the lines of a card's front matter that state the license; none where it is unknown."""
    if license_name is None:
        return []
    if license_name.lower() in HUB_LICENSES:
        return [f"license: {license_name.lower()}"]
    slug = re.sub(r"[^a-z0-9.]+", "-", license_name.lower()).strip("-.") or "unnamed"
    return ["license: other", f"license_name: {json.dumps(slug[:96])}"]
