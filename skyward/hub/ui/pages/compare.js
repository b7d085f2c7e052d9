/** Runs side by side: curves, differences of parameters, parallel coordinates, scatter. */
import { get } from "../core/api.js";
import { csvCell } from "../core/curves.js";
import { saveCsv } from "../core/download.js";
import { count, number, runDuration } from "../core/format.js";
import { html, useMemo, useState } from "../core/html.js";
import { query, setQuery } from "../core/router.js";
import { COLORS } from "../parts/chart.js";
import { ChartTools, lookOf } from "../parts/chart_tools.js";
import { Icon } from "../parts/icon.js";
import { Parallel } from "../parts/parallel.js";
import { Scatter } from "../parts/scatter.js";
import { Sections } from "../parts/sections.js";
import { Empty, Pill, Problem, useLoaded } from "../parts/widgets.js";

/** @typedef {import("../core/types.js").Run} Run */
/** @typedef {{run: Run, color: number}} Colored */

const PARTS = [
  ["curves", "Curves"],
  ["table", "Parameters and metrics"],
  ["parallel", "Parallel coordinates"],
  ["scatter", "Scatter"],
];

/** @param {string[]} ids @returns {Promise<Run[]>} */
async function readRuns(ids) {
  const { runs } = await get("/v1/runs/compare", { run: ids });
  const order = new Map(ids.map((id, i) => [id, i]));
  return runs.toSorted((/** @type {Run} */ a, /** @type {Run} */ b) => (order.get(a.id) ?? 0) - (order.get(b.id) ?? 0));
}

/** Label of a run: its name, and the beginning of its id where two have one name. @param {Run} run @param {Run[]} all */
function labelOf(run, all) {
  const isShared = all.some((other) => other !== run && other.name === run.name);
  return isShared || !run.name ? `${run.name} ${run.id.slice(0, 6)}`.trim() : run.name;
}

/** @param {{runs: Colored[], all: Run[], hidden: Set<string>, toggle: (id: string) => void}} props */
function Legend({ runs, all, hidden, toggle }) {
  return html`<div class="legend" role="group" aria-label="Runs">${runs.map(
    ({
      run,
      color,
    }) => html`<button class=${`legend-item ${hidden.has(run.id) ? "off" : ""}`} aria-pressed=${String(!hidden.has(run.id))} onClick=${() => toggle(run.id)} title="Show or hide">
      <span class=${`swatch k${color % COLORS}`}></span><b>${labelOf(run, all)}</b></button>`,
  )}</div>`;
}

/**
 * @param {Run[]} runs
 * @returns {{kind: string, key: string, values: string[], differs: boolean}[]} Differences first, in each kind.
 */
function tableOf(runs) {
  const rows = ["params", "metrics", "tags"].flatMap((kind) => {
    const columns = runs.map((run) =>
      kind === "metrics"
        ? new Map(run.metrics.map(({ key, value }) => [key, number(value)]))
        : new Map(Object.entries(run[/** @type {"params" | "tags"} */ (kind)])),
    );
    const keys = [...new Set(columns.flatMap((column) => [...column.keys()]))]
      .filter((key) => !key.startsWith("mlflow.") && !key.startsWith("system/"))
      .sort();
    return keys.map((key) => {
      const values = columns.map((column) => column.get(key) ?? "");
      return { kind, key, values, differs: new Set(values).size > 1 };
    });
  });
  const kinds = /** @type {Record<string, number>} */ ({ params: 0, metrics: 1, tags: 2 });
  return rows.sort((a, b) => kinds[a.kind] - kinds[b.kind] || Number(b.differs) - Number(a.differs));
}

