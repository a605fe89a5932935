"""One page to step through a trace: which drafts were verified, accepted and rejected, and why so many.

    python engine.py --trace trace.jsonl --prompt "class Stack:" "import os"
    python trace_view.py trace.jsonl -o trace.html        # opens from disk, needs nothing else

Keys: left and right step, with shift ten at a time; Home, End; space plays.
"""

import argparse
import json
import sys
from pathlib import Path

from engine import DEFAULT_MODEL
from prompts import load_tokenizer
from weights import fetch


def read_trace(path: str) -> list[dict]:
    """The steps of a trace. Raises ValueError naming the line that is not one; a last line cut short is left out."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    steps = []
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line) if line else None
            if line and not {"requests", "cost_ms", "budget", "measured_ms"} <= set(step):
                raise ValueError
            steps += [step] if line else []
        except (ValueError, TypeError):
            if number == len(lines):
                break  # still being written
            raise ValueError(f"{path}, line {number}: not a step of a trace") from None
    if not steps:
        raise ValueError(f"{path}: no steps in it")
    return steps


def page(steps: list[dict], text_of: dict[int, str]) -> str:
    """The page, complete. text_of: what every token id in the steps looks like."""
    data = json.dumps({"steps": steps, "text": text_of}).replace("<", "\\u003c")  # no text can close the script
    return TEMPLATE.replace("/*DATA*/", data)


TEMPLATE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Adaptive verification, step by step</title>
<style>
  :root { --ink: #1c2430; --faint: #8a94a3; --line: #d5dae1; --paper: #fff; --blue: 37 99 190; --good: #15803d; --bad: #c22f2f }
  @media (prefers-color-scheme: dark) {
    :root { --ink: #e3e8ef; --faint: #8a94a3; --line: #39424f; --paper: #141920; --blue: 96 154 242; --good: #4ccf80; --bad: #f47c7c }
  }
  body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 20px; max-width: 1200px }
  h1 { font-size: 18px; margin: 0 0 4px } h2 { font-size: 14px; margin: 0 0 8px } p { margin: 0 0 12px; color: var(--faint) }
  header, .bar { display: flex; gap: 12px; align-items: center; flex-wrap: wrap } .bar { margin: 12px 0 }
  button { font: inherit; color: inherit; background: none; border: 1px solid var(--line); border-radius: 5px; padding: 3px 11px; cursor: pointer }
  input[type=range] { flex: 1; min-width: 160px } output { font-variant-numeric: tabular-nums }
  main { display: grid; grid-template-columns: minmax(0, 3fr) minmax(280px, 2fr); gap: 28px; align-items: start }
  @media (max-width: 800px) { main { grid-template-columns: minmax(0, 1fr) } }
  .scroll { overflow: auto; max-height: 560px } table { border-collapse: separate; border-spacing: 3px }
  th { font-weight: 500; color: var(--faint); text-align: left; white-space: pre; padding: 0 6px; font-size: 12px }
  td { border: 2px solid transparent; border-radius: 4px; padding: 2px 6px; font: 12px ui-monospace, monospace; white-space: pre; min-width: 62px; max-width: 120px; overflow: hidden }
  td small { display: block; color: var(--faint); font-size: 10px } td.draft { background: rgb(var(--blue) / var(--shade)) }
  td.admitted { border-color: rgb(var(--blue)) } td.accepted::before { content: "\\2713  "; color: var(--good) }
  td.rejected::before { content: "\\2717  "; color: var(--bad) } td.rejected span { text-decoration: line-through }
  svg { width: 100%; display: block; margin-bottom: 14px; overflow: visible; touch-action: none } svg text { font-size: 11px; fill: var(--faint) }
  .axis { stroke: var(--line) } .curve { fill: none; stroke: rgb(var(--blue)); stroke-width: 1.6 } .other { fill: none; stroke: var(--bad); stroke-width: 1.2; stroke-dasharray: 4 3 }
  .now { stroke: var(--ink); stroke-width: 1 } .chosen { fill: var(--bad) }
</style>
<header><h1>Adaptive verification, step by step</h1></header>
<p>Rows are requests, columns the positions of their drafts. Darker: likelier to be reached and accepted. Outlined: verified in
this step. Left and right keys step (with shift: ten), Home and End jump, space plays.</p>
<div class="bar"><button id="back" aria-label="one step back">&#9664;</button><button id="play">play</button>
<button id="on" aria-label="one step on">&#9654;</button><input id="slider" type="range" min="0" value="0" aria-label="step"><output id="where"></output></div>
<main><section><h2 id="summary"></h2><div class="scroll"><table id="grid"></table></div></section>
<section><h2>Expected tokens per ms over the budget</h2><svg id="objective" viewBox="0 0 400 190"></svg>
<h2>Budget per request</h2><svg id="budget" class="time" viewBox="0 0 400 80"></svg>
<h2>Tokens per request</h2><svg id="tokens" class="time" viewBox="0 0 400 80"></svg>
<h2>Step time in ms: measured, and as predicted (dashed)</h2><svg id="ms" class="time" viewBox="0 0 400 80"></svg></section></main>
<script>
"use strict";
const { steps, text } = /*DATA*/;
const $ = id => document.getElementById(id), last = steps.length - 1;
let at = 0, timer = null;

function make(parent, name, attributes, content) {
  const node = parent.namespaceURI.endsWith("svg") ? document.createElementNS(parent.namespaceURI, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (content !== undefined) node.textContent = content;
  return parent.appendChild(node);
}
const show = token => (text[token] ?? "#" + token).replaceAll("\\n", "\\u21b5").replaceAll("\\t", "\\u21e5");
const path = points => points.map(([x, y], i) => (i ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1)).join("");

function drawGrid(step) {
  const grid = $("grid"), columns = Math.max(0, ...step.requests.map(r => r.drafts.length));
  grid.replaceChildren();
  const head = make(grid, "tr", {});
  for (const title of ["request", "anchor", ...Array.from({ length: columns }, (_, k) => "draft " + (k + 1)), "then"]) make(head, "th", {}, title);
  for (const r of step.requests) {
    const row = make(grid, "tr", {});
    make(row, "th", {}, r.index + " @ " + r.position);
    make(row, "td", {}, show(r.anchor));
    for (let k = 0; k < columns; k++) {
      if (k >= r.drafts.length) { make(row, "td", {}, ""); continue; }
      const state = k < r.accepted ? "accepted" : k === r.accepted && k < r.admitted ? "rejected" : "";
      const cell = make(row, "td", {
        class: "draft " + (k < r.admitted ? "admitted " : "") + state, style: "--shade:" + (0.75 * r.survival[k]).toFixed(3),
        title: "confidence " + r.confidence[k].toFixed(3) + ", survival " + r.survival[k].toFixed(3) });
      make(cell, "span", {}, show(r.drafts[k]));
      make(cell, "small", {}, r.survival[k].toFixed(2));
    }
    make(row, "td", {}, r.emitted.length > r.accepted ? show(r.emitted[r.accepted]) : "");
  }
}

function objective(step) {
  const best = step.requests.flatMap(r => r.survival).sort((a, b) => b - a);
  let tokens = step.requests.length;
  return step.cost_ms.map((ms, B) => { if (B) tokens += best[B - 1] ?? 0; return tokens / ms; });
}

function drawObjective(step) {
  const svg = $("objective"), values = objective(step), top = Math.max(...values, 1e-9) * 1.1;
  const x = B => 34 + 356 * (values.length > 1 ? B / (values.length - 1) : 0.5), y = v => 165 - 155 * v / top;
  svg.replaceChildren();
  make(svg, "path", { class: "axis", d: "M34 10V165H390", fill: "none" });
  make(svg, "path", { class: "curve", d: path(values.map((v, B) => [x(B), y(v)])) });
  if (step.budget < values.length) {
    make(svg, "circle", { class: "chosen", r: 4, cx: x(step.budget), cy: y(values[step.budget]) });
    make(svg, "text", { x: Math.min(x(step.budget) + 7, 330), y: y(values[step.budget]) - 8 }, "budget " + step.budget);
  }
  make(svg, "text", { x: 30, y: y(top / 1.1) + 4, "text-anchor": "end" }, (top / 1.1).toFixed(2));
  make(svg, "text", { x: 34, y: 182 }, "0");
  make(svg, "text", { x: 390, y: 182, "text-anchor": "end" }, values.length - 1 + " drafts verified");
}

const per = f => steps.map(s => s.requests.length ? f(s) / s.requests.length : 0);
const series = { budget: [per(s => s.budget)], tokens: [per(s => s.requests.reduce((n, r) => n + r.emitted.length, 0))],
                 ms: [steps.map(s => s.measured_ms), steps.map(s => s.predicted_ms)] };

function drawTime(id) {
  const svg = $(id), ordered = series[id].flat().sort((a, b) => a - b);
  const top = Math.max(ordered[Math.floor(0.99 * (ordered.length - 1))] * 1.15, 1e-9);  // a rare outlier may stick out
  const x = i => 34 + 356 * (last ? i / last : 0.5), y = v => 70 - 62 * Math.min(v / top, 1.1);
  svg.replaceChildren();
  make(svg, "path", { class: "axis", d: "M34 8V70H390", fill: "none" });
  series[id].forEach((values, n) => make(svg, "path", { class: n ? "other" : "curve", d: path(values.map((v, i) => [x(i), y(v)])) }));
  make(svg, "line", { class: "now", x1: x(at), x2: x(at), y1: 6, y2: 72 });
  make(svg, "text", { x: 30, y: 16, "text-anchor": "end" }, top < 10 ? top.toFixed(1) : top.toFixed(0));
  make(svg, "text", { x: Math.min(x(at) + 4, 350), y: 16 }, series[id].map(values => values[at].toFixed(1)).join(" / "));
}

function go(to) {
  at = Math.min(Math.max(to, 0), last);
  const step = steps[at];
  $("slider").value = at;
  $("where").textContent = "step " + step.step + " of " + steps[last].step;
  $("summary").textContent = step.requests.length + " requests, " + step.num_tokens + " tokens in the step, " + step.budget + " drafts verified, "
    + step.requests.reduce((n, r) => n + r.accepted, 0) + " accepted";
  drawGrid(step); drawObjective(step); Object.keys(series).forEach(drawTime);
  location.replace("#" + at);
}
function play() {
  if (timer) { clearInterval(timer); timer = null; } else timer = setInterval(() => at < last ? go(at + 1) : play(), 250);
  $("play").textContent = timer ? "pause" : "play";
}

$("slider").max = last;
$("slider").addEventListener("input", event => go(+event.target.value));
$("back").addEventListener("click", () => go(at - 1));
$("on").addEventListener("click", () => go(at + 1));
$("play").addEventListener("click", play);
document.querySelectorAll(".time").forEach(svg => svg.addEventListener("pointerdown", event => {
  const box = svg.getBoundingClientRect();
  go(Math.round(((event.clientX - box.left) / box.width * 400 - 34) / 356 * last));
}));
addEventListener("keydown", event => {
  const by = event.shiftKey ? 10 : 1, move = { ArrowLeft: at - by, ArrowRight: at + by, Home: 0, End: last }[event.key];
  if (move !== undefined) { go(move); event.preventDefault(); }
  else if (event.key === " " && event.target.tagName !== "BUTTON") { play(); event.preventDefault(); }
});
go(parseInt(location.hash.slice(1)) || 0);
</script></html>
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="what engine.py --trace has written")
    parser.add_argument("-o", "--output", default="trace.html", metavar="FILE")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer says what tokens look like")
    args = parser.parse_args()
    try:
        steps = read_trace(args.trace)
        tokenizer = load_tokenizer(fetch(args.model, weights=False))
        requests = [r for step in steps for r in step["requests"]]
        tokens = {t for r in requests for t in (r["anchor"], *r["drafts"], *r["emitted"])}
        html = page(steps, {token: tokenizer.decode([token], skip_special_tokens=False) for token in sorted(tokens)})
        Path(args.output).write_text(html, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"trace_view.py: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {len(steps)} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
