// Addresses and what is shown at them. The page is one document; links change what is in its middle.

import { Failure, post } from "./api";
import { showCompare } from "./compare";
import { empty, failure, fill, h, s } from "./dom";
import { showJobs } from "./jobs";
import { showRun } from "./run";
import { showRuns } from "./runs";
import { showAllSystems } from "./system";
import { choose, startTheme, theme } from "./theme";
import type { View } from "./types";

const live = h("span", { class: "live off", role: "status" }, h("span", null, "connecting"));
const main = h("main", { id: "main", tabindex: -1 });
const links = { "/": h("a", { href: "/" }, "Runs"), "/queue": h("a", { href: "/queue" }, "Queue"), "/system": h("a", { href: "/system" }, "System") };
let view: View = {};

function start(): void {
  startTheme();
  const fish = s("svg", { viewBox: "0 0 32 32", "aria-hidden": "true" }, s("rect", { width: 32, height: 32, rx: 7, fill: "#0b6e83" }), s("path", { d: "M5 11c3-4 8-4 11 0-3 4-8 4-11 0Zm11 0 4-3v6Z", fill: "#fff" }), s("path", { d: "M11 21c3-4 8-4 11 0-3 4-8 4-11 0Zm11 0 4-3v6Z", fill: "#fff", opacity: 0.75 }));
  const look = h("select", { "aria-label": "Colours", class: "small" }, h("option", { value: "auto" }, "Auto"), h("option", { value: "light" }, "Light"), h("option", { value: "dark" }, "Dark"));
  look.value = theme();
  look.addEventListener("change", () => choose(look.value));
  const brand = h("a", { class: "brand", href: "/" }, fish, "shoal");
  document.body.append(
    h("a", { class: "skip", href: "#main" }, "Skip to content"),
    h("header", { class: "bar" }, brand, h("nav", { "aria-label": "Pages" }, ...Object.values(links)), live, look),
    main,
  );
  document.addEventListener("click", follow);
  window.addEventListener("popstate", () => show());
  show();
}

function onState(isLive: boolean): void {
  live.className = isLive ? "live" : "live off";
  fill(live, h("span", null, isLive ? "live" : "not connected, trying again"));
}

/** Links within the page change the address and the middle of the page, and nothing else is loaded. */
function follow(event: MouseEvent): void {
  const link = (event.target as Element).closest?.("a");
  if (!link || event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  const target = new URL(link.href);
  if (target.origin !== location.origin || link.getAttribute("href")?.startsWith("#")) return;
  event.preventDefault();
  go(target.pathname + target.search);
}

function go(path: string): void {
  history.pushState(null, "", path);
  show();
  window.scrollTo(0, 0);
}

function show(): void {
  view.close?.();
  view = {};
  document.title = "shoal";
  const path = location.pathname;
  for (const [target, link] of Object.entries(links)) {
    if (target === path) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const root = h("div", { id: "view" });
  fill(main, root);
  const [, place, id, tab] = path.split("/");
  if (path === "/") view = showRuns(root, onState, go);
  else if (path === "/login") void logIn(root);
  else if (path === "/queue") view = showJobs(root, onState);
  else if (path === "/system") view = showAllSystems(root, onState);
  else if (path === "/compare") view = showCompare(root, new URLSearchParams(location.search).getAll("run"), onState);
  else if (place === "run" && id) view = showRun(root, decoded(id), tab || "curves", onState);
  else fill(root, empty("There is nothing at this address.", h("a", { href: "/" }, "All runs")));
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Trade the token after the # for a cookie. It is there, and not in the path, so that no log keeps it. */
async function logIn(root: HTMLElement): Promise<void> {
  live.hidden = true;
  const token = location.hash.slice(1);
  history.replaceState(null, "", "/login");
  if (!token) {
    fill(root, h("div", { class: "login" }, empty("You are not logged in.", "This page shows runs only to whoever has its link.", "Open the newest link in the terminal where shoal dash runs.")));
    return;
  }
  try {
    await post("login", { token });
    live.hidden = false;
    history.replaceState(null, "", "/");
    show();
  } catch (error) {
    fill(root, h("div", { class: "login" }, failure(error instanceof Failure ? error : new Failure(0, "The login failed."))));
  }
}

start();
