/** The address as state: each view is its address, so that a copied link shows the same view. */
import { computed, signal } from "./html.js";

const address = signal(new URL(window.location.href));

export const path = computed(() => address.value.pathname);
export const query = computed(() => address.value.searchParams);

/**
 * Go to another address of the pages.
 * @param {string} to
 * @param {{replace?: boolean}} [options] `replace` leaves no step for the button "back".
 */
export function navigate(to, { replace = false } = {}) {
  const url = new URL(to, window.location.href);
  if (url.href === window.location.href) return;
  window.history[replace ? "replaceState" : "pushState"](null, "", url);
  const moved = url.pathname !== address.value.pathname;
  address.value = url;
  if (moved) {
    window.scrollTo(0, 0);
    document.querySelector("main")?.focus();
  }
}

/**
 * Change some parameters of the address and keep the others. An empty value takes a parameter away.
 * @param {Record<string, string | string[] | null | undefined>} changes
 * @param {{replace?: boolean}} [options]
 */
export function setQuery(changes, options = { replace: true }) {
  const url = new URL(window.location.href);
  for (const [name, value] of Object.entries(changes)) {
    url.searchParams.delete(name);
    for (const one of Array.isArray(value) ? value : [value]) if (one) url.searchParams.append(name, one);
  }
  navigate(url.href, options);
}

/** Follow links of the pages without loading the document again, and the links that MLflow's clients print. */
export function startRouter() {
  window.addEventListener("popstate", () => (address.value = new URL(window.location.href)));
  document.addEventListener("click", (event) => {
    if (
      event.defaultPrevented ||
      event.button !== 0 ||
      event.ctrlKey ||
      event.metaKey ||
      event.shiftKey ||
      event.altKey
    )
      return;
    const link = event.target instanceof Element ? event.target.closest("a") : null;
    if (!link || link.target || link.hasAttribute("download") || link.origin !== window.location.origin) return;
    if (!link.getAttribute("href") || link.pathname.startsWith("/v1/") || link.pathname.startsWith("/ui/")) return;
    event.preventDefault();
    navigate(link.href);
  });
  const mlflow = /^#\/experiments\/([^/?]+)(?:\/runs\/([^/?]+))?/.exec(window.location.hash);
  if (mlflow) navigate(mlflow[2] ? `/runs/${mlflow[2]}` : `/experiments/${mlflow[1]}`, { replace: true });
}
