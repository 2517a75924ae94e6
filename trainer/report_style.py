"""How a report looks and how its figures follow the reader's colour scheme and screen."""

from __future__ import annotations

# The page itself forbids every request, so that it can be opened anywhere and tells nobody.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:"
)

STYLE = """
:root { color-scheme: light dark; --page: #f7f7f5; --card: #ffffff; --ink: #1b1d20; --muted: #5d646e;
  --line: #dfe1e5; --grid: #e4e6ea; --accent: #2668ad; --code: #eef1f5; --good: #19724f; --warn: #8a5a00;
  --warn-bg: #fdf3dd; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --page: #131517; --card: #1b1e22; --ink: #e7e8ea;
  --muted: #a0a7b1; --line: #343940; --grid: #30353b; --accent: #7db5ee; --code: #272c33; --good: #6ecfa3;
  --warn: #e9c46a; --warn-bg: #2e2716; --bad: #ff8f87; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; overflow-wrap: anywhere; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 24px 64px; }
h1 { font-size: 1.5rem; margin: 0; line-height: 1.25; }
h2 { font-size: 1.2rem; margin: 0 0 4px; line-height: 1.3; }
h3 { font-size: 1rem; margin: 20px 0 6px; }
p { margin: 6px 0; max-width: 80ch; }
ul { margin: 6px 0; padding-left: 1.2em; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin-top: 18px; }
code { background: var(--code); border-radius: 5px; padding: 2px 6px;
  font: 0.92em ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { background: var(--code); border-radius: 6px; padding: 12px; overflow-x: auto; margin: 8px 0;
  font: 0.85rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: normal; }
summary { cursor: pointer; padding: 6px 0; color: var(--accent); font-weight: 600; }
.facts, .note { color: var(--muted); }
.note { font-size: 0.9rem; }
.status { font-weight: 600; } .finished { color: var(--good); } .failed { color: var(--bad); }
.interrupted, .unknown { color: var(--warn); }
.verdict { border-left: 6px solid var(--accent); }
.verdict h2 { font-size: 1.55rem; margin-bottom: 8px; }
.verdict .sentence { font-size: 1.08rem; }
.verdict.answer h2 { font-size: 1.25rem; font-weight: 600; line-height: 1.45; max-width: 74ch; }
.maps { display: grid; gap: 6px 24px;
  grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); }
.spread { color: var(--muted); font-size: 0.82rem; white-space: nowrap; }
.ranking th.n { overflow-wrap: normal; min-width: 0; } .ranking td.n, .ranking th.n { padding-right: 8px; }
a { color: var(--accent); }
.change { margin: 14px 0 4px; }
.change code { display: inline-block; font-size: 1.1rem; padding: 8px 14px; border: 1px solid var(--accent);
  user-select: all; margin-top: 4px; }
.warning { background: var(--warn-bg); border: 1px solid var(--warn); border-radius: 8px; padding: 8px 14px;
  margin: 12px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(158px, 1fr)); gap: 10px;
  margin: 14px 0 6px; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px; }
.tile b { display: block; font-size: 1.2rem; font-variant-numeric: tabular-nums; }
.tile span { display: block; color: var(--muted); font-size: 0.82rem; line-height: 1.35; }
.table { overflow-x: auto; margin: 8px 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: normal; }
th { color: var(--muted); font-weight: 600; font-size: 0.85rem; }
.n { text-align: right; padding-left: 8px; }
td.n, td[data-label="value"], td[data-label="gives back"] { white-space: nowrap; }
th.n { overflow-wrap: anywhere; min-width: 5.8em; }
tfoot td { font-weight: 700; border-bottom: 0; border-top: 2px solid var(--line); }
.wide { overflow-x: auto; }
.figure { width: 100%; margin-top: 6px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 10px 0 0; font-size: 0.88rem; }
.legend i { display: inline-block; width: 13px; height: 13px; margin-right: 6px; border: 1px solid;
  vertical-align: -2px; }
@media (max-width: 600px) {
  main { padding: 12px 10px 40px; }
  section { padding: 14px 12px; margin-top: 12px; }
  .verdict h2 { font-size: 1.3rem; } .verdict.answer h2 { font-size: 1.1rem; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; }
  .tile { padding: 6px 10px; } .tile b { font-size: 1.05rem; }
  table { font-size: 0.86rem; }
  th, td { padding-right: 6px; }
  .n { padding-left: 4px; }
  .stacked table, .stacked tbody, .stacked tr, .stacked td { display: block; }
  .stacked thead { display: none; }
  .stacked tr { border-bottom: 1px solid var(--line); padding: 8px 0; }
  .timeline { width: 900px; } /* scrolls sideways: squeezed, its bars have no room for their numbers */
  .stacked code { font-size: 0.85em; justify-self: start; }
  .stacked td { border: 0; padding: 1px 0; display: grid; grid-template-columns: 7.6em 1fr; gap: 8px;
    text-align: left; white-space: normal; overflow-wrap: anywhere; }
  .stacked td::before { content: attr(data-label); color: var(--muted); font-size: 0.85rem; }
  .stacked td:first-child { font-weight: 700; }
}
"""

SCRIPT = """
const specs = JSON.parse(document.getElementById("figures").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 600px)");
const coarse = matchMedia("(pointer: coarse)");
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function merge(base, over) {
  for (const [key, value] of Object.entries(over)) {
    base[key] = isObject(value) && isObject(base[key]) ? merge(base[key], value) : structuredClone(value);
  }
  return base;
}

function themed(given) {
  const css = getComputedStyle(document.documentElement);
  const color = (name) => css.getPropertyValue(name).trim();
  const layout = structuredClone(given);
  const small = narrow.matches ? { size: 11 } : {};
  const over = {
    font: { color: color("--ink"), ...small },
    hoverlabel: { bgcolor: color("--card"), bordercolor: color("--muted"), font: { color: color("--ink") } },
  };
  for (const key of Object.keys(layout)) {
    if (/^[xy]axis/.test(key)) {
      over[key] = { gridcolor: color("--grid"), zerolinecolor: color("--line"), linecolor: color("--line") };
    }
  }
  merge(layout, over);
  merge(layout, (layout.meta && layout.meta.page) || {});
  if (narrow.matches) {
    merge(layout, { margin: { l: 34, r: 6, t: 8, b: 40 } });
  }
  // A finger that scrolls the page must not draw a box in a figure.
  if (coarse.matches || narrow.matches) layout.dragmode = false;
  return layout;
}

function draw() {
  for (const [name, figure] of Object.entries(specs)) {
    const config = { responsive: true, displayModeBar: false };
    Plotly.react("figure-" + name, structuredClone(figure.data), themed(figure.layout), config);
  }
}

draw();
dark.addEventListener("change", draw);
narrow.addEventListener("change", draw);
"""
