"""The configurations that the documentation shows, and the mistake that it quotes."""

from __future__ import annotations

from pathlib import Path

import pytest

from quota.config import ConfigError
from quota.gateway.config import read_config
from tests.docs.markdown import DOCS, blocks

PAGE = (DOCS / "gateway-proxy.md").read_text()


def test_the_example_has_everything_in_it() -> None:
    config = read_config(DOCS / "examples" / "gateway.toml")
    assert [table.path for table in config.routes] == [
        "/v1/tables", "/v1/rows/<table>", "/v1/current", "/v1/series", "/status",
    ]  # fmt: skip
    fields = {name for table in config.routes for name in table.model_fields_set}
    assert fields >= {"estimate", "minimum_charge", "max_targets", "max_period", "upstream_timeout", "fail_open"}
    assert config.lease is not None
    assert config.lease.model_fields_set == set(type(config.lease).model_fields) - {"unit"}
    assert config.headers.model_fields_set == set(type(config.headers).model_fields)


def test_the_least_and_the_mistake(tmp_path: Path) -> None:
    text, lease = (block.text for block in blocks(PAGE) if block.language == "toml")
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    assert len(read_config(file).routes) == 1
    assert read_config(file).lease is None
    file.write_text(text + lease)
    assert read_config(file).lease is not None
    file.write_text(text)
    file.write_text(text.replace("page_limit", "page_limt"))
    with pytest.raises(ConfigError) as caught:
        read_config(file)
    said = str(caught.value).removeprefix(f"{tmp_path}/")
    assert said[:90] in PAGE
