// What workers printed: one rank at a time, followed while it grows; and a search over one or all of them.

import { ask } from "./api";
import { empty, failure, fill, gentle, h, loading } from "./dom";
import { bytes, count } from "./format";
import type { Run, View } from "./types";

interface Piece { rank: number; start: number; end: number; size: number; lines: string[] }
interface Found { rank: number; line: number; offset: number; text: string }

const MAX_LINES = 20_000;

export function showLogs(root: HTMLElement, run: Run): View {
  if (!run.ranks.length) {
    fill(root, empty("Nobody has printed anything yet.", "What workers print appears here as they print it."));
    return { news: (changed) => (changed.includes("logs") ? window.location.reload() : undefined) };
  }
  const path = `runs/${encodeURIComponent(run.id)}`;
  let rank = run.ranks[0].rank;
  let start = 0;
  let end = 0;
  let follows = true;
  let text = "";

  const ranks = h("select", { "aria-label": "Rank" }, ...run.ranks.map((each) => h("option", { value: each.rank }, `rank ${each.rank} (${bytes(each.bytes)})`)));
  ranks.addEventListener("change", () => {
    rank = Number(ranks.value);
    void open(null);
  });
  const search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search logs" });
  const scope = h("select", { "aria-label": "Where to search" }, h("option", { value: "" }, "in all ranks"), h("option", { value: "this" }, "in this rank"));
  const follow = h("input", { type: "checkbox", checked: true });
  follow.addEventListener("change", () => {
    follows = follow.checked;
    if (follows) void open(null);
  });
  const earlier = h("button", { type: "button", class: "small" }, "Earlier lines");
  earlier.addEventListener("click", () => void more());
  const results = h("div", { class: "card table-card results", hidden: true });
  const box = h("div", { class: "log", tabindex: 0, role: "log", "aria-live": "off", "aria-label": "Log" }, loading("the log"));
  fill(root, h("div", { class: "stack" }, h("div", { class: "tools" }, h("label", null, "Log of ", ranks), search, scope, h("label", null, follow, " Follow"), earlier), results, box));

  const line = (words: string): HTMLElement => {
    const div = h("div", { dir: "auto" });
    const at = text ? words.toLowerCase().indexOf(text.toLowerCase()) : -1;
    if (at < 0) div.append(words);
    else div.append(words.slice(0, at), h("mark", null, words.slice(at, at + text.length)), words.slice(at + text.length));
    return div;
  };

  async function open(until: number | null): Promise<void> {
    try {
      const piece = await ask<Piece>(`${path}/logs`, { rank, end: until });
      start = piece.start;
      end = piece.end;
      fill(box, ...(piece.lines.length ? piece.lines.map(line) : [h("p", { class: "quiet" }, "Nothing was printed.")]));
      earlier.disabled = start === 0;
      box.scrollTop = box.scrollHeight;
      root.dataset.drawn = String(piece.lines.length);
    } catch (error) {
      fill(box, failure(error));
    }
  }

  async function more(): Promise<void> {
    const piece = await ask<Piece>(`${path}/logs`, { rank, end: start });
    const height = box.scrollHeight;
    box.prepend(...piece.lines.map(line));
    start = piece.start;
    earlier.disabled = start === 0;
    box.scrollTop += box.scrollHeight - height;
  }

  const grow = gentle(async () => {
    if (!follows) return;
    const piece = await ask<Piece>(`${path}/logs`, { rank, start: end });
    if (piece.start !== end) return open(null);
    end = piece.end;
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    if (piece.lines.length && box.firstElementChild?.tagName === "P") fill(box);
    box.append(...piece.lines.map(line));
    while (box.childElementCount > MAX_LINES) box.firstElementChild?.remove();
    if (isAtEnd) box.scrollTop = box.scrollHeight;
    root.dataset.drawn = String(box.childElementCount);
  }, 400);

  const find = gentle(async () => {
    text = search.value.trim();
    if (!text) {
      results.hidden = true;
      return;
    }
    try {
      const { found, is_cut } = await ask<{ found: Found[]; is_cut: boolean }>(`${path}/search`, { text, rank: scope.value ? rank : "" });
      results.hidden = false;
      const title = found.length ? `${is_cut ? "The first " : ""}${count(found.length)} ${found.length === 1 ? "line" : "lines"}` : "No line has this.";
      fill(results, h("p", { class: "quiet small", role: "status" }, title), ...found.map(result));
    } catch (error) {
      results.hidden = false;
      fill(results, failure(error));
    }
  }, 250);

  function result(found: Found): HTMLElement {
    const button = h("button", { type: "button" }, h("span", { class: "quiet" }, `rank ${found.rank}, line ${count(found.line + 1)}: `), line(found.text));
    button.addEventListener("click", async () => {
      rank = found.rank;
      ranks.value = String(rank);
      follows = follow.checked = false;
      // Some lines after it, so that it is not the last one.
      await open(found.offset + 16_384);
      const lines = [...box.children];
      const at = [...lines].reverse().find((each) => each.textContent === found.text);
      at?.classList.add("found");
      at?.scrollIntoView({ block: "center" });
      box.focus();
    });
    return button;
  }

  search.addEventListener("input", find);
  scope.addEventListener("change", find);
  void open(null);
  return { news: (changed) => (changed.includes("logs") ? grow() : undefined) };
}
