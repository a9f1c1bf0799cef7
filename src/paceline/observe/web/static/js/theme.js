// Before anything is drawn: the theme that was chosen, or the system's.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null; // a browser that keeps nothing
    }
  };
  const apply = () => {
    const theme = chosen() || (system.matches ? "dark" : "light");
    if (document.documentElement.dataset.theme !== theme) {
      document.documentElement.dataset.theme = theme;
      dispatchEvent(new Event("theme"));
    }
  };
  system.addEventListener("change", apply);
  globalThis.chooseTheme = (theme) => {
    try {
      localStorage.setItem("theme", theme);
    } catch {
      document.documentElement.dataset.theme = theme;
      dispatchEvent(new Event("theme"));
      return;
    }
    apply();
  };
  apply();
})();
