/** All experiments of the project. */
import { change, get } from "../core/api.js";
import { ago, moment } from "../core/format.js";
import { html, useEffect, useState } from "../core/html.js";
import { navigate, query, setQuery } from "../core/router.js";
import { Icon } from "../parts/icon.js";
import { ask, attempt, Empty, Paste, Problem, Segments } from "../parts/widgets.js";

/** @typedef {import("../core/types.js").Experiment} Experiment */

const PAGE = 100;

/** @param {string} text */
function nameFilter(text) {
  return text ? `name ILIKE '%${text.replaceAll("'", "")}%'` : "";
}

/** @param {string} text @param {string} view */
function useExperiments(text, view) {
  const [list, setList] = useState(
    /** @type {{items: Experiment[] | null, next: string | null, problem: any}} */ ({
      items: null,
      next: null,
      problem: null,
    }),
  );
  const load = async (/** @type {string | null} */ token, /** @type {Experiment[]} */ before) => {
    try {
      const page = await get("/v1/experiments", {
        filter: nameFilter(text),
        view,
        limit: PAGE,
        page_token: token,
        order_by: "last_update_time DESC",
      });
      setList({ items: [...before, ...page.experiments], next: page.next_page_token ?? null, problem: null });
    } catch (problem) {
      setList((now) => ({ ...now, problem }));
    }
  };
  useEffect(() => void load(null, []), [text, view]);
  return { ...list, reload: () => void load(null, []), more: () => void load(list.next, list.items ?? []) };
}

/** @param {() => void} reload */
async function create(reload) {
  const name = await ask({ title: "New experiment", field: "Name", action: "Create" });
  if (!name) return;
  const made = await attempt(() => change("POST", "/v1/experiments", { name }));
  if (made?.id) navigate(`/experiments/${made.id}`);
  else reload();
}

/** @param {Experiment} experiment @param {() => void} reload */
async function rename(experiment, reload) {
  const name = await ask({
    title: `Rename ${experiment.name}`,
    field: "Name",
    value: experiment.name,
    action: "Rename",
  });
  if (!name || name === experiment.name) return;
  await attempt(() => change("PATCH", `/v1/experiments/${experiment.id}`, { name }));
  reload();
}

/** @param {Experiment} experiment @param {() => void} reload */
async function bin(experiment, reload) {
  const isDeleted = experiment.lifecycle === "deleted";
  if (!isDeleted) {
    const text = "Its runs leave the lists too. For 30 days, you can restore all of it under Deleted.";
    if ((await ask({ title: `Delete ${experiment.name}?`, text, action: "Delete", danger: true })) === null) return;
  }
  const path = `/v1/experiments/${experiment.id}`;
  await attempt(() => (isDeleted ? change("POST", `${path}/restore`) : change("DELETE", path)));
  reload();
}

/** @param {{experiment: Experiment, reload: () => void}} props */
function Row({ experiment, reload }) {
  const tags = Object.entries(experiment.tags ?? {}).filter(([key]) => !key.startsWith("mlflow."));
  const isDeleted = experiment.lifecycle === "deleted";
  return html`<tr class=${isDeleted ? "deleted" : ""}>
    <td><a href=${`/experiments/${experiment.id}`}><b>${experiment.name}</b></a></td>
    <td class="optional"><div class="tags">${tags.slice(0, 4).map(([key, value]) => html`<span class="tag">${key}: ${value}</span>`)}</div></td>
    <td class="fit muted" title=${moment(experiment.updated_at)}>${ago(experiment.updated_at)}</td>
    <td class="actions">
      ${!isDeleted && html`<button class="button small bare" onClick=${() => rename(experiment, reload)}>Rename</button>`}
      <button class="button small bare icon-only" aria-label=${`${isDeleted ? "Restore" : "Delete"} ${experiment.name}`} title=${isDeleted ? "Restore" : "Delete"}
        onClick=${() => bin(experiment, reload)}><${Icon} name=${isDeleted ? "restore" : "trash"} /></button></td></tr>`;
}

/** First lines for somebody whose hub is empty. */
export function firstLines() {
  return `from skyward import hub

hub.connect("${window.location.origin}", token="...")
with hub.start_run(experiment="my first experiment") as run:
    for step in range(100):
        run.log_metrics({"loss": 1 / (step + 1)}, step=step)`;
}

function NothingYet() {
  return html`<${Empty} icon="experiments" title="No experiments yet">
    <p>An experiment is a named group of runs. It appears here with its first run. Make a <a href="/tokens">token</a>, then paste this into a script or a notebook:</p>
    <${Paste} text=${firstLines()} />
    <p>Scripts that use MLflow need two variables and no other change:</p>
    <${Paste} text=${`export MLFLOW_TRACKING_URI=${window.location.origin}\nexport MLFLOW_TRACKING_TOKEN=...`} />
  <//>`;
}

export function ExperimentsPage() {
  const text = query.value.get("name") ?? "";
  const view = query.value.get("view") ?? "active";
  const { items, next, problem, reload, more } = useExperiments(text, view);
  document.title = "Experiments · skyward hub";
  return html`<div class="head"><h1 class="grow">Experiments</h1>
      <button class="button primary" onClick=${() => create(reload)}><${Icon} name="plus" />New experiment</button></div>
    <div class="tools"><div class="search"><${Icon} name="search" />
      <input type="search" placeholder="Search by name" aria-label="Search by name" value=${text}
        onInput=${(/** @type {any} */ event) => setQuery({ name: event.target.value })} /></div>
      <${Segments} label="Which experiments" value=${view} options=${[
        ["active", "Active"],
        ["deleted", "Deleted"],
      ]}
        choose=${(/** @type {string} */ chosen) => setQuery({ view: chosen === "active" ? null : chosen })} /></div>
    ${problem && html`<${Problem} problem=${problem} retry=${reload} />`}
    <div class="card">${
      items &&
      items.length === 0 &&
      (text || view !== "active"
        ? html`<${Empty} icon="search" title=${text ? "No experiment has this name" : "Nothing is deleted"} />`
        : html`<${NothingYet} />`)
    }
      ${
        items &&
        items.length > 0 &&
        html`<div class="scroll-x"><table class="plain">
        <thead><tr><th>Name</th><th class="optional">Tags</th><th>Last change</th><th></th></tr></thead>
        <tbody>${items.map((experiment) => html`<${Row} key=${experiment.id} experiment=${experiment} reload=${reload} />`)}</tbody></table></div>`
      }
      ${!items && !problem && html`<div class="body"><div class="bones"></div></div>`}</div>
    ${next && html`<p><button class="button" onClick=${more}>Show more</button></p>`}`;
}
