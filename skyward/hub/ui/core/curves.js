/** Arithmetic of curves: axes, smoothing, thinning, and tables that a chart can draw. */

/** @typedef {import("./types.js").Points} Points */
/** @typedef {import("./types.js").Curve} Curve */
/** @typedef {import("./types.js").Axis} Axis */

/** @returns {Points} */
export function noPoints() {
  return { steps: new Float64Array(0), times: new Float64Array(0), values: new Float64Array(0) };
}

/**
 * Positions of points on an axis, in steps or seconds.
 * @param {Points} points
 * @param {Axis} axis
 * @param {number} start
 */
export function positions(points, axis, start) {
  if (axis === "step") return points.steps;
  return points.times.map(axis === "wall" ? (time) => time / 1000 : (time) => (time - start) / 1000);
}

/**
 * Points in the order of an axis. Points come in the order of time, and a resumed run steps back.
 * @param {ArrayLike<number>} xs
 * @param {ArrayLike<number>} ys
 * @returns {[ArrayLike<number>, ArrayLike<number>]} Strictly ascending positions. The last value at a position counts.
 */
export function ascending(xs, ys) {
  let isAscending = true;
  for (let i = 1; i < xs.length && isAscending; i++) isAscending = xs[i] > xs[i - 1];
  if (isAscending) return [xs, ys];
  const order = Array.from(xs, (_, i) => i).sort((a, b) => xs[a] - xs[b] || a - b);
  /** @type {number[]} */
  const left = [];
  /** @type {number[]} */
  const right = [];
  for (const i of order) {
    if (left.length && left[left.length - 1] === xs[i]) right[right.length - 1] = ys[i];
    else {
      left.push(xs[i]);
      right.push(ys[i]);
    }
  }
  return [left, right];
}

/**
 * Exponential moving average without the bias towards zero of its beginning. Gaps stay gaps.
 * @param {ArrayLike<number>} values
 * @param {number} weight 0: no smoothing; close to 1: much.
 */
export function smooth(values, weight) {
  const smoothed = new Float64Array(values.length);
  let mean = 0;
  let norm = 0;
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (Number.isFinite(value)) {
      mean = weight * mean + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      smoothed[i] = mean / norm;
    } else smoothed[i] = value;
  }
  return smoothed;
}

/**
 * Values that a chart can draw: null is a gap.
 * @param {ArrayLike<number>} values
 * @param {boolean} isLog A logarithm has no place for zero and below.
 * @returns {(number | null)[]}
 */
export function drawable(values, isLog) {
  return Array.from(values, (value) => (Number.isFinite(value) && (!isLog || value > 0) ? value : null));
}

/**
 * Points with others behind them, those that are there already left out.
 * @param {Points} points
 * @param {[number, number, number][]} added Step, time and value of each, in the order of time.
 * @returns {Points}
 */
export function extended(points, added) {
  const n = points.times.length;
  const last = n ? points.times[n - 1] : -Infinity;
  const known = new Set();
  for (let i = n - 1; i >= 0 && points.times[i] === last; i--) known.add(`${points.steps[i]} ${points.values[i]}`);
  const fresh = added.filter(([step, time, value]) => time > last || (time === last && !known.has(`${step} ${value}`)));
  if (!fresh.length) return points;
  const column = (/** @type {Float64Array} */ old, /** @type {0 | 1 | 2} */ which) => {
    const whole = new Float64Array(n + fresh.length);
    whole.set(old);
    fresh.forEach((point, i) => (whole[n + i] = Number(point[which])));
    return whole;
  };
  return { steps: column(points.steps, 0), times: column(points.times, 1), values: column(points.values, 2) };
}

/**
 * Curves as lines of text, to open in a spreadsheet.
 * @param {{label: string, key: string, points: Points}[]} curves
 */
export function curvesToCsv(curves) {
  const lines = ["run,metric,step,timestamp,value"];
  for (const { label, key, points } of curves) {
    const head = `${csvCell(label)},${csvCell(key)}`;
    for (let i = 0; i < points.values.length; i++)
      lines.push(`${head},${points.steps[i]},${points.times[i]},${points.values[i]}`);
  }
  return `${lines.join("\n")}\n`;
}

/**
 * A cell of a CSV file. A spreadsheet must not take a name for a formula.
 * @param {unknown} value
 */
export function csvCell(value) {
  let text = String(value ?? "");
  if (/^[=+@\t\r]|^-(?!\d|Infinity)/.test(text)) text = `'${text}`;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
