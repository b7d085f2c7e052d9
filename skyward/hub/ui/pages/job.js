/** One job: attempts on a line of time, live output, cost, why it waits, its value, and the buttons that steer it. */
import { change, get } from "../core/api.js";
import { ago, bytes, duration, moment, money, number } from "../core/format.js";
import { html } from "../core/html.js";
import { navigate } from "../core/router.js";
import { objectiveNames, runOf, trialLines } from "../core/trials.js";
import { AttemptLines, saveText } from "../parts/attempt_lines.js";
import { useFresh, useNow, useSweep } from "../parts/fresh.js";
import { Icon } from "../parts/icon.js";
import { JobOutput } from "../parts/job_output.js";
import { ask, attempt, copyText, Empty, notify, Paste, Pill, Problem, Reason } from "../parts/widgets.js";

/** @typedef {import("../core/types.js").Job} Job */
/** @typedef {import("../core/types.js").JobHistory} JobHistory */
/** @typedef {{title: string, icon: string, done: string, question?: string, text?: string, danger?: boolean}} Action */

const [LOOK_MS, RUNS_LOOK_MS] = [2000, 10_000];
const MOST_TRIALS = 200;
const ACTIONS = /** @type {Record<string, Action>} */ ({
  save: { title: "Save", icon: "save", done: "It saves a checkpoint at its next step." },
  hold: { title: "Hold", icon: "hold", done: "It does not begin until it is released." },
  release: { title: "Release", icon: "release", done: "It begins when its turn comes." },
  retry: {
    title: "Retry",
    icon: "retry",
    done: "It is in the queue again.",
    question: "Run this job again?",
    text: "It goes back to the queue with all of its retries. Its error is forgotten, its output and checkpoints stay.",
  },
  cancel: {
    title: "Cancel job",
    icon: "abort",
    done: "It ends, and its machines with it.",
    question: "Cancel this job?",
    text: "It ends for good, without a checkpoint. Steps since the last one are lost.",
    danger: true,
  },
});
const DELETE = {
  title: "Delete this job?",
  text: "Its output, its value and its attempts are deleted for good. What it cost stays in the usage.",
  action: "Delete",
  danger: true,
};

/** Names of the actions that a job takes now. @param {Job} job */
function actionsOf({ status, is_held, ended_at, spec }) {
  if (ended_at) return status === "completed" ? [] : ["retry"];
  if (status === "queued") return [is_held ? "release" : "hold", "cancel"];
  return status === "running" && !spec.trials ? ["save", "cancel"] : ["cancel"];
}

/** @param {{job: Job, reload: () => void}} props */
function Buttons({ job, reload }) {
  const act = async (/** @type {string} */ name) => {
    const { title, question, text, danger, done } = ACTIONS[name];
    if (question && (await ask({ title: question, text, action: title, danger })) === null) return;
    if (await attempt(() => change("POST", `/v1/jobs/${job.id}/${name}`))) notify(done);
    reload();
  };
  const remove = async () => {
    if ((await ask(DELETE)) === null) return;
    if (await attempt(() => change("DELETE", `/v1/jobs/${job.id}`))) navigate("/jobs?view=over");
  };
  return html`<div class="buttons" role="group" aria-label="Steer the job">${actionsOf(job).map((name) => html`<button key=${name} class=${`button ${ACTIONS[name].danger ? "danger" : ""}`} onClick=${() => act(name)}><${Icon} name=${ACTIONS[name].icon} />${ACTIONS[name].title}</button>`)}
    ${job.ended_at && html`<button class="button danger" onClick=${remove}><${Icon} name="trash" />Delete</button>`}</div>`;
}

/** Most that the attempt that runs may still cost, in USD. @param {JobHistory} history @param {number} now */
function costToCome({ attempts }, now) {
  return attempts.reduce((sum, { ends_by, usd_per_hour }) => (ends_by ? sum + (usd_per_hour * Math.max(0, ends_by - now)) / 3_600_000 : sum), 0);
}

/** @param {{job: Job, history: JobHistory, now: number}} props */
function Tiles({ job, history, now }) {
  const last = history.attempts[history.attempts.length - 1];
  const budget = job.spec.budget_usd;
  const tiles = [
    ["Cost so far", `${money(job.cost_usd)}${budget ? ` of ${money(budget)}` : ""}`],
    ["Still to come, at most", job.ended_at ? "nothing" : last?.ends_by ? money(Math.max(0, Math.min(budget ? budget - job.cost_usd : Infinity, costToCome(history, now)))) : "not known before it runs"],
    ["Needs", history.needs],
    [job.ended_at ? "Lasted" : job.started_at ? "Runs for" : "Waits for", duration((job.ended_at ?? now) - (job.started_at ?? job.created_at))],
    ["Last checkpoint", `${last?.saved_at ? ago(last.saved_at, now) : "none yet"}${last?.late_at ? `, late: one each ${duration((job.spec.checkpoint_interval_s ?? 0) * 1000)}` : ""}`],
  ];
  return html`<div class="tiles">${tiles.map(([title, text]) => html`<div class="card tile" key=${title}><small>${title}</small><b>${text}</b></div>`)}</div>`;
}

