"""A report in headless Chromium: no network, no error, readable at two widths and in both schemes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import browse, check_readable, look_at
from tests.report_run import write_run
from tests.system import need_program
from trainer.report_page import write_report
from trainer.report_style import POLICY


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_a_browser_opens_it_without_a_network_and_without_an_error(
    tmp_path: Path, width: int, height: int, dark: bool
) -> None:
    need_program("chromium")
    found, console = look_at(write_report(write_run(tmp_path / "run")), width, height, dark)
    assert console == []
    check_readable(found, width, dark)
    assert found["drawn"] == [True] * 5
    assert found["bars"] == 10 and found["labels"].count("3") == 4


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_console_tells_of_requests_and_errors_in_such_a_page(tmp_path: Path) -> None:
    need_program("chromium")
    page = tmp_path / "page.html"
    page.write_text(
        f"""<!DOCTYPE html><meta http-equiv="Content-Security-Policy" content="{POLICY}">
        <img src="http://example.org/a.png"><script src="https://example.org/b.js"></script>
        <script>fetch("http://example.org/c").catch(() => 0); setTimeout(() => missing(), 10);</script>"""
    )
    _, console = browse(page, 600, 600, False)
    for address in ("example.org/a.png", "example.org/b.js", "example.org/c"):
        assert any(address in line and "Content Security Policy" in line for line in console), address
    assert any("missing is not defined" in line for line in console)
