// Rank x step: how long each rank took. A slow rank is a bright row, a slow moment a bright column.

import { ask } from "./api";
import { empty, failure, fill, gentle, h, loading } from "./dom";
import { brief, count } from "./format";
import { color, onTheme } from "./theme";
import type { Heat, Run, View } from "./types";

const QUANTITIES: [string, string][] = [
  ["own", "Own part, which others wait for"],
  ["step", "Whole step"],
  ["compute", "Compute"],
  ["communicate", "Communication"],
  ["wait", "Waiting for others"],
  ["load", "Loading data"],
];
// Dark blue over green to yellow: even steps of lightness, and readable without seeing red or green.
const STOPS = [[40, 40, 96], [44, 92, 138], [33, 138, 141], [70, 178, 116], [165, 208, 68], [250, 228, 60]];

export function showRanks(root: HTMLElement, run: Run): View {
  let of = "own";
  let heat: Heat | null = null;
  let place: [number, number] | null = null;
  const choose = h("select", { "aria-label": "What is shown" }, ...QUANTITIES.map(([name, title]) => h("option", { value: name }, title)));
  choose.addEventListener("change", () => {
    of = choose.value;
    refresh();
  });
  const scale = h("span", { class: "scale" });
  const readout = h("p", { class: "small", role: "status" });
  const canvas = h("canvas", { tabindex: 0, role: "img" });
  const names = h("div", { class: "heat-ranks" });
  const axis = h("div", { class: "heat-axis" });
  const slowest = h("p", { class: "quiet small" });
  const map = h("div", { class: "card stack" }, h("div", { class: "heat" }, names, canvas, axis), readout, slowest);
  const words = h("div", null, loading("times of all ranks"));
  fill(root, h("div", { class: "tools" }, h("label", null, "Show ", choose), scale), words, map);
  map.hidden = true;

  const refresh = gentle(async () => {
    try {
      heat = await ask<Heat>(`runs/${encodeURIComponent(run.id)}/heat`, { of, columns: Math.max(60, Math.min(600, Math.round(root.clientWidth / 3))) });
      fill(words);
      draw();
    } catch (error) {
      map.hidden = true;
      fill(words, failure(error));
    }
  }, 500);

  function draw(): void {
    if (!heat) return;
    map.hidden = !heat.ranks.length;
    if (!heat.ranks.length) return fill(words, empty("No steps were recorded yet.", "Each rank gets a row here with its first step."));
    const columns = heat.seconds[0].length;
    const rowHeight = Math.max(5, Math.min(26, Math.floor(420 / heat.ranks.length)));
    canvas.width = columns;
    canvas.height = heat.ranks.length;
    canvas.style.height = `${rowHeight * heat.ranks.length}px`;
    canvas.style.imageRendering = "pixelated";
    names.style.gridTemplateRows = `repeat(${heat.ranks.length}, ${rowHeight}px)`;
    const every = Math.ceil(14 / rowHeight);
    fill(names, ...heat.ranks.map((rank, i) => h("span", null, i % every === 0 ? `rank ${rank}` : "")));
    const [low, high] = bounds(heat);
    const context = canvas.getContext("2d");
    if (!context) return;
    const image = context.createImageData(columns, heat.ranks.length);
    const nothing = (color("sunk").match(/[\d.]+/g) ?? []).map(Number);
    heat.seconds.forEach((row, y) => row.forEach((value, x) => {
      const [r, g, b] = value === null ? nothing : shade((value - low) / (high - low || 1));
      image.data.set([r, g, b, 255], 4 * (y * columns + x));
    }));
    context.putImageData(image, 0, 0);
    fill(axis, h("span", null, `step ${count(heat.first_step)}`), h("span", null, heat.column_steps > 1 ? `${count(heat.column_steps)} steps a column` : "a step a column"), h("span", null, count(heat.last_step)));
    drawScale(low, high);
    tellSlowest(heat);
    canvas.setAttribute("aria-label", `Times of ${heat.ranks.length} ranks over steps ${heat.first_step} to ${heat.last_step}. ${slowest.textContent} Arrow keys read cells.`);
    tell();
    root.dataset.drawn = String(heat.ranks.length);
  }

  function drawScale(low: number, high: number): void {
    const strip = h("canvas", { width: 64, height: 1, "aria-hidden": "true" });
    const context = strip.getContext("2d");
    for (let x = 0; x < 64 && context; x += 1) {
      context.fillStyle = `rgb(${shade(x / 63).join(",")})`;
      context.fillRect(x, 0, 1, 1);
    }
    fill(scale, brief(low), strip, `${brief(high)} or more`);
  }

  function tellSlowest(of_: Heat): void {
    const means = of_.ranks.map((rank, i) => {
      const values = of_.seconds[i].filter((value): value is number => value !== null);
      return { rank, mean: values.reduce((sum, value) => sum + value, 0) / (values.length || 1) };
    });
    const top = means.reduce((best, one) => (one.mean > best.mean ? one : best));
    const rest = means.filter((one) => one !== top);
    const usual = rest.length ? rest.reduce((sum, one) => sum + one.mean, 0) / rest.length : 0;
    slowest.textContent = rest.length && usual > 0 ? `Longest on average: rank ${top.rank}, ${brief(top.mean)}; the others ${brief(usual)}.` : "";
  }

  function tell(): void {
    if (!heat || !place) {
      readout.textContent = "Point at a cell, or move with the arrow keys, to read it.";
      return;
    }
    const [x, y] = place;
    const value = heat.seconds[y]?.[x];
    const first = heat.first_step + x * heat.column_steps;
    const last = Math.min(first + heat.column_steps - 1, heat.last_step);
    const steps = first === last ? `step ${count(first)}` : `steps ${count(first)} to ${count(last)}`;
    readout.textContent = `Rank ${heat.ranks[y]}, ${steps}: ${value === null || value === undefined ? "took no part" : brief(value)}`;
  }

  canvas.addEventListener("pointermove", (event) => {
    if (!heat) return;
    const box = canvas.getBoundingClientRect();
    place = [Math.min(canvas.width - 1, Math.floor(((event.clientX - box.left) / box.width) * canvas.width)), Math.min(canvas.height - 1, Math.floor(((event.clientY - box.top) / box.height) * canvas.height))];
    tell();
  });
  canvas.addEventListener("keydown", (event) => {
    const moves: Record<string, [number, number]> = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const move = moves[event.key];
    if (!move || !heat) return;
    event.preventDefault();
    const [x, y] = place ?? [-move[0], -move[1]];
    place = [Math.min(canvas.width - 1, Math.max(0, x + move[0])), Math.min(canvas.height - 1, Math.max(0, y + move[1]))];
    tell();
  });

  refresh();
  const stop = onTheme(draw);
  return { news: (changed) => (changed.includes("series") ? refresh() : undefined), close: stop };
}

/** From the least to what all but 2 % stay below: one slow step must not make all others look the same. */
function bounds(heat: Heat): [number, number] {
  const values = heat.seconds.flat().filter((value): value is number => value !== null).sort((a, b) => a - b);
  if (!values.length) return [0, 1];
  const low = values[0];
  const high = values[Math.min(values.length - 1, Math.floor(values.length * 0.98))];
  // Where all are alike, the map is of one colour rather than of noise.
  return [Math.min(low, high / 1.5), Math.max(high, 1e-9)];
}

function shade(share: number): [number, number, number] {
  const at = Math.min(0.9999, Math.max(0, share)) * (STOPS.length - 1);
  const [a, b] = [STOPS[Math.floor(at)], STOPS[Math.floor(at) + 1]];
  const part = at - Math.floor(at);
  return [0, 1, 2].map((i) => Math.round(a[i] + (b[i] - a[i]) * part)) as [number, number, number];
}
