/** Plots of a sweep: history, slices through each parameter, and importance. */
import { scaleOf } from "../core/axes.js";
import { number } from "../core/format.js";
import { html, useMemo } from "../core/html.js";
import { asRun, bestSoFar, valueOf } from "../core/trials.js";
import { Canvas } from "./canvas.js";

/** @typedef {import("../core/types.js").Trial} Trial */
/** @typedef {import("./canvas.js").Drawing} Drawing */
/** @typedef {{trials: Trial[], objective: number, name: string, direction: string, open: (id: string) => void}} PlotProps */

const [LEFT, RIGHT, TOP, BOTTOM] = [70, 16, 14, 40];
const REACH = 12;
const MARKS = [0, 0.25, 0.5, 0.75, 1];

/** Colour of a trial between the worst (0) and the best (1). @param {number} part @param {(name: string) => string} ink */
export function shade(part, ink) {
  return `color-mix(in oklab, ${ink("--accent")} ${Math.round(15 + 85 * part)}%, ${ink("--line-strong")})`;
}

/** Limits of finite values, and how to place one from 0 to 1. @param {number[]} values */
function rangeOf(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const place = (/** @type {number} */ value) => (high === low ? 0.5 : (value - low) / (high - low));
  return { place, at: (/** @type {number} */ part) => low + part * (high - low) };
}

/** Lines across with their values. @param {Drawing} drawing @param {{at: (part: number) => number}} range */
function drawLevels({ pen, width, height, ink }, range) {
  pen.strokeStyle = ink("--line");
  pen.fillStyle = ink("--ink-3");
  pen.textAlign = "right";
  for (const part of MARKS) {
    const y = TOP + (1 - part) * (height - TOP - BOTTOM);
    pen.beginPath();
    pen.moveTo(LEFT, y);
    pen.lineTo(width - RIGHT, y);
    pen.stroke();
    pen.fillText(number(range.at(part)).slice(0, 10), LEFT - 8, y + 4);
  }
}

/** A dot for each place, the one under the pointer larger. @param {Drawing} drawing @param {{id: string, x: number, y: number, color: string}[]} dots */
function drawDots({ pen, focus }, dots) {
  for (const { id, x, y, color } of dots) {
    pen.globalAlpha = focus && focus !== id ? 0.35 : 0.9;
    pen.fillStyle = color;
    pen.beginPath();
    pen.arc(x, y, focus === id ? 7 : 4.5, 0, 2 * Math.PI);
    pen.fill();
  }
  pen.globalAlpha = 1;
}

/** What is near a place. @param {{id: string, x: number, y: number, text: string}[]} dots @param {number} x @param {number} y */
function nearest(dots, x, y) {
  const found = dots.map((dot) => ({ ...dot, away: Math.hypot(dot.x - x, dot.y - y) })).sort((a, b) => a.away - b.away)[0];
  return found && found.away < REACH ? { id: found.id, text: found.text } : null;
}

/** Value of each trial, and the best so far. @param {PlotProps} props */
export function History({ trials, objective, name, direction, open }) {
  const rows = useMemo(
    () => trials.flatMap((trial) => (valueOf(trial, objective) === null ? [] : [{ trial, value: Number(valueOf(trial, objective)) }])),
    [trials, objective],
  );
  if (!rows.length) return html`<div class="card"><div class="body muted">No trial has a value yet.</div></div>`;
  const range = rangeOf(rows.map(({ value }) => value));
  const last = Math.max(1, trials[trials.length - 1].number);
  const dotsIn = (/** @type {number} */ width, /** @type {number} */ height) =>
    rows.map(({ trial, value }) => ({
      id: String(trial.id),
      x: LEFT + (trial.number / last) * (width - LEFT - RIGHT),
      y: TOP + (1 - range.place(value)) * (height - TOP - BOTTOM),
      text: `trial ${trial.number}: ${number(value)}`,
    }));
  const draw = (/** @type {Drawing} */ drawing) => {
    const { pen, width, height, ink } = drawing;
    drawLevels(drawing, range);
    drawDots(drawing, dotsIn(width, height).map((dot) => ({ ...dot, color: ink("--c0") })));
    pen.strokeStyle = ink("--c1");
    pen.lineWidth = 2;
    pen.beginPath();
    const line = bestSoFar(trials, objective, direction);
    line.forEach(([at, value], i) => {
      const [x, y] = [LEFT + (at / last) * (width - LEFT - RIGHT), TOP + (1 - range.place(value)) * (height - TOP - BOTTOM)];
      if (i) pen.lineTo(x, TOP + (1 - range.place(line[i - 1][1])) * (height - TOP - BOTTOM));
      else pen.moveTo(x, y);
      pen.lineTo(x, y);
    });
    if (line.length) pen.lineTo(width - RIGHT, TOP + (1 - range.place(line[line.length - 1][1])) * (height - TOP - BOTTOM));
    pen.stroke();
    pen.lineWidth = 1;
    pen.fillStyle = ink("--ink-3");
    pen.textAlign = "left";
    pen.fillText("trial 0", LEFT, height - BOTTOM + 18);
    pen.textAlign = "right";
    pen.fillText(`trial ${last}`, width - RIGHT, height - BOTTOM + 18);
  };
  const near = (/** @type {number} */ x, /** @type {number} */ y, /** @type {number} */ width, /** @type {number} */ height) => nearest(dotsIn(width, height), x, y);
  return html`<${Canvas} title=${`History of ${name}`} height=${280} draw=${draw} near=${near} open=${open} version=${`${objective} ${rows.length} ${trials.length}`} />
    <p class="legend-line muted below"><i class="swatch k0"></i>a completed trial <i class="swatch k1"></i>the best so far</p>`;
}

