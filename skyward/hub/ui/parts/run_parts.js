/** Parts of a run's page that read what HubLogger leaves: output, checkpoints, evaluations. */
import { artifact, get, points } from "../core/api.js";
import { bytes, moment, number } from "../core/format.js";
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

/** Tags by which a training names its checkpoints: step, digest of the manifest, place. */
const CHECKPOINT = /^skyward\.checkpoint\.(\d+)$/;

/** @param {Run} run */
function checkpointsOf(run) {
  return Object.entries(run.tags)
    .flatMap(([key, value]) => {
      const step = CHECKPOINT.exec(key)?.[1];
      if (!step) return [];
      /** @type {Record<string, any>} */
      let about = {};
      try {
        about = JSON.parse(value);
      } catch {
        about = { digest: value };
      }
      return [{ step: Number(step), ...about }];
    })
    .sort((a, b) => b.step - a.step);
}

/** @param {{run: Run}} props */
export function Checkpoints({ run }) {
  const checkpoints = /** @type {any[]} */ (checkpointsOf(run));
  if (!checkpoints.length) {
    return html`<${Empty} icon="save" title="No checkpoints"><p>A training with HubLogger names each checkpoint here once it is on disk.</p><${Paste} text=${`trainer = Trainer(..., callbacks=[hub.HubLogger(), Checkpoint("checkpoints")])`} /><//>`;
  }
  return html`<div class="card scroll-x"><table class="plain"><thead><tr><th class="number">Step</th><th>Written</th><th class="number">Size</th><th>Digest</th><th>Place</th></tr></thead>
    <tbody>${checkpoints.map(
      (
        one,
      ) => html`<tr><td class="number">${number(one.step)}</td><td>${moment(one.at)}</td><td class="number">${bytes(one.size)}</td>
      <td class="mono" title=${one.digest}>${String(one.digest ?? "").slice(0, 12)}</td><td class="mono">${one.place ?? one.path}</td></tr>`,
    )}</tbody></table></div>`;
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
