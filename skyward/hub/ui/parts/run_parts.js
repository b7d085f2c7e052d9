/** Parts of a run's page that read what HubLogger leaves: output, checkpoints, evaluations. */
import { artifact, get, points } from "../core/api.js";
import { bytes, number } from "../core/format.js";
import { html, useEffect, useRef } from "../core/html.js";
import { Empty, Paste, Problem, useLoaded } from "./widgets.js";

/** @typedef {import("../core/types.js").Run} Run */
/** @typedef {import("../core/types.js").Artifact} Artifact */

const OUTPUT_FOLDER = "output";
const TAIL_BYTES = 400_000;

/** @param {string} run */
async function readOutput(run) {
  const { artifacts } = await get(`/v1/runs/${run}/artifacts`, { prefix: OUTPUT_FOLDER });
  const files = artifacts.filter((/** @type {Artifact} */ file) => !file.is_directory);
  return Promise.all(
    files.map(async (/** @type {Artifact} */ file) => {
      const text = await (await artifact(run, file.key)).slice(-TAIL_BYTES).text();
      return { name: file.key.slice(OUTPUT_FOLDER.length + 1), text };
    }),
  );
}

/** @param {{run: Run}} props */
export function Output({ run }) {
  const { value, problem, reload } = useLoaded(() => readOutput(run.id), run.id);
  const end = useRef(/** @type {HTMLPreElement | null} */ (null));
  useEffect(() => end.current?.scrollTo(0, end.current.scrollHeight), [value]);
  if (problem) return html`<${Problem} problem=${problem} retry=${reload} />`;
  if (value && !value.length) {
    return html`<${Empty} icon="file" title="No output was kept"><p>Files below the folder <code>output</code> of a run's artifacts are shown here:</p><${Paste} text=${`run.log_artifact("output/train.log", "train.log")`} /><//>`;
  }
  return html`<div class="stack">${value?.map(({ name, text }) => html`<section class="card" key=${name}><header><h2>${name}</h2></header><pre class="output" ref=${end}>${text}</pre></section>`)}</div>`;
}

/** Folder in which HubLogger keeps a file of facts about each checkpoint that became durable. */
const CHECKPOINT_FOLDER = "checkpoints";
const CHECKPOINT = /checkpoint-(\d+)\.json$/;
const CHECKPOINTS_SHOWN = 100;

/** @typedef {{step: number, path?: string, digest?: string, commit_id?: string, bytes?: number}} Checkpoint */

/** @param {string} run @returns {Promise<Checkpoint[]>} The newest first. */
async function readCheckpoints(run) {
  const { artifacts } = await get(`/v1/runs/${run}/artifacts`, { prefix: CHECKPOINT_FOLDER });
  const found = artifacts.flatMap((/** @type {Artifact} */ file) => {
    const step = CHECKPOINT.exec(file.key)?.[1];
    return step ? [{ key: file.key, step: Number(step) }] : [];
  });
  found.sort((/** @type {Checkpoint} */ a, /** @type {Checkpoint} */ b) => b.step - a.step);
  return Promise.all(
    found.slice(0, CHECKPOINTS_SHOWN).map(async (/** @type {{key: string, step: number}} */ { key, step }) => ({
      step,
      ...JSON.parse(await (await artifact(run, key)).text()),
    })),
  );
}

/** @param {{run: Run}} props */
export function Checkpoints({ run }) {
  const { value, problem, reload } = useLoaded(() => readCheckpoints(run.id), run.id);
  if (problem) return html`<${Problem} problem=${problem} retry=${reload} />`;
  if (value && !value.length) {
    return html`<${Empty} icon="save" title="No checkpoints"><p>A training with HubLogger names each checkpoint here once it is on disk.</p><${Paste} text=${`trainer = Trainer(..., callbacks=[hub.HubLogger()])`} /><//>`;
  }
  return html`<div class="card scroll-x"><table class="plain"><thead><tr><th class="number">Step</th><th class="number">Size</th><th>Digest</th><th>Place</th></tr></thead>
    <tbody>${value?.map((one) => html`<tr key=${one.step}><td class="number">${number(one.step)}</td><td class="number">${bytes(one.bytes)}</td>
      <td class="mono" title=${one.digest ?? one.commit_id}>${String(one.digest ?? one.commit_id ?? "").slice(0, 12)}</td><td class="mono">${one.path}</td></tr>`)}</tbody></table></div>`;
}

const EVALUATION = /^(eval|evaluation|test|val|validation)[/_]/;
const MOST = 60;

/** @param {string} run @param {string[]} keys */
async function readEvaluations(run, keys) {
  const columns = await Promise.all(keys.map((key) => points(run, key, { at_most: 2000 })));
  /** @type {Map<number, Map<string, number>>} */
  const rows = new Map();
  keys.forEach((key, i) =>
    columns[i].steps.forEach((step, at) =>
      rows.set(step, (rows.get(step) ?? new Map()).set(key, columns[i].values[at])),
    ),
  );
  return [...rows].sort(([a], [b]) => b - a);
}

/** @param {{run: Run, keys: string[]}} props */
export function Evaluations({ run, keys }) {
  const names = keys.filter((key) => EVALUATION.test(key)).slice(0, MOST);
  const last = run.metrics
    .filter(({ key }) => names.includes(key))
    .reduce((latest, { timestamp }) => Math.max(latest, timestamp), 0);
  const { value, problem, reload } = useLoaded(
    () => readEvaluations(run.id, names),
    `${run.id} ${names.join(" ")} ${last}`,
  );
  if (problem) return html`<${Problem} problem=${problem} retry=${reload} />`;
  if (!names.length)
    return html`<${Empty} icon="compare" title="No evaluations"><p>Metrics whose names begin with <code>eval/</code> are listed here by the step that they score.</p><${Paste} text=${`run.log_metrics({"eval/accuracy": accuracy}, step=step)`} /><//>`;
  return html`<div class="card scroll-x"><table class="plain"><thead><tr><th class="number">Step</th>${names.map((name) => html`<th class="number">${name.replace(EVALUATION, "")}</th>`)}</tr></thead>
    <tbody>${value?.slice(0, 1000).map(([step, row]) => html`<tr><td class="number">${number(step)}</td>${names.map((name) => html`<td class="number">${number(row.get(name))}</td>`)}</tr>`)}</tbody></table></div>`;
}
