/** Numbers, times and sizes as people read them. */

const integers = new Intl.NumberFormat("en-US");
const days = new Intl.DateTimeFormat("en-US", { day: "numeric", month: "short", year: "numeric" });
const dates = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const exactClocks = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const clocks = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const moments = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

/**
 * A metric's value in at most five significant digits.
 * @param {number | string | null | undefined} value
 */
export function number(value) {
  if (value === null || value === undefined || value === "") return "";
  const number = Number(value);
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "NaN" : number > 0 ? "∞" : "−∞";
  const size = Math.abs(number);
  if (Number.isInteger(number) && size < 1e9) return integers.format(number).replace("-", "−");
  if (size !== 0 && (size >= 1e6 || size < 1e-3))
    return number
      .toExponential(3)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e")
      .replaceAll("-", "−");
  const short = Number(number.toPrecision(5));
  return (size >= 1000 ? integers.format(short) : String(short)).replace("-", "−");
}

/** @param {number} count @param {string} noun @param {string} [plural] */
export function count(count, noun, plural = `${noun}s`) {
  return `${integers.format(count)} ${count === 1 ? noun : plural}`;
}

/** @param {number | null | undefined} ms */
export function duration(ms) {
  if (ms === null || ms === undefined || ms < 0) return "";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const seconds = ms / 1000;
  if (seconds < 60) return `${seconds < 10 ? Math.round(seconds * 10) / 10 : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return seconds % 60 >= 1 ? `${minutes} min ${Math.floor(seconds) % 60} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** @param {number | null | undefined} at @param {number} [now] */
export function ago(at, now = Date.now()) {
  if (!at) return "";
  const seconds = Math.round((now - at) / 1000);
  if (seconds < 0) return moment(at);
  if (seconds < 5) return "just now";
  if (seconds < 60) return `${seconds} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  if (seconds < 30 * 86400) return `${count(Math.floor(seconds / 86400), "day")} ago`;
  return days.format(at);
}

/** @param {number | null | undefined} at */
export function moment(at) {
  return at ? moments.format(at) : "";
}

/** @param {number} usd */
export function money(usd) {
  return usd ? `${usd.toFixed(usd < 1 ? 4 : 2)} USD` : "free";
}

/** Time of the day, or the day where hours say nothing. @param {number} at @param {number} span_ms Of what is shown. */
export function clock(at, span_ms) {
  return (span_ms > 2 * 86_400_000 ? dates : span_ms < 600_000 ? exactClocks : clocks).format(at);
}

/** @param {number | null | undefined} size */
export function bytes(size) {
  if (size === null || size === undefined) return "";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  let left = size;
  while (left >= 1000 && unit < units.length - 1) {
    left /= 1000;
    unit += 1;
  }
  return `${unit === 0 || left >= 100 ? Math.round(left) : Math.round(left * 10) / 10} ${units[unit]}`;
}

/**
 * A run's length: until its end, or until now while it runs.
 * @param {{start_time: number, end_time: number | null, status: string, heartbeat_at?: number | null}} run
 * @param {number} [now]
 */
export function runDuration(run, now = Date.now()) {
  const end = run.end_time ?? (run.status === "running" ? now : run.heartbeat_at);
  return end && run.start_time ? duration(Math.max(0, end - run.start_time)) : "";
}
