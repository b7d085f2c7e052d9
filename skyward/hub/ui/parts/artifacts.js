/** Files of a run. Whatever a file says, it runs nothing here: text is text, pictures are pictures, HTML has a sandbox. */
import { artifact, artifactAddress, get } from "../core/api.js";
import { parseTable, tableInJson } from "../core/csv.js";
import { saveBlob } from "../core/download.js";
import { bytes, count } from "../core/format.js";
import { html, useEffect } from "../core/html.js";
import { query, setQuery } from "../core/router.js";
import { Icon } from "./icon.js";
import { attempt, Empty, Paste, Problem, useLoaded } from "./widgets.js";

/** @typedef {import("../core/types.js").Run} Run */
/** @typedef {import("../core/types.js").Artifact} Artifact */

const PICTURES = /** @type {Record<string, string>} */ ({
  png: "image/png",
  jpg: "image/jpeg",
  jpeg: "image/jpeg",
  gif: "image/gif",
  webp: "image/webp",
  svg: "image/svg+xml",
});
const TABLES = /** @type {Record<string, string>} */ ({ csv: ",", tsv: "\t" });
const TEXTS = new Set(
  "cfg conf css csv html ini ipynb js json jsonl log md mlmodel out py rst sh sql text toml tsv txt xml yaml yml".split(
    " ",
  ),
);
const LARGEST_SHOWN = 5_000_000;
const ROWS = 1000;

/** @param {string} key */
const endingOf = (key) => /\.([^./]+)$/.exec(key.toLowerCase())?.[1] ?? key.toLowerCase().replace(/^.*\//, "");

/** @typedef {{kind: "picture", url: string} | {kind: "table", rows: string[][]} | {kind: "html", text: string} | {kind: "text", text: string} | {kind: "none", why: string}} Shown */

/** @param {string} run @param {Artifact} file @returns {Promise<Shown>} */
async function open(run, file) {
  const ending = endingOf(file.key);
  if (!(ending in PICTURES) && !TEXTS.has(ending))
    return { kind: "none", why: "Files of this kind are not shown here." };
  if (file.size > LARGEST_SHOWN)
    return {
      kind: "none",
      why: `The file has ${bytes(file.size)}. Files over ${bytes(LARGEST_SHOWN)} are not shown here.`,
    };
  const content = await artifact(run, file.key);
  if (ending in PICTURES)
    return { kind: "picture", url: URL.createObjectURL(new Blob([content], { type: PICTURES[ending] })) };
  const text = await content.text();
  if (ending in TABLES) return { kind: "table", rows: parseTable(text, TABLES[ending], ROWS + 1) };
  if (ending === "html") return { kind: "html", text };
  if (ending !== "json") return { kind: "text", text };
  try {
    const value = JSON.parse(text);
    const rows = tableInJson(value);
    return rows
      ? { kind: "table", rows: rows.slice(0, ROWS + 1) }
      : { kind: "text", text: JSON.stringify(value, null, 2) };
  } catch {
    return { kind: "text", text };
  }
}

/** @param {{rows: string[][]}} props */
export function DataTable({ rows }) {
  const [head = [], ...body] = rows;
  return html`<div class="scroll-x"><table class="plain"><thead><tr>${head.map((cell) => html`<th>${cell}</th>`)}</tr></thead>
    <tbody>${body.map((row) => html`<tr>${row.map((cell) => html`<td class=${cell !== "" && !Number.isNaN(Number(cell)) ? "number" : ""}>${cell}</td>`)}</tr>`)}</tbody></table></div>
    ${body.length >= ROWS && html`<div class="body muted">The first ${count(ROWS, "row")}.</div>`}`;
}

/** @param {{shown: Shown, name: string}} props */
function Content({ shown, name }) {
  if (shown.kind === "picture") return html`<div class="body"><img src=${shown.url} alt=${name} /></div>`;
  if (shown.kind === "table") return html`<${DataTable} rows=${shown.rows} />`;
  if (shown.kind === "html")
    return html`<iframe sandbox="" srcdoc=${shown.text} title=${name} referrerpolicy="no-referrer"></iframe>`;
  if (shown.kind === "text") return html`<pre>${shown.text}</pre>`;
  return html`<div class="empty"><p>${shown.why}</p></div>`;
}

/** @param {{run: Run, file: Artifact}} props */
function Preview({ run, file }) {
  const { value: shown, problem, reload } = useLoaded(() => open(run.id, file), `${run.id} ${file.key} ${file.sha256}`);
  useEffect(() => () => void (shown?.kind === "picture" && URL.revokeObjectURL(shown.url)), [shown]);
  const download = () => attempt(async () => saveBlob(await artifact(run.id, file.key), file.key.replace(/^.*\//, "")));
  return html`<section class="card preview" aria-label="Preview"><header><h2 class="grow">${file.key}</h2><span class="muted">${bytes(file.size)}</span>
      ${
        file.size > 50_000_000
          ? html`<a class="button small" href=${artifactAddress(run.id, file.key)} download><${Icon} name="download" />Download</a>`
          : html`<button class="button small" onClick=${download}><${Icon} name="download" />Download</button>`
      }</header>
    ${problem && html`<div class="body"><${Problem} problem=${problem} retry=${reload} /></div>`}
    ${shown ? html`<${Content} shown=${shown} name=${file.key} />` : !problem && html`<div class="body"><div class="bones"></div></div>`}</section>`;
}

/** @param {{run: Run}} props */
export function Artifacts({ run }) {
  const folder = query.value.get("folder") ?? "";
  const chosen = query.value.get("file") ?? "";
  const { value, problem, reload } = useLoaded(
    () => get(`/v1/runs/${run.id}/artifacts`, { prefix: folder }),
    `${run.id} ${folder}`,
  );
  const files = /** @type {Artifact[]} */ (value?.artifacts ?? []);
  const file = files.find(({ key, is_directory }) => key === chosen && !is_directory);
  if (problem) return html`<${Problem} problem=${problem} retry=${reload} />`;
  if (value && !files.length && !folder) {
    return html`<${Empty} icon="file" title="No artifacts"><p>Keep files with the run: pictures, tables, models.</p><${Paste} text=${`run.log_artifact("figures/loss.png", "loss.png")`} /><//>`;
  }
  const enter = (/** @type {Artifact} */ one) =>
    one.is_directory ? setQuery({ folder: one.key, file: null }, { replace: false }) : setQuery({ file: one.key });
  return html`<div class="files"><section class="card" aria-label="Files"><ul>
      ${folder && html`<li><button onClick=${() => setQuery({ folder: folder.includes("/") ? folder.replace(/\/[^/]*$/, "") : null, file: null })}><${Icon} name="folder" /><span>..</span></button></li>`}
      ${files.map(
        (
          one,
        ) => html`<li key=${one.key}><button onClick=${() => enter(one)} aria-current=${String(one.key === chosen)} title=${one.key}>
        <${Icon} name=${one.is_directory ? "folder" : "file"} /><span>${one.key.slice(folder ? folder.length + 1 : 0)}</span><small>${one.is_directory ? "" : bytes(one.size)}</small></button></li>`,
      )}</ul></section>
    ${file ? html`<${Preview} key=${file.key} run=${run} file=${file} />` : html`<div class="empty"><p>Choose a file to look into it.</p></div>`}</div>`;
}
