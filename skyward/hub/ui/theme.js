// Before the first paint, so that a dark page never flashes white. A classic script, because modules run later.
(() => {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const chosen = window.localStorage.getItem("theme");
    const theme = system.matches ? "dark" : "light";
    document.documentElement.dataset.theme = chosen === "light" || chosen === "dark" ? chosen : theme;
  };
  apply();
  system.addEventListener("change", apply);
})();
