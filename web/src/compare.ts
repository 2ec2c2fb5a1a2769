// Several runs beside each other: their curves in the same charts, and the settings in which they differ.

import { Live, ask } from "./api";
import { showCurves } from "./curves";
import { bdi, empty, failure, fill, h, loading } from "./dom";
import { duration, number } from "./format";
import { status, steps, workers } from "./status";
import type { Run, View } from "./types";

export function showCompare(root: HTMLElement, ids: string[], onState: (isLive: boolean) => void): View {
  let curves: View = {};
  let live: Live | null = null;
  let isClosed = false;
  fill(root, loading("runs"));
  void start();

  async function start(): Promise<void> {
    if (!ids.length) return fill(root, empty("No runs to compare.", h("a", { href: "/" }, "Choose two or more in the list.")));
    let runs: Run[];
    try {
      runs = await Promise.all(ids.slice(0, 8).map((id) => ask<Run>(`runs/${encodeURIComponent(id)}`)));
    } catch (error) {
      return fill(root, failure(error));
    }
    if (isClosed) return;
    const charts = h("div", null);
    fill(root, h("div", { class: "head" }, h("h1", null, `${runs.length} runs compared`)), h("div", { class: "stack" }, table(runs), charts, differences(runs)));
    curves = showCurves(charts, runs);
    live = new Live(runs.map((run) => run.id), null, { onRun: (_, changed) => curves.news?.(changed), onState });
  }

  return {
    close: () => {
      isClosed = true;
      curves.close?.();
      live?.close();
    },
  };
}

function table(runs: Run[]): HTMLElement {
  const rows = runs.map((run, i) =>
    h(
      "tr",
      null,
      h("td", null, h("span", { class: `key k${i % 8}` }, h("a", { href: `/run/${encodeURIComponent(run.id)}` }, bdi(run.name)))),
      h("td", null, status(run)),
      h("td", { class: "number" }, workers(run)),
      h("td", { class: "number" }, duration(run.seconds)),
      h("td", { class: "number" }, steps(run)),
      h("td", { class: "number" }, number(run.loss)),
    ),
  );
  const heads = ["Run", "Status", "Workers", "Time", "Steps", "Loss"].map((title, i) => h("th", { scope: "col", class: i > 1 ? "number" : "" }, title));
  return h("div", { class: "card table-card scroll", tabindex: 0 }, h("table", null, h("thead", null, h("tr", null, ...heads)), h("tbody", null, ...rows)));
}

function differences(runs: Run[]): HTMLElement {
  const values = (run: Run): Map<string, string> => new Map([...run.job.map((each) => [`job: ${each.name}`, each.value] as const), ...run.settings.map((each) => [each.name, each.value] as const)]);
  const all = runs.map(values);
  const names = [...new Set(all.flatMap((one) => [...one.keys()]))].filter((name) => new Set(all.map((one) => one.get(name))).size > 1).sort();
  if (!names.length) return empty("No setting differs.", "As far as these runs recorded their settings, they had the same.");
  const heads = [h("th", { scope: "col" }, "Setting"), ...runs.map((run, i) => h("th", { scope: "col" }, h("span", { class: `key k${i % 8}` }, bdi(run.name))))];
  const rows = names.map((name) => h("tr", null, h("td", null, bdi(name)), ...all.map((one) => h("td", { class: "mono" }, bdi(one.get(name) ?? "–")))));
  return h("section", { class: "stack" }, h("h2", null, "Settings that differ"), h("div", { class: "card table-card scroll", tabindex: 0 }, h("table", null, h("thead", null, h("tr", null, ...heads)), h("tbody", null, ...rows))));
}
