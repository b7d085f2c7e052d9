/** The page of a DiLoCo server. It follows /status and /history, and sends the token as every other client does. */
import { bytes, count, duration, number } from "../../../hub/ui/core/format.js";

/** @typedef {{loss: number | null, norm: number | null, cosine: number | null, staleness: number, is_counted: boolean}} WorkerRound */
/** @typedef {{round: number, fragment: number, seconds: number | null, loss: number | null, gradient_norm: number | null, workers: Record<string, WorkerRound>}} Round */
/** @typedef {{label: string, color: string, points: [number, number][]}} Series */

const EVERY_MS = 2000;
const TIMEOUT_MS = 30000;
const KEPT = 512;
const SHOWN_ROUNDS = 12;
const TOKEN = "skyward-diloco-token";

/** @param {string} id @returns {any} */
const part = (id) => document.getElementById(id);

/** @param {string} name @param {Record<string, string>} [attributes] @param {...(Node | string)} children @returns {any} */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** @param {string} name @param {Record<string, string | number>} attributes @param {string} [text] */
function drawn(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  if (text !== undefined) made.textContent = text;
  return made;
}

// Requests -------------------------------------------------------------------------------------------------------------

// The fragment of an address is never sent to a server. It leaves the address bar at once, so that nobody copies it.
// The storage of the tab keeps the token, so that the page can be loaded again.
function takeToken() {
  const given = new URLSearchParams(window.location.hash.slice(1)).get("token");
  if (given) {
    window.sessionStorage.setItem(TOKEN, given);
    window.history.replaceState(null, "", window.location.pathname);
  }
  return window.sessionStorage.getItem(TOKEN) ?? "";
}

let token = takeToken();

