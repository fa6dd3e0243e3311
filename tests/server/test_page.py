"""The page's files: all there, all served, nothing from elsewhere, nothing inline."""

import asyncio
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

import octavo.server
from octavo.server.live.routes import PAGE_PATHS, page_routes
from octavo.server.loop.engine_loop import EngineLoop

FOLDER = Path(octavo.server.__file__).parent / "live" / "page"
FILES = sorted(path.name for path in FOLDER.iterdir())


def get(app: Starlette, *paths: str, method: str = "GET") -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://octavo") as client:
            return [await client.request(method, path) for path in paths]

    return asyncio.run(run())


@pytest.fixture
def app(start_loop: Callable[..., EngineLoop]) -> Starlette:
    return Starlette(routes=page_routes(start_loop()))


def test_every_file_is_served_with_strict_headers(app: Starlette) -> None:
    paths = ["/" if name == "index.html" else f"/page/{name}" for name in FILES]
    assert sorted(paths) == sorted(PAGE_PATHS)
    types = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    for name, answer in zip(FILES, get(app, *paths), strict=True):
        assert answer.status_code == 200
        assert answer.content == (FOLDER / name).read_bytes()
        assert answer.headers["content-type"] == f"{types[name.rpartition('.')[2]]}; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        policy = dict(
            part.split(maxsplit=1) for part in answer.headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"


def test_nothing_else_is_served(app: Starlette) -> None:
    paths = ("/page/", "/page/none.js", "/page/../routes.py", "/page/%2e%2e/routes.py", "/page/index.html")
    assert [answer.status_code for answer in get(app, *paths)] == [404] * len(paths)
    assert [answer.status_code for answer in get(app, "/", "/page/app.js", method="POST")] == [405, 405]


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_inline_and_nothing_comes_from_elsewhere(name: str) -> None:
    text = (FOLDER / name).read_text()
    # The only addresses: the pattern of links that a model may write, and the name of SVG.
    text = text.replace("http://www.w3.org/2000/svg", "")
    assert "//" not in re.sub(r"(?m)^\s*//.*|/\*\*.*?\*/|https\?:\\/\\/|[^:/]// .*", "", text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
    )
    # One file keeps the conversation, and nothing else is kept anywhere.
    kept = "sessionStorage|indexedDB|document\\.cookie" + ("" if name == "browser.js" else "|localStorage")
    assert not re.search(kept, text)
    if name.endswith(".html"):
        assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", text)
    assert len(text.splitlines()) <= 300


def test_modules_import_what_is_there() -> None:
    for path in FOLDER.glob("*.js"):
        for names, source in re.findall(r'import \{([^}]*)\} from "\./([^"]+)"', path.read_text()):
            exported = (FOLDER / source).read_text()
            for name in names.split(","):
                assert re.search(rf"export (?:async )?(?:function\*?|class|const) {name.strip()}\b", exported)


def test_the_wheel_has_the_page() -> None:
    project = Path(octavo.server.__file__).parents[2] / "pyproject.toml"
    data = tomllib.loads(project.read_text())["tool"]["setuptools"]["package-data"]["octavo"]
    matched = {path for pattern in data for path in FOLDER.parents[2].glob(pattern)}
    assert {FOLDER / name for name in FILES} <= matched
