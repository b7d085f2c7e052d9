/** Tokens: made here, shown once. */
import { change, get } from "../core/api.js";
import { ago, moment } from "../core/format.js";
import { html, useState } from "../core/html.js";
import { Icon } from "../parts/icon.js";
import { ask, attempt, Empty, Paste, Problem, useLoaded } from "../parts/widgets.js";

/** Lines that a script or a shell needs. @param {string} token */
function linesFor(token) {
  const at = window.location.origin;
  return `export SKYWARD_HUB_URL=${at}\nexport SKYWARD_HUB_TOKEN=${token}\n# Scripts that use MLflow:\nexport MLFLOW_TRACKING_URI=${at}\nexport MLFLOW_TRACKING_TOKEN=${token}`;
}

export function TokensPage() {
  const { value, problem, reload } = useLoaded(() => get("/v1/tokens"), "");
  const [made, setMade] = useState(/** @type {string | null} */ (null));
  document.title = "Tokens · skyward hub";
  const create = async () => {
    const name = await ask({
      title: "New token",
      field: "Name, for example of the machine that will use it",
      action: "Create",
    });
    if (!name) return;
    const answer = await attempt(() => change("POST", "/v1/tokens", { name }));
    if (answer) setMade(answer.secret ?? answer.token);
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
  return html`<div class="head"><h1 class="grow">Tokens</h1><button class="button primary" onClick=${create}><${Icon} name="plus" />New token</button></div>
    <p class="lead">A program signs in with a token. Each is shown once, when it is made; the hub keeps its hash only.</p>
    ${made && html`<section class="card section"><header><h2 class="grow">Your new token</h2><button class="button small" onClick=${() => setMade(null)}>Done</button></header><div class="body"><p>Copy it now. It is never shown again.</p><${Paste} text=${linesFor(made)} /></div></section>`}
    ${problem && html`<${Problem} problem=${problem} retry=${reload} />`}
    <div class="card">${value && !tokens.length && html`<${Empty} icon="tokens" title="No tokens yet"><p>Make one for each machine or program, so that you can revoke it alone.</p><//>`}
      ${
        tokens.length > 0 &&
        html`<div class="scroll-x"><table class="plain"><thead><tr><th>Name</th><th>User</th><th>Project</th><th>Last use</th><th>Expires</th><th></th></tr></thead>
        <tbody>${tokens.map(
          (
            token,
          ) => html`<tr key=${token.id}><td><b>${token.name || token.id}</b></td><td>${token.user}</td><td>${token.project ?? "all"}</td>
          <td class="fit muted" title=${moment(token.used_at)}>${ago(token.used_at) || "never"}</td><td class="fit muted">${moment(token.expires_at) || "never"}</td>
          <td class="actions"><button class="button small bare danger" onClick=${() => revoke(token)}>Revoke</button></td></tr>`,
        )}</tbody></table></div>`
      }</div>`;
}
