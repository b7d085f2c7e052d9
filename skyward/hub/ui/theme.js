// Before the first paint, so that a dark page never flashes white. A classic script, because modules run later.
(() => {
  const chosen = window.localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
