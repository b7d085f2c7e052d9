/** Line icons, drawn on a grid of 16. */
import { html } from "../core/html.js";

const SHAPES = {
  experiments: "M6 2h4M7 2v4L3.2 12.4A1.1 1.1 0 0 0 4.2 14h7.6a1.1 1.1 0 0 0 1-1.6L9 6V2M5 10h6",
  runs: "M2 12.5 6 7.5l3 2.8 5-6.8",
  compare: "M2 11c3 0 3-7 6-7s3 5 6 5M2 13.5h12",
  jobs: "M2.5 4h7M2.5 8h11M2.5 12h5M12 2.5l1.5 1.5L12 5.5",
  capacity: "M3 3h10v10H3zM6 6h4v4H6zM6 1.5V3M10 1.5V3M6 13v1.5M10 13v1.5M1.5 6H3M1.5 10H3M13 6h1.5M13 10h1.5",
  sweeps: "M2 13.5h12M4 11h.1M6.5 8.5h.1M8.5 10h.1M11 5h.1M12.5 7.5h.1M9.5 3.5h.1",
  usage: "M2.5 13.5h11M4.5 13V9M8 13V4.5M11.5 13V7",
  hold: "M5.5 3.5v9M10.5 3.5v9",
  release: "M5 3l8 5-8 5z",
  retry: "M13 8a5 5 0 1 1-1.7-3.8L13 5.8M13 2.8v3h-3",
  pools: "M2.5 3h11v4h-11zM2.5 9h11v4h-11zM5 5h.1M5 11h.1",
  projects: "M2 4.5h4l1.5 1.5H14v7H2z",
  members: "M8 8a2.6 2.6 0 1 0 0-5.2A2.6 2.6 0 0 0 8 8ZM3 13.5c.5-2.4 2.5-3.7 5-3.7s4.5 1.3 5 3.7",
  users: "M6 7.5A2.3 2.3 0 1 0 6 2.9a2.3 2.3 0 0 0 0 4.6ZM1.8 13c.4-2.3 2-3.5 4.2-3.5s3.8 1.2 4.2 3.5M10.6 3.1a2.2 2.2 0 0 1 0 4.2M12 9.9c1.3.5 2 1.6 2.3 3.1",
  tokens: "M10.5 2.5a3 3 0 1 1-2.6 4.5L3 12v1.5h2V12h1.5v-1.5L8.5 8.5",
  audit: "M3.5 2.5h9v11h-9zM6 5.5h4M6 8h4M6 10.5h2.5",
  sun: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6ZM8 1.5v1M8 13.5v1M1.5 8h1M13.5 8h1M3.4 3.4l.7.7M11.9 11.9l.7.7M3.4 12.6l.7-.7M11.9 4.1l.7-.7",
  moon: "M13 9.5A5.5 5.5 0 0 1 6.5 3a5.5 5.5 0 1 0 6.5 6.5Z",
  search: "M7 2.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9ZM10.3 10.3 14 14",
  columns: "M2.5 3h11v10h-11zM6.2 3v10M9.8 3v10",
  group: "M2.5 3.5h5M5 7h8.5M5 10h8.5M2.5 13h5",
  link: "M6.5 9.5l3-3M7 4.5l1.2-1.2a2.8 2.8 0 0 1 4 4L11 8.5M9 11.5l-1.2 1.2a2.8 2.8 0 0 1-4-4L5 7.5",
  expand: "M9.5 2.5h4v4M6.5 13.5h-4v-4M13 3 9.3 6.7M3 13l3.7-3.7",
  image: "M2.5 3h11v10h-11zM2.5 11l3.2-3.5 2.6 2.7 2-1.9 3.2 3.2M10.5 6.2h.1",
  download: "M8 2.5v7.5M5 7.2l3 3 3-3M3 13.5h10",
  stop: "M4 4h8v8H4z",
  save: "M3 3h8l2 2v8H3zM5.5 3v3.5h4V3M5.5 13V9.5h5V13",
  abort: "M4 4l8 8M12 4l-8 8",
  file: "M4 2h5l3 3v9H4zM9 2v3h3",
  folder: "M2 4.5h4l1.5 1.5H14v7H2z",
  plus: "M8 3v10M3 8h10",
  trash: "M3 4.5h10M6 4.5V3h4v1.5M4.5 4.5l.5 9h6l.5-9",
  restore: "M3 8a5 5 0 1 0 1.7-3.8L3 5.8M3 2.8v3h3",
  signout: "M6.5 3H3v10h3.5M9.5 5l3 3-3 3M12.5 8H6",
};

/** @param {{name: keyof typeof SHAPES | string, size?: number}} props */
export function Icon({ name, size = 16 }) {
  return html`<svg class="icon" width=${size} height=${size} viewBox="0 0 16 16" fill="none" stroke="currentColor"
    stroke-width="1.4" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">
    <path d=${SHAPES[/** @type {keyof typeof SHAPES} */ (name)]} /></svg>`;
}
