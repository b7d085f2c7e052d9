/** Usage: device-hours and USD of each project and month, and the shares of the projects over time. */
import { get, text } from "../core/api.js";
import { saveCsv } from "../core/download.js";
import { html } from "../core/html.js";
import { query, setQuery } from "../core/router.js";
import { useFresh } from "../parts/fresh.js";
import { Icon } from "../parts/icon.js";
import { ShareBars } from "../parts/share_bars.js";
import { attempt, Empty, Problem, Segments } from "../parts/widgets.js";

/** @typedef {{project: string, month: string, kind: string, device_hours: number, cost_usd: number, attempts: number}} Month */
/** @typedef {import("../parts/share_bars.js").Day} Day */
/** @typedef {{weight: number, devices: Record<string, number>, may_borrow: boolean, nodes: number | null, jobs: number | null, usd_per_day: number | null, usd_per_month: number | null}} Limits */
/** @typedef {{holder: "project" | "user", name: string, quota: Limits, devices: Record<string, number>, nodes: number, jobs: number, today_usd: number, month_usd: number}} Quota */

const SPANS = /** @type {[string, string][]} */ ([
  ["30", "30 days"],
  ["90", "90 days"],
  ["366", "a year"],
]);

/** @param {number} hours */
const inHours = (hours) => (hours && hours < 0.01 ? "under 0.01" : hours.toLocaleString("en-US", { maximumFractionDigits: 2 }));

/** @param {number} usd */
const inUsd = (usd) => usd.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

/** @param {{months: Month[]}} props */
function Months({ months }) {
  return html`<section class="card"><header><h2>By project and month</h2></header><div class="scroll-x"><table class="plain" aria-label="By project and month"><thead><tr><th>Month</th><th>Project</th><th>Device</th><th class="number">Device-hours</th><th class="number">USD</th><th class="number">Attempts</th></tr></thead>
    <tbody>${months.map((use) => html`<tr key=${`${use.month} ${use.project} ${use.kind}`}><td class="fit">${use.month}</td><td>${use.project}</td><td>${use.kind}</td><td class="number">${inHours(use.device_hours)}</td><td class="number">${inUsd(use.cost_usd)}</td><td class="number">${use.attempts}</td></tr>`)}</tbody></table></div></section>`;
}

/** @param {{quotas: Quota[]}} props */
function Quotas({ quotas }) {
  if (!quotas.length) return null;
  const of = (/** @type {number} */ used, /** @type {number | null | undefined} */ most) => (most === null || most === undefined ? `${used}` : `${used} of ${most}`);
  const usd = (/** @type {number} */ used, /** @type {number | null} */ most) => (most === null ? inUsd(used) : `${inUsd(used)} of ${inUsd(most)}`);
  const devices = (/** @type {Quota} */ { quota, devices: used }) =>
    [...new Set([...Object.keys(quota.devices), ...Object.keys(used)])].sort().map((kind) => `${kind}: ${of(used[kind] ?? 0, quota.devices[kind])}`).join(", ");
  return html`<section class="card"><header><h2 class="grow">Quotas</h2><span class="muted">in use now, of what is allowed</span></header><div class="scroll-x"><table class="plain" aria-label="Quotas"><thead><tr><th>Whose</th><th class="number">Weight</th><th>Devices</th><th class="number">Nodes</th><th class="number">Jobs</th><th class="number">USD today</th><th class="number">USD this month</th></tr></thead>
    <tbody>${quotas.map((one) => html`<tr key=${`${one.holder} ${one.name}`}><td>${one.holder} <b>${one.name}</b></td><td class="number">${one.quota.weight}</td><td>${devices(one) || html`<span class="muted">any</span>`}${Object.keys(one.quota.devices).length > 0 && one.holder === "project" && html`<br /><small class="muted">${one.quota.may_borrow ? "may borrow idle ones" : "never more"}</small>`}</td>
      <td class="number">${of(one.nodes, one.quota.nodes)}</td><td class="number">${of(one.jobs, one.quota.jobs)}</td><td class="number">${usd(one.today_usd, one.quota.usd_per_day)}</td><td class="number">${usd(one.month_usd, one.quota.usd_per_month)}</td></tr>`)}</tbody></table></div></section>`;
}

export function UsagePage() {
  const days = query.value.get("days") ?? "90";
  const { value, problem, reload } = useFresh(async () => {
    const [use, { quotas }] = await Promise.all([get("/v1/usage", { days }), get("/v1/job-quotas")]);
    return { ...use, quotas };
  }, days);
  document.title = "Usage · skyward hub";
  const use = /** @type {{days: Day[], months: Month[], quotas: Quota[]} | null} */ (value);
  const save = () => attempt(async () => saveCsv(await text("/v1/usage", "text/csv", { days }), "usage.csv"));
  return html`<div class="head"><h1 class="grow">Usage</h1><${Segments} label="Time back" value=${days} options=${SPANS} choose=${(/** @type {string} */ chosen) => setQuery({ days: chosen === "90" ? null : chosen })} />
      <button class="button" onClick=${save}><${Icon} name="download" />CSV</button></div>
    ${problem && html`<${Problem} problem=${problem} retry=${reload} />`}
    ${!use && !problem && html`<div class="bones" aria-busy="true"></div>`}
    ${use && !use.months.length && html`<div class="card"><${Empty} icon="usage" title="Nothing was used yet"><p>Devices and money of jobs are counted here by project, from a job's start to its end.</p><//></div>`}
    ${use && (use.months.length > 0 || use.quotas.length > 0) && html`<div class="stack below">${use.months.length > 0 && html`<${ShareBars} days=${use.days} span=${Number(days)} />`}<${Quotas} quotas=${use.quotas} />${use.months.length > 0 && html`<${Months} months=${use.months} />`}</div>`}`;
}
