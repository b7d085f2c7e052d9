/** Calls of `/v1`, and the stream of its events. */
import { signal } from "./html.js";

/** @typedef {import("./types.js").Points} Points */

/** An answer that is no success, or no answer at all. */
export class ApiError extends Error {
  /**
   * @param {number} status 0 where the server was not reached.
   * @param {{code?: string, message?: string, field?: string, fix?: string}} detail
   */
  constructor(status, detail) {
    super(detail.message || (status ? `The server answered ${status}.` : "The server cannot be reached."));
    this.status = status;
    this.code = detail.code ?? "";
    this.field = detail.field ?? "";
    this.fix = detail.fix ?? "";
  }
}

const RETRY_PAUSES_MS = [200, 800];

/** True once the server refused our session: the sign-in page is shown then. */
export const isSignedOut = signal(false);

/** Name of the project whose things are shown. Empty: the one that the server chooses. */
export const project = signal(window.localStorage.getItem("project") ?? "");

/** @param {string} name */
export function chooseProject(name) {
  window.localStorage.setItem("project", name);
  project.value = name;
}

/**
 * Fetch, and repeat a read that the network cut: browsers drop all connections when Wi-Fi or a VPN changes.
 * @param {string} path
 * @param {RequestInit} options
 * @returns {Promise<Response>}
 */
async function fetchAgain(path, options) {
  for (const pause_ms of options.method === "GET" ? RETRY_PAUSES_MS : []) {
    try {
      return await fetch(path, options);
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") throw error;
      await new Promise((resolve) => setTimeout(resolve, pause_ms));
    }
  }
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The hub cannot be reached. Is it running?" });
  }
}

/**
 * @param {string} method
 * @param {string} path
 * @param {{body?: unknown, accept?: string, signal?: AbortSignal}} [options]
 * @returns {Promise<Response>}
 */
async function send(method, path, { body, accept = "application/json", signal: abort } = {}) {
  /** @type {Record<string, string>} */
  const headers = { accept };
  if (project.value) headers["x-skyward-project"] = project.value;
  if (body !== undefined) headers["content-type"] = "application/json";
  const content = body === undefined ? undefined : JSON.stringify(body);
  const answer = await fetchAgain(path, { method, headers, body: content, signal: abort });
  if (answer.ok) return answer;
  const detail = await answer.json().catch(() => ({}));
  if (answer.status === 401) isSignedOut.value = true;
  throw new ApiError(answer.status, detail.error ?? {});
}

/**
 * @param {string} path
 * @param {Record<string, string | number | string[] | null | undefined>} [parameters]
 */
export function address(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") query.append(name, String(one));
    }
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

/**
 * @param {string} path
 * @param {Record<string, string | number | string[] | null | undefined>} [parameters]
 * @param {AbortSignal} [abort]
 * @returns {Promise<any>}
 */
export async function get(path, parameters, abort) {
  return (await send("GET", address(path, parameters), { signal: abort })).json();
}

/**
 * An answer as text of another type than JSON, such as "text/csv".
 * @param {string} path
 * @param {string} accept
 * @param {Record<string, string | number>} [parameters]
 */
export async function text(path, accept, parameters) {
  return (await send("GET", address(path, parameters), { accept })).text();
}

/**
 * @param {"POST" | "PATCH" | "DELETE" | "PUT"} method
 * @param {string} path
 * @param {unknown} [body]
 * @returns {Promise<any>}
 */
export async function change(method, path, body) {
  const answer = await send(method, path, { body });
  const text = await answer.text();
  return text ? JSON.parse(text) : null;
}

/**
 * Points of a metric, thinned by the server to about `at_most`.
 * @param {string} run
 * @param {string} key
 * @param {{start?: number, end?: number, at_most?: number, abort?: AbortSignal}} [options]
 * @returns {Promise<Points>}
 */
export async function points(run, key, { start, end, at_most, abort } = {}) {
  const path = address(`/v1/runs/${encodeURIComponent(run)}/points`, { key, start, end, at_most });
  const answer = await send("GET", path, { accept: "application/octet-stream", signal: abort });
  return unpackPoints(await answer.arrayBuffer());
}

/**
 * @param {ArrayBuffer} packed int64 n, n int64 steps, n int64 times, n float64 values, all little-endian.
 * @returns {Points}
 */
export function unpackPoints(packed) {
  const n = packed.byteLength < 8 ? 0 : Number(new DataView(packed).getBigInt64(0, true));
  return {
    steps: integers(packed, 8, n),
    times: integers(packed, 8 + 8 * n, n),
    values: new Float64Array(packed, 8 + 16 * n, n),
  };
}

/**
 * Read int64 as float64. By halves, since a BigInt for each number is ten times slower.
 * @param {ArrayBuffer} packed
 * @param {number} offset
 * @param {number} n
 */
function integers(packed, offset, n) {
  const low = new Uint32Array(packed, offset, 2 * n);
  const high = new Int32Array(packed, offset, 2 * n);
  const numbers = new Float64Array(n);
  for (let i = 0; i < n; i++) numbers[i] = high[2 * i + 1] * 4294967296 + low[2 * i];
  return numbers;
}

/**
 * Bytes of an artifact, as a blob without a type: the caller says how it may be shown.
 * @param {string} run
 * @param {string} key
 */
export async function artifact(run, key) {
  return (await send("GET", artifactAddress(run, key), { accept: "*/*" })).blob();
}

/** @param {string} run @param {string} key */
export function artifactAddress(run, key) {
  return `/v1/runs/${encodeURIComponent(run)}/artifacts/${key.split("/").map(encodeURIComponent).join("/")}`;
}

/**
 * Follow events. The browser connects again by itself and names the last event that it saw.
 * @param {Record<string, string | string[]>} narrow `run` or `experiment`, and the `kind`s of events.
 * @param {(event: any) => void} hear Receives the parsed data of each event.
 * @returns {() => void} Ends it.
 */
export function follow(narrow, hear) {
  const source = new EventSource(address("/v1/events", { ...narrow, project: project.value }));
  const take = (/** @type {MessageEvent} */ message) => {
    const data = JSON.parse(message.data);
    hear(message.type === "message" ? data : { kind: message.type, ...data });
  };
  for (const kind of EVENT_KINDS) source.addEventListener(kind, take);
  return () => source.close();
}

/** Names of events that the hub sends. */
const EVENT_KINDS = [
  ...["message", "points", "run", "experiment", "command", "artifact", "tag", "param", "model", "job", "sweep"],
  "capacity",
];
