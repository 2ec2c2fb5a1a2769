// Light or dark: as the system says, unless chosen here. Canvases ask for colours, since they cannot inherit them.

const probe = document.createElement("span");
let cache = new Map<string, string>();
const listeners = new Set<() => void>();

export function startTheme(): void {
  probe.hidden = true;
  document.body.append(probe);
  const chosen = stored();
  if (chosen) document.documentElement.dataset.theme = chosen;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

function stored(): string {
  try {
    return localStorage.getItem("theme") ?? "";
  } catch {
    return "";
  }
}

export function theme(): string {
  return document.documentElement.dataset.theme ?? "auto";
}

export function choose(name: string): void {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("theme", name === "auto" ? "" : name);
  } catch {
    // A browser that keeps nothing asks again next time.
  }
  changed();
}

function changed(): void {
  cache = new Map();
  for (const each of listeners) each();
}

export function onTheme(redraw: () => void): () => void {
  listeners.add(redraw);
  return () => listeners.delete(redraw);
}

/** The value of a colour of look.css, as canvases take it. */
export function color(name: string): string {
  let found = cache.get(name);
  if (found === undefined) {
    probe.style.color = `var(--${name})`;
    found = getComputedStyle(probe).color;
    cache.set(name, found);
  }
  return found;
}

export function faint(name: string, alpha: number): string {
  const numbers = color(name).match(/[\d.]+/g) ?? ["0", "0", "0"];
  return `rgba(${numbers[0]}, ${numbers[1]}, ${numbers[2]}, ${alpha})`;
}
