/** uPlot, loaded when the first chart is drawn: it is a classic script, and most of what the pages weigh. */

/** @type {Promise<any> | null} */
let loading = null;

/** @returns {Promise<any>} The class `uPlot`. */
export function loadUPlot() {
  loading ??= new Promise((done, fail) => {
    const style = document.createElement("link");
    style.rel = "stylesheet";
    style.href = "/ui/vendor/uplot.css";
    const script = document.createElement("script");
    script.src = "/ui/vendor/uplot.js";
    script.onload = () => done(/** @type {any} */ (window).uPlot);
    script.onerror = () => {
      loading = null; // the next chart tries again
      fail(new Error("The charts' library cannot be loaded."));
    };
    document.head.append(style, script);
  });
  return loading;
}
