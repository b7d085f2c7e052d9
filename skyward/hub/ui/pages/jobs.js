/** Jobs: the queue in its order, with why each job waits and the devices that jobs hold; and the jobs that are over. */
import { get } from "../core/api.js";
import { ago, clock, count, duration, moment, money } from "../core/format.js";
import { html, useEffect, useState } from "../core/html.js";
import { query, setQuery } from "../core/router.js";
import { me } from "../core/session.js";
import { DeviceLines } from "../parts/device_lines.js";
import { useFresh, useNow } from "../parts/fresh.js";
import { Icon } from "../parts/icon.js";
import { Empty, Paste, Pill, Problem, Reason, Segments } from "../parts/widgets.js";

/** @typedef {import("../core/types.js").QueuedJob} QueuedJob */
/** @typedef {import("../core/types.js").Queue} Queue */

const MOST = 500;
const PAGE = 50;
const OVER = ["completed", "failed", "cancelled", "timed_out"];
const LIVE = ["queued", "reserved", "starting", "running", "preempting", "lost"];
const PRIORITIES = ["high", "medium", "low"];

/** @param {{name: string, label: string, values: string[], any: string}} props */
function Choice({ name, label, values, any }) {
  const value = query.value.get(name) ?? "";
  return html`<label><span class="hidden-text">${label}</span><select value=${value} onChange=${(/** @type {any} */ event) => setQuery({ [name]: event.target.value })}>
    <option value="">${any}</option>${values.map((one) => html`<option value=${one}>${one.replace("_", " ")}</option>`)}</select></label>`;
}

/** @param {{isOver: boolean, users: string[]}} props */
function Filters({ isOver, users }) {
  return html`<div class="tools"><div class="search"><${Icon} name="search" /><input type="search" placeholder="Search names and reasons" aria-label="Search names and reasons" value=${query.value.get("text") ?? ""} onInput=${(/** @type {any} */ event) => setQuery({ text: event.target.value })} /></div>
    <${Choice} name="status" label="State" values=${isOver ? OVER : LIVE} any="Any state" />
    <${Choice} name="priority" label="Priority" values=${PRIORITIES} any="Any priority" />
    <${Choice} name="user" label="User" values=${[...new Set([...users, me.value?.user ?? ""])].filter(Boolean).sort()} any="All users" />
    <${Segments} label="Which jobs" value=${isOver ? "over" : "queue"} options=${[
      ["queue", "Queue"],
      ["over", "Over"],
    ]} choose=${(/** @type {string} */ view) => setQuery({ view: view === "queue" ? null : view, status: null })} /></div>`;
}

/** Whether the filters let a job through. @param {{name: string, why: string, status: string, priority: string, user: string}} job */
function matches(job) {
  const text = (query.value.get("text") ?? "").toLowerCase();
  const isExact = (/** @type {"status" | "priority" | "user"} */ name) => [null, "", job[name]].includes(query.value.get(name));
  return `${job.name} ${job.why}`.toLowerCase().includes(text) && isExact("status") && isExact("priority") && isExact("user");
}

/** Reasons tell the time in UTC, as all servers do. */
const isUtc = new Date().getTimezoneOffset() === 0;

/** @param {{job: QueuedJob, now: number}} props */
function Waiting({ job, now }) {
  const why = job.is_held ? "is held; release it" : job.why || (job.place ? "its turn comes at the next decision" : "waits before its next attempt");
  return html`<tr><td class="number fit">${job.place ?? "–"}</td><td><a href=${`/jobs/${job.id}`}><b>${job.name}</b></a></td>
    <td class="detail"><${Reason} text=${why} />${job.starts_by ? html` <span class="muted" title=${moment(job.starts_by)}>· reserved${isUtc ? "" : ` from ${clock(job.starts_by, job.starts_by - now)} local time`}</span>` : ""}</td>
    <td>${job.priority}</td><td class="optional">${job.needs}</td><td class="optional">${job.user}</td><td class="fit muted" title=${moment(job.created_at)}>${duration(now - job.created_at)}</td></tr>`;
}

/** @param {{job: QueuedJob, now: number}} props */
function Running({ job, now }) {
  return html`<tr><td><a href=${`/jobs/${job.id}`}><b>${job.name}</b></a></td><td><${Pill} status=${job.status} /></td><td class="detail"><${Reason} text=${job.why || job.needs} /></td>
    <td>${job.priority}</td><td class="optional">${job.user}</td><td class="number optional">${job.attempt_count}</td><td class="number">${money(job.cost_usd)}</td><td class="fit muted">${job.started_at ? duration(now - job.started_at) : "starts"}</td></tr>`;
}

/** @param {{title: string, heads: [string, string][], rows: any[], none: string}} props */
function List({ title, heads, rows, none }) {
  return html`<section class="card"><header><h2 class="grow">${title}</h2><span class="muted">${count(rows.length, "job")}</span></header>${
    rows.length
      ? html`<div class="scroll-x"><table class="plain" aria-label=${title}><thead><tr>${heads.map(([head, look]) => html`<th class=${look}>${head}</th>`)}</tr></thead><tbody>${rows}</tbody></table></div>`
      : html`<div class="body muted">${none}</div>`
  }</section>`;
}

