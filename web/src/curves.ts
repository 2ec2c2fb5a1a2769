// Curves of one run, or of several beside each other.

import { ask } from "./api";
import { Chart, type Axis, type Line, type Look, type Range } from "./chart";
import { empty, failure, fill, gentle, h, loading } from "./dom";
import { brief, number, percent } from "./format";
import type { Curve, Curves, View } from "./types";

export interface Source { id: string; name: string; created: number }

const SHARES = ["compute", "communicate", "wait", "load", "other"];
const TITLES: Record<string, string> = {
  loss: "Loss",
  lr: "Learning rate",
  epoch: "Epoch",
  grad_norm: "Gradient norm",
  samples_per_second: "Samples per second",
  step_seconds: "Seconds per step",
  shares: "Shares of a step",
  compute: "Share of compute",
  communicate: "Share of communication",
  wait: "Share of waiting",
  load: "Share of loading",
  other: "Share of other",
};
const SHORT: Record<string, string> = { compute: "compute", communicate: "comm", wait: "wait", load: "load", other: "other" };
const FORMATS: Record<string, (value: number) => string> = { step_seconds: brief };

export function showCurves(root: HTMLElement, sources: Source[]): View & { start: (created: number) => void } {
  const isOne = sources.length === 1;
  const state = { axis: "step" as Axis, isLog: false, smoothing: 0, range: null as Range };
  const charts = new Map<string, Chart>();
  let found: (Curves | null)[] = [];

  const reset = h("button", { type: "button", class: "small", hidden: true, onclick: () => setRange(null) }, "Show all");
  const amount = h("output", null, "off");
  const slider = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, "aria-label": "Smoothing" });
  slider.addEventListener("input", () => {
    state.smoothing = Number(slider.value);
    amount.textContent = state.smoothing ? state.smoothing.toFixed(2) : "off";
    draw();
  });
  const log = h("input", { type: "checkbox" });
  log.addEventListener("change", () => {
    state.isLog = log.checked;
    draw();
  });
  const axis = h(
    "select",
    { "aria-label": "Horizontal axis" },
    h("option", { value: "step" }, "Step"),
    h("option", { value: "relative" }, "Time since start"),
    h("option", { value: "clock" }, "Time of day"),
  );
  axis.addEventListener("change", () => {
    state.axis = axis.value as Axis;
    setRange(null);
  });
  const tools = h("div", { class: "tools" }, h("label", null, "Axis ", axis), h("label", null, "Smoothing ", slider, amount), h("label", null, log, " Log scale"), reset);
  const hint = h("span", { class: "quiet small" }, "Drag over a chart to zoom into it; double-click shows all.");
  tools.append(hint);
  const grid = h("div", { class: "charts" });
  const words = h("div", null, loading("curves"));
  fill(root, tools, isOne ? null : keys(sources), words, grid);
  tools.hidden = true;

  function setRange(range: Range): void {
    state.range = range;
    reset.hidden = range === null;
    draw();
    refresh();
  }

  /** The steps to ask for, of a run whose axis may be time. */
  function stepsOf(index: number): { first?: number; last?: number } {
    const axisOf = found[index]?.axes[0];
    if (!state.range || !axisOf) return {};
    if (state.axis === "step") return { first: Math.max(0, Math.floor(state.range[0])), last: Math.max(0, Math.ceil(state.range[1])) };
    const x = xOf(axisOf, index);
    const [low, high] = state.range;
    const inside = axisOf.steps.filter((_, i) => (x[i + 1] ?? x[i]) >= low && (x[i - 1] ?? x[i]) <= high);
    return inside.length ? { first: Math.min(...inside), last: Math.max(...inside) } : {};
  }

  function xOf(of: { steps: number[]; times: number[] }, index: number): number[] {
    if (state.axis === "step") return of.steps;
    return state.axis === "clock" ? of.times : of.times.map((time) => time - sources[index].created);
  }

  const refresh = gentle(async () => {
    try {
      const points = Math.min(1500, Math.max(300, Math.round(root.clientWidth / (root.clientWidth > 900 ? 2 : 1))));
      const answers = await Promise.all(
        sources.map((source, index) => ask<Curves>(`runs/${source.id}/series`, { points, ...stepsOf(index) }).catch((error) => (isOne ? Promise.reject(error) : null))),
      );
      found = answers;
      fill(words);
      draw();
    } catch (error) {
      if (!charts.size) fill(words, failure(error));
    }
  }, 300);

  function draw(): void {
    const recorded = [...new Set(found.flatMap((one) => one?.series.filter((curve) => curve.mean.length).map((curve) => curve.name) ?? []))];
    const names = inOrder(recorded, isOne);
    tools.hidden = !names.length;
    if (!names.length && found.length) {
      fill(words, empty("No curves yet.", "They appear with the first step that a shoal.Trainer takes, or the first shoal.log(...).", "A script that uses neither records no steps; its logs and events are on the other tabs."));
    }
    for (const name of names) {
      const lines = linesOf(name);
      let chart = charts.get(name);
      if (!chart) {
        chart = new Chart(TITLES[name] ?? found.flatMap((one) => one?.series ?? []).find((curve) => curve.name === name)?.label ?? name, setRange);
        charts.set(name, chart);
        grid.append(chart.element);
      }
      const isShare = name === "shares" || SHARES.includes(name);
      const look: Look = { axis: state.axis, isLog: state.isLog, smoothing: state.smoothing, format: isShare ? percent : (FORMATS[name] ?? number), floor: isShare || name === "epoch" ? 0 : undefined };
      chart.show(lines, look);
    }
    root.dataset.drawn = String(charts.size);
  }

  function linesOf(name: string): Line[] {
    if (name === "shares") return SHARES.flatMap((part) => linesOf(part).map((line) => ({ ...line, label: TITLES[part], color: part, key: part, short: SHORT[part], low: undefined, high: undefined })));
    return found.flatMap((one, index) => {
      const curve: Curve | undefined = one?.series.find((each) => each.name === name);
      if (!one || !curve) return [];
      const line = { label: sources[index].name, color: `c${index % 8}`, x: xOf(one.axes[curve.axis], index), mean: curve.mean, low: curve.low, high: curve.high };
      return [cut(line, state.range)];
    });
  }

  refresh();
  return {
    news: (changed) => {
      if (changed.includes("series") && !(state.range && isOver(found, state.range, state.axis))) refresh();
    },
    close: () => charts.forEach((chart) => chart.close()),
    start: (created) => {
      sources[0].created = created;
      if (state.axis === "relative") draw();
    },
  };
}

