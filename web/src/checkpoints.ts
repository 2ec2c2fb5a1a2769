// What was saved, and whether it is whole.

import { ask, post } from "./api";
import { empty, failure, fill, gentle, h, loading } from "./dom";
import { ago, bytes, clock, count } from "./format";
import type { Checkpoint, Run, View } from "./types";

export function showCheckpoints(root: HTMLElement, run: Run): View {
  const path = `runs/${encodeURIComponent(run.id)}/checkpoints`;
  const read = new Map<string, Checkpoint>();
  fill(root, loading("checkpoints"));

  const refresh = gentle(async () => {
    try {
      draw((await ask<{ checkpoints: Checkpoint[] }>(path)).checkpoints);
    } catch (error) {
      fill(root, failure(error));
    }
  }, 500);

  function draw(all: Checkpoint[]): void {
    if (!all.length) return fill(root, empty("No checkpoint was saved yet.", "A run saves in time, at its end and when it is told to stop."));
    const heads = ["Step", "Saved", "Size", "World", "Validity", ""].map((title, i) => h("th", { scope: "col", class: i === 3 ? "number hide-narrow" : i === 0 || i === 2 ? "number" : "" }, title));
    const words = h("p", { class: "quiet small" }, "“Whole” is what the manifest and the sizes of files tell. Checking reads every byte and compares digests.");
    fill(root, h("div", { class: "stack" }, words, h("div", { class: "card table-card scroll" }, h("table", { class: "middle tight told" }, h("thead", null, h("tr", null, ...heads)), h("tbody", null, ...all.map(line))))));
    root.dataset.drawn = String(all.length);
  }

  function line(one: Checkpoint): HTMLElement {
    const key = `${one.folder}/${one.name}/${one.saved_at}`;
    const validity = h("td", null);
    const button = h("button", { type: "button", class: "small", disabled: Boolean(one.problem), "aria-label": `Check every byte of step ${one.step}` }, "Check every byte");
    button.addEventListener("click", async () => {
      button.disabled = true;
      button.textContent = "Checking …";
      try {
        const found = await post<Checkpoint>(path, { folder: one.folder, name: one.name });
        read.set(key, found);
        fill(validity, judge(found));
      } catch (error) {
        fill(validity, failure(error));
      }
      button.textContent = "Check every byte";
      button.disabled = false;
    });
    fill(validity, judge(read.get(key) ?? one));
    return h(
      "tr",
      null,
      h("td", { class: "number", "data-name": "step" }, count(one.step)),
      h("td", { class: "fixed", title: one.saved_at ? clock(one.saved_at) : "" }, one.saved_at ? ago(one.saved_at) : "–"),
      h("td", { class: "number" }, bytes(one.num_bytes)),
      h("td", { class: "number hide-narrow" }, one.generation),
      validity,
      h("td", { class: "fixed" }, button),
    );
  }

  refresh();
  return { news: (changed) => (changed.includes("checkpoints") || changed.includes("events") ? refresh() : undefined) };
}

function judge(one: Checkpoint): HTMLElement {
  if (one.is_stale) return h("span", { class: "t-note" }, "Left behind: ", h("bdi", null, one.problem));
  if (one.problem) return h("span", { class: "t-bad" }, "Damaged: ", h("bdi", null, one.problem));
  return h("span", { class: "t-good" }, one.is_read ? "Whole, every byte checked" : "Whole");
}
