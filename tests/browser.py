"""A page in headless Chromium: what it draws and how wide it is, and what it writes on its console."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

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
    tick: color(document.querySelector("TICKS .xtick text"), "fill"),
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


def look_at(
    report: Path, width: int, height: int, dark: bool, ticks: str = ".timeline"
) -> tuple[dict[str, Any], list[str]]:
    """What `PROBE` finds in a report of that width, and what the console says; `ticks`: of which figure."""
    probe = PROBE.replace("TICKS", ticks)
    text = report.read_text(encoding="utf-8").replace("</body>", f"{probe}</body>")
    report.write_text(text, encoding="utf-8")
    # A window is at least 500 pixels wide, a frame as narrow as one likes.
    frame = report.with_name("frame.html")
    frame.write_text(FRAME.replace("WIDTH", str(width)).replace("HEIGHT", str(height)))
    dom, console = browse(frame, max(width, 500), height, dark)
    found = re.search(r'<p id="found">(.*?)</p>', dom)
    assert found is not None and found[1], console or dom
    return json.loads(html.unescape(found[1])), console


def check_readable(found: dict[str, Any], width: int, dark: bool) -> None:
    """It fits the width, keeps to the scheme, and its text stands out (WCAG 2.1, AA)."""
    assert found["inner"] == width and found["overflow"] <= 0, "the page scrolls sideways"
    assert (luminance(found["card"]) < 0.1) == dark
    assert contrast(found["tick"], found["card"]) >= 4.5 and contrast(found["ink"], found["card"]) >= 4.5


def luminance(color: str) -> float:
    """Relative luminance of rgb(r, g, b), by WCAG 2.1."""
    channels = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first: str, second: str) -> float:
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
