/** Capacity: machine sets with their free, used, idle and stranded devices, what they cost by the hour, and draining. */
import { change, get } from "../core/api.js";
import { ago, clock, count, money } from "../core/format.js";
import { html } from "../core/html.js";
import { me } from "../core/session.js";
import { useFresh } from "../parts/fresh.js";
import { ask, attempt, Empty, notify, Paste, Problem } from "../parts/widgets.js";

/**
 * @typedef {object} MachineSet
 * @property {string} name
 * @property {{kind: string, nodes: number, devices: number, accelerator: string, vcpus: number, memory_gib: number, region: string, labels: string[], usd_per_hour: number, max_usd_per_hour: number | null, projects: string[] | null, provider: Record<string, any>}} machines
 * @property {boolean} is_draining
 * @property {number} full_until
 * @property {number} used_nodes
 * @property {number} used_devices
 * @property {number} stranded_devices
 * @property {number} usd_per_hour
 * @property {number} idle_usd_per_hour
 * @property {number} kept_nodes
 * @property {number} kept_cost_usd
 * @property {Record<string, number>} jobs
 */

const HOUR_MS = 3_600_000;

/** @param {MachineSet} set @param {() => void} reload */
async function drain(set, reload) {
  const isDraining = !set.is_draining;
  if (isDraining) {
    const text = "Jobs that run on it end as usual, and none begin. Jobs that fit nowhere else wait.";
    if ((await ask({ title: `Drain ${set.name}?`, text, action: "Drain", danger: true })) === null) return;
  }
  if (await attempt(() => change("POST", `/v1/capacity/${encodeURIComponent(set.name)}/drain`, { is_draining: isDraining })))
    notify(isDraining ? `No job begins on ${set.name} now.` : `Jobs begin on ${set.name} again.`);
  reload();
}

/** Devices of a set: how many are used, stranded, and otherwise free. @param {MachineSet} set */
function partsOf({ machines, used_devices, stranded_devices, full_until, is_draining }) {
  const all = machines.nodes * machines.devices;
  const free = Math.max(0, all - used_devices);
  const isClosed = is_draining || full_until > Date.now();
  return { all, free, stranded: Math.min(stranded_devices, free), isClosed };
}

/** @param {{set: MachineSet}} props */
function Meter({ set }) {
  const { all, free, stranded, isClosed } = partsOf(set);
  const part = (/** @type {number} */ devices) => `${(100 * devices) / Math.max(1, all)}%`;
  const text = `${set.used_devices} used, ${free} free, ${stranded} of them stranded`;
  return html`<div class="meter" role="img" aria-label=${text} title=${text}><i class="used" style=${{ width: part(set.used_devices) }}></i><i class="stranded" style=${{ width: part(stranded) }}></i><i class=${isClosed ? "closed" : ""} style=${{ width: part(free - stranded) }}></i></div>`;
}

/** Machines of a set in words. @param {MachineSet["machines"]} machines */
function inWords({ nodes, devices, accelerator, vcpus, memory_gib, region }) {
  const each = accelerator ? `${devices} ${accelerator}` : devices > 1 ? count(devices, "device") : "";
  const facts = [count(nodes, "node"), each && `each with ${each}`, vcpus && count(vcpus, "vCPU"), memory_gib && `${Math.round(memory_gib)} GiB`, region];
  return facts.filter(Boolean).join(", ");
}

/** @param {{set: MachineSet}} props */
function State({ set }) {
  if (set.is_draining) return html`<span class="pill lost">drained</span>`;
  if (set.full_until > Date.now()) return html`<span class="pill cancelled" title="Its provider said that it has no machines">full until ${clock(set.full_until, HOUR_MS)}</span>`;
  return html`<span class="pill completed">open</span>`;
}

