"""The document: the file that is checked in is the one that is served; the page shows all of it, without a script."""

from __future__ import annotations

import re
from pathlib import Path

from quota.admin.document import text
from tests.admin.conftest import Server
from tests.admin.routes import all_routes, application, openapi
from tests.docs.markdown import DOCS

FILE = DOCS / "openapi.json"


def test_the_file_is_what_the_code_says() -> None:
    made = text(application())
    assert FILE.read_text(encoding="utf-8") == made, "write it anew: scripts/openapi"


def test_the_served_one_is_the_file(server: Server) -> None:
    answer = server.request("GET", "/openapi.json", path_prefix="")
    assert answer.status == 200
    assert answer.body.decode() == FILE.read_text(encoding="utf-8")
    assert answer.json["openapi"].startswith("3.1")


def test_the_page_shows_every_operation_and_type_and_runs_no_script(server: Server) -> None:
    answer = server.request("GET", "/docs", path_prefix="")
    assert answer.status == 200
    page = answer.body.decode()
    for path, methods in openapi()["paths"].items():
        assert f"<code>{path}</code>" in page
        for operation in methods.values():
            assert f'id="{operation["operationId"]}"' in page
    for name in openapi()["components"]["schemas"]:
        assert f'id="type-{name}"' in page
    for anchor in re.findall(r'href="#([^"]+)"', page):
        assert f'id="{anchor}"' in page, anchor
    assert "<script" not in page
    assert "script-src" not in answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert server.request("GET", "/docs/docs.css", path_prefix="").status == 200


def test_every_operation_says_who_may_and_what_it_takes() -> None:
    for methods in openapi()["paths"].values():
        for method, operation in methods.items():
            assert operation["summary"].endswith((".", "?")), operation["operationId"]
            assert operation["x-roles"], operation["operationId"]
            assert "default" in operation["responses"]
            headers = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "header"}
            wanted = set() if operation["x-roles"] == ["everybody"] else {"Quota-Tenant"}
            if wanted and method != "get":
                wanted |= {"Idempotency-Key", "If-Match"}
            assert headers == wanted
    assert len(all_routes()) > 40


def test_the_reference_tells_of_every_route() -> None:
    told = (DOCS / "http-reference.md").read_text(encoding="utf-8")
    for path, methods in openapi()["paths"].items():
        for method in methods:
            assert f"`{method.upper()} {path}`" in told, f"{method.upper()} {path}"
    assert Path(FILE).exists()
