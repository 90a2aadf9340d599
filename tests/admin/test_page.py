"""The docs page in a real Chromium: drawn, styled, without a complaint, and without anything from another place."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from tests.admin.conftest import Server

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZE = (1280, 2400)
# Colours that the style sheet gives to text, links, code and the lines of tables.
TEXT, LINK, CODE, LINE = (28, 36, 48), (11, 87, 164), (243, 245, 249), (231, 235, 242)


@pytest.fixture
def chromium() -> str:
    """The browser of this machine; .ci/run installs one."""
    given = os.environ.get("QUOTA_TEST_CHROMIUM")
    found = given or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium on PATH: apt-get install chromium, or name one with QUOTA_TEST_CHROMIUM")
    return found


def screenshot(chromium: str, url: str, folder: Path) -> tuple[Image.Image, list[str]]:
    """Takes a picture of a page; returns it, and what the page's console was told."""
    file = folder / "page.png"
    order = [
        chromium, "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-quic",
        "--disable-sync", "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
        # Neither the page nor the browser finds any other place.
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={file}", url,
    ]  # fmt: skip
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        order.insert(1, "--no-sandbox")  # Chromium has no sandbox for root
    done = subprocess.run(order, capture_output=True, text=True, timeout=240, check=False)
    assert file.exists(), done.stderr
    return Image.open(file).convert("RGB"), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_docs_page_is_drawn(server: Server, chromium: str, tmp_path: Path) -> None:
    picture, complaints = screenshot(chromium, f"http://127.0.0.1:{server.port}/docs", tmp_path)
    assert complaints == []  # such as a style sheet that the content policy forbids
    assert picture.size == SIZE
    drawn = {colour: count for count, colour in picture.getcolors(maxcolors=1 << 24) or ()}
    # Without the style sheet, or without a font to write with, one of these would be missing.
    few = {colour: drawn.get(colour, 0) for colour in (TEXT, LINK, CODE, LINE) if drawn.get(colour, 0) < 500}
    assert few == {}
    assert max(drawn, key=lambda colour: drawn[colour]) == (255, 255, 255)
