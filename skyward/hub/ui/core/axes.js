/** Values of runs as places on an axis: numbers by size, words side by side. */
import { number } from "./format.js";

/** @typedef {import("./types.js").Run} Run */
/** @typedef {{id: string, title: string, place: (run: Run) => number | null, marks: {at: number, text: string}[]}} Scale */

/** A run's value, as a column's name says. @param {Run} run @param {string} id */
export function valueOf(run, id) {
  const name = id.slice(id.indexOf(".") + 1);
  return id.startsWith("metrics.") ? run.metrics.find(({ key }) => key === name)?.value : run.params[name];
}

/** Names of all that can be an axis, those whose values differ first. @param {Run[]} runs */
export function axesOf(runs) {
  const params = new Set(runs.flatMap((run) => Object.keys(run.params).map((key) => `params.${key}`)));
  const metrics = new Set(
    runs
      .flatMap((run) => run.metrics.map(({ key }) => `metrics.${key}`))
      .filter((id) => !id.startsWith("metrics.system/")),
  );
  const differs = (/** @type {string} */ id) => new Set(runs.map((run) => String(valueOf(run, id) ?? ""))).size > 1;
  const ids = [...[...params].sort(), ...[...metrics].sort()];
  return [...ids.filter(differs), ...ids.filter((id) => !differs(id))];
}

/**
 * @param {string} id
 * @param {Run[]} runs
 * @returns {Scale} Places are from 0 to 1.
 */
export function scaleOf(id, runs) {
  const title = id.slice(id.indexOf(".") + 1);
  const values = runs.map((run) => valueOf(run, id)).filter((value) => value !== undefined && value !== "");
  const numbers = values.map(Number);
  if (values.length && numbers.every(Number.isFinite)) return numberScale(id, title, numbers);
  const words = [...new Set(values.map(String))].sort();
  const at = (/** @type {number} */ i) => (words.length < 2 ? 0.5 : i / (words.length - 1));
  return {
    id,
    title,
    place: (run) => {
      const i = words.indexOf(String(valueOf(run, id)));
      return i < 0 ? null : at(i);
    },
    marks: words.slice(0, 12).map((text, i) => ({ at: at(i), text })),
  };
}

/** @param {string} id @param {string} title @param {number[]} numbers @returns {Scale} */
function numberScale(id, title, numbers) {
  const [least, greatest] = [Math.min(...numbers), Math.max(...numbers)];
  const isLog = least > 0 && greatest / least >= 100; // learning rates
  const forth = isLog ? Math.log10 : (/** @type {number} */ value) => value;
  const back = isLog ? (/** @type {number} */ value) => 10 ** value : (/** @type {number} */ value) => value;
  const [low, high] = [forth(least), forth(greatest)];
  const place = (/** @type {number} */ value) => (high === low ? 0.5 : (forth(value) - low) / (high - low));
  const fifths = high === low ? [0.5] : [0, 0.25, 0.5, 0.75, 1];
  return {
    id,
    title,
    place: (run) => {
      const value = Number(valueOf(run, id) ?? NaN);
      return Number.isFinite(value) ? place(value) : null;
    },
    marks: fifths.map((at) => ({ at, text: number(back(low + at * (high - low))) })),
  };
}
