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
 *
 * @typedef {object} QueuedJob A job that is not over.
 * @property {string} id
 * @property {string} name
 * @property {string} type
 * @property {string} user
 * @property {string} status
 * @property {boolean} is_held
 * @property {string} priority
 * @property {string} needs Machines that it needs, in words.
 * @property {string} why Why it waits, or what happens to it.
 * @property {number | null} place Among the waiting jobs of all projects.
 * @property {number | null} starts_by
 * @property {number} created_at
 * @property {number | null} started_at
 * @property {number} cost_usd
 * @property {number} attempt_count
 * @property {boolean} is_preemptible
 * @property {number} max_duration_s
 *
 * @typedef {object} DeviceSpan Devices that a job holds, or has reserved.
 * @property {string} job Empty for a job of another project.
 * @property {string} name
 * @property {string} state Of the job, or "reservation".
 * @property {number[]} nodes
 * @property {number[]} devices Their numbers on each node, if they have any.
 * @property {number} each
 * @property {number} begins_at
 * @property {number} ends_by
 * @property {boolean} on_loan
 *
 * @typedef {object} SetPlan
 * @property {string} name
 * @property {string} kind
 * @property {number} nodes
 * @property {number} devices
 * @property {string} accelerator
 * @property {boolean} is_draining
 * @property {number} full_until
 * @property {number} stranded
 * @property {DeviceSpan[]} spans
 *
 * @typedef {object} Attempt
 * @property {number} number
 * @property {string} machines
 * @property {number[]} nodes
 * @property {number} reserved_at
 * @property {number | null} began_at
 * @property {number | null} ended_at
 * @property {string} end
 * @property {string} error
 * @property {number} cost_usd
 * @property {number} output_bytes
 *
 * @typedef {object} Job
 * @property {string} id
 * @property {string} name
 * @property {string} type
 * @property {string} user
 * @property {string} status
 * @property {boolean} is_held
 * @property {string} priority
 * @property {Record<string, any>} spec
 * @property {number} created_at
 * @property {number | null} started_at
 * @property {number | null} ended_at
 * @property {string} why
 * @property {number} cost_usd
 * @property {number} attempt_count
 * @property {number | null} [saved_at] Time of its last checkpoint.
 * @property {string[]} results
 * @property {Attempt[]} attempts
 *
 * @typedef {object} Sweep
 * @property {number} id
 * @property {string} name
 * @property {string} owner
 * @property {("minimize" | "maximize")[]} directions
 * @property {number} created_at
 * @property {number} version
 * @property {number} trials
 * @property {Record<string, string>} user_attrs
 * @property {Record<string, string>} system_attrs
 *
 * @typedef {object} Search A sweep that skyward runs.
 * @property {number} id
 * @property {"queued" | "running" | "interrupted" | "completed" | "stopped" | "failed"} status
 * @property {string[]} metrics
 * @property {Record<string, any>} config
 * @property {string | null} run
 * @property {string | null} job
 *
 * @typedef {object} Trial
 * @property {number} id
 * @property {number} number
 * @property {"waiting" | "running" | "completed" | "pruned" | "failed"} state
 * @property {(number | string)[] | null} values
 * @property {Record<string, {value: number | string, distribution: string}>} params
 * @property {Record<string, string>} user_attrs
 * @property {Record<string, string>} system_attrs
 * @property {number | null} started_us
 * @property {number | null} ended_us
 *
 * @typedef {{path: string, step: number | null, bytes: number, seconds: number}} Save
 * @typedef {{at: number, kind: string, attempt: number, save?: Save | null}} JobEvent
 * @typedef {{number: number, devices: number[], saved_at: number | null, late_at: number | null, ends_by: number | null, usd_per_hour: number}} AttemptFacts
 * @typedef {{id: string, kind: string, target: string, at: number, tries: number, next_at: number | null, delivered_at: number | null, error: string}} Delivery
 * @typedef {{needs: string, events: JobEvent[], attempts: AttemptFacts[], result_sizes: Record<string, number>, deliveries: Delivery[]}} JobHistory
 *
 * @typedef {{at: number, waiting: number, has_more: boolean, jobs: QueuedJob[], sets: SetPlan[]}} Queue
 */
export {};
