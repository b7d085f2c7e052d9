/** Pools that recorded themselves: machines, money, lost nodes, and calls on a line of time. */
import { get } from "../core/api.js";
import { ago, count, duration, moment, money, number } from "../core/format.js";
import { html } from "../core/html.js";
import { useFresh } from "../parts/fresh.js";
import { Empty, Paste, Pill, Problem } from "../parts/widgets.js";

/**
 * @typedef {object} Pool
 * @property {string} id
 * @property {string} name
 * @property {string} provider
 * @property {string} user
 * @property {string} state
 * @property {number} nodes
 * @property {number} started_at
 * @property {number | null} ready_at
 * @property {number | null} ended_at
 * @property {string} reason
 * @property {number} price_usd_per_hour
 * @property {number} spent_usd
 * @property {number} calls
 * @property {number} failed
 * @property {number} lost_nodes
 * @property {number} replaced_nodes
 *
 * @typedef {{node: number, state: string, address: string, ready_at: number | null, losses: number}} PoolNode
 * @typedef {{node: number, instance: string, instance_type: string, price_usd_per_hour: number, is_spot: boolean, launched_at: number, ended_at: number | null}} Machine
 * @typedef {{task: number, name: string, node: number, rank: number | null, calls: number, started_at: number, ended_at: number | null, ok: boolean | null}} PoolCall
 * @typedef {{number: number, at: number, kind: string, node: number | null, detail: Record<string, any>}} PoolEvent
 * @typedef {{pool: Pool, nodes: PoolNode[], machines: Machine[], calls: PoolCall[], events: PoolEvent[]}} History
 */

const SHOWN = 500;
/** Colours of states, by the classes that runs have. */
const LOOKS = /** @type {Record<string, string>} */ ({ open: "running", starting: "queued", closed: "completed" });

/** @param {{state: string}} props */
const State = ({ state }) => html`<span class=${`pill ${LOOKS[state] ?? state}`}>${state}</span>`;

