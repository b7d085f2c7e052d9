/** Answers that stay fresh: loaded again each few seconds, and at once when an event says that something changed. */
import { useLoaded } from "./widgets.js";
import { follow } from "../core/api.js";
import { useEffect, useState } from "../core/html.js";

const REFRESH_MS = 5000;
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
