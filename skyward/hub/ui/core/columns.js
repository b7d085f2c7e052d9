/** Columns of the runs' table: names, values, order. */
import { ago, duration, moment, number, runDuration } from "./format.js";

/** @typedef {import("./types.js").Run} Run */
/** @typedef {{id: string, title: string, order: string | null, isNumber: boolean, width: number}} Column */
/** @typedef {{run: Run, metrics: Map<string, number>}} Row A run with its metrics by name. */

const FIXED = /** @type {Record<string, [title: string, order: string | null, width: number]>} */ ({
  status: ["Status", "attributes.status", 118],
  start_time: ["Started", "attributes.start_time", 124],
  duration: ["Duration", null, 110],
  user_id: ["User", "attributes.user_id", 110],
  experiment: ["Experiment", null, 150],
  id: ["Id", "attributes.run_id", 280],
});

export const FIXED_COLUMNS = Object.keys(FIXED);

/** @param {string} id @returns {Column} */
export function columnOf(id) {
  const fixed = FIXED[id];
  if (fixed) return { id, title: fixed[0], order: fixed[1], isNumber: id === "duration", width: fixed[2] };
  const [kind, name] = split(id);
  const width = Math.min(190, Math.max(96, 40 + name.length * 7.4));
  return { id, title: name, order: `${kind}.${quoted(name)}`, isNumber: kind === "metrics", width };
}

/** @param {string} id @returns {[kind: string, name: string]} */
function split(id) {
  const dot = id.indexOf(".");
  return [id.slice(0, dot), id.slice(dot + 1)];
}

/** A name as the search grammar takes it. @param {string} name */
export function quoted(name) {
  return /^[A-Za-z_][\w]*$/.test(name) ? name : `\`${name}\``;
}

/** @param {Run} run @returns {Row} */
export function rowOf(run) {
  return { run, metrics: new Map(run.metrics.map(({ key, value }) => [key, Number(value)])) };
}

/** A cell's text. @param {Row} row @param {string} id */
export function textOf({ run, metrics }, id) {
  if (id === "start_time") return ago(run.start_time);
  if (id === "duration") return runDuration(run);
  if (id in FIXED) return String(run[/** @type {keyof Run} */ (id)] ?? "");
  const [kind, name] = split(id);
  if (kind === "metrics") return number(metrics.get(name));
  return (kind === "params" ? run.params : run.tags)[name] ?? "";
}

/** A cell's whole value, for the pointer that rests on it. @param {Row} row @param {string} id */
export function titleOf(row, id) {
  if (id === "start_time") return moment(row.run.start_time);
  if (id === "duration") return duration((row.run.end_time ?? Date.now()) - row.run.start_time);
  if (id.startsWith("metrics.")) return String(row.metrics.get(id.slice(8)) ?? "");
  return textOf(row, id);
}

/** Names of all columns that these runs have. @param {Row[]} rows */
export function columnsIn(rows) {
  const names = { metrics: new Set(), params: new Set(), tags: new Set() };
  for (const { run, metrics } of rows) {
    for (const key of metrics.keys()) names.metrics.add(`metrics.${key}`);
    for (const key of Object.keys(run.params)) names.params.add(`params.${key}`);
    for (const key of Object.keys(run.tags)) if (!key.startsWith("mlflow.")) names.tags.add(`tags.${key}`);
  }
  const sorted = (/** @type {Set<string>} */ set) => [...set].sort();
  return { metrics: sorted(names.metrics), params: sorted(names.params), tags: sorted(names.tags) };
}

/**
 * Columns for somebody who chose none: what the first runs have, and no system metrics.
 * @param {{metrics: string[], params: string[]}} found
 * @param {boolean} isOneExperiment
 */
export function usualColumns(found, isOneExperiment) {
  const metrics = found.metrics.filter((id) => !id.startsWith("metrics.system/")).slice(0, 5);
  const fixed = ["status", "start_time", "duration", "user_id"];
  return [...fixed, ...(isOneExperiment ? [] : ["experiment"]), ...metrics, ...found.params.slice(0, 6)];
}