/** @param {{job: Job}} props */
function Attempts({ job }) {
  if (!job.attempts.length) return null;
  return html`<section class="card"><header><h2>Attempts in words</h2></header><div class="scroll-x"><table class="plain" aria-label="Attempts in words"><thead><tr><th class="number">Number</th><th>Machines</th><th>Began</th><th>Ran</th><th>End</th><th>Why</th><th class="number">Output</th><th class="number">Cost</th></tr></thead>
    <tbody>${[...job.attempts].reverse().map((one) => html`<tr key=${one.number}><td class="number">${one.number}</td><td>${one.machines}, ${one.nodes.length ? `${one.nodes.length > 1 ? "nodes" : "node"} ${one.nodes.join(", ")}` : "no node"}</td><td class="fit">${moment(one.began_at)}</td>
      <td class="fit">${one.began_at ? duration((one.ended_at ?? Date.now()) - one.began_at) : ""}</td><td>${one.end ? one.end.replace("_", " ") : "goes on"}</td><td class="detail"><${Reason} text=${one.error} /></td><td class="number">${bytes(one.output_bytes)}</td><td class="number">${money(one.cost_usd)}</td></tr>`)}</tbody></table></div></section>`;
}

/** Trials of the sweep that this job runs, the newest first. @param {{job: Job, history: JobHistory, now: number}} props */
function Trials({ job, history, now }) {
  const { trials: isOverJobs, sweep: id } = job.spec;
  const load = () => (isOverJobs ? get("/v1/jobs", { sweep: id, limit: MOST_TRIALS }) : Promise.resolve({ jobs: [] }));
  const { value } = useFresh(load, `${job.id} ${job.status}`, [], LOOK_MS);
  const { sweep, search, trials } = useSweep(String(id));
  const lines = trialLines(trials, value?.jobs ?? [], history.events);
  if (!lines.length) return null;
  const names = sweep ? objectiveNames(sweep, search) : [];
  const tally = [...new Set(lines.map(({ state }) => state))].map((state) => `${lines.filter((line) => line.state === state).length} ${state.replace("_", " ")}`);
  return html`<section class="card"><header><h2 class="grow">Trials</h2><span class="muted">${tally.join(", ")}</span></header><div class="scroll-x"><table class="plain" aria-label="Trials"><thead><tr><th class="number">Trial</th>${isOverJobs && html`<th>Job</th>`}<th>State</th>${names.map((name) => html`<th class="number">${name}</th>`)}<th>Why</th><th>Last checkpoint</th>${isOverJobs && html`<th class="number">Attempts</th><th class="number">Cost</th>`}</tr></thead>
    <tbody>${lines.slice(0, MOST_TRIALS).map(({ number: trialNumber, trial, job: own, state, why, save }) => {
      const run = trial && runOf(trial);
      return html`<tr key=${trialNumber}><td class="number">${run ? html`<a href=${`/runs/${run}`}>${trialNumber}</a>` : trialNumber}</td>${isOverJobs && html`<td>${own && html`<a href=${`/jobs/${own.id}`}><b>${own.name}</b></a>`}</td>`}<td><${Pill} status=${state} /></td>${names.map((_, i) => html`<td class="number">${number(trial?.values?.[i])}</td>`)}
      <td class="detail"><${Reason} text=${why} /></td><td class="fit" title=${save && saveText(save)}>${save && `${save.save?.step ? `step ${save.save.step}, ` : ""}${ago(save.at, now)}`}</td>${isOverJobs && html`<td class="number">${own?.attempt_count}</td><td class="number">${own && money(own.cost_usd)}</td>`}</tr>`;
    })}</tbody></table></div></section>`;
}

/** @param {{job: Job, sizes: Record<string, number>}} props */
function Result({ job, sizes }) {
  const names = Object.keys(sizes);
  if (!names.length) return null;
  const call = names.includes("value") ? "result" : "exception";
  return html`<section class="card"><header><h2 class="grow">${names.includes("value") ? "Value" : "Exception"}</h2>${names.map((name) => html`<span class="muted">${bytes(sizes[name])}</span>`)}</header>
    <div class="body"><p>The hub keeps it packed and never unpacks it. Any program of the project can:</p><${Paste} text=${`from skyward import hub\n\nhub.job("${job.id}").${call}()`} /></div></section>`;
}

/** News for the owner of the job. @param {{deliveries: JobHistory["deliveries"]}} props */
function Deliveries({ deliveries }) {
  if (!deliveries.length) return null;
  return html`<section class="card"><header><h2>News</h2></header><div class="scroll-x"><table class="plain" aria-label="News"><thead><tr><th>News</th><th>To</th><th>At</th><th>Arrived</th><th class="number">Tries</th></tr></thead>
    <tbody>${deliveries.map((one) => html`<tr key=${one.id}><td>${one.kind.replace("_", " ")}</td><td class="detail">${one.target}</td><td class="fit">${moment(one.at)}</td>
      <td class="detail">${one.delivered_at ? moment(one.delivered_at) : html`<${Reason} text=${`${one.next_at ? "not yet" : "given up"}${one.error ? `: ${one.error}` : ""}`} />`}</td><td class="number">${one.tries}</td></tr>`)}</tbody></table></div></section>`;
}