/** @param {{runs: Colored[], all: Run[]}} props */
function Differences({ runs, all }) {
  const isAll = query.value.get("rows") === "all";
  const rows = useMemo(() => tableOf(all), [all]);
  const shown = isAll ? rows : rows.filter((row) => row.differs);
  const save = () => {
    const lines = [
      ["kind", "name", ...all.map((run) => labelOf(run, all))],
      ...rows.map(({ kind, key, values }) => [kind, key, ...values]),
    ];
    saveCsv(`${lines.map((line) => line.map(csvCell).join(",")).join("\n")}\n`, "comparison.csv");
  };
  const titles = /** @type {Record<string, string>} */ ({ params: "Parameters", metrics: "Metrics", tags: "Tags" });
  return html`<div class="tools"><label class="inline"><input type="checkbox" checked=${!isAll} onChange=${() => setQuery({ rows: isAll ? null : "all" })} />Only differences</label>
      <span class="grow"></span><button class="button small" onClick=${save}><${Icon} name="download" />CSV</button></div>
    ${Object.keys(titles).map((kind) => {
      const part = shown.filter((row) => row.kind === kind);
      const differing = rows.filter((row) => row.kind === kind && row.differs).length;
      return html`<section class="card section" key=${kind}><header><h2 class="grow">${titles[kind]}</h2><span class="muted">${count(differing, "difference")}</span></header>
        ${
          part.length > 0 &&
          html`<div class="scroll-x"><table class="plain side-by-side" aria-label=${titles[kind]}><thead><tr><th>Name</th>${runs.map(({ run, color }) => html`<th><span class=${`swatch k${color % COLORS}`} style=${{ display: "inline-block" }}></span> ${labelOf(run, all)}</th>`)}</tr></thead>
          <tbody>${part.map(({ key, values, differs }) => html`<tr key=${key} class=${differs && isAll ? "differs" : ""}><td class="muted">${key}</td>${values.map((value) => html`<td class="mono">${value}</td>`)}</tr>`)}</tbody></table></div>`
        }</section>`;
    })}`;
}

/** @param {{all: Run[]}} props */
function States({ all }) {
  return html`<div class="tiles">${all.slice(0, 8).map((run, i) => html`<a class="card tile" href=${`/runs/${run.id}`} key=${run.id}><small><span class=${`swatch k${i % COLORS}`} style=${{ display: "inline-block" }}></span> ${labelOf(run, all)}</small><${Pill} status=${run.status} /> <span class="muted">${runDuration(run)}</span></a>`)}</div>`;
}

/** @param {{runs: Colored[], all: Run[]}} props */
function Curves({ runs, all }) {
  const { text, ...look } = lookOf();
  const keys = useMemo(() => [...new Set(all.flatMap((run) => run.metrics.map(({ key }) => key)))].sort(), [all]);
  const lines = useMemo(
    () => runs.map(({ run, color }) => ({ id: run.id, label: labelOf(run, all), color, start: run.start_time })),
    [runs],
  );
  return html`<${ChartTools} /><${Sections} keys=${keys} text=${text} common=${{ lines, look, sync: "compare" }} />`;
}

export function ComparePage() {
  const ids = query.value.getAll("run");
  const part = query.value.get("part") ?? "curves";
  const {
    value: all,
    problem,
    reload,
  } = useLoaded(() => (ids.length ? readRuns(ids) : Promise.resolve([])), ids.join(" "));
  const [hidden, setHidden] = useState(/** @type {Set<string>} */ (new Set()));
  const colored = useMemo(() => (all ?? []).map((run, color) => ({ run, color })), [all]);
  const runs = useMemo(() => colored.filter(({ run }) => !hidden.has(run.id)), [colored, hidden]);
  document.title = "Compare · skyward hub";
  if (!ids.length) {
    return html`<h1>Compare</h1><${Empty} icon="compare" title="Choose the runs to compare"><p>Select two or more in a table of runs, then press Compare. The address of the comparison is a link that you can share.</p><a class="button primary" href="/runs">Go to the runs</a><//>`;
  }
  const toggle = (/** @type {string} */ id) => {
    const now = new Set(hidden);
    if (!now.delete(id)) now.add(id);
    setHidden(now);
  };
  return html`<div class="head"><h1 class="grow">Compare ${count(ids.length, "run")}</h1></div>
    ${problem && html`<${Problem} problem=${problem} retry=${reload} />`}
    <nav class="tabs" aria-label="Ways to compare">${PARTS.map(
      ([name, title]) =>
        html`<a href="#" onClick=${(/** @type {Event} */ event) => {
          event.preventDefault();
          setQuery({ part: name === "curves" ? null : name });
        }} aria-current=${name === part ? "page" : null}>${title}</a>`,
    )}</nav>
    ${all && part !== "table" && html`<${Legend} runs=${colored} all=${all} hidden=${hidden} toggle=${toggle} />`}
    ${all && part === "table" && html`<${States} all=${all} /><${Differences} runs=${colored} all=${all} />`}
    ${all && part === "curves" && html`<${Curves} runs=${runs} all=${all} />`}
    ${all && part === "parallel" && html`<${Parallel} runs=${runs} label=${(/** @type {Run} */ run) => labelOf(run, all)} />`}
    ${all && part === "scatter" && html`<${Scatter} runs=${runs} label=${(/** @type {Run} */ run) => labelOf(run, all)} />`}`;
}
