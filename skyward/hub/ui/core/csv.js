/** Tables in text: comma- or tab-separated values. */

/**
 * @param {string} text
 * @param {string} separator
 * @param {number} most Rows that are read at most.
 * @returns {string[][]}
 */
export function parseTable(text, separator, most) {
  /** @type {string[][]} */
  const rows = [];
  /** @type {string[]} */
  let row = [];
  let cell = "";
  let isQuoted = false;
  for (let i = 0; i < text.length && rows.length < most; i++) {
    const sign = text[i];
    if (isQuoted) {
      if (sign === '"' && text[i + 1] === '"') cell += text[++i];
      else if (sign === '"') isQuoted = false;
      else cell += sign;
    } else if (sign === '"' && cell === "") isQuoted = true;
    else if (sign === separator || sign === "\n") {
      row.push(cell.replace(/\r$/, ""));
      cell = "";
      if (sign === "\n") {
        rows.push(row);
        row = [];
      }
    } else cell += sign;
  }
  if (rows.length < most && (cell || row.length)) rows.push([...row, cell]);
  return rows;
}

/**
 * A table in JSON: a list of objects, `{columns, data}`, or MLflow's `{columns: [...], data: [[...]]}`.
 * @param {unknown} value
 * @returns {string[][] | null}
 */
export function tableInJson(value) {
  const text = (/** @type {unknown} */ cell) => (typeof cell === "string" ? cell : (JSON.stringify(cell) ?? ""));
  if (
    Array.isArray(value) &&
    value.length &&
    value.every((row) => row && typeof row === "object" && !Array.isArray(row))
  ) {
    const names = [...new Set(value.flatMap((row) => Object.keys(row)))];
    return [names, ...value.map((row) => names.map((name) => text(row[name] ?? "")))];
  }
  const table = /** @type {{columns?: unknown, data?: unknown}} */ (value ?? {});
  if (Array.isArray(table.columns) && Array.isArray(table.data) && table.data.every(Array.isArray)) {
    return [table.columns.map(text), ...table.data.map((row) => row.map(text))];
  }
  return null;
}
