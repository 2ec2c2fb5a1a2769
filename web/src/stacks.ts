// Where the workers are now, in the user's code: asked for by a button.

import { post } from "./api";
import { bdi, empty, failure, fill, h } from "./dom";
import { clock } from "./format";
import type { Run, View } from "./types";

interface Stack { rank: number; pid: number; where: string; lines: string[] }

export function showStacks(root: HTMLElement, run: Run): View {
  const button = h("button", { type: "button", class: "main" }, "Take stacks of all ranks");
  const place = h("div", null);
  const words = h("span", { class: "quiet small" }, "Takes some milliseconds of the run’s time. The same as ", h("code", null, `shoal stacks`), ".");
  button.addEventListener("click", async () => {
    button.disabled = true;
    fill(place, h("p", { class: "quiet", role: "status" }, "Asking the launcher …"));
    try {
      const { stacks, time } = await post<{ stacks: Stack[]; time: number }>(`runs/${encodeURIComponent(run.id)}/stacks`);
      fill(place, stacks.length ? h("div", { class: "stack" }, h("p", { class: "quiet small" }, `Taken at ${clock(time)}`), ...stacks.map(card)) : empty("No worker runs now."));
      root.dataset.drawn = String(stacks.length);
    } catch (error) {
      fill(place, failure(error));
    }
    button.disabled = run.status !== "running";
  });
  const look = (): void => {
    button.disabled = run.status !== "running";
    if (run.status !== "running" && !place.childElementCount) fill(place, empty("This run has ended.", "Stacks are taken of workers that run."));
  };
  fill(root, h("div", { class: "tools" }, button, words), place);
  look();
  return { news: look };
}

function card(stack: Stack): HTMLElement {
  const lines = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": `Frames of rank ${stack.rank}` }, h("pre", null, stack.lines.join("\n")));
  return h("section", { class: "card stack" }, h("h2", null, bdi(stack.where || `rank ${stack.rank}`)), h("details", null, h("summary", { class: "quiet small" }, `All frames of rank ${stack.rank}, process ${stack.pid}`), lines));
}