/** @param {PlotProps & {param: string}} props */
function Slice({ trials, objective, name, param, open }) {
  const runs = trials.filter((trial) => trial.params[param] && valueOf(trial, objective) !== null);
  const shown = useMemo(() => runs.map((trial) => asRun(trial, [])), [trials, objective, param]);
  const across = scaleOf(`params.${param}`, shown);
  const range = rangeOf(runs.map((trial) => Number(valueOf(trial, objective))));
  const dotsIn = (/** @type {number} */ width, /** @type {number} */ height) =>
    runs.flatMap((trial, i) => {
      const right = across.place(shown[i]);
      if (right === null) return [];
      const value = Number(valueOf(trial, objective));
      return [
        {
          id: String(trial.id),
          x: LEFT + (0.04 + 0.92 * right) * (width - LEFT - RIGHT),
          y: TOP + (1 - range.place(value)) * (height - TOP - BOTTOM),
          part: trial.number / Math.max(1, trials.length),
          text: `trial ${trial.number}: ${number(value)} at ${shown[i].params[param]}`,
        },
      ];
    });
  const draw = (/** @type {Drawing} */ drawing) => {
    const { pen, width, height, ink } = drawing;
    drawLevels(drawing, range);
    drawDots(drawing, dotsIn(width, height).map((dot) => ({ ...dot, color: shade(dot.part, ink) })));
    pen.fillStyle = ink("--ink-3");
    pen.textAlign = "center";
    const marks = across.marks.length > 5 ? across.marks.filter((_, i) => i % 2 === 0) : across.marks;
    for (const { at, text } of marks) pen.fillText(text.slice(0, 10), LEFT + (0.04 + at * 0.92) * (width - LEFT - RIGHT), height - BOTTOM + 18);
  };
  const near = (/** @type {number} */ x, /** @type {number} */ y, /** @type {number} */ width, /** @type {number} */ height) => nearest(dotsIn(width, height), x, y);
  return html`<${Canvas} title=${`${name} by ${param}`} height=${220} draw=${draw} near=${near} open=${open} version=${`${objective} ${runs.length}`} />`;
}

/** A slice for each parameter. @param {PlotProps} props */
export function Slices(props) {
  const params = [...new Set(props.trials.flatMap((trial) => Object.keys(trial.params)))].sort();
  if (!params.length) return html`<div class="card"><div class="body muted">No trial has a parameter yet.</div></div>`;
  return html`<div class="chart-grid">${params.map((param) => html`<${Slice} key=${param} param=${param} ...${props} />`)}</div>
    <p class="muted below">Later trials are darker.</p>`;
}

/** @param {{answer: {importance: Record<string, number>, reason: string, trials: number} | null}} props */
export function Importance({ answer }) {
  const parts = Object.entries(answer?.importance ?? {}).sort(([, a], [, b]) => b - a);
  return html`<section class="card"><header><h2 class="grow">Importance</h2>${answer && answer.trials > 0 && html`<span class="muted">of ${answer.trials} trials</span>`}</header><div class="body">
    ${!answer && html`<div class="bones"></div>`}
    ${answer && !parts.length && html`<p class="muted">Not available: ${answer.reason}.</p>`}
    ${parts.length > 0 && html`<dl class="importance" aria-label="Importance">${parts.map(([name, part]) => html`<dt title=${name}>${name}</dt><dd><i style=${{ width: `${100 * part}%` }}></i><span class="number">${part.toFixed(2)}</span></dd>`)}</dl>`}</div></section>`;
}
