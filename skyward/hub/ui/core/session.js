/** The signed-in user and the theme. */
import { change, get, isSignedOut } from "./api.js";
import { signal } from "./html.js";

/** @typedef {import("./types.js").Me} Me */

export const me = signal(/** @type {Me | null} */ (null));
export const projects = signal(/** @type {{name: string}[]} */ ([]));

export async function loadSession() {
  try {
    me.value = await get("/v1/me");
    isSignedOut.value = false;
  } catch {
    return; // `isSignedOut` is set, or the page says itself that the hub cannot be reached
  }
  projects.value = await get("/v1/projects").then(
    (answer) => answer.projects ?? [],
    () => [],
  );
}

/** @param {string} code The one-time code that the hub printed. */
export async function signIn(code) {
  await change("POST", "/v1/session", { code });
  await loadSession();
}

export async function signOut() {
  await change("DELETE", "/v1/session").catch(() => null);
  me.value = null;
  isSignedOut.value = true;
}

/** Number of the theme's change: charts redraw when it grows. */
export const themeChanges = signal(0);

export const isDark = () => document.documentElement.dataset.theme === "dark";

export function toggleTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  window.localStorage.setItem("theme", theme);
  themeChanges.value += 1;
}

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (themeChanges.value += 1));
