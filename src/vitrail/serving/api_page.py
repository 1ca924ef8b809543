"""The page of the API at /docs: what /openapi.json describes, as plain HTML that loads nothing from elsewhere."""

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

Schema = Mapping[str, Any]
_EXAMPLE_VALUES = {"layer": "12", "row": "17"}  # of required options, in examples


def render_api_page(schema: Schema) -> str:
    """The page of an OpenAPI schema."""
    routes = [(path, method, about) for path, methods in schema["paths"].items() for method, about in methods.items()]
    parts = "".join(f'<li><a href="#{_make_anchor(path)}">{escape(path)}</a></li>' for path, _, _ in routes)
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}: the API</title>
<link rel="icon" href="/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/style.css">
</head>
<body class="api">
<header>
<div class="mark"><img src="/icon.svg" alt="" width="26" height="26">{title}</div><a href="/">To the page</a>
</header>
<main>
<h1>The API</h1>
<p class="lead">Send an image as the body of a request, or several as a form. Answers are JSON unless stated otherwise;
what is refused is refused with <code>{{"error": "one sentence"}}</code>. The same for programs:
<a href="/openapi.json">openapi.json</a>.</p>
<nav aria-label="routes"><ul>{parts}</ul></nav>
{"".join(_render_route(schema, *route) for route in routes)}
</main>
</body>
</html>
"""


def _render_text(text: str) -> str:
    """A sentence, with what stands between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _make_anchor(path: str) -> str:
    return path.strip("/").replace("/", "-")


def _render_route(schema: Schema, path: str, method: str, about: Schema) -> str:
    options = "".join(_render_option(each) for each in about.get("parameters", ()))
    if options:
        heads = "<tr><th>option</th><th>value</th><th></th></tr>"
        options = f'<div class="scroll"><table><thead>{heads}</thead><tbody>{options}</tbody></table></div>'
    statuses = "".join(
        f"<tr><th>{escape(status)}</th><td>{escape(answer['description'])}</td></tr>"
        for status, answer in about["responses"].items()
        if status != "200"
    )
    problems = f"<details><summary>What may be refused</summary><table><tbody>{statuses}</tbody></table></details>"
    return f"""<section id="{_make_anchor(path)}">
<h2><span class="method">{method.upper()}</span> {escape(path)}</h2>
<p>{_render_text(about.get("description", ""))}</p>
{options}
<pre><code>{escape(_make_example(path, method, about))}</code></pre>
{_render_response(schema, about)}
{problems if statuses else ""}
</section>
"""


def _render_option(option: Schema) -> str:
    kind, default = option["schema"], option["schema"].get("default")
    values = " or ".join(map(str, kind["enum"])) if kind.get("enum") else _describe_range(kind)
    usual = "needed" if option.get("required") else f"{default} by default" if default is not None else ""
    about = "; ".join(filter(None, (option.get("description", ""), usual)))
    return f"<tr><th><code>{escape(option['name'])}</code></th><td>{escape(values)}</td><td>{escape(about)}</td></tr>"


def _describe_range(kind: Schema) -> str:
    name = kind.get("type") or next((each["type"] for each in kind.get("anyOf", ()) if each["type"] != "null"), "")
    between = f", {kind['minimum']} to {kind['maximum']}" if "minimum" in kind and "maximum" in kind else ""
    return f"{name}{between}"


def _make_example(path: str, method: str, about: Schema) -> str:
    needed = [each["name"] for each in about.get("parameters", ()) if each.get("required")]
    query = "&".join(f"{name}={_EXAMPLE_VALUES.get(name, 'VALUE')}" for name in needed)
    body = "--data-binary @photo.jpg " if method == "post" else ""
    is_json = "application/json" in about["responses"]["200"].get("content", {})
    out = " > answer.png" if body and not is_json else ""
    return f"curl {body}'http://127.0.0.1:8000{path}{'?' * bool(query)}{query}'{out}"


def _render_response(schema: Schema, about: Schema) -> str:
    """What comes back: an outline of the JSON, or the type of what is none."""
    content = about["responses"]["200"].get("content", {})
    if "application/json" not in content:
        return f"<p>Answers with {escape(' or '.join(content) or 'nothing')}.</p>"
    kind = content["application/json"].get("schema", {})
    outline = json.dumps(_outline_schema(schema, kind), indent=2, ensure_ascii=False)
    # short lists on one line
    outline = re.sub(r'\[\s+("[^\[\]{}]*?")\s+\]', lambda match: f"[{' '.join(match[1].split())}]", outline)
    notes = "".join(f"<p>{_render_text(text)}</p>" for text in _list_descriptions(schema, kind))
    return f"{notes}<pre><code>{escape(outline)}</code></pre>"


def _resolve(schema: Schema, kind: Any) -> Any:
    return schema["components"]["schemas"][kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind


def _outline_schema(schema: Schema, kind: Schema) -> Any:
    """A value of a kind, with the names of types where numbers and texts stand."""
    kind = _resolve(schema, kind)
    if "properties" in kind:
        return {name: _outline_schema(schema, each) for name, each in kind["properties"].items()}
    if "prefixItems" in kind:
        return [_outline_schema(schema, each) for each in kind["prefixItems"]]
    if kind.get("type") == "array":
        return [_outline_schema(schema, kind["items"]), "..."]
    if "anyOf" in kind:
        return _outline_schema(schema, kind["anyOf"][0])
    return kind.get("type", "any")


def _list_descriptions(schema: Schema, kind: Schema) -> Iterator[str]:
    """The sentences on a kind and what it is made of."""
    kind = _resolve(schema, kind)
    if "description" in kind:
        yield kind["description"]
    for each in kind.get("properties", {}).values():
        inner = each.get("items", each)
        if "$ref" in inner:
            yield from _list_descriptions(schema, inner)
