/** Axis, smoothing and scale of a page's charts, as the address says them. */
import { html } from "../core/html.js";
import { query, setQuery } from "../core/router.js";
import { Icon } from "./icon.js";
import { Segments } from "./widgets.js";

/** @typedef {import("../core/types.js").Axis} Axis */

/** @param {Axis} usual @returns {{axis: Axis, smoothing: number, isLog: boolean, text: string}} */
export function lookOf(usual = "step") {
  const asked = query.value;
  const axis = asked.get("axis");
  return {
    axis: axis === "step" || axis === "relative" || axis === "wall" ? axis : usual,
    smoothing: Math.min(0.99, Math.max(0, Number(asked.get("smooth") ?? 0) || 0)),
    isLog: asked.get("log") === "y",
    text: asked.get("metric") ?? "",
  };
}

/** @param {{usual?: Axis, children?: any}} props `usual`: axis of an address that names none. */
export function ChartTools({ usual = "step", children }) {
  const { axis, smoothing, isLog, text } = lookOf(usual);
  return html`<div class="chart-tools">
    <div class="search"><${Icon} name="search" /><input type="search" placeholder="Search metrics" aria-label="Search metrics" value=${text}
      onInput=${(/** @type {any} */ event) => setQuery({ metric: event.target.value })} /></div>
    <${Segments} label="Horizontal axis" value=${axis} options=${[
      ["step", "Step"],
      ["relative", "Time"],
      ["wall", "Clock"],
    ]} choose=${(/** @type {string} */ to) => setQuery({ axis: to === usual ? null : to })} />
    <label class="inline">Smoothing <input type="range" min="0" max="0.99" step="0.01" value=${smoothing} onInput=${(/** @type {any} */ event) => setQuery({ smooth: Number(event.target.value) ? event.target.value : null })} />
      <span class="number">${smoothing.toFixed(2)}</span></label>
    <label class="inline"><input type="checkbox" checked=${isLog} onChange=${() => setQuery({ log: isLog ? null : "y" })} />Log scale</label>${children}</div>`;
}

/**
 * Metrics in sections by the part of their name before the slash.
 * @param {string[]} keys
 * @param {string} text
 * @returns {[section: string, keys: string[]][]}
 */
export function sectionsOf(keys, text) {
  /** @type {Map<string, string[]>} */
  const sections = new Map();
  for (const key of keys) {
    if (text && !key.toLowerCase().includes(text.toLowerCase())) continue;
    const section = key.includes("/") ? key.slice(0, key.indexOf("/")) : "";
    sections.set(section, [...(sections.get(section) ?? []), key]);
  }
  return [...sections].sort(([a], [b]) => a.localeCompare(b));
}