/** @param {{job: Job}} props */
function Runs({ job }) {
  const load = () => get("/v1/runs", { filter: `tags.\`skyward.job\` = '${job.id}'`, limit: 50 });
  const { value } = useFresh(load, `${job.id} ${job.attempt_count} ${job.status}`, [], RUNS_LOOK_MS);
  const runs = /** @type {import("../core/types.js").Run[]} */ (value?.runs ?? []);
  if (!runs.length) return null;
  return html`<section class="card"><header><h2>Runs</h2></header><table class="plain" aria-label="Runs"><tbody>${runs.map((run) => html`<tr key=${run.id}><td><a href=${`/runs/${run.id}`}><b>${run.name || run.id}</b></a></td><td><${Pill} status=${run.status} /></td><td class="fit muted">${ago(run.start_time)}</td></tr>`)}</tbody></table></section>`;
}

/** Fields of the request that say something. @param {Record<string, any>} spec */
function fieldsOf(spec) {
  const isEmpty = (/** @type {any} */ value) =>
    value === null || value === "" || value === 0 || value === false || (typeof value === "object" && !Object.keys(value).length);
  return Object.entries(spec).filter(([, value]) => !isEmpty(value));
}

/** @param {{job: Job}} props */
function Request({ job }) {
  const text = (/** @type {any} */ value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));
  return html`<section class="card"><header><h2>Request</h2></header><div class="body"><dl class="facts">
    ${job.spec.trial && html`<dt>Trial of</dt><dd><a href=${`/sweeps/${job.spec.trial.sweep}`}>sweep ${job.spec.trial.sweep}</a></dd>`}${job.spec.sweep && html`<dt>Runs</dt><dd><a href=${`/sweeps/${job.spec.sweep}`}>sweep ${job.spec.sweep}</a></dd>`}<dt>type</dt><dd>${job.type}</dd><dt>priority</dt><dd>${job.priority}</dd>
    ${fieldsOf(job.spec).map(([key, value]) => html`<dt>${key}</dt><dd class="mono">${text(value)}</dd>`)}
    <dt>Submitted</dt><dd>${moment(job.created_at)} by ${job.user}</dd>
    <dt>Id</dt><dd class="mono">${job.id} <button class="button bare small" onClick=${() => copyText(job.id).then(() => notify("The id is copied."))}>Copy</button></dd></dl></div></section>`;
}

/** What is to be said first: why it waits, or why it ended. @param {{job: Job}} props */
function Headline({ job }) {
  if (job.status === "failed" || job.status === "timed_out")
    return html`<div class="problem"><div class="grow"><b>${job.status === "failed" ? "The job failed." : "The job took too long."}</b><pre class="output">${job.why}</pre></div></div>`;
  const why = job.is_held ? "It is held; release it, and it begins when its turn comes." : job.why;
  return why ? html`<p class="lead" data-testid="why"><${Reason} text=${why} /></p>` : null;
}

/** @param {{id: string}} props */
export function JobPage({ id }) {
  const path = `/v1/jobs/${encodeURIComponent(id)}`;
  // No events: the output is a stream already, and a browser opens six connections for all of its tabs.
  const { value, problem, reload } = useFresh(() => Promise.all([get(path), get(`${path}/history`)]), id, [], LOOK_MS);
  const [job, history] = /** @type {[Job, JobHistory] | [null, null]} */ (value ?? [null, null]);
  const now = useNow(!job?.ended_at);
  if (!job) {
    if (problem?.status === 404)
      return html`<${Empty} icon="search" title="There is no such job"><p>It may be in another project, or it was deleted.</p><a class="button" href="/jobs">Go to the queue</a><//>`;
    return problem ? html`<${Problem} problem=${problem} retry=${reload} />` : html`<div class="bones" aria-busy="true"></div>`;
  }
  document.title = `${job.name} · skyward hub`;
  return html`<div class="crumbs"><a href=${job.ended_at ? "/jobs?view=over" : "/jobs"}>Jobs</a> /</div>
    <div class="head"><h1>${job.name}</h1><${Pill} status=${job.is_held && job.status === "queued" ? "held" : job.status} />
      <span class="muted grow since">${job.ended_at ? `ended ${ago(job.ended_at, now)}` : `submitted ${ago(job.created_at, now)}`} by ${job.user}</span><${Buttons} job=${job} reload=${reload} /></div>
    <${Headline} job=${job} />
    <${Tiles} job=${job} history=${history} now=${now} />
    <div class="stack"><${AttemptLines} job=${job} history=${history} now=${now} />
      ${job.spec.sweep && html`<${Trials} key=${job.id} job=${job} history=${history} now=${now} />`}
      <${JobOutput} key=${job.id} job=${job} />
      <${Attempts} job=${job} />
      <div class="columns"><${Request} job=${job} /><div class="stack"><${Result} job=${job} sizes=${history.result_sizes} /><${Deliveries} deliveries=${history.deliveries} /><${Runs} job=${job} /></div></div></div>`;
}