function NoJobs() {
  return html`<div class="card"><${Empty} icon="jobs" title="No jobs wait or run"><p>A job is a call that the hub runs when its machines are free:</p>
    <${Paste} text=${`import skyward as sky\nfrom skyward import hub\n\n@sky.compute\ndef train(steps):\n    ...\n\nhub.connect("${window.location.origin}", token="...")\njob = hub.submit(train(100), name="first")\nprint(job.result())`} /><//></div>`;
}

function LiveQueue() {
  const { value, problem, reload } = useFresh(() => get("/v1/queue", { limit: MOST }), "queue", ["job", "capacity"]);
  const now = useNow(true);
  const queue = /** @type {Queue | null} */ (value);
  const jobs = (queue?.jobs ?? []).filter(matches);
  const waiting = jobs.filter(({ status }) => status === "queued");
  const running = jobs.filter(({ status }) => status !== "queued");
  const users = [...new Set((queue?.jobs ?? []).map(({ user }) => user))];
  return html`<${Filters} isOver=${false} users=${users} />
    ${problem && html`<${Problem} problem=${problem} retry=${reload} />`}
    ${!queue && !problem && html`<div class="bones" aria-busy="true"></div>`}
    ${
      queue &&
      html`<div class="stack">${queue.sets.length > 0 && html`<${DeviceLines} sets=${queue.sets} now=${Math.max(queue.at, now)} />`}
      ${
        queue.jobs.length === 0
          ? html`<${NoJobs} />`
          : html`<${List} title="With machines" none="No job has machines." heads=${[
              ["Name", ""],
              ["State", ""],
              ["What", ""],
              ["Priority", ""],
              ["User", "optional"],
              ["Attempts", "number optional"],
              ["Cost", "number"],
              ["For", ""],
            ]} rows=${running.map((job) => html`<${Running} key=${job.id} job=${job} now=${now} />`)} />
      <${List} title="Waiting" none="No job waits." heads=${[
        ["Place", "number"],
        ["Name", ""],
        ["Why it waits", ""],
        ["Priority", ""],
        ["Needs", "optional"],
        ["User", "optional"],
        ["For", ""],
      ]} rows=${waiting.map((job) => html`<${Waiting} key=${job.id} job=${job} now=${now} />`)} />`
      }
      ${queue.has_more && html`<p class="muted">Only the first ${MOST} jobs are shown.</p>`}</div>`
    }`;
}

/** Jobs that are over, page by page. @param {string[]} states */
function useOver(states) {
  const [list, setList] = useState(/** @type {{items: any[] | null, next: string | null, problem: any}} */ ({ items: null, next: null, problem: null }));
  const load = async (/** @type {string | null} */ token, /** @type {any[]} */ before) => {
    try {
      const page = await get("/v1/jobs", { status: states, limit: PAGE, page_token: token, trials: "false" }); // a sweep's job shows them
      setList({ items: [...before, ...page.jobs], next: page.next_page_token ?? null, problem: null });
    } catch (problem) {
      setList((now) => ({ ...now, problem }));
    }
  };
  useEffect(() => void load(null, []), [states.join(" ")]);
  return { ...list, reload: () => void load(null, []), more: () => void load(list.next, list.items ?? []) };
}

function OverJobs() {
  const status = query.value.get("status");
  const { items, next, problem, reload, more } = useOver(status ? [status] : OVER);
  const jobs = (items ?? []).filter(matches);
  return html`<${Filters} isOver users=${[...new Set((items ?? []).map(({ user }) => user))]} />
    ${problem && html`<${Problem} problem=${problem} retry=${reload} />`}
    ${!items && !problem && html`<div class="bones" aria-busy="true"></div>`}
    ${
      items &&
      html`<${List} title="Over" none="No job is over." heads=${[
        ["Name", ""],
        ["State", ""],
        ["Why", ""],
        ["User", "optional"],
        ["Attempts", "number optional"],
        ["Cost", "number"],
        ["Ran", ""],
        ["Ended", ""],
      ]} rows=${jobs.map(
        (job) => html`<tr key=${job.id}><td><a href=${`/jobs/${job.id}`}><b>${job.name}</b></a></td><td><${Pill} status=${job.status} /></td><td class="detail"><${Reason} text=${job.why} /></td><td class="optional">${job.user}</td>
        <td class="number optional">${job.attempt_count}</td><td class="number">${money(job.cost_usd)}</td><td class="fit">${job.started_at ? duration(job.ended_at - job.started_at) : ""}</td><td class="fit muted" title=${moment(job.ended_at)}>${ago(job.ended_at)}</td></tr>`,
      )} />`
    }
    ${next && html`<p><button class="button" onClick=${more}>Show more</button></p>`}`;
}

export function JobsPage() {
  const isOver = query.value.get("view") === "over";
  document.title = "Jobs · skyward hub";
  return html`<div class="head"><h1 class="grow">Jobs</h1></div>
    ${isOver ? html`<${OverJobs} key="over" />` : html`<${LiveQueue} key="queue" />`}`;
}
