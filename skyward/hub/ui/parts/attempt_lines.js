/** Attempts of a job on a line of time: when it waited, started, ran, saved, made way and moved. */
import { bytes, clock, duration, moment } from "../core/format.js";
import { html } from "../core/html.js";

/** @typedef {import("../core/types.js").Job} Job */
/** @typedef {import("../core/types.js").Attempt} Attempt */
/** @typedef {import("../core/types.js").JobEvent} JobEvent */
/** @typedef {import("../core/types.js").JobHistory} JobHistory */
/** @typedef {{begins: number, ends: number, look: string, text: string}} Stretch */

const TICKS = 4;
const SHOWN = 50;

/** Stretches of an attempt: its start, its run, and its way out. @param {Attempt} attempt @param {JobEvent[]} events @param {number} now @param {string} status */
export function stretchesOf(attempt, events, now, status) {
  const end = attempt.ended_at ?? now;
  const began = attempt.began_at ?? end;
  const preempted = events.find(({ kind, attempt: number }) => kind === "preempting" && number === attempt.number);
  const lost = events.find(({ kind, attempt: number }) => kind === "lost" && number === attempt.number);
  const leaves = Math.max(began, Math.min(end, preempted?.at ?? lost?.at ?? end));
  /** @type {Stretch[]} */
  const stretches = [{ begins: attempt.reserved_at, ends: began, look: "starting", text: "starts" }];
  const outcome = attempt.ended_at === null ? (leaves < end ? "running" : status) : attempt.end;
  if (attempt.began_at !== null) stretches.push({ begins: began, ends: leaves, look: leaves < end ? "running" : outcome, text: leaves < end ? "ran" : attempt.ended_at === null ? "runs" : attempt.end.replace("_", " ") });
  if (leaves < end) stretches.push({ begins: leaves, ends: end, look: "preempting", text: preempted ? "saves and ends" : "is lost; its machines may live on" });
  return stretches.filter(({ begins, ends }) => ends > begins);
}

/** Times in which the job waited for machines. @param {Job} job @param {number} now @returns {Stretch[]} */
export function waitsOf({ created_at, attempts, ended_at }, now) {
  const starts = [created_at, ...attempts.map((attempt) => attempt.ended_at ?? now)];
  const ends = [...attempts.map(({ reserved_at }) => reserved_at), ended_at ?? now];
  return starts
    .map((begins, i) => ({ begins, ends: ends[i], look: "queued", text: "waits" }))
    .filter(({ begins, ends: until }) => until > begins);
}

/** Machines of an attempt in words, and whether they differ from those before. @param {Attempt} attempt @param {Attempt | undefined} before */
function placeOf(attempt, before) {
  const nodes = attempt.nodes.length ? `node${attempt.nodes.length > 1 ? "s" : ""} ${attempt.nodes.join(", ")}` : "no node";
  const place = `${attempt.machines}, ${nodes}`;
  const hasMoved = before && (before.machines !== attempt.machines || String(before.nodes) !== String(attempt.nodes));
  return { place, hasMoved };
}

/** @param {{stretch: Stretch, place: (at: number) => number}} props */
function Bar({ stretch: { begins, ends, look, text }, place }) {
  const title = `${text}: ${duration(ends - begins)} from ${moment(begins)}`;
  return html`<i role="listitem" class=${`bar ${look}`} style=${{ left: `${place(begins)}%`, width: `max(3px, ${place(ends) - place(begins)}%)`, top: 0, bottom: 0 }} title=${title} aria-label=${title}><span>${text}</span></i>`;
}

/** A save in words. @param {JobEvent} event */
export function saveText({ at, save }) {
  const step = save?.step === null || save?.step === undefined ? "" : ` step ${save.step}`;
  return `saved${step} ${moment(at)}${save ? `: ${bytes(save.bytes)} in ${duration(save.seconds * 1000)}, ${save.path}` : ""}`;
}

/** @param {{job: Job, history: JobHistory, now: number}} props */
export function AttemptLines({ job, history, now }) {
  const end = job.ended_at ?? now;
  const whole = Math.max(1000, end - job.created_at);
  const place = (/** @type {number} */ at) => Math.min(100, Math.max(0, (100 * (at - job.created_at)) / whole));
  const ticks = [...Array(TICKS + 1).keys()].map((i) => job.created_at + (i * whole) / TICKS);
  const saves = history.events.filter(({ kind }) => kind === "saved");
  const first = Math.max(0, job.attempts.length - SHOWN);
  return html`<section class="card"><header><h2 class="grow">Attempts</h2><span class="muted">${duration(end - job.created_at)} since it was submitted</span></header>
    <div class="body device-lines wide-names"><div class="lane ticks"><span></span><div class="lane-bars">${ticks.map((at, i) => html`<small key=${i} class=${i === TICKS ? "last" : i ? "" : "first"} style=${{ left: `${place(at)}%` }}>${clock(at, whole)}</small>`)}</div></div>
    <div role="list" aria-label="Attempts">
      <div class="lane"><span class="muted" role="presentation">queue</span><div class="lane-bars" role="presentation">${waitsOf(job, end).map((stretch) => html`<${Bar} key=${stretch.begins} stretch=${stretch} place=${place} />`)}</div></div>
      ${job.attempts.slice(first).map((attempt, i) => {
        const { place: where, hasMoved } = placeOf(attempt, job.attempts[first + i - 1]);
        return html`<div class="lane" key=${attempt.number}><span role="presentation" title=${where}>${attempt.number} <span class="muted">${where}${hasMoved ? " · moved" : ""}</span></span><div class="lane-bars" role="presentation">${stretchesOf(attempt, history.events, end, job.status).map((stretch) => html`<${Bar} key=${stretch.begins} stretch=${stretch} place=${place} />`)}
          ${saves.filter((save) => save.attempt === attempt.number).map((save) => html`<i role="listitem" class="save-mark" key=${save.at} style=${{ left: `${place(save.at)}%` }} title=${saveText(save)} aria-label=${saveText(save)}></i>`)}</div></div>`;
      })}</div>
    ${first > 0 && html`<p class="muted">The first ${first} attempts are left out here.</p>`}
    <p class="legend-line muted"><i class="bar starting"></i>starts <i class="bar running"></i>runs <i class="bar preempting"></i>makes way, or is lost <i class="bar completed"></i>completed <i class="bar failed"></i>failed <i class="save-mark"></i>saved</p></div></section>`;
}
