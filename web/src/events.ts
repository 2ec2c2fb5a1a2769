// The journal: what happened, the newest first.

import { ask } from "./api";
import { bdi, empty, failure, fill, gentle, h, loading, prose } from "./dom";
import { clock, count } from "./format";
import type { Happening, Run, View } from "./types";

interface Events { total: number; matching: number; kinds: Record<string, number>; events: Happening[] }

export function showEvents(root: HTMLElement, run: Run): View {
  const state = { search: "", kind: "", limit: 200 };
  const search = h("input", { type: "search", placeholder: "Search events", "aria-label": "Search events" });
  search.addEventListener("input", () => {
    state.search = search.value;
    refresh();
  });
  const kinds = h("select", { "aria-label": "Kind of event" }, h("option", { value: "" }, "All kinds"));
  kinds.addEventListener("change", () => {
    state.kind = kinds.value;
    refresh();
  });
  const about = h("span", { class: "quiet small", role: "status" });
  const list = h("div", null, loading("events"));
  fill(root, h("div", { class: "tools" }, search, kinds, about), list);

  const refresh = gentle(async () => {
    try {
      draw(await ask<Events>(`runs/${encodeURIComponent(run.id)}/events`, state));
    } catch (error) {
      fill(list, failure(error));
    }
  }, 400);

  function draw(found: Events): void {
    const names = Object.keys(found.kinds).sort();
    if (kinds.options.length !== names.length + 1) {
      fill(kinds, h("option", { value: "" }, "All kinds"), ...names.map((name) => h("option", { value: name }, `${name.replaceAll("_", " ")} (${count(found.kinds[name])})`)));
      kinds.value = state.kind;
    }
    about.textContent = found.matching === found.total ? `${count(found.total)} events` : `${count(found.matching)} of ${count(found.total)} events`;
    if (!found.events.length) {
      fill(list, found.total ? empty("No event fits.", "Search for less, or choose all kinds.") : empty("Nothing has happened yet."));
      return;
    }
    const heads = ["When", "What", "Rank", "Step", ""].map((title, i) => h("th", { scope: "col", class: i === 2 || i === 3 ? "number" : "" }, title));
    const more = h("button", { type: "button", class: "small", onclick: () => { state.limit = 1000; refresh(); } }, "More");
    fill(
      list,
      h("div", { class: "card table-card scroll", tabindex: 0 }, h("table", { class: "tight told" }, h("thead", null, h("tr", null, ...heads)), h("tbody", null, ...found.events.map(line)))),
      found.matching > found.events.length && state.limit < 1000 ? h("p", { class: "pager" }, more) : null,
    );
    root.dataset.drawn = String(found.events.length);
  }

  refresh();
  return { news: (changed) => (changed.includes("events") ? refresh() : undefined) };
}

function line(event: Happening): HTMLElement {
  return h(
    "tr",
    null,
    h("td", { class: "fixed mono", title: clock(event.time, true) }, clock(event.time)),
    h("td", { class: `fixed t-${event.severity}` }, event.kind.replaceAll("_", " ")),
    h("td", { class: "number", "data-name": "rank" }, event.rank ?? "–"),
    h("td", { class: "number", "data-name": "step" }, event.step ?? "–"),
    h("td", null, bdi(event.text), event.why ? h("div", { class: "quiet small" }, "Why: ", bdi(event.why)) : null, event.hint ? h("div", { class: "quiet small" }, "What to do: ", prose(event.hint)) : null),
  );
}
