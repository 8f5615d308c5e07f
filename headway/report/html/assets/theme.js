"use strict";
// Light or dark: as the system is, or as the reader chose. Runs before anything is drawn.
const theme = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => {
    try {
      return localStorage.getItem("headway-theme");
    } catch {
      return null; // a page in a file may have no storage
    }
  };
  let chosen = stored() ?? "system";
  const apply = () => {
    const name = chosen === "system" ? (dark.matches ? "dark" : "light") : chosen;
    document.documentElement.dataset.theme = name;
    dispatchEvent(new Event("themechange"));
  };
  const next = () => {
    chosen = { system: "light", light: "dark", dark: "system" }[chosen];
    try {
      localStorage.setItem("headway-theme", chosen);
    } catch {
      // then it holds for this page alone
    }
    apply();
  };
  dark.addEventListener("change", apply);
  apply();
  return { next, name: () => chosen };
})();
