/** Files that the page itself makes. */

/** @param {Blob} blob @param {string} name */
export function saveBlob(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replaceAll(/[^\w.-]+/g, "_");
  link.click();
  window.setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** @param {string} text @param {string} name */
export function saveCsv(text, name) {
  saveBlob(new Blob([text], { type: "text/csv" }), name);
}

/**
 * Save a canvas with the page's ground behind it and a title above it.
 * @param {HTMLCanvasElement} source
 * @param {string} title
 * @param {{label: string, color: string}[]} [legend]
 */
export function savePng(source, title, legend = []) {
  const scale = window.devicePixelRatio || 1;
  const style = getComputedStyle(document.documentElement);
  const line = 20 * scale;
  const picture = document.createElement("canvas");
  picture.width = source.width + line;
  picture.height = source.height + line * (2.5 + legend.length);
  const pen = /** @type {CanvasRenderingContext2D} */ (picture.getContext("2d"));
  pen.fillStyle = style.getPropertyValue("--surface");
  pen.fillRect(0, 0, picture.width, picture.height);
  pen.fillStyle = style.getPropertyValue("--ink");
  pen.font = `600 ${14 * scale}px ${getComputedStyle(document.body).fontFamily}`;
  pen.fillText(title, line / 2, line * 1.2);
  pen.drawImage(source, line / 2, line * 1.8);
  pen.font = `${12 * scale}px ${getComputedStyle(document.body).fontFamily}`;
  legend.forEach(({ label, color }, i) => {
    const y = source.height + line * (2.4 + i);
    pen.fillStyle = color;
    pen.fillRect(line / 2, y - line / 2, line / 2, line / 2);
    pen.fillStyle = style.getPropertyValue("--ink");
    pen.fillText(label, line * 1.4, y);
  });
  picture.toBlob((blob) => blob && saveBlob(blob, `${title}.png`));
}
