/** One sweep: its best trial, history, parallel coordinates, slices, importance, and all of its trials. */
import { change, get } from "../core/api.js";
import { ago, count, duration, number } from "../core/format.js";
import { html, useMemo, useState } from "../core/html.js";
import { query, setQuery } from "../core/router.js";
import { isDark, themeChanges } from "../core/session.js";
import { asRun, bestTrials, endOf, objectiveNames, paramsOf, paramText, runOf, valueOf } from "../core/trials.js";
import { useSweep } from "../parts/fresh.js";
import { Icon } from "../parts/icon.js";
import { Parallel } from "../parts/parallel.js";
import { History, Importance, shade, Slices } from "../parts/sweep_plots.js";
import { ask, attempt, Empty, notify, Paste, Pill, Problem, Segments, useLoaded } from "../parts/widgets.js";

/** @typedef {import("../core/types.js").Sweep} Sweep */
/** @typedef {import("../core/types.js").Search} Search */
/** @typedef {import("../core/types.js").Trial} Trial */

const SHOWN = 200;
const LINES = 500;

/** Trials with a value, as lines that are darker the better they are. @param {Trial[]} trials @param {string[]} names @param {number} objective @param {string} direction */
function linesOf(trials, names, objective, direction) {
  const style = getComputedStyle(document.documentElement);
  const ink = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
  const rows = trials.flatMap((trial) => (valueOf(trial, objective) === null ? [] : [{ trial, value: Number(valueOf(trial, objective)) }]));
  rows.sort((a, b) => (direction === "maximize" ? a.value - b.value : b.value - a.value));
  const shown = rows.slice(-LINES); // the best ones, drawn last
  return shown.map(({ trial }, i) => ({ run: asRun(trial, names), color: 0, paint: shade(i / Math.max(1, shown.length - 1), ink) }));
}

/** @param {{search: Search, reload: () => void}} props */
function Stop({ search, reload }) {
  if (!["queued", "running", "interrupted"].includes(search.status)) return null;
  const stop = async () => {
    const text = "No trial begins, and running ones end at their next report. Start it again under its name to go on.";
    if ((await ask({ title: "Stop this sweep?", text, action: "Stop", danger: true })) === null) return;
    if (await attempt(() => change("POST", `/v1/hpo/${search.id}/cancel`))) notify("The sweep ends.");
    reload();
  };
  return html`<button class="button danger" onClick=${stop}><${Icon} name="stop" />Stop</button>`;
}

/** @param {{search: Search}} props */
function Configuration({ search: { config, job, run } }) {
  const isSaid = (/** @type {any} */ value) => value !== null && value !== "" && (typeof value !== "object" || Object.keys(value).length > 0);
  return html`<section class="card"><header><h2>Configuration</h2></header><div class="body"><dl class="facts">
    ${job && html`<dt>Job</dt><dd><a class="mono" href=${`/jobs/${job}`}>${job.slice(0, 8)}</a></dd>`}${run && html`<dt>Run</dt><dd><a class="mono" href=${`/runs/${run}`}>${run.slice(0, 8)}</a></dd>`}
    ${Object.entries(config).filter(([, value]) => isSaid(value)).map(([key, value]) => html`<dt>${key}</dt><dd class="mono">${typeof value === "string" ? value : JSON.stringify(value)}</dd>`)}</dl></div></section>`;
}

/** @param {{trial: Trial, names: string[], sweep: Sweep}} props */
function Best({ trial, names, sweep }) {
  const params = paramsOf(trial);
  const run = runOf(trial);
  const text = `${JSON.stringify(params, null, 2)}`;
  return html`<section class="card" aria-label="Best trial"><header><h2 class="grow">${sweep.directions.length > 1 ? "One of the best" : "Best"}: trial ${trial.number}</h2>${run && html`<a href=${`/runs/${run}`}>its run</a>`}</header>
    <div class="body"><dl class="facts">${names.map((name, i) => html`<dt>${name}</dt><dd><b>${number(trial.values?.[i])}</b></dd>`)}${Object.entries(params).map(([name, value]) => html`<dt>${name}</dt><dd class="mono">${typeof value === "number" ? number(value) : paramText(value)}</dd>`)}</dl>
      <${Paste} text=${text} /></div></section>`;
}

