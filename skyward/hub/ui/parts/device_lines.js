/** Devices on a line of time: a lane for each node, a bar for each job that holds or has reserved some of its devices. */
import { clock, count, moment } from "../core/format.js";
import { html } from "../core/html.js";
import { query, setQuery } from "../core/router.js";
import { Segments } from "./widgets.js";

/** @typedef {import("../core/types.js").SetPlan} SetPlan */
/** @typedef {import("../core/types.js").DeviceSpan} DeviceSpan */

const HOUR_MS = 3_600_000;
const HORIZONS = /** @type {[string, string, number][]} */ ([
  ["1h", "1 hour", HOUR_MS],
  ["6h", "6 hours", 6 * HOUR_MS],
  ["1d", "1 day", 24 * HOUR_MS],
  ["1w", "1 week", 168 * HOUR_MS],
]);
const PAST = 0.25;
const LANES = 48;
const TICKS = 4;

/** The shortest horizon that shows where each reservation begins. @param {SetPlan[]} sets @param {number} now */
function usualHorizon(sets, now) {
  const begins = sets.flatMap(({ spans }) => spans.filter(({ state }) => state === "reservation"));
  const latest = Math.max(now, ...begins.map(({ begins_at }) => begins_at));
  return HORIZONS.find(([, , ms]) => (latest - now) * 1.3 <= ms) ?? HORIZONS[HORIZONS.length - 1];
}

/** Devices of a node that a span covers, as [first, how many] for each run of numbers. @param {DeviceSpan} span @param {number} devices */
export function bandsOf({ devices: numbers, each, state }, devices) {
  if (!numbers.length) {
    const first = state === "reservation" ? Math.max(0, devices - each) : 0;
    return [[first, Math.min(each, devices)]];
  }
  /** @type {number[][]} */
  const bands = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    const last = bands[bands.length - 1];
    if (last && last[0] + last[1] === number) last[1] += 1;
    else bands.push([number, 1]);
  }
  return bands;
}

/** Devices of a set that jobs hold now. @param {SetPlan} plan @param {number} now */
function usedDevices({ spans }, now) {
  return spans.reduce((sum, span) => (span.begins_at > now ? sum : sum + span.each * span.nodes.length), 0);
}

/** @param {{span: DeviceSpan, band: number[], plan: SetPlan, place: (at: number) => number}} props */
function Bar({ span, band: [first, several], plan, place }) {
  const left = place(span.begins_at);
  const right = place(span.ends_by);
  const name = span.job ? span.name : "another project";
  const what = span.state === "reservation" ? "reserved" : span.state;
  const title = `${name}: ${what}, ${count(span.each, "device")} on ${count(span.nodes.length, "node")}, ${
    span.state === "reservation" ? `from ${moment(span.begins_at)} at the latest` : `until ${moment(span.ends_by)} at the latest`
  }${span.on_loan ? ", on loan" : ""}`;
  const style = {
    left: `${left}%`,
    width: `max(3px, ${right - left}%)`,
    top: `${(100 * first) / plan.devices}%`,
    height: `${(100 * several) / plan.devices}%`,
  };
  const look = `bar ${span.job ? span.state : span.state === "reservation" ? "reservation" : "foreign"}`;
  return span.job
    ? html`<a role="listitem" class=${look} style=${style} title=${title} aria-label=${title} href=${`/jobs/${span.job}`}><span>${name}</span></a>`
    : html`<i role="listitem" class=${look} style=${style} title=${title} aria-label=${title}></i>`;
}

/** @param {{plan: SetPlan, now: number, place: (at: number) => number}} props */
function SetLanes({ plan, now, place }) {
  const busy = new Set(plan.spans.flatMap(({ nodes }) => nodes));
  const all = [...Array(plan.nodes).keys()];
  const shown = plan.nodes <= LANES ? all : all.filter((node) => busy.has(node)).slice(0, LANES);
  const devices = plan.nodes * plan.devices;
  const free = Math.max(0, devices - usedDevices(plan, now));
  const noun = plan.accelerator || (plan.devices > 1 ? "devices" : "nodes");
  const lane = Math.min(64, Math.max(20, plan.devices * 6));
  return html`<div class="lanes"><div class="lanes-head"><b>${plan.name}</b><span class="muted">${free} of ${devices} ${noun} free</span>
      ${plan.is_draining && html`<span class="pill lost">drained</span>`}${plan.stranded > 0 && html`<span class="pill lost" title="Idle devices that a waiting job could use if they were on fewer nodes">${plan.stranded} stranded</span>`}</div>
    <div role="list" aria-label=${`Devices of ${plan.name}`}>${shown.map(
      (node) => html`<div class="lane" key=${node}><span class="muted" role="presentation">node ${node}</span><div class="lane-bars" role="presentation" style=${{ height: `${lane}px` }}>${plan.spans
        .filter(({ nodes }) => nodes.includes(node))
        .flatMap((span) =>
          bandsOf(span, plan.devices).map(
            (band) => html`<${Bar} key=${`${span.job} ${span.state} ${band}`} span=${span} band=${band} plan=${plan} place=${place} />`,
          ),
        )}</div></div>`,
    )}</div>
    ${shown.length < plan.nodes && html`<p class="muted lanes-rest">${count(plan.nodes - shown.length, "more node")}</p>`}</div>`;
}

/** @param {{sets: SetPlan[], now: number}} props */
export function DeviceLines({ sets, now }) {
  const asked = query.value.get("horizon");
  const [id, , horizon] = HORIZONS.find(([name]) => name === asked) ?? usualHorizon(sets, now);
  const from = now - PAST * horizon;
  const whole = horizon * (1 + PAST);
  const place = (/** @type {number} */ at) => Math.min(100, Math.max(0, (100 * (at - from)) / whole));
  const ticks = [...Array(TICKS + 1).keys()].map((i) => now + (i * horizon) / TICKS);
  return html`<section class="card"><header><h2 class="grow">Devices</h2><${Segments} label="Time ahead" value=${id} options=${HORIZONS.map(([name, text]) => [name, text])} choose=${(/** @type {string} */ name) => setQuery({ horizon: name })} /></header>
    <div class="body device-lines"><div class="lane ticks"><span></span><div class="lane-bars">${ticks.map((at, i) => html`<small key=${i} class=${i === TICKS ? "last" : ""} style=${{ left: `${place(at)}%` }}>${i ? clock(at, horizon) : "now"}</small>`)}</div></div>
      <div class="lanes-all"><div class="now-line"><span></span><div><i style=${{ left: `${place(now)}%` }}></i></div></div>${sets.map((plan) => html`<${SetLanes} key=${plan.name} plan=${plan} now=${now} place=${place} />`)}</div>
      <p class="legend-line muted"><i class="bar running"></i>holds them until at the latest <i class="bar preempting"></i>saves and ends <i class="bar reservation"></i>reserved <i class="bar foreign"></i>another project</p></div></section>`;
}