class Refusal extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** @param {string} path @param {Record<string, unknown>} [body] */
async function request(path, body) {
  const response = await fetch(path, {
    method: body ? "POST" : "GET",
    headers: { Authorization: `Bearer ${token}` },
    body: body && JSON.stringify(body),
    cache: "no-store",
    credentials: "omit",
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  const content = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refusal(response.status, content.message ?? `HTTP status ${response.status}`);
  return content;
}

// State ----------------------------------------------------------------------------------------------------------------

/** @type {Round[]} */
let rounds = [];
/** Start of the server that they are from, and its training; see `DeltaExchange.origin`. */
let origin = { id: "", state: "" };
/** @type {any} */
let status = null;
/** Whether this page has stopped the server, and whether it has ended since. */
let isStopping = false;
let hasEnded = false;
/** Colours of workers, in the order in which they were seen. @type {Map<string, string>} */
const colors = new Map();

/** @param {string} worker */
function colorOf(worker) {
  if (!colors.has(worker)) colors.set(worker, `c${colors.size % 10}`);
  return colors.get(worker) ?? "main";
}

async function fetchNews() {
  const now = await request("/status");
  let answer = await request(`/history?first=${rounds.length ? rounds[rounds.length - 1].round + 1 : 0}`);
  if (answer.id !== origin.id) {
    // It may go on from an older save, or with another training, whose rounds begin again.
    answer = await request("/history");
    const isSame = answer.state === origin.state;
    rounds = rounds.filter(({ round }) => isSame && round < answer.began_in);
    origin = answer;
  }
  rounds = [...rounds, ...answer.rounds].slice(-KEPT);
  status = now;
}

async function look() {
  if (!document.hidden && (token || !status)) await lookNow();
  window.setTimeout(look, EVERY_MS);
}

async function lookNow() {
  try {
    await fetchNews();
    if (hasEnded) isStopping = hasEnded = false; // it was started again
    showProblem(status.save_error ? "The server cannot save." : "", status.save_error);
    show();
  } catch (error) {
    const refusal = error instanceof Refusal ? error : null;
    if (refusal?.status === 401) askForToken();
    else if (isStopping) {
      hasEnded = true;
      showState("stopped", "stopped");
    } else {
      showState("no answer", "lost");
      const text = refusal ? refusal.message : "It may have ended. This page tries again every two seconds.";
      showProblem("The server does not answer.", text);
    }
  }
}

function askForToken() {
  showState("locked", "lost");
  showProblem(token ? "The server refuses this token." : "", token ? "Take the one that it keeps." : "");
  token = "";
  status = {};
  part("sign-in").hidden = false;
  part("shown").hidden = part("controls").hidden = true;
}

part("sign-in").addEventListener("submit", (/** @type {SubmitEvent} */ event) => {
  event.preventDefault();
  token = part("sign-in").elements.token.value.trim();
  window.sessionStorage.setItem(TOKEN, token);
  lookNow();
});

// Controls -------------------------------------------------------------------------------------------------------------

/** @param {string} title @param {string} text @param {string} action @returns {Promise<boolean>} */
function isSure(title, text, action) {
  const dialog = part("ask");
  dialog.querySelector("h2").textContent = title;
  dialog.querySelector("p").textContent = text;
  dialog.querySelector("[type=submit]").textContent = action;
  dialog.showModal();
  return new Promise((done) => {
    const answer = (/** @type {boolean} */ isYes) => {
      dialog.onsubmit = dialog.oncancel = dialog.querySelector("[value=no]").onclick = null;
      dialog.close();
      done(isYes);
    };
    dialog.onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      answer(true);
    };
    dialog.oncancel = dialog.querySelector("[value=no]").onclick = () => answer(false);
  });
}

/** Say something for a few seconds. @param {string} text */
function notify(text) {
  const notice = element("div", { class: "toast" }, text);
  part("notices").append(notice);
  window.setTimeout(() => notice.remove(), 6000);
}

/** @param {() => Promise<string>} action */
async function attempt(action) {
  try {
    notify(await action());
  } catch (error) {
    notify(error instanceof Refusal ? error.message : "The server does not answer.");
  }
  await lookNow();
}

part("save").addEventListener("click", () =>
  attempt(async () => {
    const { path } = await request("/control/save", {});
    return path ? `Saved: ${path}` : "There is nothing to save yet.";
  }),
);

part("stop").addEventListener("click", async () => {
  const text = "It saves and ends. Workers go on, each alone, until it is started again.";
  if (!(await isSure("Stop the server?", text, "Stop"))) return;
  isStopping = true;
  attempt(async () => {
    const { problem } = await request("/control/stop", {});
    return problem ? `The server ends, but ${problem}.` : "The server has saved, and ends.";
  });
});

/** @param {string} worker */
async function kick(worker) {
  const text = "Its round does not wait for it any longer. If its process lives, it joins again.";
  if (!(await isSure(`Evict ${worker}?`, text, "Evict"))) return;
  attempt(async () => {
    const { was_present } = await request("/control/kick", { worker });
    return was_present ? `${worker}: evicted` : `${worker} was gone already.`;
  });
}

// Words ----------------------------------------------------------------------------------------------------------------

/** @param {string} text @param {string} kind Class of the pill. */
function showState(text, kind) {
  part("state").textContent = text;
  part("state").className = `pill ${kind}`;
}

/** @param {string} title @param {string} text */
function showProblem(title, text) {
  part("problem").hidden = !title && !text;
  part("problem").querySelector("b").textContent = title;
  part("problem").querySelector("span").textContent = text;
}

/** @param {number | null | undefined} value */
const short = (value) => (typeof value === "number" ? number(Number(value.toPrecision(3))) : "–");

/** @param {(number | null)[]} values */
function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/** @param {Round | null} round */
const agreement = (round) => (round ? mean(Object.values(round.workers).map(({ cosine }) => cosine)) : null);

function show() {
  part("sign-in").hidden = true;
  part("shown").hidden = part("controls").hidden = false;
  const { workers, parameters, is_async, num_fragments } = status;
  if (isStopping) showState("stopping", "stopped");
  else showState(workers.length ? "training" : "waiting for workers", workers.length ? "running" : "");
  const fragments = num_fragments > 1 ? `, ${num_fragments} fragments` : "";
  part("where").textContent = parameters
    ? `${count(parameters, "parameter")}${fragments}, ${is_async ? "asynchronous" : "synchronous"} rounds`
    : "No model yet: the first worker brings one.";
  part("save").disabled = !status.can_save;
  part("save").title = status.can_save ? "" : "The server was started without a folder for saves.";
  showTiles();
  showLegend();
  for (const chart of charts) chart.draw();
  showWorkers();
  showRounds();
}

function showTiles() {
  const { workers, last } = status;
  const trains = workers.filter((/** @type {any} */ { is_awaited }) => is_awaited).length;
  const saved = status.saved_round === null ? (status.can_save ? "not yet" : "no folder") : `round ${status.saved_round}`;
  const tiles = [
    ["Round", number(status.round), last?.seconds ? `last ${duration(last.seconds * 1000)}` : ""],
    ["Workers", number(workers.length), workers.length ? `${trains} in training` : ""],
    ["Mean loss", short(last?.loss), ""],
    ["Outer gradient", short(last?.gradient_norm), "norm"],
    ["Agreement", short(agreement(last)), "mean cosine"],
    ["Received", bytes(status.received_bytes), `${bytes(status.sent_bytes)} sent`],
    ["Saved", saved, ""],
  ];
  part("tiles").replaceChildren(
    ...tiles.map(([name, value, note]) =>
      element("div", { class: "card tile" }, element("small", {}, name), element("b", { class: "number" }, value), " ", element("span", { class: "muted" }, note)),
    ),
  );
}

function showLegend() {
  const names = [...new Set(rounds.flatMap((round) => Object.keys(round.workers)))].sort();
  part("legend").replaceChildren(
    ...[["mean", "main"], ...names.map((name) => [name, colorOf(name)])].map(([name, color]) =>
      element("span", { class: `legend-item ${color}` }, element("i", { class: "swatch" }), element("b", {}, name)),
    ),
  );
}

// Tables ---------------------------------------------------------------------------------------------------------------

/**
 * Show rows in a table, and leave alone what has not changed: a button keeps the focus, and a selection stays.
 * @param {HTMLTableElement} table
 * @param {string[]} titles
 * @param {number} texts Number of columns with text. All others are numbers.
 * @param {{key: string, title?: string, cells: (string | Node)[]}[]} rows
 */
function fill(table, titles, texts, rows) {
  const kind = (/** @type {number} */ i) => (i < texts ? "fit" : "number");
  if (!table.tHead) {
    const cells = titles.map((title, i) => element("th", { scope: "col", class: kind(i) }, title));
    table.append(element("thead", {}, element("tr", {}, ...cells)), element("tbody"));
  }
  const body = table.tBodies[0];
  const old = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const wanted = rows.map(({ key, title = "", cells }) => {
    const row = old.get(key) ?? element("tr", { "data-key": key });
    row.title = title;
    cells.forEach((cell, i) => {
      const place = row.cells[i] ?? row.appendChild(element("td", { class: kind(i) }));
      if (typeof cell !== "string") {
        if (!place.firstChild) place.append(cell);
      } else if (place.textContent !== cell) place.textContent = cell;
    });
    return row;
  });
  if (wanted.some((row, i) => body.rows[i] !== row) || wanted.length !== body.rows.length) body.replaceChildren(...wanted);
}

/** @param {any} worker @returns {string} What it told when it joined. */
function about({ host, gpus, bits }) {
  const parts = [host && `on ${host}`, gpus > 0 && count(gpus, "GPU"), bits && `sends ${bits} bits for each value`];
  return parts.filter(Boolean).join(", ");
}

function showWorkers() {
  const titles = ["Worker", "State", "Steps", "Steps/s", "H", "Loss", "Cosine", "Staleness", "Up", "Down", "Heard", ""];
  const workers = status.workers.toSorted((/** @type {any} */ a, /** @type {any} */ b) => (a.worker < b.worker ? -1 : 1));
  const rows = workers.map((/** @type {any} */ row) => {
    const button = element("button", { class: "button small danger", type: "button", "aria-label": `Evict ${row.worker}` }, "Evict");
    button.addEventListener("click", () => kick(row.worker));
    const state = row.is_counted === false ? "refused" : row.is_awaited ? "trains" : "waits";
    return {
      key: row.worker,
      title: about(row),
      cells: [
        ...[row.worker, state, row.local_step === undefined ? "–" : number(row.local_step), short(row.steps_per_second)],
        ...[short(row.sync_every), short(row.loss), short(row.cosine), short(row.staleness)],
        ...[bytes(row.received_bytes), bytes(row.sent_bytes), row.silent_s < 1 ? "just now" : `${duration(Math.round(row.silent_s) * 1000)} ago`, button],
      ],
    };
  });
  fill(part("workers"), titles, 2, rows);
}

function showRounds() {
  const titles = ["Round", "Mean loss", "Outer gradient", "Least cosine", "Workers", "Refused", "Time"];
  const rows = rounds.slice(-SHOWN_ROUNDS).reverse().map((round) => {
    const parts = Object.values(round.workers);
    const cosines = parts.map(({ cosine }) => cosine).filter((cosine) => cosine !== null);
    const refused = Object.entries(round.workers).filter(([, { is_counted }]) => !is_counted).map(([name]) => name);
    return {
      key: String(round.round),
      cells: [
        ...[number(round.round), short(round.loss), short(round.gradient_norm)],
        cosines.length ? short(Math.min(...cosines)) : "–",
        ...[number(parts.length - refused.length), refused.join(", ") || "–"],
        round.seconds === null ? "–" : duration(round.seconds * 1000),
      ],
    };
  });
  fill(part("rounds"), titles, 1, rows);
}

// Charts ---------------------------------------------------------------------------------------------------------------

const HEIGHT = 200;
const LEFT = 54;
const RIGHT = 12;
const TOP = 8;
const BOTTOM = 24;

/** Round numbers in a range, about as many as wanted. @param {number} low @param {number} high @param {number} wanted */
function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((size) => size >= rough) ?? rough;
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step + 0); // no −0
  return found;
}

