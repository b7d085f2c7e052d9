/** Runs of an experiment, or of all: a table that scrolls through 100,000 of them. */
import { change, get } from "../core/api.js";
import { columnOf, columnsIn, FIXED_COLUMNS, usualColumns } from "../core/columns.js";
import { count } from "../core/format.js";
import { html, useEffect, useMemo, useState } from "../core/html.js";
import { navigate, query, setQuery } from "../core/router.js";
import { RunList } from "../core/run_list.js";
import { Icon } from "../parts/icon.js";
import { RunGrid } from "../parts/run_grid.js";
import { ask, attempt, copyText, Empty, Menu, notify, Paste, Problem, Segments, useLoaded } from "../parts/widgets.js";
import { firstLines } from "./experiments.js";

const REFRESH_MS = 5000;
const USUAL_ORDER = "attributes.start_time DESC";

/** State of the view, as the address says it. @param {string | undefined} experiment */
function viewOf(experiment) {
  const asked = query.value;
  return {
    experiments: experiment ? [experiment] : asked.getAll("experiment"),
    filter: asked.get("filter") ?? "",
    order: asked.get("order") ?? USUAL_ORDER,
    group: asked.get("group") ?? "",
    view: asked.get("view") ?? "active",
  };
}

/** @param {ReturnType<typeof viewOf>} view */
function useRunList(view) {
  const [, setTurn] = useState(0);
  const list = useMemo(() => new RunList(view, () => setTurn((turn) => turn + 1)), [JSON.stringify(view)]);
  useEffect(() => {
    list.want(0, 0);
    const timer = window.setInterval(() => document.visibilityState === "visible" && void list.refresh(), REFRESH_MS);
    return () => {
      window.clearInterval(timer);
      list.close();
    };
  }, [list]);
  return list;
}

/** The filter box. It searches when Enter is pressed or the field is left. @param {{filter: string, problem: any}} props */
function Filter({ filter, problem }) {
  const search = (/** @type {any} */ event) => setQuery({ filter: event.target.value.trim() });
  return html`<div class="search code"><${Icon} name="search" />
    <input type="search" id="filter" value=${filter} aria-label="Filter" aria-invalid=${String(Boolean(problem))} aria-describedby="filter-problem"
      spellcheck=${false} autocomplete="off" placeholder="metrics.loss < 0.1 and params.optimizer = 'adam'" onChange=${search} onSearch=${search} /></div>`;
}

/** @param {{found: ReturnType<typeof columnsIn>, chosen: string[]}} props */
function ColumnMenu({ found, chosen }) {
  const [text, setText] = useState("");
  const matches = (/** @type {string} */ id) => id.toLowerCase().includes(text.toLowerCase());
  const toggle = (/** @type {string} */ id) =>
    setQuery({ columns: (chosen.includes(id) ? chosen.filter((other) => other !== id) : [...chosen, id]).join(",") });
  const part = (/** @type {string} */ title, /** @type {string[]} */ ids) => {
    const shown = ids.filter(matches).slice(0, 200);
    return (
      shown.length > 0 &&
      html`<h3>${title}</h3>${shown.map(
        (id) =>
          html`<label><input type="checkbox" checked=${chosen.includes(id)} onChange=${() => toggle(id)} /><span title=${id}>${columnOf(id).title}</span></label>`,
      )}`
    );
  };
  return html`<${Menu} label=${html`<${Icon} name="columns" />Columns`} title="Choose columns">
    <input type="search" placeholder="Search columns" aria-label="Search columns" value=${text} onInput=${(/** @type {any} */ event) => setText(event.target.value)} />
    ${part("Run", FIXED_COLUMNS)}${part("Metrics", found.metrics)}${part("Parameters", found.params)}${part("Tags", found.tags)}
    <button class="button small bare" onClick=${() => setQuery({ columns: null })}>Usual columns</button><//>`;
}

/** @param {{found: ReturnType<typeof columnsIn>, group: string}} props */
function GroupMenu({ found, group }) {
  const choices = ["", "status", "user_id", ...found.params, ...found.tags];
  return html`<label class="inline"><span class="hidden-text">Group by</span><select value=${group} title="Group by"
    onChange=${(/** @type {any} */ event) => setQuery({ group: event.target.value })}>
    ${choices.map((id) => html`<option value=${id}>${id ? `by ${columnOf(id).title}` : "No groups"}</option>`)}
    ${group && !choices.includes(group) && html`<option value=${group}>by ${columnOf(group).title}</option>`}</select></label>`;
}

