/** Answers that stay fresh: loaded again each few seconds, and at once when an event says that something changed. */
import { useLoaded } from "./widgets.js";
import { follow, get } from "../core/api.js";
import { useEffect, useRef, useState } from "../core/html.js";
import { isSearch } from "../core/trials.js";

const REFRESH_MS = 5000;
const SWEEP_MS = 2000;
/** Events come in bursts: a job that begins has three. */
const GATHER_MS = 250;

/**
 * Load something when `key` changes, each few seconds, and when an event of these kinds arrives.
 * @template T
 * @param {() => Promise<T>} load
 * @param {string} key
 * @param {string[]} [kinds] Such as "job". None: no events are followed.
 * @param {number} [period_ms] Time between two looks.
 */
export function useFresh(load, key, kinds = [], period_ms = REFRESH_MS) {
  const [turn, setTurn] = useState(0);
  const heard = kinds.join(" ");
  useEffect(() => {
    const again = () => document.visibilityState === "visible" && setTurn((now) => now + 1);
    const timer = window.setInterval(again, period_ms);
    let gathering = 0;
    const end = heard
      ? follow({ kind: heard.split(" ") }, () => {
          window.clearTimeout(gathering);
          gathering = window.setTimeout(again, GATHER_MS);
        })
      : () => {};
    return () => {
      window.clearInterval(timer);
      window.clearTimeout(gathering);
      end();
    };
  }, [heard, period_ms]);
  return useLoaded(load, `${key} ${turn}`);
}

/** A sweep and its trials. Only those that changed are asked for again. @param {string} id */
export function useSweep(id) {
  const [state, setState] = useState(/** @type {{sweep: import("../core/types.js").Sweep | null, search: import("../core/types.js").Search | null, trials: import("../core/types.js").Trial[], problem: any}} */ ({ sweep: null, search: null, trials: [], problem: null }));
  const known = useRef({ version: -1, trials: /** @type {Map<number, import("../core/types.js").Trial>} */ (new Map()) });
  const look = async () => {
    try {
      const sweep = /** @type {import("../core/types.js").Sweep} */ (await get(`/v1/sweeps/${encodeURIComponent(id)}`));
      const search = isSearch(sweep) ? await get(`/v1/hpo/${encodeURIComponent(id)}`) : null;
      const kept = known.current;
      if (sweep.version === kept.version) {
        if (search) setState((before) => (before.search?.status === search.status && before.search?.job === search.job ? before : { ...before, search }));
        return;
      }
      for (;;) {
        const changes = await get(`/v1/sweeps/${encodeURIComponent(id)}/trials`, { since: Math.max(0, kept.version) });
        for (const trial of changes.trials) kept.trials.set(trial.id, trial);
        kept.version = changes.version;
        if (changes.is_complete) break;
      }
      const trials = [...kept.trials.values()].sort((a, b) => a.number - b.number);
      setState({ search, sweep: { ...sweep, version: kept.version, trials: trials.length }, trials, problem: null });
    } catch (problem) {
      setState((before) => ({ ...before, problem }));
    }
  };
  useEffect(() => {
    void look();
    const timer = window.setInterval(() => document.visibilityState === "visible" && void look(), SWEEP_MS);
    return () => window.clearInterval(timer);
  }, [id]);
  return { ...state, reload: () => void look() };
}

/** Now, each second while something goes on. @param {boolean} isRunning */
export function useNow(isRunning) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    if (!isRunning) return;
    const timer = window.setInterval(() => setNow(Date.now()), 1000);
    return () => window.clearInterval(timer);
  }, [isRunning]);
  return now;
}
