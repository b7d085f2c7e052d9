/** Trials of a sweep: parameters as values, the best ones, and trials in the shape of runs for the plots. */

/** @typedef {import("./types.js").Trial} Trial */
/** @typedef {import("./types.js").Sweep} Sweep */
/** @typedef {import("./types.js").Run} Run */

/** A parameter's value: samplers see the index of a choice. @param {{value: number | string, distribution: string}} parameter */
export function valueOfParameter({ value, distribution }) {
  const { attributes = {}, choices } = JSON.parse(distribution);
  const all = attributes.choices ?? choices;
  return all ? all[Number(value)] : Number(value);
}

/** @param {Trial} trial @returns {Record<string, any>} */
export function paramsOf(trial) {
  return Object.fromEntries(Object.entries(trial.params).map(([name, parameter]) => [name, valueOfParameter(parameter)]));
}

/** A text of a parameter's value. @param {any} value */
export const paramText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** A finite value of an objective; null where there is none. @param {Trial} trial @param {number} objective */
export function valueOf(trial, objective) {
  const value = Number(trial.values?.[objective] ?? NaN);
  return trial.state === "completed" && Number.isFinite(value) ? value : null;
}

/** Whether a value is better than another. @param {string} direction @param {number} a @param {number} b */
export const isBetter = (direction, a, b) => (direction === "maximize" ? a > b : a < b);

/** Trials that no other one beats: the best one, or with several objectives the Pareto front. @param {Sweep} sweep @param {Trial[]} trials */
export function bestTrials({ directions }, trials) {
  const rows = trials
    .map((trial) => ({ trial, values: directions.map((_, i) => valueOf(trial, i)) }))
    .filter(({ values }) => values.every((value) => value !== null));
  if (directions.length === 1) {
    const best = rows.reduce((/** @type {any} */ first, row) => (!first || isBetter(directions[0], Number(row.values[0]), first.values[0]) ? row : first), null);
    return best ? [best.trial] : [];
  }
  const beats = (/** @type {any[]} */ a, /** @type {any[]} */ b) =>
    directions.every((direction, i) => !isBetter(direction, b[i], a[i])) && directions.some((direction, i) => isBetter(direction, a[i], b[i]));
  return rows.filter(({ values }) => !rows.some((other) => beats(other.values, values))).map(({ trial }) => trial);
}

/** Best value up to each trial, as [number, value]. @param {Trial[]} trials In the order of their numbers. @param {number} objective @param {string} direction */
export function bestSoFar(trials, objective, direction) {
  /** @type {[number, number][]} */
  const line = [];
  for (const trial of trials) {
    const value = valueOf(trial, objective);
    if (value !== null && (!line.length || isBetter(direction, value, line[line.length - 1][1]))) line.push([trial.number, value]);
  }
  return line;
}

/** A trial as a run, for plots that know runs. @param {Trial} trial @param {string[]} objectives @returns {Run} */
export function asRun(trial, objectives) {
  const metrics = objectives.flatMap((key, i) => {
    const value = valueOf(trial, i);
    return value === null ? [] : [{ key, value, step: 0, timestamp: 0 }];
  });
  const params = Object.fromEntries(Object.entries(paramsOf(trial)).map(([name, value]) => [name, paramText(value)]));
  return {
    ...{ id: String(trial.id), experiment_id: "", name: `trial ${trial.number}`, status: trial.state, lifecycle: "active" },
    ...{ user_id: "", start_time: 0, end_time: null, params, tags: {}, metrics },
  };
}

/** Whether skyward runs the sweep: a study of Optuna has no configuration here. @param {Sweep} sweep */
export const isSearch = ({ system_attrs }) => "skyward:config" in system_attrs;

/** Text of an attribute of a trial, which is JSON. @param {Trial} trial @param {string} name */
export function attributeOf({ user_attrs }, name) {
  const value = name in user_attrs ? JSON.parse(user_attrs[name]) : "";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Run of a trial, if it has one. @param {Trial} trial */
export const runOf = (trial) => attributeOf(trial, "run");

/** What ended a trial, where that says more than its state. @param {Trial} trial */
export const endOf = (trial) => attributeOf(trial, "error") || attributeOf(trial, "stopped_by");

/** @typedef {{number: number, trial: Trial | undefined, job: import("./types.js").Job | undefined, state: string, why: string, save: import("./types.js").JobEvent | undefined}} TrialLine */

/**
 * Trials as the page of their sweep's job shows them, the newest first.
 * @param {Trial[]} trials
 * @param {import("./types.js").Job[]} jobs Jobs of the trials; none where trials are calls of the sweep's job.
 * @param {import("./types.js").JobEvent[]} events Those of the sweep's job.
 * @returns {TrialLine[]}
 */
export function trialLines(trials, jobs, events) {
  const [trialOf, jobOf] = [new Map(trials.map((trial) => [trial.number, trial])), new Map(jobs.map((job) => [Number(job.spec.trial?.number), job]))];
  /** @type {Map<number, import("./types.js").JobEvent>} */
  const saves = new Map();
  for (const event of events) {
    const folder = /[/]trial-(\d{5,})(?=[/]|$)/.exec(event.kind === "saved" ? (event.save?.path ?? "") : "");
    const number = Number(folder?.[1]);
    if (folder && event.at >= (saves.get(number)?.at ?? 0)) saves.set(number, event);
  }
  return [...new Set([...trialOf.keys(), ...jobOf.keys()])]
    .sort((a, b) => b - a)
    .map((number) => {
      const [trial, job] = [trialOf.get(number), jobOf.get(number)];
      // A trial runs from when it was asked for, and its job may wait.
      const state = job && (trial?.state ?? "running") === "running" ? job.status : String(trial?.state);
      const save = job?.saved_at ? { at: job.saved_at, kind: "saved", attempt: 0 } : saves.get(number);
      return { number, trial, job, state, why: (trial && endOf(trial)) || job?.why || "", save };
    });
}

/** Names of the objectives: those that the sweep gives them, or "value". @param {Sweep} sweep @param {import("./types.js").Search | null} [search] */
export function objectiveNames({ directions, system_attrs }, search = null) {
  if (search) return search.metrics;
  /** @type {unknown} */
  let given = null;
  try {
    given = JSON.parse(system_attrs["study:metric_names"] ?? "null");
  } catch {
    // names that no reader understands are no names
  }
  const names = Array.isArray(given) ? given : [];
  return directions.map((_, i) => String(names[i] ?? (directions.length === 1 ? "value" : `value ${i + 1}`)));
}