class Chart {
  /** @param {string} title @param {() => Series[]} series @param {[number, number]} [range] Values that are always in sight. */
  constructor(title, series, range) {
    this.title = title;
    this.series = series;
    this.range = range;
    this.last = element("span", { class: "last number" });
    this.plot = element("div", { class: "plot" });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.card = element("article", { class: "card chart", "aria-label": title }, element("header", {}, element("h3", {}, title), this.last), this.plot);
    part("charts").append(this.card);
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.plot.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.leave());
    /** @type {Series[]} */
    this.shown = [];
    /** @type {((x: number) => number) | null} */
    this.across = null;
  }

  draw() {
    this.shown = this.series().filter(({ points }) => points.length);
    const points = this.shown.flatMap((series) => series.points);
    if (!points.length) {
      this.across = null;
      this.plot.replaceChildren(element("div", { class: "note" }, "No values yet"));
      return;
    }
    const width = Math.max(160, this.plot.clientWidth);
    const [xs, ys] = [points.map(([x]) => x), [...points.map(([, y]) => y), ...(this.range ?? [])]];
    const [first, end] = [Math.min(...xs), Math.max(...xs)];
    let [low, high] = [Math.min(...ys), Math.max(...ys)];
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
    const across = (/** @type {number} */ x) => LEFT + (first === end ? 0.5 : (x - first) / (end - first)) * (width - LEFT - RIGHT);
    const down = (/** @type {number} */ y) => TOP + ((high - y) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": this.words() });
    for (const y of ticks(low, high, 6)) {
      svg.append(drawn("line", { class: "grid-line", x1: LEFT, x2: width - RIGHT, y1: down(y), y2: down(y) }));
      svg.append(drawn("text", { x: LEFT - 8, y: down(y) + 4, "text-anchor": "end" }, number(Number(y.toPrecision(6)))));
    }
    for (const x of first === end ? [first] : ticks(first, end, Math.max(1, Math.floor(width / 70))).filter(Number.isInteger))
      svg.append(drawn("text", { x: across(x), y: HEIGHT - 6, "text-anchor": "middle" }, number(x)));
    for (const { color, points: own } of this.shown) {
      const places = own.map(([x, y]) => `${across(x).toFixed(1)},${down(y).toFixed(1)}`);
      if (own.length > 1) svg.append(drawn("polyline", { class: `line ${color}`, points: places.join(" ") }));
      else svg.append(drawn("circle", { class: `dot-mark ${color}`, cx: across(own[0][0]), cy: down(own[0][1]), r: 3 }));
    }
    this.at = drawn("line", { class: "at", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    svg.append(this.at);
    this.across = across;
    this.plot.replaceChildren(svg, this.tip);
    const leading = this.shown.find(({ color }) => color === "main") ?? (this.shown.length === 1 ? this.shown[0] : null);
    this.last.textContent = leading ? short(leading.points[leading.points.length - 1][1]) : "";
  }

  words() {
    return `${this.title} by round. ${this.shown.map(({ label, points }) => `${label}: ${short(points[points.length - 1][1])}`).join(", ")}`;
  }

  /** @param {PointerEvent} event */
  point(event) {
    const { across } = this;
    if (!across) return;
    const left = event.clientX - this.plot.getBoundingClientRect().left;
    const xs = [...new Set(this.shown.flatMap(({ points }) => points.map(([x]) => x)))];
    const x = xs.reduce((best, other) => (Math.abs(across(other) - left) < Math.abs(across(best) - left) ? other : best));
    const rows = this.shown.flatMap(({ label, color, points }) => {
      const found = points.find((point) => point[0] === x);
      return found ? [element("div", { class: "row" }, element("span", { class: `swatch ${color}` }), element("span", {}, label), element("b", {}, short(found[1])))] : [];
    });
    this.tip.replaceChildren(element("b", {}, `round ${number(x)}`), ...rows.slice(0, 10));
    this.tip.hidden = false;
    const isRight = across(x) > this.plot.clientWidth / 2;
    this.tip.style.top = `${TOP}px`;
    this.tip.style.left = `${isRight ? Math.max(0, across(x) - this.tip.offsetWidth - 12) : across(x) + 12}px`;
    this.at?.setAttribute("x1", String(across(x)));
    this.at?.setAttribute("x2", String(across(x)));
    this.at?.setAttribute("visibility", "visible");
  }

  leave() {
    this.tip.hidden = true;
    this.at?.setAttribute("visibility", "hidden");
  }
}

/** @param {(round: Round) => number | null} value @returns {[number, number][]} */
const pointsOf = (value) => rounds.flatMap((round) => (value(round) === null ? [] : [[round.round, Number(value(round))]]));

/** A line for each worker. @param {"loss" | "cosine"} field @returns {Series[]} */
const byWorker = (field) =>
  [...new Set(rounds.flatMap((round) => Object.keys(round.workers)))].sort().map((name) => ({
    label: name,
    color: colorOf(name),
    points: pointsOf(({ workers }) => workers[name]?.[field] ?? null),
  }));

/** A line for each fragment: their norms differ. @returns {Series[]} */
function gradients() {
  const fragments = [...new Set(rounds.map(({ fragment }) => fragment))].sort((a, b) => a - b);
  const color = (/** @type {number} */ fragment) => (fragments.length > 1 ? `c${fragment % 10}` : "main");
  return fragments.map((fragment) => ({
    label: fragments.length > 1 ? `fragment ${fragment}` : "norm",
    color: color(fragment),
    points: pointsOf((round) => (round.fragment === fragment ? round.gradient_norm : null)),
  }));
}

const charts = [
  new Chart("Loss", () => [...byWorker("loss"), { label: "mean", color: "main", points: pointsOf(({ loss }) => loss) }]),
  new Chart("Norm of the outer gradient", gradients),
  new Chart("Cosine with the mean", () => [...byWorker("cosine"), { label: "mean", color: "main", points: pointsOf(agreement) }], [0, 1]),
  new Chart("Seconds between rounds", () => [{ label: "seconds", color: "main", points: pointsOf(({ seconds }) => seconds) }], [0, 0]),
];

look();
