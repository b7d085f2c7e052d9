/** A canvas that fills its card, is drawn again when its size or the theme changes, and finds what the pointer is near. */
import { savePng } from "../core/download.js";
import { html, useEffect, useRef, useState } from "../core/html.js";
import { themeChanges } from "../core/session.js";
import { Icon } from "./icon.js";

/** @typedef {{pen: CanvasRenderingContext2D, width: number, height: number, ink: (name: string) => string, focus: string | null}} Drawing */

/**
 * @param {{title: string, height: number, least?: number, draw: (drawing: Drawing) => void, near: (x: number, y: number, width: number, height: number) => {id: string, text: string} | null, open: (id: string) => void, version: string}} props
 *   `near` gives the run at a place. `version` changes when the picture does.
 */
export function Canvas({ title, height, least = 0, draw, near, open, version }) {
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const [width, setWidth] = useState(0);
  const [hover, setHover] = useState(/** @type {{id: string, text: string, x: number, y: number} | null} */ (null));
  useEffect(() => {
    const frame = /** @type {HTMLElement} */ (canvas.current?.parentElement);
    const watcher = new ResizeObserver(() => setWidth(Math.max(least, frame.clientWidth)));
    watcher.observe(frame);
    return () => watcher.disconnect();
  }, [least]);
  useEffect(() => {
    const sheet = canvas.current;
    if (!sheet || !width) return;
    const scale = window.devicePixelRatio || 1;
    sheet.width = width * scale;
    sheet.height = height * scale;
    const pen = /** @type {CanvasRenderingContext2D} */ (sheet.getContext("2d"));
    pen.scale(scale, scale);
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const style = getComputedStyle(document.documentElement);
    draw({ pen, width, height, ink: (name) => style.getPropertyValue(name).trim(), focus: hover?.id ?? null });
    sheet.dataset.drawn = "true";
  }, [width, height, version, hover?.id, themeChanges.value]);
  const move = (/** @type {MouseEvent} */ event) => {
    const found = near(event.offsetX, event.offsetY, width, height);
    setHover(found && { ...found, x: event.offsetX, y: event.offsetY });
  };
  return html`<article class="card chart"><header><h3>${title}</h3><button class="button bare small icon-only" title="Save as PNG" aria-label="Save as PNG" onClick=${() => canvas.current && savePng(canvas.current, title)}><${Icon} name="image" /></button></header>
    <div class="body" style=${{ position: "relative", height: `${height + 28}px` }}>
      <div class="scroll-x"><canvas class="canvas-plot" ref=${canvas} style=${{ height: `${height}px`, width: width ? `${width}px` : "100%", cursor: hover ? "pointer" : "default" }} role="img" aria-label=${title}
        onMouseMove=${move} onMouseLeave=${() => setHover(null)} onClick=${() => hover && open(hover.id)}></canvas></div>
      ${hover && html`<div class="tip" style=${{ left: `${Math.min(hover.x + 24, Math.max(0, width - 200))}px`, top: `${hover.y + 20}px` }}>${hover.text}</div>`}</div></article>`;
}