/** @param {{picked: Set<string>, clear: () => void, isBin: boolean, reload: () => void}} props */
function PickedTools({ picked, clear, isBin, reload }) {
  if (!picked.size) return null;
  const ids = [...picked];
  const all = async (/** @type {(id: string) => Promise<any>} */ action, /** @type {string} */ said) => {
    if (await attempt(() => Promise.all(ids.map(action)))) notify(`${count(ids.length, "run")} ${said}.`);
    clear();
    reload();
  };
  const bin = async () => {
    const text = "For 30 days, you can restore them under Deleted.";
    if ((await ask({ title: `Delete ${count(ids.length, "run")}?`, text, action: "Delete", danger: true })) === null)
      return;
    await all((id) => change("DELETE", `/v1/runs/${id}`), "deleted");
  };
  return html`<div class="tools" role="toolbar" aria-label="Selected runs"><b>${count(ids.length, "run")} selected</b>
    ${
      !isBin &&
      html`<button class="button primary small" onClick=${() => navigate(`/compare?${new URLSearchParams(ids.map((id) => ["run", id]))}`)}><${Icon} name="compare" />Compare</button>
      <button class="button small danger" onClick=${bin}>Delete</button>`
    }
    ${isBin && html`<button class="button small" onClick=${() => all((id) => change("POST", `/v1/runs/${id}/restore`), "restored")}>Restore</button>`}
    <button class="button small bare" onClick=${clear}>Clear</button></div>`;
}

/** @param {{view: ReturnType<typeof viewOf>}} props */
function NoRuns({ view }) {
  if (view.filter) {
    return html`<${Empty} icon="search" title="No run matches the filter"><button class="button" onClick=${() => setQuery({ filter: null })}>Remove the filter</button><//>`;
  }
  if (view.view === "deleted") return html`<${Empty} icon="trash" title="No run is deleted" />`;
  return html`<${Empty} icon="runs" title="No runs yet"><p>Paste this into a script or a notebook, and watch the run appear here:</p><${Paste} text=${firstLines()} /><//>`;
}

/** @param {{list: RunList}} props */
function Foot({ list }) {
  if (!list.isLoaded) return html`<div class="grid-foot">Loading…</div>`;
  const tally = list.isComplete ? count(list.known, "run") : `${count(list.known, "run")} loaded, more below`;
  return html`<div class="grid-foot"><span class="number" data-testid="tally">${tally}</span>
    <span class="muted keys"><span class="kbd">↑</span> <span class="kbd">↓</span> move · <span class="kbd">Space</span> select · <span class="kbd">Enter</span> open · <span class="kbd">/</span> filter</span></div>`;
}

/** @param {{experiment?: string}} props */
export function RunsPage({ experiment }) {
  const view = viewOf(experiment);
  const [picked, setPicked] = useState(/** @type {Set<string>} */ (new Set()));
  const [turn, setTurn] = useState(0);
  const list = useRunList(view);
  const { value: about } = useLoaded(
    () => (experiment ? get(`/v1/experiments/${experiment}`) : Promise.resolve(null)),
    experiment ?? "",
  );
  const found = useMemo(() => columnsIn(list.rowsHere()), [list, list.known, list.isLoaded]);
  const asked = query.value.get("columns");
  const chosen = asked ? asked.split(",") : usualColumns(found, view.experiments.length === 1);
  const title = experiment ? (about?.name ?? "…") : "Runs";
  document.title = `${title} · skyward hub`;

  useEffect(() => {
    const jump = (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "/" || event.target instanceof HTMLInputElement || event.target instanceof HTMLTextAreaElement)
        return;
      event.preventDefault();
      document.getElementById("filter")?.focus();
    };
    document.addEventListener("keydown", jump);
    return () => document.removeEventListener("keydown", jump);
  }, []);

  const reload = () => {
    setTurn(turn + 1);
    list.close();
    Object.assign(list, new RunList(list.search, list.changed));
    list.want(0, 0);
  };
  const isFilterWrong = list.problem && list.problem.status === 400 && view.filter;
  return html`<div class="head"><div class="grow">
      ${experiment && html`<div class="crumbs"><a href="/experiments">Experiments</a> /</div>`}<h1>${title}</h1></div>
      ${
        list.isStale &&
        html`<button class="button primary" onClick=${() => {
          list.isStale = false;
          reload();
        }}>Show new runs</button>`
      }
      <button class="button" title="This address shows this view to everybody of the project" onClick=${() => copyText(window.location.href).then(() => notify("The link to this view is copied."))}><${Icon} name="link" />Copy link</button></div>
    <div class="tools"><${Filter} filter=${view.filter} problem=${isFilterWrong} />
      <${GroupMenu} found=${found} group=${view.group} /><${ColumnMenu} found=${found} chosen=${chosen} />
      <${Segments} label="Which runs" value=${view.view} options=${[
        ["active", "Active"],
        ["deleted", "Deleted"],
      ]} choose=${(/** @type {string} */ choice) => setQuery({ view: choice === "active" ? null : choice })} /></div>
    ${isFilterWrong && html`<p class="field-error" id="filter-problem" role="alert">${list.problem.message} ${list.problem.fix}</p>`}
    ${list.problem && !isFilterWrong && html`<${Problem} problem=${list.problem} retry=${reload} />`}
    <${PickedTools} picked=${picked} clear=${() => setPicked(new Set())} isBin=${view.view === "deleted"} reload=${reload} />
    ${
      list.isComplete && list.known === 0
        ? html`<div class="card"><${NoRuns} view=${view} /></div>`
        : html`<${RunGrid} list=${list} columns=${chosen} order=${view.order} picked=${picked} pick=${setPicked} /><${Foot} list=${list} />`
    }`;
}
