/** Sweeps: searches for good parameters. In Optuna they are studies. */
import { get } from "../core/api.js";
import { ago, moment, number } from "../core/format.js";
import { html } from "../core/html.js";
import { objectiveNames } from "../core/trials.js";
import { useFresh } from "../parts/fresh.js";
import { Empty, Paste, Pill, Problem } from "../parts/widgets.js";

/** @typedef {import("../core/types.js").Sweep} Sweep */

const PAGE = 1000;

/** @typedef {import("../core/types.js").Search} Search */

/** All sweeps of the project, the newest first, and how far those are that skyward runs. */
async function readAll() {
  const [sweeps, { sweeps: searches }] = await Promise.all([readSweeps(), get("/v1/hpo", { limit: PAGE })]);
  return { sweeps, searches: new Map(searches.map((/** @type {Search} */ search) => [search.id, search])) };
}

/** @returns {Promise<Sweep[]>} */
async function readSweeps() {
  /** @type {Sweep[]} */
  const all = [];
  for (;;) {
    const { sweeps } = await get("/v1/sweeps", { after: all.at(-1)?.id ?? 0, limit: PAGE });
    all.push(...sweeps);
    if (sweeps.length < PAGE) return all.reverse();
  }
}

export function SweepsPage() {
  const { value, problem, reload } = useFresh(readAll, "sweeps", ["sweep"]);
  const sweeps = value?.sweeps;
  const searchOf = (/** @type {Sweep} */ { id }) => /** @type {Search | undefined} */ (value?.searches.get(id));
  document.title = "Sweeps · skyward hub";
  return html`<div class="head"><h1>Sweeps</h1></div>
    ${problem && html`<${Problem} problem=${problem} retry=${reload} />`}
    ${!sweeps && !problem && html`<div class="bones" aria-busy="true"></div>`}
    ${sweeps && !sweeps.length && html`<div class="card"><${Empty} icon="sweeps" title="No sweeps yet"><p>A sweep searches for good parameters. <code>hub.sweep</code> makes one, and a study of Optuna is one:</p><${Paste} text=${`import optuna\nfrom skyward import hub\n\nhub.connect("${window.location.origin}", token="...")\nstudy = optuna.create_study(storage=hub.optuna_storage(), study_name="first")\nstudy.optimize(lambda trial: trial.suggest_float("x", -1, 1) ** 2, n_trials=20)`} /><//></div>`}
    ${
      sweeps &&
      sweeps.length > 0 &&
      html`<div class="card scroll-x"><table class="plain" aria-label="Sweeps"><thead><tr><th>Name</th><th>State</th><th>Objective</th><th class="number">Trials</th><th class="optional">Owner</th><th>Begun</th></tr></thead>
      <tbody>${sweeps.map((sweep) => html`<tr key=${sweep.id}><td><a href=${`/sweeps/${sweep.id}`}><b>${sweep.name || `sweep ${sweep.id}`}</b></a></td><td>${searchOf(sweep) ? html`<${Pill} status=${searchOf(sweep)?.status} />` : html`<span class="muted">a study</span>`}</td><td>${objectiveNames(sweep, searchOf(sweep)).map((name, i) => `${sweep.directions[i]} ${name}`).join(", ")}</td><td class="number">${number(sweep.trials)}</td><td class="optional">${sweep.owner}</td><td class="fit muted" title=${moment(sweep.created_at)}>${ago(sweep.created_at)}</td></tr>`)}</tbody></table></div>`
    }`;
}
