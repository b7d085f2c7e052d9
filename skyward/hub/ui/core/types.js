/**
 * Shapes of `/v1` answers, for the type checker. Times are milliseconds since 1970.
 *
 * @typedef {{key: string, value: number | string, step: number, timestamp: number}} Metric
 * @typedef {{key: string, path?: string, size: number, sha256?: string, is_directory?: boolean}} Artifact
 *
 * @typedef {object} Experiment
 * @property {string} id
 * @property {string} name
 * @property {string} [project]
 * @property {string} lifecycle
 * @property {number} created_at
 * @property {number} updated_at
 * @property {Record<string, string>} tags
 *
 * @typedef {object} Run
 * @property {string} id
 * @property {string} experiment_id
 * @property {string} [experiment]
 * @property {string} name
 * @property {string} status
 * @property {string} lifecycle
 * @property {string} user_id
 * @property {number} start_time
 * @property {number | null} end_time
 * @property {number | null} [heartbeat_at]
 * @property {string | null} [error]
 * @property {Record<string, string>} params
 * @property {Record<string, string>} tags
 * @property {Metric[]} metrics
 * @property {Artifact[]} [artifacts]
 * @property {{name: string, digest: string, source: string}[]} [inputs] Datasets that it read.
 * @property {Record<string, number | string>} [system_metrics] Last values, by name without the prefix `system/`.
 *
 * @typedef {{number: number, action: string, created_at: number, acknowledged_at?: number | null, result?: string | null}} Command
 *
 * @typedef {object} Me
 * @property {string} [user]
 * @property {string} [role]
 * @property {string} [project]
 * @property {string} [organization]
 * @property {boolean} [authentication] False where the server runs with --no-auth.
 *
 * @typedef {object} Points Columns of one metric, in the order of time.
 * @property {Float64Array} steps
 * @property {Float64Array} times
 * @property {Float64Array} values
 *
 * @typedef {object} Curve A line of a chart.
 * @property {string} label
 * @property {number} color Number of a colour of the palette.
 * @property {number} start Start of the run, for the axis of relative time.
 * @property {Points} points
 *
 * @typedef {"step" | "relative" | "wall"} Axis
 */
export {};
