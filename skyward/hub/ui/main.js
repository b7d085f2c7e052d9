/** Start of the pages: the frame around them, and the page that the address names. */
import { isSignedOut } from "./core/api.js";
import { html, render } from "./core/html.js";
import { path, startRouter } from "./core/router.js";
import { loadSession } from "./core/session.js";
import { AuditPage } from "./pages/audit.js";
import { CapacityPage } from "./pages/capacity.js";
import { ComparePage } from "./pages/compare.js";
import { ExperimentsPage } from "./pages/experiments.js";
import { JobPage } from "./pages/job.js";
import { JobsPage } from "./pages/jobs.js";
import { PoolPage, PoolsPage } from "./pages/pools.js";
import { MembersPage, ProjectsPage } from "./pages/projects.js";
import { RunPage } from "./pages/run.js";
import { RunsPage } from "./pages/runs.js";
import { SignInPage } from "./pages/sign_in.js";
import { SweepPage } from "./pages/sweep.js";
import { SweepsPage } from "./pages/sweeps.js";
import { TokensPage } from "./pages/tokens.js";
import { UsagePage } from "./pages/usage.js";
import { UsersPage } from "./pages/users.js";
import { Shell } from "./parts/shell.js";
import { Dialogs, Empty, Notices } from "./parts/widgets.js";

function Missing() {
  return html`<${Empty} icon="search" title="There is no such page"><p>The address may be mistyped, or its link may come from another version of the hub.</p><a class="button" href="/experiments">Go to the experiments</a><//>`;
}

/** @param {string} where */
function pageFor(where) {
  const [, room = "", id = "", ...rest] = where.split("/").map(decodeURIComponent);
  if (rest.join("")) return html`<${Missing} />`;
  if (room === "" || (room === "experiments" && !id)) return html`<${ExperimentsPage} />`;
  if (room === "experiments") return html`<${RunsPage} key=${id} experiment=${id} />`;
  if (room === "runs") return id ? html`<${RunPage} key=${id} id=${id} />` : html`<${RunsPage} key="all" />`;
  if (room === "compare") return html`<${ComparePage} />`;
  if (room === "jobs") return id ? html`<${JobPage} key=${id} id=${id} />` : html`<${JobsPage} />`;
  if (room === "sweeps") return id ? html`<${SweepPage} key=${id} id=${id} />` : html`<${SweepsPage} />`;
  if (room === "capacity") return html`<${CapacityPage} />`;
  if (room === "usage") return html`<${UsagePage} />`;
  if (room === "pools") return id ? html`<${PoolPage} key=${id} id=${id} />` : html`<${PoolsPage} />`;
  if (room === "projects") return html`<${ProjectsPage} />`;
  if (room === "members") return html`<${MembersPage} />`;
  if (room === "users") return html`<${UsersPage} />`;
  if (room === "tokens") return html`<${TokensPage} />`;
  if (room === "audit") return html`<${AuditPage} />`;
  return html`<${Missing} />`;
}

function App() {
  if (path.value === "/sign-in" || isSignedOut.value) return html`<${SignInPage} /><${Notices} />`;
  return html`<${Shell}>${pageFor(path.value)}<//><${Dialogs} /><${Notices} />`;
}

startRouter();
void loadSession();
render(html`<${App} />`, /** @type {Element} */ (document.getElementById("app")));
