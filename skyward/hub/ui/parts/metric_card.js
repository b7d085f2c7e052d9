/** A card with the curves of one metric, fetched when it comes into sight. */
import { points as fetchPoints } from "../core/api.js";
import { curvesToCsv, noPoints } from "../core/curves.js";
import { saveCsv, savePng } from "../core/download.js";
import { number } from "../core/format.js";
import { html, useEffect, useMemo, useRef, useState } from "../core/html.js";
import { Chart, colorOf } from "./chart.js";
import { Icon } from "./icon.js";

/** @typedef {import("../core/types.js").Points} Points */
/** @typedef {import("../core/types.js").Axis} Axis */
/** @typedef {{id: string, label: string, color: number, start: number}} Line A run in a chart. */
/** @typedef {{axis: Axis, smoothing: number, isLog: boolean}} Look */
/** @typedef {{hear: (run: string, key: string, take: (points: Points) => void) => () => void}} Live Points that arrive later. */

/** Points that a curve of a card has at most: a few for each pixel. */
const AT_MOST = 2000;
const AT_MOST_FULL = 6000;

/** True once the element has come into sight. @param {{current: Element | null}} place */
function useSeen(place) {
  const [isSeen, setSeen] = useState(false);
  useEffect(() => {
    if (isSeen || !place.current) return;
    const watcher = new IntersectionObserver(
      (entries) => entries.some((entry) => entry.isIntersecting) && setSeen(true),
      { rootMargin: "300px" },
    );
    watcher.observe(place.current);
    return () => watcher.disconnect();
  }, [isSeen]);
  return isSeen;
}

/**
 * @param {{metric: string, lines: Line[], range: [number, number] | null, most: number, isSeen: boolean, reloads: number}} wanted
 */
function usePoints({ metric, lines, range, most, isSeen, reloads }) {
  const [table, setTable] = useState(
    /** @type {{points: Map<string, Points>, problem: any, isLoaded: boolean}} */ ({
      points: new Map(),
      problem: null,
      isLoaded: false,
    }),
  );
  const ids = lines.map((line) => line.id).join(" ");
  useEffect(() => {
    if (!isSeen) return;
    const abort = new AbortController();
    const part = range ? { start: Math.floor(range[0]), end: Math.ceil(range[1]) } : {};
    Promise.all(
      lines.map(
        async (line) =>
          /** @type {[string, Points]} */ ([
            line.id,
            await fetchPoints(line.id, metric, { ...part, at_most: most, abort: abort.signal }),
          ]),
      ),
    ).then(
      (entries) => setTable({ points: new Map(entries), problem: null, isLoaded: true }),
      (problem) => abort.signal.aborted || setTable((before) => ({ ...before, problem, isLoaded: true })),
    );
    return () => abort.abort();
  }, [metric, ids, isSeen, most, range?.[0], range?.[1], reloads]);
  return { ...table, setTable };
}

/**
 * @param {{metric: string, lines: Line[], look: Look, live?: import("../core/live.js").LiveRun | null, sync?: string}} props
 */
export function MetricCard({ metric, lines, look, live = null, sync }) {
  const card = useRef(/** @type {HTMLElement | null} */ (null));
  const isSeen = useSeen(card);
  const [isFull, setFull] = useState(false);
  const [range, setRange] = useState(/** @type {[number, number] | null} */ (null));
  const [reloads, setReloads] = useState(0);
  const most = isFull ? AT_MOST_FULL : AT_MOST;
  const { points, problem, isLoaded, setTable } = usePoints({ metric, lines, range, most, isSeen, reloads });

  useEffect(() => {
    if (!live || !isLoaded || range) return;
    const id = lines[0].id;
    return live.hear(metric, (extend) =>
      setTable((table) => {
        const old = table.points.get(id) ?? noPoints();
        const now = extend(old);
        if (now === old) return table;
        if (now.values.length > 2 * most + 500) setReloads((turn) => turn + 1);
        return { ...table, points: new Map([...table.points, [id, now]]) };
      }),
    );
  }, [live, isLoaded, metric, most, range === null]);

  const curves = useMemo(
    () =>
      lines
        .filter((line) => points.get(line.id)?.values.length)
        .map((line) => ({ ...line, points: points.get(line.id) ?? noPoints() })),
    [points, lines.map((line) => `${line.id} ${line.color} ${line.label}`).join("|")],
  );
  const last = lines.length === 1 ? points.get(lines[0].id)?.values.at(-1) : undefined;
  const png = () => {
    const canvas = card.current?.querySelector("canvas");
    if (canvas)
      savePng(
        canvas,
        metric,
        curves.map(({ label, color }) => ({ label, color: colorOf(color) })),
      );
  };
  const zoom = (/** @type {[number, number] | null} */ to) => look.axis === "step" && setRange(to);
  return html`<article class=${`card chart ${isFull ? "full" : ""}`} ref=${card} aria-label=${metric} data-points=${curves.reduce((sum, curve) => sum + curve.points.values.length, 0)}>
    <header><h3 title=${metric}>${metric}</h3>${last !== undefined && html`<span class="last number">${number(last)}</span>`}
      <div class="actions">
        <button class="button bare small icon-only" title="Save as CSV" aria-label=${`Save ${metric} as CSV`} onClick=${() => saveCsv(curvesToCsv(curves.map((curve) => ({ ...curve, key: metric }))), `${metric}.csv`)}><${Icon} name="download" /></button>
        <button class="button bare small icon-only" title="Save as PNG" aria-label=${`Save ${metric} as PNG`} onClick=${png}><${Icon} name="image" /></button>
        <button class="button bare small icon-only" title=${isFull ? "Smaller" : "Larger"} aria-pressed=${String(isFull)} aria-label=${`${metric} in full width`} onClick=${() => setFull(!isFull)}><${Icon} name="expand" /></button>
      </div></header>
    ${problem && html`<div class="note">${problem.message}</div>`}
    ${!problem && isLoaded && !curves.length && html`<div class="note">No points</div>`}
    ${!problem && curves.length > 0 ? html`<${Chart} curves=${curves} ...${look} height=${isFull ? 400 : 224} sync=${sync} onZoom=${zoom} />` : !isLoaded && html`<div class="plot"></div>`}
  </article>`;
}
