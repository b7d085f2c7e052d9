/** One run: live curves, parameters, artifacts, output, and the buttons that steer its training. */
import { change, get } from "../core/api.js";
import { ago, count, moment, number, runDuration } from "../core/format.js";
import { html, useEffect, useMemo, useRef, useState } from "../core/html.js";
import { LiveRun } from "../core/live.js";
import { query } from "../core/router.js";
import { ChartTools, lookOf } from "../parts/chart_tools.js";
import { Commands } from "../parts/commands.js";
import { Artifacts } from "../parts/artifacts.js";
import { Checkpoints, Evaluations, Output } from "../parts/run_parts.js";
import { useNow } from "../parts/fresh.js";
import { Icon } from "../parts/icon.js";
import { Cost, Lineage } from "../parts/lineage.js";
import { Sections } from "../parts/sections.js";
import { loadUPlot } from "../parts/uplot.js";
import { ask, attempt, copyText, Empty, notify, Paste, Pill, Problem } from "../parts/widgets.js";

/** @typedef {import("../core/types.js").Run} Run */

const SYSTEM = "system/";
const RELOAD_MS = 250;

/** The run, fetched again when an event says that it changed. @param {string} id */
function useRun(id) {
  const [run, setRun] = useState(/** @type {Run | null} */ (null));
  const [problem, setProblem] = useState(/** @type {any} */ (null));
  const [live, setLive] = useState(/** @type {LiveRun | null} */ (null));
  const [keys, setKeys] = useState(/** @type {string[]} */ ([]));
  const timer = useRef(0);
  const load = () => get(`/v1/runs/${encodeURIComponent(id)}`).then(setRun, setProblem);
  useEffect(() => {
    const followed = new LiveRun(id, {
      news: () => {
        window.clearTimeout(timer.current);
        timer.current = window.setTimeout(load, RELOAD_MS);
      },
      keys: (fresh) =>
        setKeys((known) => (fresh.every((key) => known.includes(key)) ? known : [...new Set([...known, ...fresh])])),
    });
    setLive(followed);
    void load();
    loadUPlot().catch(() => {}); // beside the run; a chart that lacks it says so
    return () => {
      window.clearTimeout(timer.current);
      followed.close();
    };
  }, [id]);
  const all = useMemo(
    () =>
      [
        ...new Set([...(run?.metrics ?? []).map(({ key }) => key), ...Object.keys(run?.system_metrics ?? {}).map((key) => SYSTEM + key), ...keys]),
      ].sort(),
    [run, keys],
  );
  return { run, problem, live, keys: all, load };
}

/** @param {{values: Record<string, string>, none: string}} props */
function Table({ values, none }) {
  const [text, setText] = useState("");
  const entries = Object.entries(values).sort(([a], [b]) => a.localeCompare(b));
  if (!entries.length) return html`<div class="body muted">${none}</div>`;
  const shown = entries.filter(([key, value]) => `${key} ${value}`.toLowerCase().includes(text.toLowerCase()));
  return html`${entries.length > 12 && html`<div class="body"><input type="search" placeholder="Search" aria-label="Search" value=${text} onInput=${(/** @type {any} */ event) => setText(event.target.value)} /></div>`}
    <table class="plain"><tbody>${shown.map(([key, value]) => html`<tr key=${key}><td class="muted">${key}</td><td class="mono wrap">${value}</td></tr>`)}</tbody></table>`;
}

/** @param {{run: Run, now: number}} props */
function About({ run, now }) {
  return html`<section class="card"><header><h2>About</h2></header><div class="body"><dl class="facts">
    <dt>State</dt><dd><${Pill} status=${run.status} /></dd>
    <dt>Started</dt><dd>${moment(run.start_time)} <span class="muted">(${ago(run.start_time, now)})</span></dd>
    ${run.end_time && html`<dt>Ended</dt><dd>${moment(run.end_time)}</dd>`}
    <dt>Duration</dt><dd>${runDuration(run, now)}</dd>
    <dt>User</dt><dd>${run.user_id || "unknown"}</dd>
    ${run.heartbeat_at && html`<dt>Last heard</dt><dd>${ago(run.heartbeat_at, now)}</dd>`}
    <dt>Id</dt><dd class="mono">${run.id} <button class="button bare small" onClick=${() => copyText(run.id).then(() => notify("The id is copied."))}>Copy</button></dd></dl></div></section>`;
}

/** @param {{run: Run}} props */
function Latest({ run }) {
  const metrics = run.metrics.filter(({ key }) => !key.startsWith(SYSTEM));
  return html`<section class="card"><header><h2>Metrics</h2></header>${
    metrics.length === 0
      ? html`<div class="body muted">No metric was logged.</div>`
      : html`<div class="scroll-x"><table class="plain">
    <thead><tr><th>Metric</th><th class="number">Last value</th><th class="number">Step</th></tr></thead>
    <tbody>${metrics.slice(0, 500).map(({ key, value, step }) => html`<tr key=${key}><td>${key}</td><td class="number" title=${String(value)}>${number(value)}</td><td class="number muted">${number(step)}</td></tr>`)}</tbody></table></div>`
  }</section>`;
}

/** @param {{run: Run, now: number}} props */
function Overview({ run, now }) {
  const tags = Object.fromEntries(Object.entries(run.tags).filter(([key]) => !key.startsWith("mlflow.") && !key.startsWith("skyward.")));
  return html`<div class="columns"><div class="stack"><${About} run=${run} now=${now} /><${Latest} run=${run} /></div>
    <div class="stack"><section class="card"><header><h2>Parameters</h2></header><${Table} values=${run.params} none="No parameter was logged." /></section>
      <section class="card"><header><h2>Tags</h2></header><${Table} values=${tags} none="No tag was set." /></section></div></div>`;
}

