/** Parallel coordinates: an axis for each parameter and metric, a line for each run. */
import { axesOf, scaleOf } from "../core/axes.js";
import { html, useMemo } from "../core/html.js";
import { navigate, query, setQuery } from "../core/router.js";
import { Canvas } from "./canvas.js";
import { colorOf } from "./chart.js";
import { Menu } from "./widgets.js";

/** @typedef {import("../core/types.js").Run} Run */
/** @typedef {import("../core/axes.js").Scale} Scale */

const HEIGHT = 420;
const [TOP, BOTTOM, SIDE] = [46, 16, 70];
const USUAL = 6;
const REACH = 12;

/** @param {number} i @param {number} n @param {number} width */
const axisX = (i, n, width) => (n < 2 ? width / 2 : SIDE + (i * (width - 2 * SIDE)) / (n - 1));
/** @param {number} place */
const axisY = (place) => TOP + (1 - place) * (HEIGHT - TOP - BOTTOM);

/** @param {Run} run @param {Scale[]} scales @param {number} width */
function pathOf(run, scales, width) {
  return scales.flatMap((scale, i) => {
    const place = scale.place(run);
    return place === null ? [] : [/** @type {[number, number]} */ ([axisX(i, scales.length, width), axisY(place)])];
  });
}

/** @param {[number, number][]} path @param {number} x @param {number} y */
function distance(path, x, y) {
  let least = Infinity;
  for (let i = 1; i < path.length; i++) {
    const [[x0, y0], [x1, y1]] = [path[i - 1], path[i]];
    const along = Math.max(
      0,
      Math.min(1, ((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / ((x1 - x0) ** 2 + (y1 - y0) ** 2)),
    );
    least = Math.min(least, Math.hypot(x - x0 - along * (x1 - x0), y - y0 - along * (y1 - y0)));
  }
  return least;
}

/** @param {import("./canvas.js").Drawing} drawing @param {Scale[]} scales */
function drawAxes({ pen, width, ink }, scales) {
  pen.lineJoin = "round";
  const write = (/** @type {string} */ text, /** @type {number} */ x, /** @type {number} */ y) => {
    pen.strokeStyle = ink("--surface"); // a halo, because lines run below the words
    pen.lineWidth = 4;
    pen.strokeText(text, x, y);
    pen.fillText(text, x, y);
    pen.lineWidth = 1;
  };
  scales.forEach((scale, i) => {
    const x = axisX(i, scales.length, width);
    pen.strokeStyle = ink("--line-strong");
    pen.beginPath();
    pen.moveTo(x, axisY(1));
    pen.lineTo(x, axisY(0));
    pen.stroke();
    pen.textAlign = i === 0 ? "left" : i === scales.length - 1 ? "right" : "center";
    const edge = i === 0 ? 8 : i === scales.length - 1 ? width - 8 : x;
    pen.fillStyle = ink("--ink");
    pen.fillText(
      scale.title.length > 20 ? `${scale.title.slice(0, 19)}…` : scale.title,
      edge,
      i % 2 && scales.length > 5 ? 14 : 28,
    );
    pen.fillStyle = ink("--ink-3");
    pen.textAlign = i === scales.length - 1 ? "left" : "right";
    const shift = i === scales.length - 1 ? 7 : -7;
    for (const { at, text } of scale.marks) write(text.slice(0, 12), x + shift, axisY(at) + 4);
  });
}

/**
 * @param {{runs: {run: Run, color: number, paint?: string}[], label: (run: Run) => string, open?: (id: string) => void}} props
 *   `paint` is a colour beyond the palette. `open` is called with the id of a line that was clicked.
 */
export function Parallel({ runs, label, open = (id) => navigate(`/runs/${id}`) }) {
  const all = useMemo(() => runs.map(({ run }) => run), [runs]);
  const axes = useMemo(() => axesOf(all), [all]);
  const asked = query.value.get("axes");
  const chosen = asked ? asked.split(",").filter((id) => axes.includes(id)) : axes.slice(0, USUAL);
  const scales = useMemo(() => chosen.map((id) => scaleOf(id, all)), [all, chosen.join(",")]);
  const toggle = (/** @type {string} */ id) =>
    setQuery({ axes: (chosen.includes(id) ? chosen.filter((other) => other !== id) : [...chosen, id]).join(",") });
  const draw = (/** @type {import("./canvas.js").Drawing} */ drawing) => {
    const { pen, width, focus } = drawing;
    for (const { run, color, paint } of runs) {
      const path = pathOf(run, scales, width);
      pen.strokeStyle = paint ?? colorOf(color);
      pen.lineWidth = focus === run.id ? 3 : 1.6;
      pen.globalAlpha = focus && focus !== run.id ? 0.2 : 0.85;
      pen.beginPath();
      path.forEach(([x, y], i) =>
        i
          ? pen.bezierCurveTo((path[i - 1][0] + x) / 2, path[i - 1][1], (path[i - 1][0] + x) / 2, y, x, y)
          : pen.moveTo(x, y),
      );
      pen.stroke();
    }
    pen.globalAlpha = 1;
    pen.lineWidth = 1;
    drawAxes(drawing, scales);
  };
  const near = (/** @type {number} */ x, /** @type {number} */ y, /** @type {number} */ width) => {
    const found = runs
      .map(({ run }) => ({ run, away: distance(pathOf(run, scales, width), x, y) }))
      .sort((a, b) => a.away - b.away)[0];
    return found && found.away < REACH ? { id: found.run.id, text: label(found.run) } : null;
  };
  return html`<div class="tools"><${Menu} left label="Axes">${axes.map((id) => html`<label><input type="checkbox" checked=${chosen.includes(id)} onChange=${() => toggle(id)} /><span>${id}</span></label>`)}<//></div>
    <${Canvas} title="Parallel coordinates" height=${HEIGHT} least=${chosen.length * 104} draw=${draw} near=${near} open=${open} version=${`${chosen} ${all.map(({ id }) => id)}`} />`;
}
