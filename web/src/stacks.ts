// Where the workers are now, in the user's code: asked for by a button.

import { post } from "./api";
import { bdi, empty, failure, fill, h } from "./dom";
import { clock } from "./format";
import type { Run, View } from "./types";

interface Stack { rank: number; pid: number; where: string; lines: string[] }

export function showStacks(root: HTMLElement, run: Run): View {
  const button = h("button", { type: "button", class: "main" }, "Take stacks of all ranks");
  const place = h("div", null);
  const native = h("button", { type: "button", hidden: true }, "With frames of C");
  const words = h("span", { class: "quiet small" }, "Takes some milliseconds of the run’s time. The same as ", h("code", null, `shoal stacks`), ".");
  const take = async (query: string): Promise<void> => {
    button.disabled = native.disabled = true;
    fill(place, h("p", { class: "quiet", role: "status" }, "Asking the launcher …"));
    try {
      const { stacks, time, has_native } = await post<{ stacks: Stack[]; time: number; has_native: boolean }>(`runs/${encodeURIComponent(run.id)}/stacks${query}`);
      native.hidden = !has_native;
      fill(place, stacks.length ? h("div", { class: "stack" }, h("p", { class: "quiet small" }, `Taken at ${clock(time)}`), ...stacks.map(card)) : empty("No worker runs now."));
      root.dataset.drawn = String(stacks.length);
    } catch (error) {
      fill(place, failure(error));
    }
    look();
  };
  button.addEventListener("click", () => take(""));
  native.addEventListener("click", () => take("?native=1"));
  const look = (): void => {
    button.disabled = native.disabled = run.status !== "running";
    if (run.status !== "running" && !place.childElementCount) fill(place, empty("This run has ended.", "Stacks are taken of workers that run."));
  };
  fill(root, h("div", { class: "tools" }, button, native, words), place);
  look();
  return { news: look };
}

function card(stack: Stack): HTMLElement {
  const lines = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": `Frames of rank ${stack.rank}` }, h("pre", null, stack.lines.join("\n")));
  return h("section", { class: "card stack" }, h("h2", null, bdi(stack.where || `rank ${stack.rank}`)), h("details", null, h("summary", { class: "quiet small" }, `All frames of rank ${stack.rank}, process ${stack.pid}`), lines));
}
