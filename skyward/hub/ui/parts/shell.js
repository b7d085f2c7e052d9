/** Frame of each page: navigation, project, theme, user, and the banner of a hub without authentication. */
import { chooseProject, project } from "../core/api.js";
import { html, useEffect, useRef } from "../core/html.js";
import { path } from "../core/router.js";
import { isDark, me, projects, signOut, themeChanges, toggleTheme } from "../core/session.js";
import { Icon } from "./icon.js";

const PLACES = [
  ["/experiments", "experiments", "Experiments"],
  ["/runs", "runs", "Runs"],
  ["/compare", "compare", "Compare"],
  ["/sweeps", "sweeps", "Sweeps"],
  ["/jobs", "jobs", "Jobs"],
  ["/capacity", "capacity", "Capacity"],
  ["/usage", "usage", "Usage"],
  ["/pools", "pools", "Pools"],
];
/** Address, icon, title, and the roles that may see it; without roles, all. */
const ADMINISTRATION = [
  ["/projects", "projects", "Projects"],
  ["/members", "members", "Members"],
  ["/users", "users", "Users", "owner"],
  ["/tokens", "tokens", "Tokens"],
  ["/audit", "audit", "Audit", "owner admin"],
];

/** @param {string} to */
function isHere(to) {
  return path.value === to || path.value.startsWith(`${to}/`) || (to === "/experiments" && path.value === "/");
}

/** @param {{places: string[][]}} props */
function Links({ places }) {
  const role = me.value?.role ?? "";
  return places
    .filter(([, , , roles]) => !roles || roles.split(" ").includes(role))
    .map(
    ([to, icon, text]) =>
      html`<a href=${to} aria-current=${isHere(to) ? "page" : null}><${Icon} name=${icon} />${text}</a>`,
  );
}

function ProjectChoice() {
  if (projects.value.length < 2) return null;
  const current = project.value || me.value?.project || "";
  return html`<div class="project-choice"><label><span class="hidden-text">Project</span>
    <select value=${current} onChange=${(/** @type {any} */ event) => chooseProject(event.target.value)}>
      ${projects.value.map(({ name }) => html`<option value=${name}>${name}</option>`)}
    </select></label></div>`;
}

function User() {
  const user = me.value;
  if (!user) return null;
  const name = user.user ?? "anonymous";
  return html`<div class="who"><span class="avatar" aria-hidden="true">${name.slice(0, 1)}</span>
    <div><b title=${name}>${name}</b><small>${user.role}</small></div></div>
    ${user.authentication !== false && html`<button class="side-button" onClick=${signOut} title="Sign out"><${Icon} name="signout" /><span>Sign out</span></button>`}`;
}

/** @param {{children?: any}} props */
export function Shell({ children }) {
  const dark = isDark();
  const side = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    // On a phone the pages are a row that scrolls: the link of this page comes into sight.
    side.current?.querySelector("[aria-current=page]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }, [path.value, me.value, projects.value]);
  return html`<div class="shell" data-theme-changes=${themeChanges.value}>
    <aside class="side" ref=${side}>
      <a class="brand" href="/experiments"><img src="/ui/icon.svg" alt="" /><span>skyward hub</span></a>
      <${ProjectChoice} />
      <nav aria-label="Pages"><${Links} places=${PLACES} /></nav>
      <div class="side-heading">Administration</div>
      <nav aria-label="Administration"><${Links} places=${ADMINISTRATION} /></nav>
      <div class="side-foot">
        <button class="side-button" onClick=${toggleTheme} title=${dark ? "Light theme" : "Dark theme"}>
          <${Icon} name=${dark ? "sun" : "moon"} /><span>${dark ? "Light theme" : "Dark theme"}</span></button>
        <${User} />
      </div>
    </aside>
    <div class="content">
      ${me.value?.authentication === false && html`<div class="banner" role="note">This hub runs with <code>--no-auth</code>: everybody who reaches it may read and change everything.</div>`}
      <main tabindex="-1" key=${project.value}>${children}</main>
    </div>
  </div>`;
}
