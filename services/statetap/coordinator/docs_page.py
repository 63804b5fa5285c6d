"""/docs: the API's reference as one static page, made from OpenAPI by the coordinator itself.

Invariant: the page loads nothing, from here or elsewhere: FastAPI's own would load Swagger UI from a CDN, which a host without a way out
cannot, and which would run a stranger's script beside the API.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; background: #fff }
h2 { border-top: 1px solid #d0d7de; padding-top: 1rem } summary { cursor: pointer; padding: .3rem 0 }
code, pre { font-family: ui-monospace, monospace; font-size: 13px } pre { background: #f4f6f8; padding: .6rem; overflow-x: auto }
table { border-collapse: collapse } td, th { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0 }
b.verb { display: inline-block; min-width: 4.5rem }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117 } pre { background: #161b22 } a { color: #6cb6ff } }
"""


def page(document: dict[str, Any]) -> str:
    """HTML of an OpenAPI document."""
    info = document["info"]
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            by_tag.setdefault((operation.get("tags") or ["other"])[0], []).append(_operation(verb, path, operation))
    body = [f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>", f"<p>{escape(info.get('description', ''))}</p>"]
    body.append('<p>The same for programs: <a href="/openapi.json">/openapi.json</a>.</p>')
    for tag, parts in by_tag.items():
        body += [f"<h2>{escape(tag)}</h2>", *parts]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(info['title'])} API</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"
    )


def _operation(verb: str, path: str, operation: dict[str, Any]) -> str:
    parts = [f"<p>{escape(operation.get('description', ''))}</p>"]
    rows = [
        f"<tr><td><code>{escape(p['name'])}</code></td><td>{escape(p['in'])}{', required' if p.get('required') else ''}</td>"
        f"<td>{escape(p.get('description', ''))}</td></tr>"
        for p in operation.get("parameters", [])
    ]
    if rows:
        parts.append(f"<table>{''.join(rows)}</table>")
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<p>Body: <code>{escape(media)}</code></p>{_example(content)}")
    for status, answer in operation.get("responses", {}).items():
        shown = [_example(c) for c in answer.get("content", {}).values()] if status.startswith("2") else []
        parts.append(f"<p><code>{escape(status)}</code> {escape(answer.get('description', ''))}</p>{''.join(shown)}")
    name = escape(operation.get("operationId", ""))
    head = (
        f'<summary><b class="verb">{escape(verb.upper())}</b> <code>{escape(path)}</code> {escape(operation.get("summary", ""))}</summary>'
    )
    return f'<details id="{name}">{head}{"".join(parts)}</details>'


def _example(content: dict[str, Any]) -> str:
    return f"<pre>{escape(json.dumps(content['example'], indent=1, ensure_ascii=False))}</pre>" if "example" in content else ""
