/** Small parts that pages share: pills, empty states, problems, menus, dialogs and short notices. */
import { html, signal, useEffect, useRef, useState } from "../core/html.js";
import { Icon } from "./icon.js";

/** @param {{status: string}} props */
export function Pill({ status }) {
  return html`<span class=${`pill ${status}`}>${status.replace("_", " ")}</span>`;
}

/** A sentence of the hub about a job: ids of other jobs in it are links. @param {{text: string}} props */
export function Reason({ text }) {
  return text
    .split(/\b([0-9a-f]{32})\b/)
    .map((part, i) => (i % 2 ? html`<a class="mono" href=${`/jobs/${part}`} title=${part}>${part.slice(0, 8)}</a>` : part));
}

/** @param {{problem: any, retry?: () => void}} props */
export function Problem({ problem, retry }) {
  return html`<div class="problem" role="alert"><div class="grow"><b>${problem.message}</b>${problem.fix}</div>
    ${retry && html`<button class="button small" onClick=${retry}>Try again</button>`}</div>`;
}

/** @param {{icon: string, title: string, children?: any}} props */
export function Empty({ icon, title, children }) {
  return html`<div class="empty"><${Icon} name=${icon} size=${34} /><h2>${title}</h2>${children}</div>`;
}

/** Lines to paste, with a button that copies them. @param {{text: string}} props */
export function Paste({ text }) {
  const [isCopied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(text);
    setCopied(true);
    window.setTimeout(() => setCopied(false), 1500);
  };
  return html`<div class="paste"><pre>${text}</pre>
    <button class="button small" onClick=${copy}>${isCopied ? "Copied" : "Copy"}</button></div>`;
}

/** @param {string} text */
export async function copyText(text) {
  await navigator.clipboard
    .writeText(text)
    .catch(() => notify("The browser refused to copy. Select the text instead."));
}

/** @param {{label: any, title?: string, left?: boolean, children?: any}} props */
export function Menu({ label, title, left = false, children }) {
  const menu = useRef(/** @type {HTMLDetailsElement | null} */ (null));
  useEffect(() => {
    const close = (/** @type {Event} */ event) => {
      const escape = event instanceof KeyboardEvent && event.key === "Escape";
      const outside =
        event.type === "pointerdown" && event.target instanceof Node && !menu.current?.contains(event.target);
      if (menu.current?.open && (escape || outside)) menu.current.open = false;
    };
    document.addEventListener("pointerdown", close);
    document.addEventListener("keydown", close);
    return () => {
      document.removeEventListener("pointerdown", close);
      document.removeEventListener("keydown", close);
    };
  }, []);
  return html`<details class="menu" ref=${menu}><summary class="button" role="button" title=${title}>${label}</summary>
    <div class=${`menu-panel ${left ? "left" : ""}`}>${children}</div></details>`;
}

/**
 * @param {{options: [string, string][], value: string, choose: (value: string) => void, label: string}} props
 */
export function Segments({ options, value, choose, label }) {
  return html`<div class="segments" role="group" aria-label=${label}>${options.map(
    ([name, text]) =>
      html`<button aria-pressed=${String(name === value)} onClick=${() => choose(name)}>${text}</button>`,
  )}</div>`;
}

/** @typedef {{name: string, label: string, value?: string, options?: [string, string][]}} Field A line of text, or a choice. */
/** @typedef {{title: string, text?: string, action: string, danger?: boolean, fields: Field[]}} Asked */
/** @typedef {Asked & {done: (answers: Record<string, string> | null) => void}} Question */
const question = signal(/** @type {Question | null} */ (null));

/**
 * Ask for several fields.
 * @param {Asked} asked
 * @returns {Promise<Record<string, string> | null>} Answers by name; null if the dialog is cancelled.
 */
export function askAll(asked) {
  return new Promise((done) => {
    question.value = { ...asked, done };
  });
}

/**
 * Ask before something happens.
 * @param {{title: string, text?: string, action: string, danger?: boolean, field?: string, value?: string}} asked
 *   `field` names a line of text that is asked for.
 * @returns {Promise<string | null>} The text, or "" where none is asked for; null if the answer is no.
 */
export async function ask({ field, value, ...asked }) {
  const fields = field ? [{ name: "text", label: field, value }] : [];
  const answers = await askAll({ ...asked, fields });
  return answers && (answers.text ?? "");
}

/** @param {{field: Field, isFirst: boolean}} props */
function FieldInput({ field: { name, label, value, options }, isFirst }) {
  if (options)
    return html`<label class="field">${label}<select name=${name}>${options.map(([id, text]) => html`<option value=${id} selected=${id === (value ?? "")}>${text}</option>`)}</select></label>`;
  return html`<label class="field">${label}<input type="text" name=${name} required value=${value ?? ""} autofocus=${isFirst} /></label>`;
}

/** Place of the dialogs, once on a page. */
export function Dialogs() {
  const asked = question.value;
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => {
    if (asked) dialog.current?.showModal();
  }, [asked]);
  if (!asked) return null;
  const answer = (/** @type {Record<string, string> | null} */ answers) => {
    question.value = null;
    asked.done(answers);
  };
  const submit = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const form = new FormData(/** @type {HTMLFormElement} */ (event.target));
    answer(Object.fromEntries([...form].map(([name, value]) => [name, String(value).trim()])));
  };
  return html`<dialog ref=${dialog} onCancel=${() => answer(null)} aria-labelledby="dialog-title">
    <form onSubmit=${submit}>
      <h2 id="dialog-title">${asked.title}</h2>
      ${asked.text && html`<p>${asked.text}</p>`}
      ${asked.fields.map((field, i) => html`<${FieldInput} key=${field.name} field=${field} isFirst=${i === 0} />`)}
      <div class="buttons">
        <button type="button" class="button" onClick=${() => answer(null)}>Cancel</button>
        <button type="submit" class=${`button primary ${asked.danger ? "danger" : ""}`}>${asked.action}</button>
      </div>
    </form></dialog>`;
}

const notices = signal(/** @type {{number: number, text: string}[]} */ ([]));
let noticeNumber = 0;

/** Say something for a few seconds. @param {string} text */
export function notify(text) {
  const number = ++noticeNumber;
  notices.value = [...notices.value, { number, text }];
  window.setTimeout(() => (notices.value = notices.value.filter((notice) => notice.number !== number)), 5000);
}

/** Do something that may be refused, and say why. @template T @param {() => Promise<T>} action @returns {Promise<T | undefined>} */
export async function attempt(action) {
  try {
    return await action();
  } catch (error) {
    const { message, fix } = /** @type {{message: string, fix?: string}} */ (error);
    notify(fix ? `${message} ${fix}` : message);
    return undefined;
  }
}

export function Notices() {
  return html`<div class="toasts" role="status" aria-live="polite">${notices.value.map(
    ({ number, text }) => html`<div class="toast" key=${number}>${text}</div>`,
  )}</div>`;
}

/**
 * Load something when `key` changes.
 * @template T
 * @param {() => Promise<T>} load
 * @param {string} key
 * @returns {{value: T | null, problem: any, reload: () => void}}
 */
export function useLoaded(load, key) {
  const [state, setState] = useState(/** @type {{value: T | null, problem: any}} */ ({ value: null, problem: null }));
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    let isCurrent = true;
    load().then(
      (value) => isCurrent && setState({ value, problem: null }),
      (problem) => isCurrent && setState((before) => ({ value: before.value, problem })),
    );
    return () => {
      isCurrent = false;
    };
  }, [key, turn]);
  return { ...state, reload: () => setTurn((number) => number + 1) };
}
