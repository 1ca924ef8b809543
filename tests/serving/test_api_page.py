"""The page of the API, of the server's own schema and of one that holds HTML."""

import html
import re
from typing import Any

from fastapi.testclient import TestClient

from vitrail.serving import routes
from vitrail.serving.api_page import render_api_page


def test_the_api_is_described_by_a_page_that_loads_nothing_from_elsewhere(client: TestClient) -> None:
    answer = client.get("/docs")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = answer.text
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        for method, about in methods.items():
            assert f'<span class="method">{method.upper()}</span> {path}</h2>' in page
            assert about["description"].splitlines()[0] in html.unescape(page)
            for option in about.get("parameters", ()):
                assert f"<code>{option['name']}</code>" in page
    assert "'http://127.0.0.1:8000/v1/attention?layer=12'" in html.unescape(page)
    assert "<code>crop</code> is the part it saw" in page
    assert "`" not in page
    assert not re.search(r"<script|<style|\sstyle=|\son\w+=", page)
    assert set(re.findall(r'(?:src|href)="([^"#]+)"', page)) <= {*routes.PAGE_FILES, "/openapi.json"}


def test_all_texts_of_a_schema_are_escaped_and_references_outlined() -> None:
    option = {"name": "a<b", "description": "x & y", "schema": {"type": "integer", "minimum": 1, "maximum": 9}}
    about = {
        "description": "Give `<code>` back.",
        "parameters": [option | {"required": True}],
        "responses": {
            "200": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Answer"}}}},
            "422": {"description": "not < 10"},
        },
    }
    answer = {"description": "One `answer`.", "properties": {"items": {"type": "array", "items": {"type": "number"}}}}
    schema = {
        "info": {"title": "a <title>", "version": "1"},
        "paths": {"/v1/thing": {"post": about}},
        "components": {"schemas": {"Answer": answer}},
    }
    page = render_api_page(schema)
    assert "<title>a &lt;title&gt; 1: the API</title>" in page
    assert "<p>Give <code>&lt;code&gt;</code> back.</p>" in page
    assert "<tr><th><code>a&lt;b</code></th><td>integer, 1 to 9</td><td>x &amp; y; needed</td></tr>" in page
    assert "<tr><th>422</th><td>not &lt; 10</td></tr>" in page
    assert "<p>One <code>answer</code>.</p>" in page
    assert '"items": ["number", "..."]' in html.unescape(page)
    assert "'http://127.0.0.1:8000/v1/thing?a<b=VALUE'" in html.unescape(page)


def test_an_answer_that_is_no_json_is_named_by_its_type() -> None:
    about: dict[str, Any] = {"responses": {"200": {"content": {"image/png": {}}}}}
    page = render_api_page({"info": {"title": "t", "version": "1"}, "paths": {"/v1/draw": {"post": about}}})
    assert "<p>Answers with image/png.</p>" in page
    assert "> answer.png" in html.unescape(page)
    assert "What may be refused" not in page