export function PoolsPage() {
  const { value, problem, reload } = useFresh(() => get("/v1/pools", { limit: SHOWN }), "pools");
  document.title = "Pools · skyward hub";
  const pools = /** @type {Pool[]} */ (value?.pools ?? []);
  return html`<div class="head"><h1>Pools</h1></div>
    ${problem && html`<${Problem} problem=${problem} retry=${reload} />`}
    <div class="card">${value && !pools.length && html`<${Empty} icon="pools" title="No pools yet"><p>A pool records itself here if its program has a hub:</p><${Paste} text=${"hub.connect(...)\nwith sky.ComputePool(provider=sky.Local(), nodes=2) as pool:\n    ..."} /><//>`}
    ${
      pools.length > 0 &&
      html`<div class="scroll-x"><table class="plain"><thead><tr><th>Name</th><th>State</th><th>Provider</th><th class="number">Nodes</th><th class="number">Lost</th><th class="number">Calls</th><th class="number">Failed</th><th class="number">Spent</th><th>User</th><th>Started</th></tr></thead>
      <tbody>${pools.map((pool) => html`<tr key=${pool.id}><td><a href=${`/pools/${pool.id}`}><b>${pool.name || pool.id}</b></a></td><td><${State} state=${pool.state} /></td><td>${pool.provider}</td><td class="number">${pool.nodes}</td><td class="number">${pool.lost_nodes}</td><td class="number">${number(pool.calls)}</td><td class="number">${number(pool.failed)}</td><td class="number">${money(pool.spent_usd)}</td><td>${pool.user}</td><td class="fit muted" title=${moment(pool.started_at)}>${ago(pool.started_at)}</td></tr>`)}</tbody></table></div>`
    }</div>`;
}

/** A bar for each call, in the line of its node. @param {{history: History}} props */
function Timeline({ history: { pool, nodes, calls } }) {
  const end = pool.ended_at ?? Date.now();
  const passed = Math.max(1, end - pool.started_at);
  const part = (/** @type {number} */ at) => `${(100 * (at - pool.started_at)) / passed}%`;
  const shown = calls.slice(-SHOWN);
  return html`<section class="card"><header><h2 class="grow">Calls</h2><span class="muted">${count(calls.length, "task")}, ${duration(passed)}</span></header>
    <div class="body timeline" role="list" aria-label="Calls by node">${nodes.map(
      ({ node }) => html`<div class="timeline-row" key=${node}><span class="muted">node ${node}</span><div class="timeline-bars">${shown
        .filter((call) => call.node === node)
        .map(
          (call) =>
            html`<i role="listitem" key=${`${call.task} ${call.rank}`} class=${call.ok === null ? "running" : call.ok ? "completed" : "failed"} style=${{ left: part(call.started_at), width: `max(2px, ${part(pool.started_at + (call.ended_at ?? end) - call.started_at)})` }} title=${`${call.name}${call.rank === null ? "" : `, rank ${call.rank}`}: ${duration((call.ended_at ?? end) - call.started_at)}${call.ok === false ? ", failed" : ""}`} aria-label=${call.name}></i>`,
        )}</div></div>`,
    )}</div></section>`;
}

/** @param {{title: string, heads: string[], rows: any[][]}} props */
function Table({ title, heads, rows }) {
  return html`<section class="card"><header><h2>${title}</h2></header>${
    rows.length
      ? html`<div class="scroll-x"><table class="plain" aria-label=${title}><thead><tr>${heads.map((head) => html`<th>${head}</th>`)}</tr></thead><tbody>${rows.map((row) => html`<tr>${row.map((cell) => html`<td>${cell}</td>`)}</tr>`)}</tbody></table></div>`
      : html`<div class="body muted">None.</div>`
  }</section>`;
}

/** @param {{id: string}} props */
export function PoolPage({ id }) {
  const { value, problem, reload } = useFresh(() => get(`/v1/pools/${encodeURIComponent(id)}`), id);
  const history = /** @type {History | null} */ (value);
  if (!history)
    return problem
      ? html`<${Problem} problem=${problem} retry=${reload} />`
      : html`<div class="bones" aria-busy="true"></div>`;
  const { pool, nodes, machines, events } = history;
  document.title = `${pool.name || pool.id} · skyward hub`;
  const tiles = [
    ["Spent", money(pool.spent_usd)],
    ["Price", pool.price_usd_per_hour ? `${money(pool.price_usd_per_hour)} an hour` : "free"],
    ["Nodes", `${pool.nodes}, ${pool.lost_nodes} lost, ${pool.replaced_nodes} replaced`],
    ["Calls", `${number(pool.calls)}, ${number(pool.failed)} failed`],
    ["Ready after", pool.ready_at ? duration(pool.ready_at - pool.started_at) : "not yet"],
  ];
  return html`<div class="crumbs"><a href="/pools">Pools</a> /</div>
    <div class="head"><h1>${pool.name || pool.id}</h1><${State} state=${pool.state} /><span class="muted grow">${pool.provider} · started ${ago(pool.started_at)} by ${pool.user}</span></div>
    ${pool.reason && html`<p class="lead">${pool.reason}</p>`}
    <div class="tiles">${tiles.map(([title, text]) => html`<div class="card tile" key=${title}><small>${title}</small><b>${text}</b></div>`)}</div>
    <div class="stack"><${Timeline} history=${history} />
    <div class="columns"><${Table} title="Nodes" heads=${["Node", "State", "Address", "Losses"]} rows=${nodes.map((node) => [node.node, html`<${Pill} status=${node.state} />`, node.address, node.losses])} />
      <${Table} title="Machines" heads=${["Node", "Machine", "Type", "Price an hour", "Lived"]} rows=${machines.map((one) => [one.node, one.instance, `${one.instance_type}${one.is_spot ? ", spot" : ""}`, money(one.price_usd_per_hour), duration((one.ended_at ?? Date.now()) - one.launched_at)])} /></div>
    <${Table} title="Events" heads=${["Time", "Event", "Node", "Detail"]} rows=${events.slice(-SHOWN).map((event) => [moment(event.at), html`<b>${event.kind}</b>`, event.node ?? "", html`<span class="muted">${JSON.stringify(event.detail)}</span>`])} /></div>`;
}
