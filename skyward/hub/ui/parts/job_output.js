/** Output of a job as it is written, of all ranks or of one. */
import { address, project } from "../core/api.js";
import { bytes } from "../core/format.js";
import { html, useEffect, useMemo, useRef, useState } from "../core/html.js";

/** @typedef {import("../core/types.js").Job} Job */
/** @typedef {{attempt: number, rank: string, text: string}} Line */

const TAIL_BYTES = 500_000;
const KEPT_LINES = 20_000;
const SHOWN_LINES = 5_000;
const DRAW_MS = 150;
const RANK = /^\[(\d+)\] /;

/** The output of a job from a byte of an attempt on, as lines. It follows the later attempts too. */
class OutputLines {
  /** @param {string} job @param {number} attempt @param {number} start @param {() => void} changed */
  constructor(job, attempt, start, changed) {
    /** @type {Line[]} */
    this.lines = [];
    this.isOver = false;
    this.rest = "";
    this.attempt = attempt;
    this.isCut = start > 0;
    this.isWhole = start === 0; // otherwise the first line is the rest of one whose beginning is not here
    this.decoder = new TextDecoder();
    this.source = new EventSource(address(`/v1/jobs/${job}/logs`, { attempt, start, project: project.value }));
    this.source.addEventListener("output", (event) => {
      this.take(JSON.parse(/** @type {MessageEvent} */ (event).data));
      changed();
    });
    this.source.addEventListener("end", () => {
      this.isOver = true;
      this.source.close();
      this.flush();
      changed();
    });
  }

  /** @param {{attempt: number, data: string}} piece */
  take({ attempt, data }) {
    if (attempt !== this.attempt) {
      this.flush();
      this.attempt = attempt;
      this.decoder = new TextDecoder();
    }
    // A character may lie in two pieces, so the bytes are decoded as a stream.
    const text = this.rest + this.decoder.decode(Uint8Array.from(atob(data), (sign) => sign.charCodeAt(0)), { stream: true });
    const lines = text.split("\n");
    this.rest = lines.pop() ?? "";
    for (const line of lines) this.add(line);
    if (this.lines.length > KEPT_LINES) {
      this.lines.splice(0, this.lines.length - KEPT_LINES);
      this.isCut = true;
    }
  }

  /** @param {string} line */
  add(line) {
    if (!this.isWhole) {
      this.isWhole = true;
      return;
    }
    const text = line.slice(line.lastIndexOf("\r", line.length - 2) + 1); // progress bars write over their line
    this.lines.push({ attempt: this.attempt, rank: RANK.exec(text)?.[1] ?? "", text });
  }

  flush() {
    if (this.rest) this.add(this.rest);
    this.rest = "";
  }

  close() {
    this.source.close();
  }
}

/** @param {string} job @param {number} attempt @param {number} start @param {boolean} isLive */
function useOutput(job, attempt, start, isLive) {
  const [, setTurn] = useState(0);
  const [round, setRound] = useState(0);
  const [output, setOutput] = useState(/** @type {OutputLines | null} */ (null));
  useEffect(() => {
    let timer = 0;
    const opened = new OutputLines(job, attempt, start, () => {
      if (!timer)
        timer = window.setTimeout(() => {
          timer = 0;
          setTurn((turn) => turn + 1);
        }, DRAW_MS);
    });
    setOutput(opened);
    return () => {
      window.clearTimeout(timer);
      opened.close();
    };
  }, [job, attempt, round]);
  useEffect(() => {
    if (isLive && output?.isOver) setRound(round + 1); // the job was over, and begins again
  }, [isLive]);
  return output;
}

/** @param {{job: Job, attempt: number, setAttempt: (attempt: number) => void}} props */
function Lines({ job, attempt, setAttempt }) {
  const size = job.attempts.find(({ number }) => number === attempt)?.output_bytes ?? 0;
  const start = useMemo(() => Math.max(0, size - TAIL_BYTES), [attempt]);
  const output = useOutput(job.id, attempt, start, !job.ended_at);
  const [rank, setRank] = useState("");
  const frame = useRef(/** @type {HTMLPreElement | null} */ (null));
  const follows = useRef(true);
  const lines = output?.lines ?? [];
  const ranks = [...new Set(lines.map((line) => line.rank))].filter(Boolean).sort((a, b) => Number(a) - Number(b));
  const shown = lines.filter((line) => !rank || line.rank === rank).slice(-SHOWN_LINES);
  const text = shown.map((line, i) => `${i && shown[i - 1].attempt !== line.attempt ? `— attempt ${line.attempt} —\n` : ""}${rank ? line.text.replace(RANK, "") : line.text}`).join("\n");
  useEffect(() => {
    if (follows.current) frame.current?.scrollTo(0, frame.current.scrollHeight);
  }, [text]);
  const scrolled = () => {
    const at = frame.current;
    if (at) follows.current = at.scrollTop + at.clientHeight > at.scrollHeight - 30;
  };
  return html`<section class="card"><header><h2 class="grow">Output</h2>
      ${!output?.isOver && html`<span class="pill running">live</span>`}
      ${ranks.length > 0 && html`<label><span class="hidden-text">Rank</span><select value=${rank} onChange=${(/** @type {any} */ event) => setRank(event.target.value)}><option value="">All ranks</option>${ranks.map((one) => html`<option value=${one}>Rank ${one}</option>`)}</select></label>`}
      ${job.attempts.length > 1 && html`<label><span class="hidden-text">Attempt</span><select value=${attempt} onChange=${(/** @type {any} */ event) => setAttempt(Number(event.target.value))}>${job.attempts.map(({ number }) => html`<option value=${number}>from attempt ${number} on</option>`)}</select></label>`}</header>
    ${(output?.isCut || shown.length === SHOWN_LINES) && html`<p class="muted output-note">Earlier output is left out here: skyward job logs ${job.id.slice(0, 8)} prints all ${bytes(size)}.</p>`}
    ${shown.length ? html`<pre class="output" ref=${frame} onScroll=${scrolled} tabindex="0" aria-label="Output">${text}</pre>` : html`<div class="body muted">${output?.isOver ? "It wrote nothing." : "It has written nothing yet."}</div>`}</section>`;
}

/** @param {{job: Job}} props */
export function JobOutput({ job }) {
  const last = job.attempts.length ? job.attempts[job.attempts.length - 1].number : 1;
  const [chosen, setChosen] = useState(/** @type {number | null} */ (null));
  const [opened] = useState(last); // a later attempt goes on in the same lines
  const attempt = chosen ?? opened;
  return html`<${Lines} key=${attempt} job=${job} attempt=${attempt} setAttempt=${setChosen} />`;
}
