/** Users and service accounts of the organization: made here, and let in by links that work once. */
import { change, get } from "../core/api.js";
import { ago, moment } from "../core/format.js";
import { html, useState } from "../core/html.js";
import { Icon } from "../parts/icon.js";
import { ask, askAll, attempt, Empty, Paste, Problem, useLoaded } from "../parts/widgets.js";

/** @typedef {{name: string, kind: string, is_owner: boolean, created_at: number, disabled_at: number | null}} User */
/** @typedef {{user: string, link: string | null}} SignInLink */

/** @returns {Promise<SignInLink | undefined>} */
async function create() {
  const answers = await askAll({
    title: "New user",
    text: "Nobody has a password: a person signs in by a link that works once, a service account by tokens.",
    action: "Create",
    fields: [
      { name: "name", label: "Name" },
      {
        name: "kind",
        label: "Kind",
        value: "person",
        options: [
          ["person", "Person"],
          ["owner", "Person who owns the organization"],
          ["service", "Service account"],
        ],
      },
    ],
  });
  if (!answers) return undefined;
  const { name, kind } = answers;
  return attempt(() =>
    change("POST", "/v1/users", { name, is_service: kind === "service", is_owner: kind === "owner" }),
  );
}

/** @param {{made: SignInLink, close: () => void}} props */
function NewLink({ made: { user, link }, close }) {
  return html`<section class="card section" aria-label="New user"><header><h2 class="grow">${user}</h2><button class="button small" onClick=${close}>Done</button></header>
    <div class="body">${
      link
        ? html`<p>Give ${user} this link. It signs in once and is never shown again.</p><${Paste} text=${link} />`
        : html`<p>A service account signs in by tokens only. <a href="/tokens">Make one for it</a>.</p>`
    }<p class="muted">Without a role in a project, a new user sees no run: <a href="/members">add ${user} to the project</a>.</p></div></section>`;
}

/** @param {{user: User, link: () => void, disable: () => void}} props */
function Row({ user, link, disable }) {
  const isPerson = user.kind !== "service";
  const state = user.disabled_at ? `Disabled ${moment(user.disabled_at)}` : "Active";
  return html`<tr class=${user.disabled_at ? "deleted" : ""}><td><b>${user.name}</b></td><td>${isPerson ? "Person" : "Service account"}</td>
    <td>${user.is_owner ? "Owner" : ""}</td><td class="fit muted" title=${moment(user.created_at)}>${ago(user.created_at)}</td><td class="fit muted">${state}</td>
    <td class="actions">${
      !user.disabled_at &&
      html`${isPerson && html`<button class="button small bare" aria-label=${`New sign-in link for ${user.name}`} onClick=${link}>Sign-in link</button>`}
      <button class="button small bare danger" aria-label=${`Disable ${user.name}`} onClick=${disable}>Disable</button>`
    }</td></tr>`;
}

export function UsersPage() {
  const { value, problem, reload } = useLoaded(() => get("/v1/users"), "");
  const [made, setMade] = useState(/** @type {SignInLink | null} */ (null));
  document.title = "Users · skyward hub";
  const show = (/** @type {SignInLink | undefined} */ answer) => {
    if (answer) setMade(answer);
    reload();
  };
  const disable = async (/** @type {string} */ name) => {
    const text = "All sessions and tokens of this user end now. It cannot be undone; the runs stay.";
    if ((await ask({ title: `Disable ${name}?`, text, action: "Disable", danger: true })) === null) return;
    await attempt(() => change("DELETE", `/v1/users/${encodeURIComponent(name)}`));
    reload();
  };
  const link = async (/** @type {string} */ name) =>
    show(await attempt(() => change("POST", `/v1/users/${encodeURIComponent(name)}/link`)));
  const users = /** @type {User[]} */ (value?.users ?? []);
  return html`<div class="head"><h1 class="grow">Users</h1><button class="button primary" onClick=${async () => show(await create())}><${Icon} name="plus" />New user</button></div>
    <p class="lead">Everybody who may sign in to this organization. Roles are given project by project.</p>
    ${made && html`<${NewLink} made=${made} close=${() => setMade(null)} />`}
    ${problem && html`<${Problem} problem=${problem} retry=${reload} />`}
    <div class="card">${value && !users.length && html`<${Empty} icon="members" title="No users yet" />`}
      ${
        users.length > 0 &&
        html`<div class="scroll-x"><table class="plain"><thead><tr><th>Name</th><th>Kind</th><th>Right</th><th>Made</th><th>State</th><th><span class="hidden-text">Actions</span></th></tr></thead>
        <tbody>${users.map((user) => html`<${Row} key=${user.name} user=${user} link=${() => link(user.name)} disable=${() => disable(user.name)} />`)}</tbody></table></div>`
      }</div>`;
}