/** @param {{run: Run, keys: string[], live: LiveRun | null, isSystem?: boolean}} props */
function Curves({ run, keys, live, isSystem = false }) {
  const shown = keys.filter((key) => key.startsWith(SYSTEM) === isSystem);
  // Ranks are sampled by the clock, so time is their usual axis.
  const usual = isSystem ? "relative" : "step";
  const { text, ...look } = lookOf(usual);
  const lines = useMemo(
    () => [{ id: run.id, label: run.name || run.id, color: 0, start: run.start_time }],
    [run.id, run.name, run.start_time],
  );
  if (!shown.length) {
    if (isSystem)
      return html`<${Empty} icon="runs" title="No system metrics"><p>A training logs them with HubLogger: CPU, memory and GPU of each rank.</p><//>`;
    if (run.end_time) return html`<${Empty} icon="runs" title="No metrics"><p>This run ended without any.</p><//>`;
    return html`<${Empty} icon="runs" title="No metrics yet"><p>Curves appear here as soon as the training logs a value:</p><${Paste} text=${`run.log_metrics({"loss": loss}, step=step)`} /><//>`;
  }
  return html`<${ChartTools} usual=${usual} /><${Sections} keys=${shown} text=${text} common=${{ lines, look, live, sync: run.id }} />`;
}

/** @param {string[]} keys @returns {[string, string, number | null][]} */
function tabsOf(keys) {
  const system = keys.filter((key) => key.startsWith(SYSTEM)).length;
  return [
    ["curves", "Curves", keys.length - system],
    ["overview", "Overview", null],
    ["artifacts", "Artifacts", null],
    ["output", "Output", null],
    ["system", "System", system],
    ["checkpoints", "Checkpoints", null],
    ["evaluations", "Evaluations", null],
    ["lineage", "Lineage", null],
    ["cost", "Cost", null],
  ];
}

/** @param {Run} run @param {() => void} load */
async function rename(run, load) {
  const name = await ask({ title: "Rename run", field: "Name", value: run.name, action: "Rename" });
  if (name && name !== run.name) await attempt(() => change("PATCH", `/v1/runs/${run.id}`, { name }));
  load();
}

/** @param {{id: string}} props */
export function RunPage({ id }) {
  const { run, problem, live, keys, load } = useRun(id);
  const now = useNow(run?.status === "running");
  if (!run && problem) {
    if (problem.status === 404)
      return html`<${Empty} icon="search" title="There is no such run"><p>It may be in another project, or it was deleted for good.</p><a class="button" href="/runs">Go to all runs</a><//>`;
    return html`<${Problem} problem=${problem} retry=${load} />`;
  }
  if (!run) return html`<div class="bones" aria-busy="true"></div>`;
  document.title = `${run.name || run.id} · skyward hub`;
  const tab = query.value.get("tab") ?? "curves";
  const parts = /** @type {Record<string, () => any>} */ ({
    curves: () => html`<${Curves} key="curves" run=${run} keys=${keys} live=${live} />`,
    overview: () => html`<${Overview} run=${run} now=${now} />`,
    artifacts: () => html`<${Artifacts} run=${run} />`,
    output: () => html`<${Output} run=${run} />`,
    system: () => html`<${Curves} key="system" run=${run} keys=${keys} live=${live} isSystem />`,
    checkpoints: () => html`<${Checkpoints} run=${run} />`,
    evaluations: () => html`<${Evaluations} run=${run} keys=${keys} />`,
    lineage: () => html`<${Lineage} run=${run} />`,
    cost: () => html`<${Cost} run=${run} now=${now} />`,
  });
  return html`<div class="crumbs"><a href="/experiments">Experiments</a> / <a href=${`/experiments/${run.experiment_id}`}>${run.experiment ?? run.experiment_id}</a> /</div>
    <div class="head"><h1>${run.name || run.id}</h1><${Pill} status=${run.status} />
      <span class="muted grow since" data-testid="since">${runDuration(run, now)}${run.status === "running" ? "" : ` · started ${ago(run.start_time, now)}`} · ${count(keys.length, "metric")}</span>
      <button class="button bare" onClick=${() => rename(run, load)}>Rename</button>
      <a class="button" href=${`/compare?run=${run.id}`}><${Icon} name="compare" />Compare</a>
      <${Commands} run=${run} /></div>
    ${run.lifecycle === "deleted" && html`<div class="problem"><div class="grow"><b>This run is deleted.</b></div><button class="button small" onClick=${() => attempt(() => change("POST", `/v1/runs/${run.id}/restore`)).then(load)}>Restore</button></div>`}
    ${run.status === "lost" && html`<div class="problem"><div><b>This run was last heard ${ago(run.heartbeat_at, now)}.</b>Its process may have died, or its network is away. It is running again as soon as it is heard again.</div></div>`}
    ${run.error && html`<div class="problem"><div class="grow"><b>The run failed.</b><pre class="output">${run.error}</pre></div></div>`}
    <nav class="tabs" aria-label="Parts of the run">${tabsOf(keys).map(([name, title, tally]) => html`<a href=${`/runs/${run.id}${name === "curves" ? "" : `?tab=${name}`}`} aria-current=${name === tab ? "page" : null}>${title}${tally !== null && html`<span class="tally">${tally}</span>`}</a>`)}</nav>
    ${(parts[tab] ?? parts.curves)()}`;
}
