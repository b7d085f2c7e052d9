/** A run as it goes on: its events, and the points that arrive after a curve was fetched. */
import { follow } from "./api.js";
import { extended } from "./curves.js";

/** @typedef {import("./types.js").Points} Points */
/** @typedef {(points: Points) => Points} Extend Adds what has arrived to fetched points. */

/** Points of a metric that are kept for curves that are still on their way. */
const KEPT = 5000;

export class LiveRun {
  /**
   * @param {string} id
   * @param {{news: () => void, keys: (keys: string[]) => void}} heard `news`: the run changed. `keys`: these metrics have points.
   */
  constructor(id, heard) {
    this.id = id;
    this.heard = heard;
    /** @type {Map<string, [number, number, number][]>} */
    this.arrived = new Map();
    /** @type {Map<string, Set<(extend: Extend) => void>>} */
    this.listeners = new Map();
    this.end = follow({ run: id }, (event) => this.take(event));
  }

  /** @param {{run?: string, points?: Record<string, [number, number, number | string][]>}} event */
  take(event) {
    if (event.run && event.run !== this.id) return;
    if (!event.points) {
      this.heard.news();
      return;
    }
    for (const [key, points] of Object.entries(event.points)) {
      const fresh = /** @type {[number, number, number][]} */ (
        points.map(([step, time, value]) => [step, time, Number(value)])
      );
      const kept = [...(this.arrived.get(key) ?? []), ...fresh].slice(-KEPT);
      this.arrived.set(key, kept);
      for (const listener of this.listeners.get(key) ?? []) listener((points) => extended(points, fresh));
    }
    this.heard.keys(Object.keys(event.points));
  }

  /**
   * Hear points of a metric: at once those that have arrived since the page was opened, then each that arrives.
   * @param {string} key
   * @param {(extend: Extend) => void} listener
   * @returns {() => void} Ends it.
   */
  hear(key, listener) {
    const set = this.listeners.get(key) ?? new Set();
    this.listeners.set(key, set.add(listener));
    const arrived = this.arrived.get(key);
    if (arrived) listener((points) => extended(points, arrived));
    return () => void set.delete(listener);
  }

  /** Last value of a metric that arrived. @param {string} key */
  last(key) {
    return this.arrived.get(key)?.at(-1);
  }

  close() {
    this.end();
  }
}
