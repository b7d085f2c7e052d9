/** A list of runs that is fetched as it is scrolled: pages by token, of which only those near the eye are kept. */
import { get } from "./api.js";
import { rowOf, textOf } from "./columns.js";

/** @typedef {import("./columns.js").Row} Row */
/** @typedef {{token: string | null, first: number, size: number, rows: Row[] | null, isLoading: boolean}} Page */
/** @typedef {{kind: "row", index: number} | {kind: "group", group: number}} Item */

const FIRST_PAGE = 100;
const NEXT_PAGES = 500;
/** Pages in memory. A page of 500 runs with 20 metrics is about 3 MB. */
const KEPT = 12;

export class RunList {
  /**
   * @param {{experiments: string[], filter: string, order: string, group: string, view: string}} search
   * @param {() => void} changed Is called when something arrived.
   */
  constructor(search, changed) {
    this.search = search;
    this.changed = changed;
    /** @type {Page[]} */
    this.pages = [{ token: null, first: 0, size: 0, rows: null, isLoading: false }];
    /** @type {string | null} Token of the page behind the last. Null before the first page and after the last. */
    this.next = null;
    this.isLoaded = false;
    /** @type {any} */
    this.problem = null;
    /** @type {{start: number, value: string}[]} Groups in order, with the number of their first row. */
    this.groups = [];
    this.abort = new AbortController();
  }

  /** Rows that are known so far. */
  get known() {
    const last = this.pages[this.pages.length - 1];
    return last.first + last.size;
  }

  get isComplete() {
    return this.isLoaded && this.next === null;
  }

  /** Lines to draw: rows, and a head for each group. */
  get length() {
    return this.known + this.groups.length;
  }

  /** @param {number} line @returns {Item} */
  item(line) {
    if (!this.groups.length) return { kind: "row", index: line };
    let [low, high] = [0, this.groups.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.groups[middle].start + middle <= line) low = middle;
      else high = middle - 1;
    }
    const head = this.groups[low].start + low;
    return head === line ? { kind: "group", group: low } : { kind: "row", index: line - low - 1 };
  }

  /** Size of a group, and whether it is all of it. @param {number} group */
  groupSize(group) {
    const end = this.groups[group + 1]?.start;
    return { size: (end ?? this.known) - this.groups[group].start, isAll: end !== undefined || this.isComplete };
  }

  /** @param {number} index @returns {Row | null} Null while it is fetched. */
  row(index) {
    const page = this.pageOf(index);
    return page?.rows?.[index - page.first] ?? null;
  }

  /** @param {number} index */
  pageOf(index) {
    let [low, high] = [0, this.pages.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.pages[middle].first <= index) low = middle;
      else high = middle - 1;
    }
    return this.pages[low];
  }

  /** All rows in memory. */
  rowsHere() {
    return this.pages.flatMap((page) => page.rows ?? []);
  }

  /** Make sure that these rows are here or on their way. @param {number} from @param {number} to */
  want(from, to) {
    for (const page of this.pages) {
      if (page.first <= to && (page.first + page.size > from || !this.isLoaded) && !page.rows) void this.load(page);
    }
    if (this.isLoaded && this.next !== null && to > this.known - NEXT_PAGES / 2) {
      const page = { token: this.next, first: this.known, size: 0, rows: null, isLoading: false };
      this.next = null;
      this.pages.push(page);
      void this.load(page, true);
    }
    this.forget(from);
  }

  /** Drop the pages that are farthest from a row. Their tokens stay. @param {number} near */
  forget(near) {
    const full = this.pages.filter((page) => page.rows);
    if (full.length <= KEPT) return;
    full.sort((a, b) => Math.abs(b.first - near) - Math.abs(a.first - near));
    for (const page of full.slice(0, full.length - KEPT)) page.rows = null;
  }

  /** @param {Page} page @param {boolean} [isNew] */
  async load(page, isNew = !this.isLoaded) {
    if (page.isLoading) return;
    page.isLoading = true;
    try {
      const answer = await get("/v1/runs", this.parameters(page), this.abort.signal);
      page.rows = answer.runs.map(rowOf);
      if (isNew) {
        page.size = answer.runs.length;
        this.next = answer.next_page_token || null;
        this.isLoaded = true;
        this.addGroups(page);
      }
      this.problem = null;
    } catch (problem) {
      if (this.abort.signal.aborted) return;
      this.problem = problem;
      if (isNew && this.isLoaded) {
        this.pages.pop();
        this.next = page.token;
      }
    } finally {
      page.isLoading = false;
    }
    this.changed();
  }

  /** @param {Page} page */
  parameters(page) {
    const { experiments, filter, order, group, view } = this.search;
    const orders = [group && `${orderOf(group)} ASC`, order].filter(Boolean);
    const limit = page.first === 0 ? FIRST_PAGE : NEXT_PAGES;
    return { experiment_id: experiments, filter, order_by: orders, view, limit, page_token: page.token };
  }

  /** @param {Page} page */
  addGroups(page) {
    const { group } = this.search;
    if (!group) return;
    page.rows?.forEach((row, i) => {
      const value = textOf(row, group);
      if (this.groups[this.groups.length - 1]?.value !== value) this.groups.push({ start: page.first + i, value });
    });
  }

  /** Fetch the first page again, to show what happened since. */
  async refresh() {
    const first = this.pages[0];
    if (!this.isLoaded || first.isLoading) return;
    const answer = await get("/v1/runs", this.parameters(first), this.abort.signal).catch(() => null);
    if (!answer) return;
    if (!first.size && answer.runs.length) {
      // An empty list has no row that would move from under a reader.
      this.isLoaded = false;
      await this.load(first);
      return;
    }
    const isSame = answer.runs.length === first.size && first.rows?.every((row, i) => row.run.id === answer.runs[i].id);
    if (isSame) first.rows = answer.runs.map(rowOf);
    else this.isStale = true;
    this.changed();
  }

  isStale = false;

  close() {
    this.abort.abort();
  }
}

/** @param {string} id */
function orderOf(id) {
  return id.includes(".") ? id.replace(/^(\w+)\.(.*)$/s, (_, kind, name) => `${kind}.\`${name}\``) : `attributes.${id}`;
}
