"""The documentation site: `make docs` builds docs/, the root's Markdown files and the docstrings into build/site.

The source folder is the repository's root, so a link between two Markdown files is the same on a forge and on the site.
What only the site needs is made here, so that the Markdown has nothing in it that a forge would show as code: the
navigation from the lists of docs/index.md, the API reference from `<!-- automodule: NAME -->`, and a page from each
notebook, whose cells are Markdown and Python and need no package to be shown.
"""

import importlib
import inspect
import json
import posixpath
import re
from typing import Any

from sphinx.application import Sphinx

import vitrail

project = "vitrail"
author = "The vitrail authors"
copyright = "The vitrail authors"  # noqa: A001
version = release = vitrail.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
include_patterns = ["docs/**", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
exclude_patterns = [".*", "bench", "build", "dist", "runs", "shared", "src", "tests"]

myst_heading_anchors = 4
highlight_language = "text"  # of indented blocks, most of which are commands

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"vitrail {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"footer_icons": [], "navigation_with_keys": False}
html_additional_pages = {"index": "redirect.html"}  # the site is opened by its folder
templates_path = ["_templates"]


def add_navigation(text: str, folder: str = "docs") -> str:
    """Follow each section of the index by a hidden toctree of the pages that its list links to."""
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return "".join(f"{section.rstrip()}\n{_format_toctree(section, folder)}\n" for section in sections)


def _format_toctree(section: str, folder: str) -> str:
    heading = re.match(r"## (.+)", section)
    links = re.findall(r"^- \[([^\]]+)\]\(([^)#]+)\.(?:md|ipynb)\)", section, re.MULTILINE)
    if heading is None or not links:
        return ""
    pages = "\n".join(f"{title} </{posixpath.normpath(posixpath.join(folder, link))}>" for title, link in links)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {heading[1]}\n\n{pages}\n```\n"


def add_api(text: str) -> str:
    """Replace each `<!-- automodule: NAME OPTION -->` by the docstrings of the module's public names.

    `<!-- automembers: MODULE NAME, NAME -->` shows these names alone, without the module's own docstring;
    `documented:` instead of `automembers:` leaves out a class's members that have no docstring, such as inherited keys.
    """
    text = re.sub(r"<!-- (automembers|documented): (\S+) (.+?) -->", _format_members, text)
    directive = "```{eval-rst}\n.. automodule:: \\1\n   :members:\n   :undoc-members:\n   \\2\n```"
    return re.sub(r"<!-- automodule: ([\w.]+) ?(\S*) -->", directive, text)


def _format_members(comment: re.Match[str]) -> str:
    module, names = comment[2], comment[3].split(", ")
    undocumented = "\n   :undoc-members:" if comment[1] == "automembers" else ""
    lines = []
    for name in names:
        value = getattr(importlib.import_module(module), name)
        kind = "class" if isinstance(value, type) else "function" if inspect.isfunction(value) else "data"
        options = f"\n   :members:{undocumented}" if kind == "class" else ""
        lines.append(f".. auto{kind}:: {module}.{name}{options}")
    return "```{eval-rst}\n" + "\n\n".join(lines) + "\n```"


def convert_notebook(text: str, name: str) -> str:
    """Turn a notebook into Markdown with a link to the file itself; it is stored without outputs."""
    cells = json.loads(text)["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    parts = [
        source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for cell, source in zip(cells, sources, strict=True)
    ]
    title, _, rest = parts[0].partition("\n")
    download = f"{{download}}`Download this notebook <{name}>`, or read it here."
    return "\n\n".join([title, download, rest, *parts[1:]])


def convert_docstring(lines: list[str]) -> list[str]:
    """Turn a docstring of ours, plain text with `code` and indented blocks, into reStructuredText."""
    converted: list[str] = []
    in_block = False
    for line in lines:
        is_indented = line.startswith("    ")
        if is_indented and not in_block:
            converted += ["", "::", ""]
        elif in_block and not is_indented and line:
            converted.append("")
        in_block = is_indented or (in_block and not line)
        converted.append(line if is_indented else _escape_text(line))
    return converted


def _escape_text(line: str) -> str:
    """Mark `code` as literal, and escape what reStructuredText would read as markup."""
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(f"`{part}`" if part.startswith("`") else re.sub(r"([*_|\\])", r"\\\1", part) for part in parts)


def _read_source(app: Sphinx, page: str, content: list[str]) -> None:
    path = app.env.doc2path(page)
    if path.suffix == ".ipynb":
        content[0] = convert_notebook(content[0], path.name)
    if page == root_doc:
        content[0] = add_navigation(content[0])
    content[0] = add_api(content[0])


def _process_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:  # noqa: ARG001
    if what == "attribute" or str(getattr(obj, "__module__", None) or name).startswith("vitrail"):
        lines[:] = convert_docstring(lines)
    elif what != "module":  # a value such as a Literal, whose docstring is typing's
        lines.clear()


def _skip_member(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:  # noqa: ARG001
    """Show what `vitrail` itself offers there alone."""
    module = app.env.current_document.autodoc_module
    return True if what == "module" and module != "vitrail" and name in vitrail.__all__ else None


def setup(app: Sphinx) -> None:
    """Connect what is done to pages and docstrings as they are read."""
    app.connect("source-read", _read_source)
    app.connect("autodoc-process-docstring", _process_docstring)
    app.connect("autodoc-skip-member", _skip_member)
