/** Tokens: made here, shown once. */
import { change, get } from "../core/api.js";
import { ago, moment } from "../core/format.js";
import { html, useState } from "../core/html.js";
import { query, setQuery } from "../core/router.js";
import { me, projects } from "../core/session.js";
import { Icon } from "../parts/icon.js";
import { ask, askAll, attempt, Empty, Paste, Problem, Segments, useLoaded } from "../parts/widgets.js";

const DAY_MS = 86_400_000;
/** @type {[string, string][]} */
const LIFETIMES = [
  ["7", "After 7 days"],
  ["90", "After 90 days"],
  ["365", "After a year"],
  ["", "Never"],
];
/** @type {[string, string][]} */
const ROLES = [
  ["", "Everything that the user may"],
  ["viewer", "Read"],
  ["researcher", "Read, and log runs"],
  ["admin", "Manage the project"],
];

/** Lines that a script or a shell needs. @param {string} token */
function linesFor(token) {
  const at = window.location.origin;
  return `export SKYWARD_HUB_URL=${at}\nexport SKYWARD_HUB_TOKEN=${token}\n# Scripts that use MLflow:\nexport MLFLOW_TRACKING_URI=${at}\nexport MLFLOW_TRACKING_TOKEN=${token}`;
}

/** @param {boolean} isOwner Owners make tokens for service accounts too. @returns {import("../parts/widgets.js").Field[]} */
function fieldsFor(isOwner) {
  const names = projects.value.map(({ name }) => /** @type {[string, string]} */ ([name, name]));
  return [
    { name: "name", label: "Name, for example of the machine that will use it" },
    ...(isOwner ? [{ name: "user", label: "User", value: me.value?.user }] : []),
    { name: "project", label: "Project", options: [["", "All of the user's projects"], ...names] },
    { name: "role", label: "May do at most", options: ROLES },
    { name: "days", label: "Expires", value: "90", options: LIFETIMES },
  ];
}

export function TokensPage() {
  const everybody = query.value.get("whose") === "all";
  const { value, problem, reload } = useLoaded(
    () => get("/v1/tokens", { everybody: everybody ? "true" : "" }),
    String(everybody),
  );
  const [made, setMade] = useState(/** @type {string | null} */ (null));
  document.title = "Tokens · skyward hub";
  const isOwner = me.value?.role === "owner";
  const create = async () => {
    const answers = await askAll({ title: "New token", action: "Create", fields: fieldsFor(isOwner) });
    if (!answers) return;
    const { name, user, project, role, days } = answers;
    const body = {
      name,
      user: user || null,
      project: project || null,
      role: role || null,
      expires_at: Number(days) ? Date.now() + Number(days) * DAY_MS : null,
    };
    const answer = await attempt(() => change("POST", "/v1/tokens", body));
    if (answer) setMade(answer.token);
    reload();
  };
  const revoke = async (/** @type {any} */ token) => {
    const text = "Programs that use it are refused from now on. This cannot be undone.";
    if ((await ask({ title: `Revoke ${token.name || token.id}?`, text, action: "Revoke", danger: true })) === null)
      return;
    await attempt(() => change("DELETE", `/v1/tokens/${token.id}`));
    reload();
  };
  const tokens = /** @type {any[]} */ (value?.tokens ?? []);
  return html`<div class="head"><h1 class="grow">Tokens</h1>${isOwner && html`<${Segments} label="Whose tokens" value=${everybody ? "all" : ""} options=${[["", "Yours"], ["all", "Everybody's"]]} choose=${(/** @type {string} */ whose) => setQuery({ whose })} />`}<button class="button primary" onClick=${create}><${Icon} name="plus" />New token</button></div>
    <p class="lead">A program signs in with a token. Each is shown once, when it is made; the hub keeps its hash only.</p>
    ${made && html`<section class="card section"><header><h2 class="grow">Your new token</h2><button class="button small" onClick=${() => setMade(null)}>Done</button></header><div class="body"><p>Copy it now. It is never shown again.</p><${Paste} text=${linesFor(made)} /></div></section>`}
    ${problem && html`<${Problem} problem=${problem} retry=${reload} />`}
    <div class="card">${value && !tokens.length && html`<${Empty} icon="tokens" title="No tokens yet"><p>Make one for each machine or program, so that you can revoke it alone.</p><//>`}
      ${
        tokens.length > 0 &&
        html`<div class="scroll-x"><table class="plain"><thead><tr><th>Name</th><th>User</th><th>Project</th><th>Role</th><th>Last use</th><th>Expires</th><th><span class="hidden-text">Actions</span></th></tr></thead>
        <tbody>${tokens.map(
          (
            token,
          ) => html`<tr key=${token.id}><td><b>${token.name || token.id}</b></td><td>${token.user}</td><td>${token.project ?? "all"}</td><td>${token.run ? html`<a href=${`/runs/${token.run}`}>one run</a>` : (token.role ?? "the user's")}</td>
          <td class="fit muted" title=${moment(token.used_at)}>${ago(token.used_at) || "never"}</td><td class="fit muted">${moment(token.expires_at) || "never"}</td>
          <td class="actions"><button class="button small bare danger" aria-label=${`Revoke ${token.name || token.id}`} onClick=${() => revoke(token)}>Revoke</button></td></tr>`,
        )}</tbody></table></div>`
      }</div>`;
}
