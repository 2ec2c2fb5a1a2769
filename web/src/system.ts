// What machines do: processor, memory, network and disk of each node.

import { Live, ask } from "./api";
import { Chart, type Line } from "./chart";
import { bdi, empty, failure, fill, gentle, h, loading } from "./dom";
import { bytes, number } from "./format";
import type { NodeFacts, Run, View } from "./types";

const SPANS: [number, string][] = [[600, "last 10 minutes"], [3600, "last hour"], [7200, "last two hours"]];
const perSecond = (value: number): string => `${bytes(value)}/s`;
const CHARTS: [string, string[], string[], (value: number) => string][] = [
  ["Processor (busy cores)", ["cpu"], ["busy"], number],
  ["Memory in use", ["memory_used"], ["used"], bytes],
  ["Network", ["net_in", "net_out"], ["in", "out"], perSecond],
  ["Disk", ["disk_read", "disk_write"], ["read", "written"], perSecond],
  ["Swap", ["swap_in", "swap_out"], ["in", "out"], perSecond],
];

/** The nodes of one run. */
export function showSystem(root: HTMLElement, run: Run): View {
  const view = showNodes(root, `runs/${encodeURIComponent(run.id)}/system`, () =>
    empty("No machine was measured.", run.status === "running" ? "Samples appear within seconds of the start." : "This run recorded no samples of its machines."),
  );
  return { news: (changed) => (changed.includes("system") ? view.refresh() : undefined), close: view.close };
}

/** The nodes of all runs that go on. */
export function showAllSystems(root: HTMLElement, onState: (isLive: boolean) => void): View {
  const body = h("div", null);
  fill(root, h("div", { class: "head" }, h("h1", null, "System"), h("p", { class: "quiet small" }, "The machines of all runs that go on now.")), body);
  const view = showNodes(body, "system", () => empty("No run goes on.", "Machines are measured while they have workers of a run. Ended runs keep theirs on their System tab."));
  const live = new Live([], "system", { onAlso: view.refresh, onState });
  return {
    close: () => {
      view.close();
      live.close();
    },
  };
}

function showNodes(root: HTMLElement, path: string, nothing: () => HTMLElement): { refresh: () => void; close: () => void } {
  let seconds = 600;
  const charts = new Map<string, Chart>();
  const sections = new Map<string, { element: HTMLElement; meters: HTMLElement; workers: HTMLElement }>();
  const span = h("select", { "aria-label": "Span of time" }, ...SPANS.map(([value, title]) => h("option", { value }, title)));
  span.addEventListener("change", () => {
    seconds = Number(span.value);
    refresh();
  });
  const tools = h("div", { class: "tools", hidden: true }, h("label", null, "Show the ", span));
  const words = h("div", null, loading("the machines"));
  const place = h("div", { class: "stack" });
  fill(root, tools, words, place);

  const refresh = gentle(async () => {
    try {
      const { nodes } = await ask<{ nodes: NodeFacts[] }>(path, { seconds });
      fill(words, nodes.length ? null : nothing());
      tools.hidden = !nodes.length;
      nodes.forEach(draw);
      for (const [name, section] of sections) if (!nodes.some((node) => node.node === name)) section.element.hidden = true;
      root.dataset.drawn = String(nodes.length);
    } catch (error) {
      if (!sections.size) fill(words, failure(error));
    }
  }, 500);

  function draw(node: NodeFacts): void {
    let section = sections.get(node.node);
    if (!section) {
      const meters = h("div", { class: "meters" });
      const grid = h("div", { class: "charts" });
      const workers = h("div", null);
      const runs = node.runs?.length ? h("span", { class: "quiet small" }, "with workers of ", ...node.runs.flatMap((run, i) => [i ? ", " : "", h("a", { href: `/run/${encodeURIComponent(run.id)}` }, bdi(run.name))])) : null;
      const element = h("section", { class: "stack" }, h("div", { class: "head-row" }, h("h2", null, bdi(node.node)), runs), h("div", { class: "card" }, meters), grid, workers);
      section = { element, meters, workers };
      sections.set(node.node, section);
      place.append(element);
      for (const [title] of CHARTS) {
        if (title === "Swap" && !hasSwap(node)) continue;
        const chart = new Chart(title, () => undefined);
        charts.set(`${node.node}/${title}`, chart);
        grid.append(chart.element);
      }
    }
    section.element.hidden = false;
    fill(section.meters, ...meters(node));
    fill(section.workers, workersOf(node));
    for (const [title, names, labels, format] of CHARTS) {
      const lines: Line[] = names.map((name, i) => ({ label: labels[i], short: names.length > 1 ? labels[i] : undefined, color: `c${i}`, x: node.times, mean: node.curves[name] }));
      charts.get(`${node.node}/${title}`)?.show(lines, { axis: "clock", isLog: false, smoothing: 0, format, floor: 0 });
    }
  }

  refresh();
  return { refresh, close: () => charts.forEach((chart) => chart.close()) };
}

function hasSwap(node: NodeFacts): boolean {
  return [...node.curves.swap_in, ...node.curves.swap_out].some((value) => value > 0);
}

function meters(node: NodeFacts): HTMLElement[] {
  const { now } = node;
  const meter = (title: string, text: string, share: number, isScarce = true): HTMLElement =>
    h("div", { class: isScarce && share > 0.92 ? "meter full" : "meter" }, h("span", { class: "quiet small" }, title), h("b", null, text), h("progress", { max: 1, value: Math.min(1, Math.max(0, share || 0)), "aria-label": `${title}: ${text}` }));
  const used = now.disk_total - now.disk_free;
  return [
    meter("Processor", `${Number(now.cpu.toFixed(1))} of ${now.cores} cores`, now.cpu / (now.cores || 1), false),
    meter("Memory", `${bytes(now.memory_used)} of ${bytes(now.memory_total)}`, now.memory_used / (now.memory_total || 1)),
    meter("Disk", `${bytes(now.disk_free)} free of ${bytes(now.disk_total)}`, used / (now.disk_total || 1)),
    h("div", { class: "meter" }, h("span", { class: "quiet small" }, "Network"), h("b", null, `${perSecond(now.net_in)} in`), h("span", { class: "small" }, `${perSecond(now.net_out)} out`)),
  ];
}

function workersOf(node: NodeFacts): HTMLElement | null {
  const ranks = Object.entries(node.workers).sort(([a], [b]) => Number(a) - Number(b));
  if (!ranks.length) return null;
  const heads = ["Rank", "Process", "Cores", "Memory", "Page faults/s", "Throttled", "Waits for a core"].map((title) => h("th", { scope: "col", class: "number" }, title));
  const share = (value: number | undefined): string => (value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
  const rows = ranks.map(([rank, facts]) =>
    h("tr", null, ...[rank, String(facts.pid ?? "–"), number(facts.cpu), bytes(facts.rss), number(facts.major_faults), share(facts.throttled), share(facts.run_delay)].map((text) => h("td", { class: "number" }, text))),
  );
  return h("div", { class: "card table-card scroll", tabindex: 0, role: "group", "aria-label": `Workers on ${node.node}` }, h("table", null, h("thead", null, h("tr", null, ...heads)), h("tbody", null, ...rows)));
}
