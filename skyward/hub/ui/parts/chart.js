/** A chart of curves: uPlot with our axes, colours and tooltip. */
import { ascending, drawable, positions, smooth } from "../core/curves.js";
import { duration, moment, number } from "../core/format.js";
import { html, useEffect, useRef } from "../core/html.js";
import { themeChanges } from "../core/session.js";
import { loadUPlot } from "./uplot.js";

/** @typedef {import("../core/types.js").Curve} Curve */
/** @typedef {import("../core/types.js").Axis} Axis */
/** @typedef {{curves: Curve[], axis: Axis, smoothing: number, isLog: boolean, height?: number, sync?: string, onZoom?: (range: [number, number] | null) => void}} ChartProps */

export const COLORS = 10;

/** @param {number} color */
export function colorOf(color) {
  return getComputedStyle(document.documentElement)
    .getPropertyValue(`--c${color % COLORS}`)
    .trim();
}

/** @param {string} name */
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * Columns as uPlot wants them: positions, then for each curve its raw values, faint, and its smoothed ones.
 * @param {any} UPlot
 * @param {ChartProps} props
 */
function columnsOf(UPlot, { curves, axis, smoothing, isLog }) {
  const tables = curves.map(({ points, start }) => {
    const [xs, ys] = ascending(positions(points, axis, start), points.values);
    const raw = drawable(ys, isLog);
    return smoothing > 0 ? [Array.from(xs), raw, drawable(smooth(ys, smoothing), isLog)] : [Array.from(xs), raw];
  });
  if (!tables.length) return [[], []];
  return tables.length === 1 ? tables[0] : UPlot.join(tables);
}

/** @param {ChartProps} props */
function seriesOf({ curves, smoothing }) {
  /** @type {any[]} */
  const series = [{}];
  for (const { label, color, points } of curves) {
    const stroke = colorOf(color);
    const isAlone = points.values.length === 1;
    const line = { label, stroke, spanGaps: false, points: { show: isAlone, size: 6, fill: stroke } };
    if (smoothing > 0) series.push({ ...line, width: 1, alpha: 0.25 });
    series.push({ ...line, width: 1.6, isMain: true });
  }
  return series;
}

/** @param {Axis} axis @param {number} x */
function placeOf(axis, x) {
  if (axis === "step") return `step ${number(x)}`;
  return axis === "wall" ? moment(x * 1000) : duration(x * 1000);
}

/** @param {any} plot @param {number} series @param {number} near */
function valueNear(plot, series, near) {
  const column = plot.data[series];
  const reach = 400;
  for (let away = 0; away < reach; away++) {
    for (const i of [near - away, near + away]) {
      if (typeof column[i] === "number") return i;
    }
  }
  return null;
}

/**
 * @param {HTMLElement} tip
 * @param {() => ChartProps} current
 */
function showTip(tip, current) {
  return (/** @type {any} */ plot) => {
    const { left, top, idx } = plot.cursor;
    const { axis } = current();
    tip.hidden = idx === null || idx === undefined || left < 0 || top === null || top < 0;
    if (tip.hidden) return;
    /** @type {{label: string, color: string, value: number}[]} */
    const rows = [];
    plot.series.forEach((/** @type {any} */ series, /** @type {number} */ i) => {
      const at = i && series.isMain && series.show ? valueNear(plot, i, idx) : null;
      if (at !== null)
        rows.push({ label: series.label, color: series._stroke ?? series.stroke(), value: plot.data[i][at] });
    });
    const pointed = plot.posToVal(top, "y");
    rows.sort((a, b) => b.value - a.value);
    const shown =
      rows.length > 10
        ? rows.toSorted((a, b) => Math.abs(a.value - pointed) - Math.abs(b.value - pointed)).slice(0, 10)
        : rows;
    const head = document.createElement("b");
    head.textContent = placeOf(axis, plot.data[0][idx]);
    tip.replaceChildren(head, ...shown.map(tipRow));
    const room = plot.over.clientWidth;
    const edge = plot.over.offsetLeft;
    tip.style.left = `${edge + (left > room / 2 ? Math.max(0, left - tip.offsetWidth - 14) : left + 14)}px`;
    tip.style.top = `${Math.max(0, Math.min(top, plot.over.clientHeight - tip.offsetHeight))}px`;
  };
}

