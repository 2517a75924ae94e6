"""A report in headless Chromium: no network, no error, readable at two widths and in both schemes."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.report_run import write_run
from tests.system import need_program
from trainer.report_page import write_report
from trainer.report_style import POLICY

PROBE = """<script>
setTimeout(() => {
  const color = (element, key) => element ? getComputedStyle(element)[key] : null;
  const all = (what) => [...document.querySelectorAll(what)];
  const box = document.documentElement;
  parent.postMessage({
    inner: innerWidth, overflow: box.scrollWidth - box.clientWidth,
    drawn: all(".figure").map((one) => one.querySelector(".main-svg") !== null),
    bars: all(".timeline .bars .point").length,
    labels: all(".timeline .bars text").map((one) => one.textContent),
    tick: color(document.querySelector(".timeline .xtick text"), "fill"),
    ink: color(document.body, "color"), card: color(document.querySelector("section"), "backgroundColor"),
  }, "*");
}, 3000);
</script>"""
FRAME = """<!DOCTYPE html><meta name="color-scheme" content="light dark"><body style="margin:0">
<p id="found"></p><script>
const place = document.getElementById("found");
addEventListener("message", (event) => place.textContent = JSON.stringify(event.data));
</script><iframe src="report.html" style="border:0; width:WIDTHpx; height:HEIGHTpx"></iframe>"""


def browse(page: Path, width: int, height: int, dark: bool) -> tuple[str, list[str]]:
    """The page's DOM after some seconds in headless Chromium, and what it wrote on its console.

    The page's own policy forbids every request, and what it forbids is told on the console.
    """
    command = [
        *(
            "chromium",
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
        ),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={page.parent / 'profile'}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"--window-size={width},{height}",
        *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=8000", "--dump-dom"),
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def luminance(color: str) -> float:
    """Relative luminance of rgb(r, g, b), by WCAG 2.1."""
    channels = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first: str, second: str) -> float:
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_a_browser_opens_it_without_a_network_and_without_an_error(
    tmp_path: Path, width: int, height: int, dark: bool
) -> None:
    need_program("chromium")
    path = write_report(write_run(tmp_path / "run"))
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    # A window is at least 500 pixels wide, a frame as narrow as one likes.
    frame = path.with_name("frame.html")
    frame.write_text(FRAME.replace("WIDTH", str(width)).replace("HEIGHT", str(height)))
    dom, console = browse(frame, max(width, 500), height, dark)
    assert console == []
    found = json.loads(html.unescape(re.search(r'<p id="found">(.*?)</p>', dom)[1]))  # type: ignore[index]
    assert found["inner"] == width and found["overflow"] <= 0, "the page scrolls sideways"
    assert found["drawn"] == [True] * 5
    assert found["bars"] == 10 and found["labels"].count("3") == 4
    assert (luminance(found["card"]) < 0.1) == dark
    assert contrast(found["tick"], found["card"]) >= 4.5 and contrast(found["ink"], found["card"]) >= 4.5


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
