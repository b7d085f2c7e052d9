/** Buttons that steer a training. A command waits in the hub until the run's sender collects it. */
import { change, get } from "../core/api.js";
import { ago } from "../core/format.js";
import { html, useEffect, useState } from "../core/html.js";
import { Icon } from "./icon.js";
import { ask, attempt, notify } from "./widgets.js";

/** @typedef {import("../core/types.js").Run} Run */
/** @typedef {import("../core/types.js").Command} Command */

const POLL_MS = 1000;
const ACTIONS = /** @type {Record<string, {title: string, question: string, text: string, danger: boolean}>} */ ({
  save: {
    title: "Save",
    question: "Save a checkpoint now?",
    text: "The training writes a checkpoint at its next step and goes on.",
    danger: false,
  },
  stop: {
    title: "Stop",
    question: "Stop this training?",
    text: "It finishes the step that it is in, saves a checkpoint and ends. It can be resumed from there.",
    danger: true,
  },
  abort: {
    title: "Abort",
    question: "Abort this training?",
    text: "It ends at once, without a checkpoint. Steps since the last checkpoint are lost.",
    danger: true,
  },
});

/** @param {{run: Run}} props */
export function Commands({ run }) {
  const [commands, setCommands] = useState(/** @type {Command[]} */ ([]));
  const isOpen = run.status === "running" || run.status === "lost" || run.status === "queued";
  const waiting = commands.filter((command) => !command.acknowledged_at);
  const load = () =>
    get(`/v1/runs/${run.id}/commands`).then(
      (answer) => setCommands(answer.commands),
      () => null,
    );
  useEffect(() => {
    if (!waiting.length) return;
    const timer = window.setInterval(load, POLL_MS);
    return () => window.clearInterval(timer);
  }, [waiting.length > 0]);
  useEffect(() => void (isOpen && load()), [run.id, isOpen]);
  const send = async (/** @type {string} */ action) => {
    const { title, question, text, danger } = ACTIONS[action];
    if ((await ask({ title: question, text, action: title, danger })) === null) return;
    const command = await attempt(() => change("POST", `/v1/runs/${run.id}/commands`, { action }));
    if (!command) return;
    notify(`${title} is sent. The training collects it within 2 s.`);
    void load();
  };
  const last = commands[commands.length - 1];
  if (!isOpen && !last) return null; // the outcome of a stop stays on the page, though the run is over
  return html`<div class="buttons" role="group" aria-label="Steer the training">
    ${last && html`<span class="pill" data-testid="command" title=${last.result ?? ""}>${last.action}: ${last.acknowledged_at ? `${last.result || "done"} ${ago(last.acknowledged_at)}` : "waiting"}</span>`}
    ${isOpen && Object.entries(ACTIONS).map(([action, { title, danger }]) => html`<button class=${`button ${danger ? "danger" : ""}`} onClick=${() => send(action)}><${Icon} name=${action} />${title}</button>`)}</div>`;
}
