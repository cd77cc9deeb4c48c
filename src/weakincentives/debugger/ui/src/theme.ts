// Light or dark: as the system says, until the person chooses.

const KEY = "wink-theme";

function stored(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // a page from disk may have no storage
  }
}

const isDark = (): boolean => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

export function start(): void {
  const theme = stored();
  if (theme) document.documentElement.dataset.theme = theme;
}

export function flip(): void {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // It holds for this page only.
  }
  dispatchEvent(new Event("theme"));
}
