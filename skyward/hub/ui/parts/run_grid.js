/** The table of runs: only the rows in sight are in the document. */
import { columnOf, textOf, titleOf } from "../core/columns.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../core/html.js";
import { navigate, setQuery } from "../core/router.js";

/** @typedef {import("../core/run_list.js").RunList} RunList */
/** @typedef {import("../core/columns.js").Column} Column */
/** @typedef {import("../core/columns.js").Row} Row */

const ROW = 38;
const HEAD = 38;
/** Rows that are drawn beyond each edge. */
const BEYOND = 8;

/** @param {string} order @returns {[by: string, isDescending: boolean]} */
function orderParts(order) {
  const [, by, way] = /** @type {RegExpExecArray} */ (/^(.*?)(?:\s+(ASC|DESC))?$/is.exec(order.trim()));
  return [by, way?.toUpperCase() === "DESC"];
}

/** @param {{column: Column, order: string}} props */
function HeadCell({ column, order }) {
  const [by, isDescending] = orderParts(order);
  const isSorted = column.order !== null && by === column.order;
  const turn = () => setQuery({ order: `${column.order} ${isSorted && isDescending ? "ASC" : "DESC"}` });
  const sort = isSorted ? (isDescending ? "descending" : "ascending") : "none";
  return html`<div class=${`cell ${column.isNumber ? "number" : ""} ${isSorted ? "sorted" : ""}`} role="columnheader" aria-sort=${sort} title=${column.id}>
    ${column.order ? html`<button onClick=${turn}><span>${column.title}</span>${isSorted ? (isDescending ? "↓" : "↑") : ""}</button>` : column.title}</div>`;
}

/** @param {{row: Row, columns: Column[], line: number, template: string, isPicked: boolean, isFocused: boolean, toggle: (id: string) => void}} props */
function RunRow({ row, columns, line, template, isPicked, isFocused, toggle }) {
  const { run } = row;
  const style = { top: `${line * ROW}px`, gridTemplateColumns: template };
  return html`<div class=${`grid-row ${isPicked ? "picked" : ""} ${isFocused ? "focused" : ""}`} style=${style} role="row" aria-rowindex=${line + 2} aria-selected=${String(isPicked)} id=${`line-${line}`}>
    <div class="cell pick" role="gridcell"><input type="checkbox" tabindex="-1" checked=${isPicked} aria-label=${`Select ${run.name}`} onChange=${() => toggle(run.id)} /></div>
    <div class="cell name" role="gridcell"><span class=${`dot ${run.status}`} title=${run.status}></span><a href=${`/runs/${run.id}`} tabindex="-1" title=${run.name}>${run.name || run.id}</a></div>
    ${columns.map(({ id, isNumber }) => html`<div class=${`cell ${isNumber ? "number" : ""}`} role="gridcell" title=${titleOf(row, id)}>${textOf(row, id)}</div>`)}
  </div>`;
}

/** @param {{list: RunList, group: number, line: number}} props */
function GroupRow({ list, group, line }) {
  const { size, isAll } = list.groupSize(group);
  const { value } = list.groups[group];
  return html`<div class="grid-row group" role="row" style=${{ top: `${line * ROW}px` }}><div role="gridcell">${value || "none"}</div>
    <span class="muted">${columnOf(list.search.group).title} · ${size}${isAll ? "" : "+"}</span></div>`;
}

/** @param {{current: HTMLElement | null}} place */
function useScroll(place) {
  const [window_, setWindow] = useState({ top: 0, height: 900 });
  useLayoutEffect(() => {
    const grid = /** @type {HTMLElement} */ (place.current);
    let isWaiting = false;
    const look = () => {
      isWaiting = false;
      setWindow({ top: grid.scrollTop, height: grid.clientHeight });
    };
    const wait = () => {
      if (isWaiting) return;
      isWaiting = true;
      requestAnimationFrame(look);
    };
    const fit = () => {
      grid.style.setProperty("--grid-top", `${Math.round(grid.getBoundingClientRect().top + window.scrollY + 52)}px`);
      wait();
    };
    const watcher = new ResizeObserver(fit);
    watcher.observe(document.body);
    grid.addEventListener("scroll", wait, { passive: true });
    fit();
    return () => {
      watcher.disconnect();
      grid.removeEventListener("scroll", wait);
    };
  }, []);
  return window_;
}