/** @param {{set: MachineSet, reload: () => void}} props */
function Row({ set, reload }) {
  const { free, stranded } = partsOf(set);
  const jobs = Object.keys(set.jobs);
  const most = set.machines.max_usd_per_hour;
  return html`<tr><td><b>${set.name}</b><br /><small class="muted">${String(set.machines.provider.type)}, ${set.machines.kind}</small></td><td class="detail">${inWords(set.machines)}<${Meter} set=${set} /></td>
    <td class="number">${set.used_devices}</td><td class="number">${free}</td><td class="number">${stranded}</td>
    <td class="number">${money(set.usd_per_hour)}${most ? html`<br /><small class="muted">${money(most)} at most</small>` : ""}</td><td class="number">${set.idle_usd_per_hour ? money(set.idle_usd_per_hour) : "nothing"}${set.kept_nodes > 0 && html`<br /><small class="muted">${count(set.kept_nodes, "node")} kept for the next job, ${money(set.kept_cost_usd)} so far</small>`}</td>
    <td>${jobs.length ? jobs.slice(0, 5).map((id) => html`<a class="mono job-link" href=${`/jobs/${id}`}>${id.slice(0, 8)}</a> `) : html`<span class="muted">none</span>`}${jobs.length > 5 && html`<span class="muted">and ${jobs.length - 5} more</span>`}</td>
    <td><${State} set=${set} /></td>
    <td class="actions">${me.value?.role === "owner" && html`<button class="button small bare" aria-label=${`${set.is_draining ? "Open" : "Drain"} ${set.name}`} onClick=${() => drain(set, reload)}>${set.is_draining ? "Open" : "Drain"}</button>`}</td></tr>`;
}

/** Totals of all sets. @param {{sets: MachineSet[]}} props */
function Tiles({ sets }) {
  const sum = (/** @type {(set: MachineSet) => number} */ of) => sets.reduce((total, set) => total + of(set), 0);
  const all = sum((set) => partsOf(set).all);
  const tiles = [
    ["Devices in use", `${sum((set) => set.used_devices)} of ${all}`],
    ["Free", `${sum((set) => partsOf(set).free)}`],
    ["Stranded", `${sum((set) => partsOf(set).stranded)}`],
    ["An hour", money(sum((set) => set.usd_per_hour))],
    ["Of it idle", sum((set) => set.idle_usd_per_hour) ? money(sum((set) => set.idle_usd_per_hour)) : "nothing"],
  ];
  return html`<div class="tiles">${tiles.map(([title, text]) => html`<div class="card tile" key=${title}><small>${title}</small><b>${text}</b></div>`)}</div>`;
}

export function CapacityPage() {
  const { value, problem, reload } = useFresh(() => get("/v1/capacity").then((answer) => ({ ...answer, at: Date.now() })), "capacity", ["job", "capacity"]);
  document.title = "Capacity · skyward hub";
  const sets = /** @type {MachineSet[]} */ (value?.sets ?? []);
  return html`<div class="head"><h1 class="grow">Capacity</h1>${value && html`<span class="muted">as of ${ago(value.at)}</span>`}</div>
    ${problem && html`<${Problem} problem=${problem} retry=${reload} />`}
    ${!value && !problem && html`<div class="bones" aria-busy="true"></div>`}
    ${value && !sets.length && html`<div class="card"><${Empty} icon="capacity" title="No machines are declared"><p>Jobs run on machine sets, which an owner declares as data:</p><${Paste} text=${`skyward capacity add lab --provider '{"type": "ssh", "hosts": ["a", "b"]}' --nodes 2 --devices 8 --accelerator A100`} /><//></div>`}
    ${
      sets.length > 0 &&
      html`<${Tiles} sets=${sets} /><div class="card scroll-x"><table class="plain" aria-label="Machine sets"><thead><tr><th>Name</th><th>Machines</th><th class="number">Used</th><th class="number">Free</th><th class="number">Stranded</th><th class="number">An hour</th><th class="number">Idle an hour</th><th>Jobs</th><th>State</th><th></th></tr></thead>
      <tbody>${sets.map((set) => html`<${Row} key=${set.name} set=${set} reload=${reload} />`)}</tbody></table></div>
      <p class="muted below">Stranded devices are idle, and a waiting job could use them if they were on fewer nodes.</p>`
    }`;
}