/** @param {{trials: Trial[], names: string[], sweep: Sweep, objective: number}} props */
function Trials({ trials, names, sweep, objective }) {
  const [shown, setShown] = useState(SHOWN);
  const params = [...new Set(trials.flatMap((trial) => Object.keys(trial.params)))].sort();
  const ordered = useMemo(() => {
    const worst = sweep.directions[objective] === "maximize" ? -Infinity : Infinity;
    const sign = sweep.directions[objective] === "maximize" ? -1 : 1;
    return [...trials].sort((a, b) => sign * ((valueOf(a, objective) ?? worst) - (valueOf(b, objective) ?? worst)) || a.number - b.number);
  }, [trials, objective]);
  return html`<section class="card"><header><h2 class="grow">Trials</h2><span class="muted">the best first</span></header><div class="scroll-x"><table class="plain" aria-label="Trials"><thead><tr><th class="number">Trial</th><th>State</th>${names.map((name) => html`<th class="number">${name}</th>`)}${params.map((name) => html`<th class="number">${name}</th>`)}<th>Took</th></tr></thead>
    <tbody>${ordered.slice(0, shown).map((trial) => {
      const values = paramsOf(trial);
      const run = runOf(trial);
      return html`<tr key=${trial.id} id=${`trial-${trial.id}`}><td class="number">${run ? html`<a href=${`/runs/${run}`}>${trial.number}</a>` : trial.number}</td><td title=${endOf(trial)}><${Pill} status=${trial.state} /></td>${names.map((_, i) => html`<td class="number">${number(trial.values?.[i])}</td>`)}${params.map((name) => html`<td class="number">${name in values ? (typeof values[name] === "number" ? number(values[name]) : paramText(values[name])) : ""}</td>`)}<td class="fit muted">${trial.started_us && trial.ended_us ? duration((trial.ended_us - trial.started_us) / 1000) : ""}</td></tr>`;
    })}</tbody></table></div>
    ${trials.length > shown && html`<div class="body"><button class="button" onClick=${() => setShown(shown + SHOWN)}>Show more</button></div>`}</section>`;
}

/** Bring a trial's line of the table into sight. @param {string} id */
function show(id) {
  document.getElementById(`trial-${id}`)?.scrollIntoView({ block: "center" });
}

/** @param {{sweep: Sweep, search: Search | null, trials: Trial[]}} props */
function Parts({ sweep, search, trials }) {
  const names = objectiveNames(sweep, search);
  const objective = Math.min(names.length - 1, Math.max(0, Number(query.value.get("objective") ?? 0) || 0));
  const direction = sweep.directions[objective];
  const best = useMemo(() => bestTrials(sweep, trials), [sweep.version]);
  const lines = useMemo(() => linesOf(trials, names, objective, direction), [sweep.version, objective, isDark(), themeChanges.value]);
  const completed = trials.filter(({ state }) => state === "completed").length;
  const { value: importance } = useLoaded(() => get(`/v1/sweeps/${sweep.id}/importance`, { objective }), `${sweep.id} ${objective} ${completed}`);
  const states = /** @type {Trial["state"][]} */ (["completed", "pruned", "failed", "running", "waiting"]);
  const tally = states.map((state) => [state, trials.filter((trial) => trial.state === state).length]).filter(([, several]) => several);
  const props = { trials, objective, name: names[objective], direction, open: show };
  return html`<div class="tools">${names.length > 1 && html`<${Segments} label="Objective" value=${String(objective)} options=${names.map((name, i) => [String(i), name])} choose=${(/** @type {string} */ chosen) => setQuery({ objective: chosen })} />`}
      <span class="tags">${tally.map(([state, several]) => html`<span class="tag" key=${state}>${several} ${state}</span>`)}</span>${best.length > 1 && html`<span class="muted">${count(best.length, "trial")} that no other one beats</span>`}</div>
    <div class="stack"><div class="columns"><div>${best.length ? html`<${Best} trial=${best[0]} names=${names} sweep=${sweep} />` : html`<div class="card"><div class="body muted">No trial is complete yet.</div></div>`}</div><div class="stack"><${Importance} answer=${importance} />${search && html`<${Configuration} search=${search} />`}</div></div>
      <div><${History} ...${props} /></div>
      ${lines.length > 0 && html`<div><${Parallel} runs=${lines} label=${(/** @type {any} */ run) => run.name} open=${show} /></div>`}
      <div><${Slices} ...${props} /></div>
      <${Trials} trials=${trials} names=${names} sweep=${sweep} objective=${objective} /></div>`;
}

/** @param {{id: string}} props */
export function SweepPage({ id }) {
  const { sweep, search, trials, problem, reload } = useSweep(id);
  if (!sweep) {
    if (problem?.status === 404)
      return html`<${Empty} icon="search" title="There is no such sweep"><p>It may be in another project, or it was deleted.</p><a class="button" href="/sweeps">Go to the sweeps</a><//>`;
    return problem ? html`<${Problem} problem=${problem} retry=${reload} />` : html`<div class="bones" aria-busy="true"></div>`;
  }
  const title = sweep.name || `sweep ${sweep.id}`;
  document.title = `${title} · skyward hub`;
  return html`<div class="crumbs"><a href="/sweeps">Sweeps</a> /</div>
    <div class="head"><h1>${title}</h1>${search && html`<${Pill} status=${search.status} />`}<span class="muted grow">${count(trials.length, "trial")} · begun ${ago(sweep.created_at)} by ${sweep.owner}</span>${search && html`<${Stop} search=${search} reload=${reload} />`}</div>
    ${trials.length ? html`<${Parts} sweep=${sweep} search=${search} trials=${trials} />` : html`<div class="card"><${Empty} icon="sweeps" title="No trials yet"><p>Trials appear here as soon as a worker asks for one.</p><//></div>${search && html`<div class="below"><${Configuration} search=${search} /></div>`}`}`;
}