/** @param {{list: RunList, columns: string[], order: string, picked: Set<string>, pick: (picked: Set<string>) => void}} props */
export function RunGrid({ list, columns: ids, order, picked, pick }) {
  const grid = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [focused, setFocused] = useState(-1);
  const { top, height } = useScroll(grid);
  const columns = ids.map(columnOf);
  const isNarrow = window.innerWidth <= 760;
  const template = `40px ${isNarrow ? 150 : 230}px ${columns.map(({ width }) => `${width}px`).join(" ")} minmax(0, 1fr)`;
  const from = Math.max(0, Math.floor(top / ROW) - BEYOND);
  const to = Math.min(list.length, Math.ceil((top + height) / ROW) + BEYOND);

  useEffect(() => list.want(from, to), [list, from, to, list.known, list.next]);
  useEffect(() => {
    if (grid.current) grid.current.scrollTop = 0;
    setFocused(-1);
  }, [list]);

  const toggle = (/** @type {string} */ id) => {
    const now = new Set(picked);
    if (!now.delete(id)) now.add(id);
    pick(now);
  };
  const go = (/** @type {number} */ line) => {
    const target = Math.max(0, Math.min(list.length - 1, line));
    setFocused(target);
    const place = /** @type {HTMLDivElement} */ (grid.current);
    const [above, below] = [target * ROW, (target + 1) * ROW + HEAD];
    if (above < place.scrollTop) place.scrollTop = above;
    else if (below > place.scrollTop + place.clientHeight) place.scrollTop = below - place.clientHeight;
  };
  const press = (/** @type {KeyboardEvent} */ event) => {
    const page = Math.max(1, Math.floor(height / ROW) - 2);
    const ways = /** @type {Record<string, number>} */ ({
      ArrowDown: focused + 1,
      ArrowUp: focused - 1,
      PageDown: focused + page,
      PageUp: focused - page,
      Home: 0,
      End: list.length - 1,
    });
    const item = focused >= 0 && focused < list.length ? list.item(focused) : null;
    const row = item?.kind === "row" ? list.row(item.index) : null;
    if (event.key in ways && event.target === grid.current) go(ways[event.key]);
    else if (event.key === "Enter" && row && event.target === grid.current) navigate(`/runs/${row.run.id}`);
    else if (event.key === " " && row && event.target === grid.current) toggle(row.run.id);
    else return;
    event.preventDefault();
  };
  const lines = Array.from({ length: Math.max(0, to - from) }, (_, i) => from + i);
  return html`<div class="grid" ref=${grid} tabindex="0" role="grid" aria-label="Runs" aria-rowcount=${list.isComplete ? list.length + 1 : -1}
      aria-multiselectable="true" aria-activedescendant=${focused >= 0 ? `line-${focused}` : null} onKeyDown=${press}>
    <div class="grid-head" role="row" style=${{ gridTemplateColumns: template }}>
      <div class="cell pick" role="columnheader"><span class="hidden-text">Selected</span></div>
      <div class="cell name" role="columnheader"><${HeadCell} column=${{ id: "name", title: "Name", order: "attributes.run_name", isNumber: false, width: 0 }} order=${order} /></div>
      ${columns.map((column) => html`<${HeadCell} key=${column.id} column=${column} order=${order} />`)}</div>
    <div class="grid-body" style=${{ height: `${(list.length + (list.isComplete ? 0 : 20)) * ROW}px` }} role="rowgroup">${lines.map(
      (line) => {
        const item = list.item(line);
        if (item.kind === "group")
          return html`<${GroupRow} key=${`group ${item.group}`} list=${list} group=${item.group} line=${line} />`;
        const row = list.row(item.index);
        if (!row)
          return html`<div class="grid-row" key=${line} style=${{ top: `${line * ROW}px`, gridTemplateColumns: "1fr" }}><div class="cell muted">…</div></div>`;
        return html`<${RunRow} key=${row.run.id} row=${row} columns=${columns} line=${line} template=${template}
        isPicked=${picked.has(row.run.id)} isFocused=${line === focused} toggle=${toggle} />`;
      },
    )}</div></div>`;
}
