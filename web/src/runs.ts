// The list of runs: searched, filtered and sorted by the server, a hundred at a time.

import { Live, ask } from "./api";
import { bdi, empty, failure, fill, gentle, h, loading } from "./dom";
import { ago, clock, count, duration, number } from "./format";
import { status, steps, workers } from "./status";
import type { Page, Row, View } from "./types";

const COLUMNS: [string, string, string][] = [
  ["name", "Run", "name"],
  ["status", "Status", ""],
  ["workers", "Workers", "number"],
  ["created", "Started", ""],
  ["seconds", "Time", "number"],
  ["step", "Steps", "number"],
  ["loss", "Loss", "number"],
  ["command", "Command", ""],
];
const STATUSES = ["running", "finished", "failed", "stopped", "lost"];
const LIMIT = 100;

export function showRuns(root: HTMLElement, onState: (isLive: boolean) => void, go: (path: string) => void): View {
  const query = new URLSearchParams(location.search);
  const state = {
    search: query.get("search") ?? "",
    status: query.get("status") ?? "",
    sort: query.get("sort") ?? "created",
    order: query.get("order") ?? "down",
    offset: Number(query.get("offset") ?? 0) || 0,
  };
  const chosen = new Set<string>();

  const search = h("input", { type: "search", placeholder: "Search names and commands", "aria-label": "Search runs", value: state.search });
  search.addEventListener("input", () => change({ search: search.value, offset: 0 }));
  const chips = h("div", { class: "chips", role: "group", "aria-label": "Status" });
  const compare = h("button", { type: "button", class: "main", disabled: true }, "Compare");
  compare.addEventListener("click", () => go(`/compare?${new URLSearchParams([...chosen].map((id) => ["run", id]))}`));
  const tools = h("div", { class: "tools" }, search, chips, h("span", { class: "grow" }), compare);
  const about = h("p", { class: "quiet small", role: "status" });
  const list = h("div", null, loading("runs"));
  fill(root, h("div", { class: "head head-row" }, h("h1", null, "Runs"), about), tools, list);

  function change(some: Partial<typeof state>): void {
    Object.assign(state, some);
    const shown = new URLSearchParams();
    if (state.search) shown.set("search", state.search);
    if (state.status) shown.set("status", state.status);
    if (state.sort !== "created") shown.set("sort", state.sort);
    if (state.order !== "down") shown.set("order", state.order);
    if (state.offset) shown.set("offset", String(state.offset));
    history.replaceState(null, "", shown.toString() ? `/?${shown}` : "/");
    refresh();
  }

  const refresh = gentle(async () => {
    try {
      const page = await ask<Page>("runs", { ...state, limit: LIMIT });
      draw(page);
      if (page.reading) refresh();
    } catch (error) {
      fill(list, failure(error));
    }
  }, 300);

  function draw(page: Page): void {
    const reading = page.reading ? `; reading folders, ${count(page.reading[0])} of ${count(page.reading[1])} so far` : "";
    about.textContent = page.total ? `${count(page.total)} ${page.total === 1 ? "run" : "runs"}${page.matching !== page.total ? `, ${count(page.matching)} shown` : ""}${reading}` : "";
    fill(
      chips,
      ...STATUSES.filter((name) => page.statuses[name] || state.status === name).map((name) =>
        h("button", { type: "button", class: "small", "aria-pressed": String(state.status === name), onclick: () => change({ status: state.status === name ? "" : name, offset: 0 }) }, `${name} ${count(page.statuses[name] ?? 0)}`),
      ),
    );
    tools.hidden = !page.total && !state.search && !state.status;
    if (!page.rows.length) {
      fill(
        list,
        page.reading
          ? loading("runs")
          : page.total
            ? empty("No run fits.", "Search for less, or choose another status.")
            : empty("No runs yet.", h("span", null, "Start one with ", h("code", null, "shoal run SCRIPT"), "; it appears here within a second.")),
      );
      return;
    }
    const focus = document.activeElement instanceof HTMLElement ? document.activeElement.dataset.focus : undefined;
    fill(list, h("div", { class: "card table-card" }, h("div", { class: "scroll" }, table(page.rows)), pager(page)));
    if (focus) list.querySelector<HTMLElement>(`[data-focus="${CSS.escape(focus)}"]`)?.focus();
    root.dataset.drawn = String(page.rows.length);
  }

  function table(rows: Row[]): HTMLElement {
    const heads = COLUMNS.map(([name, title, kind]) => {
      const isSorted = state.sort === name;
      const sorted = isSorted ? (state.order === "up" ? "ascending" : "descending") : "none";
      const turn = (): void => change({ sort: name, order: isSorted && state.order === "down" ? "up" : isSorted ? "down" : name === "name" || name === "loss" ? "up" : "down", offset: 0 });
      return h("th", { scope: "col", class: kind === "number" ? "number" : "", "aria-sort": sorted }, h("button", { type: "button", onclick: turn, "data-focus": `sort-${name}` }, title));
    });
    return h("table", { class: "runs" }, h("thead", null, h("tr", null, h("th", { scope: "col" }, h("span", { class: "small" }, "")), ...heads)), h("tbody", null, ...rows.map(line)));
  }

  function line(row: Row): HTMLElement {
    const box = h("input", { type: "checkbox", "aria-label": `Compare ${row.name}`, checked: chosen.has(row.id), "data-focus": `box-${row.id}` });
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(row.id);
      else chosen.delete(row.id);
      compare.disabled = chosen.size < 2 || chosen.size > 8;
      compare.textContent = chosen.size > 8 ? "At most 8 at once" : chosen.size ? `Compare ${chosen.size}` : "Compare";
    });
    return h(
      "tr",
      null,
      h("td", null, box),
      h("td", { class: "name" }, h("a", { href: `/run/${encodeURIComponent(row.id)}`, "data-focus": `run-${row.id}` }, bdi(row.name))),
      h("td", null, status(row)),
      h("td", { class: "number hide-narrow" }, workers(row)),
      h("td", { class: "fixed hide-narrow", title: clock(row.created) }, ago(row.created)),
      h("td", { class: "number hide-narrow" }, duration(row.seconds)),
      h("td", { class: "number hide-narrow" }, steps(row)),
      h("td", { class: "number hide-narrow" }, number(row.loss)),
      h("td", { class: "command", title: row.command }, bdi(row.command)),
    );
  }

  function pager(page: Page): HTMLElement | null {
    if (page.matching <= LIMIT) return null;
    const last = Math.min(page.offset + LIMIT, page.matching);
    const move = (by: number): void => {
      change({ offset: Math.max(0, state.offset + by) });
      window.scrollTo(0, 0);
    };
    return h(
      "nav",
      { class: "pager", "aria-label": "Pages" },
      h("span", { class: "quiet small" }, `${count(page.offset + 1)} to ${count(last)} of ${count(page.matching)}`),
      h("button", { type: "button", class: "small", disabled: page.offset === 0, onclick: () => move(-LIMIT), "data-focus": "newer" }, "Previous"),
      h("button", { type: "button", class: "small", disabled: last >= page.matching, onclick: () => move(LIMIT), "data-focus": "older" }, "Next"),
    );
  }

  refresh();
  const live = new Live([], "list", { onAlso: refresh, onState });
  const onKey = (event: KeyboardEvent): void => {
    if (event.key === "/" && !(event.target instanceof HTMLInputElement)) {
      event.preventDefault();
      search.focus();
    }
  };
  document.addEventListener("keydown", onKey);
  return {
    close: () => {
      live.close();
      document.removeEventListener("keydown", onKey);
    },
  };
}
