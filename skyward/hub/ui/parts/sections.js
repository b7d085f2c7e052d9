/** Cards of metrics in sections that fold. A run may have 12,000 metrics, so only some of each are drawn. */
import { count } from "../core/format.js";
import { html, useState } from "../core/html.js";
import { MetricCard } from "./metric_card.js";
import { sectionsOf } from "./chart_tools.js";

const SHOWN = 24;

/** @typedef {{lines: import("./metric_card.js").Line[], look: import("./metric_card.js").Look, live?: any, sync?: string}} Common */

/** @param {{name: string, keys: string[], common: Common}} props */
function Section({ name, keys, common }) {
  const [shown, setShown] = useState(SHOWN);
  return html`<details class="section" open><summary>${name || "Metrics"} <span class="muted">${keys.length}</span></summary>
    <div class="chart-grid">${keys.slice(0, shown).map((key) => html`<${MetricCard} key=${key} metric=${key} ...${common} />`)}</div>
    ${keys.length > shown && html`<p><button class="button" onClick=${() => setShown(shown + SHOWN)}>Show ${count(Math.min(SHOWN, keys.length - shown), "more chart")}</button></p>`}</details>`;
}

/** @param {{keys: string[], text: string, common: Common}} props */
export function Sections({ keys, text, common }) {
  const sections = sectionsOf(keys, text);
  if (!sections.length) return html`<p class="muted">No metric has this name.</p>`;
  return sections.map(([name, names]) => html`<${Section} key=${name} name=${name} keys=${names} common=${common} />`);
}
