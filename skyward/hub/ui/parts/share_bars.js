/** Shares of projects over time: a bar for each day or week, in which each project has its part. */
import { html } from "../core/html.js";

/** @typedef {{project: string, day: number, kind: string, device_hours: number, cost_usd: number, attempts: number}} Day */

const DAY_MS = 86_400_000;
const MOST_BARS = 92;
const COLORS = 10;
const dates = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });

/** @param {number} day */
const dateOf = (day) => dates.format(day * DAY_MS);

/** @param {{days: Day[], span: number}} props */
export function ShareBars({ days, span }) {
  const projects = [...new Set(days.map(({ project }) => project))].sort();
  const width = Math.ceil(span / MOST_BARS);
  const last = Math.floor(Date.now() / DAY_MS);
  const bars = Math.ceil(span / width);
  const sums = [...Array(bars).keys()].map(() => new Map(projects.map((project) => [project, 0])));
  for (const { project, day, device_hours } of days) {
    const bar = bars - 1 - Math.floor((last - day) / width);
    if (bar >= 0 && bar < bars) sums[bar].set(project, (sums[bar].get(project) ?? 0) + device_hours);
  }
  const total = (/** @type {Map<string, number>} */ sum) => [...sum.values()].reduce((a, b) => a + b, 0);
  const most = Math.max(...sums.map(total), 1e-9);
  return html`<section class="card"><header><h2 class="grow">Device-hours</h2><span class="muted">${width > 1 ? `each bar ${width} days` : "each bar a day, in UTC"}</span></header>
    <div class="body"><div class="share-bars" role="img" aria-label=${`Device-hours of ${projects.join(", ")}`}>${sums.map((sum, i) => {
      const day = last - (bars - 1 - i) * width;
      const text = `${dateOf(day)}: ${projects.filter((project) => sum.get(project)).map((project) => `${project} ${(sum.get(project) ?? 0).toFixed(2)} h`).join(", ") || "nothing"}`;
      return html`<div key=${day} title=${text} style=${{ height: "100%" }}>${projects.map((project, color) => html`<i key=${project} class=${`k${color % COLORS}`} style=${{ height: `${(100 * (sum.get(project) ?? 0)) / most}%` }}></i>`)}</div>`;
    })}</div>
    <div class="share-dates muted"><span>${dateOf(last - (bars - 1) * width)}</span><span>at most ${most.toFixed(2)} h</span><span>${dateOf(last)}</span></div>
    <p class="legend-line muted">${projects.map((project, color) => html`<span><i class=${`swatch k${color % COLORS}`}></i> ${project}</span>`)}</p></div></section>`;
}