/** @param {{label: string, color: string, value: number}} row */
function tipRow({ label, color, value }) {
  const row = document.createElement("div");
  row.className = "row";
  const swatch = document.createElement("span");
  swatch.className = "swatch";
  swatch.style.background = color;
  const name = document.createElement("span");
  name.textContent = label;
  const shown = document.createElement("b");
  shown.textContent = number(value);
  row.append(swatch, name, shown);
  return row;
}

/**
 * @param {() => ChartProps} current
 * @param {number} width
 * @param {HTMLElement} tip
 */
function optionsOf(current, width, tip) {
  const { axis, isLog, height = 224, sync } = current();
  const font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
  const look = {
    stroke: themed("--ink-3"),
    font,
    ticks: { show: false },
    grid: { stroke: themed("--line"), width: 1 },
  };
  const short = (/** @type {any} */ _, /** @type {number[]} */ splits) =>
    splits.map((value) => (value === null ? "" : axis === "relative" ? duration(value * 1000) : number(value)));
  return {
    width,
    height,
    padding: [8, 12, 0, 0],
    legend: { show: false },
    scales: { x: { time: axis === "wall" }, y: { distr: isLog ? 3 : 1 } },
    series: seriesOf(current()),
    axes: [
      {
        ...look,
        grid: { show: false },
        size: 28,
        ...(axis === "wall" ? {} : { values: short, space: axis === "relative" ? 84 : 60 }),
      },
      {
        ...look,
        size: 54,
        values: (/** @type {any} */ _, /** @type {number[]} */ splits) =>
          splits.map((value) => (value === null ? "" : number(value))),
      },
    ],
    cursor: {
      y: false,
      drag: { x: true, y: false, setScale: true },
      points: { size: 7 },
      ...(sync ? { sync: { key: sync, setSeries: false, scales: ["x", null] } } : {}),
    },
    hooks: {
      setCursor: [showTip(tip, current)],
      setSelect: [
        (/** @type {any} */ plot) => {
          const { left, width: wide } = plot.select;
          if (wide > 2) current().onZoom?.([plot.posToVal(left, "x"), plot.posToVal(left + wide, "x")]);
        },
      ],
    },
  };
}

/** @param {ChartProps} props */
export function Chart(props) {
  const host = useRef(/** @type {HTMLDivElement | null} */ (null));
  const tip = useRef(/** @type {HTMLDivElement | null} */ (null));
  const latest = useRef(props);
  const plot = useRef(/** @type {any} */ (null));
  latest.current = props;
  const { curves, axis, isLog, smoothing, height, sync } = props;
  const shape = [
    axis,
    isLog,
    smoothing > 0,
    height,
    sync,
    themeChanges.value,
    ...curves.map((curve) => `${curve.label} ${curve.color}`),
  ].join("|");

  useEffect(() => {
    let isGone = false;
    /** @type {ResizeObserver | null} */
    let watcher = null;
    const failed = (/** @type {Error} */ error) => host.current?.replaceChildren(error.message);
    loadUPlot().then((UPlot) => {
      const place = host.current;
      if (isGone || !place || !tip.current) return;
      const options = optionsOf(() => latest.current, Math.max(120, place.clientWidth), tip.current);
      plot.current = new UPlot(options, columnsOf(UPlot, latest.current), place);
      plot.current.over.addEventListener("dblclick", () => latest.current.onZoom?.(null));
      place.dataset.drawn = "true";
      watcher = new ResizeObserver(() => {
        if (place.clientWidth > 0) plot.current?.setSize({ width: place.clientWidth, height: options.height });
      });
      watcher.observe(place);
    }, failed);
    return () => {
      isGone = true;
      watcher?.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => {
    if (!plot.current) return;
    loadUPlot().then((UPlot) => plot.current?.setData(columnsOf(UPlot, latest.current)));
  }, [curves, smoothing]);

  return html`<div class="plot"><div ref=${host}></div><div class="tip" ref=${tip} hidden></div></div>`;
}
