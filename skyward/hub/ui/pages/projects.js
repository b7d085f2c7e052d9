/** Projects, and the members of the one that is chosen. */
import { change, chooseProject, get, project } from "../core/api.js";
import { ago } from "../core/format.js";
import { html } from "../core/html.js";
import { navigate } from "../core/router.js";
import { loadSession, me } from "../core/session.js";
import { Icon } from "../parts/icon.js";
import { ask, askAll, attempt, Empty, Problem, useLoaded } from "../parts/widgets.js";

/** @type {[string, string][]} */
const ROLES = [
  ["viewer", "Viewer: reads everything"],
  ["researcher", "Researcher: makes runs, experiments, models"],
  ["admin", "Admin: deletes, manages members, reads the audit"],
];

export function ProjectsPage() {
  const { value, problem, reload } = useLoaded(() => get("/v1/projects"), "");
  document.title = "Projects · skyward hub";
  const current = project.value || me.value?.project;
  const create = async () => {
    const name = await ask({
      title: "New project",
      text: "A project has experiments, members and tokens of its own. In MLflow it is a workspace.",
      field: "Name",
      action: "Create",
    });
    if (!name) return;
    await attempt(() => change("POST", "/v1/projects", { name }));
    await loadSession();
    reload();
  };
  const remove = async (/** @type {string} */ name) => {
    const text = "Nobody can reach its experiments, runs and tokens from now on.";
    if ((await ask({ title: `Delete the project ${name}?`, text, action: "Delete", danger: true })) === null) return;
    await attempt(() => change("DELETE", `/v1/projects/${encodeURIComponent(name)}`));
    await loadSession();
    reload();
  };
  const choose = (/** @type {string} */ name) => {
    chooseProject(name);
    navigate("/experiments");
  };
  const projects = /** @type {any[]} */ (value?.projects ?? []);
  return html`<div class="head"><h1 class="grow">Projects</h1><button class="button primary" onClick=${create}><${Icon} name="plus" />New project</button></div>
    ${problem && html`<${Problem} problem=${problem} retry=${reload} />`}
    <div class="card">${value && !projects.length && html`<${Empty} icon="projects" title="You are in no project"><p>Ask an admin of a project to add you to it.</p><//>`}
      ${
        projects.length > 0 &&
        html`<div class="scroll-x"><table class="plain"><thead><tr><th>Name</th><th>Made</th><th><span class="hidden-text">Actions</span></th></tr></thead>
        <tbody>${projects.map(
          ({
            name,
            created_at,
          }) => html`<tr key=${name}><td><b>${name}</b>${name === current && html` <span class="tag">shown</span>`}</td><td class="fit muted">${ago(created_at)}</td>
          <td class="actions">${name !== current && html`<button class="button small" aria-label=${`Show ${name}`} onClick=${() => choose(name)}>Show</button>${me.value?.role === "owner" && name !== "default" && html`<button class="button small bare danger" aria-label=${`Delete ${name}`} onClick=${() => remove(name)}>Delete</button>`}`}</td></tr>`,
        )}</tbody></table></div>`
      }</div>`;
}

export function MembersPage() {
  const name = project.value || me.value?.project || "";
  const path = `/v1/projects/${encodeURIComponent(name)}/members`;
  const { value, problem, reload } = useLoaded(() => (name ? get(path) : Promise.resolve(null)), name);
  document.title = "Members · skyward hub";
  const add = async () => {
    const answers = await askAll({
      title: `Add a member to ${name}`,
      action: "Add",
      fields: [
        { name: "user", label: "Name of the user" },
        { name: "role", label: "Role", value: "researcher", options: ROLES },
      ],
    });
    if (!answers) return;
    await attempt(() => change("POST", path, answers));
    reload();
  };
  const setRole = async (/** @type {string} */ user, /** @type {string} */ role) => {
    await attempt(() => change("POST", path, { user, role }));
    reload();
  };
  const remove = async (/** @type {string} */ user) => {
    if ((await ask({ title: `Remove ${user} from ${name}?`, action: "Remove", danger: true })) === null) return;
    await attempt(() => change("DELETE", `${path}/${encodeURIComponent(user)}`));
    reload();
  };
  const members = /** @type {any[]} */ (value?.members ?? []);
  return html`<div class="head"><h1 class="grow">Members of ${name || "…"}</h1><button class="button primary" onClick=${add}><${Icon} name="plus" />Add member</button></div>
    ${problem && html`<${Problem} problem=${problem} retry=${reload} />`}
    <div class="card">${
      members.length > 0 &&
      html`<div class="scroll-x"><table class="plain"><thead><tr><th>User</th><th>Role</th><th><span class="hidden-text">Actions</span></th></tr></thead>
      <tbody>${members.map(
        ({ user, role }) => html`<tr key=${user}><td><b>${user}</b></td>
        <td>${role === "owner" ? "Owner of the organization" : html`<select aria-label=${`Role of ${user}`} value=${role} onChange=${(/** @type {any} */ event) => setRole(user, event.target.value)}>${ROLES.map(([id, text]) => html`<option value=${id}>${text}</option>`)}</select>`}</td>
        <td class="actions">${role !== "owner" && html`<button class="button small bare danger" aria-label=${`Remove ${user}`} onClick=${() => remove(user)}>Remove</button>`}</td></tr>`,
      )}</tbody></table></div>`
    }
      ${value && !members.length && html`<${Empty} icon="members" title="No members yet"><p>Owners of the organization see every project. Others need to be added.</p><//>`}</div>`;
}