/** What people look for comes first: the loss, their own numbers, speed. Of one run, shares go into one chart. */
function inOrder(names: string[], isOne: boolean): string[] {
  const first = ["loss"];
  const last = ["samples_per_second", "step_seconds", "lr", "grad_norm", "epoch", ...SHARES];
  const own = names.filter((name) => !first.includes(name) && !last.includes(name));
  const all = [...first.filter((name) => names.includes(name)), ...own, ...last.filter((name) => names.includes(name))];
  if (!isOne) return all;
  const others = all.filter((name) => !SHARES.includes(name));
  return others.length < all.length ? [...others, "shares"] : others;
}

/** Whether a zoomed range lies wholly before the newest points, so that news cannot change it. */
function isOver(found: (Curves | null)[], range: [number, number], axis: Axis): boolean {
  if (axis !== "step") return false;
  return found.every((one) => one && one.axes.every((of) => (of.steps[of.steps.length - 1] ?? 0) > range[1]));
}

/** The part of a line that is in range, with a neighbour on either side. */
function cut(line: Line, range: Range): Line {
  if (!range) return line;
  let start = line.x.findIndex((x) => x >= range[0]);
  if (start < 0) start = line.x.length;
  let end = line.x.findIndex((x) => x > range[1]);
  if (end < 0) end = line.x.length;
  const of = <T>(values: T[]): T[] => values.slice(start, end);
  return { ...line, x: of(line.x), mean: of(line.mean), low: line.low && of(line.low), high: line.high && of(line.high) };
}

export function keys(sources: Source[]): HTMLElement {
  return h(
    "ul",
    { class: "keys", "aria-label": "Runs" },
    ...sources.map((source, i) => h("li", { class: `key k${i % 8}` }, h("a", { href: `/run/${encodeURIComponent(source.id)}` }, h("bdi", null, source.name)))),
  );
}
