/** Audit: each change, and each read of an artifact, in the order in which they happened. */
import { get } from "../core/api.js";
import { moment } from "../core/format.js";
import { html, useEffect, useState } from "../core/html.js";
import { query, setQuery } from "../core/router.js";
import { Icon } from "../parts/icon.js";
import { Empty, Problem } from "../parts/widgets.js";

/** @param {any} detail */
const textOf = (detail) =>
  detail && typeof detail === "object"
    ? Object.entries(detail)
        .map(([key, value]) => `${key}=${typeof value === "object" ? JSON.stringify(value) : value}`)
        .join(" ")
    : (detail ?? "");

/** @param {string} resource */
function resourceLink(resource) {
  const run = /^run\/(.+)$/.exec(resource ?? "")?.[1];
  return run ? html`<a href=${`/runs/${run}`} title=${resource}>run/${run.slice(0, 8)}…</a>` : resource;
}

export function AuditPage() {
  const text = query.value.get("text") ?? "";
  const [list, setList] = useState(
    /** @type {{items: any[] | null, next: string | null, problem: any}} */ ({
      items: null,
      next: null,
      problem: null,
    }),
  );
  document.title = "Audit · skyward hub";
  const load = async (/** @type {string | null} */ token, /** @type {any[]} */ before) => {
    try {
      const page = await get("/v1/audit", { limit: 100, page_token: token });
      setList({
        items: [...before, ...(page.audit ?? page.entries ?? [])],
        next: page.next_page_token ?? null,
        problem: null,
      });
    } catch (problem) {
      setList((now) => ({ ...now, problem }));
    }
  };
  useEffect(() => void load(null, []), []);
  const shown = (list.items ?? []).filter(
    (entry) => !text || JSON.stringify(entry).toLowerCase().includes(text.toLowerCase()),
  );
  return html`<div class="head"><h1>Audit</h1></div>
    <p class="lead">Every change, every read of an artifact, and every sign-in. Entries are chained by their hashes: <code>skyward hub check</code> proves that none was altered.</p>
    <div class="tools"><div class="search"><${Icon} name="search" /><input type="search" placeholder="Search the entries below" aria-label="Search the entries" value=${text} onInput=${(/** @type {any} */ event) => setQuery({ text: event.target.value })} /></div></div>
    ${list.problem && html`<${Problem} problem=${list.problem} retry=${() => load(null, [])} />`}
    <div class="card">${list.items && !shown.length && html`<${Empty} icon="audit" title=${text ? "No entry here says that" : "Nothing happened yet"} />`}
      ${
        shown.length > 0 &&
        html`<div class="scroll-x"><table class="plain"><thead><tr><th>Time</th><th>Who</th><th>Action</th><th>On</th><th>Detail</th></tr></thead>
      <tbody>${shown.map((entry) => html`<tr key=${entry.number ?? entry.id}><td class="fit muted">${moment(entry.at ?? entry.created_at)}</td><td>${entry.actor ?? entry.user}</td><td><b>${entry.action}</b></td><td class="mono">${resourceLink(entry.resource)}</td><td class="muted detail">${textOf(entry.detail)}</td></tr>`)}</tbody></table></div>`
      }</div>
    ${list.next && html`<p><button class="button" onClick=${() => load(list.next, list.items ?? [])}>Show more</button></p>`}`;
}
