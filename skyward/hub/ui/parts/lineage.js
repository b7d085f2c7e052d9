/** Where a run comes from and what came out of it, and what it cost: read from its tags, inputs and metrics. */
import { get } from "../core/api.js";
import { ago, duration, number, runDuration } from "../core/format.js";
import { html } from "../core/html.js";
import { Pill, Problem, useLoaded } from "./widgets.js";

/** @typedef {import("../core/types.js").Run} Run */
/** @typedef {[term: string, what: any]} Fact */

const PARENT = "mlflow.parentRunId";
const FORK = "skyward.fork.run";
const SYSTEM = "system/";
const VERSION = "skyward.version.";

/** Names and what they name; those without a value are left out. @param {{facts: Fact[], none: string}} props */
function Facts({ facts, none }) {
  const known = facts.filter(([, what]) => what);
  if (!known.length) return html`<div class="body muted">${none}</div>`;
  return html`<div class="body"><dl class="facts">${known.map(([term, what]) => html`<dt>${term}</dt><dd>${what}</dd>`)}</dl></div>`;
}

/** Digest and place of a checkpoint, as HubLogger tags it. @param {string | undefined} text */
function checkpointOf(text) {
  try {
    const { step, path, digest } = JSON.parse(text ?? "");
    return html`step ${number(step)} <span class="mono">${path}</span>${digest && html` <span class="muted mono">${digest.slice(0, 12)}</span>`}`;
  } catch {
    return text ?? "";
  }
}

/** @param {Run} run @returns {Promise<{from: Run | null, children: Run[]}>} */
async function readRelatives(run) {
  const parent = run.tags[FORK] ?? run.tags[PARENT];
  const [from, below] = await Promise.all([
    parent ? get(`/v1/runs/${encodeURIComponent(parent)}`).catch(() => null) : null,
    get("/v1/runs", { filter: `tags.\`${PARENT}\` = '${run.id}'`, limit: 50 }),
  ]);
  return { from, children: below.runs };
}

/** @param {Run} run */
const linkTo = (run) => html`<a href=${`/runs/${run.id}`}>${run.name || run.id}</a> <${Pill} status=${run.status} />`;

/** @param {{run: Run}} props */
export function Lineage({ run }) {
  const { value, problem, reload } = useLoaded(() => readRelatives(run), run.id);
  const { tags } = run;
  const from = tags[FORK]
    ? html`${value?.from ? linkTo(value.from) : html`<span class="mono">${tags[FORK]}</span>`} at step ${number(Number(tags["skyward.fork.step"]))}`
    : value?.from && linkTo(value.from);
  const versions = Object.entries(tags).filter(([key]) => key.startsWith(VERSION));
  const best = tags["skyward.best.metric"];
  const step = tags["skyward.best.step"];
  return html`${problem && html`<${Problem} problem=${problem} retry=${reload} />`}
    <div class="columns"><div class="stack">
      <section class="card"><header><h2>Comes from</h2></header><${Facts} none="" facts=${
        /** @type {Fact[]} */ ([
          [tags[FORK] ? "Forked from" : "Part of", from],
          ["Resumed", tags["skyward.resumed_at_step"] && `at step ${tags["skyward.resumed_at_step"]}`],
          ["Program", tags["mlflow.source.name"] && html`<span class="mono">${tags["mlflow.source.name"]}</span>`],
          ["Commit", tags["mlflow.source.git.commit"] && html`<span class="mono">${tags["mlflow.source.git.commit"]}</span>`],
          ["User", run.user_id],
          ["Experiment", html`<a href=${`/experiments/${run.experiment_id}`}>${run.experiment ?? run.experiment_id}</a>`],
        ])
      } /></section>
      <section class="card"><header><h2>Data</h2></header>${
        run.inputs?.length
          ? html`<div class="scroll-x"><table class="plain"><thead><tr><th>Dataset</th><th>Digest</th><th>Source</th></tr></thead><tbody>${run.inputs.map(({ name, digest, source }) => html`<tr key=${`${name} ${digest}`}><td>${name}</td><td class="mono">${digest}</td><td class="mono wrap">${source}</td></tr>`)}</tbody></table></div>`
          : html`<div class="body muted">No dataset was logged.</div>`
      }</section></div>
      <div class="stack">
      <section class="card"><header><h2>Came out of it</h2></header><${Facts} none="No checkpoint, and no run that is part of this one." facts=${
        /** @type {Fact[]} */ ([
          ["Best model", best && html`${number(Number(best))}${step && ` at step ${step}`} <span class="mono">${tags["skyward.best.checkpoint"]}</span>`],
          ["Last checkpoint", checkpointOf(tags["skyward.checkpoint"])],
          ["Runs", value?.children.length && html`<ul class="runs-below">${value.children.map((child) => html`<li key=${child.id}>${linkTo(child)} <span class="muted">${ago(child.start_time)}</span></li>`)}</ul>`],
        ])
      } /></section>
      <section class="card"><header><h2>Versions</h2></header><${Facts} none="No version was logged." facts=${versions.map(([key, version]) => [key.slice(VERSION.length), html`<span class="mono">${version}</span>`])} /></section></div></div>`;
}

/** Numbers of the ranks whose load was sampled. @param {Run} run */
function ranksOf(run) {
  const keys = [...run.metrics.map(({ key }) => key), ...Object.keys(run.system_metrics ?? {})];
  return new Set(keys.flatMap((key) => /\.?rank[._]?(\d+)/.exec(key)?.[1] ?? [])).size;
}

/** @param {{run: Run, now: number}} props */
export function Cost({ run, now }) {
  const ranks = ranksOf(run);
  const passed = (run.end_time ?? now) - run.start_time;
  const usd = /(^|[._/])(usd|price|cost|spent|spending)([._/]|$)/i;
  const tags = Object.entries(run.tags).filter(([key]) => usd.test(key));
  const metrics = run.metrics.filter(({ key }) => usd.test(key));
  const money = /** @type {Fact[]} */ ([
    ...metrics.map(({ key, value }) => [key.replace(SYSTEM, ""), number(value)]),
    ...tags.map(([key, value]) => [key.replace("skyward.", ""), value]),
  ]);
  return html`<div class="columns">
    <section class="card"><header><h2>Time</h2></header><${Facts} none="" facts=${
      /** @type {Fact[]} */ ([
        ["Duration", runDuration(run, now)],
        ["Ranks", ranks && number(ranks)],
        ["Time of all ranks", ranks && duration(ranks * passed)],
        ["GPU", run.tags["skyward.gpu"]],
      ])
    } /></section>
    <section class="card"><header><h2>Money</h2></header><${Facts} facts=${money} none="No price is known. A run on a rented pool has one; or log a metric such as cost_usd." /></section></div>`;
}
