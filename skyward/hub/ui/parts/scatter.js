/** Scatter: a point for each run, by any two of its parameters and metrics. */
import { axesOf, scaleOf } from "../core/axes.js";
import { html, useMemo } from "../core/html.js";
import { navigate, query, setQuery } from "../core/router.js";
import { Canvas } from "./canvas.js";
import { colorOf } from "./chart.js";

/** @typedef {import("../core/types.js").Run} Run */

const HEIGHT = 420;
const [LEFT, RIGHT, TOP, BOTTOM] = [84, 24, 16, 48];
const REACH = 14;

/** @param {{title: string, value: string, axes: string[], name: string}} props */
function AxisChoice({ title, value, axes, name }) {
  return html`<label class="inline">${title}<select value=${value} onChange=${(/** @type {any} */ event) => setQuery({ [name]: event.target.value })}>${axes.map((id) => html`<option value=${id}>${id}</option>`)}</select></label>`;
}

/** @param {{runs: {run: Run, color: number}[], label: (run: Run) => string}} props */
export function Scatter({ runs, label }) {
  const all = useMemo(() => runs.map(({ run }) => run), [runs]);
  const axes = useMemo(() => axesOf(all), [all]);
  const x = query.value.get("x") ?? axes.find((id) => id.startsWith("params.")) ?? axes[0];
  const y = query.value.get("y") ?? axes.find((id) => id.startsWith("metrics.")) ?? axes[0];
  const [across, up] = useMemo(() => [scaleOf(x ?? "", all), scaleOf(y ?? "", all)], [x, y, all]);
  const placeOf = (/** @type {Run} */ run, /** @type {number} */ width, /** @type {number} */ height) => {
    const [right, high] = [across.place(run), up.place(run)];
    if (right === null || high === null) return null;
    return [
      LEFT + (0.04 + right * 0.92) * (width - LEFT - RIGHT),
      TOP + (0.96 - high * 0.92) * (height - TOP - BOTTOM),
    ];
  };
  const draw = (/** @type {import("./canvas.js").Drawing} */ { pen, width, height, ink, focus }) => {
    pen.strokeStyle = ink("--line");
    pen.fillStyle = ink("--ink-3");
    for (const { at, text } of up.marks) {
      const level = TOP + (0.96 - at * 0.92) * (height - TOP - BOTTOM);
      pen.beginPath();
      pen.moveTo(LEFT, level);
      pen.lineTo(width - RIGHT, level);
      pen.stroke();
      pen.textAlign = "right";
      pen.fillText(text.slice(0, 12), LEFT - 8, level + 4);
    }
    pen.textAlign = "center";
    for (const { at, text } of across.marks)
      pen.fillText(text.slice(0, 14), LEFT + (0.04 + at * 0.92) * (width - LEFT - RIGHT), height - BOTTOM + 18);
    pen.fillStyle = ink("--ink");
    pen.fillText(across.title, (LEFT + width - RIGHT) / 2, height - 6);
    for (const { run, color } of runs) {
      const place = placeOf(run, width, height);
      if (!place) continue;
      pen.globalAlpha = focus && focus !== run.id ? 0.35 : 0.9;
      pen.fillStyle = colorOf(color);
      pen.beginPath();
      pen.arc(place[0], place[1], focus === run.id ? 8 : 5.5, 0, 2 * Math.PI);
      pen.fill();
    }
    pen.globalAlpha = 1;
  };
  const near = (
    /** @type {number} */ left,
    /** @type {number} */ top,
    /** @type {number} */ width,
    /** @type {number} */ height,
  ) => {
    for (const { run } of runs) {
      const place = placeOf(run, width, height);
      if (place && Math.hypot(place[0] - left, place[1] - top) < REACH) return { id: run.id, text: label(run) };
    }
    return null;
  };
  if (!axes.length) return html`<p class="muted">These runs have neither parameters nor metrics.</p>`;
  return html`<div class="tools"><${AxisChoice} title="Across" name="x" value=${x} axes=${axes} /><${AxisChoice} title="Up" name="y" value=${y} axes=${axes} /></div>
    <${Canvas} title=${`${up.title} by ${across.title}`} height=${HEIGHT} draw=${draw} near=${near} open=${(/** @type {string} */ id) => navigate(`/runs/${id}`)} version=${`${x} ${y} ${all.map(({ id }) => id)}`} />`;
}
